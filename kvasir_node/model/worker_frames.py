"""A worker's requests and answers: checked, widened and narrowed in a kernel, where experts are computed by one.

It does not know experts, links or who asks. What is taken, what is refused and with which words, and every bit of a
number are those of `wire.tensors`, which does it elsewhere, and for int8.

Shapes: R rows, D model width, P pairs.
"""

from __future__ import annotations

import ctypes

import torch

from kvasir_node.base.errors import Misbehaved
from kvasir_node.model.kernels.abi import (
    NARROW_NUMBERS,
    WIDEN_BAD_PAIR,
    WIDEN_BAD_WEIGHT,
    WIDEN_NUMBERS,
)
from kvasir_node.model.kernels.library import kernels
from kvasir_node.wire.tensors import (
    REQUEST_BYTES,
    Encoding,
    ExpertRequest,
    RequestShape,
    answer_header,
    answer_parts,
    bad_pair,
    bad_row,
    bad_weight,
    read_arrays,
    request_shape,
)

_WidenNumbers = ctypes.c_int64 * len(WIDEN_NUMBERS)
_NarrowNumbers = ctypes.c_int64 * len(NARROW_NUMBERS)


class WorkerFrames:
    """Of a model whose rows are `hidden_size` wide; `by_kernel` where experts are computed by one, too (they are an
    even number wide then), else all is as `wire.tensors` has it. Any thread may call, several at once."""

    def __init__(self, hidden_size: int, *, by_kernel: bool) -> None:
        self._hidden_size = hidden_size
        known = kernels() if by_kernel else {}  # they take a second when they are asked for first
        self._widen, self._narrow = known.get("widen"), known.get("narrow")

    def read(self, body: memoryview) -> ExpertRequest:
        """As `read_request`, but pairs are int64 and rows float32 if there is a kernel. `body` begins at a multiple of
        four in memory. Raises Misbehaved."""
        shape = request_shape(body, hidden_size=self._hidden_size)
        if self._widen is None or shape.encoding is Encoding.INT8:
            return read_arrays(body, shape)
        arrays = torch.frombuffer(body, dtype=torch.float32, offset=REQUEST_BYTES)
        pairs = torch.empty(2, shape.pairs, dtype=torch.int64)
        is_bf16 = shape.encoding is Encoding.BFLOAT16
        if is_bf16:
            rows = torch.empty(shape.rows, self._hidden_size)
        else:
            rows = arrays[3 * shape.pairs :].view(shape.rows, self._hidden_size)
        pairs_address = pairs.data_ptr()
        numbers = _WidenNumbers(
            arrays.data_ptr(), shape.rows, shape.pairs, self._hidden_size, is_bf16,
            pairs_address, pairs_address + 8 * shape.pairs, rows.data_ptr(),
        )  # fmt: skip
        fault = self._widen(numbers, None)
        if fault:
            raise _fault(fault, shape)
        return ExpertRequest(shape.layer, rows, pairs[0], pairs[1], arrays[: shape.pairs], shape.encoding)

    def answer(self, sums: torch.Tensor, encoding: Encoding | None, computed_s: float) -> list[bytes | memoryview]:
        """As `answer_parts`; sums [R, D] on the CPU."""
        direct = sums.dtype is torch.float32 and sums.is_contiguous()
        if self._narrow is None or encoding is not Encoding.BFLOAT16 or not direct:
            return answer_parts(sums, encoding, computed_s)
        values = bytearray(2 * sums.numel())
        target = ctypes.addressof(ctypes.c_char.from_buffer(values))
        self._narrow(_NarrowNumbers(sums.data_ptr(), sums.numel(), target), None)
        return [answer_header(encoding, sums.shape[0], sums.shape[1], computed_s), memoryview(values)]


def _fault(code: int, shape: RequestShape) -> Misbehaved:
    if code == WIDEN_BAD_PAIR:
        return bad_pair(shape)
    return bad_weight() if code == WIDEN_BAD_WEIGHT else bad_row()
