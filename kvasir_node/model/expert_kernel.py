"""Calls the kernel of a layer's routed experts, in one thread or several.

It does not know layers, families or where weights come from: it gets a table of addresses (`kernels.abi`).

Shapes: R rows, D model width, I expert width, E experts of the layer, P (row, expert) pairs.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from kvasir_node.model.kernels.abi import (
    ANSWER_NUMBERS,
    EXPERT_COLUMNS,
    EXPERTS_ALL,
    EXPERTS_HIDDEN,
    EXPERTS_NUMBERS,
    EXPERTS_PREPARE,
    EXPERTS_SUMS,
    STEP,
    answer_room_bytes,
)
from kvasir_node.model.kernels.library import kernels
from kvasir_node.model.threads import Threads

COLUMNS = len(EXPERT_COLUMNS)
PART_OUTPUTS_MIN = 64  # of one thread: below, waking it costs more than it computes
ANSWER_ROOM_BYTES = 1 << 22  # kept between answers; a larger one has a room of its own
_Numbers = ctypes.c_int64 * len(EXPERTS_NUMBERS)
_AnswerNumbers = ctypes.c_int64 * len(ANSWER_NUMBERS)


@dataclass(frozen=True, slots=True)
class ExpertForm:
    """What must be told of a model's experts: kinds and forms as in `kernels.abi`; I; limit and alpha of the form."""

    kind: int
    form: int
    inner: int
    limit: float
    alpha: float


class ExpertKernel:
    """Any thread may call `sums`, several at once."""

    def __init__(self, form: ExpertForm, threads: Threads) -> None:
        self._form = form
        self._threads = threads
        self._kernel = kernels()[f"experts_{form.kind}"]
        self._factors = (ctypes.c_float * 2)(form.limit, form.alpha)

    def sums(
        self,
        table: torch.Tensor,
        rows: torch.Tensor,
        pair_row: torch.Tensor,
        pair_expert: torch.Tensor,
        pair_weight: torch.Tensor,
    ) -> torch.Tensor | int:
        """Sums [R, D] float32, or the number of an expert that is needed and not in the table.

        table [E, COLUMNS] int64, rows [R, D], pair_row [P] int64 below R, pair_expert [P] int64, pair_weight [P].
        """
        rows, pair_weight = rows.to(torch.float32).contiguous(), pair_weight.to(torch.float32).contiguous()
        pair_row, pair_expert = pair_row.contiguous(), pair_expert.contiguous()
        (count, width), pairs, inner = rows.shape, pair_row.shape[0], self._form.inner
        sums = torch.zeros(count, width)
        room = torch.empty(table.shape[0] + 1 + 5 * pairs, dtype=torch.int64)
        states = torch.empty(count * width + 2 * pairs * inner)
        starts, spread = room.data_ptr(), states.data_ptr()
        order, gates = starts + 8 * (table.shape[0] + 1), spread + 4 * count * width
        numbers = _Numbers(
            EXPERTS_ALL, 0, 0, table.data_ptr(), table.shape[0], inner, self._form.form, rows.data_ptr(), count, width,
            pair_row.data_ptr(), pair_expert.data_ptr(), pair_weight.data_ptr(), pairs, sums.data_ptr(),
            starts, *(order + 8 * pairs * place for place in range(5)), spread, gates, gates + 4 * pairs * inner,
        )  # fmt: skip
        absent = self._run(numbers, width)
        return sums if absent == 0 else int(pair_expert[absent - 1])

    def _run(self, numbers: ctypes.Array[ctypes.c_int64], width: int) -> int:
        if self._threads.count == 1:
            return self._kernel(numbers, self._factors)
        numbers[0] = EXPERTS_PREPARE
        absent = self._kernel(numbers, self._factors)
        if absent:
            return absent
        for phase, size in ((EXPERTS_HIDDEN, self._form.inner), (EXPERTS_SUMS, width)):

            def part(first: int, end: int, phase: int = phase) -> None:
                own = _Numbers(phase, first, end, *numbers[3:])
                self._kernel(own, self._factors)

            self._threads.each_part(size, STEP, PART_OUTPUTS_MIN, part)
        return 0


class AnswerKernel:
    """Sums of a request's arrays, as they came, as they leave. One thread calls: it keeps room for the next answer."""

    def __init__(self, form: ExpertForm) -> None:
        self._form = form
        self._kernel = kernels()[f"answer_{form.kind}"]
        self._factors = (ctypes.c_float * 2)(form.limit, form.alpha)
        self._room = torch.empty(ANSWER_ROOM_BYTES, dtype=torch.uint8)

    def compute(
        self, table: torch.Tensor, arrays: int, rows: int, pairs: int, width: int, is_bf16: bool, target: int
    ) -> int:
        """0, or what is wrong, as `kernels.abi` has it; then `target` holds nothing of use.

        table [E, COLUMNS] int64; `arrays`: where weights [P], rows [P], experts [P] and values [R, D] lie, one after
        the other; `target`: where [R, D] sums go, of the values' kind. Both are addresses, multiples of four.
        """
        inner, experts = self._form.inner, table.shape[0]
        needed = answer_room_bytes(rows, pairs, width, inner, experts)
        room = self._room if needed <= ANSWER_ROOM_BYTES else torch.empty(needed, dtype=torch.uint8)
        numbers = _AnswerNumbers(
            arrays, rows, pairs, width, is_bf16, table.data_ptr(), experts, inner, self._form.form, target,
            room.data_ptr(),
        )  # fmt: skip
        return self._kernel(numbers, self._factors)
