"""Dealing a layer's pairs out to machines, cutting one part for each, and adding up what comes back: the hot path of
fan-out.

It does not know machines, routes or frames: it gets addresses (`abi`). As torch operations all of it costs more than
the network does.

Shapes: T rows, K experts chosen for each, D model width, E experts, M machines (0 = here), C machines among which an
expert is dealt, R rows of one part.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvasir_node.model.kernels.abi import JOIN_NUMBERS, SPLIT_NUMBERS
from kvasir_node.model.kernels.frame_code import is_beyond, store_narrow
from kvasir_node.model.kernels.vector_code import compiled, float_of_bits, floats, ints, words

(
    CHOSEN, WEIGHTS, ROW_COUNT, EACH, ABLE, ABLE_EACH, MACHINES, EXPERTS, ALLOWED, PRICES, ROWS, ROW_WORDS, NARROWS,
    FRAMES, OWN_ROWS, OWN_EXPERTS, OWN_WEIGHTS, COUNTS, USED, ROW_PAIRS, WHERE, WANTED, ORDER, LOAD, SEEN,
) = range(len(SPLIT_NUMBERS))  # fmt: skip
SUMS, JOIN_ROWS, WIDTH, IS_BF16, JOIN_USED, JOIN_PAIRS, TOTALS, DONE = range(len(JOIN_NUMBERS))

Numbers = Any  # an array


@compiled()
def _ordered(wanted: Numbers, order: Numbers, experts: int) -> int:
    """The experts that are wanted of more than 0, most first; returns how many. They are few, so they are inserted."""
    count = 0
    for expert in range(experts):
        if wanted[expert] <= 0:
            continue
        place = count
        while place > 0 and wanted[order[place - 1]] < wanted[expert]:
            order[place] = order[place - 1]
            place -= 1
        order[place] = expert
        count += 1
    return count


@compiled()
def _deal(p: Numbers, chosen: Numbers, where: Numbers) -> None:
    machines, experts, each = p[MACHINES], p[EXPERTS], p[ABLE_EACH]
    able, allowed = ints(p[ABLE], experts * each), ints(p[ALLOWED], machines)
    if each == 1:
        for expert in range(experts):
            where[expert] = able[expert] * allowed[able[expert]]
        return
    wanted, order = ints(p[WANTED], experts), ints(p[ORDER], experts)
    prices, load = floats(p[PRICES], 3 * machines), floats(p[LOAD], machines)
    for expert in range(experts):
        wanted[expert] = 0
    for place in range(chosen.shape[0]):
        wanted[chosen[place]] += 1
    for machine in range(machines):
        load[machine] = prices[machine]
    for expert in range(experts):
        choices, only = 0, 0
        for at in range(expert * each, (expert + 1) * each):
            if able[at] >= 0 and allowed[able[at]]:
                choices, only = choices + 1, able[at]
        if wanted[expert] > 0 and choices <= 1:
            load[only] += prices[machines + only] + prices[2 * machines + only] * np.float32(wanted[expert])
            where[expert], wanted[expert] = only, 0
    for place in range(_ordered(wanted, order, experts)):
        expert = order[place]
        best, best_s = 0, np.float32(np.inf)
        for at in range(expert * each, (expert + 1) * each):
            machine = able[at]
            if machine >= 0 and allowed[machine]:
                more_s = prices[machines + machine] + prices[2 * machines + machine] * np.float32(wanted[expert])
                if load[machine] + more_s < best_s:
                    best, best_s = machine, load[machine] + more_s
        where[expert], load[best] = best, best_s


@compiled()
def _count(p: Numbers, chosen: Numbers, where: Numbers, counts: Numbers, used: Numbers, row_pairs: Numbers) -> None:
    rows, each, machines = p[ROW_COUNT], p[EACH], p[MACHINES]
    seen = ints(p[SEEN], p[EXPERTS])
    for place in range(3 * machines):
        counts[place] = 0
    for expert in range(p[EXPERTS]):
        seen[expert] = 0
    for row in range(rows):
        for place in range(row * each, (row + 1) * each):
            expert = chosen[place]
            machine = where[expert]
            at = machine * rows + counts[machines + machine]  # of the row that is under way, if it has been here
            if counts[machines + machine] == 0 or used[at - 1] != row:
                used[at], row_pairs[at] = row, 0
                counts[machines + machine] += 1
                at += 1
            row_pairs[at - 1] += 1
            counts[machine] += 1
            counts[2 * machines + machine] += 1 - seen[expert]
            seen[expert] = 1


@compiled()
def _copy_row(p: Numbers, row: int, target: int) -> None:
    count = p[ROW_WORDS]
    if p[NARROWS]:
        store_narrow(floats(p[ROWS] + 4 * row * count, count), target)
        return
    source, copy = words(p[ROWS] + 4 * row * count, count), words(target, count)
    for place in range(count):
        copy[place] = source[place]


@compiled()
def split(p: Numbers) -> int:
    rows, each, machines = p[ROW_COUNT], p[EACH], p[MACHINES]
    chosen, weights = ints(p[CHOSEN], rows * each), floats(p[WEIGHTS], rows * each)
    where, frames = ints(p[WHERE], p[EXPERTS]), ints(p[FRAMES], machines)
    _deal(p, chosen, where)
    counts, used = ints(p[COUNTS], 3 * machines), ints(p[USED], machines * rows)
    _count(p, chosen, where, counts, used, ints(p[ROW_PAIRS], machines * rows))
    own_rows, own_experts = ints(p[OWN_ROWS], rows * each), ints(p[OWN_EXPERTS], rows * each)
    own_weights = floats(p[OWN_WEIGHTS], rows * each)
    own = 0
    for machine in range(machines):
        if machine == 0:
            for place in range(rows * each):
                if where[chosen[place]] == 0:
                    own_rows[own], own_experts[own], own_weights[own] = place // each, chosen[place], weights[place]
                    own += 1
            continue
        pairs, base, pair, line = counts[machine], frames[machine], 0, -1
        row_bytes = p[ROW_WORDS] * (2 if p[NARROWS] else 4)
        frame_weights, frame_rows = floats(base, pairs), words(base + 4 * pairs, pairs)
        frame_experts = words(base + 8 * pairs, pairs)
        last = -1
        for place in range(rows * each):
            if where[chosen[place]] != machine:
                continue
            row = place // each
            if row != last:
                line, last = line + 1, row
                _copy_row(p, row, base + 12 * pairs + line * row_bytes)
            frame_weights[pair], frame_rows[pair] = weights[place], line
            frame_experts[pair] = chosen[place]
            pair += 1
    return 0


@compiled()
def join(p: Numbers) -> int:
    rows, width = p[JOIN_ROWS], p[WIDTH]
    used, row_pairs = ints(p[JOIN_USED], rows), ints(p[JOIN_PAIRS], rows)
    row_words = width // 2 if p[IS_BF16] else width
    if is_beyond(words(p[SUMS], rows * row_words), p[IS_BF16]):
        return 1
    for line in range(rows):
        row = used[line]
        total, sums = floats(p[TOTALS] + 4 * row * width, width), words(p[SUMS] + 4 * line * row_words, row_words)
        if p[IS_BF16]:
            for place in range(row_words):
                total[2 * place] += float_of_bits(sums[place] << np.int32(16))
                total[2 * place + 1] += float_of_bits(sums[place] & np.int32(-65536))
        else:
            for place in range(row_words):
                total[place] += float_of_bits(sums[place])
        done = ints(p[DONE] + 8 * row, 1)
        done[0] += row_pairs[line]
    return 0
