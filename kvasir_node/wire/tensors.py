"""The frames of the hot path: rows for a worker's experts, and the partial sums that come back.

It does not know who computes, what a deadline is, or which encoding is good enough for a model (roles/wire_gate). Both
directions are one small header and raw little-endian arrays, so that a sender hands over views of its tensors and a
receiver makes views of the received buffer: no copy where values travel in the dtype they are computed in.

    request:  u16 magic, u8 encoding, u8 0, u32 layer, u32 R rows, u32 P pairs, u32 D | pair_weight f32 [P]
              | pair_row u32 [P] | pair_expert u32 [P] | values [R,D]
    answer:   u16 magic, u8 encoding, u8 0, u32 R rows, u32 D, u32 microseconds of computing | values [R,D], the sums

    values:   1 float32: f32 [R,D]    2 bfloat16: bf16 [R,D]    3 int8: scale f32 [R] | level i8 [R,D]

The four-byte arrays come first, so that every array is aligned whatever P is.
Each row travels once however many of its experts the worker holds, and one weighted sum a row comes back, spelt as the
request was.

int8: a row's scale is its largest magnitude, or SCALE_MIN if that is less; level k of -127…127 means k / 127 × scale. A
row whose scale is more than SCALE_MIN has a level of -127 or 127. So values have one spelling, and what was decoded is
spelt the same again.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from kvasir_node.base.errors import Misbehaved, RejectReason

ROWS_MAX = 8192
PAIRS_MAX = 65_536
HIDDEN_MAX = 65_536
LEVELS = 127  # on either side of zero; -128 is not used, so that no sign is favoured
SCALE_MIN = 2.0**-100  # far above where float32 loses digits, far below any row that matters
_REQUEST = struct.Struct("<HBBIIII")
_ANSWER = struct.Struct("<HBBIII")
REQUEST_BYTES = _REQUEST.size  # of a request without its arrays
_REQUEST_MAGIC = 0x4B51
_ANSWER_MAGIC = 0x4B41
_COMPUTED_US_MAX = 0xFFFFFFFF


class Encoding(IntEnum):
    """How rows and sums are spelt in a frame."""

    FLOAT32 = 1
    BFLOAT16 = 2
    INT8 = 3

    @staticmethod
    def of(dtype: torch.dtype) -> Encoding:
        """The one that keeps every bit of a compute dtype."""
        return _EXACT[dtype]

    @property
    def rounding(self) -> float:
        """How far a value that is read may be from what was sent, as a share of its row's largest magnitude.

        Half a unit in the last of bfloat16's eight places, or half a level. It is a bound for the spelling of one row:
        what experts make of rows that were rounded is off by more (by 2 × 10⁻² in int8 on real rows of the demo model,
        by 1.3 × 10⁻¹ once three of their columns are 40 times larger), so answers are compared with what we make of the
        same rounded rows, and then the sums' own rounding is all that is between honest machines.
        """
        return _ROUNDING[self]

    def values_bytes(self, rows: int, hidden_size: int) -> int:
        """What so many rows take in a frame."""
        return rows * (hidden_size * _STORED[self].itemsize + (4 if self is Encoding.INT8 else 0))


_STORED = {Encoding.FLOAT32: torch.float32, Encoding.BFLOAT16: torch.bfloat16, Encoding.INT8: torch.int8}
_ROUNDING = {Encoding.FLOAT32: 0.0, Encoding.BFLOAT16: 2.0**-8, Encoding.INT8: 0.5 / LEVELS}
_EXACT = {torch.float32: Encoding.FLOAT32, torch.bfloat16: Encoding.BFLOAT16}
_BY_CODE = {int(encoding): encoding for encoding in Encoding}


@dataclass(frozen=True, slots=True)
class ExpertRequest:
    """Rows [R,D] and P (row, expert, weight) triples of one layer; of a frame, as views of the received bytes.

    `encoding` is the one that its frame came in, and that of the answer; None = it came in no frame.
    """

    layer: int
    rows: torch.Tensor  # [R,D]; float32 if they came as int8
    pair_row: torch.Tensor  # [P] int32, 0 ≤ value < R
    pair_expert: torch.Tensor  # [P] int32, index within the layer
    pair_weight: torch.Tensor  # [P] float32
    encoding: Encoding | None = None


def request_parts(request: ExpertRequest, encoding: Encoding | None = None) -> list[bytes | memoryview]:
    """The parts of one request frame, its rows in `encoding` (None = in their own dtype).

    The tensors must be on the CPU and must not change until they are sent.
    """
    encoding = encoding or Encoding.of(request.rows.dtype)
    rows, dim = request.rows.shape
    pairs = request.pair_row.shape[0]
    return [
        request_header(encoding, request.layer, rows, pairs, dim),
        _bytes_of(request.pair_weight.to(torch.float32)),
        _bytes_of(request.pair_row.to(torch.int32)),
        _bytes_of(request.pair_expert.to(torch.int32)),
        *_values_parts(request.rows, encoding),
    ]


def request_header(encoding: Encoding, layer: int, rows: int, pairs: int, hidden_size: int) -> bytes:
    """What comes before the arrays of a request."""
    return _REQUEST.pack(_REQUEST_MAGIC, encoding, 0, layer, rows, pairs, hidden_size)


@dataclass(frozen=True, slots=True)
class RequestShape:
    """What a request's header says; its arrays begin `REQUEST_BYTES` after it."""

    encoding: Encoding
    layer: int
    rows: int
    pairs: int
    hidden_size: int


