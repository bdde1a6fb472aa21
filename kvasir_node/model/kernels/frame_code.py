"""A worker's frames: what came is checked and widened for the experts' kernel, what leaves is narrowed.

It does not know frames or experts: it gets addresses (`abi`). As a dozen torch operations the same takes a good part of
the time in which a small model's experts are computed (`docs/log.md`).

Shapes: R rows, D model width, P pairs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvasir_node.model.kernels.abi import (
    NARROW_NUMBERS,
    WIDEN_BAD_PAIR,
    WIDEN_BAD_ROW,
    WIDEN_BAD_WEIGHT,
    WIDEN_NUMBERS,
)
from kvasir_node.model.kernels.vector_code import compiled, float_of_bits, floats, ints, store_bf16, words

ARRAYS, ROW_COUNT, PAIRS, WIDTH, IS_BF16, PAIR_ROW, PAIR_EXPERT, ROWS = range(len(WIDEN_NUMBERS))
SUMS, COUNT, TARGET = range(len(NARROW_NUMBERS))

Numbers = Any  # an array


@compiled()
def is_beyond(values: Numbers, is_bf16: int) -> bool:
    """Whether a value, of words that hold one or two each, is infinite or NaN: then all bits of its exponent are set.

    By its bits: sums of zero times each value may be put together otherwise, and then overflow.
    """
    found = 0
    upper = np.int32(0x7F800000)
    lower = np.int32(0x7F80 if is_bf16 else 0x7F800000)
    for place in range(values.shape[0]):
        found |= (values[place] & upper) == upper
        found |= (values[place] & lower) == lower
    return found != 0


@compiled()
def _widen_pairs(p: Numbers) -> bool:
    """Returns whether each points at a row that there is, and at an expert that could be."""
    rows, pairs = p[ROW_COUNT], p[PAIRS]
    narrow_rows, narrow_experts = words(p[ARRAYS] + 4 * pairs, pairs), words(p[ARRAYS] + 8 * pairs, pairs)
    wide_rows, wide_experts = ints(p[PAIR_ROW], pairs), ints(p[PAIR_EXPERT], pairs)
    wrong = 0
    for pair in range(pairs):
        row, expert = np.int64(narrow_rows[pair]), np.int64(narrow_experts[pair])
        wrong += (row < 0) | (row >= rows) | (expert < 0)
        wide_rows[pair], wide_experts[pair] = row, expert
    return wrong == 0


@compiled()
def widen(p: Numbers) -> int:
    pairs = p[PAIRS]
    if not _widen_pairs(p):
        return WIDEN_BAD_PAIR
    if is_beyond(words(p[ARRAYS], pairs), 0):
        return WIDEN_BAD_WEIGHT
    count = p[ROW_COUNT] * p[WIDTH] // (2 if p[IS_BF16] else 1)
    values = words(p[ARRAYS] + 12 * pairs, count)
    if is_beyond(values, p[IS_BF16]):
        return WIDEN_BAD_ROW
    if p[IS_BF16]:
        rows = floats(p[ROWS], 2 * count)
        for place in range(count):
            rows[2 * place] = float_of_bits(values[place] << np.int32(16))
            rows[2 * place + 1] = float_of_bits(values[place] & np.int32(-65536))
    return 0


@compiled()
def store_narrow(values: Numbers, target: int) -> None:
    """float32 values as bfloat16."""
    for place in range(values.shape[0]):
        store_bf16(target + 2 * place, values[place])


@compiled()
def narrow(p: Numbers) -> int:
    store_narrow(floats(p[SUMS], p[COUNT]), p[TARGET])
    return 0
