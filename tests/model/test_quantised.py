"""Quantised checkpoints: decoded as transformers decodes them, whole models and single matrices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from family_configs import save_family
from safetensors.torch import load_file, save_file
from test_families import Recorder, Split, check, jobs_of, serve, worker_shard
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from kvasir_node.base.errors import DataError
from kvasir_node.base.ids import ExpertId
from kvasir_node.model.checkpoint import open_checkpoint
from kvasir_node.model.dequantise import fp8, mxfp4
from kvasir_node.model.experts import ExpertShard, load_from_checkpoint
from kvasir_node.model.trunk import load_trunk

FP8_BLOCK = (8, 32)


def rewrite(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> None:
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    old = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(old | config))


def to_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weights [R, C] -> fp8 [R, C] and what each block was divided by."""
    rows, columns = FP8_BLOCK
    high, wide = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
    padded = torch.zeros(high * rows, wide * columns)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    scales = padded.view(high, rows, wide, columns).abs().amax((1, 3)) / 448
    each = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: weight.shape[0], : weight.shape[1]]
    return (weight / each).to(torch.float8_e4m3fn), scales


@pytest.fixture(scope="module")
def fp8_folder(tmp_path_factory) -> Path:
    """As DeepSeek publishes: experts, attention and shared experts in fp8, routers, norms and embeddings not."""
    folder = tmp_path_factory.mktemp("fp8") / "deepseek"
    save_family("deepseek_v3", folder)
    tensors = {}
    for key, tensor in load_file(folder / "model.safetensors").items():
        if "_proj" in key and key.endswith(".weight"):
            tensors[key], tensors[key + "_scale_inv"] = to_fp8(tensor)
        else:
            tensors[key] = tensor
    settings = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": FP8_BLOCK}
    rewrite(folder, tensors, quantization_config=settings)
    return folder


