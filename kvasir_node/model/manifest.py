"""A model by content: the manifest, and each layer's list of experts.

The model's id is the Cid of its manifest. Canonical CBOR (dag-cbor), every Cid binary, a blob is `[Cid, size]`:

    manifest  {v, kind: "manifest", name, family, config: blob, maths: {…}, layer_nodes: [[layer, Cid], …],
               experts_per_layer, chosen_per_row, hidden_size, expert_hidden_size, dtype, expert_bytes,
               files: {name: blob, …}, trunk: blob}
    layer     {v, kind: "layer", layer, experts: [blob, …]}   one per expert, in order

The trunk is one safetensors file of all tensors that are not routed experts; an expert is a safetensors file of its
gate, up and down. This module does not know where blocks are stored, how they travel, or how weights are computed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kvasir_node.base.errors import DataError, Misbehaved
from kvasir_node.base.ids import (
    DAG_CBOR_CODEC,
    RAW_CODEC,
    Cid,
    ModelId,
    SliceId,
    cid_from_bytes,
    cid_of,
    cid_to_bytes,
    codec_of,
)
from kvasir_node.model.tensor_file import EXPERT_DTYPES, ITEM_BYTES, TensorSpec, expert_file_bytes
from kvasir_node.wire.blobs import BLOB_BLOCKS_MAX, BlobRef
from kvasir_node.wire.blocks import BLOCK_BYTES_MAX
from kvasir_node.wire.codec import Fields, decode, encode

VERSION = 1
LAYERS_MAX = 4096
EXPERTS_MAX = 16_384  # of one layer; its node then stays under one block
FILES_MAX = 64
MATHS_FIELDS_MAX = 32
SIZE_MAX = 1 << 20  # of a dimension
_BLOB_BYTES_MAX = BLOB_BLOCKS_MAX * BLOCK_BYTES_MAX
_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,127}\Z")


@dataclass(frozen=True, slots=True)
class Manifest:
    """All that names a model's content. `layer_nodes` has the decoder layers with routed experts, ascending."""

    name: str
    family: str  # the config's model_type
    config: BlobRef  # config.json
    maths: Mapping[str, Any]  # how an expert computes; the plain form of ExpertMaths
    layer_nodes: Mapping[int, Cid]
    experts_per_layer: int
    chosen_per_row: int
    hidden_size: int
    expert_hidden_size: int
    dtype: str  # of the experts' tensors, as safetensors spells it
    expert_bytes: int  # of one expert's file
    files: Mapping[str, BlobRef]  # tokenizer and the like, without config.json
    trunk: BlobRef

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(self.layer_nodes)

    @property
    def model(self) -> ModelId:
        return ModelId(cid_of(encode_manifest(self), DAG_CBOR_CODEC))

    def expert_parts(self) -> dict[str, TensorSpec]:
        """What `parse_expert_file` needs to know of any expert of this model. Raises DataError for a foreign dtype."""
        return _expert_parts(self.dtype, self.hidden_size, self.expert_hidden_size)


@dataclass(frozen=True, slots=True)
class LayerNode:
    """The experts of one layer, by index."""

    layer: int
    experts: tuple[BlobRef, ...]


def is_safe_name(name: str) -> bool:
    """Whether a name may become a file's name here: no separators, no hidden files, no `..`."""
    return _SAFE_NAME.match(name) is not None and ".." not in name


def encode_manifest(manifest: Manifest) -> bytes:
    data = encode(
        {
            "v": VERSION,
            "kind": "manifest",
            "name": manifest.name,
            "family": manifest.family,
            "config": _blob_out(manifest.config),
            "maths": dict(manifest.maths),
            "layer_nodes": [[layer, cid_to_bytes(cid)] for layer, cid in manifest.layer_nodes.items()],
            "experts_per_layer": manifest.experts_per_layer,
            "chosen_per_row": manifest.chosen_per_row,
            "hidden_size": manifest.hidden_size,
            "expert_hidden_size": manifest.expert_hidden_size,
            "dtype": manifest.dtype,
            "expert_bytes": manifest.expert_bytes,
            "files": {name: _blob_out(blob) for name, blob in manifest.files.items()},
            "trunk": _blob_out(manifest.trunk),
        }
    )
    if len(data) > BLOCK_BYTES_MAX:
        raise DataError(f"the manifest of {manifest.name} has {len(data)} bytes; at most {BLOCK_BYTES_MAX} are read")
    return data


def decode_manifest(data: bytes | memoryview) -> Manifest:
    """Reads a manifest that anyone may have written; raises DataError that names the wrong field."""
    try:
        value = decode(data, max_bytes=BLOCK_BYTES_MAX, what="a manifest")
        maths, files = _pop_map(value, "maths", MATHS_FIELDS_MAX), _pop_map(value, "files", FILES_MAX)
        fields = Fields(value, "manifest")
        _check_kind(fields, "manifest")
        manifest = Manifest(
            name=_checked_name(fields.text("name", 128), "name"),
            family=_checked_name(fields.text("family", 128), "family"),
            config=_blob_in("config", _pair(fields, "config")),
            maths=_checked_maths(maths),
            layer_nodes=_layer_nodes(fields),
            experts_per_layer=(experts := fields.integer("experts_per_layer", 1, EXPERTS_MAX)),
            chosen_per_row=fields.integer("chosen_per_row", 1, experts),
            hidden_size=fields.integer("hidden_size", 1, SIZE_MAX),
            expert_hidden_size=fields.integer("expert_hidden_size", 1, SIZE_MAX),
            dtype=fields.text("dtype", 16),
            expert_bytes=fields.integer("expert_bytes", 1, _BLOB_BYTES_MAX),
            files={_checked_name(name, "files"): _blob_in("files", blob) for name, blob in files.items()},
            trunk=_blob_in("trunk", _pair(fields, "trunk")),
        )
        fields.end()
    except Misbehaved as error:
        raise DataError(str(error)) from error
    if manifest.expert_bytes != (expected := expert_file_bytes(manifest.expert_parts())):
        raise DataError(f"manifest.expert_bytes must be {expected} by the sizes and dtype; got {manifest.expert_bytes}")
    return manifest


