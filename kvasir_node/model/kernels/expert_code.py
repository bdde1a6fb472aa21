"""All routed experts of a layer for some rows, over weights where they lie.

It does not know layers, families or where weights come from: it gets addresses (`abi`). What a decode step costs is
the reading of weights, so each is read once for all rows that chose its expert, in the dtype in which it is stored,
also straight out of a mapped file. Sums are in float32, and a row's bits do not depend on the other rows: its experts
are added in the order of their numbers. Parts (for threads) are of every expert's outputs, which changes no bit either.

Shapes: R rows, D model width, I expert width, E experts of the layer, P (row, expert) pairs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvasir_node.model.kernels.abi import (
    EXPERT_COLUMNS,
    EXPERTS_ALL,
    EXPERTS_HIDDEN,
    EXPERTS_NUMBERS,
    EXPERTS_PREPARE,
    EXPERTS_SUMS,
    GLU,
    GPT_OSS,
    KINDS,
)
from kvasir_node.model.kernels.vector_code import (
    FAST,
    compiled,
    exp,
    float_at,
    floats,
    ints,
    multiply,
    multiply_add,
    spread,
)

COLUMNS = len(EXPERT_COLUMNS)
GATE, UP, DOWN, GATE_FACTORS, UP_FACTORS, DOWN_FACTORS, GATE_BIAS, UP_BIAS, DOWN_BIAS = range(COLUMNS)
(
    PHASE, FIRST, END, TABLE, EXPERTS, INNER, FORM, ROWS, ROW_COUNT, WIDTH, PAIR_ROW, PAIR_EXPERT, PAIR_WEIGHT, PAIRS,
    SUMS, STARTS, ORDER, ROW_LINES, GATE_LINES, UP_LINES, SUM_LINES, SPREAD, GATES, UPS,
) = range(len(EXPERTS_NUMBERS))  # fmt: skip

Numbers = Any  # an array


@compiled()
def _absent(p: Numbers, wanted: Numbers) -> int:
    table = ints(p[TABLE], p[EXPERTS] * COLUMNS)
    for pair in range(wanted.shape[0]):
        expert = wanted[pair]
        if expert < 0 or expert >= p[EXPERTS] or table[expert * COLUMNS + GATE] == 0:
            return pair + 1
    return 0


@compiled()
def _sort(experts: int, wanted: Numbers, starts: Numbers, order: Numbers) -> None:
    """The pairs order[starts[e] : starts[e + 1]] chose expert e, in their own order."""
    for expert in range(experts + 1):
        starts[expert] = 0
    for expert in wanted:
        starts[expert + 1] += 1
    for expert in range(experts):
        starts[expert + 1] += starts[expert]
    for pair in range(wanted.shape[0]):
        order[starts[wanted[pair]]] = pair
        starts[wanted[pair]] += 1
    for expert in range(experts, 0, -1):  # each stands where the next one began
        starts[expert] = starts[expert - 1]
    starts[0] = 0


@compiled()
def _draw_lines(p: Numbers, order: Numbers) -> None:
    """Where each sorted pair's row, gate, up and sum begin."""
    pair_row = ints(p[PAIR_ROW], p[PAIRS])
    row_lines, sum_lines = ints(p[ROW_LINES], p[PAIRS]), ints(p[SUM_LINES], p[PAIRS])
    gate_lines, up_lines = ints(p[GATE_LINES], p[PAIRS]), ints(p[UP_LINES], p[PAIRS])
    for place in range(p[PAIRS]):
        row = pair_row[order[place]] * p[WIDTH] * 4
        row_lines[place], sum_lines[place] = p[SPREAD] + row, p[SUMS] + row
        gate_lines[place], up_lines[place] = p[GATES] + place * p[INNER] * 4, p[UPS] + place * p[INNER] * 4


@compiled()
def _add_bias(values: Numbers, bias: int, weight: float) -> None:
    if bias:
        for place in range(values.shape[0]):
            values[place] += float_at(bias + 4 * place) * weight


@compiled(fastmath=FAST)
def _gated(form: int, limit: float, alpha: float, gate: Numbers, up: Numbers, weight: float) -> None:
    """Into `up`: what the down matrix is to be multiplied with, times the pair's weight."""
    one = np.float32(1.0)
    if form == GLU:
        for place in range(gate.shape[0]):
            up[place] = gate[place] / (one + exp(-gate[place])) * up[place] * weight
        return
    low, high = np.float32(-limit), np.float32(limit)
    slope = np.float32(alpha) if form == GPT_OSS else one
    shift = one if form == GPT_OSS else np.float32(0.0)
    for place in range(gate.shape[0]):
        # Written so that a NaN stays one.
        narrow = high if gate[place] > high else gate[place]
        wide = high if up[place] > high else low if up[place] < low else up[place]
        up[place] = narrow / (one + exp(-narrow * slope)) * (wide + shift) * weight


