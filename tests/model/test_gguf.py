"""GGUF: the header's reader, and a small qwen3moe that answers as transformers does with the same weights."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from family_configs import family_model
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from test_families import Recorder, Split, check, jobs_of, serve, worker_shard

from kvasir_node.base.content import read_source
from kvasir_node.base.errors import DataError
from kvasir_node.base.ids import ExpertId
from kvasir_node.model.checkpoint import open_checkpoint
from kvasir_node.model.dequantise import GGUF_FORMATS, gguf_row_bytes, gguf_rows
from kvasir_node.model.experts import load_from_checkpoint
from kvasir_node.model.gguf_file import read_gguf_header
from kvasir_node.model.indexing import index_checkpoint
from kvasir_node.model.trunk import load_trunk

Kind = gguf.GGMLQuantizationType
HIDDEN, INNER, LAYERS = 64, 32, 3
EXPERT_MATRICES = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}


def write_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.hidden_size // config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_token_list(["<a>", "b", "ü"] * 100)
    writer.add_array("tokenizer.ggml.token_type", [1, 2, 3] * 100)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, Any]:
    """A folder with one GGUF file of mixed formats, and transformers' model of the decoded weights."""
    folder = tmp_path_factory.mktemp("gguf") / "tiny"
    folder.mkdir()
    model = family_model(
        "qwen3_moe", use_sliding_window=False, mlp_only_layers=[], norm_topk_prob=True, num_hidden_layers=LAYERS
    )
    writer = gguf.GGUFWriter(folder / "tiny.gguf", "qwen3moe")
    write_metadata(writer, model.config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3MOE, LAYERS)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            for theirs, part in parts_of(names, name, parameter):
                _write(writer, theirs, part)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder, model


def parts_of(names: Any, name: str, parameter: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    block = "".join(name.split(".")[2:3])
    if name.endswith("experts.gate_up_proj"):
        gate, up = parameter.data.chunk(2, dim=1)
        return [(f"blk.{block}.ffn_gate_exps.weight", gate), (f"blk.{block}.ffn_up_exps.weight", up)]
    if name.endswith("experts.down_proj"):
        return [(f"blk.{block}.ffn_down_exps.weight", parameter.data)]
    return [(names.get_name(name, try_suffixes=(".weight",)), parameter.data)]


def _write(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor) -> None:
    """Quantises, writes, and puts the decoded values back, so that the reference computes with the same."""
    kind = Kind.F32 if tensor.dim() == 1 or "ffn_gate_inp" in name else Kind.Q8_0
    if "blk.1.ffn_down_exps" in name:
        kind = Kind.Q4_0  # layers of one file often differ
    if "blk.2.ffn_up_exps" in name or "token_embd" in name:
        kind = Kind.F16
    data = quantize(tensor.numpy(), kind)
    writer.add_tensor(name, data, raw_dtype=kind)
    tensor.copy_(torch.from_numpy(np.array(dequantize(data, kind))).view_as(tensor))


def test_a_gguf_file_answers_as_transformers_does_with_its_weights(made):
    folder, reference = made
    checkpoint = open_checkpoint(folder)
    assert (checkpoint.family, checkpoint.layers, checkpoint.experts_per_layer) == ("qwen3_moe", (0, 1, 2), 8)
    odd = [expert for expert in checkpoint.experts if expert.index % 2]
    even = [expert for expert in checkpoint.experts if expert.index % 2 == 0]
    dispatch = Split(load_from_checkpoint(checkpoint, even, torch.float32), worker_shard(folder, odd))
    trunk = Recorder(load_trunk(folder, torch.float32, "cpu", dispatch))
    jobs = jobs_of(4)
    check(reference, jobs, serve(trunk, jobs, 2), trunk.seen)
    assert dispatch.far_pairs > 0


def test_layers_may_be_stored_differently_and_the_manifest_says_how(made):
    checkpoint = open_checkpoint(made[0])
    assert list(checkpoint.parts(ExpertId(0, 0))) == ["gate_q8_0", "up_q8_0", "down_q8_0"]
    manifest = index_checkpoint(checkpoint).manifest
    assert list(manifest.expert_parts(1)) == ["gate_q8_0", "up_q8_0", "down_q4_0"]
    assert manifest.expert_parts(2)["up"] == ("F16", (INNER, HIDDEN), 2 * INNER * HIDDEN)
    assert manifest.expert_bytes(1) < manifest.expert_bytes(0) < manifest.expert_bytes(2)


def test_the_trunk_that_travels_can_be_loaded_without_the_gguf_file(made, tmp_path):
    """It is a safetensors file whose quantised tensors say so in their names."""
    folder, reference = made
    checkpoint = open_checkpoint(folder)
    indexed = index_checkpoint(checkpoint)
    (tmp_path / "config.json").write_bytes(read_source(indexed.blocks[indexed.manifest.config.cid]))
    (tmp_path / "model-1.safetensors").write_bytes(read_source(indexed.blocks[indexed.manifest.trunk.cid]))
    plain = {
        f"model.layers.{e.layer}.mlp.experts.{e.index}.{matrix}_proj.weight": tensor.contiguous()
        for e in checkpoint.experts
        for matrix, tensor in _decoded(reference, e).items()
    }
    save_file(plain, tmp_path / "model-2.safetensors")
    keys = dict.fromkeys(plain, "model-2.safetensors") | dict.fromkeys(checkpoint.trunk, "model-1.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": keys}))
    copy = open_checkpoint(tmp_path)
    shard = load_from_checkpoint(copy, copy.experts, torch.float32)
    trunk = Recorder(load_trunk(tmp_path, torch.float32, "cpu", Split(shard, shard)))
    jobs = jobs_of(2)
    check(reference, jobs, serve(trunk, jobs, 2), trunk.seen)


