"""Which checkpoints are indexed, and that every other one is refused with its reason."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from model_checkpoints import CONFIGS, family_of, make_checkpoint
from safetensors.torch import load_file, save_file

from kvasir_node.base.errors import DataError, UsageError
from kvasir_node.base.ids import ExpertId
from kvasir_node.model.checkpoint import ExpertMaths, expert_file, open_checkpoint, parse_expert_file
from kvasir_node.model.tensor_file import read_bytes, read_tensor

LAYERS = {"qwen3_moe_windowed": (1, 2)}
FIRST = "model.layers.0.mlp.experts.0.gate_proj.weight"


@pytest.fixture
def folder(checkpoint_folder, tmp_path) -> Path:
    """A copy of the Qwen3-MoE checkpoint to be spoiled."""
    return Path(shutil.copytree(checkpoint_folder("qwen3_moe"), tmp_path / "model"))


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "remove"}))


def change_tensors(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({key: tensor for key, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_is_indexed(checkpoint_folder, name):
    checkpoint = open_checkpoint(checkpoint_folder(name))
    assert checkpoint.family == family_of(name)
    assert checkpoint.layers == LAYERS.get(name, (0, 1, 2))
    assert (checkpoint.experts_per_layer, checkpoint.chosen_per_row) == (8, 2)
    assert (checkpoint.hidden_size, checkpoint.expert_hidden_size) == (64, 32)
    assert len(checkpoint.experts) == 8 * len(checkpoint.layers)
    assert "model.embed_tokens.weight" in checkpoint.trunk
    assert not any(".experts." in key for key in checkpoint.trunk)
    assert "config.json" in checkpoint.side_files


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("qwen3_moe", "model.layers.{}.mlp.experts.{}.{}.weight"),
        ("mixtral", "model.layers.{}.block_sparse_moe.experts.{}.{}.weight"),
    ],
)
def test_ranges_hold_the_tensors_of_their_expert(checkpoint_folder, name, key):
    folder = checkpoint_folder(name)
    names = {"gate": "w1", "up": "w3", "down": "w2"} if name == "mixtral" else {}
    tensors = load_file(folder / "model.safetensors")
    for expert, parts in open_checkpoint(folder).experts.items():
        for part, tensor in parts.items():
            original = tensors[key.format(expert.layer, expert.index, names.get(part, f"{part}_proj"))]
            assert torch.equal(read_tensor(tensor), original)


def test_shards_index_the_same_as_one_file(checkpoint_folder, tmp_path):
    whole = open_checkpoint(checkpoint_folder("qwen3_moe"))
    sharded = open_checkpoint(make_checkpoint("qwen3_moe", tmp_path / "shards", shard="100KB"))
    assert len({tensor.file for parts in sharded.experts.values() for tensor in parts.values()}) > 3
    assert sharded.trunk.keys() == whole.trunk.keys()
    for expert, parts in whole.experts.items():
        for part, tensor in parts.items():
            assert read_bytes(sharded.experts[expert][part]) == read_bytes(tensor)


def test_an_expert_goes_through_its_file(checkpoint_folder):
    checkpoint = open_checkpoint(checkpoint_folder("olmoe"))
    expert = ExpertId(1, 3)
    parts = checkpoint.parts(expert)
    data = expert_file(parts) + b"".join(read_bytes(checkpoint.experts[expert][p]) for p in ("gate", "up", "down"))
    for part, tensor in parse_expert_file(data, parts).items():
        assert torch.equal(tensor, read_tensor(checkpoint.experts[expert][part]))
    with pytest.raises(DataError, match="no expert 8 in layer 1"):
        checkpoint.parts(ExpertId(1, 8))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "llama4"}, "'llama4' is not supported: its experts are called with every row"),
        ({"model_type": "llama"}, "'llama' is not supported: it was not tested; supported: afmoe, "),
        ({"model_type": "gpt_oss"}, "experts of layer 2|of this gpt_oss|expert tensor"),
        ({"model_type": ["qwen3_moe"]}, "is not supported"),
        ({"model_type": "remove"}, "model family 'None'"),
        ({"hidden_act": "tanh"}, "Qwen3MoeExperts has the activation Tanh, which is not supported"),
        ({"hidden_act": "nonsense"}, "building a qwen3_moe by its config.json"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8 without weight_block_size"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised by 'awq' are not supported"),
        ({"quantization_config": {"quant_method": ["fp8"]}}, "quantised by"),
        ({"hidden_size": "remove"}, r"gate has the shape \[32, 64\], expected \[32, 2048\]"),
        ({"hidden_size": 64.5}, r"config\.json of this qwen3_moe"),
        ({"num_local_experts": 10**12}, "1000000000000 experts in a layer"),
        ({"num_hidden_layers": 10**9}, "with 1000000000 layers; 1 to 1024"),
        ({"vocab_size": 10**12}, "with vocab_size 1000000000000; 1 to"),
        ({"max_position_embeddings": 0}, "with max_position_embeddings 0; 1 to"),
        ({"max_position_embeddings": -5}, "with max_position_embeddings -5; 1 to"),
        ({"rms_norm_eps": float("nan")}, "with rms_norm_eps nan; expected a number above 0"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "with rope_theta 0; expected a number"),
        ({"num_experts_per_tok": 9}, "from 1 to 8; got 9"),
        ({"num_local_experts": 9}, "expert 8 of layer 0 is missing"),
        ({"num_local_experts": 7}, "expert 7 of layer 0 is not foreseen"),
        ({"num_hidden_layers": 4}, "expert 0 of layer 3 is missing"),
        ({"mlp_only_layers": [1]}, "layers.1.mlp.experts.*is not foreseen"),
        ({"mlp_only_layers": [0, 1, 2]}, "no layer with routed experts"),
        ({"mlp_only_layers": 7}, "qwen3_moe"),
        ({"decoder_sparse_step": 0}, "qwen3_moe"),
        ({"moe_intermediate_size": 33}, r"gate has the shape \[32, 64\], expected \[33, 64\]"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_name(folder, changes, reason):
    change_config(folder, **changes)
    with pytest.raises(DataError, match=reason):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({FIRST: None}, "expert 0 of layer 0: no gate matrix"),
        ({FIRST: torch.zeros(64, 32)}, r"gate has the shape \[64, 32\], expected \[32, 64\]"),
        ({FIRST: torch.zeros(32, 64, dtype=torch.float8_e4m3fn)}, "gate is F8_E4M3; supported: F32, BF16, F16"),
        ({FIRST.replace("weight", "bias"): torch.zeros(32)}, "layout of the expert tensor '.*bias'"),
        ({"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(8, 64, 64)}, "a gate_up matrix, which it should not"),
        ({FIRST.replace("0.mlp", "00.mlp"): torch.zeros(32, 64)}, "is not foreseen"),
        ({FIRST.replace("experts.0", "experts.00"): torch.zeros(32, 64)}, "layout of the expert tensor"),
        ({FIRST + "_scale_inv": torch.ones(1, 1)}, "cannot be decoded"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(folder, changes, reason):
    change_tensors(folder, changes)
    with pytest.raises(DataError, match=reason):
        open_checkpoint(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, '{"a": 1, "a": 2}'])
def test_a_config_that_is_no_object_is_refused(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(DataError, match=r"config\.json"):
        open_checkpoint(folder)


def test_a_huge_config_is_not_read(folder):
    (folder / "config.json").write_text(" " * 5_000_000)
    with pytest.raises(DataError, match="larger than"):
        open_checkpoint(folder)


def test_no_folder_and_no_weights(folder, tmp_path):
    with pytest.raises(UsageError, match="no checkpoint folder") as failure:
        open_checkpoint(tmp_path / "nothing")
    assert failure.value.param == "model"
    (folder / "model.safetensors").unlink()
    with pytest.raises(DataError, match=r"no model\.safetensors"):
        open_checkpoint(folder)


def index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("name", ["../stolen.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", "a\\b", "."])
def test_a_shard_outside_the_folder_is_never_opened(folder, name):
    shutil.move(folder / "model.safetensors", folder.parent / "stolen.safetensors")
    index(folder, {FIRST: name})
    with pytest.raises(DataError, match="expected a plain file name"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_link_out_of_the_folder_is_refused(folder, name):
    secret = folder.parent / "secret"
    if (folder / name).exists():
        shutil.move(folder / name, secret)
    else:
        secret.write_text("private")
    (folder / name).symlink_to(secret)
    with pytest.raises(DataError, match="leads out of the folder"):
        open_checkpoint(folder)


def test_the_links_of_the_hugging_face_cache_are_followed(folder, tmp_path):
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(Path("..") / ".." / "blobs" / str(number))
    assert len(open_checkpoint(snapshot).experts) == 24


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda m: m | {FIRST: "model-2.safetensors"}, "the index places in 'model-2"),
        (lambda m: {k: v for k, v in m.items() if k != FIRST}, "the index places in None"),
        (lambda m: m | {"extra": "model-1.safetensors"}, "'extra' in 'model-1.safetensors', which does not hold it"),
        (lambda m: m | {"extra": 7}, "no weight_map"),
        (lambda _: [], "no weight_map"),
        (lambda m: m | {f"k{n}": f"{n}.safetensors" for n in range(5000)}, "shards, at most 4096"),
        (lambda m: m | {"extra": "missing.safetensors"}, "missing.safetensors: No such file"),
    ],
)
def test_an_index_that_disagrees_with_its_shards_is_refused(folder, edit, reason):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model-1.safetensors")
    save_file({"model.other": torch.zeros(1)}, folder / "model-2.safetensors")
    good = dict.fromkeys(tensors, "model-1.safetensors") | {"model.other": "model-2.safetensors"}
    index(folder, good)
    assert len(open_checkpoint(folder).experts) == 24
    index(folder, edit(good))
    with pytest.raises(DataError, match=reason):
        open_checkpoint(folder)


def test_a_tensor_in_two_shards_is_refused(folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    save_file({FIRST: tensors[FIRST], "model.other": torch.zeros(1)}, folder / "model-2.safetensors")
    index(folder, dict.fromkeys(tensors, "model-1.safetensors") | {"model.other": "model-2.safetensors"})
    with pytest.raises(DataError, match=r"model-2\.safetensors holds .*which the index places"):
        open_checkpoint(folder)


def test_maths_go_through_plain_values_and_unknown_ones_are_refused():
    assert ExpertMaths.from_dict(ExpertMaths().to_dict()) == ExpertMaths()
    for wrong in ({}, {"activation": "gelu", "form": "glu"}, ExpertMaths().to_dict() | {"limit": 7}):
        with pytest.raises(DataError, match="cannot be computed by this version"):
            ExpertMaths.from_dict(wrong)
