"""Dot products of some rows with many weights, as vector instructions: the innermost loop of the fast paths on a CPU.

It does not know experts, layers or where weights come from: it gets addresses. numba compiles what calls it; this file
writes the inner loop as LLVM code itself, because the same loops written in Python kept too few sums in registers.

Weights are read as they are stored and widened in registers. Rows are float32 and *spread* for the kind of weights
(`spread`), so that widening needs no shuffle. A sum is always built in the same order, whatever the tile: lane by lane
along K, then lane i with lane i + 8, + 4, + 2, + 1. So a row's result has the same bits in any company.

Shapes: W [N, K] weights, X [R, K] rows, Y [R, N] = X Wᵀ; K is a multiple of STEP, N of TILE_OUTPUTS.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvasir_node.model.kernels.abi import F32, INT8, KINDS, STEP, TILE_OUTPUTS, WEIGHT_BYTES

# A tile has 4 rows, so that 4 × 4 sums, 4 rows and 2 weights are the registers of AVX-512; with weights that were
# widened before 6 rows fit. Larger ones spill and take half as long again.
_MANY_ROWS = 24  # from here on weights are widened once for all rows, not once for four
_GROUP_BYTES = 24 * 1024  # of widened weights that are used while they are in the first cache
AHEAD_BYTES = 8192  # without prefetching, reads of one row's weights reached three quarters of this rate

_LANES = 16
_float, _i8, _i16, _i32, _i64 = ir.FloatType(), *(ir.IntType(bits) for bits in (8, 16, 32, 64))
_floats, _ints = ir.VectorType(_float, _LANES), ir.VectorType(_i32, _LANES)
_four_floats = ir.VectorType(_float, 4)

_Value = Any  # of llvmlite, as is every builder here
_emitted: Any = intrinsic  # what it decorates is called with other arguments than it has


def _constant(value: int) -> _Value:
    return ir.Constant(_i64, value)


def _plus(builder: Any, address: _Value, offset: int) -> _Value:
    return builder.add(address, _constant(offset))


def _load(builder: Any, address: _Value, kind: Any) -> _Value:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def _store(builder: Any, value: _Value, address: _Value) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=1)


def _lanes(builder: Any, left: _Value, right: _Value, numbers: Sequence[int]) -> _Value:
    return builder.shuffle_vector(left, right, ir.Constant(ir.VectorType(_i32, len(numbers)), list(numbers)))


def _every_lane(builder: Any, value: _Value) -> _Value:
    undefined = ir.Constant(_floats, ir.Undefined)
    return _lanes(builder, builder.insert_element(undefined, value, ir.Constant(_i32, 0)), undefined, [0] * _LANES)


def _fma(builder: Any) -> _Value:
    kind = ir.FunctionType(_floats, [_floats] * 3)
    return cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{_LANES}f32")


def _widened(builder: Any, kind: int, half: int, address: _Value) -> _Value:
    """16 of the 32 weights at an address: for BF16 those at even or odd places, else the first or the last ones."""
    if kind == F32:
        return _load(builder, _plus(builder, address, 64 * half), _floats)
    if kind == INT8:
        narrow = _load(builder, _plus(builder, address, 16 * half), ir.VectorType(_i8, _LANES))
        return builder.sitofp(builder.sext(narrow, _ints), _floats)
    pairs = _load(builder, address, _ints)  # the bits of a bf16 are the upper half of a float32's
    if half == 0:
        return builder.bitcast(builder.shl(pairs, ir.Constant(_ints, [16] * _LANES)), _floats)
    return builder.bitcast(builder.and_(pairs, ir.Constant(_ints, [-(1 << 16)] * _LANES)), _floats)


def _sums_of_four(builder: Any, sums: Sequence[_Value]) -> _Value:
    """The sums over the lanes of four vectors, as <4 x float>: halves are added until one lane of each is left."""
    first, second = (
        builder.fadd(
            _lanes(builder, left, right, [*range(8), *range(16, 24)]),
            _lanes(builder, left, right, [*range(8, 16), *range(24, 32)]),
        )
        for left, right in (sums[:2], sums[2:])
    )
    low = [*range(4), *range(8, 12), *range(16, 20), *range(24, 28)]
    quarters = builder.fadd(
        _lanes(builder, first, second, low), _lanes(builder, first, second, [lane + 4 for lane in low])
    )
    low = [0, 1, 4, 5, 8, 9, 12, 13]
    eighths = builder.fadd(
        _lanes(builder, quarters, quarters, low), _lanes(builder, quarters, quarters, [lane + 2 for lane in low])
    )
    return builder.fadd(
        _lanes(builder, eighths, eighths, [0, 2, 4, 6]), _lanes(builder, eighths, eighths, [1, 3, 5, 7])
    )


def _shared(module: Any, name: str, emit: Callable[..., None]) -> Any:
    """A function of six int64 that returns nothing, of which a program has one, however many functions call it."""
    function = module.globals.get(name)
    if function is None:
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_i64] * 6), name)
        function.linkage = "linkonce_odr"
        function.attributes.add("noinline")
        function.attributes.add("nounwind")
        builder = ir.IRBuilder(function.append_basic_block())
        emit(builder, *function.args)
        builder.ret_void()
    return function


class _Tile:
    """Emits one tile: `rows` × TILE_OUTPUTS sums."""

    def __init__(self, builder: Any, kind: int, rows: int, fetches: bool) -> None:
        self._builder = builder
        self._kind = kind
        self._rows = rows
        self._fetches = fetches
        self._sums = [[cgutils.alloca_once(builder, _floats) for _ in range(rows)] for _ in range(TILE_OUTPUTS)]

    def multiply(self, weights: _Value, stride: _Value, rows: Sequence[_Value], width: _Value) -> None:
        builder = self._builder
        zero = ir.Constant(_floats, [0.0] * _LANES)
        for each in self._sums:
            for place in each:
                builder.store(zero, place)
        lines = [builder.add(weights, builder.mul(stride, _constant(n))) for n in range(TILE_OUTPUTS)]
        step_bytes = STEP * WEIGHT_BYTES[self._kind]
        with cgutils.for_range(builder, builder.udiv(width, _constant(STEP))) as loop:
            places = [builder.add(line, builder.mul(loop.index, _constant(step_bytes))) for line in lines]
            if self._fetches:
                self._fetch(places, step_bytes)
            offset = builder.mul(loop.index, _constant(4 * STEP))
            self._step(places, [builder.add(row, offset) for row in rows])

    def _step(self, places: Sequence[_Value], rows: Sequence[_Value]) -> None:
        builder = self._builder
        fma = _fma(builder)
        for half in (0, 1):
            inputs = [_load(builder, _plus(builder, row, 64 * half), _floats) for row in rows]
            for place, sums in zip(places, self._sums, strict=True):
                weights = _widened(builder, self._kind, half, place)
                for given, total in zip(inputs, sums, strict=True):
                    builder.store(builder.call(fma, [weights, given, builder.load(total)]), total)

    def _fetch(self, places: Sequence[_Value], step_bytes: int) -> None:
        builder = self._builder
        pointer = _i8.as_pointer()
        prefetch = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [pointer, _i32, _i32, _i32]), "llvm.prefetch.p0"
        )
        flags = [ir.Constant(_i32, value) for value in (0, 3, 1)]  # to read, to keep, data
        for place in places:
            for offset in range(0, step_bytes, 64):
                ahead = builder.inttoptr(_plus(builder, place, AHEAD_BYTES + offset), pointer)
                builder.call(prefetch, [ahead, *flags])

    def results(self, row: int) -> _Value:
        return _sums_of_four(self._builder, [self._builder.load(sums[row]) for sums in self._sums])


@_emitted(prefer_literal=True)
def _tile(  # numba calls it with types
    context: Any, kind: Any, rows: Any, adds: Any, fetches: Any, origin: Any, weights: Any, factors: Any, inputs: Any,
    width: Any, outputs: Any, offset: Any,
) -> Any:  # fmt: skip
    """Y[:, offset : offset + 4] of `rows` rows, set or added.

    kind, rows, adds, fetches and origin are constants: kind is what the weights lie as, origin what they were before
    they were widened; weights is the address of the first of four lines; factors that of their factors (INT8); inputs
    and outputs are the addresses of the rows' addresses; width is K.
    """
    constants = [int(each.literal_value) for each in (kind, rows, adds, fetches, origin)]

    def emit(builder: Any, weights: Any, factors: Any, inputs: Any, width: Any, outputs: Any, offset: Any) -> None:
        kind, rows, adds, fetches, origin = constants
        tile = _Tile(builder, kind, rows, bool(fetches))
        stride = builder.mul(width, _constant(WEIGHT_BYTES[kind]))
        tile.multiply(
            weights, stride, [_load(builder, _plus(builder, inputs, 8 * row), _i64) for row in range(rows)], width
        )
        for row in range(rows):
            place = builder.add(
                _load(builder, _plus(builder, outputs, 8 * row), _i64), builder.mul(offset, _constant(4))
            )
            result = tile.results(row)
            if origin == INT8:
                result = builder.fmul(result, _load(builder, factors, _four_floats))
            if adds:
                result = builder.fadd(_load(builder, place, _four_floats), result)
            _store(builder, result, place)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        name = "tile_" + "_".join(map(str, constants))
        builder.call(_shared(builder.module, name, emit), arguments[5:])
        return context.get_dummy_value()

    return types.none(kind, rows, adds, fetches, origin, *[types.int64] * 6), generate


@_emitted(prefer_literal=True)
def _widen(context: Any, kind: Any, weights: Any, count: Any, room: Any) -> Any:
    """`count` weights from one address to another as float32, in the order in which spread rows meet them."""
    constant = int(kind.literal_value)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weights, count, room = arguments[1:]
        with cgutils.for_range(builder, builder.udiv(count, _constant(STEP))) as loop:
            source = builder.add(weights, builder.mul(loop.index, _constant(STEP * WEIGHT_BYTES[constant])))
            target = builder.add(room, builder.mul(loop.index, _constant(4 * STEP)))
            for half in (0, 1):
                _store(builder, _widened(builder, constant, half, source), _plus(builder, target, 64 * half))
        return context.get_dummy_value()

    return types.none(kind, types.int64, types.int64, types.int64), generate


@_emitted
def _stack_room(context: Any, size: Any) -> Any:
    """The address of so many bytes that are there until the function returns."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.alloca(_i8, arguments[0])
        place.align = 64
        return builder.ptrtoint(place, _i64)

    return types.int64(types.int64), generate


