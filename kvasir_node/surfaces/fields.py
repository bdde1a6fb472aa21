"""Checks of single fields of a request's body; each refusal names its parameter.

It does not know which parameters there are. `where` is the name as the caller would find it, such as
`messages[2].role`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvasir_node.base.errors import UsageError

SHOWN_MAX = 40  # characters of a number that came, in the message that refuses it


def number(given: Mapping[str, Any], name: str, default: float, fits: Callable[[float], bool], range_: str) -> float:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not fits(value):
        raise UsageError(f"{name} must be a number {range_}, got {shown(value)}", param=name)
    return float(value)


def integer(given: Mapping[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UsageError(f"{name} must be a whole number from {low} to {high}, got {shown(value)}", param=name)
    return value


def flag(given: Mapping[str, Any], name: str, where: str | None = None) -> bool:
    value = given.get(name)
    if value is not None and not isinstance(value, bool):
        raise UsageError(f"{where or name} must be true or false, got {shown(value)}", param=where or name)
    return bool(value)


def text(given: Mapping[str, Any], name: str, default: str | None, where: str | None = None) -> str:
    value = given.get(name, default)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UsageError(f"{where or name} must be text, got {kind(value)}", param=where or name)
    return unicode(value, where or name)


def object_of(value: Any, keys: Sequence[str], where: str) -> Mapping[str, Any]:
    """An object whose keys are all known; one whose value is null is as good as absent."""
    if not isinstance(value, dict):
        raise UsageError(f"{where} must be an object with {', '.join(keys)}; got {kind(value)}", param=where)
    given = {key: field for key, field in value.items() if field is not None}
    for key in given:
        if key not in keys:
            name = printable(key)
            raise UsageError(f"{name!r} in {where} is not supported", param=f"{where}.{name}")
    return given


def unicode(value: str, where: str) -> str:
    """JSON's escapes can spell half a surrogate pair, which is no character and cannot be encoded again."""
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UsageError(f"{where} holds half a surrogate pair at {error.start}", param=where) from error
    return value


def printable(name: str) -> str:
    """A stranger's name for something, as a message may repeat it."""
    return name[:60].encode("utf-8", "replace").decode()


def kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def shown(value: Any) -> str:
    """A number as it came, as far as it is short."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return kind(value)
    text = repr(value)
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}..."
