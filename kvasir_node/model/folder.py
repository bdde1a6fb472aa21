"""A model that came by content, as a folder on disk: which files it has, and where in them each block lies.

    config.json, tokenizer files        as they were
    trunk.safetensors                   the trunk's blob, byte for byte
    model.safetensors.index.json        names the trunk's tensors alone, which is all that transformers reads
    experts-LAYER-WHICH.safetensors     the experts of one layer that are here, keys LAYER.EXPERT.PART
    kvasir.json                         the model's id, the size of its blocks, and which file holds which layer

It may lack experts: a coordinator need not hold all. This module writes no file and does not know stores or peers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvasir_node.base.content import BlockSource, FilePiece, Piece, split_pieces
from kvasir_node.base.errors import DataError
from kvasir_node.base.ids import Cid, ExpertId, ModelId, parse_cid
from kvasir_node.model.tensor_file import (
    TensorRange,
    TensorSpec,
    expert_file,
    parse_json_object,
    read_header,
)
from kvasir_node.wire.blobs import BlobNode, BlobRef
from kvasir_node.wire.blocks import BLOCK_BYTES_MAX

NOTE_FILE = "kvasir.json"
NOTE_SCHEMA = "kvasir.folder/1"
NOTE_BYTES_MAX = 1 << 20
TRUNK_FILE = "trunk.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
_LAYER_FILE = re.compile(r"experts-[0-9]{1,6}-[a-z]{1,16}\.safetensors\Z")
_KEY = re.compile(r"(0|[1-9][0-9]{0,5})\.(0|[1-9][0-9]{0,5})\.([a-z0-9_]{1,32})\Z")
_LENGTH_BYTES = 8
_ALIGNMENT_BYTES = 8


@dataclass(frozen=True, slots=True)
class FolderNote:
    """kvasir.json. `layer_files` has the layers of which experts are here; `block_bytes` 0 = not known yet."""

    model: ModelId
    block_bytes: int = 0
    layer_files: Mapping[int, str] = field(default_factory=dict[int, str])


def encode_note(note: FolderNote) -> bytes:
    layers = {str(layer): name for layer, name in sorted(note.layer_files.items())}
    document = {"schema": NOTE_SCHEMA, "model": note.model, "block_bytes": note.block_bytes, "layers": layers}
    return json.dumps(document, indent=1).encode()


def read_note(folder: Path) -> FolderNote | None:
    """None for an ordinary checkpoint; raises DataError for a note that is not one of ours."""
    try:
        with (folder / NOTE_FILE).open("rb") as stream:
            text = stream.read(NOTE_BYTES_MAX + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"reading {NOTE_FILE} of {folder.name}: {error.strerror or error}") from error
    if len(text) > NOTE_BYTES_MAX:
        raise DataError(f"{NOTE_FILE} of {folder.name} is larger than {NOTE_BYTES_MAX} bytes")
    return _checked_note(parse_json_object(text, NOTE_FILE), folder)


def _checked_note(document: Mapping[str, Any], folder: Path) -> FolderNote:
    match document:
        case {"schema": str(schema), "model": str(model), "block_bytes": int(size), "layers": dict(layers)}:
            if schema == NOTE_SCHEMA and 0 <= size <= BLOCK_BYTES_MAX and all(map(_is_layer, layers.items())):
                return FolderNote(ModelId(parse_cid(model)), size, {int(layer): name for layer, name in layers.items()})
    raise DataError(f"{NOTE_FILE} of {folder.name} is damaged or of another version; fetch the model again")


def _is_layer(item: tuple[str, Any]) -> bool:
    layer, name = item
    return layer.isdecimal() and len(layer) <= 6 and isinstance(name, str) and _LAYER_FILE.match(name) is not None


def layer_file_name(layer: int, which: str) -> str:
    """`which` = what chose the experts, such as all or half: another choice gets another file."""
    return f"experts-{layer:05d}-{which}.safetensors"


def layer_file_header(layer: int, experts: Sequence[int], parts: Mapping[str, TensorSpec]) -> bytes:
    """What a layer's file begins with; each expert's parts follow, as in the expert's own file but for its header."""
    header: dict[str, Any] = {}
    end = 0
    for expert in experts:
        for part, (dtype, shape, nbytes) in parts.items():
            header[f"{layer}.{expert}.{part}"] = {
                "dtype": dtype,
                "shape": list(shape),
                "data_offsets": [end, end + nbytes],
            }
            end += nbytes
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def read_experts(layer_files: Iterable[tuple[int, Path]]) -> dict[ExpertId, dict[str, TensorRange]]:
    """Where the experts lie that are here. Raises DataError for a file that is gone or not ours."""
    experts: dict[ExpertId, dict[str, TensorRange]] = {}
    for layer, file in layer_files:
        for key, tensor in read_header(file).items():
            match = _KEY.match(key)
            if match is None or int(match[1]) != layer:
                raise DataError(f"{file.name} holds {key[:100]!r}, expected {layer}.EXPERT.PART; fetch the model again")
            experts.setdefault(ExpertId(layer, int(match[2])), {})[match[3]] = tensor
    return experts


def weights_index(trunk_file: Path) -> bytes:
    """model.safetensors.index.json of the trunk's file. Raises DataError for a file that is not safetensors."""
    tensors = read_header(trunk_file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    weight_map = dict.fromkeys(sorted(tensors), trunk_file.name)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1).encode()


def blob_sources(
    blob: BlobRef, node: BlobNode | None, pieces: Sequence[Piece], block_bytes: int
) -> dict[Cid, BlockSource]:
    """Where each block of a blob lies, whose bytes are `pieces`; `node` None = it is a single block.

    Raises DataError when the blob cannot have been cut into blocks of `block_bytes`.
    """
    if node is None:
        return {blob.cid: tuple(pieces)}
    sources = list(split_pieces(pieces, block_bytes or BLOCK_BYTES_MAX))
    if len(sources) != len(node.blocks):
        raise DataError(f"blob {blob.cid} has {len(node.blocks)} blocks, not {len(sources)} of {block_bytes} bytes")
    return dict(zip(node.blocks, sources, strict=True))


def expert_pieces(parts: Mapping[str, TensorSpec], ranges: Mapping[str, TensorRange]) -> tuple[Piece, ...]:
    """An expert's own file, out of the layer's file that holds it."""
    found = [ranges[part] for part in parts]
    return (expert_file(parts), *(FilePiece(tensor.file, tensor.offset, tensor.nbytes) for tensor in found))
