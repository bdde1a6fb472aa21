"""Tiny random checkpoints of each supported family, and the slow reference answers that transformers gives."""

from __future__ import annotations

import importlib
import random
from copy import copy
from pathlib import Path
from typing import Any

import torch

from kvasir_node.base.ids import ExpertId
from kvasir_node.model.checkpoint import open_checkpoint
from kvasir_node.model.engine import Engine
from kvasir_node.model.experts import ExpertShard, load_from_checkpoint
from kvasir_node.model.jobs import Job, StepToken
from kvasir_node.model.trunk import LocalDispatch, RowTally, Trunk, load_trunk

VOCABULARY = 256
CONTEXT = 160
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 8, "moe_intermediate_size": 32, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3_moe_windowed": (
        "Qwen3Moe",
        {
            "num_experts": 8,
            "moe_intermediate_size": 32,
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 12,
            "mlp_only_layers": [0],
            "intermediate_size": 96,
        },
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            "num_experts": 8,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "intermediate_size": 96,
            "use_sliding_window": True,
            "sliding_window": 12,
            "decoder_sparse_step": 1,
            "max_window_layers": 3,
        },
    ),
    "olmoe": ("Olmoe", {"num_experts": 8, "intermediate_size": 32, "num_key_value_heads": 4}),
    "mixtral": ("Mixtral", {"num_local_experts": 8, "intermediate_size": 32, "sliding_window": 12}),
}


def family_of(name: str) -> str:
    return name.removesuffix("_windowed")


def model_class(name: str, suffix: str) -> Any:
    family, (prefix, _) = family_of(name), CONFIGS[name]
    kind = "configuration" if suffix == "Config" else "modeling"
    module = importlib.import_module(f"transformers.models.{family}.{kind}_{family}")
    return getattr(module, prefix + suffix)


def make_checkpoint(name: str, folder: Path, dtype: torch.dtype = torch.float32, shard: str = "50GB") -> Path:
    """Saves a seeded random model as a standard checkpoint. Weights are wide enough that no two logits nearly tie."""
    torch.manual_seed(7)
    config = model_class(name, "Config")(**(_COMMON | CONFIGS[name][1]))
    model = model_class(name, "ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.08)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    return folder


def reference_model(name: str, folder: Path) -> Any:
    return model_class(name, "ForCausalLM").from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager", local_files_only=True
    )


def greedy(model: Any, prompt: tuple[int, ...], tokens: int) -> list[int]:
    """What transformers' own generate answers."""
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens)
    return output[0, len(prompt) :].tolist()


def prompt_of(seed: int, length: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(1, VOCABULARY, (length,), generator=generator).tolist())


def all_experts(folder: Path, dtype: torch.dtype = torch.float32) -> ExpertShard:
    checkpoint = open_checkpoint(folder)
    return load_from_checkpoint(checkpoint, checkpoint.experts, dtype)


def local_trunk(folder: Path, dtype: torch.dtype = torch.float32) -> Trunk:
    return load_trunk(folder, dtype, "cpu", LocalDispatch(all_experts(folder, dtype)))


class TwoShards:
    """A dispatch whose odd experts are held by another shard, as by a worker."""

    def __init__(self, folder: Path) -> None:
        checkpoint = open_checkpoint(folder)
        dtype = torch.float32
        self.near = load_from_checkpoint(checkpoint, [e for e in checkpoint.experts if e.index % 2 == 0], dtype)
        self.far = load_from_checkpoint(checkpoint, [e for e in checkpoint.experts if e.index % 2 == 1], dtype)
        self.calls = 0
        self.fail_at = 0  # the call that raises

    def begin(self, rows: int) -> None:
        self._remote = torch.zeros(rows, dtype=torch.int64)
        self._local = torch.zeros(rows, dtype=torch.int64)

    def __call__(self, layer: int, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.fail_at:
            raise ConnectionError("the other shard went away")
        pair_row = torch.arange(rows.shape[0]).repeat_interleave(chosen.shape[1])
        expert, weight = chosen.reshape(-1), weights.reshape(-1)
        is_far = expert % 2 == 1
        self._remote += is_far.view(chosen.shape).sum(1)
        self._local += (~is_far).view(chosen.shape).sum(1)
        near, far = (
            shard.compute(layer, rows, pair_row[mine], expert[mine], weight[mine])
            for shard, mine in ((self.near, ~is_far), (self.far, is_far))
        )
        return near + far

    def tally(self) -> RowTally:
        none = [0] * len(self._local)
        return RowTally(self._local.tolist(), self._remote.tolist(), none, none)

    def fork(self) -> TwoShards:
        twin = copy(self)
        twin.calls = twin.fail_at = 0
        return twin


def expert_ids(folder: Path) -> list[ExpertId]:
    return sorted(open_checkpoint(folder).experts)


def run(engine: Engine, *jobs: Job) -> dict[int, list[StepToken]]:
    """Joins all jobs at once and steps until the engine is idle."""
    for one in jobs:
        engine.join(one)
    events: dict[int, list[StepToken]] = {one.id: [] for one in jobs}
    while not engine.is_idle:
        for event in engine.step():
            events[event.job_id].append(event)
    return events


def run_with_failures(
    engine: Engine, dispatch: Any, rng: random.Random, calls_max: int, *jobs: Job
) -> tuple[dict[int, list[StepToken]], int]:
    """As `run`, with a dispatch that raises ConnectionError at a call of each step, at most `calls_max` on; steps that
    fail are repeated. Also how many did."""
    for one in jobs:
        engine.join(one)
    events: dict[int, list[StepToken]] = {one.id: [] for one in jobs}
    failures = 0
    while not engine.is_idle:
        dispatch.fail_at = dispatch.calls + rng.randint(1, calls_max)
        try:
            step = engine.step()
        except ConnectionError:
            failures += 1
            continue
        for event in step:
            events[event.job_id].append(event)
    return events, failures


def tokens(events: list[StepToken]) -> list[int]:
    return [event.token for event in events]
