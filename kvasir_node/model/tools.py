"""Calls of tools in an answer's text: how each family of models writes them and how they are read.

It does not know tokens beyond the names of special ones, requests, or what a tool does. A text that looks like a
call and is none stays text.

Formats (`dialect.py` finds a model's):
- `<tool_call>` … `</tool_call>`: JSON inside (Hermes, Qwen2.5 and 3), `<function=…><parameter=…>` (Qwen3-Coder,
  Qwen3.5), or a name and `<arg_key>`/`<arg_value>` pairs (GLM-4.5);
- `[TOOL_CALLS]` to the answer's end: a JSON list, or NAME`[ARGS]`JSON (Mistral's tokenizers before and since v11);
- gpt-oss' harmony, see `harmony.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Said:
    """Text for the reader; `aloud` False = the model's reasoning."""

    text: str
    aloud: bool = True


@dataclass(frozen=True, slots=True)
class Called:
    """A tool is called; `arguments` is the text of a JSON object."""

    name: str
    arguments: str


Piece = Said | Called


class Reader(Protocol):
    """Splits one answer's text as it grows. Text is given out as soon as it cannot be part of a call."""

    def push(self, text: str) -> list[Piece]: ...

    def finish(self) -> list[Piece]: ...


@dataclass(frozen=True, slots=True)
class CallFormat:
    """`opening` and `closing` surround a call; an empty closing = the answer's end, an empty opening = its start.

    `before` and `after` stand around a forced call's arguments, with {name} for the tool's name. `marks`: texts that
    may be special tokens of the tokenizer and must be seen here all the same. `parse` reads what stands between
    opening and closing; None = that is no call.
    """

    opening: str
    closing: str
    marks: tuple[str, ...]
    before: str
    after: str
    parse: Callable[[str], list[Called] | None]

    def reader(self) -> Reader:
        return CallReader(self)


class CallReader:
    """Reads the formats whose calls stand between two marks. White space around a call belongs to no one."""

    def __init__(self, call_format: CallFormat) -> None:
        self._format = call_format
        self._inside = not call_format.opening
        self._after_call = False
        self._held = ""

    def push(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while self._inside_step(pieces) if self._inside else self._outside_step(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        text, self._held = self._held, ""
        if self._inside and not self._format.closing:
            calls = self._format.parse(text)
            if calls is not None:
                return list(calls)
        text = self._format.opening + text if self._inside else text
        return [Said(text)] if text and not (self._after_call and text.isspace()) else []

    def _outside_step(self, pieces: list[Piece]) -> bool:
        text, mark = self._held, self._format.opening
        if self._after_call:
            text = text.lstrip()
        at = text.find(mark)
        end = at if at >= 0 else len(text) - _overlap(text, mark)
        said = text[:end].rstrip()
        if said or at >= 0:
            self._after_call = False
        self._held = text[at + len(mark) :] if at >= 0 else text[len(said) :]
        self._inside = at >= 0
        if said:
            pieces.append(Said(said))
        return self._inside

    def _inside_step(self, pieces: list[Piece]) -> bool:
        mark = self._format.closing
        at = self._held.find(mark) if mark else -1
        if at < 0:
            return False
        body, self._held = self._held[:at], self._held[at + len(mark) :]
        self._inside = False
        calls = self._format.parse(body)
        self._after_call = calls is not None
        pieces += calls if calls is not None else [Said(self._format.opening + body + mark)]
        return True


def _overlap(text: str, mark: str) -> int:
    """How many characters at the text's end may be the mark's beginning."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)


def _call_of(value: Any) -> Called | None:
    """A call as an object with a name and arguments (or parameters)."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # JSON within JSON
        arguments = _json(arguments)
    return Called(value["name"], _dump(arguments)) if isinstance(arguments, dict) else None


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _parse_object(body: str) -> list[Called] | None:
    call = _call_of(_json(body))
    return None if call is None else [call]


_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>\n?(.*?)(?:</function>)?\s*\Z", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
_NAMED = re.compile(r"\s*([^\s<>{]+)\s*((?:<arg_key>.*)?)\s*\Z", re.DOTALL)
_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


def _parse_tagged(body: str) -> list[Called] | None:
    """What stands between <tool_call> and </tool_call>."""
    if (found := _parse_object(body)) is not None:
        return found
    for whole, pair in ((_FUNCTION, _PARAMETER), (_NAMED, _PAIR)):
        match = whole.match(body)
        if match is not None and not pair.sub("", match[2]).strip():
            return [Called(match[1], _dump({key.strip(): _value(value) for key, value in pair.findall(match[2])}))]
    return None


def _value(text: str) -> Any:
    """These formats write texts without quotes, and everything else as JSON."""
    value = _json(text)
    return text if value is None and text.strip() != "null" else value


_ARGS = "[ARGS]"


def _parse_mistral(body: str) -> list[Called] | None:
    listed = _json(body)
    if isinstance(listed, list):
        calls = [_call_of(value) for value in listed]
    else:
        calls = [_parse_args(part) for part in body.split("[TOOL_CALLS]")]
    found = [call for call in calls if call is not None]
    return found if found and len(found) == len(calls) else None


def _parse_args(part: str) -> Called | None:
    name, mark, arguments = part.partition(_ARGS)
    return _call_of({"name": name.strip(), "arguments": arguments}) if mark and name.strip() else None


_OBJECT = '{{"name": "{name}", "arguments": '
TAGGED = CallFormat(
    "<tool_call>", "</tool_call>", ("<tool_call>", "</tool_call>"),
    "<tool_call>\n" + _OBJECT, "}}\n</tool_call>", _parse_tagged,
)  # fmt: skip
MISTRAL = CallFormat("[TOOL_CALLS]", "", ("[TOOL_CALLS]",), "[TOOL_CALLS][" + _OBJECT, "}}]", _parse_mistral)
MISTRAL_ARGS = CallFormat("[TOOL_CALLS]", "", ("[TOOL_CALLS]", _ARGS), "[TOOL_CALLS]{name}" + _ARGS, "", _parse_mistral)
PLAIN = CallFormat("", "", (), _OBJECT, "}}", _parse_object)
"""One JSON object and nothing else: how a call is forced from a model that has no format of its own."""