def _experts_for(kind: int) -> Any:
    spread_row, multiply_kind, multiply_add_kind = spread[kind], multiply[kind], multiply_add[kind]

    @compiled()
    def prepare(p: Numbers) -> int:
        wanted, order = ints(p[PAIR_EXPERT], p[PAIRS]), ints(p[ORDER], p[PAIRS])
        absent = _absent(p, wanted)
        if absent:
            return absent
        _sort(p[EXPERTS], wanted, ints(p[STARTS], p[EXPERTS] + 1), order)
        _draw_lines(p, order)
        for row in range(p[ROW_COUNT]):
            at = row * p[WIDTH] * 4
            spread_row(floats(p[ROWS] + at, p[WIDTH]), floats(p[SPREAD] + at, p[WIDTH]))
        return 0

    @compiled()
    def hide(p: Numbers, limit: float, alpha: float, expert: int, start: int, count: int, first: int, end: int) -> None:
        at = ints(p[TABLE] + 8 * COLUMNS * expert, COLUMNS)
        rows, gates, ups = p[ROW_LINES] + 8 * start, p[GATE_LINES] + 8 * start, p[UP_LINES] + 8 * start
        multiply_kind(at[GATE], at[GATE_FACTORS], first, end, p[WIDTH], rows, count, gates)
        multiply_kind(at[UP], at[UP_FACTORS], first, end, p[WIDTH], rows, count, ups)
        order, weights = ints(p[ORDER], p[PAIRS]), floats(p[PAIR_WEIGHT], p[PAIRS])
        for place in range(start, start + count):
            line = 4 * (place * p[INNER] + first)
            gate, up = floats(p[GATES] + line, end - first), floats(p[UPS] + line, end - first)
            if at[GATE_BIAS]:
                _add_bias(gate, at[GATE_BIAS] + 4 * first, np.float32(1.0))
                _add_bias(up, at[UP_BIAS] + 4 * first, np.float32(1.0))
            _gated(p[FORM], limit, alpha, gate, up, weights[order[place]])
            spread_row(up, gate)

    @compiled()
    def add_up(p: Numbers, expert: int, start: int, count: int, first: int, end: int) -> None:
        at = ints(p[TABLE] + 8 * COLUMNS * expert, COLUMNS)
        sums, gates = p[SUM_LINES] + 8 * start, p[GATE_LINES] + 8 * start
        multiply_add_kind(at[DOWN], at[DOWN_FACTORS], first, end, p[INNER], gates, count, sums)
        if at[DOWN_BIAS]:
            order, weights = ints(p[ORDER], p[PAIRS]), floats(p[PAIR_WEIGHT], p[PAIRS])
            lines = ints(p[SUM_LINES], p[PAIRS])
            for place in range(start, start + count):
                sums_part = floats(lines[place] + 4 * first, end - first)
                _add_bias(sums_part, at[DOWN_BIAS] + 4 * first, weights[order[place]])

    @compiled()
    def experts(p: Numbers, factors: Numbers) -> int:
        phase, limit, alpha = p[PHASE], factors[0], factors[1]
        if phase in (EXPERTS_ALL, EXPERTS_PREPARE):
            absent = prepare(p)
            if absent:
                return absent
        starts = ints(p[STARTS], p[EXPERTS] + 1)
        for expert in range(p[EXPERTS]):
            start, count = starts[expert], starts[expert + 1] - starts[expert]
            if count == 0:
                continue
            if phase == EXPERTS_ALL:
                hide(p, limit, alpha, expert, start, count, 0, p[INNER])
                add_up(p, expert, start, count, 0, p[WIDTH])
            elif phase == EXPERTS_HIDDEN:
                hide(p, limit, alpha, expert, start, count, p[FIRST], p[END])
            elif phase == EXPERTS_SUMS:
                add_up(p, expert, start, count, p[FIRST], p[END])
        return 0

    return experts


experts = tuple(_experts_for(kind) for kind in KINDS)
"""By kind: experts_KIND of `abi`, on arrays."""
