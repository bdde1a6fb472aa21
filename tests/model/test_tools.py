"""Calls of tools in growing text: every cut of an answer gives the same pieces, and nothing is lost."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_node.model.harmony import HarmonyReader
from kvasir_node.model.tools import MISTRAL, MISTRAL_ARGS, PLAIN, TAGGED, Called, CallFormat, Piece, Reader, Said


def read(reader: Reader, parts: list[str]) -> list[Piece]:
    """All pieces, neighbouring text joined."""
    pieces: list[Piece] = []
    for found in [*(reader.push(part) for part in parts), reader.finish()]:
        for piece in found:
            last = pieces[-1] if pieces else None
            if isinstance(piece, Said) and isinstance(last, Said) and piece.aloud == last.aloud:
                pieces[-1] = Said(last.text + piece.text, piece.aloud)
            else:
                pieces.append(piece)
    return pieces


HERMES = '<tool_call>\n{"name": "f", "arguments": {"x": [1, "ä"]}}\n</tool_call>'
F = Called("f", '{"x": [1, "ä"]}')
QWEN = (
    "<tool_call>\n<function=f>\n<parameter=place>\nNew\nYork\n</parameter>\n<parameter=n>\n3\n</parameter>\n"
    "</function>\n</tool_call>"
)
GLM = (
    "<tool_call>f\n<arg_key>place</arg_key>\n<arg_value>New\nYork</arg_value>\n"
    "<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)
NO_OBJECT = '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'
TAGGED_CASES: list[tuple[str, list[Piece]]] = [
    ("just text ", [Said("just text ")]),
    ("", []),
    (HERMES, [F]),
    (f"Sure.\n\n{HERMES}\n", [Said("Sure."), F]),
    (f"{HERMES}\n{HERMES}", [F, F]),
    (f"a {HERMES} b ", [Said("a"), F, Said("b ")]),
    (QWEN, [Called("f", '{"place": "New\\nYork", "n": 3}')]),
    (GLM, [Called("f", '{"place": "New\\nYork", "n": 3}')]),
    ("<tool_call>now</tool_call>", [Called("now", "{}")]),
    ('<tool_call>{"name": "f", "parameters": {}}</tool_call>', [Called("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', [Called("f", '{"x": 1}')]),
    ("a <tool_call> two words </tool_call> b", [Said("a<tool_call> two words </tool_call> b")]),
    ('<tool_call>{"name": 1}</tool_call>', [Said('<tool_call>{"name": 1}</tool_call>')]),
    (NO_OBJECT, [Said(NO_OBJECT)]),
    ("cut <tool_call>\n{", [Said("cut<tool_call>\n{")]),
    ("a < b <tool", [Said("a < b <tool")]),
    (f"{HERMES}\n \n", [F]),
]  # fmt: skip
OTHER_CASES: list[tuple[CallFormat, str, list[Piece]]] = [
    (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"x": [1, "ä"]}}, {"name": "g"}]', [F, Called("g", "{}")]),
    (MISTRAL, "no call [TOOL", [Said("no call [TOOL")]),
    (MISTRAL, 'well [TOOL_CALLS][{"name": "f"', [Said('well[TOOL_CALLS][{"name": "f"')]),
    (MISTRAL, '[TOOL_CALLS][{"name": "f"}, 1]', [Said('[TOOL_CALLS][{"name": "f"}, 1]')]),
    (MISTRAL_ARGS, '[TOOL_CALLS]f[ARGS]{"x": [1, "ä"]}[TOOL_CALLS]g[ARGS]{}', [F, Called("g", "{}")]),
    (MISTRAL_ARGS, "[TOOL_CALLS]f[ARGS]{", [Said("[TOOL_CALLS]f[ARGS]{")]),
    (PLAIN, '{"name": "f", "arguments": {"x": [1, "ä"]}}', [F]),
    (PLAIN, '{"name": "f", "argum', [Said('{"name": "f", "argum')]),
]  # fmt: skip
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}'
HARMONY_CASES: list[tuple[str, list[Piece]]] = [
    ("<|channel|>final<|message|>Hi < there", [Said("Hi < there")]),
    (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
        [Said("Hm.", aloud=False), Said("Yes.")],
    ),
    (
        f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{CALL}",
        [Said("Hm.", aloud=False), Called("f", '{"x": 1}')],
    ),
    (f"{CALL}<|call|>", [Called("f", '{"x": 1}')]),
    (" to=functions.f<|channel|>commentary json<|message|>{}", [Called("f", "{}")]),
    ("<|channel|>commentary<|message|>Let me look.<|end|>", [Said("Let me look.")]),
    (CALL[:-1], [Said(CALL[:-1])]),
    ("no channel", [Said("no channel")]),
    ("<|channel|>final<|message|>cut <|en", [Said("cut <|en")]),
]  # fmt: skip


def cuts(text: str) -> list[list[str]]:
    """A text whole, in characters, and cut in two at each place."""
    return [[text], list(text), *([text[:at], text[at:]] for at in range(len(text)))]


@pytest.mark.parametrize(("text", "pieces"), TAGGED_CASES)
def test_calls_between_tags(text, pieces):
    assert all(read(TAGGED.reader(), parts) == pieces for parts in cuts(text))


@pytest.mark.parametrize(("call_format", "text", "pieces"), OTHER_CASES)
def test_calls_to_the_answers_end(call_format, text, pieces):
    assert all(read(call_format.reader(), parts) == pieces for parts in cuts(text))


@pytest.mark.parametrize(("text", "pieces"), HARMONY_CASES)
def test_channels_of_harmony(text, pieces):
    assert all(read(HarmonyReader(), parts) == pieces for parts in cuts(text))


PARTS = [
    "<tool_call>",
    "</tool_call>",
    HERMES,
    "a",
    " ",
    "\n",
    "<",
    "{",
    "[TOOL_CALLS]",
    "[ARGS]",
    '{"name": "f"}',
    "ä",
]
MARKS = [
    "<|channel|>",
    "final",
    "analysis",
    "<|message|>",
    "<|end|>",
    "<|start|>",
    "assistant",
    "{}",
    " to=functions.f",
]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(PARTS + MARKS), max_size=14), st.integers(1, 9))
def test_how_an_answer_is_cut_changes_nothing_and_no_character_is_made_up(parts, step):
    text = "".join(parts)
    pieces_of = [text[at : at + step] for at in range(0, len(text), step)]
    for make in (TAGGED.reader, MISTRAL.reader, MISTRAL_ARGS.reader, PLAIN.reader, HarmonyReader):
        pieces = read(make(), pieces_of)
        assert pieces == read(make(), [text])
        for piece in pieces:
            if isinstance(piece, Said):
                assert "".join(piece.text.split()) in "".join(text.split()) or make is HarmonyReader
            else:
                assert isinstance(json.loads(piece.arguments), dict)


def test_text_that_cannot_be_a_call_is_not_held_back():
    reader = TAGGED.reader()
    assert reader.push("Hello") == [Said("Hello")]
    assert reader.push(" <to") == []
    assert reader.push("day> and") == [Said(" <today> and")]
    harmony = HarmonyReader()
    assert harmony.push("<|channel|>final<|message|>Hel") == [Said("Hel")]
    assert harmony.push("lo <") == [Said("lo ")]
    assert harmony.push("3") == [Said("<3")]
