"""Readers of single values of control messages: names, addresses, models, slices, counts.

It does not know which message a value is of. Each takes what `codec.decode` gave and returns the checked value, or
raises Misbehaved that names what was expected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from kvasir_node.base.errors import DataError, Misbehaved, RejectReason, UsageError
from kvasir_node.base.ids import ModelId, PeerId, SliceId, parse_cid, parse_slice
from kvasir_node.wire.codec import is_plain_text

ADDRESSES_MAX = 16
COUNT_MAX = 1 << 20
DTYPES = ("float32", "bfloat16", "int8")  # that experts are computed in; int8 = of their weights alone
NAME_CHARS_MAX = 128
_ADDRESS_CHARS_MAX = 256
_PEER_CHARS_MAX = 64


def bad(expected: str, value: Any) -> Misbehaved:
    return Misbehaved(RejectReason.BAD_MESSAGE, f"expected {expected}; got {repr(value)[:60]}")


def read_text(value: Any, max_chars: int) -> str:
    if not is_plain_text(value, max_chars):
        raise bad(f"text of at most {max_chars} characters, none a control character", value)
    return value


def read_address(value: Any) -> str:
    text = read_text(value, _ADDRESS_CHARS_MAX)
    if not text.startswith("/"):
        raise bad("a multiaddr", value)
    return text


def read_peer(value: Any) -> PeerId:
    return PeerId(read_text(value, _PEER_CHARS_MAX))


def read_model(value: Any) -> ModelId:
    try:
        return ModelId(parse_cid(read_text(value, 64)))
    except DataError as error:
        raise bad("a model id", value) from error


def read_dtype(value: str) -> str:
    if value not in DTYPES:
        raise bad(f"one of {', '.join(DTYPES)}", value)
    return value


def read_slice(value: Any) -> SliceId:
    try:
        return parse_slice(read_text(value, 32))
    except UsageError as error:
        raise bad("a slice", value) from error


def read_number(value: Any, high: float) -> float:
    if type(value) not in (int, float) or not 0 <= value <= high:
        raise bad(f"a number from 0 to {high:g}", value)
    return float(value)


def read_integer(value: Any, high: int) -> int:
    if type(value) is not int or not 0 <= value <= high:
        raise bad(f"a whole number from 0 to {high}", value)
    return value


def read_bytes(value: Any) -> bytes:
    if type(value) is not bytes:
        raise bad("bytes", value)
    return value


def read_row(value: Any, length: int, what: str) -> list[Any]:
    """A list of exactly `length` values."""
    if type(value) is not list or len(cast("list[Any]", value)) != length:
        raise bad(what, value)
    return cast("list[Any]", value)


def no_repeats(what: str, values: Sequence[object]) -> None:
    if len(set(values)) != len(values):
        raise Misbehaved(RejectReason.BAD_MESSAGE, f"a {what} is listed twice among {len(values)}")


def cut_addresses(addresses: Sequence[str]) -> list[str]:
    return list(addresses[:ADDRESSES_MAX])
