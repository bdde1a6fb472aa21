"""The weights of a quantised checkpoint's trunk, decoded once, under the names that transformers loads.

It does not know models or experts. Checkpoints that are not quantised never come here: their trunk stays a mapped file.
"""

from __future__ import annotations

import torch

from kvasir_node.base.errors import DataError
from kvasir_node.model.checkpoint import Checkpoint
from kvasir_node.model.dequantise import GGUF_FORMATS, fp8, gguf_rows
from kvasir_node.model.gguf_checkpoint import ENCODED
from kvasir_node.model.tensor_file import DTYPES, TensorRange, read_tensor

_SCALE = "_scale_inv"


def needs_decoding(checkpoint: Checkpoint) -> bool:
    return any(
        tensor.dtype.startswith("F8_") or ENCODED in key or tensor.file.suffix == ".gguf"
        for key, tensor in checkpoint.trunk.items()
    )


def decoded_trunk(checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Every tensor of the trunk: quantised ones decoded, in `dtype`; others as they are.

    Raises DataError for one whose scales are missing, misshapen or stored in a way that is not known.
    """
    trunk = checkpoint.trunk
    return {
        key.partition(ENCODED)[0]: _decoded(checkpoint, key, tensor, dtype)
        for key, tensor in trunk.items()
        if not (key.endswith(_SCALE) and key.removesuffix(_SCALE) in trunk)
    }


def _decoded(checkpoint: Checkpoint, key: str, tensor: TensorRange, dtype: torch.dtype) -> torch.Tensor:
    if tensor.dtype not in DTYPES:
        raise DataError(f"{key[:100]!r} is {tensor.dtype}; supported in a quantised trunk: {', '.join(DTYPES)}")
    if ENCODED in key:
        return _decoded_rows(key, tensor, dtype)
    return _decoded_fp8(checkpoint, key, tensor, dtype) if tensor.dtype == "F8_E4M3" else read_tensor(tensor)


def _decoded_rows(key: str, tensor: TensorRange, dtype: torch.dtype) -> torch.Tensor:
    name = key.partition(ENCODED)[2]
    if name not in GGUF_FORMATS or tensor.dtype != "U8" or len(tensor.shape) != 2:
        raise DataError(f"{key[:100]!r} of {list(tensor.shape)} in {tensor.dtype} is in no format that is known")
    try:
        return gguf_rows(read_tensor(tensor), name).to(dtype)
    except ValueError as error:
        raise DataError(f"{key[:100]!r} of {list(tensor.shape)} cannot be decoded: {error}") from error


def _decoded_fp8(checkpoint: Checkpoint, key: str, tensor: TensorRange, dtype: torch.dtype) -> torch.Tensor:
    scales = checkpoint.trunk.get(key + _SCALE)
    rows, columns = checkpoint.maths.scale_rows, checkpoint.maths.scale_columns
    if scales is None or not rows or len(tensor.shape) != 2:
        raise DataError(f"{key[:100]!r} is {tensor.dtype} without the block scales {key[-40:]}{_SCALE}")
    expected = (-(-tensor.shape[0] // rows), -(-tensor.shape[1] // columns))
    if scales.shape != expected or scales.dtype not in ("F32", "BF16", "F16"):
        raise DataError(
            f"{key[:100]!r} has scales of {list(scales.shape)} in {scales.dtype}, expected {list(expected)}"
        )
    return fp8(read_tensor(tensor), read_tensor(scales), rows, columns).to(dtype)
