"""A fetched model's folder: its note, its layer files, and where blocks lie in them; and hostile ones of each."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_node.base.content import FilePiece, read_source
from kvasir_node.base.errors import DataError
from kvasir_node.base.ids import DAG_CBOR_CODEC, ExpertId, ModelId, cid_of
from kvasir_node.model.folder import (
    NOTE_BYTES_MAX,
    NOTE_FILE,
    FolderNote,
    blob_sources,
    encode_note,
    expert_pieces,
    layer_file_header,
    layer_file_name,
    read_experts,
    read_note,
    weights_index,
)
from kvasir_node.model.tensor_file import TensorSpec, expert_file
from kvasir_node.wire.blobs import BlobNode, BlobRef

STEADY = settings(max_examples=100, deadline=None, derandomize=True)
MODEL = ModelId(cid_of(b"model", DAG_CBOR_CODEC))
PARTS: dict[str, TensorSpec] = {"gate": ("F32", (2, 4), 32), "up": ("F32", (2, 4), 32), "down": ("F32", (4, 2), 32)}
NOTE = FolderNote(MODEL, 4096, {0: layer_file_name(0, "half"), 7: layer_file_name(7, "all")})


def test_a_note_comes_back(tmp_path):
    assert read_note(tmp_path) is None
    (tmp_path / NOTE_FILE).write_bytes(encode_note(NOTE))
    assert read_note(tmp_path) == NOTE


@pytest.mark.parametrize(
    "changes",
    [
        {"schema": "kvasir.folder/2"},
        {"model": "demo"},
        {"model": 3},
        {"block_bytes": -1},
        {"block_bytes": 1 << 21},
        {"block_bytes": "4096"},
        {"layers": [["0", "experts-00000-all.safetensors"]]},
        {"layers": {"0": "../experts-00000-all.safetensors"}},
        {"layers": {"0": "experts-00000-all.safetensors/x"}},
        {"layers": {"0": "model.safetensors"}},
        {"layers": {"-1": "experts-00000-all.safetensors"}},
        {"layers": {"0": None}},
    ],
)
def test_a_note_that_is_not_ours_is_refused(tmp_path, changes):
    (tmp_path / NOTE_FILE).write_text(json.dumps({**json.loads(encode_note(NOTE)), **changes}))
    with pytest.raises(DataError):
        read_note(tmp_path)


def test_a_note_that_is_too_large_is_not_read(tmp_path):
    (tmp_path / NOTE_FILE).write_bytes(b" " * (NOTE_BYTES_MAX + 1))
    with pytest.raises(DataError, match="larger than"):
        read_note(tmp_path)


@STEADY
@given(data=st.binary(max_size=200), at=st.integers(0, 400))
def test_a_note_of_any_bytes_is_read_or_refused(tmp_path_factory, data, at):
    folder = tmp_path_factory.getbasetemp()
    whole = encode_note(NOTE)
    for text in (data, whole[:at] + data + whole[at + len(data) :]):
        (folder / NOTE_FILE).write_bytes(text)
        try:
            note = read_note(folder)
        except DataError:
            continue
        assert note is not None
        assert all("/" not in name for name in note.layer_files.values())


def write_layer(folder, layer: int, experts: list[int]):
    file = folder / layer_file_name(layer, "all")
    data = b"".join(bytes((expert, part)) * 16 for expert in experts for part in range(3))
    file.write_bytes(layer_file_header(layer, experts, PARTS) + data)
    return file


def test_experts_lie_in_a_layer_file_as_in_their_own(tmp_path):
    experts = read_experts([(3, write_layer(tmp_path, 3, [0, 2, 5]))])
    assert list(experts) == [ExpertId(3, 0), ExpertId(3, 2), ExpertId(3, 5)]
    own = read_source(expert_pieces(PARTS, experts[ExpertId(3, 2)]))
    assert own == expert_file(PARTS) + b"".join(bytes((2, part)) * 16 for part in range(3))


def test_a_layer_file_of_another_layer_or_kind_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"expected 4\.EXPERT\.PART"):
        read_experts([(4, write_layer(tmp_path, 3, [0]))])
    with pytest.raises(DataError):
        read_experts([(3, tmp_path / "gone.safetensors")])


def test_the_index_names_the_trunk_alone(tmp_path):
    file = write_layer(tmp_path, 0, [1])
    assert json.loads(weights_index(file)) == {
        "metadata": {"total_size": 96},
        "weight_map": {f"0.1.{part}": file.name for part in sorted(PARTS)},
    }


def test_blocks_are_cut_where_the_blob_was_cut(tmp_path):
    file = tmp_path / "blob"
    file.write_bytes(bytes(range(250)))
    blocks = [file.read_bytes()[at : at + 100] for at in (0, 100, 200)]
    node = BlobNode(250, tuple(map(cid_of, blocks)))
    blob, pieces = BlobRef(cid_of(b"node", DAG_CBOR_CODEC), 250), (FilePiece(file, 0, 250),)
    sources = blob_sources(blob, node, pieces, 100)
    assert [read_source(source) for source in sources.values()] == blocks
    with pytest.raises(DataError, match="has 3 blocks"):
        blob_sources(blob, node, pieces, 120 + 100)
    assert blob_sources(BlobRef(cid_of(b"x"), 250), None, pieces, 100) == {cid_of(b"x"): pieces}