@_emitted(prefer_literal=True)
def weighted_sum(
    context: Any, kind: Any, rows: Any, values: Any, stride: Any, count: Any, weights: Any, outputs: Any, offset: Any
) -> Any:
    """Y[:, offset : offset + 32] of `rows` rows = their weights [rows, count] × 32 columns of V [count, …].

    kind and rows are constants; values is the address of V's first value to read, stride the bytes from one of its
    lines to the next; weights and outputs are the addresses of the rows' addresses. The 32 results are spread, as
    values of that kind want it.
    """
    constants = int(kind.literal_value), int(rows.literal_value)

    def emit(builder: Any, values: Any, stride: Any, count: Any, weights: Any, outputs: Any, offset: Any) -> None:
        kind, rows = constants
        zero = ir.Constant(_floats, [0.0] * _LANES)
        sums = [[cgutils.alloca_once_value(builder, zero) for _ in (0, 1)] for _ in range(rows)]
        given = [_load(builder, _plus(builder, weights, 8 * row), _i64) for row in range(rows)]
        fma = _fma(builder)
        with cgutils.for_range(builder, count) as loop:
            line = builder.add(values, builder.mul(loop.index, stride))
            halves = [_widened(builder, kind, half, line) for half in (0, 1)]
            for row in range(rows):
                weight = _load(builder, builder.add(given[row], builder.mul(loop.index, _constant(4))), _float)
                lanes = _every_lane(builder, weight)
                for half, place in zip(halves, sums[row], strict=True):
                    builder.store(builder.call(fma, [lanes, half, builder.load(place)]), place)
        for row in range(rows):
            place = builder.add(
                _load(builder, _plus(builder, outputs, 8 * row), _i64), builder.mul(offset, _constant(4))
            )
            for half in (0, 1):
                _store(builder, builder.load(sums[row][half]), _plus(builder, place, 64 * half))

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        name = "weighted_sum_" + "_".join(map(str, constants))
        builder.call(_shared(builder.module, name, emit), arguments[2:])
        return context.get_dummy_value()

    return types.none(kind, rows, *[types.int64] * 6), generate


