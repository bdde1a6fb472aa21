"""A worker's requests and answers: checked, widened and narrowed in a kernel, where experts are computed by one; or
request to answer in one kernel.

It does not know links or who asks. What is taken, what is refused and with which words, and every bit of a
number are those of `wire.tensors`, which does it elsewhere, and for int8.

Shapes: R rows, D model width, P pairs.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence

import torch

from kvasir_node.base.errors import Misbehaved
from kvasir_node.model.expert_kernel import AnswerKernel
from kvasir_node.model.experts import ExpertShard
from kvasir_node.model.kernels.abi import (
    NARROW_NUMBERS,
    WIDEN_BAD_PAIR,
    WIDEN_BAD_WEIGHT,
    WIDEN_NUMBERS,
)
from kvasir_node.model.kernels.library import address_of, kernels
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
        self._narrow(_NarrowNumbers(sums.data_ptr(), sums.numel(), address_of(values)), None)
        return [answer_header(encoding, sums.shape[0], sums.shape[1], computed_s), memoryview(values)]


class WholeAnswers:
    """Requests computed and answered by one call of a kernel each: the same bits as by `WorkerFrames` and the shard.

    For one thread, and a shard that has an `answer_kernel`.
    """

    def __init__(self, shard: ExpertShard, kernel: AnswerKernel) -> None:
        self._shard = shard
        self._kernel = kernel

    def answer(self, body: memoryview) -> tuple[int, Sequence[bytes | memoryview]] | None:
        """How many rows a request has, and the parts of its answer; None for what is not computed here: int8, and
        whatever is wrong with a request's arrays or asks for what is not held, of which nobody says more here.

        `body` is writable and begins at a multiple of four in memory. Raises Misbehaved for a bad header.
        """
        width = self._shard.hidden_size
        shape = request_shape(body, hidden_size=width)
        held = self._shard.held_of(shape.layer)
        if shape.encoding is Encoding.INT8 or shape.pairs > shape.rows * len(held.experts):
            return None
        is_bf16 = shape.encoding is Encoding.BFLOAT16
        values = bytearray(shape.rows * width * (2 if is_bf16 else 4))
        arrays, target = address_of(body, REQUEST_BYTES), address_of(values)
        began_at = time.perf_counter()
        if self._kernel.compute(held.table, arrays, shape.rows, shape.pairs, width, is_bf16, target):
            return None
        computed_s = time.perf_counter() - began_at
        return shape.rows, [answer_header(shape.encoding, shape.rows, width, computed_s), memoryview(values)]


def _fault(code: int, shape: RequestShape) -> Misbehaved:
    if code == WIDEN_BAD_PAIR:
        return bad_pair(shape)
    return bad_weight() if code == WIDEN_BAD_WEIGHT else bad_row()
