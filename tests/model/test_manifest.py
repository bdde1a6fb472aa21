import dataclasses

import cbor2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_node.base.errors import DataError
from kvasir_node.base.ids import DAG_CBOR_CODEC, Cid, SliceId, cid_of, cid_to_bytes, codec_of
from kvasir_node.model.manifest import (
    LayerNode,
    Manifest,
    decode_layer_node,
    decode_manifest,
    encode_layer_node,
    encode_manifest,
    is_safe_name,
    slices_of,
)
from kvasir_node.model.maths import ExpertMaths
from kvasir_node.model.tensor_file import TensorSpec
from kvasir_node.wire.blobs import BlobRef


def node(text: str) -> Cid:
    return cid_of(text.encode(), DAG_CBOR_CODEC)


def blob(text: str, size: int = 100) -> BlobRef:
    return BlobRef(cid_of(text.encode()), size)


MATHS = ExpertMaths()
PARTS: dict[str, TensorSpec] = {
    "gate": ("BF16", (16, 8), 256),
    "up": ("BF16", (16, 8), 256),
    "down": ("BF16", (8, 16), 256),
}
OTHER_PARTS: dict[str, TensorSpec] = PARTS | {"down": ("F32", (8, 16), 512)}
MANIFEST = Manifest(
    name="tiny",
    family="qwen3_moe",
    config=blob("config"),
    maths=MATHS.to_dict(),
    layer_nodes={1: node("layer 1"), 3: node("layer 3")},
    experts_per_layer=4,
    chosen_per_row=2,
    hidden_size=8,
    expert_hidden_size=16,
    layer_parts={1: PARTS, 3: OTHER_PARTS},
    files={"tokenizer.json": blob("tokenizer")},
    trunk=BlobRef(node("trunk"), 5 << 20),
)
LAYER = LayerNode(1, tuple(blob(f"expert {n}", MANIFEST.expert_bytes(1)) for n in range(4)))
ENCODED = encode_manifest(MANIFEST)
FIELDS = cbor2.loads(ENCODED)
FORM, OTHER_FORM = FIELDS["forms"]
LAYER_FIELDS = cbor2.loads(encode_layer_node(LAYER))


def encoded(**changes: object) -> bytes:
    return cbor2.dumps({**FIELDS, **changes}, canonical=True)


def test_a_manifest_comes_back_and_its_cid_is_the_model_id():
    assert decode_manifest(ENCODED) == MANIFEST
    assert MANIFEST.model == cid_of(ENCODED, DAG_CBOR_CODEC)
    assert codec_of(Cid(MANIFEST.model)) == DAG_CBOR_CODEC
    assert MANIFEST.layers == (1, 3)


def test_the_id_never_changes_by_accident():
    assert MANIFEST.model == "bafyreihcgqkwyocxujz4ydgmuu4334fiz3w72woduqodhwvt5flyqy3ciy"