def encode_layer_node(node: LayerNode) -> bytes:
    experts = [_blob_out(blob) for blob in node.experts]
    return encode({"v": VERSION, "kind": "layer", "layer": node.layer, "experts": experts})


def decode_layer_node(data: bytes | memoryview, manifest: Manifest, layer: int) -> LayerNode:
    """Reads the list of one layer of this manifest; raises DataError that names the wrong field."""
    try:
        fields = Fields(decode(data, max_bytes=BLOCK_BYTES_MAX, what="a layer node"), "layer node")
        _check_kind(fields, "layer")
        fields.integer("layer", layer, layer)
        experts = fields.items("experts", manifest.experts_per_layer, lambda value: _blob_in("experts", value))
        fields.end()
    except Misbehaved as error:
        raise DataError(str(error)) from error
    if len(experts) != manifest.experts_per_layer:
        raise DataError(
            f"layer node.experts of layer {layer} has {len(experts)} of {manifest.experts_per_layer} experts"
        )
    if any(blob.size != manifest.expert_bytes for blob in experts):
        raise DataError(f"layer node.experts of layer {layer} must all have {manifest.expert_bytes} bytes")
    return LayerNode(layer, experts)


def slices_of(manifest: Manifest, slice_bytes: int) -> tuple[SliceId, ...]:
    """Cuts every layer into runs of experts, as equal as can be, each of at most `slice_bytes` (or one expert)."""
    count = manifest.experts_per_layer
    most = max(1, min(count, slice_bytes // manifest.expert_bytes))
    runs = -(-count // most)
    cuts = [count * run // runs for run in range(runs + 1)]
    return tuple(SliceId(layer, first, end - 1) for layer in manifest.layers for first, end in pairwise(cuts))


def _check_kind(fields: Fields, kind: str) -> None:
    fields.integer("v", VERSION, VERSION)
    if (found := fields.text("kind", 16)) != kind:
        raise DataError(f"{kind}.kind must be {kind!r}; got {found!r}")


def _checked_name(name: str, field: str) -> str:
    if not is_safe_name(name):
        raise DataError(f"manifest.{field} must be a plain name of letters, digits and ._+-; got {name[:80]!r}")
    return name


def _expert_parts(dtype: str, hidden_size: int, expert_hidden_size: int) -> dict[str, TensorSpec]:
    if dtype not in EXPERT_DTYPES:
        raise DataError(f"manifest.dtype must be one of {', '.join(EXPERT_DTYPES)}; got {dtype!r}")
    nbytes = hidden_size * expert_hidden_size * ITEM_BYTES[dtype]
    wide, tall = (expert_hidden_size, hidden_size), (hidden_size, expert_hidden_size)
    return {"gate": (dtype, wide, nbytes), "up": (dtype, wide, nbytes), "down": (dtype, tall, nbytes)}


def _checked_maths(maths: Mapping[str, Any]) -> Mapping[str, Any]:
    for name, value in maths.items():
        if len(name) > 64 or not (value is None or type(value) in (bool, int, float, str)) or len(str(value)) > 64:
            raise DataError(f"manifest.maths must hold short plain values; got {name[:64]!r}: {value!r:.64}")
    return maths


def _pop_map(value: Any, name: str, count_max: int) -> dict[str, Any]:
    found = value.pop(name, None) if type(value) is dict else None
    if type(found) is not dict or len(found) > count_max:
        raise DataError(f"manifest.{name} must be a map of at most {count_max} entries; got {found!r:.60}")
    return found


def _pair(fields: Fields, name: str) -> list[Any]:
    return list(fields.items(name, 2, lambda item: item))


def _layer_nodes(fields: Fields) -> dict[int, Cid]:
    nodes: dict[int, Cid] = {}
    for pair in fields.items("layer_nodes", LAYERS_MAX, lambda value: value):
        match pair:
            case [int(layer), bytes(raw)] if type(layer) is int and max(nodes, default=-1) < layer < LAYERS_MAX:
                nodes[layer] = _cid_in("layer_nodes", raw, DAG_CBOR_CODEC)
            case _:
                raise DataError(f"manifest.layer_nodes must be [layer, Cid] with layers ascending; got {pair!r:.60}")
    if not nodes:
        raise DataError("manifest.layer_nodes must name at least one layer with experts")
    return nodes


def _blob_out(blob: BlobRef) -> list[Any]:
    return [cid_to_bytes(blob.cid), blob.size]


def _blob_in(field: str, value: Any) -> BlobRef:
    match value:
        case [bytes(raw), int(size)] if type(size) is int and 0 <= size <= _BLOB_BYTES_MAX:
            cid = _cid_in(field, raw, None if size <= BLOCK_BYTES_MAX else DAG_CBOR_CODEC)
            return BlobRef(cid, size)
        case _:
            raise DataError(f"{field} must be [Cid, size] with a size up to {_BLOB_BYTES_MAX}; got {value!r:.80}")


def _cid_in(field: str, raw: bytes, codec: int | None) -> Cid:
    """`codec` None = either."""
    try:
        cid = cid_from_bytes(raw)
    except DataError as error:
        raise DataError(f"{field}: {error}") from error
    if codec is not None and codec_of(cid) != codec:
        raise DataError(f"{field}: {cid} must be of codec {'raw' if codec == RAW_CODEC else 'dag-cbor'}")
    return cid
