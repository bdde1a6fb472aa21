"""Quantised matrices into float ones, once, when an expert is loaded.

It does not know experts, files or names. Quantised weights travel and lie on disk as the checkpoint stores them
(fewer bytes, and the very bytes the user has can be offered without a copy); only memory holds them decoded, because
decoding costs more than computing: 6.9 ms for a 1536 × 2048 matrix of fp8 and 303 ms for a gpt-oss matrix of MXFP4,
where the product takes under one.

Shapes: R rows, C columns of the decoded matrix. All functions give float32 [R, C].
"""

from __future__ import annotations

from collections.abc import Mapping

import gguf
import torch
from gguf.quants import dequantize

# Formats of GGUF that `gguf` 0.19 decodes; F32, F16 and BF16 need no decoding.
GGUF_FORMATS: Mapping[str, gguf.GGMLQuantizationType] = {
    name.lower(): gguf.GGMLQuantizationType[name]
    for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
} | {"mxfp4_gguf": gguf.GGMLQuantizationType.MXFP4}
MXFP4_BLOCK = 32  # weights to a scale
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_EXPONENT_BIAS = 127


def fp8(weights: torch.Tensor, scales: torch.Tensor, scale_rows: int, scale_columns: int) -> torch.Tensor:
    """DeepSeek's block scales: weights [R, C] float8 e4m3, scales [⌈R / scale_rows⌉, ⌈C / scale_columns⌉] any float.

    Source: `weight_dequant` of DeepSeek-V3's `inference/kernel.py`; `Fp8Dequantize` of transformers 5.24.
    """
    rows, columns = weights.shape
    wide = scales.to(torch.float32).repeat_interleave(scale_rows, 0)[:rows]
    return weights.to(torch.float32) * wide.repeat_interleave(scale_columns, 1)[:, :columns]


def mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """blocks [R, C / 32, 16] uint8, two e2m1 values a byte with the low one first; scales [R, C / 32] uint8 exponents.

    Source: OCP Microscaling Formats 1.0 §5.3.3 and §6.2; `convert_moe_packed_tensors` of transformers 5.24.
    """
    values = torch.tensor(_FP4_VALUES)
    pairs = torch.stack((values[(blocks & 15).long()], values[(blocks >> 4).long()]), dim=-1)  # [R, C/32, 16, 2]
    exponents = scales.to(torch.int32) - _EXPONENT_BIAS
    return torch.ldexp(pairs.flatten(2), exponents[..., None]).flatten(1)


def gguf_rows(data: torch.Tensor, name: str) -> torch.Tensor:
    """data [R, bytes of a row] uint8, in one of GGUF_FORMATS."""
    return torch.from_numpy(dequantize(data.numpy(), GGUF_FORMATS[name]))


def gguf_row_bytes(columns: int, name: str) -> int | None:
    """Bytes of a row of so many weights; None when they do not fill whole blocks."""
    weights, nbytes = gguf.GGML_QUANT_SIZES[GGUF_FORMATS[name]]
    return columns // weights * nbytes if columns % weights == 0 else None
