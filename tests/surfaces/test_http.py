"""The API over real sockets: shapes, errors, streaming, and what a client that leaves sets free."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio
from surfaces_helpers import CHAT, COMPLETE, serve, settings_with, sse_documents, until

from kvasir_node.base.errors import BugError, CapacityError, DataError, UsageError
from kvasir_node.base.snapshot import STATUS_SCHEMA
from kvasir_node.surfaces.address import check_key_policy
from kvasir_node.surfaces.fake_node import FAKE_CARD, FAKE_PIECES, FakeNode, busy_snapshot, fake_snapshot
from kvasir_node.surfaces.log import ConsoleFormatter, JsonFormatter

TEXT = "".join(FAKE_PIECES)


def fake(**given: Any):
    flags = {key: given.pop(key) for key in list(given) if "__" in key}
    return FakeNode(settings_with(**flags), **given)


async def test_a_chat_answer_has_openais_shape():
    async with serve(fake()) as served:
        response = await served.chat("hello", max_tokens=3)
    document = response.json()
    assert response.status_code == 200
    assert (document["object"], document["model"]) == ("chat.completion", "demo")
    assert document["id"].startswith("chatcmpl-")
    choice = document["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    assert (choice["index"], choice["finish_reason"], len(document["choices"])) == (0, "stop", 1)
    usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    assert document["usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 0}}
    facts = ["local_pairs", "remote_pairs", "fallbacks", "hedges", "queue_ms", "prefill_ms", "decode_ms", "request"]
    assert list(document["kvasir"]) == facts


async def test_a_plain_completion_has_openais_shape():
    async with serve(fake()) as served:
        document = (await served.post(COMPLETE, prompt=[1, 2, 3], max_tokens=2)).json()
    assert document["object"] == "text_completion"
    assert document["choices"] == [
        {"index": 0, "text": "".join(FAKE_PIECES[:2]), "logprobs": None, "finish_reason": "length"}
    ]


@pytest.mark.parametrize("chat", [True, False])
async def test_streaming_says_the_same_as_not_streaming(chat):
    def text_of(choice):
        return choice["delta"].get("content", "") if chat else choice["text"]

    async with serve(fake(piece_s=0.01)) as served:
        ask = served.chat if chat else lambda **body: served.post(COMPLETE, prompt="hello", **body)
        whole = (await ask()).json()
        response = await ask(stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"] == "text/event-stream"
    assert response.text.startswith(": ")
    *chunks, done = sse_documents(response.text)
    assert done == "[DONE]"
    *content, usage = chunks
    choices = [chunk["choices"][0] for chunk in content]
    whole_choice = whole["choices"][0]
    assert "".join(map(text_of, choices)) == (whole_choice["message"]["content"] if chat else whole_choice["text"])
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert (choices[0].get("delta") or {}).get("role") == ("assistant" if chat else None)
    assert (usage["choices"], usage["usage"]) == ([], whole["usage"])
    assert usage["kvasir"].keys() == whole["kvasir"].keys()
    assert all(chunk["usage"] is None and "kvasir" not in chunk for chunk in content)
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_without_include_usage_the_facts_ride_on_the_finish_chunk():
    async with serve(fake()) as served:
        *chunks, done = sse_documents((await served.chat(stream=True)).text)
    assert done == "[DONE]"
    assert all("usage" not in chunk for chunk in chunks)
    assert ["kvasir" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


UNKNOWN_MODEL = b'{"model": "nope", "messages": [{"role": "user", "content": "x"}]}'
BAD_REQUESTS = [
    ("POST", CHAT, b"{", {}, 400, None, "invalid_json"),
    ("POST", CHAT, b'{"model": "demo"}', {}, 400, "messages", None),
    ("POST", CHAT, UNKNOWN_MODEL, {}, 404, "model", "model_not_found"),
    ("POST", COMPLETE, b'{"model": "demo", "prompt": "x", "echo": true}', {}, 400, "echo", "unsupported_parameter"),
    ("POST", COMPLETE, b"{}", {"content-type": "text/plain"}, 415, None, "unsupported_media_type"),
    ("POST", COMPLETE, b"x" * 5000, {}, 413, None, "request_too_large"),
    ("GET", "/v1/models/nope", b"", {}, 404, "model", "model_not_found"),
    ("GET", "/v1/models/", b"", {}, 404, "model", "model_not_found"),
    ("GET", CHAT, b"", {}, 405, None, "method_not_allowed"),
    ("DELETE", "/v1/models", b"", {}, 405, None, "method_not_allowed"),
    ("OPTIONS", CHAT, b"", {}, 405, None, "method_not_allowed"),
    ("GET", "/nope", b"", {}, 404, None, None),
    ("POST", "/nope", b"x" * 1_000_000, {}, 404, None, None),
    ("GET", "/v1/models", b"", {"host": "evil.example"}, 403, None, "host_not_allowed"),
    ("GET", "/v1/models", b"", {"host": "127.0.0.1@evil.example"}, 403, None, "host_not_allowed"),
    ("GET", "/v1/models", b"", {"origin": "https://evil.example"}, 403, None, "host_not_allowed"),
    ("GET", "/v1/models", b"", {"origin": "null"}, 403, None, "host_not_allowed"),
]


async def test_bad_requests_are_refused_in_openais_shape():
    async with serve(fake(api__body_bytes_max=4096)) as served:
        for method, path, body, headers, status, param, code in BAD_REQUESTS:
            sent = {"content-type": "application/json"} | headers
            response = await served.client.request(method, path, content=body, headers=sent)
            case = f"{method} {path} {body[:60]} {headers}"
            assert response.status_code == status, case
            error = response.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}, case
            assert (error["param"], error["code"]) == (param, code), case
            assert error["type"] in ("invalid_request_error", "permission_error"), case
        assert not served.node.requests
        assert (await served.chat()).status_code == 200  # and the server is none the worse


async def test_no_page_of_another_origin_may_read_an_answer():
    """CORS is off: an answer, also one to a browser's question beforehand, allows no origin."""
    ask = {"origin": "http://localhost:3000", "access-control-request-method": "POST"}
    async with serve(fake()) as served:
        answers = [await served.client.request(method, "/v1/models", headers=ask) for method in ("GET", "OPTIONS")]
    assert [each.status_code for each in answers] == [200, 405]
    assert not [name for each in answers for name in each.headers if name.startswith("access-control")]


