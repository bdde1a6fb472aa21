"""OpenAI's own client against a real node, as it comes: the answers are the demo model's, so only shapes can matter."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import openai
import pytest
from local_swarm import PROMPTS, node

import kvasir_node
from kvasir_node.model.text import TextModel

MESSAGES: Any = [{"role": "user", "content": PROMPTS[0]}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"enum": ["here", "there"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["place", "days"],
            "additionalProperties": False,
        },
    },
}
SCHEMA: Any = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["cat", "dog", "größer"]},
        "legs": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind", "legs"],
    "additionalProperties": False,
}


TEXT = TextModel(Path(kvasir_node.__file__).parent / "demo")
# The demo model, which never saw JSON, would fill every gap in it with line breaks and spaces.
NO_SPACES = {str(token): -100 for token in range(TEXT.vocabulary) if TEXT.token_bytes(token).isspace()}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("openai")
    with (
        node(folder, "node", "--role", "coordinator", "--slots", "3", "--queue", "8") as running,
        openai.OpenAI(base_url=f"{running.ready['api']}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def ask(client: openai.OpenAI, **more: Any) -> Any:
    fields: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "max_tokens": 16, "temperature": 0, **more}
    return client.chat.completions.create(**fields)


def joined(stream: Any) -> dict[int, dict[str, Any]]:
    """What the chunks of a stream add up to, by choice."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in stream:
        for choice in chunk.choices:
            one = choices.setdefault(choice.index, {"text": "", "reason": None, "logprobs": [], "calls": []})
            assert one["reason"] is None  # nothing comes after a choice's end
            one["text"] += choice.delta.content or ""
            one["reason"] = choice.finish_reason
            one["logprobs"] += choice.logprobs.content if choice.logprobs else []
            one["calls"] += choice.delta.tool_calls or []
    return choices


def test_models_and_a_chat(client):
    assert [model.id for model in client.models.list()] == ["demo"]
    answer = ask(client)
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.message.tool_calls is None
    assert (choice.finish_reason, choice.logprobs) == ("length", None)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 16


def test_a_completion_with_the_old_shape_of_logprobs(client):
    answer = client.completions.create(model="demo", prompt=PROMPTS[0], max_tokens=12, temperature=0, logprobs=2)
    (choice,) = answer.choices
    found = choice.logprobs
    assert "".join(found.tokens) == choice.text
    assert found.text_offset == [len("".join(found.tokens[:n])) for n in range(12)]
    for token, logprob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert len(top) == 2
        assert top[token] == logprob == max(top.values())  # greedy


def test_several_prompts_are_answered_as_if_each_came_alone(client):
    fields: dict[str, Any] = {"model": "demo", "max_tokens": 6, "temperature": 1, "seed": 4}
    alone = [client.completions.create(prompt=prompt, **fields).choices[0].text for prompt in PROMPTS[:4]]
    together = client.completions.create(prompt=list(PROMPTS[:4]), **fields)
    assert [(choice.index, choice.text) for choice in together.choices] == list(enumerate(alone))


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1, "seed": 5}])
def test_streamed_choices_and_logprobs_equal_the_whole_answer(client, sampling):
    fields = {**sampling, "n": 2, "logprobs": True, "top_logprobs": 3, "max_tokens": 20}
    whole = ask(client, **fields)
    streamed = joined(ask(client, **fields, stream=True))
    assert sorted(streamed) == [choice.index for choice in whole.choices] == [0, 1]
    for choice in whole.choices:
        one = streamed[choice.index]
        assert (one["text"], one["reason"]) == (choice.message.content, choice.finish_reason)
        assert one["logprobs"] == choice.logprobs.content
        assert bytes(b for entry in one["logprobs"] for b in entry.bytes).decode() == one["text"]
        assert all(len(entry.top_logprobs) == 3 for entry in one["logprobs"])
        assert all(-100 < entry.logprob <= 0 for entry in one["logprobs"])
    texts = {one["text"] for one in streamed.values()}
    assert len(texts) == (1 if sampling["temperature"] == 0 else 2)


def test_n_choices_share_their_prompt(client):
    one, three = ask(client, max_tokens=8), ask(client, max_tokens=8, n=3)
    assert three.usage.prompt_tokens == one.usage.prompt_tokens
    assert three.usage.completion_tokens == 3 * 8
    assert len({choice.message.content for choice in three.choices}) == 1
    pairs_of_a_token = one.kvasir["local_pairs"] / (one.usage.prompt_tokens + 7)
    assert three.kvasir["local_pairs"] == pairs_of_a_token * (one.usage.prompt_tokens + 3 * 7)


