"""How a model's template decides its format, and grammars of forced and strict calls read back by the same format."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from test_text import byte_level, write
from tokenizers import AddedToken

from kvasir_node.base.errors import UsageError
from kvasir_node.base.generation import GenerationRequest, JsonFormat, Tool, Tools, ToolUse
from kvasir_node.model.dialect import AnswerPlan, Dialect
from kvasir_node.model.harmony import MARKS, HarmonyReader
from kvasir_node.model.text import TextModel, TextStream
from kvasir_node.model.tools import Called, Piece, Said

PARAMETERS = {
    "type": "object",
    "properties": {"place": {"enum": ["here", "thére"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["place", "days"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
WEATHER, CLOCK = Tool("weather", "about", PARAMETERS), Tool("clock", None, NOTHING)
STRICT = Tool("weather", "about", PARAMETERS, strict=True)
FORMATS = {
    "tagged": ("<tool_call> {{ tools }}", ["<tool_call>", "</tool_call>"], False),
    "mistral": ("[TOOL_CALLS] {{ tools }}", ["[TOOL_CALLS]"], True),
    "mistral_args": ("[TOOL_CALLS] [ARGS] {{ tools }}", ["[TOOL_CALLS]", "[ARGS]"], True),
    "harmony": ("<|channel|> <|message|>", list(MARKS), True),
    "unknown": ("hello", [], False),
}


def text_model(folder: Path, template: str, marks: list[str], special: bool) -> TextModel:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in marks])
    return TextModel(write(folder, tokenizer, chat_template=template))


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, TextModel]:
    folder = tmp_path_factory.mktemp("dialects")
    return {name: text_model(folder / name, *about) for name, about in FORMATS.items()}


def request_with(**fields: Any) -> GenerationRequest:
    return GenerationRequest(prompt="x", **fields)


def drawn(text: TextModel, plan: AnswerPlan, seed: int, tokens_max: int = 400) -> list[Piece]:
    """An answer of tokens drawn among those that the grammar allows, read as the plan says."""
    assert plan.grammar is not None
    assert plan.reader is not None
    rng, matcher = random.Random(seed), plan.grammar.matcher()
    stream, reader = TextStream(text, (), plan.shown), plan.reader()
    pieces: list[Piece] = []
    for _ in range(tokens_max):
        token = rng.choice(matcher.allowed(text.vocabulary).nonzero().flatten().tolist())
        if token in text.end_tokens:
            break
        matcher.take(token)
        pieces += reader.push(stream.push((token,)))
        if matcher.ended:
            break
    pieces += reader.push(stream.finish()) + reader.finish()
    said = "".join(piece.text for piece in pieces if isinstance(piece, Said))
    return [*([Said(said)] if said else []), *(piece for piece in pieces if isinstance(piece, Called))]


@pytest.mark.parametrize("name", FORMATS)
def test_a_required_call_is_one_whatever_is_drawn(models, name):
    names = set()
    for seed in range(12):
        plan = Dialect(models[name]).plan(request_with(tools=Tools((WEATHER, CLOCK), ToolUse.REQUIRED)))
        (call,) = drawn(models[name], plan, seed)
        assert isinstance(call, Called)
        arguments = json.loads(call.arguments)
        names.add(call.name)
        if call.name == "weather":
            assert arguments["place"] in ("here", "thére")
            assert 1 <= arguments["days"] <= 9
        else:
            assert arguments == {}
    assert names == {"weather", "clock"}


@pytest.mark.parametrize("name", FORMATS)
def test_a_named_call_is_of_that_tool(models, name):
    plan = Dialect(models[name]).plan(request_with(tools=Tools((WEATHER, CLOCK), ToolUse.REQUIRED, "weather")))
    for seed in range(6):
        (call,) = drawn(models[name], plan, seed)
        assert isinstance(call, Called)
        assert call.name == "weather"


@pytest.mark.parametrize("name", ["tagged", "mistral"])
def test_a_format_beside_tools_allows_both(models, name):
    wanted = JsonFormat({"enum": ["yes", "no"]})
    plan = Dialect(models[name]).plan(request_with(tools=Tools((CLOCK,)), format=wanted))
    answers = {str(drawn(models[name], plan, seed)[0]) for seed in range(20)}
    assert answers <= {str(Said('"yes"')), str(Said('"no"')), str(Called("clock", "{}"))}
    assert len(answers) == 3


@pytest.mark.parametrize("name", ["tagged", "mistral", "mistral_args"])
def test_a_strict_tool_is_called_as_its_schema_says_or_not_at_all(models, name):
    text = models[name]
    plan = Dialect(text).plan(request_with(tools=Tools((STRICT,))))
    assert plan.grammar is not None
    matcher = plan.grammar.matcher()
    ends = list(text.end_tokens)
    for token in text.encode_part("so, "):
        matcher.take(token)
    assert matcher.allowed(text.vocabulary)[ends].all()  # free text may end anywhere
    opening = text.token_id(FORMATS[name][1][0])
    assert opening is not None
    matcher.take(opening)
    assert not matcher.allowed(text.vocabulary)[ends].any()
    body = {
        "tagged": '\n{"name": "weather", "arguments": {"place":',
        "mistral": '[{"name": "weather", "arguments": {"place":',
    }
    for token in text.encode_part(body.get(name, "weather")):
        matcher.take(token)
    if name == "mistral_args":
        matcher.take(text.token_id("[ARGS]"))
        for token in text.encode_part('{"place":'):
            matcher.take(token)
    allowed = {text.token_bytes(token)[:1] for token in matcher.allowed(text.vocabulary).nonzero().flatten().tolist()}
    assert allowed <= {b'"', b" ", b"\n"}


@pytest.mark.parametrize("name", ["harmony", "unknown"])
def test_strict_is_refused_where_it_could_not_be_kept(models, name):
    with pytest.raises(UsageError, match="leave out strict") as caught:
        Dialect(models[name]).plan(request_with(tools=Tools((STRICT,))))
    assert caught.value.param == "tools"


def test_without_anything_asked_for_text_is_text_but_for_harmony(models):
    for name, text in models.items():
        plan = Dialect(text).plan(request_with())
        assert plan.grammar is None
        if name == "harmony":
            assert plan.reader is HarmonyReader
            assert len(plan.shown) == len(MARKS)
        else:
            assert (plan.reader, plan.shown) == (None, frozenset())


def test_a_json_answer_of_harmony_stands_in_the_final_channel(models):
    plan = Dialect(models["harmony"]).plan(request_with(format=JsonFormat({"enum": [5]})))
    assert drawn(models["harmony"], plan, 1) == [Said("5")]


def test_a_tools_schema_that_cannot_be_had_is_refused_by_name(models):
    for name, text in models.items():
        with pytest.raises(UsageError) as caught:
            Dialect(text).plan(request_with(tools=Tools((Tool("f", None, {"type": "thing"}),), ToolUse.REQUIRED)))
        assert caught.value.param == "tools", name


def test_only_grammars_are_worth_a_thread(models):
    dialect = Dialect(models["tagged"])
    assert not dialect.needs_time(request_with())
    assert not dialect.needs_time(request_with(tools=Tools((WEATHER,))))
    assert dialect.needs_time(request_with(tools=Tools((STRICT,))))
    assert dialect.needs_time(request_with(tools=Tools((WEATHER,), ToolUse.REQUIRED)))
    assert dialect.needs_time(request_with(format=JsonFormat({})))


def test_the_template_sees_the_tools(tmp_path):
    template = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}{{ messages[0].content }}"
    text = text_model(tmp_path / "m", template, [], False)
    messages = [{"role": "user", "content": " hi"}]
    assert text.decode(text.chat(messages)) == " hi"
    assert text.decode(text.chat(messages, Tools((WEATHER, CLOCK)).documents())) == "weatherclock hi"