@_emitted
def float_of_bits(context: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _float)

    return types.float32(types.int32), generate


@_emitted
def float_at(context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _load(builder, arguments[0], _float)

    return types.float32(types.int64), generate


def _bf16_bits(builder: Any, value: _Value) -> _Value:
    """Of the nearest bf16, ties to even, as torch rounds; a NaN stays one. An i32 below 2^16."""
    bits, half = builder.bitcast(value, _i32), ir.Constant(_i32, 16)
    odd = builder.and_(builder.lshr(bits, half), ir.Constant(_i32, 1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, ir.Constant(_i32, 0x7FFF))), half)
    return builder.select(builder.fcmp_unordered("uno", value, value), ir.Constant(_i32, 0x7FC0), rounded)


@_emitted
def store_bf16(context: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _store(builder, builder.trunc(_bf16_bits(builder, arguments[1]), _i16), arguments[0])
        return context.get_dummy_value()

    return types.none(types.int64, types.float32), generate


@_emitted
def rounded_bf16(context: Any, value: Any) -> Any:
    """The float32 that a bf16 of this value stands for."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bits = _bf16_bits(builder, arguments[0])
        return builder.bitcast(builder.shl(bits, ir.Constant(_i32, 16)), _float)

    return types.float32(types.float32), generate


@_emitted
def store_float(context: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _store(builder, arguments[1], arguments[0])
        return context.get_dummy_value()

    return types.none(types.int64, types.float32), generate


FAST = {"contract", "reassoc", "nsz", "arcp", "afn"}
"""fastmath for loops over values: sums may be built in any order; a NaN stays a NaN."""


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """numba.njit as all kernels use it: an error would be a crash anyway, so none is looked for."""
    njit: Any = numba.njit
    return njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, **options)


def _pointer_code(kind: Any) -> Any:
    @_emitted
    def pointer(context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), generate

    return pointer


_pointer_to_ints, _pointer_to_floats = _pointer_code(types.int64), _pointer_code(types.float32)
_pointer_to_words = _pointer_code(types.int32)


@compiled(inline="always")
def ints(address: int, count: int) -> Any:
    return numba.carray(_pointer_to_ints(address), (count,))


@compiled(inline="always")
def floats(address: int, count: int) -> Any:
    return numba.carray(_pointer_to_floats(address), (count,))


@compiled(inline="always")
def words(address: int, count: int) -> Any:
    """Of four bytes each, as int32."""
    return numba.carray(_pointer_to_words(address), (count,))


def _few_rows_for(kind: int, adds: int) -> Any:
    weight_bytes = WEIGHT_BYTES[kind]

    @compiled()
    def few_rows(
        weights: int, factors: int, first: int, end: int, width: int, inputs: int, rows: int, outputs: int
    ) -> None:
        for output in range(first, end, TILE_OUTPUTS):
            line, factor = weights + output * width * weight_bytes, factors + 4 * output
            # The first tile brings the weights of this output, and asks for those of later ones; the others find them.
            if rows >= 4:
                _tile(kind, 4, adds, 1, kind, line, factor, inputs, width, outputs, output)
            elif rows == 3:
                _tile(kind, 3, adds, 1, kind, line, factor, inputs, width, outputs, output)
            elif rows == 2:
                _tile(kind, 2, adds, 1, kind, line, factor, inputs, width, outputs, output)
            else:
                _tile(kind, 1, adds, 1, kind, line, factor, inputs, width, outputs, output)
            for row in range(4, rows, 4):
                left, given, result = rows - row, inputs + 8 * row, outputs + 8 * row
                if left >= 4:
                    _tile(kind, 4, adds, 0, kind, line, factor, given, width, result, output)
                elif left == 3:
                    _tile(kind, 3, adds, 0, kind, line, factor, given, width, result, output)
                elif left == 2:
                    _tile(kind, 2, adds, 0, kind, line, factor, given, width, result, output)
                else:
                    _tile(kind, 1, adds, 0, kind, line, factor, given, width, result, output)

    return few_rows


def _many_rows_for(kind: int, adds: int) -> Any:
    weight_bytes = WEIGHT_BYTES[kind]

    @compiled()
    def tiles(
        lines: int, factors: int, width: int, inputs: int, rows: int, outputs: int, output: int, last: int
    ) -> None:
        """`rows` (at most 6) against all outputs of a group."""
        while output < last:
            if rows == 6:
                _tile(F32, 6, adds, 0, kind, lines, factors + 4 * output, inputs, width, outputs, output)
            elif rows == 5:
                _tile(F32, 5, adds, 0, kind, lines, factors + 4 * output, inputs, width, outputs, output)
            elif rows == 4:
                _tile(F32, 4, adds, 0, kind, lines, factors + 4 * output, inputs, width, outputs, output)
            elif rows == 3:
                _tile(F32, 3, adds, 0, kind, lines, factors + 4 * output, inputs, width, outputs, output)
            elif rows == 2:
                _tile(F32, 2, adds, 0, kind, lines, factors + 4 * output, inputs, width, outputs, output)
            else:
                _tile(F32, 1, adds, 0, kind, lines, factors + 4 * output, inputs, width, outputs, output)
            lines += 4 * TILE_OUTPUTS * width
            output += TILE_OUTPUTS

    @compiled()
    def many_rows(
        weights: int, factors: int, first: int, end: int, width: int, inputs: int, rows: int, outputs: int
    ) -> None:
        group = max(1, _GROUP_BYTES // (4 * TILE_OUTPUTS * width)) * TILE_OUTPUTS
        room = _stack_room(4 * group * width)
        for output in range(first, end, group):
            last = min(output + group, end)
            if kind == F32:
                lines = weights + output * width * weight_bytes
            else:
                lines = room
                _widen(kind, weights + output * width * weight_bytes, (last - output) * width, room)
            for row in range(0, rows, 6):
                given, result = inputs + 8 * row, outputs + 8 * row
                tiles(lines, factors, width, given, min(6, rows - row), result, output, last)

    return many_rows


def _multiply_for(kind: int, adds: int) -> Any:
    few_rows, many_rows = _few_rows_for(kind, adds), _many_rows_for(kind, adds)

    @compiled()
    def multiply(
        weights: int, factors: int, first: int, end: int, width: int, inputs: int, rows: int, outputs: int
    ) -> None:
        if rows < _MANY_ROWS:
            few_rows(weights, factors, first, end, width, inputs, rows, outputs)
        else:
            many_rows(weights, factors, first, end, width, inputs, rows, outputs)

    return multiply


multiply = tuple(_multiply_for(kind, 0) for kind in KINDS)
"""By kind: Y[:, first:end] = X Wᵀ. Arguments: addresses of W and of its N factors (INT8), first, end, K, address of the
R addresses of spread rows, R ≥ 1, address of the R addresses of Y's rows."""

multiply_add = tuple(_multiply_for(kind, 1) for kind in KINDS)
"""As `multiply`, added to what Y holds."""


@compiled(fastmath=FAST)
def spread_bf16(row: Any, spread: Any) -> None:
    """Puts a row's values where BF16 weights meet them: of each 32 those at even places first."""
    for start in range(0, row.shape[0], 32):
        for lane in range(16):
            spread[start + lane] = row[start + 2 * lane]
            spread[start + 16 + lane] = row[start + 2 * lane + 1]


@compiled(fastmath=FAST)
def spread_plain(row: Any, spread: Any) -> None:
    for place in range(row.shape[0]):
        spread[place] = row[place]


spread = (spread_plain, spread_bf16, spread_plain)
"""By kind: from a float32 row [K] into another one, for `multiply`."""


@compiled(fastmath=FAST, inline="always")
def exp(value: Any) -> Any:
    """e^value in float32 within 2e-7 relative, in a form that a loop around it is vectorised.

    Source: expf of the Cephes library (S. Moshier), whose polynomial and split of ln 2 these are.
    """
    value = min(max(value, np.float32(-87.0)), np.float32(88.0))
    power = np.floor(value * np.float32(1.44269504088896341) + np.float32(0.5))
    rest = value - power * np.float32(0.693359375) - power * np.float32(-2.12194440e-4)
    series = np.float32(1.9875691500e-4)
    series = series * rest + np.float32(1.3981999507e-3)
    series = series * rest + np.float32(8.3334519073e-3)
    series = series * rest + np.float32(4.1665795894e-2)
    series = series * rest + np.float32(1.6666665459e-1)
    series = series * rest + np.float32(5.0000001201e-1)
    series = series * rest * rest + rest + np.float32(1.0)
    return series * float_of_bits((np.int32(power) + np.int32(127)) << np.int32(23))