def request_shape(body: memoryview, *, hidden_size: int) -> RequestShape:
    """What is in a request whose length fits; raises Misbehaved for whatever does not add up."""
    if len(body) < _REQUEST.size:
        raise _bad(f"a request of {len(body)} bytes has no room for its header")
    magic, code, zero, layer, rows, pairs, dim = _REQUEST.unpack_from(body)
    encoding = _BY_CODE.get(code)
    if magic != _REQUEST_MAGIC or zero != 0 or encoding is None:
        raise _bad("the header is not that of an expert request")
    if dim != hidden_size or not 0 < rows <= ROWS_MAX or not 0 < pairs <= PAIRS_MAX:
        raise _bad(f"{rows} rows of {dim} with {pairs} pairs; expected rows of {hidden_size}")
    if len(body) != _REQUEST.size + 12 * pairs + encoding.values_bytes(rows, dim):
        raise _bad(f"a request of {len(body)} bytes does not hold {rows} rows and {pairs} pairs")
    return RequestShape(encoding, layer, rows, pairs, dim)


def read_request(body: memoryview, *, hidden_size: int) -> ExpertRequest:
    """Views of a request's arrays; raises Misbehaved for whatever does not add up, before any allocation."""
    return read_arrays(body, request_shape(body, hidden_size=hidden_size))


def read_arrays(body: memoryview, shape: RequestShape) -> ExpertRequest:
    """As `read_request`, of a body that has this shape."""
    rows, pairs = shape.rows, shape.pairs
    offset = _REQUEST.size
    pair_weight = _view(body, torch.float32, offset, pairs)
    pair_row = _view(body, torch.int32, offset + 4 * pairs, pairs)
    pair_expert = _view(body, torch.int32, offset + 8 * pairs, pairs)
    first, last = torch.aminmax(pair_row)
    if first.item() < 0 or last.item() >= rows or pair_expert.min().item() < 0:
        raise bad_pair(shape)
    # What is not finite comes back as such, and the worker would be blamed for it: so it is refused here.
    if not _is_finite(pair_weight):
        raise bad_weight()
    values = _read_values(body, offset + 12 * pairs, shape.encoding, rows, shape.hidden_size, RejectReason.BAD_FRAME)
    return ExpertRequest(shape.layer, values, pair_row, pair_expert, pair_weight, shape.encoding)


def answer_parts(
    sums: torch.Tensor, encoding: Encoding | None = None, computed_s: float = 0.0
) -> list[bytes | memoryview]:
    """The parts of an answer frame with partial sums [R,D] in `encoding` (None = in their own dtype)."""
    encoding = encoding or Encoding.of(sums.dtype)
    rows, hidden_size = sums.shape
    return [answer_header(encoding, rows, hidden_size, computed_s), *_values_parts(sums, encoding)]


def answer_header(encoding: Encoding, rows: int, hidden_size: int, computed_s: float) -> bytes:
    """What comes before the sums of an answer."""
    computed_us = min(int(computed_s * 1e6), _COMPUTED_US_MAX)
    return _ANSWER.pack(_ANSWER_MAGIC, encoding, 0, rows, hidden_size, computed_us)


def read_answer(
    body: memoryview, *, rows: int, hidden_size: int, dtype: torch.dtype | Encoding, looks_at_values: bool = True
) -> torch.Tensor:
    """Partial sums [R,D], as a view unless they came as int8, which gives float32.

    Raises Misbehaved when shape, encoding or values (NaN, Inf) are not as asked; values are looked at by whoever adds
    them up unless `looks_at_values`.
    """
    encoding = dtype if isinstance(dtype, Encoding) else Encoding.of(dtype)
    answer_values(body, rows=rows, hidden_size=hidden_size, encoding=encoding)
    if not looks_at_values and encoding is not Encoding.INT8:
        return _view(body, _STORED[encoding], _ANSWER.size, rows * hidden_size).view(rows, hidden_size)
    return _read_values(body, _ANSWER.size, encoding, rows, hidden_size, RejectReason.BAD_RESULT)