def test_more_choices_than_slots_all_come(client):
    answer = ask(client, n=8, temperature=1, seed=1, max_tokens=6)
    assert [choice.index for choice in answer.choices] == list(range(8))
    assert len({choice.message.content for choice in answer.choices}) > 4


def test_a_bias_and_penalties_change_what_comes(client):
    plain = ask(client, logprobs=True, max_tokens=24)
    first = plain.choices[0].logprobs.content[0].token
    (token,) = [token for token in range(TEXT.vocabulary) if TEXT.token_bytes(token) == first.encode()]
    banned = ask(client, logit_bias={str(token): -100}, logprobs=True, max_tokens=1)
    assert banned.choices[0].logprobs.content[0].token != first
    forced = ask(client, logit_bias={str(token): 100}, max_tokens=5)
    assert forced.choices[0].message.content == first * 5
    varied = ask(client, frequency_penalty=2, presence_penalty=2, logprobs=True, max_tokens=24)
    kinds = [len({entry.token for entry in one.choices[0].logprobs.content}) for one in (plain, varied)]
    assert kinds[1] >= kinds[0]
    assert varied.choices[0].message.content != plain.choices[0].message.content


@pytest.mark.parametrize("temperature", [0, 1])
def test_json_schema_answers_follow_their_schema(client, temperature):
    shape = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA, "strict": True}}
    fields = {"response_format": shape, "temperature": temperature, "seed": 3, "logit_bias": NO_SPACES}
    answer = ask(client, **fields, max_tokens=200)
    value = json.loads(answer.choices[0].message.content)
    assert answer.choices[0].finish_reason == "stop"
    assert set(value) == {"name", "kind", "legs"}
    assert len(value["name"]) <= 12
    assert value["kind"] in ("cat", "dog", "größer")
    assert len(value["legs"]) <= 3
    assert all(isinstance(leg, int) and 0 <= leg <= 99 for leg in value["legs"])
    streamed = joined(ask(client, **fields, max_tokens=200, stream=True))
    assert streamed[0]["text"] == answer.choices[0].message.content


def test_json_objects_begin_as_such(client):
    text = ask(client, response_format={"type": "json_object"}, n=2, max_tokens=30).choices[1].message.content
    assert text.lstrip().startswith("{")


@pytest.mark.parametrize("schema", [{"type": "thing"}, {"not": {}}, {"type": "string", "pattern": "(?=a)"}])
def test_a_schema_that_cannot_be_followed_is_refused_by_name(client, schema):
    shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            ask(client, response_format=shape, stream=stream)
        assert refused.value.param == "response_format"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_required_call_comes_as_one(client, choice):
    fields = {"tools": [TOOL], "tool_choice": choice, "logit_bias": NO_SPACES, "max_tokens": 100}
    answer = ask(client, **fields)
    (call,) = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.choices[0].message.content is None
    assert (call.type, call.function.name) == ("function", "weather")
    arguments = json.loads(call.function.arguments)
    assert arguments["place"] in ("here", "there")
    assert 1 <= arguments["days"] <= 9
    streamed = joined(ask(client, **fields, stream=True))[0]
    (again,) = streamed["calls"]
    assert (streamed["text"], streamed["reason"], again.index) == ("", "tool_calls", 0)
    assert again.function.arguments == call.function.arguments
    history = [*MESSAGES, answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    assert ask(client, messages=history, tools=[TOOL]).choices[0].message.content


def test_a_model_without_a_format_for_calls_just_talks(client):
    assert ask(client, tools=[TOOL]).choices[0].message.content == ask(client).choices[0].message.content


def test_a_call_that_is_cut_off_is_text(client):
    answer = ask(client, tools=[TOOL], tool_choice="required", max_tokens=3)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content.startswith('{"')


def test_a_bias_outside_of_the_vocabulary_is_refused_by_name(client):
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, logit_bias={"99999": 1})
    assert refused.value.param == "logit_bias"


def test_logprobs_are_those_of_a_distribution(client):
    entry = ask(client, logprobs=True, top_logprobs=20, max_tokens=1).choices[0].logprobs.content[0]
    mass = sum(math.exp(top.logprob) for top in entry.top_logprobs)
    assert 0.2 < mass <= 1.0001
    values = [top.logprob for top in entry.top_logprobs]
    assert values == sorted(values, reverse=True)