RAW, NODE = cid_to_bytes(cid_of(b"x")), cid_to_bytes(node("x"))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"v": 2}, "manifest.v"),
        ({"kind": "layer"}, "manifest.kind"),
        ({"name": "../../etc"}, "manifest.name"),
        ({"name": ""}, "manifest.name"),
        ({"name": "x" * 129}, "manifest.name"),
        ({"family": "a/b"}, "manifest.family"),
        ({"config": [RAW]}, "config"),
        ({"config": [RAW, -1]}, "config"),
        ({"config": [RAW, True]}, "config"),
        ({"config": [RAW, 1, 2]}, "manifest.config"),
        ({"config": [b"x", 1]}, "config"),
        ({"config": {"cid": RAW}}, "manifest.config"),
        ({"trunk": [RAW, 2 << 20]}, "trunk"),  # too large for one block, yet named as one
        ({"trunk": [NODE, 1 << 62]}, "trunk"),
        ({"maths": []}, "manifest.maths"),
        ({"maths": {"activation": ["silu"]}}, "manifest.maths"),
        ({"maths": {"activation": "x" * 65}}, "manifest.maths"),
        ({"maths": {f"f{n}": 1 for n in range(33)}}, "manifest.maths"),
        ({"layer_nodes": []}, "manifest.layer_nodes"),
        ({"layer_nodes": [[1, RAW]]}, "layer_nodes"),
        ({"layer_nodes": [[3, NODE], [1, NODE]]}, "manifest.layer_nodes"),
        ({"layer_nodes": [[1, NODE], [1, NODE]]}, "manifest.layer_nodes"),
        ({"layer_nodes": [[-1, NODE]]}, "manifest.layer_nodes"),
        ({"layer_nodes": [[4096, NODE]]}, "manifest.layer_nodes"),
        ({"layer_nodes": [[True, NODE]]}, "manifest.layer_nodes"),
        ({"experts_per_layer": 0}, "manifest.experts_per_layer"),
        ({"experts_per_layer": 1 << 40}, "manifest.experts_per_layer"),
        ({"chosen_per_row": 5}, "manifest.chosen_per_row"),
        ({"hidden_size": 0}, "manifest.hidden_size"),
        ({"hidden_size": 9}, "manifest.forms of layer 1: gate has the shape"),
        ({"expert_hidden_size": 2.5}, "manifest.expert_hidden_size"),
        ({"maths": MATHS.to_dict() | {"gate": "other"}}, "the gate is 'other'"),
        ({"maths": {"activation": "silu"}}, "unknown or missing in their maths: alpha, bias"),
        ({"maths": MATHS.to_dict() | {"bias": True}}, "gate has no bias"),
        ({"forms": []}, "manifest.layer_forms"),
        ({"forms": [FORM]}, "manifest.layer_forms"),
        ({"forms": [FORM, FORM]}, "manifest.layer_forms"),
        ({"forms": [FORM, OTHER_FORM, []]}, "manifest.layer_forms"),
        ({"forms": [OTHER_FORM[::-1], FORM]}, "must be in the order"),
        ({"forms": [FORM[:2], OTHER_FORM]}, "layer 1: no down matrix"),
        ({"forms": [FORM + FORM[:1], OTHER_FORM]}, "manifest.forms"),
        ({"forms": [[["gate", "F64", [16, 8]], *FORM[1:]], OTHER_FORM]}, "manifest.forms"),
        ({"forms": [[["gate", "U8", [16, 8]], *FORM[1:]], OTHER_FORM]}, "gate is U8; supported: F32"),
        ({"forms": [[["gate", "BF16", [16, -8]], *FORM[1:]], OTHER_FORM]}, "manifest.forms"),
        ({"forms": [[["gate", "BF16", [1 << 20] * 9], *FORM[1:]], OTHER_FORM]}, "manifest.forms"),
        ({"forms": [[["gate_q4_k", "U8", [16, 8]], *FORM[1:]], OTHER_FORM]}, "which cannot be decoded"),
        ({"forms": [[["other", "BF16", [16, 8]], *FORM[1:]], OTHER_FORM]}, "'other' is not a part"),
        ({"forms": [FORM] * 65}, "manifest.forms"),
        ({"forms": [FORM * 9, OTHER_FORM]}, "manifest.forms"),
        ({"layer_forms": [1, 0]}, "manifest.layer_forms"),
        ({"layer_forms": [0, 0]}, "manifest.layer_forms"),
        ({"layer_forms": [0, True]}, "manifest.layer_forms"),
        ({"layer_forms": [0, [1]]}, "manifest.layer_forms"),
        ({"layer_forms": [0, 1, 1]}, "manifest.layer_forms"),
        ({"files": {"../x": [RAW, 1]}}, "manifest.files"),
        ({"files": {"a/b": [RAW, 1]}}, "manifest.files"),
        ({"files": {".hidden": [RAW, 1]}}, "manifest.files"),
        ({"files": {"a\0b": [RAW, 1]}}, "manifest.files"),
        ({"files": {"x": 1}}, "files"),
        ({"files": {f"f{n}": [RAW, 1] for n in range(65)}}, "manifest.files"),
        ({"more": 1}, "unknown fields: more"),
    ],
)
def test_hostile_manifests_are_refused_by_field(changes, named):
    with pytest.raises(DataError, match=named):
        decode_manifest(encoded(**changes))


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_a_missing_field_is_named(name):
    fields = {key: value for key, value in FIELDS.items() if key != name}
    with pytest.raises(DataError, match=name):
        decode_manifest(cbor2.dumps(fields, canonical=True))


