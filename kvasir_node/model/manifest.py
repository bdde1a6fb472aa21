"""A model by content: the manifest, and each layer's list of experts.

The model's id is the Cid of its manifest. Canonical CBOR (dag-cbor), every Cid binary, a blob is `[Cid, size]`:

    manifest  {v, kind: "manifest", name, family, config: blob, maths: {…}, layer_nodes: [[layer, Cid], …],
               experts_per_layer, chosen_per_row, hidden_size, expert_hidden_size,
               forms: [[[part, dtype, [size, …]], …], …], layer_forms: [form of each layer, …],
               files: {name: blob, …}, trunk: blob}
    layer     {v, kind: "layer", layer, experts: [blob, …]}   one per expert, in order

The trunk is one safetensors file of all tensors that are not routed experts; an expert is a safetensors file of its
parts, and a form says which. All experts of a layer have one form; quantised checkpoints have layers of several. This
module does not know where blocks are stored, how they travel, or how weights are computed.
"""

from __future__ import annotations

import math
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
from kvasir_node.model.expert_parts import PARTS_MAX, check_parts, in_order
from kvasir_node.model.maths import ExpertMaths
from kvasir_node.model.tensor_file import DIMENSIONS_MAX, DTYPES, TensorSpec, expert_file_bytes
from kvasir_node.wire.blobs import BLOB_BLOCKS_MAX, BlobRef
from kvasir_node.wire.blocks import BLOCK_BYTES_MAX
from kvasir_node.wire.codec import Fields, decode, encode

VERSION = 1
LAYERS_MAX = 4096
EXPERTS_MAX = 16_384  # of one layer; its node then stays under one block
FILES_MAX = 64
FORMS_MAX = 64
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
    layer_parts: Mapping[int, Mapping[str, TensorSpec]]  # of any expert of each layer, in the order of its file
    files: Mapping[str, BlobRef]  # tokenizer and the like, without config.json
    trunk: BlobRef

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(self.layer_nodes)

    @property
    def model(self) -> ModelId:
        return ModelId(cid_of(encode_manifest(self), DAG_CBOR_CODEC))

    def expert_parts(self, layer: int) -> dict[str, TensorSpec]:
        """What `parse_expert_file` needs to know of any expert of a layer. Raises DataError for one without experts."""
        parts = self.layer_parts.get(layer)
        if parts is None:
            raise DataError(f"model {self.name} has no experts in layer {layer}")
        return dict(parts)

    def expert_bytes(self, layer: int) -> int:
        """Length of one expert's file."""
        return expert_file_bytes(self.expert_parts(layer))


@dataclass(frozen=True, slots=True)
class LayerNode:
    """The experts of one layer, by index."""

    layer: int
    experts: tuple[BlobRef, ...]


def is_safe_name(name: str) -> bool:
    """Whether a name may become a file's name here: no separators, no hidden files, no `..`."""
    return _SAFE_NAME.match(name) is not None and ".." not in name


def encode_manifest(manifest: Manifest) -> bytes:
    forms, layer_forms = _forms_out(manifest)
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
            "forms": forms,
            "layer_forms": layer_forms,
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
        layer_nodes = _layer_nodes(fields)
        manifest = Manifest(
            name=_checked_name(fields.text("name", 128), "name"),
            family=_checked_name(fields.text("family", 128), "family"),
            config=_blob_in("config", _pair(fields, "config")),
            maths=_checked_maths(maths),
            layer_nodes=layer_nodes,
            experts_per_layer=(experts := fields.integer("experts_per_layer", 1, EXPERTS_MAX)),
            chosen_per_row=fields.integer("chosen_per_row", 1, experts),
            hidden_size=fields.integer("hidden_size", 1, SIZE_MAX),
            expert_hidden_size=fields.integer("expert_hidden_size", 1, SIZE_MAX),
            layer_parts=_layer_parts(fields, tuple(layer_nodes)),
            files={_checked_name(name, "files"): _blob_in("files", blob) for name, blob in files.items()},
            trunk=_blob_in("trunk", _pair(fields, "trunk")),
        )
        fields.end()
    except Misbehaved as error:
        raise DataError(str(error)) from error
    _check_forms(manifest)
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
    if any(blob.size != (expected := manifest.expert_bytes(layer)) for blob in experts):
        raise DataError(f"layer node.experts of layer {layer} must all have {expected} bytes")
    return LayerNode(layer, experts)


