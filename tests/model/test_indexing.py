from pathlib import Path

import pytest
import torch
from model_checkpoints import make_checkpoint
from safetensors import safe_open

from kvasir_node.base.content import FilePiece, read_source
from kvasir_node.base.errors import DataError
from kvasir_node.base.ids import DAG_CBOR_CODEC, Cid, ExpertId, cid_of, codec_of
from kvasir_node.model.checkpoint import open_checkpoint, parse_expert_file
from kvasir_node.model.indexing import IndexedModel, index_checkpoint, model_name
from kvasir_node.model.manifest import decode_layer_node, decode_manifest
from kvasir_node.model.tensor_file import read_tensor
from kvasir_node.wire.blobs import BlobRef, decode_blob_node, is_node

BLOCK_BYTES = 5000  # small, so that blobs span blocks and blocks span pieces


def read_blob(indexed: IndexedModel, blob: BlobRef) -> bytearray:
    data = read_source(indexed.blocks[blob.cid])
    if is_node(blob.cid):
        node = decode_blob_node(data)
        assert node.size == blob.size
        data = b"".join(read_source(indexed.blocks[cid]) for cid in node.blocks)
    assert len(data) == blob.size
    return bytearray(data)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> Path:
    return make_checkpoint("qwen3_moe_windowed", tmp_path_factory.mktemp("made") / "tiny-moe", torch.bfloat16, "60KB")


def test_every_block_is_named_by_its_bytes_and_nothing_but_headers_is_inline(sharded):
    assert len(list(sharded.glob("*.safetensors"))) > 2
    indexed = index_checkpoint(open_checkpoint(sharded), block_bytes=BLOCK_BYTES)
    inline_bytes = 0
    for cid, source in indexed.blocks.items():
        data = read_source(source)
        assert cid_of(data, codec_of(cid)) == cid
        if codec_of(cid) == DAG_CBOR_CODEC:
            continue
        assert len(data) <= BLOCK_BYTES
        inline_bytes += sum(len(piece) for piece in source if not isinstance(piece, FilePiece))
    data_bytes = sum(path.stat().st_size for path in sharded.glob("*.safetensors"))
    assert inline_bytes < data_bytes / 10


def test_experts_come_back_equal_to_the_checkpoints_tensors(sharded):
    checkpoint = open_checkpoint(sharded)
    indexed = index_checkpoint(checkpoint, block_bytes=BLOCK_BYTES)
    manifest = indexed.manifest
    assert manifest.layers == (1, 2)  # layer 0 is dense in this one
    assert decode_manifest(read_source(indexed.blocks[Cid(indexed.model)])) == manifest
    for layer in manifest.layers:
        node = decode_layer_node(read_source(indexed.blocks[manifest.layer_nodes[layer]]), manifest, layer)
        for index, blob in enumerate(node.experts):
            tensors = parse_expert_file(read_blob(indexed, blob), manifest.expert_parts(layer))
            for part, tensor in tensors.items():
                expected = read_tensor(checkpoint.experts[ExpertId(layer, index)][part])
                assert torch.equal(tensor, expected)


def test_the_trunk_is_a_valid_safetensors_file_of_everything_else(sharded, tmp_path):
    checkpoint = open_checkpoint(sharded)
    indexed = index_checkpoint(checkpoint, block_bytes=BLOCK_BYTES)
    file = tmp_path / "trunk.safetensors"
    file.write_bytes(read_blob(indexed, indexed.manifest.trunk))
    originals = {}
    for shard in sharded.glob("*.safetensors"):
        with safe_open(shard, "pt") as reader:
            originals |= {key: reader.get_tensor(key) for key in reader.keys()}  # noqa: SIM118
    with safe_open(file, "pt") as reader:
        assert reader.metadata() == {"format": "pt"}
        assert set(reader.keys()) == set(checkpoint.trunk)
        assert all(torch.equal(reader.get_tensor(key), originals[key]) for key in checkpoint.trunk)


def test_side_files_and_the_config_come_back(sharded):
    indexed = index_checkpoint(open_checkpoint(sharded), block_bytes=BLOCK_BYTES)
    assert read_blob(indexed, indexed.manifest.config) == (sharded / "config.json").read_bytes()
    assert "config.json" not in indexed.manifest.files
    for name, blob in indexed.manifest.files.items():
        assert read_blob(indexed, blob) == (sharded / name).read_bytes()


def test_the_same_checkpoint_gets_the_same_id_and_another_name_another(sharded):
    checkpoint = open_checkpoint(sharded)
    first, again = index_checkpoint(checkpoint), index_checkpoint(checkpoint)
    assert first.model == again.model
    assert first.name == "tiny-moe"
    renamed = index_checkpoint(checkpoint, name="other")
    assert renamed.model != first.model
    assert renamed.manifest.layer_nodes == first.manifest.layer_nodes


def test_progress_only_grows_and_ends_at_the_total(sharded):
    calls: list[tuple[int, int]] = []
    index_checkpoint(open_checkpoint(sharded), progress=lambda done, total: calls.append((done, total)))
    assert calls == sorted(calls)
    assert calls[-1][0] == calls[-1][1] > 0


def test_a_file_that_shrinks_while_it_is_indexed_is_an_error_that_names_it(tmp_path):
    folder = make_checkpoint("olmoe", tmp_path / "olmoe")
    checkpoint = open_checkpoint(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(DataError, match=r"model\.safetensors"):
        index_checkpoint(checkpoint)


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("Qwen3-30B-A3B", "Qwen3-30B-A3B"),
        ("my model (2)", "my-model--2"),
        ("..", "model"),
        (".hidden", "hidden"),
        ("模型", "model"),
        ("a..b", "a.b"),
    ],
)
def test_a_folders_name_becomes_a_safe_name(folder, name):
    assert model_name(Path("/somewhere") / folder) == name
