"""gpt-oss' answers: messages in channels, of which some are thoughts, some calls of tools, one the answer.

It does not know tokens: its marks are special tokens that the caller lets through as text. Source: "OpenAI harmony
response format" (OpenAI cookbook, 2025): analysis = reasoning, commentary = calls and preambles, final = the answer;
a call is addressed `to=functions.NAME`, in the header's first or second part.
"""

from __future__ import annotations

import json
import re

from kvasir_node.model.tools import Called, Piece, Said

MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
FINAL = "<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_END = re.compile("|".join(map(re.escape, _ENDS)))
_CHANNEL = re.compile(r"<\|channel\|>\s*([a-z]+)")
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
_LONGEST_MARK = max(map(len, _ENDS))


class HarmonyReader:
    """Reads one answer; what follows the prompt's own `<|start|>assistant`."""

    def __init__(self) -> None:
        self._held = ""
        self._header: str | None = None  # of the message that is being read; None = it is still to come

    def push(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while self._header_step() if self._header is None else self._body_step(self._header, pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        text, self._held = self._held, ""
        header, self._header = self._header, None
        if header is None:  # what never became a message is shown as it is, unless it is a bare mark
            return [] if text in ("", *MARKS) else [Said(text)]
        return _pieces(header, text, whole=True)

    def _header_step(self) -> bool:
        at = self._held.find(_MESSAGE)
        if at < 0:
            return False
        self._header, self._held = self._held[:at], self._held[at + len(_MESSAGE) :]
        return True

    def _body_step(self, header: str, pieces: list[Piece]) -> bool:
        end = _END.search(self._held)
        if end is not None:
            pieces += _pieces(header, self._held[: end.start()], whole=True)
            # A start mark belongs to the next header.
            self._held = self._held[end.start() if end[0] == "<|start|>" else end.end() :]
            self._header = None
        elif _RECIPIENT.search(header) is None:
            certain = len(self._held) - _beginning_of_a_mark(self._held)
            pieces += _pieces(header, self._held[:certain], whole=False)
            self._held = self._held[certain:]
        return end is not None


def _pieces(header: str, text: str, *, whole: bool) -> list[Piece]:
    recipient = _RECIPIENT.search(header)
    if recipient is not None and whole:
        return [Called(recipient[1], text) if _is_object(text) else Said(header + _MESSAGE + text)]
    channel = _CHANNEL.search(header)
    return [Said(text, aloud=channel is None or channel[1] != "analysis")] if text else []


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _beginning_of_a_mark(text: str) -> int:
    """How many characters at the text's end may begin one of the ends."""
    for count in range(min(_LONGEST_MARK - 1, len(text)), 0, -1):
        if any(mark.startswith(text[-count:]) for mark in _ENDS):
            return count
    return 0