@pytest.mark.parametrize("data", [b"", b"\xa0", b"\x80", b"\xf6", ENCODED + b"\0", ENCODED[:-1], bytes((1 << 20) + 1)])
def test_other_documents_are_refused(data):
    with pytest.raises(DataError):
        decode_manifest(data)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.integers(0, len(ENCODED) - 1), st.integers(1, 255))
def test_a_flipped_byte_is_refused_or_another_model(at, mask):
    data = bytearray(ENCODED)
    data[at] ^= mask
    try:
        manifest = decode_manifest(data)
    except DataError:
        return
    assert manifest.model != MANIFEST.model
    assert encode_manifest(manifest) == data


def test_a_layer_node_comes_back():
    assert decode_layer_node(encode_layer_node(LAYER), MANIFEST, 1) == LAYER


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"v": 0}, "layer node.v"),
        ({"kind": "blob"}, "layer.kind"),
        ({"layer": 3}, "layer node.layer"),
        ({"experts": LAYER_FIELDS["experts"][:3]}, "3 of 4 experts"),
        ({"experts": LAYER_FIELDS["experts"] * 2}, "layer node.experts"),
        ({"experts": [[RAW, 7]] * 4}, "must all have"),
        ({"experts": [7] * 4}, "experts must be"),
        ({"experts": None}, "layer node.experts"),
        ({"more": 1}, "unknown fields"),
    ],
)
def test_hostile_layer_nodes_are_refused_by_field(changes, named):
    with pytest.raises(DataError, match=named):
        decode_layer_node(cbor2.dumps({**LAYER_FIELDS, **changes}, canonical=True), MANIFEST, 1)


@given(st.binary(max_size=300))
def test_random_bytes_end_in_data_error(data):
    for read in (decode_manifest, lambda data: decode_layer_node(data, MANIFEST, 1)):
        with pytest.raises(DataError):
            read(data)


@pytest.mark.parametrize(
    "name", ["a", "model-00001-of-00002.safetensors", "Qwen3-30B_A3B", "x" * 128, "tokenizer.json"]
)
def test_plain_names_are_safe(name):
    assert is_safe_name(name)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a..b", "/a", "a/b", "a\\b", "a b", "a\n", "ä", "-rf", "x" * 129, "C:"]
)
def test_other_names_are_not(name):
    assert not is_safe_name(name)


@settings(max_examples=200)
@given(st.integers(1, 600), st.integers(1, 10_000_000))
def test_slices_cover_each_layer_once_in_runs_as_equal_as_can_be(experts, slice_bytes):
    manifest = dataclasses.replace(MANIFEST, experts_per_layer=experts)
    slices = slices_of(manifest, slice_bytes)
    for layer in manifest.layers:
        mine = [part for part in slices if part.layer == layer]
        assert [expert.index for part in mine for expert in part.experts()] == list(range(experts))
        counts = {part.count for part in mine}
        assert max(counts) - min(counts) <= 1
        assert max(counts) == 1 or max(counts) * manifest.expert_bytes(layer) <= slice_bytes
        most = max(1, slice_bytes // manifest.expert_bytes(layer))
        assert len(mine) == -(-experts // most)


def test_a_slice_may_hold_a_whole_layer():
    assert slices_of(MANIFEST, 1 << 30) == (SliceId(1, 0, 3), SliceId(3, 0, 3))
