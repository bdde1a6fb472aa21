"""Canonical CBOR in and out, bounded, with one spelling for each value.

It does not know what the fields mean: `Fields` only checks presence, type and range, and names the field
that is wrong. Whatever a peer may have written ends in Misbehaved, never in another exception.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import cbor2

from kvasir_node.base.errors import Misbehaved, RejectReason
from kvasir_node.wire.plain_cbor import check_plain

T = TypeVar("T")
ITEMS_MAX = 65_536  # of any value, however short ...
BYTES_PER_ITEM = 8  # ... and of a longer one as many as its bound in bytes allows at this density
_CONTROL_CHARS = frozenset(map(chr, (*range(0x20), *range(0x7F, 0xA0))))


def encode(value: Any) -> bytes:
    """Canonical CBOR (RFC 8949 §4.2) of maps with text keys, lists, text, bytes, numbers, booleans and None."""
    return cbor2.dumps(value, canonical=True)


def decode(data: bytes | memoryview, *, max_bytes: int, what: str) -> Any:
    """Reads one plain value in its canonical spelling; raises Misbehaved (too_large, bad_message) for all else.

    Time and memory are bounded by `max_bytes`: what the bytes say about lengths and counts is never believed.
    """
    if len(data) > max_bytes:
        raise Misbehaved(RejectReason.TOO_LARGE, f"{what} of {len(data)} bytes; at most {max_bytes} are read")
    raw = bytes(data)
    try:
        check_plain(raw, max(ITEMS_MAX, max_bytes // BYTES_PER_ITEM))
        value = cbor2.loads(raw)
        spelled = encode(value)
    except (cbor2.CBORError, ValueError) as error:
        raise Misbehaved(RejectReason.BAD_MESSAGE, f"{what} is not CBOR that we read: {error}") from error
    if spelled != raw:
        raise Misbehaved(RejectReason.BAD_MESSAGE, f"{what} is not in canonical spelling")
    return value


def is_plain_text(value: Any, max_chars: int) -> bool:
    """Whether it is text, short enough, and without control characters."""
    return type(value) is str and len(value) <= max_chars and _CONTROL_CHARS.isdisjoint(value)


class Fields:
    """Takes the fields of one decoded map one by one; `end` refuses what was not taken."""

    def __init__(self, value: Any, what: str) -> None:
        if type(value) is not dict:
            raise Misbehaved(RejectReason.BAD_MESSAGE, f"{what} must be a map; got {type(value).__name__}")
        self._left = dict(cast("dict[str, Any]", value))
        self._what = what

    def _wrong(self, name: str, expected: str, value: Any) -> Misbehaved:
        shown = repr(value)[:60]
        return Misbehaved(RejectReason.BAD_MESSAGE, f"{self._what}.{name} must be {expected}; got {shown}")

    def _take(self, name: str) -> Any:
        if name not in self._left:
            raise Misbehaved(RejectReason.BAD_MESSAGE, f"{self._what}.{name} is missing")
        return self._left.pop(name)

    def has(self, name: str) -> bool:
        return name in self._left

    def integer(self, name: str, low: int, high: int) -> int:
        value = self._take(name)
        if type(value) is not int or not low <= value <= high:
            raise self._wrong(name, f"a whole number from {low} to {high}", value)
        return value

    def number(self, name: str, low: float, high: float) -> float:
        value = self._take(name)
        if type(value) not in (int, float) or not low <= value <= high:
            raise self._wrong(name, f"a number from {low} to {high}", value)
        return float(value)

    def text(self, name: str, max_chars: int) -> str:
        """Text for logs and screens too, so it holds no control characters: a peer's name moves no cursor."""
        value = self._take(name)
        if not is_plain_text(value, max_chars):
            raise self._wrong(name, f"text of at most {max_chars} characters, none a control character", value)
        return value

    def binary(self, name: str, max_bytes: int) -> bytes:
        value = self._take(name)
        if type(value) is not bytes or len(value) > max_bytes:
            raise self._wrong(name, f"at most {max_bytes} bytes", value)
        return value

    def boolean(self, name: str) -> bool:
        value = self._take(name)
        if type(value) is not bool:
            raise self._wrong(name, "true or false", value)
        return value

    def items(self, name: str, max_count: int, read: Callable[[Any], T]) -> tuple[T, ...]:
        value = self._take(name)
        if type(value) is not list or len(cast("list[Any]", value)) > max_count:
            raise self._wrong(name, f"a list of at most {max_count} items", value)
        return tuple(read(item) for item in cast("list[Any]", value))

    def mapping(self, name: str) -> Fields:
        return Fields(self._take(name), f"{self._what}.{name}")

    def end(self) -> None:
        if self._left:
            raise Misbehaved(RejectReason.BAD_MESSAGE, f"{self._what} has unknown fields: {', '.join(self._left)[:80]}")