@pytest.mark.parametrize("headers", [{"host": "localhost:1"}, {"host": "[::1]"}, {"origin": "http://localhost:3000"}])
async def test_loopback_names_may_ask(headers):
    async with serve(fake()) as served:
        assert (await served.client.get("/v1/models", headers=headers)).status_code == 200


async def test_a_prompt_beyond_the_context_is_refused_before_streaming():
    async with serve(fake(context=10)) as served:
        response = await served.chat("x" * 11, stream=True)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_is_429_with_retry_after(stream):
    node = fake(coordinator__slots=1, coordinator__queue=1, piece_s=60)
    async with serve(node) as served, trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(served.chat)
        await until(lambda: (node.busy, node.waiting) == (1, 1))
        response = await served.chat(stream=stream)
        nursery.cancel_scope.cancel()
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    assert response.json()["error"]["code"] == "rate_limit_exceeded"


SECRET = "/secret/path/weights.safetensors"
FAILURES = [
    (CapacityError("no worker holds slice 3:0-7"), 503, "no worker holds slice 3:0-7"),
    (DataError(f"bad hash in {SECRET}"), 500, "the model's data on this node is damaged; see the node's log"),
    (BugError(f"broken at {SECRET}"), 500, "internal error; see the node's log"),
    (ZeroDivisionError(SECRET), 500, "internal error; see the node's log"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("failure", "status", "message"), FAILURES)
async def test_failures_before_the_answer_show_no_insides(failure, status, message, stream):
    async with serve(fake(failure=failure)) as served:
        response = await served.chat(stream=stream)
    assert (response.status_code, response.json()["error"]["message"]) == (status, message)
    assert response.json()["error"]["type"] == "server_error"


@pytest.mark.parametrize(("failure", "status", "message"), FAILURES)
async def test_a_failure_in_the_middle_of_a_stream_ends_it_without_done(failure, status, message):
    node = fake(failure=failure, failure_at=1)
    async with serve(node) as served:
        response = await served.chat(stream=True)
        *chunks, error = sse_documents(response.text)
        assert (await served.chat()).status_code == status
    assert response.status_code == 200
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == FAKE_PIECES[0]
    assert error["error"]["message"] == message
    assert (node.busy, node.left_early_count) == (0, 2)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("queued", [False, True])
async def test_a_client_that_leaves_frees_its_place(stream, queued):
    node = fake(coordinator__slots=1, piece_s=60)
    async with serve(node) as served, trio.open_nursery() as nursery:
        if queued:
            nursery.start_soon(served.chat)
            await until(lambda: node.busy == 1)
        with trio.move_on_after(0.2):
            await served.chat(stream=stream)
        await until(lambda: node.left_early_count == 1, timeout_s=1.0)
        assert (node.busy, node.waiting) == (int(queued), 0)
        nursery.cancel_scope.cancel()


async def test_heartbeats_fill_the_wait():
    node = fake(api__heartbeat_s=0.05, piece_s=0.3, pieces=("late",))
    async with serve(node) as served:
        response = await served.chat(stream=True)
    assert response.text.count(": heartbeat\n\n") >= 4
    assert sse_documents(response.text)[-1] == "[DONE]"


async def test_models_are_found_by_name_and_by_id():
    async with serve(fake()) as served:
        listed = (await served.client.get("/v1/models")).json()
        by_name = (await served.client.get("/v1/models/demo")).json()
        by_id = (await served.client.get(f"/v1/models/{FAKE_CARD.id}")).json()
        answer = (await served.chat(model=FAKE_CARD.id)).json()
    assert listed == {"object": "list", "data": [by_name]}
    assert by_name == by_id
    assert (by_name["id"], by_name["object"], answer["model"]) == ("demo", "model", "demo")


async def test_status_peers_and_demand_are_parts_of_the_snapshot():
    node = fake()
    node.status = busy_snapshot()
    async with serve(node) as served:
        status = (await served.client.get("/kvasir/v1/status")).json()
        peers = (await served.client.get("/kvasir/v1/peers")).json()
        demand = (await served.client.get("/kvasir/v1/demand")).json()
    assert (status["schema"], status["warnings"]) == (STATUS_SCHEMA, list(busy_snapshot().warnings))
    assert (peers["schema"], peers["workers"], peers["net"]) == ("kvasir.peers/1", status["workers"], status["net"])
    assert (demand["schema"], demand["demand"]) == ("kvasir.demand/1", status["hub"]["demand"])


async def test_a_worker_is_paused_and_resumed_and_the_status_says_why():
    node = fake()
    async with serve(node) as served:
        assert (await served.client.get("/kvasir/v1/pause")).status_code == 405
        paused = (await served.client.post("/kvasir/v1/pause")).json()
        assert (paused["schema"], paused["worker"]["state"]) == (STATUS_SCHEMA, "paused")
        assert paused["worker"]["reason"] == "paused by its owner"
        assert (await served.client.post("/kvasir/v1/resume")).json()["worker"]["reason"] == ""
        node.status = fake_snapshot(worker=None)
        refused = await served.client.post("/kvasir/v1/pause")
        assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")


async def test_a_drain_refuses_new_requests_and_tells_load_balancers_and_only_the_process_ends_it():
    async with serve(fake()) as served:
        post = served.client.post
        drained = (await post("/kvasir/v1/drain")).json()
        assert (drained["schema"], drained["draining"]) == (STATUS_SCHEMA, True)
        assert (await served.chat()).status_code == 503
        health = await served.client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "draining")
        for verb in ("stop", "restart"):
            assert (await post(f"/kvasir/v1/{verb}")).status_code == 202
        assert served.life.asked == ["stop", "restart"]
        served.life.refusal = UsageError("setting coordinator.slots must be a whole number")
        refused = await post("/kvasir/v1/restart")
        assert (refused.status_code, "coordinator.slots" in refused.json()["error"]["message"]) == (400, True)


