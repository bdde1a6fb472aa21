"""OpenAI's documents: what streams and what comes whole tell the same, for every kind of event."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvasir_node.base.generation import (
    Alternative,
    AnswerEvent,
    AnswerFacts,
    ChoiceEnded,
    Finished,
    FinishReason,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCall,
)
from kvasir_node.surfaces.answers import AnswerShape

SCORED = TokenLogprob(b"the", -0.5, (Alternative(b"the", -0.5), Alternative(b" \xe2\x82", -2.0)), 0)
PART = TokenLogprob(b"\xe2\x82", -1.5, (), 3)
END = Finished(FinishReason.LENGTH, 7, 9, AnswerFacts(local_pairs=3), choice=0, cached_tokens=5)
EVENTS: list[AnswerEvent] = [
    ReasoningDelta("hm", 1),
    TextDelta("the", 0, (SCORED,)),
    TextDelta("", 0, (PART,)),
    TextDelta("Let me see.", 1),
    ToolCall("abc123def", "f", '{"x": 1}', 0, 1),
    ToolCall("abc123deg", "g", "{}", 1, 1),
    ChoiceEnded(FinishReason.TOOL_CALLS, 1),
    TextDelta(" end", 0),
    END,
]


def shape(**changes: Any) -> AnswerShape:
    return AnswerShape(**{"chat": True, "id": "i", "created": 5, "model": "demo", "choices": 2, **changes})


def streamed(answer: AnswerShape, events: list[AnswerEvent], include_usage: bool) -> list[dict[str, Any]]:
    documents = list(answer.first(include_usage))
    for event in events:
        if isinstance(event, Finished):
            documents += answer.last(event, include_usage)
        elif isinstance(event, ChoiceEnded):
            documents.append(answer.choice_end(event, include_usage))
        else:
            documents.append(answer.delta(event, include_usage))
    return json.loads(json.dumps(documents))


def test_a_whole_chat_holds_text_thoughts_calls_and_scores():
    document = shape(logprobs=True).whole(EVENTS, END)
    first, second = document["choices"]
    assert (first["index"], first["finish_reason"], first["message"]["content"]) == (0, "length", "the end")
    assert "tool_calls" not in first["message"]
    assert first["logprobs"]["content"][0] == {
        "token": "the",
        "logprob": -0.5,
        "bytes": [116, 104, 101],
        "top_logprobs": [
            {"token": "the", "logprob": -0.5, "bytes": [116, 104, 101]},
            {"token": " \ufffd", "logprob": -2.0, "bytes": [32, 226, 130]},
        ],
    }
    assert (second["index"], second["finish_reason"]) == (1, "tool_calls")
    assert second["message"]["content"] == "Let me see."
    assert second["message"]["reasoning_content"] == "hm"
    assert second["message"]["tool_calls"] == [
        {"id": "abc123def", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
        {"id": "abc123deg", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    usage = {"prompt_tokens": 7, "completion_tokens": 9, "total_tokens": 16}
    assert document["usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 5}}
    assert document["kvasir"]["local_pairs"] == 3


def test_a_call_without_text_has_null_as_content():
    call = ToolCall("abc123def", "f", "{}", 0)
    end = Finished(FinishReason.TOOL_CALLS, 1, 2, AnswerFacts())
    (choice,) = shape(choices=1).whole([call, end], end)["choices"]
    assert choice["message"]["content"] is None


@pytest.mark.parametrize("include_usage", [False, True])
def test_a_streamed_chat_adds_up_to_the_whole_one(include_usage):
    answer = shape(logprobs=True)
    whole = json.loads(json.dumps(answer.whole(EVENTS, END)))
    documents = streamed(answer, EVENTS, include_usage)
    for index, choice in enumerate(whole["choices"]):
        chunks = [c for document in documents for c in document["choices"] if c["index"] == index]
        assert chunks[0]["delta"]["role"] == "assistant"
        assert "".join(c["delta"].get("content") or "" for c in chunks) == choice["message"]["content"]
        calls = [call for c in chunks for call in c["delta"].get("tool_calls", [])]
        assert [call.pop("index") for call in calls] == list(range(len(calls)))
        assert calls == choice["message"].get("tool_calls", [])
        thoughts = "".join(c["delta"].get("reasoning_content", "") for c in chunks)
        assert thoughts == choice["message"].get("reasoning_content", "")
        scores = [entry for c in chunks if c["logprobs"] for entry in c["logprobs"]["content"]]
        assert scores == choice["logprobs"]["content"]
        assert [c["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + [choice["finish_reason"]]
    assert documents[-1]["kvasir"] == whole["kvasir"]
    assert sum("kvasir" in document for document in documents) == 1
    if include_usage:
        assert documents[-1]["choices"] == []
        assert documents[-1]["usage"] == whole["usage"]
        assert all(document["usage"] is None for document in documents[:-1])


def test_a_plain_completion_has_the_old_shape_of_scores():
    answer = shape(chat=False, logprobs=True, choices=1)
    events = [event for event in EVENTS if event.choice == 0]
    (choice,) = answer.whole(events, END)["choices"]
    assert choice == {
        "index": 0,
        "text": "the end",
        "finish_reason": "length",
        "logprobs": {
            "tokens": ["the", "bytes:\\xe2\\x82"],
            "token_logprobs": [-0.5, -1.5],
            "top_logprobs": [{"the": -0.5, "bytes:\\x20\\xe2\\x82": -2.0}, {}],
            "text_offset": [0, 3],
        },
    }
    chunks = [c for document in streamed(answer, events, False) for c in document["choices"]]
    assert "".join(chunk["text"] for chunk in chunks) == "the end"
    assert [chunk["logprobs"] is not None for chunk in chunks] == [True, True, False, False]


def test_scores_that_nobody_asked_for_are_null():
    end = Finished(FinishReason.STOP, 1, 1, AnswerFacts())
    (choice,) = shape(choices=1).whole([TextDelta("a"), end], end)["choices"]
    assert choice["logprobs"] is None
