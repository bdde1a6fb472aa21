"""Whether bytes are one plain CBOR value of bounded size, found out before anything is decoded.

It does not know what the value means, and it builds nothing: one pass over the heads of the items. It is there because
a decoder acts on tags while it decodes: by shared references (tags 28 and 29) 740 bytes made ours walk a structure for
10 s, and a regular expression (tag 35) of 200 kB took 0.5 s to compile (2 cores, cbor2 6.3.0).

Plain is: integers of 64 bits, bytes, text, lists, maps with text keys, false, true, null, and numbers but NaN; no
indefinite lengths, no tags, and at most DEPTH_MAX containers inside each other. Source: RFC 8949 §3.
"""

from __future__ import annotations

import math
import struct

DEPTH_MAX = 8
_UNSIGNED, _NEGATIVE, _BYTES, _TEXT, _LIST, _MAP, _TAG = range(7)
_SIMPLE = (20, 21, 22)  # false, true, null
_FLOATS = {25: struct.Struct(">e"), 26: struct.Struct(">f"), 27: struct.Struct(">d")}


def check_plain(raw: bytes, items_max: int) -> None:
    """Raises ValueError that says what is not plain, or not bounded; a count or a length is believed by nobody."""
    at = 0
    around: list[tuple[int, bool]] = []  # the containers that are open: items left, and whether it is a map
    left, in_map = 1, False
    for _ in range(items_max):
        if at >= len(raw):
            raise ValueError("it ends inside a value")
        major, extra = raw[at] >> 5, raw[at] & 31
        if in_map and left % 2 == 0 and major != _TEXT:
            raise ValueError("a key that is not text")
        if major > _MAP:
            at = _after_simple(raw, at, major, extra)
            value = 0
        else:
            at, value = _argument(raw, at + 1, extra)
        left -= 1
        if major in (_BYTES, _TEXT):
            if value > len(raw) - at:
                raise ValueError(f"a text of {value} bytes where {len(raw) - at} are left")
            at += value
        elif major in (_LIST, _MAP):
            if len(around) == DEPTH_MAX:
                raise ValueError(f"nested deeper than {DEPTH_MAX}")
            around.append((left, in_map))
            left, in_map = value << (major == _MAP), major == _MAP
            if left > len(raw) - at:
                raise ValueError(f"{left} items where {len(raw) - at} bytes are left")
        while left == 0 and around:
            left, in_map = around.pop()
        if left == 0:
            if at != len(raw):
                raise ValueError(f"{len(raw) - at} bytes after the value")
            return
    raise ValueError(f"more than {items_max} items")


def _argument(raw: bytes, at: int, extra: int) -> tuple[int, int]:
    """(where the argument ends, its value) of the head whose low five bits are `extra`."""
    if extra < 24:
        return at, extra
    if extra > 27:
        raise ValueError("an indefinite or reserved length")
    end = at + (1 << (extra - 24))
    if end > len(raw):
        raise ValueError("it ends inside a value")
    return end, int.from_bytes(raw[at:end], "big")


def _after_simple(raw: bytes, at: int, major: int, extra: int) -> int:
    if major == _TAG:
        raise ValueError("a tag")
    if extra in _SIMPLE:
        return at + 1
    shape = _FLOATS.get(extra)
    if shape is None:
        raise ValueError("undefined, or a simple value")
    end = at + 1 + shape.size
    if end > len(raw):
        raise ValueError("it ends inside a value")
    if math.isnan(shape.unpack_from(raw, at + 1)[0]):
        raise ValueError("NaN")
    return end
