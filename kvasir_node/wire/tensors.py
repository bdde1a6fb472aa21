"""The frames of the hot path: rows for a worker's experts, and the partial sums that come back.

It does not know who computes or what a deadline is. Both directions are one small header and raw little-endian
arrays, so that a sender hands over views of its tensors and a receiver makes views of the received buffer: no copy.

    request:  u16 magic, u8 dtype, u8 0, u32 layer, u32 R rows, u32 P pairs, u32 D | pair_weight f32 [P]
              | pair_row u32 [P] | pair_expert u32 [P] | rows [R,D]
    answer:   u16 magic, u8 dtype, u8 0, u32 R rows, u32 D | partial sums [R,D]

The four-byte arrays come first, so that every array is aligned whatever P is.
Each row travels once however many of its experts the worker holds, and one weighted sum a row comes back.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch

from kvasir_node.base.errors import Misbehaved, RejectReason

ROWS_MAX = 8192
PAIRS_MAX = 65_536
HIDDEN_MAX = 65_536
_REQUEST = struct.Struct("<HBBIIII")
_ANSWER = struct.Struct("<HBBII")
_REQUEST_MAGIC = 0x4B51
_ANSWER_MAGIC = 0x4B41
_DTYPES = {1: torch.float32, 2: torch.bfloat16}
_DTYPE_CODES = {dtype: code for code, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class ExpertRequest:
    """Rows [R,D] and P (row, expert, weight) triples of one layer, as views of the received bytes."""

    layer: int
    rows: torch.Tensor  # [R,D]
    pair_row: torch.Tensor  # [P] int32, 0 ≤ value < R
    pair_expert: torch.Tensor  # [P] int32, index within the layer
    pair_weight: torch.Tensor  # [P] float32


def request_parts(request: ExpertRequest) -> list[bytes | memoryview]:
    """The parts of one request frame; the tensors must be on the CPU and must not change until they are sent."""
    rows, dim = request.rows.shape
    pairs = request.pair_row.shape[0]
    code = _DTYPE_CODES[request.rows.dtype]
    return [
        _REQUEST.pack(_REQUEST_MAGIC, code, 0, request.layer, rows, pairs, dim),
        _bytes_of(request.pair_weight.to(torch.float32)),
        _bytes_of(request.pair_row.to(torch.int32)),
        _bytes_of(request.pair_expert.to(torch.int32)),
        _bytes_of(request.rows),
    ]


def read_request(body: memoryview, *, hidden_size: int) -> ExpertRequest:
    """Views of a request's arrays; raises Misbehaved for whatever does not add up, before any allocation."""
    if len(body) < _REQUEST.size:
        raise _bad(f"a request of {len(body)} bytes has no room for its header")
    magic, code, zero, layer, rows, pairs, dim = _REQUEST.unpack_from(body)
    if magic != _REQUEST_MAGIC or zero != 0 or code not in _DTYPES:
        raise _bad("the header is not that of an expert request")
    if dim != hidden_size or not 0 < rows <= ROWS_MAX or not 0 < pairs <= PAIRS_MAX:
        raise _bad(f"{rows} rows of {dim} with {pairs} pairs; expected rows of {hidden_size}")
    dtype = _DTYPES[code]
    row_bytes = rows * dim * dtype.itemsize
    if len(body) != _REQUEST.size + row_bytes + 12 * pairs:
        raise _bad(f"a request of {len(body)} bytes does not hold {rows} rows and {pairs} pairs")
    offset = _REQUEST.size
    pair_weight = _view(body, torch.float32, offset, pairs)
    pair_row = _view(body, torch.int32, offset + 4 * pairs, pairs)
    pair_expert = _view(body, torch.int32, offset + 8 * pairs, pairs)
    row_values = _view(body, dtype, offset + 12 * pairs, rows * dim).view(rows, dim)
    if int(pair_row.min()) < 0 or int(pair_row.max()) >= rows or int(pair_expert.min()) < 0:
        raise _bad(f"a pair points outside the {rows} rows")
    # What is not finite comes back as such, and the worker would be blamed for it: so it is refused here.
    if not _is_finite(pair_weight) or not _is_finite(row_values):
        raise _bad("a weight or a row is not finite")
    return ExpertRequest(layer, row_values, pair_row, pair_expert, pair_weight)


def answer_parts(sums: torch.Tensor) -> list[bytes | memoryview]:
    """The parts of an answer frame with partial sums [R,D]."""
    rows, dim = sums.shape
    return [_ANSWER.pack(_ANSWER_MAGIC, _DTYPE_CODES[sums.dtype], 0, rows, dim), _bytes_of(sums)]


def read_answer(body: memoryview, *, rows: int, hidden_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Partial sums [R,D] as a view; raises Misbehaved when shape, dtype or values (NaN, Inf) are not as asked."""
    expected = _ANSWER.size + rows * hidden_size * dtype.itemsize
    if len(body) != expected:
        raise _bad(f"an answer of {len(body)} bytes; expected {expected}")
    header = _ANSWER.unpack_from(body)
    if header != (_ANSWER_MAGIC, _DTYPE_CODES[dtype], 0, rows, hidden_size):
        raise _bad(f"an answer with header {header}; expected {rows} rows of {hidden_size} in {dtype}")
    sums = _view(body, dtype, _ANSWER.size, rows * hidden_size).view(rows, hidden_size)
    if not _is_finite(sums):
        raise Misbehaved(RejectReason.BAD_RESULT, "an answer holds NaN or infinity")
    return sums


def _bad(message: str) -> Misbehaved:
    return Misbehaved(RejectReason.BAD_FRAME, message)


def _is_finite(values: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite: none hides from a sum, and a sum that only overflows is looked at closely.

    A sum of [64, 2048] float32 takes 0.011 ms where `isfinite().all()` takes 0.30 ms (one thread, torch 2.13 CPU).
    """
    return bool(torch.isfinite(values.sum())) or bool(torch.isfinite(values).all())


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().contiguous().view(torch.uint8).numpy().data.cast("B")


def _view(body: memoryview, dtype: torch.dtype, offset: int, count: int) -> torch.Tensor:
    return torch.frombuffer(body, dtype=dtype, count=count, offset=offset)