def answer_values(body: memoryview, *, rows: int, hidden_size: int, encoding: Encoding) -> memoryview:
    """Partial sums [R,D] of an answer as they lie in it, unchecked.

    Raises Misbehaved when their shape or encoding are not as asked.
    """
    expected = _ANSWER.size + encoding.values_bytes(rows, hidden_size)
    if len(body) != expected:
        raise _bad(f"an answer of {len(body)} bytes; expected {expected}")
    header = _ANSWER.unpack_from(body)[:-1]
    if header != (_ANSWER_MAGIC, encoding, 0, rows, hidden_size):
        raise _bad(f"an answer with header {header}; expected {rows} rows of {hidden_size} in {encoding.name.lower()}")
    return body[_ANSWER.size :]


def computed_s_of(body: memoryview) -> float:
    """How long the worker says it computed; 0.0 when it does not say. Raises Misbehaved for less than a header."""
    if len(body) < _ANSWER.size:
        raise _bad(f"an answer of {len(body)} bytes has no room for its header")
    return _ANSWER.unpack_from(body)[-1] / 1e6


def through_wire(values: torch.Tensor, encoding: Encoding) -> torch.Tensor:
    """What the other end reads of values [R,D] that are sent in `encoding`; on the same device."""
    if encoding is Encoding.INT8:
        return _from_levels(*_to_levels(values))
    return values.to(_STORED[encoding])


def _values_parts(values: torch.Tensor, encoding: Encoding) -> list[memoryview]:
    if encoding is Encoding.INT8:
        return [_bytes_of(part) for part in _to_levels(values)]
    return [_bytes_of(values.to(_STORED[encoding]))]


def _read_values(
    body: memoryview, offset: int, encoding: Encoding, rows: int, dim: int, reason: RejectReason
) -> torch.Tensor:
    """Values [R,D] of a body whose length is known to fit; raises Misbehaved with `reason` for bad ones."""
    if encoding is Encoding.INT8:
        scales = _view(body, torch.float32, offset, rows)
        levels = _view(body, torch.int8, offset + 4 * rows, rows * dim).view(rows, dim)
        if not _fit_each_other(scales, levels):
            raise Misbehaved(reason, "a row's scale is no finite largest magnitude of its levels")
        return _from_levels(scales, levels)
    values = _view(body, _STORED[encoding], offset, rows * dim).view(rows, dim)
    if not _is_finite(values):
        raise bad_row(reason)
    return values


def _to_levels(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[R,D] of any float dtype -> scales [R] float32, levels [R,D] int8. What is not finite gives such a scale."""
    exact = values.to(torch.float32)
    scales = exact.abs().amax(1).clamp_min_(SCALE_MIN)
    return scales, (exact * (LEVELS / scales)[:, None]).round_().to(torch.int8)


def _from_levels(scales: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """Dividing first makes level ±127 exactly 1 (127 × the float32 next to 1/127 is 1), and so ±scale exactly."""
    return torch.mul(levels, 1 / LEVELS).mul_(scales[:, None])


def _fit_each_other(scales: torch.Tensor, levels: torch.Tensor) -> bool:
    """By lists: for 16 rows 9 µs, where tensors of 16 elements took 35."""
    spans: tuple[list[Any], ...] = tuple(each.numpy().tolist() for each in (scales, levels.amin(1), levels.amax(1)))
    return all(
        SCALE_MIN <= scale < math.inf and low >= -LEVELS and (LEVELS in (-low, high) or scale == SCALE_MIN)
        for scale, low, high in zip(*spans, strict=True)
    )


def _bad(message: str) -> Misbehaved:
    return Misbehaved(RejectReason.BAD_FRAME, message)


def bad_pair(shape: RequestShape) -> Misbehaved:
    return _bad(f"a pair points outside the {shape.rows} rows")


def bad_weight() -> Misbehaved:
    return _bad("a weight is not finite")


def bad_row(reason: RejectReason = RejectReason.BAD_FRAME) -> Misbehaved:
    return Misbehaved(reason, "a row holds NaN or infinity")


def _is_finite(values: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite: none hides from a sum, and a sum that only overflows is looked at closely.

    A sum of [64, 2048] float32 takes 0.011 ms where `isfinite().all()` takes 0.30 ms (one thread, torch 2.13 CPU).
    """
    return math.isfinite(values.sum().item()) or bool(torch.isfinite(values).all())


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    tensor = tensor.contiguous()
    if tensor.dtype is torch.bfloat16:  # numpy does not know it
        tensor = tensor.view(torch.int16)
    return tensor.numpy().data.cast("B")


def _view(body: memoryview, dtype: torch.dtype, offset: int, count: int) -> torch.Tensor:
    return torch.frombuffer(body, dtype=dtype, count=count, offset=offset)
