"""The header of a GGUF file: its metadata and where each tensor lies, without reading data.

It does not know models: what the names mean is gguf_checkpoint.py's. Every byte is hostile until it was checked, so the
reader of the `gguf` package (which trusts counts) is not used.

Source: ggml's docs/gguf.md, versions 2 and 3 (little-endian): magic, version, counts, key-value pairs, tensor infos,
padding, data. Shapes are stored with the fastest dimension first; here they are as in torch.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf

from kvasir_node.base.errors import DataError
from kvasir_node.model.dequantise import GGUF_FORMATS
from kvasir_node.model.tensor_file import TensorRange

HEADER_BYTES_MAX = 256 << 20  # vocabularies and merges of the largest models take 20 MB
PAIRS_MAX = 4096
TENSORS_MAX = 65_536
DIMENSIONS_MAX = 4
ARRAY_ITEMS_MAX = 8 << 20
_VERSIONS = (2, 3)
_ALIGNMENT_DEFAULT = 32
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_PLAIN = {
    gguf.GGMLQuantizationType.F32: "F32",
    gguf.GGMLQuantizationType.F16: "F16",
    gguf.GGMLQuantizationType.BF16: "BF16",
}
_FORMAT_NAMES = {number: name for name, number in GGUF_FORMATS.items()}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a file. `format` "" = plain floats of `data.dtype`; else one of GGUF_FORMATS, and `data` is U8 with
    the bytes of a row as its last dimension. `shape` is the decoded one."""

    shape: tuple[int, ...]
    format: str
    data: TensorRange


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """`metadata` has scalars and strings alone; arrays (vocabularies) are skipped."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_gguf_header(file: Path) -> GgufHeader:
    """Raises DataError for anything the format forbids, or a type of tensor that cannot be decoded."""
    try:
        with file.open("rb") as stream:
            data = stream.read(HEADER_BYTES_MAX)
            file_bytes = stream.seek(0, 2)
    except OSError as error:
        raise DataError(f"reading the header of {file.name}: {error.strerror or error}") from error
    try:
        return _Reader(file, data, file_bytes).header()
    except (struct.error, UnicodeDecodeError) as error:
        raise DataError(f"the GGUF header of {file.name} is cut or damaged: {error}") from error


class _Reader:
    def __init__(self, file: Path, data: bytes, file_bytes: int) -> None:
        self._file = file
        self._data = data
        self._file_bytes = file_bytes
        self._at = 0

    def header(self) -> GgufHeader:
        if self._data[:4] != b"GGUF":
            raise DataError(f"{self._file.name} is not a GGUF file")
        self._at = 4
        version = self._number("I")
        if version not in _VERSIONS:
            raise DataError(f"{self._file.name} is GGUF of version {version}; 2 and 3 are read")
        tensor_count = self._bounded("Q", TENSORS_MAX, "tensors")
        pair_count = self._bounded("Q", PAIRS_MAX, "key-value pairs")
        metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = self._string()
            if key in metadata:
                raise DataError(f"{self._file.name}: the key {key[:100]!r} occurs twice")
            metadata[key] = self._value(self._number("I"))
        infos = [self._tensor_info() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", _ALIGNMENT_DEFAULT)
        if type(alignment) is not int or not 8 <= alignment <= 1 << 16 or alignment % 8:
            raise DataError(f"{self._file.name}: an alignment of {str(alignment)[:20]}")
        start = -(-self._at // alignment) * alignment
        tensors = {name: self._tensor(name, shape, number, start + offset) for name, shape, number, offset in infos}
        if len(tensors) != tensor_count:
            raise DataError(f"{self._file.name} names a tensor twice")
        return GgufHeader({key: value for key, value in metadata.items() if value is not None}, tensors)

    def _number(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._data, self._at)
        self._at += struct.calcsize("<" + code)
        return value

    def _bounded(self, code: str, maximum: int, what: str) -> int:
        value = self._number(code)
        if value > maximum:
            raise DataError(f"{self._file.name} announces {value} {what}; at most {maximum} are read")
        return value

    def _string(self) -> str:
        length = self._bounded("Q", len(self._data) - self._at, "bytes of a string")
        raw = self._data[self._at : self._at + length]
        self._at += length
        return raw.decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._skip_array()
        if kind not in _SCALARS:
            raise DataError(f"{self._file.name} has a value of the unknown type {kind}")
        return self._number(_SCALARS[kind])

    def _skip_array(self) -> None:
        kind = self._number("I")
        count = self._bounded("Q", ARRAY_ITEMS_MAX, "items of an array")
        if kind in _SCALARS:
            self._at += count * struct.calcsize("<" + _SCALARS[kind])
            return
        if kind != _STRING:
            raise DataError(f"{self._file.name} has an array of the type {kind}, which is not supported")
        for _ in range(count):
            length = self._bounded("Q", len(self._data) - self._at, "bytes of a string")
            self._at += length

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dimensions = self._bounded("I", DIMENSIONS_MAX, "dimensions")
        sizes = [self._bounded("Q", 1 << 40, "values in a dimension") for _ in range(dimensions)]
        return name, tuple(reversed(sizes)), self._number("I"), self._number("Q")

    def _tensor(self, name: str, shape: tuple[int, ...], number: int, offset: int) -> GgufTensor:
        known = {int(kind): kind for kind in (*_PLAIN, *_FORMAT_NAMES)}
        kind = known.get(number)
        if kind is None:
            raise DataError(
                f"{self._file.name}: {name[:100]!r} is of the type {_type_name(number)}, which is not supported"
            )
        weights, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if not shape or math.prod(shape) == 0 or shape[-1] % weights:
            raise DataError(f"{self._file.name}: {name[:100]!r} of {list(shape)} does not fill blocks of {weights}")
        row_bytes = shape[-1] // weights * block_bytes
        nbytes = math.prod(shape[:-1]) * row_bytes
        if offset + nbytes > self._file_bytes:
            raise DataError(f"{self._file.name} ends before its tensor {name[:100]!r}")
        if kind in _PLAIN:
            return GgufTensor(shape, "", TensorRange(self._file, offset, nbytes, _PLAIN[kind], shape))
        data = TensorRange(self._file, offset, nbytes, "U8", (*shape[:-1], row_bytes))
        return GgufTensor(shape, _FORMAT_NAMES[kind], data)


def _type_name(number: int) -> str:
    try:
        return gguf.GGMLQuantizationType(number).name
    except ValueError:
        return str(number)
