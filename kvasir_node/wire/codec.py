"""Canonical CBOR in and out, bounded, with one spelling for each value.

It does not know what the fields mean: `Fields` only checks presence, type and range, and names the field
that is wrong. Whatever a peer may have written ends in Misbehaved, never in another exception.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import cbor2

from kvasir_node.base.errors import Misbehaved, RejectReason

T = TypeVar("T")
DEPTH_MAX = 8


def encode(value: Any) -> bytes:
    """Canonical CBOR (RFC 8949 §4.2) of maps with text keys, lists, text, bytes, numbers, booleans and None."""
    return cbor2.dumps(value, canonical=True)


def decode(data: bytes | memoryview, *, max_bytes: int, what: str) -> Any:
    """Reads one canonical value; raises Misbehaved when it is anything else."""
    if len(data) > max_bytes:
        raise Misbehaved(RejectReason.TOO_LARGE, f"{what} of {len(data)} bytes; at most {max_bytes} are read")
    raw = bytes(data)
    try:
        value = cbor2.loads(raw)
        _check_plain(value, DEPTH_MAX)
        spelled = encode(value)
    except (cbor2.CBORError, ValueError, TypeError, OverflowError, RecursionError, MemoryError, EOFError) as error:
        raise Misbehaved(RejectReason.BAD_MESSAGE, f"{what} is not CBOR that we read: {error}") from error
    if spelled != raw:
        raise Misbehaved(RejectReason.BAD_MESSAGE, f"{what} is not in canonical spelling")
    return value


def _check_plain(value: Any, depth: int) -> None:
    """Refuses tags, undefined, simple values, NaN, keys that are not text, and deep nesting."""
    if value is None or type(value) in (bool, int, str, bytes):
        return
    if type(value) is float:
        if math.isnan(value):
            raise ValueError("NaN")
    elif depth == 0:
        raise ValueError(f"nested deeper than {DEPTH_MAX}")
    elif type(value) is list:
        for item in cast("list[Any]", value):
            _check_plain(item, depth - 1)
    elif type(value) is dict:
        for key, item in cast("dict[Any, Any]", value).items():
            if type(key) is not str:
                raise ValueError("a key that is not text")
            _check_plain(item, depth - 1)
    else:
        raise ValueError(f"a value of type {type(value).__name__}")


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
        value = self._take(name)
        if type(value) is not str or len(value) > max_chars:
            raise self._wrong(name, f"text of at most {max_chars} characters", value)
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
