"""The API with a real model behind it: what must be refused, and what must be right."""

from __future__ import annotations

import json

import httpx
import pytest
import trio
from local_swarm import PROMPTS, node


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("api")


@pytest.fixture(scope="module")
def running(folder):
    flags = ["--slots", "2", "--queue", "2", "--log-level", "debug"]
    with node(folder, "node", "--role", "coordinator", *flags) as process:
        yield process


@pytest.fixture
def url(running):
    return running.ready["api"]


def complete(url: str, **fields: object) -> httpx.Response:
    body = {"model": "demo", "prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


@pytest.mark.parametrize(
    ("fields", "status", "param", "code"),
    [
        ({"model": "nope"}, 404, "model", "model_not_found"),
        ({"prompt": "word " * 3000}, 400, "prompt", "context_length_exceeded"),
        ({"prompt": [5000]}, 400, "prompt", None),
        ({"prompt": ""}, 400, "prompt", None),
        ({"temperature": -1}, 400, "temperature", None),
        ({"best_of": 3}, 400, "best_of", None),
    ],
)
def test_bad_input_is_refused_by_name_and_the_next_request_works(url, fields, status, param, code):
    answer = complete(url, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), error
    assert code in (None, error["code"])
    assert complete(url).status_code == 200


def test_bad_json_is_400(url):
    answer = httpx.post(f"{url}/v1/completions", content=b"{", headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_a_full_queue_is_429_with_retry_after_and_nothing_is_lost(url):
    codes: list[tuple[int, str | None]] = []

    async def one(client: httpx.AsyncClient) -> None:
        body = {"model": "demo", "prompt": PROMPTS[0], "max_tokens": 200}
        answer = await client.post(f"{url}/v1/completions", json=body, timeout=60)
        codes.append((answer.status_code, answer.headers.get("retry-after")))

    async with httpx.AsyncClient() as client, trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(one, client)
    served = [code for code, _ in codes if code == 200]
    refused = [retry for code, retry in codes if code == 429]
    assert len(served) == 4  # two slots, two places in the queue
    assert len(refused) == 4
    assert all(retry is not None and int(retry) >= 1 for retry in refused)
    assert complete(url).status_code == 200


def test_streamed_text_equals_the_whole_answer_and_the_last_chunk_carries_the_facts(url):
    whole = complete(url, max_tokens=40).json()
    body = {"model": "demo", "prompt": PROMPTS[0], "max_tokens": 40, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        data = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    chunks = [json.loads(line) for line in data[:-1]]
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    assert text == whole["choices"][0]["text"]
    facts = chunks[-1]["kvasir"]
    assert facts["remote_pairs"] == 0
    assert facts["local_pairs"] == whole["kvasir"]["local_pairs"] > 0


def test_seeded_sampling_is_repeatable_and_other_seeds_differ(url):
    texts = [complete(url, temperature=1, seed=seed, max_tokens=24).json()["choices"][0]["text"] for seed in (7, 7, 8)]
    assert texts[0] == texts[1] != texts[2]


def test_a_stop_string_ends_the_answer_and_never_shows(url):
    whole = complete(url, max_tokens=40).json()["choices"][0]["text"]
    stop = whole[10:14]
    answer = complete(url, max_tokens=40, stop=stop).json()["choices"][0]
    assert answer["text"] == whole[: whole.index(stop)]
    assert answer["finish_reason"] == "stop"


CANARY = "Zanzibarbarossa"


def test_no_text_of_a_prompt_or_an_answer_is_in_the_log_at_any_level(running, url, folder):
    said = complete(url, prompt=f"{CANARY} is a truth", max_tokens=40).json()["choices"][0]["text"]
    messages = [{"role": "system", "content": CANARY}, {"role": "user", "content": CANARY}]
    chat = {"model": "demo", "messages": messages, "max_tokens": 4, "stream": True, "stop": [CANARY]}
    assert "[DONE]" in httpx.post(f"{url}/v1/chat/completions", json=chat, timeout=60).text
    for refused in ({"prompt": f"{CANARY} " * 5000}, {"user": CANARY, "temperature": CANARY}, {CANARY: 1}):
        assert complete(url, **refused).status_code == 400
    lines = (folder / "node.log").read_text()
    assert CANARY not in lines
    assert said.strip()[:20] not in lines


def test_what_a_request_did_is_in_events_requests_experts_and_metrics(url):
    answer = complete(url, max_tokens=6).json()
    number, pairs = answer["kvasir"]["request"], answer["kvasir"]["local_pairs"]
    listed = httpx.get(f"{url}/kvasir/v1/requests").json()
    (ended,) = (each for each in listed["recent"] if each["request"] == number)
    assert (ended["outcome"], ended["answer_tokens"], ended["local_pairs"]) == ("length", 6, pairs)
    events = []
    with httpx.stream("GET", f"{url}/kvasir/v1/events", headers={"last-event-id": "0"}) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: "):
                events.append(json.loads(line[6:]))
                if (events[-1]["type"], events[-1].get("request")) == ("request.ended", number):
                    break
    assert [each["type"] for each in events if each.get("request") == number] == ["request.started", "request.ended"]
    assert {key: events[-1][key] for key in ended} == ended
    status, experts = (httpx.get(f"{url}/kvasir/v1/{name}").json() for name in ("status", "experts"))
    model = status["model"]
    assert (experts["model"]["id"], len(experts["layers"])) == (model["id"], model["layers"])
    assert {layer["where"] for layer in experts["layers"]} == {"h" * model["experts_per_layer"]}
    assert max(use for layer in experts["layers"] for use in layer["use"]) == 100
    metrics = httpx.get(f"{url}/metrics").text
    samples = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
    assert int(samples['kvasir_tokens_total{kind="answer"}']) == status["throughput"]["tokens_total"]
    assert int(samples['kvasir_requests_total{finish_reason="length"}']) >= 1
    assert int(samples["kvasir_time_to_first_token_seconds_count"]) >= 1
    assert int(samples["kvasir_inter_token_latency_seconds_count"]) >= 5