@pytest.mark.parametrize("path", ["/health", "/v1/health"])
async def test_health_fails_only_when_a_coordinator_has_no_model(path):
    node = fake()
    async with serve(node) as served:
        assert (await served.client.get(path)).status_code == 200
        node.status = fake_snapshot(model=None)
        assert (await served.client.get(path)).status_code == 503
        node.status = fake_snapshot(model=None, roles=("worker",))
        assert (await served.client.get(path)).status_code == 200


async def test_a_key_is_asked_of_everyone_but_health_checks():
    async with serve(fake(api__key="s\u00e9same")) as served:
        get = served.client.get
        assert (await get("/health")).status_code == 200
        for headers in ({}, {"authorization": "Bearer no"}, {"authorization": "Basic s\u00e9same".encode()}):
            response = await get("/v1/models", headers=headers)
            assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
        assert (await get("/v1/models", headers={"authorization": "Bearer s\u00e9same".encode()})).status_code == 200


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:9480", "192.0.2.1:80", "example.org:80"])
def test_no_public_api_without_a_key(listen):
    with pytest.raises(UsageError, match="KVASIR_API__KEY"):
        check_key_policy(listen, "")
    check_key_policy(listen, "key")


async def test_text_beyond_ascii_arrives_whole():
    pieces = ("na\u00efve ", "\U0001f9ca", "\u2028line\n")
    async with serve(fake(pieces=pieces)) as served:
        assert (await served.chat()).json()["choices"][0]["message"]["content"] == "".join(pieces)
        chunks = sse_documents((await served.chat(stream=True)).text)[:-1]
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "".join(pieces)
    assert json.dumps(chunks)


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_library_says_of_a_prompt_is_not_logged_but_its_kind_and_place_are(caplog, stream):
    failure = ValueError("cannot read 'my secret prompt'")
    async with serve(fake(failure=failure, failure_at=1)) as served:
        await served.chat("my secret prompt", stream=stream)
    (record,) = [each for each in caplog.records if each.name.endswith("surfaces.http")]
    for shown in (JsonFormatter().format(record), ConsoleFormatter().format(record)):
        assert "secret" not in shown
        assert "ValueError" in shown
        assert "fake_node.py" in shown
