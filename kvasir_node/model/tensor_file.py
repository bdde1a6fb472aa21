"""Safetensors files: reading the header of a big one without its data, writing and reading the small one of an expert.

It does not know what a tensor is for, which model it belongs to, or where a file came from: every byte is hostile
until it was checked. Data is never read here except for the bytes of one expert that the caller already holds.

Source: the format's README ("Format", "Benefits") and the checks of the reference reader (safetensors 0.8,
`tensor.rs`): u64 little-endian header length, JSON, then data that the tensors cover without gap or overlap.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvasir_node.base.errors import DataError

HEADER_BYTES_MAX = 100_000_000  # the reference reader's own limit
DIMENSIONS_MAX = 8
_LENGTH_BYTES = 8
_ALIGNMENT_BYTES = 8

ITEM_BYTES: Mapping[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}
DTYPES: Mapping[str, torch.dtype] = {  # those an expert may have
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
}
FLOAT_DTYPES = ("F32", "BF16", "F16")

TensorSpec = tuple[str, tuple[int, ...], int]
"""(dtype as safetensors spells it, shape, nbytes)."""


@dataclass(frozen=True, slots=True)
class TensorRange:
    """Where one tensor lies: `offset` counts from the start of `file`."""

    file: Path
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def spec(self) -> TensorSpec:
        return self.dtype, self.shape, self.nbytes


def read_header(file: Path) -> dict[str, TensorRange]:
    """The tensors of a safetensors file, by key; reads its header alone.

    Raises DataError for anything the format forbids: a length beyond the file or HEADER_BYTES_MAX (checked before
    anything is allocated), duplicate keys, sizes that disagree with shapes, gaps, overlaps, bytes left over.
    """
    try:
        with file.open("rb") as stream:
            file_bytes = os.fstat(stream.fileno()).st_size
            header_bytes = _header_length(stream.read(_LENGTH_BYTES), file_bytes, file)
            text = stream.read(header_bytes)
    except OSError as error:
        raise DataError(f"reading the header of {file.name}: {error.strerror or error}") from error
    if len(text) != header_bytes:
        raise DataError(f"{file.name} changed while its header was read")
    entries = parse_json_object(text, file.name)
    entries.pop("__metadata__", None)
    start = _LENGTH_BYTES + header_bytes
    tensors = {key: _tensor_range(file, key, entry, start) for key, entry in entries.items()}
    _check_cover(tensors, start, file_bytes, file)
    return tensors


def read_bytes(tensor: TensorRange) -> bytearray:
    """The tensor's bytes, in one buffer of exactly nbytes. Raises DataError when the file is shorter now."""
    buffer = bytearray(tensor.nbytes)
    try:
        with tensor.file.open("rb", buffering=0) as stream:
            stream.seek(tensor.offset)
            view, filled = memoryview(buffer), 0
            while filled < tensor.nbytes and (count := stream.readinto(view[filled:])):
                filled += count
    except OSError as error:
        raise DataError(f"reading {tensor.file.name}: {error.strerror or error}") from error
    if filled != tensor.nbytes:
        raise DataError(f"{tensor.file.name} ends {tensor.nbytes - filled} bytes before the end of a tensor")
    return buffer


def read_tensor(tensor: TensorRange) -> torch.Tensor:
    """One tensor of an expert, in the checkpoint's own dtype."""
    return _as_tensor(read_bytes(tensor), 0, tensor.spec)


def parse_json_object(text: bytes, name: str) -> dict[str, Any]:
    """A JSON object whose keys are unique at every depth; raises DataError that names the file."""
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # ValueError covers bad UTF-8, bad JSON and our duplicate keys
        raise DataError(f"{name} does not hold a valid JSON header: {str(error)[:200]}") from error
    if not isinstance(value, dict):
        raise DataError(f"{name} must hold a JSON object, got {type(value).__name__}")
    return value


def expert_file(parts: Mapping[str, TensorSpec]) -> bytes:
    """The canonical header of an expert's safetensors file; the bytes of its parts follow it, in the same order."""
    _check_parts(parts)
    header: dict[str, Any] = {}
    end = 0
    for part, (dtype, shape, nbytes) in parts.items():
        header[part] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def expert_file_bytes(parts: Mapping[str, TensorSpec]) -> int:
    """Length of the whole file of an expert, header included."""
    return len(expert_file(parts)) + sum(nbytes for _, _, nbytes in parts.values())


