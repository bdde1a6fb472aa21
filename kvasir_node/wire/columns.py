"""Lists of slices, and of numbers beside them, in few bytes.

It does not know what the numbers count. The slices of a model lie side by side and most numbers are like their
neighbours', so both are spelled as runs of varints (7 bits a byte, the lowest first, no byte more than needed):

    numbers   for each run of equal ones: 2n when it is one, else 2n + 1 and its length - 2
    slices    ascending; for each run of neighbours of one width in one layer: the layer beyond that of the run before,
              the first expert (in the same layer: beyond the first expert of that run's last slice),
              the width - 1, the number of slices - 1

Every list has one spelling, and what lengths a reader may be told is bounded before anything is built.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from kvasir_node.base.errors import Misbehaved, RejectReason
from kvasir_node.base.ids import SliceId

INDEX_MAX = 999_999  # of a layer, or of an expert in it: six digits, as in a slice's text
_VARINT_BYTES_MAX = 5


def spell_numbers(numbers: Iterable[int]) -> bytes:
    """Whole numbers from 0 on, below 2^31."""
    out = bytearray()
    for number, run in groupby(numbers):
        length = sum(1 for _ in run)
        _put(out, 2 * number + (length > 1))
        if length > 1:
            _put(out, length - 2)
    return bytes(out)


def read_numbers(data: bytes, count: int, most: int) -> list[int]:
    """Exactly `count` numbers of at most `most` each; raises Misbehaved for another list or another spelling."""
    found: list[int] = []
    values = iter(_varints(data))
    for value in values:
        number = value >> 1
        length = next(values, count) + 2 if value & 1 else 1
        if number > most or length > count - len(found):
            raise _wrong(f"{count} numbers of at most {most}")
        found += [number] * length
    if len(found) != count or spell_numbers(found) != data:
        raise _wrong(f"{count} numbers in their one spelling")
    return found


def spell_slices(slices: Sequence[SliceId]) -> bytes:
    """`slices` ascend, none twice."""
    out = bytearray()
    layer = first = at = 0
    while at < len(slices):
        start = slices[at]
        width, length = start.count, 1
        while at + length < len(slices) and slices[at + length] == _neighbour(start, length):
            length += 1
        if start.layer != layer:
            first = 0
        _put(out, start.layer - layer)
        _put(out, start.first - first)
        _put(out, width - 1)
        _put(out, length - 1)
        layer, first = start.layer, start.first + (length - 1) * width
        at += length
    return bytes(out)


def read_slices(data: bytes, count_max: int) -> tuple[SliceId, ...]:
    """At most `count_max` slices, ascending; raises Misbehaved for another list or another spelling."""
    found: list[SliceId] = []
    values = _varints(data)
    if len(values) % 4:
        raise _wrong("runs of slices of four numbers each")
    layer = first = 0
    for at in range(0, len(values), 4):
        more_layers, more_first, more_width, more = values[at : at + 4]
        first = more_first + (0 if more_layers else first)
        layer, width = layer + more_layers, more_width + 1
        last = first + (more + 1) * width - 1
        if len(found) + more >= count_max or layer > INDEX_MAX or last > INDEX_MAX:
            raise _wrong(f"at most {count_max} slices of indexes up to {INDEX_MAX}")
        start = SliceId(layer, first, first + width - 1)
        if found and start <= found[-1]:
            raise _wrong("slices that ascend")
        found += (_neighbour(start, number) for number in range(more + 1))
        first += more * width
    if spell_slices(found) != data:
        raise _wrong("slices in their one spelling")
    return tuple(found)


def _neighbour(start: SliceId, number: int) -> SliceId:
    """The slice of the same width that lies `number` widths further on."""
    width = start.count
    return SliceId(start.layer, start.first + number * width, start.last + number * width)


def _put(out: bytearray, value: int) -> None:
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def _varints(data: bytes) -> list[int]:
    values: list[int] = []
    value = shift = 0
    for byte in data:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte & 0x80:
            if shift == 7 * _VARINT_BYTES_MAX:
                raise _wrong("varints of at most five bytes")
            continue
        values.append(value)
        value = shift = 0
    if shift:
        raise _wrong("a varint that ends")
    return values


def _wrong(expected: str) -> Misbehaved:
    return Misbehaved(RejectReason.BAD_MESSAGE, f"a column of a message is not {expected}")
