"""What a decoder block does besides its routed experts, for rows of any slots and positions; and a last linear layer.

It does not know models, requests or caches: it gets addresses (`abi`). Rows are float32 throughout, whatever the
weights are; keys and values are kept in the dtype of the weights. A row's bits do not depend on the other rows.

Shapes: B rows, D model width, N heads, H key/value heads, G = N / H, W head width, C context, E experts, K chosen.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvasir_node.model.kernels.abi import (
    BF16,
    BLOCK_ALL,
    BLOCK_ATTEND,
    BLOCK_LAYER,
    BLOCK_NORM,
    BLOCK_NUMBERS,
    BLOCK_OUTPUT,
    BLOCK_PLACE,
    BLOCK_PROJECT,
    BLOCK_ROUTE,
    BLOCK_SIZES,
    BLOCK_WORK,
    KINDS,
    LINEAR_ALL,
    LINEAR_NORM,
    LINEAR_NUMBERS,
    LINEAR_PROJECT,
    POSITIONS_MIN,
    STEP,
    WEIGHT_BYTES,
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
    rounded_bf16,
    spread,
    store_bf16,
    store_float,
    weighted_sum,
)

PHASE, FIRST, END, SIZES, LAYER, WORK, KEYS, VALUES = range(len(BLOCK_NUMBERS))
WIDTH, HEADS, KV_HEADS, HEAD_WIDTH, EXPERTS, CHOSEN, CONTEXT, WINDOW, RENORMALISES = range(len(BLOCK_SIZES))
(
    INPUT_NORM, QUERY, KEY, VALUE, QUERY_BIAS, KEY_BIAS, VALUE_BIAS, QUERY_NORM, QUERY_NORM_SIZE, KEY_NORM,
    KEY_NORM_SIZE, OUTPUT, OUTPUT_BIAS, EXPERT_NORM, ROUTER,
) = range(len(BLOCK_LAYER))  # fmt: skip
(
    ROWS, ROW_COUNT, SLOTS, POSITIONS, COSINES, SINES, PLAIN, CHOSEN_EXPERTS, WEIGHTS, SPREAD, STATES, QUERIES,
    RESULTS, SCORES, SCORE_WIDTH, LOGITS, LINES, HEAD_LINES,
) = range(len(BLOCK_WORK))  # fmt: skip
LINEAR_ROWS, LINEAR_COUNT, LINEAR_WIDTH, NORM, MATRIX, OUTPUTS, LINEAR_RESULTS = range(3, 10)
LINEAR_PLAIN, LINEAR_SPREAD, LINEAR_LINES = range(10, len(LINEAR_NUMBERS))

Numbers = Any  # an array


@compiled(fastmath=FAST)
def _normalise(row: Numbers, weight: Numbers, epsilon: float, result: Numbers) -> None:
    """RMS norm: row × weight / sqrt(mean(row²) + epsilon)."""
    total = np.float32(0.0)
    for place in range(row.shape[0]):
        total += row[place] * row[place]
    factor = np.float32(1.0) / np.sqrt(total / np.float32(row.shape[0]) + epsilon)
    for place in range(row.shape[0]):
        result[place] = row[place] * factor * weight[place]


@compiled(fastmath=FAST)
def _rotate(head: Numbers, cosines: Numbers, sines: Numbers) -> None:
    """Rotary embedding of the first half against the second one, in place."""
    half = cosines.shape[0]
    for place in range(half):
        low, high = head[place], head[place + half]
        head[place] = low * cosines[place] - high * sines[place]
        head[place + half] = high * cosines[place] + low * sines[place]


@compiled(fastmath=FAST)
def _softmax(scores: Numbers) -> None:
    most = scores[0]
    for place in range(scores.shape[0]):
        most = max(most, scores[place])
    total = np.float32(0.0)
    for place in range(scores.shape[0]):
        scores[place] = exp(scores[place] - most)
        total += scores[place]
    factor = np.float32(1.0) / total
    for place in range(scores.shape[0]):
        scores[place] *= factor


@compiled()
def _choose(shares: Numbers, renormalises: int, chosen: Numbers, weights: Numbers) -> None:
    """The K largest, largest first; of equal ones the first. Changes `shares`."""
    total = np.float32(0.0)
    for place in range(chosen.shape[0]):
        best = 0
        for expert in range(1, shares.shape[0]):
            if shares[expert] > shares[best]:
                best = expert
        chosen[place], weights[place] = best, shares[best]
        total += shares[best]
        shares[best] = np.float32(-1.0)
    if renormalises:
        for place in range(chosen.shape[0]):
            weights[place] /= total


@compiled()
def _lines(lines: Numbers, address: int, width: int) -> None:
    for row in range(lines.shape[0]):
        lines[row] = address + 4 * row * width


@compiled()
def _add_bias(address: int, rows: int, stride: int, bias: int, first: int, end: int) -> None:
    """To columns first : end of rows that begin `stride` values apart."""
    if bias:
        for row in range(rows):
            values = floats(address + 4 * row * stride, end)
            for place in range(first, end):
                values[place] += float_at(bias + 4 * place)


@compiled()
def _norm_heads(heads: Numbers, width: int, weight: int, size: int, epsilon: float) -> None:
    """Each head by itself, or all of them as one."""
    if size:
        for start in range(0, heads.shape[0], size):
            part = heads[start : start + size]
            _normalise(part, floats(weight, size), epsilon, part)


def _normalise_for(kind: int, *, rounds: bool = False) -> Any:
    """`rounds` to what the kind of weights can tell."""
    spread_row, is_rounded = spread[kind], rounds and kind == BF16

    @compiled()
    def normalise(rows: int, count: int, width: int, weight: int, epsilon: float, plain: int, spread_rows: int) -> None:
        for row in range(count):
            at = 4 * row * width
            result = floats(plain + at, width)
            _normalise(floats(rows + at, width), floats(weight, width), epsilon, result)
            if is_rounded:
                for place in range(width):
                    result[place] = rounded_bf16(result[place])
            spread_row(result, floats(spread_rows + at, width))

    return normalise


def _block_for(kind: int) -> Any:
    spread_row, multiply_kind, multiply_add_kind = spread[kind], multiply[kind], multiply_add[kind]
    normalise, attend_pair = _normalise_for(kind), _attend_for(kind)
    normalise_for_experts = _normalise_for(kind, rounds=True)
    weight_bytes = WEIGHT_BYTES[kind]
    store = store_bf16 if kind == BF16 else store_float

    @compiled()
    def project(sizes: Numbers, layer: Numbers, work: Numbers, first: int, end: int) -> None:
        """Columns first : end of queries, keys and values side by side."""
        rows, total = work[ROW_COUNT], (sizes[HEADS] + 2 * sizes[KV_HEADS]) * sizes[HEAD_WIDTH]
        lines = ints(work[LINES], rows)
        start = 0
        for which in range(3):
            count = (sizes[HEADS] if which == 0 else sizes[KV_HEADS]) * sizes[HEAD_WIDTH]
            own_first, own_end = max(first - start, 0), min(end - start, count)
            if own_first < own_end:
                address = work[STATES] + 4 * start
                multiply_kind(
                    layer[QUERY + which], 0, own_first, own_end, sizes[WIDTH], lines.ctypes.data, rows,
                    work[LINES] + 8 * rows * (1 + which),
                )  # fmt: skip
                _add_bias(address, rows, total, layer[QUERY_BIAS + which], own_first, own_end)
            start += count

    @compiled()
    def place(sizes: Numbers, layer: Numbers, work: Numbers, keys: int, values: int, factors: Numbers) -> None:
        """Norms and rotates queries and keys, puts keys and values into the pools, spreads queries × scale."""
        width, heads, kv_heads = sizes[HEAD_WIDTH], sizes[HEADS], sizes[KV_HEADS]
        slots, positions = ints(work[SLOTS], work[ROW_COUNT]), ints(work[POSITIONS], work[ROW_COUNT])
        total = (heads + 2 * kv_heads) * width
        for row in range(work[ROW_COUNT]):
            states = floats(work[STATES] + 4 * row * total, total)
            _norm_heads(states[: heads * width], width, layer[QUERY_NORM], layer[QUERY_NORM_SIZE], factors[0])
            rotated = states[: (heads + kv_heads) * width]
            _norm_heads(rotated[heads * width :], width, layer[KEY_NORM], layer[KEY_NORM_SIZE], factors[0])
            cosines = floats(work[COSINES] + 2 * row * width, width // 2)
            sines = floats(work[SINES] + 2 * row * width, width // 2)
            for start in range(0, rotated.shape[0], width):
                _rotate(rotated[start : start + width], cosines, sines)
            for start in range(0, heads * width, width):
                query = states[start : start + width]
                for column in range(width):
                    query[column] *= factors[1]
                spread_row(query, floats(work[QUERIES] + 4 * (row * heads * width + start), width))
            for head in range(kv_heads):
                line = ((slots[row] * kv_heads + head) * sizes[CONTEXT] + positions[row]) * width * weight_bytes
                key, value = (heads + head) * width, (heads + kv_heads + head) * width
                for column in range(width):
                    store(keys + line + column * weight_bytes, states[key + column])
                    store(values + line + column * weight_bytes, states[value + column])

    @compiled()
    def attend(sizes: Numbers, work: Numbers, keys: int, values: int, first: int, end: int) -> None:
        for pair in range(first, end):
            attend_pair(sizes, work, keys, values, pair)

    @compiled()
    def output(sizes: Numbers, layer: Numbers, work: Numbers, first: int, end: int) -> None:
        rows = work[ROW_COUNT]
        multiply_add_kind(
            layer[OUTPUT], 0, first, end, sizes[HEADS] * sizes[HEAD_WIDTH], work[LINES] + 8 * 4 * rows, rows,
            work[LINES] + 8 * 5 * rows,
        )  # fmt: skip
        _add_bias(work[ROWS], rows, sizes[WIDTH], layer[OUTPUT_BIAS], first, end)

    @compiled()
    def route(sizes: Numbers, layer: Numbers, work: Numbers, epsilon: float) -> None:
        rows, experts, count = work[ROW_COUNT], sizes[EXPERTS], sizes[CHOSEN]
        # Whoever computes the experts gets the same rows: a frame carries them in the dtype of the weights.
        normalise_for_experts(
            work[ROWS], rows, sizes[WIDTH], layer[EXPERT_NORM], epsilon, work[PLAIN], work[SPREAD]
        )  # fmt: skip
        multiply_kind(
            layer[ROUTER], 0, 0, experts, sizes[WIDTH], work[LINES], rows, work[LINES] + 8 * 6 * rows
        )  # fmt: skip
        for row in range(rows):
            shares = floats(work[LOGITS] + 4 * row * experts, experts)
            _softmax(shares)
            _choose(
                shares, sizes[RENORMALISES], ints(work[CHOSEN_EXPERTS] + 8 * row * count, count),
                floats(work[WEIGHTS] + 4 * row * count, count),
            )  # fmt: skip

    @compiled()
    def begin(sizes: Numbers, layer: Numbers, work: Numbers, epsilon: float) -> None:
        rows, width, head_width = work[ROW_COUNT], sizes[WIDTH], sizes[HEAD_WIDTH]
        normalise(work[ROWS], rows, width, layer[INPUT_NORM], epsilon, work[PLAIN], work[SPREAD])
        total = (sizes[HEADS] + 2 * sizes[KV_HEADS]) * head_width
        offsets = (0, sizes[HEADS] * head_width, (sizes[HEADS] + sizes[KV_HEADS]) * head_width)
        _lines(ints(work[LINES], rows), work[SPREAD], width)
        for which in range(3):
            _lines(ints(work[LINES] + 8 * (1 + which) * rows, rows), work[STATES] + 4 * offsets[which], total)
        _lines(ints(work[LINES] + 8 * 4 * rows, rows), work[RESULTS], sizes[HEADS] * head_width)
        _lines(ints(work[LINES] + 8 * 5 * rows, rows), work[ROWS], width)
        _lines(ints(work[LINES] + 8 * 6 * rows, rows), work[LOGITS], sizes[EXPERTS])

    @compiled()
    def block(p: Numbers, factors: Numbers) -> int:
        sizes, layer = ints(p[SIZES], len(BLOCK_SIZES)), ints(p[LAYER], len(BLOCK_LAYER))
        work = ints(p[WORK], len(BLOCK_WORK))
        phase, first, end = p[PHASE], p[FIRST], p[END]
        is_all = phase == BLOCK_ALL
        if is_all or phase == BLOCK_NORM:
            begin(sizes, layer, work, factors[0])
        if is_all or phase == BLOCK_PROJECT:
            project(
                sizes, layer, work, first, end if phase else (sizes[HEADS] + 2 * sizes[KV_HEADS]) * sizes[HEAD_WIDTH]
            )
        if is_all or phase == BLOCK_PLACE:
            place(sizes, layer, work, p[KEYS], p[VALUES], factors)
        if is_all or phase == BLOCK_ATTEND:
            attend(sizes, work, p[KEYS], p[VALUES], first, end if phase else work[ROW_COUNT] * sizes[KV_HEADS])
        if is_all or phase == BLOCK_OUTPUT:
            output(sizes, layer, work, first, end if phase else sizes[WIDTH])
        if is_all or phase == BLOCK_ROUTE:
            route(sizes, layer, work, factors[0])
        return 0

    return block


def _attend_for(kind: int) -> Any:
    multiply_kind, weight_bytes = multiply[kind], WEIGHT_BYTES[kind]

    @compiled()
    def score(keys: int, width: int, seen: int, queries: int, group: int, outputs: Numbers) -> None:
        """The group's queries × the first `seen` keys. Outputs come by fours: those of positions that are not written
        yet are not used, and of more than four the last ones are computed once more."""
        whole = max(seen, POSITIONS_MIN) // 4 * 4
        multiply_kind(keys, 0, 0, whole, width, queries, group, outputs.ctypes.data)
        if whole < seen:
            for member in range(group):
                outputs[member] += 4 * (seen - 4)
            last = keys + (seen - 4) * width * weight_bytes
            multiply_kind(last, 0, 0, 4, width, queries, group, outputs.ctypes.data)

    @compiled()
    def mix(values: int, width: int, seen: int, weights: int, group: int, results: int) -> None:
        stride = width * weight_bytes
        for offset in range(0, width, STEP):
            place = values + offset * weight_bytes
            for member in range(0, group, 4):
                given, result, left = weights + 8 * member, results + 8 * member, group - member
                if left >= 4:
                    weighted_sum(kind, 4, place, stride, seen, given, result, offset)
                elif left == 3:
                    weighted_sum(kind, 3, place, stride, seen, given, result, offset)
                elif left == 2:
                    weighted_sum(kind, 2, place, stride, seen, given, result, offset)
                else:
                    weighted_sum(kind, 1, place, stride, seen, given, result, offset)

    @compiled()
    def attend_pair(sizes: Numbers, work: Numbers, keys: int, values: int, pair: int) -> None:
        """One row's heads of one key/value head: softmax(queries × keys) × values over its positions up to its own, the
        last `window` of them if there is a window."""
        width, kv_heads = sizes[HEAD_WIDTH], sizes[KV_HEADS]
        group = sizes[HEADS] // kv_heads
        row, head = pair // kv_heads, pair % kv_heads
        position = ints(work[POSITIONS], work[ROW_COUNT])[row]
        start = max(0, position + 1 - sizes[WINDOW]) if sizes[WINDOW] else 0
        seen = position + 1 - start
        slot = ints(work[SLOTS], work[ROW_COUNT])[row]
        line = ((slot * kv_heads + head) * sizes[CONTEXT] + start) * width * weight_bytes
        own = work[HEAD_LINES] + 8 * 4 * group * pair
        given, scores = ints(own, group), ints(own + 8 * group, group)
        results, ends = ints(own + 16 * group, group), ints(own + 24 * group, group)
        for member in range(group):
            place = pair * group + member
            given[member] = work[QUERIES] + 4 * place * width
            results[member] = work[RESULTS] + 4 * place * width
            scores[member] = ends[member] = work[SCORES] + 4 * place * work[SCORE_WIDTH]
        score(keys + line, width, seen, given.ctypes.data, group, ends)
        for member in range(group):
            _softmax(floats(scores[member], seen))
        mix(values + line, width, seen, scores.ctypes.data, group, results.ctypes.data)

    return attend_pair


def _linear_for(kind: int) -> Any:
    multiply_kind, normalise = multiply[kind], _normalise_for(kind)

    @compiled()
    def linear(p: Numbers, factors: Numbers) -> int:
        phase, rows, width = p[PHASE], p[LINEAR_COUNT], p[LINEAR_WIDTH]
        if phase in (LINEAR_ALL, LINEAR_NORM):
            normalise(p[LINEAR_ROWS], rows, width, p[NORM], factors[0], p[LINEAR_PLAIN], p[LINEAR_SPREAD])
            _lines(ints(p[LINEAR_LINES], rows), p[LINEAR_SPREAD], width)
            _lines(ints(p[LINEAR_LINES] + 8 * rows, rows), p[LINEAR_RESULTS], p[OUTPUTS])
        if phase in (LINEAR_ALL, LINEAR_PROJECT):
            first, end = (0, p[OUTPUTS]) if phase == LINEAR_ALL else (p[FIRST], p[END])
            lines = p[LINEAR_LINES]
            multiply_kind(p[MATRIX], 0, first, end, width, lines, rows, lines + 8 * rows)
        return 0

    return linear


block = tuple(_block_for(kind) for kind in KINDS[:2])
"""By kind: block_KIND of `abi`, on arrays."""

linear = tuple(_linear_for(kind) for kind in KINDS[:2])