@pytest.fixture(scope="module")
def mxfp4_folder(tmp_path_factory) -> Path:
    """As gpt-oss is published."""
    folder = tmp_path_factory.mktemp("mxfp4") / "gpt-oss"
    save_family("gpt_oss", folder)
    generator = torch.Generator().manual_seed(3)
    tensors = load_file(folder / "model.safetensors")
    for key in [key for key in tensors if key.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(key).shape
        shape = (experts, rows, columns // 32, 16)
        tensors[key + "_blocks"] = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        tensors[key + "_scales"] = torch.randint(120, 124, shape[:3], dtype=torch.uint8, generator=generator)
    rewrite(folder, tensors, quantization_config={"quant_method": "mxfp4"})
    return folder


def plain_reference(folder: Path, plain: Path) -> Any:
    """transformers' model of the same values as an ordinary checkpoint. (transformers' own decoding of such folders
    gave the same when this was written; it needs accelerate, which nothing else here does.)"""
    stored = load_file(folder / "model.safetensors")
    tensors: dict[str, torch.Tensor] = {}
    for key, tensor in stored.items():
        if key.endswith("_blocks"):
            scales = stored[key.removesuffix("_blocks") + "_scales"]
            tensors[key.removesuffix("_blocks")] = convert_moe_packed_tensors(tensor, scales, dtype=torch.float32)
        elif tensor.dtype is torch.float8_e4m3fn:
            scales = stored[key + "_scale_inv"]
            for axis, size in enumerate(FP8_BLOCK):
                scales = scales.repeat_interleave(size, axis)
            tensors[key] = tensor.float() * scales[: tensor.shape[0], : tensor.shape[1]]
        elif not key.endswith(("_scales", "_scale_inv")):
            tensors[key] = tensor
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    save_file({key: t.contiguous() for key, t in tensors.items()}, plain / "model.safetensors", {"format": "pt"})
    model, report = AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.float32, attn_implementation="eager", local_files_only=True, output_loading_info=True
    )
    assert not report["missing_keys"]
    return model.eval()


@pytest.mark.parametrize("kind", ["fp8_folder", "mxfp4_folder"])
def test_a_quantised_checkpoint_answers_as_in_transformers(request, tmp_path, kind):
    folder = request.getfixturevalue(kind)
    reference = plain_reference(folder, tmp_path)
    checkpoint = open_checkpoint(folder)
    odd = [expert for expert in checkpoint.experts if expert.index % 2]
    even = [expert for expert in checkpoint.experts if expert.index % 2 == 0]
    dispatch = Split(load_from_checkpoint(checkpoint, even, torch.float32), worker_shard(folder, odd))
    trunk = Recorder(load_trunk(folder, torch.float32, "cpu", dispatch))
    jobs = jobs_of(4)
    check(reference, jobs, serve(trunk, jobs, 2), trunk.seen)
    assert dispatch.far_pairs > 0


def test_parts_lie_as_published_and_an_expert_weighs_what_its_decoded_form_does(fp8_folder, mxfp4_folder):
    checkpoint = open_checkpoint(fp8_folder)
    assert list(checkpoint.parts(ExpertId(1, 3))) == ["gate", "gate_scale", "up", "up_scale", "down", "down_scale"]
    assert checkpoint.parts(ExpertId(1, 3))["down_scale"] == ("F32", (8, 1), 32)
    checkpoint = open_checkpoint(mxfp4_folder)
    parts = checkpoint.parts(ExpertId(0, 1))
    assert list(parts) == [
        *("gate_up_blocks", "gate_up_scales", "gate_up_bias"),
        *("down_blocks", "down_scales", "down_bias"),
    ]
    shard = load_from_checkpoint(checkpoint, [ExpertId(0, 1)], torch.bfloat16)
    weights = shard._layers[0].experts[1]
    held = (weights.up, weights.down, weights.up_bias, weights.down_bias)
    assert shard.nbytes == shard.expert_bytes == sum(tensor.nbytes for tensor in held if tensor is not None)
    assert shard.expert_bytes > 3 * sum(nbytes for _, _, nbytes in parts.values())


def test_mxfp4_is_decoded_as_by_transformers():
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (6, 3, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(100, 150, (6, 3), dtype=torch.uint8, generator=generator)
    expected = convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float32)[0].t()
    assert torch.equal(mxfp4(blocks, scales), expected)


def test_fp8_blocks_at_the_edge_may_be_cut():
    weight = torch.randn(41, 50, generator=torch.Generator().manual_seed(1))
    quantised, scales = to_fp8(weight)
    decoded = fp8(quantised, scales, *FP8_BLOCK)
    for row in (0, 7, 8, 40):
        for column in (0, 31, 32, 49):
            expected = quantised[row, column].float() * scales[row // 8, column // 32]
            assert decoded[row, column] == expected
    torch.testing.assert_close(decoded, weight, rtol=0.07, atol=0.02)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model.layers.1.mlp.experts.0.up_proj.weight_scale_inv": None}, "layer 1: up is F8_E4M3; supported: F32"),
        (
            {"model.layers.1.mlp.experts.0.up_proj.weight_scale_inv": torch.ones(1, 1)},
            r"up_scale has the shape \[1, 1\], expected \[4, 2\]",
        ),
        (
            {"model.layers.1.mlp.experts.0.up_proj.weight": torch.zeros(32, 64, dtype=torch.float8_e5m2)},
            "up is F8_E5M2; supported: F8_E4M3",
        ),
    ],
)
def test_experts_that_cannot_be_decoded_are_refused(fp8_folder, tmp_path, change, reason):
    with pytest.raises(DataError, match=reason):
        open_checkpoint(_changed(fp8_folder, tmp_path, change))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model.layers.0.self_attn.o_proj.weight_scale_inv": None}, "o_proj.weight' is F8_E4M3 without"),
        ({"model.layers.0.self_attn.o_proj.weight_scale_inv": torch.ones(9, 9)}, r"has scales of \[9, 9\]"),
    ],
)
def test_a_trunk_that_cannot_be_decoded_is_refused(fp8_folder, tmp_path, change, reason):
    folder = _changed(fp8_folder, tmp_path, change)
    checkpoint = open_checkpoint(folder)
    nobody = ExpertShard(checkpoint.maths, checkpoint.hidden_size, checkpoint.expert_hidden_size)
    with pytest.raises(DataError, match=reason):
        load_trunk(folder, torch.float32, "cpu", Split(nobody, nobody))


def _changed(folder: Path, tmp_path: Path, change: dict[str, torch.Tensor | None]) -> Path:
    tensors = load_file(folder / "model.safetensors") | change
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file({key: t for key, t in tensors.items() if t is not None}, tmp_path / "model.safetensors")
    return tmp_path
