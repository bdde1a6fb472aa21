"""Grammars over tokens: what is allowed at each step, ends, and schemas that cannot be had."""

from __future__ import annotations

import json
import random

import pytest
import torch
from test_text import TEMPLATE, byte_fallback, byte_level, write

from kvasir_node.base.errors import UsageError
from kvasir_node.model.grammar import SCHEMA_CHARACTERS_MAX, GrammarCompiler, GrammarMatcher
from kvasir_node.model.text import TextModel

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["cat", "größer"]},
        "legs": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback"])
def text(request, tmp_path_factory) -> TextModel:
    folder = tmp_path_factory.mktemp("grammar")
    if request.param == "byte_level":
        return TextModel(write(folder / "m", byte_level(), chat_template=TEMPLATE))
    return TextModel(write(folder / "m", byte_fallback(), bos_token="<s>"))


@pytest.fixture(scope="module")
def compiler(text) -> GrammarCompiler:
    return GrammarCompiler(text)


def accepts(text: TextModel, matcher: GrammarMatcher, answer: bytes) -> bool:
    """Follows an answer byte by byte, as every byte is a token of its own in both vocabularies."""
    token_of = {text.token_bytes(token): token for token in reversed(range(text.vocabulary))}
    for byte in answer:
        if matcher.ended:
            return False
        matcher.take(token_of[bytes([byte])])
    try:
        return bool(matcher.allowed(text.vocabulary)[list(text.end_tokens)].all())
    except UsageError:
        return False


@pytest.mark.parametrize(
    ("answer", "is_right"),
    [
        ('{"name":"Tom","kind":"cat"}', True),
        ('{"name": "Tom",\n  "kind": "größer", "legs": [1, 22]}', True),
        ('{"name":"Tom"}', False),
        ('{"name":"Thomas the cat","kind":"cat"}', False),
        ('{"name":"Tom","kind":"dog"}', False),
        ('{"name":"Tom","kind":"cat","legs":[1,2,3,4]}', False),
        ('{"name":"Tom","kind":"cat","more":1}', False),
        ('{"name":"Tom",  "kind":"cat"}', False),  # white space that no model is trained to write
        ("[]", False),
        ("", False),
    ],
)
def test_answers_are_those_of_the_schema(text, compiler, answer, is_right):
    assert accepts(text, compiler.json(SCHEMA, "response_format").matcher(), answer.encode()) is is_right


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_drawn_among_what_is_allowed_is_right(text, compiler, seed):
    rng = random.Random(seed)
    matcher = compiler.json(SCHEMA, "response_format").matcher()
    tokens: list[int] = []
    while not matcher.ended and len(tokens) < 2000:
        allowed = matcher.allowed(text.vocabulary + 5)
        assert not allowed[text.vocabulary :].any()
        tokens.append(rng.choice(allowed.nonzero().flatten().tolist()))
        matcher.take(tokens[-1])
    value = json.loads(text.decode(tokens))
    assert value["kind"] in ("cat", "größer")
    assert set(value) <= {"name", "kind", "legs"}


def test_readings_of_one_grammar_do_not_disturb_each_other(text, compiler):
    grammar = compiler.json(SCHEMA, "response_format")
    first, second = grammar.matcher(), grammar.matcher()
    before = second.allowed(text.vocabulary)
    first.take(int(before.nonzero()[0]))
    assert not torch.equal(first.allowed(text.vocabulary), before)
    assert torch.equal(second.allowed(text.vocabulary), before)


def test_special_tokens_are_no_way_around_a_grammar(text, compiler):
    matcher = compiler.json({"type": "string"}, "response_format").matcher()
    matcher.take(next(t for t in range(text.vocabulary) if text.token_bytes(t) == b'"'))
    assert not matcher.allowed(text.vocabulary)[list(text.special_tokens)].any()


def test_a_token_that_was_not_allowed_shows_at_the_next_step(text, compiler):
    matcher = compiler.json({"type": "integer"}, "response_format").matcher()
    matcher.take(next(t for t in range(text.vocabulary) if text.token_bytes(t) == b"x"))
    assert not matcher.ended
    with pytest.raises(UsageError, match="could not be kept to response_format") as caught:
        matcher.allowed(text.vocabulary)
    assert caught.value.param == "response_format"


def nested(depth: int) -> dict[str, object]:
    schema: dict[str, object] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "thing"}, "Invalid type"),
        ({"not": {}}, "Unimplemented keys"),
        ({"not": {}, "x-guidance": {"lenient": True}}, "Unimplemented keys"),
        ({"type": "string", "pattern": "(?=a)"}, "look-ahead"),
        ({"$ref": "http://example.com/schema"}, "does not fetch"),
        ({"$ref": "#/nowhere"}, "response_format cannot be compiled"),
        ({"properties": 3}, "properties must be an object"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable"),
        (nested(300), "recursion limit"),
        (nested(20_000), "nested too deeply"),
        ({"enum": ["x" * SCHEMA_CHARACTERS_MAX]}, "65536 characters"),
    ],
)
def test_a_schema_that_cannot_be_had_is_refused_with_its_parameter(compiler, schema, reason):
    with pytest.raises(UsageError, match=reason) as caught:
        compiler.json(schema, "response_format")
    assert caught.value.param == "response_format"
    assert "start:" not in str(caught.value)  # our own grammar around it says nothing to the caller


def test_a_model_without_end_tokens_still_ends_what_is_complete(tmp_path):
    folder = write(tmp_path / "m", byte_level())
    (folder / "config.json").write_text("{}")
    text = TextModel(folder)
    assert not text.end_tokens
    matcher = GrammarCompiler(text).json({"enum": ["a"]}, "response_format").matcher()
    for byte in b'"a"':
        token = next(t for t in range(text.vocabulary) if text.token_bytes(t) == bytes([byte]))
        assert matcher.allowed(text.vocabulary)[token]
        matcher.take(token)
    assert matcher.ended