def _decoded(reference: Any, expert: ExpertId) -> dict[str, torch.Tensor]:
    experts = reference.model.layers[expert.layer].mlp.experts
    gate, up = experts.gate_up_proj.data[expert.index].chunk(2)
    return {"gate": gate, "up": up, "down": experts.down_proj.data[expert.index]}


@pytest.mark.parametrize("name", GGUF_FORMATS)
def test_an_expert_decoded_alone_equals_its_part_of_all_of_them(name):
    rng = np.random.default_rng(1)
    columns = 256
    row_bytes = gguf_row_bytes(columns, name)
    assert row_bytes is not None
    assert gguf_row_bytes(columns + 1, name) is None
    data = rng.integers(0, 60, (4, 6, row_bytes), dtype=np.uint8)  # small bytes: no NaN among the scales
    whole = dequantize(data, GGUF_FORMATS[name])
    for index in range(4):
        alone = gguf_rows(torch.from_numpy(data[index].copy()), name)
        assert alone.shape == (6, columns)
        assert np.array_equal(alone.numpy(), whole[index], equal_nan=True)


def metadata(folder: Path, **changes: Any) -> Path:
    """A GGUF file with no tensors but an embedding, of changed metadata."""
    values: dict[str, Any] = {"expert_count": 8, "architecture": "qwen3moe"} | changes
    writer = gguf.GGUFWriter(folder / "model.gguf", values["architecture"])
    if "scaling" in changes:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_expert_count(values["expert_count"])
    if changes.get("embedding", True):
        writer.add_tensor("token_embd.weight", np.zeros((4, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architecture": "llama"}, "architecture 'llama' is not supported; supported: qwen3moe"),
        ({"scaling": True}, "scaled rotary embeddings"),
        ({"embedding": False}, "no token_embd.weight"),
        ({}, "qwen3moe.embedding_length must be a int; got None"),
    ],
)
def test_a_gguf_that_cannot_be_had_is_refused_by_name(tmp_path, changes, reason):
    with pytest.raises(DataError, match=reason):
        open_checkpoint(metadata(tmp_path, **changes))


def test_two_files_in_one_folder_are_refused(made, tmp_path):
    for name in ("a-00001-of-00002.gguf", "a-00002-of-00002.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(DataError, match="several GGUF files"):
        open_checkpoint(tmp_path)


def changed_names(made: tuple[Path, Any], tmp_path: Path, old: bytes, new: bytes) -> Path:
    data = (made[0] / "tiny.gguf").read_bytes()
    assert len(old) == len(new)
    assert data.count(old) == 1
    (tmp_path / "tiny.gguf").write_bytes(data.replace(old, new))
    return tmp_path


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b"blk.1.ffn_up_exps", b"blk.1.ffn_up_expx", "no tensor 'blk.1.ffn_up_exps.weight'"),
        (b"blk.1.attn_q.weight", b"blk.1.attn_x.weight", "no tensor 'blk.1.attn_q.weight'"),
        (b"blk.1.attn_q.weight", b"blk.0.attn_q.weight", "names a tensor twice"),
    ],
)
def test_a_missing_tensor_is_named(made, tmp_path, old, new, reason):
    with pytest.raises(DataError, match=reason):
        open_checkpoint(changed_names(made, tmp_path, old, new))


def test_a_tensor_that_nothing_uses_is_named(made, tmp_path):
    folder, _ = made
    config = {**open_checkpoint(folder).config, "num_hidden_layers": 2}
    (tmp_path / "tiny.gguf").write_bytes((folder / "tiny.gguf").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=r"nothing here uses: blk\.2\.attn_k\.weight"):
        open_checkpoint(tmp_path)


def test_a_header_is_read_as_by_the_gguf_package(made):
    file = made[0] / "tiny.gguf"
    header = read_gguf_header(file)
    theirs = gguf.GGUFReader(file)
    assert set(header.tensors) == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        mine = header.tensors[tensor.name]
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))
        assert (mine.data.offset, mine.data.nbytes) == (tensor.data_offset, tensor.n_bytes)
    assert header.metadata["qwen3moe.expert_count"] == 8


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GGUF",
        b"GGML" + bytes(100),
        b"GGUF" + struct.pack("<IQQ", 9, 0, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60),
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 60),
        b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 99),
        b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 8, 1 << 40),
        b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 9, 1),
        b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 1 << 39, 0, 0),
        b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 8, 16, 0),
    ],
)
def test_hostile_headers_are_refused(tmp_path, data):
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(DataError):
        read_gguf_header(tmp_path / "x.gguf")


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, 2000), st.integers(1, 255))
def test_a_flipped_byte_ends_in_data_error_or_in_bounds(made, tmp_path_factory, at, mask):
    data = bytearray((made[0] / "tiny.gguf").read_bytes())
    data[at] ^= mask
    file = tmp_path_factory.mktemp("flip") / "x.gguf"
    file.write_bytes(data)
    try:
        header = read_gguf_header(file)
    except DataError:
        return
    assert all(t.data.offset + t.data.nbytes <= len(data) for t in header.tensors.values())
