"""A whole answer: a request's arrays are checked and widened, its experts computed, their sums written as they leave.

It does not know frames' headers, families or where weights come from: it gets addresses (`abi`). The same in three
calls needs a dozen arrays between them, and making those takes as long as an expert of a small model does: weights that
have just gone through the caches have driven out the interpreter's data.

Shapes: R rows, D model width, I expert width, E experts of the layer, P (row, expert) pairs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvasir_node.model.kernels.abi import (
    ANSWER_ABSENT,
    ANSWER_NUMBERS,
    EXPERTS_ALL,
    EXPERTS_NUMBERS,
    KINDS,
    WIDEN_NUMBERS,
)
from kvasir_node.model.kernels.expert_code import experts
from kvasir_node.model.kernels.frame_code import store_narrow, widen
from kvasir_node.model.kernels.vector_code import compiled, floats, ints

ARRAYS, ROW_COUNT, PAIRS, WIDTH, IS_BF16, TABLE, EXPERTS, INNER, FORM, TARGET, ROOM = range(len(ANSWER_NUMBERS))
WIDENED, COMPUTED = len(WIDEN_NUMBERS), len(EXPERTS_NUMBERS)

Numbers = Any  # an array


def _answer_for(kind: int) -> Any:
    experts_kind = experts[kind]

    @compiled()
    def answer(p: Numbers, factors: Numbers) -> int:
        rows, pairs, width, is_bf16 = p[ROW_COUNT], p[PAIRS], p[WIDTH], p[IS_BF16]
        # The room, in this order; `abi.answer_room_bytes` is its size.
        widened, computed = ints(p[ROOM], WIDENED), ints(p[ROOM] + 8 * WIDENED, COMPUTED)
        pair_row = p[ROOM] + 8 * (WIDENED + COMPUTED)
        pair_expert, order = pair_row + 8 * pairs, pair_row + 16 * pairs
        starts = order + 40 * pairs
        spread = starts + 8 * (p[EXPERTS] + 1)
        gates = spread + 4 * rows * width
        ups = gates + 4 * pairs * p[INNER]
        wide_rows = ups + 4 * pairs * p[INNER]
        wide_sums = wide_rows + 4 * rows * width

        widened[0], widened[1], widened[2], widened[3] = p[ARRAYS], rows, pairs, width
        widened[4], widened[5], widened[6], widened[7] = is_bf16, pair_row, pair_expert, wide_rows
        fault = widen(widened)
        if fault:
            return fault
        sums = wide_sums if is_bf16 else p[TARGET]
        results = floats(sums, rows * width)
        for place in range(rows * width):
            results[place] = np.float32(0.0)
        computed[0], computed[1], computed[2], computed[3] = EXPERTS_ALL, 0, 0, p[TABLE]
        computed[4], computed[5], computed[6] = p[EXPERTS], p[INNER], p[FORM]
        computed[7] = wide_rows if is_bf16 else p[ARRAYS] + 12 * pairs
        computed[8], computed[9], computed[10], computed[11] = rows, width, pair_row, pair_expert
        computed[12], computed[13], computed[14], computed[15] = p[ARRAYS], pairs, sums, starts
        for place in range(5):
            computed[16 + place] = order + 8 * pairs * place
        computed[21], computed[22], computed[23] = spread, gates, ups
        if experts_kind(computed, factors):
            return ANSWER_ABSENT
        if is_bf16:
            store_narrow(results, p[TARGET])
        return 0

    return answer


answer = tuple(_answer_for(kind) for kind in KINDS)
"""By kind: answer_KIND of `abi`, on arrays."""
