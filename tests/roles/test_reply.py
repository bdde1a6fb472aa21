"""From tokens to events: text, scores, calls and ends, however stop strings and characters fall on tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from kvasir_node.base.generation import (
    AnswerEvent,
    FinishReason,
    GenerationRequest,
    TextDelta,
    TokenLogprob,
    Tool,
    ToolCall,
    Tools,
)
from kvasir_node.model.dialect import Dialect
from kvasir_node.model.jobs import AnswerTally, StepToken
from kvasir_node.model.sampling import TokenScores
from kvasir_node.model.text import TextModel
from kvasir_node.roles.reply import ChoiceWriter

TOOLS = Tools((Tool("f", None, {"type": "object"}),))


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> TextModel:
    return make_text(tmp_path_factory.mktemp("reply"))


def make_text(folder: Path) -> TextModel:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["stop stops the stopping tool call"], trainer)
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False), AddedToken("</tool_call>", normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "<tool_call>"}))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    return TextModel(folder)


def steps(tokens: list[int] | tuple[int, ...], last: FinishReason = FinishReason.LENGTH) -> list[StepToken]:
    """Every token scores -1 and names token 5 beside it; the last one ends the job, an end token is no text."""
    scores = TokenScores(-1.0, ((5, -2.0),))
    ends = [last if at == len(tokens) - 1 else None for at in range(len(tokens))]
    return [StepToken(1, t, end, AnswerTally(), t != 0, scores) for t, end in zip(tokens, ends, strict=True)]


def write(
    text: TextModel, given_steps: list[StepToken], **fields: Any
) -> tuple[list[AnswerEvent], FinishReason | None]:
    """All events, as a desk would send them, and the reason for the end."""
    request = GenerationRequest(prompt="x", **fields)
    writer = ChoiceWriter(text, request.stop, Dialect(text).plan(request), choice=3)
    events: list[AnswerEvent] = []
    for step in given_steps:
        events += writer.write(step)
        if step.finished is not None or writer.stopped:
            return events, writer.reason(step)
    return events, None


def text_of(events: list[AnswerEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def scores_of(events: list[AnswerEvent]) -> list[TokenLogprob]:
    return [scored for event in events if isinstance(event, TextDelta) for scored in event.logprobs]


def test_text_comes_with_the_scores_of_its_tokens(text):
    tokens = text.encode_part("the größe 日")
    events, reason = write(text, steps(tokens))
    scores = scores_of(events)
    assert (text_of(events), reason) == ("the größe 日", FinishReason.LENGTH)
    assert b"".join(scored.data for scored in scores) == "the größe 日".encode()
    assert len(scores) == len(tokens)
    assert {event.choice for event in events if isinstance(event, TextDelta)} == {3}
    assert scores[0].alternatives[0].data == text.token_label(5)
    for at, scored in enumerate(scores):
        assert scored.offset == len(b"".join(s.data for s in scores[:at]).decode("utf-8", "ignore"))


def test_an_end_token_is_neither_text_nor_scored(text):
    events, reason = write(text, steps((*text.encode_part("the"), 0), FinishReason.STOP))
    assert (text_of(events), reason) == ("the", FinishReason.STOP)
    assert b"".join(scored.data for scored in scores_of(events)) == b"the"


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from([*"stopé日 ", "stop", "sto", "ps", "🙂", "the"]), max_size=10),
    st.lists(st.sampled_from(["stop", "top", "日", "ps", "🙂the", "é"]), max_size=2),
    st.booleans(),
)
def test_scores_add_up_to_the_text_and_never_tell_of_what_a_stop_cut_off(text, pieces, stops, ends):
    whole = "".join(pieces)
    tokens = [*text.encode_part(whole), *([0] if ends else [])]
    if not tokens:
        return
    events, _ = write(text, steps(tokens, FinishReason.STOP if ends else FinishReason.LENGTH), stop=tuple(stops))
    shown = text_of(events)
    places = [whole.find(stop) + len(stop) for stop in stops if stop in whole]
    if not places:
        assert shown == whole
    else:
        assert shown == whole[: len(shown)]
        assert not any(stop in shown for stop in stops)
        assert len(shown) < min(places)
    scored = b"".join(each.data for each in scores_of(events))
    assert scored.decode("utf-8", "ignore").startswith(shown)
    assert all(each.offset < len(shown) or not places for each in scores_of(events))


def test_each_score_comes_as_soon_as_its_text_is_certain(text):
    request = GenerationRequest(prompt="x", stop=("stopping",))
    writer = ChoiceWriter(text, request.stop, Dialect(text).plan(request), choice=0)
    tokens = [text.encode_part(character)[0] for character in "a sto!"]
    events = [
        [(event.text, len(event.logprobs)) for event in writer.write(step) if isinstance(event, TextDelta)]
        for step in steps(tokens)
    ]
    assert events == [[("a", 1)], [(" ", 1)], [], [], [], [("sto!", 4)]]


def test_a_call_is_an_event_and_a_reason(text):
    answer = 'Well. <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call><tool_call>{"name": "f"}</tool_call>'
    events, reason = write(text, steps((*text.encode_part(answer), 0), FinishReason.STOP), tools=TOOLS)
    calls = [event for event in events if isinstance(event, ToolCall)]
    assert text_of(events) == "Well."
    assert [(call.name, call.arguments, call.number, call.choice) for call in calls] == [
        ("f", '{"x": 1}', 0, 3),
        ("f", "{}", 1, 3),
    ]
    assert reason is FinishReason.TOOL_CALLS
    assert len({call.id for call in calls}) == 2
    assert all(call.id.isalnum() and len(call.id) == 9 for call in calls)
    assert len(scores_of(events)) == len(text.encode_part(answer))  # those of calls come as well


def test_without_tools_a_call_is_text(text):
    answer = '<tool_call>{"name": "f"}</tool_call>'
    events, reason = write(text, steps((*text.encode_part(answer), 0), FinishReason.STOP))
    assert (text_of(events), reason) == (answer, FinishReason.STOP)


def test_a_call_cut_off_by_the_length_is_text(text):
    events, reason = write(text, steps(text.encode_part('<tool_call>{"name')), tools=TOOLS)
    assert (text_of(events), reason) == ('<tool_call>{"name', FinishReason.LENGTH)


def test_a_stop_string_on_the_last_token_is_a_stop(text):
    events, reason = write(text, steps(text.encode_part("the stop")), stop=("stop",))
    assert (text_of(events), reason) == ("the ", FinishReason.STOP)