def parse_expert_file(data: bytes | bytearray | memoryview, parts: Mapping[str, TensorSpec]) -> dict[str, torch.Tensor]:
    """The tensors of an expert's file that must have exactly these parts, in this order.

    A writable buffer is viewed, not copied, and must not change while the tensors live; a read-only one is copied
    once. Nothing of the file steers anything: its header must equal, byte for byte, the one that `parts` prescribe.
    Raises DataError otherwise.
    """
    header = expert_file(parts)
    view = memoryview(data).cast("B")
    expected_bytes = len(header) + sum(nbytes for _, _, nbytes in parts.values())
    if len(view) != expected_bytes:
        raise DataError(f"an expert's file has {len(view)} bytes, expected {expected_bytes}")
    if view[: len(header)] != header:
        raise DataError(
            f"an expert's file starts with {bytes(view[:200])!r}, expected the canonical header {header[:200]!r}"
        )
    buffer = bytearray(view) if view.readonly else view
    tensors: dict[str, torch.Tensor] = {}
    offset = len(header)
    for part, spec in parts.items():
        tensors[part] = _as_tensor(buffer, offset, spec)
        offset += spec[2]
    return tensors


def _as_tensor(buffer: bytearray | memoryview, offset: int, spec: TensorSpec) -> torch.Tensor:
    dtype, shape, _ = spec
    flat = torch.frombuffer(buffer, dtype=DTYPES[dtype], count=math.prod(shape), offset=offset)
    return flat.view(shape)


def _check_parts(parts: Mapping[str, TensorSpec]) -> None:
    if not parts:
        raise DataError("an expert has at least one part; got none")
    for part, (dtype, shape, nbytes) in parts.items():
        if dtype not in DTYPES:
            raise DataError(f"an expert's {part} is {dtype}; only {', '.join(DTYPES)} can be read")
        if nbytes != math.prod(shape) * DTYPES[dtype].itemsize or nbytes == 0:
            raise DataError(f"an expert's {part} of shape {list(shape)} in {dtype} cannot have {nbytes} bytes")


def _header_length(prefix: bytes, file_bytes: int, file: Path) -> int:
    length = int.from_bytes(prefix, "little")
    room = file_bytes - _LENGTH_BYTES
    if len(prefix) != _LENGTH_BYTES or not 2 <= length <= min(room, HEADER_BYTES_MAX):
        raise DataError(
            f"{file.name} announces a header of {length} bytes, expected 2 to {max(0, min(room, HEADER_BYTES_MAX))}"
        )
    return length


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {twice[:100]!r} occurs twice")
    return value


def _tensor_range(file: Path, key: str, entry: Any, data_start: int) -> TensorRange:
    where = f"{file.name}: tensor {key[:100]!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise DataError(f"{where} must have dtype, shape and data_offsets; got {str(entry)[:100]}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise DataError(f"{where} has the unknown dtype {str(dtype)[:40]!r}")
    if not _are_sizes(shape) or len(shape) > DIMENSIONS_MAX:
        raise DataError(f"{where} has the shape {str(shape)[:100]}, expected up to {DIMENSIONS_MAX} sizes")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise DataError(f"{where} has the data_offsets {str(offsets)[:100]}, expected [begin, end]")
    nbytes = offsets[1] - offsets[0]
    if nbytes != math.prod(shape) * ITEM_BYTES[dtype]:
        raise DataError(f"{where}: {dtype} {shape} does not fill the {nbytes} bytes of its data_offsets")
    return TensorRange(file, data_start + offsets[0], nbytes, dtype, tuple(shape))


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value)


def _check_cover(tensors: Mapping[str, TensorRange], start: int, file_bytes: int, file: Path) -> None:
    end = start
    for key, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset != end:
            relation = "overlaps the one before it" if tensor.offset < end else "leaves a gap before it"
            raise DataError(f"{file.name}: tensor {key[:100]!r} {relation}")
        end += tensor.nbytes
    if end != file_bytes:
        raise DataError(f"{file.name} has {file_bytes} bytes, its tensors end at {end}")
