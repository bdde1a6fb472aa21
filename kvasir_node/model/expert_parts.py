"""The parts of an expert as checkpoints store them: their names, order and shapes, and how they become matrices.

It does not know files, families or where parts come from. A part is named after its matrix and what it holds of it:

    gate, up, gate_up, down        the matrix itself, in F32, BF16, F16, or F8_E4M3 with
    gate_scale, …                  one scale per block of weights
    gate_blocks, gate_scales, …    MXFP4
    gate_q4_k, …                   a quantised format of GGUF, as bytes
    gate_bias, …                   one value per output

Shapes: D model width, I expert width; a matrix is [out, in].
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from kvasir_node.base.errors import DataError
from kvasir_node.model.dequantise import GGUF_FORMATS, MXFP4_BLOCK, fp8, gguf_row_bytes, gguf_rows, mxfp4
from kvasir_node.model.maths import ExpertMaths
from kvasir_node.model.quantise import int8_rows
from kvasir_node.model.tensor_file import DTYPES, FLOAT_DTYPES, TensorSpec

_MATRICES = ("gate", "up", "gate_up", "down")
_PIECES = ("", "scale", "blocks", "scales", *GGUF_FORMATS, "bias")
_PARTS = {f"{matrix}_{piece}".rstrip("_"): (matrix, piece) for matrix in _MATRICES for piece in _PIECES}
_PLACES = {name: place for place, name in enumerate(_PARTS)}
PARTS_MAX = 16  # of one expert; the most there can be are three matrices of two pieces with a bias
_SPELLINGS = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """An expert ready to compute with: up [2I, D] with the gate's rows first ([I, D] without a gate), down [D, I].

    With `gate` [I, D], which lies elsewhere in memory, `up` is [I, D]. Rows of int8 are to be multiplied by factors.
    """

    up: torch.Tensor
    down: torch.Tensor
    up_bias: torch.Tensor | None = None  # [2I] or [I]
    down_bias: torch.Tensor | None = None  # [D]
    gate: torch.Tensor | None = None
    up_factors: torch.Tensor | None = None  # float32, [2I] or [I]
    down_factors: torch.Tensor | None = None  # float32 [D]
    is_view: bool = field(default=False, kw_only=True)  # of memory that is not the expert's own

    def to(self, dtype: torch.dtype) -> ExpertWeights:
        """The same numbers as plain matrices, `up` in one piece."""
        up = self.up if self.gate is None else torch.cat((self.gate, self.up))
        matrices = (_multiplied(up, self.up_factors), _multiplied(self.down, self.down_factors))
        biases = (None if bias is None else bias.to(dtype) for bias in (self.up_bias, self.down_bias))
        return ExpertWeights(*(matrix.to(dtype) for matrix in matrices), *biases)


def _multiplied(matrix: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
    return matrix if factors is None else matrix * factors[:, None]


def part_name(matrix: str, piece: str) -> str:
    return f"{matrix}_{piece}" if piece else matrix


def in_order(names: Iterable[str]) -> list[str]:
    """The canonical order of parts, which is that of an expert's file. Raises DataError for an unknown name."""
    names = list(names)
    odd = next((name for name in names if name not in _PLACES), None)
    if odd is not None:
        raise DataError(f"{odd[:60]!r} is not a part of an expert that this version knows")
    return sorted(names, key=_PLACES.__getitem__)


def check_parts(maths: ExpertMaths, parts: Mapping[str, TensorSpec], hidden_size: int, expert_hidden_size: int) -> None:
    """Raises DataError that names the part, unless these parts make up exactly one expert of this model."""
    matrices: dict[str, dict[str, TensorSpec]] = {}
    for name in in_order(parts):
        matrix, piece = _PARTS[name]
        matrices.setdefault(matrix, {})[piece] = parts[name]
    allowed = [{"gate", "up", "down"}, {"gate_up", "down"}] if maths.has_gate else [{"up", "down"}]
    if set(matrices) not in allowed:
        nearest = max(allowed, key=lambda names: len(names & set(matrices)))
        missing, odd = sorted(nearest - set(matrices)), sorted(set(matrices) - nearest)
        raise DataError(f"no {missing[0]} matrix" if missing else f"a {odd[0]} matrix, which it should not have")
    sizes = {
        "gate": (expert_hidden_size, hidden_size),
        "up": (expert_hidden_size, hidden_size),
        "gate_up": (2 * expert_hidden_size, hidden_size),
        "down": (hidden_size, expert_hidden_size),
    }
    for matrix, pieces in matrices.items():
        _check_matrix(maths, matrix, pieces, *sizes[matrix])


def _check_matrix(maths: ExpertMaths, matrix: str, pieces: Mapping[str, TensorSpec], rows: int, columns: int) -> None:
    if ("bias" in pieces) != maths.bias:
        raise DataError(f"{matrix} has {'no' if maths.bias else 'a'} bias, expected {'one' if maths.bias else 'none'}")
    expected = _expected(maths, matrix, pieces, rows, columns) | (
        {"bias": (FLOAT_DTYPES, (rows,))} if maths.bias else {}
    )
    for piece, (dtype, shape, nbytes) in pieces.items():
        name = part_name(matrix, piece)
        if piece not in expected:
            raise DataError(
                f"{name} beside {', '.join(sorted(pieces))[:100]} is an encoding this version does not know"
            )
        dtypes, right_shape = expected[piece]
        if dtype not in dtypes:
            raise DataError(f"{name} is {dtype}; supported: {', '.join(dtypes)}")
        if shape != right_shape:
            raise DataError(f"{name} has the shape {list(shape)}, expected {list(right_shape)}")
        if nbytes != math.prod(shape) * DTYPES[dtype].itemsize:
            raise DataError(f"{name} of shape {list(shape)} in {dtype} cannot have {nbytes} bytes")


