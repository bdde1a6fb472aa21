"""Seeded Qwen3-MoE checkpoints to measure with: random weights that behave like a model, and the demo's tokenizer.

It does not know what is measured with them. Sizes: S has 111 million parameters, M 1.25 billion, T is for tests.
Weights are N(0, gain / sqrt(fan-in)), so that activations keep their size through the layers and logits have a standard
deviation near 2.

The same size, seed and versions of numpy and transformers give the same bytes. Weights are drawn and written file by
file, so that only one layer is in memory at a time.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer
from transformers import Qwen3MoeConfig

from kvasir_node.base.errors import UsageError

SIZES: dict[str, dict[str, Any]] = {
    "T": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 2304,
    },
    "S": {
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 4096,
    },
    "M": {
        "hidden_size": 1024,
        "num_hidden_layers": 12,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 4096,
    },
}
# With a gain of 1 the choice of experts is full of near-ties, and a rounding in bf16 picks others: the likeliest token
# was then the same as in fp32 at 81 % of positions, with 3 at 96 % (size S, 192 positions).
ROUTER_GAIN = 3.0
HEAD_GAIN = 2.0
_INDEX_FILE = "model.safetensors.index.json"
Progress = Callable[[int, int], None]


def make_checkpoint(
    size: str, folder: Path, tokenizer: Path, *, seed: int = 0, progress: Progress | None = None
) -> None:
    """Writes the checkpoint into `folder`, which appears only when it is whole; one that is there already is kept.

    `tokenizer` is the folder of another model, whose tokenizer it gets; ids beyond that vocabulary are named
    `<|unused_N|>`. Raises UsageError for an unknown size, or when something else is in the folder.
    """
    if size not in SIZES:
        raise UsageError(f"no bench checkpoint of the size {size!r}; there are {', '.join(SIZES)}", param="make")
    config = _config(size)
    if folder.exists():
        _check_same(folder, config)
        return
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        config.save_pretrained(partial)
        (partial / "generation_config.json").write_text(json.dumps({"pad_token_id": 0}))
        _write_tokenizer(tokenizer, partial, config.vocab_size)
        _write_weights(config, seed, partial, progress or (lambda done, total: None))
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _config(size: str) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        **SIZES[size],
        architectures=["Qwen3MoeForCausalLM"],
        intermediate_size=4 * SIZES[size]["hidden_size"],
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        dtype="bfloat16",
    )


def _check_same(folder: Path, config: Qwen3MoeConfig) -> None:
    """By the config alone: the folder was whole when it got its name."""
    try:
        found = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        found = None
    if found != json.loads(config.to_json_string()):
        raise UsageError(f"{folder} holds something else than this checkpoint; choose another folder", param="out")


def _write_tokenizer(source: Path, folder: Path, vocabulary: int) -> None:
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    have = tokenizer.get_vocab_size(with_added_tokens=True)
    tokenizer.add_tokens([AddedToken(f"<|unused_{n}|>", normalized=False) for n in range(have, vocabulary)])
    tokenizer.save(str(folder / "tokenizer.json"))
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(source / name, folder / name)


def _write_weights(config: Qwen3MoeConfig, seed: int, folder: Path, progress: Progress) -> None:
    files = config.num_hidden_layers + 1
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for number in range(files):
        name = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        shapes = dict(_outer_shapes(config) if number == 0 else _layer_shapes(config, number - 1))
        draw = np.random.default_rng((seed, number))
        tensors = {key: _weight(key, shape, draw) for key, shape in shapes.items()}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
        progress(number + 1, files)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / _INDEX_FILE).write_text(json.dumps(index, indent=1))


def _weight(key: str, shape: tuple[int, ...], draw: np.random.Generator) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)  # norms
    gain = shape[1] ** -0.5
    if key.endswith("embed_tokens.weight"):
        gain = 1.0
    elif key == "lm_head.weight":
        gain *= HEAD_GAIN
    elif key.endswith("mlp.gate.weight"):
        gain *= ROUTER_GAIN
    return torch.from_numpy(draw.standard_normal(shape, dtype=np.float32) * np.float32(gain)).to(torch.bfloat16)


def _outer_shapes(config: Qwen3MoeConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (config.vocab_size, config.hidden_size)
    yield "model.norm.weight", (config.hidden_size,)
    yield "lm_head.weight", (config.vocab_size, config.hidden_size)


def _layer_shapes(config: Qwen3MoeConfig, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes [out, in] as Qwen3-MoE's own checkpoints have them."""
    width, expert_width, head = config.hidden_size, config.moe_intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    prefix = f"model.layers.{layer}"
    yield f"{prefix}.input_layernorm.weight", (width,)
    yield f"{prefix}.post_attention_layernorm.weight", (width,)
    yield f"{prefix}.self_attn.q_norm.weight", (head,)
    yield f"{prefix}.self_attn.k_norm.weight", (head,)
    yield f"{prefix}.self_attn.q_proj.weight", (queries, width)
    yield f"{prefix}.self_attn.k_proj.weight", (keys, width)
    yield f"{prefix}.self_attn.v_proj.weight", (keys, width)
    yield f"{prefix}.self_attn.o_proj.weight", (width, queries)
    yield f"{prefix}.mlp.gate.weight", (config.num_experts, width)
    for expert in range(config.num_experts):
        yield f"{prefix}.mlp.experts.{expert}.gate_proj.weight", (expert_width, width)
        yield f"{prefix}.mlp.experts.{expert}.up_proj.weight", (expert_width, width)
        yield f"{prefix}.mlp.experts.{expert}.down_proj.weight", (width, expert_width)
