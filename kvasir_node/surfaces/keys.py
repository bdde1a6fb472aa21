"""Bytes that a terminal sends, as names of keys. It does not know what a key does."""

from __future__ import annotations

import codecs

ESCAPE = "esc"
PASTE = "paste:"
PASTED_MAX = 200  # characters
_PASTE_BEGINS, _PASTE_ENDS = "\x1b[200~", "\x1b[201~"
_NAMED = {
    "\t": "tab",
    "\r": "enter",
    "\n": "enter",
    "\x0c": "redraw",
    "\x7f": "backspace",
    "\b": "backspace",
    "\x1b[A": "up",
    "\x1b[B": "down",
    "\x1b[C": "right",
    "\x1b[D": "left",
    "\x1bOA": "up",
    "\x1bOB": "down",
    "\x1bOC": "right",
    "\x1bOD": "left",
    "\x1b[Z": "shift-tab",
    "\x1b[5~": "page-up",
    "\x1b[6~": "page-down",
    "\x1b[H": "home",
    "\x1b[F": "end",
    "\x1b[1~": "home",
    "\x1b[4~": "end",
}
_SEQUENCE_MAX = 16  # characters


class KeyReader:
    """Takes bytes as they come; a key whose bytes are not all there waits for the rest, or for `rest`."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("ignore")
        self._waiting = ""
        self._pasted: str | None = None  # what has come of a paste that is under way

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting)

    def feed(self, data: bytes) -> list[str]:
        """Names of keys, or characters; PASTE and its text for what was pasted, whatever keys that would be.

        Sequences of keys that have no name here are dropped.
        """
        text = self._waiting + self._decoder.decode(data)
        keys: list[str] = []
        while text and (length := _length(text)):
            key, text = text[:length], text[length:]
            keys += self._keys_of(key)
        self._waiting = text
        return keys

    def _keys_of(self, key: str) -> list[str]:
        if key == _PASTE_BEGINS:
            self._pasted = ""
        elif key == _PASTE_ENDS:
            pasted, self._pasted = self._pasted, None
            return [PASTE + pasted] if pasted else []
        elif self._pasted is not None:
            self._pasted = (self._pasted + key)[:PASTED_MAX] if key.isprintable() else self._pasted
        elif key in _NAMED:
            return [_NAMED[key]]
        elif key.isprintable():
            return [key]
        return []

    def rest(self) -> list[str]:
        """No more bytes came for a while: what waits is the key Esc, or nothing."""
        keys = [ESCAPE] if self._waiting == "\x1b" else []
        self._waiting = ""
        return keys


def _length(text: str) -> int:
    """Of the first key, in characters; 0 = not all of it has come."""
    if text[0] != "\x1b":
        return 1
    if len(text) == 1:
        return 0
    if text[1] not in "[O":
        return 1 if text[1] == "\x1b" else 2  # Alt and a key
    for at in range(2, min(len(text), _SEQUENCE_MAX)):
        if "@" <= text[at] <= "~":
            return at + 1
    return 0 if len(text) < _SEQUENCE_MAX else _SEQUENCE_MAX