_Expected = dict[str, tuple[Iterable[str], tuple[int, ...]]]  # piece -> dtypes, shape


def _expected(maths: ExpertMaths, matrix: str, pieces: Mapping[str, TensorSpec], rows: int, columns: int) -> _Expected:
    encoding = [piece for piece in pieces if piece != "bias"]
    if encoding == [""]:
        return {"": (FLOAT_DTYPES, (columns, rows) if maths.transposed else (rows, columns))}
    if encoding == ["", "scale"] and maths.scale_rows:
        scales = (-(-rows // maths.scale_rows), -(-columns // maths.scale_columns))
        return {"": (("F8_E4M3",), (rows, columns)), "scale": (FLOAT_DTYPES, scales)}
    if encoding == ["blocks", "scales"] and columns % MXFP4_BLOCK == 0:
        blocks = columns // MXFP4_BLOCK
        return {"blocks": (("U8",), (rows, blocks, MXFP4_BLOCK // 2)), "scales": (("U8",), (rows, blocks))}
    if len(encoding) == 1 and encoding[0] in GGUF_FORMATS:
        row_bytes = gguf_row_bytes(columns, encoding[0])
        if row_bytes is not None:
            return {encoding[0]: (("U8",), (rows, row_bytes))}
    stored = ", ".join(part_name(matrix, piece) for piece in encoding)
    raise DataError(f"{matrix} of {rows} × {columns} is stored as {stored or 'nothing'}, which cannot be decoded")


def decode(
    maths: ExpertMaths,
    parts: Mapping[str, torch.Tensor],
    hidden_size: int,
    expert_hidden_size: int,
    dtype: torch.dtype,
    bias_dtype: torch.dtype,
    device: torch.device,
) -> ExpertWeights:
    """Matrices and biases of their own on `device`; the parts may be reused. Raises DataError as `check_parts`.

    A `dtype` of int8 quantises.
    """
    specs = {name: (_SPELLINGS.get(t.dtype, str(t.dtype)), tuple(t.shape), t.nbytes) for name, t in parts.items()}
    check_parts(maths, specs, hidden_size, expert_hidden_size)

    def matrix(name: str) -> torch.Tensor:
        return _decode_matrix(maths, name, parts)

    def bias(name: str) -> torch.Tensor:
        return parts[part_name(name, "bias")]

    is_joined = any(_PARTS[name][0] == "gate_up" for name in parts)
    ups = ["gate_up"] if is_joined else ["gate", "up"] if maths.has_gate else ["up"]
    up = _gate_first(maths, [matrix(name) for name in ups])
    up_bias = _gate_first(maths, [bias(name) for name in ups]) if maths.bias else None
    down, down_bias = matrix("down"), bias("down") if maths.bias else None
    biases = tuple(None if bias is None else _own(bias, bias_dtype, device) for bias in (up_bias, down_bias))
    if dtype is not torch.int8:
        return ExpertWeights(_own(up, dtype, device), _own(down, dtype, device), *biases)
    (up, up_factors), (down, down_factors) = (int8_rows(each.to(device)) for each in (up, down))
    return ExpertWeights(up, down, *biases, up_factors=up_factors, down_factors=down_factors)


def lies_ready(maths: ExpertMaths, parts: Mapping[str, TensorSpec], dtype: torch.dtype) -> bool:
    """Whether the matrices of parts that `check_parts` let pass are what `decode` would make of them, bit for bit."""
    is_plain = not (maths.transposed or maths.interleaved or maths.bias)
    return is_plain and all(name in _MATRICES and spec[0] == _SPELLINGS.get(dtype) for name, spec in parts.items())


def as_they_lie(parts: Mapping[str, torch.Tensor]) -> ExpertWeights:
    """An expert of parts that lie ready: views, which live as long as it does."""
    if "gate_up" in parts:
        return ExpertWeights(parts["gate_up"], parts["down"], is_view=True)
    return ExpertWeights(parts["up"], parts["down"], gate=parts["gate"], is_view=True)


def _own(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # `to` and `contiguous` return their argument when nothing changes; the caller's buffer may be reused.
    return torch.empty(tensor.shape, dtype=dtype, device=device).copy_(tensor)


def _decode_matrix(maths: ExpertMaths, matrix: str, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if matrix not in parts:
        if (blocks := parts.get(part_name(matrix, "blocks"))) is not None:
            return mxfp4(blocks, parts[part_name(matrix, "scales")])
        form = next(piece for piece in GGUF_FORMATS if part_name(matrix, piece) in parts)
        return gguf_rows(parts[part_name(matrix, form)], form)
    if (scales := parts.get(part_name(matrix, "scale"))) is not None:
        return fp8(parts[matrix], scales, maths.scale_rows, maths.scale_columns)
    return parts[matrix].t() if maths.transposed else parts[matrix]


def _gate_first(maths: ExpertMaths, pieces: list[torch.Tensor]) -> torch.Tensor:
    """Rows of the gate, then of up, whether they came apart, one after the other, or taking turns."""
    if len(pieces) > 1:
        return torch.cat(pieces)
    return torch.cat((pieces[0][::2], pieces[0][1::2])) if maths.interleaved else pieces[0]