def slices_of(manifest: Manifest, slice_bytes: int) -> tuple[SliceId, ...]:
    """Cuts every layer into runs of experts, as equal as can be, each of at most `slice_bytes` (or one expert)."""
    slices: list[SliceId] = []
    for layer in manifest.layers:
        count = manifest.experts_per_layer
        most = max(1, min(count, slice_bytes // manifest.expert_bytes(layer)))
        runs = -(-count // most)
        cuts = [count * run // runs for run in range(runs + 1)]
        slices += (SliceId(layer, first, end - 1) for first, end in pairwise(cuts))
    return tuple(slices)


def _check_kind(fields: Fields, kind: str) -> None:
    fields.integer("v", VERSION, VERSION)
    if (found := fields.text("kind", 16)) != kind:
        raise DataError(f"{kind}.kind must be {kind!r}; got {found!r}")


def _checked_name(name: str, field: str) -> str:
    if not is_safe_name(name):
        raise DataError(f"manifest.{field} must be a plain name of letters, digits and ._+-; got {name[:80]!r}")
    return name


def _forms_out(manifest: Manifest) -> tuple[list[Any], list[int]]:
    """The distinct forms in the order of the first layer that has each, and every layer's number."""
    forms: list[Any] = []
    numbers: list[int] = []
    for layer in manifest.layers:
        form = [[part, dtype, list(shape)] for part, (dtype, shape, _) in manifest.layer_parts[layer].items()]
        if form not in forms:
            forms.append(form)
        numbers.append(forms.index(form))
    return forms, numbers


def _layer_parts(fields: Fields, layers: tuple[int, ...]) -> dict[int, dict[str, TensorSpec]]:
    forms = fields.items("forms", FORMS_MAX, _form_in)
    numbers = fields.items("layer_forms", LAYERS_MAX, lambda value: value)
    # One spelling for each manifest: forms are numbered as layers first use them, and none is unused.
    firsts = list(dict.fromkeys(numbers)) if all(type(number) is int for number in numbers) else None
    is_plain = firsts == list(range(len(forms))) and all(forms.index(form) == n for n, form in enumerate(forms))
    if not is_plain or len(numbers) != len(layers):
        raise DataError(f"manifest.layer_forms must number the {len(forms)} forms for {len(layers)} layers")
    return {layer: dict(forms[number]) for layer, number in zip(layers, numbers, strict=True)}


def _form_in(value: Any) -> dict[str, TensorSpec]:
    form: dict[str, TensorSpec] = {}
    for part in value if type(value) is list and len(value) <= PARTS_MAX else [None]:
        match part:
            case [str(name), str(dtype), [*shape]] if dtype in DTYPES and name not in form and _are_sizes(shape):
                form[name] = (dtype, tuple(shape), math.prod(shape) * DTYPES[dtype].itemsize)
            case _:
                raise DataError(f"manifest.forms must be lists of [part, dtype, sizes]; got {part!r:.80}")
    return form


def _are_sizes(shape: list[Any]) -> bool:
    return len(shape) <= DIMENSIONS_MAX and all(type(size) is int and 1 <= size <= SIZE_MAX for size in shape)


def _check_forms(manifest: Manifest) -> None:
    maths = ExpertMaths.from_dict(manifest.maths)
    for layer, parts in manifest.layer_parts.items():
        try:
            check_parts(maths, parts, manifest.hidden_size, manifest.expert_hidden_size)
        except DataError as error:
            raise DataError(f"manifest.forms of layer {layer}: {error}") from error
        if list(parts) != in_order(parts):
            raise DataError(f"manifest.forms of layer {layer} must be in the order {in_order(parts)}")
        if manifest.expert_bytes(layer) > _BLOB_BYTES_MAX:
            raise DataError(f"manifest.forms of layer {layer}: an expert has more than {_BLOB_BYTES_MAX} bytes")


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
