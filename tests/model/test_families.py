"""Every family against transformers: requests that join and leave, with experts here, half elsewhere and all elsewhere.

The reference is one forward of transformers' whole model over each finished request, without a cache: greedy tokens are
equal to those of a solo run when each of them is the likeliest after all that went before it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from family_configs import SPECIAL, family_model, save_family
from model_checkpoints import prompt_of
from safetensors.torch import load_file, save_file

from kvasir_node.base.content import read_source
from kvasir_node.base.generation import SamplingOptions
from kvasir_node.base.ids import Cid, ExpertId
from kvasir_node.model.cache import Lane
from kvasir_node.model.checkpoint import ExpertMaths, open_checkpoint, parse_expert_file
from kvasir_node.model.engine import Engine
from kvasir_node.model.experts import ExpertShard, load_from_checkpoint
from kvasir_node.model.families import FAMILIES, REFUSED
from kvasir_node.model.indexing import index_checkpoint
from kvasir_node.model.jobs import Job
from kvasir_node.model.manifest import decode_layer_node, decode_manifest
from kvasir_node.model.trunk import LocalDispatch, RowTally, Trunk, load_trunk
from kvasir_node.wire.blobs import BlobRef, decode_blob_node, is_node

CONTEXT = 64
LOGITS_ATOL = 1e-4
COMPOSITE = {"qwen3_5_moe"}  # the text model of a checkpoint that also sees; tested below
SHARDED = {"qwen3_moe", "mixtral", "gpt_oss", "granitemoe", "deepseek_v3", "nemotron_h", "gemma4_text"}


class Split:
    """A dispatch over two shards; `far` says which experts the second one computes."""

    def __init__(self, near: ExpertShard, far: ExpertShard) -> None:
        self.near, self.far = near, far
        self.far_pairs = self.near_pairs = 0

    def begin(self, rows: int) -> None:
        self._rows = rows

    def __call__(self, layer: int, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        pair_row = torch.arange(rows.shape[0]).repeat_interleave(chosen.shape[1])
        expert, weight = chosen.reshape(-1), weights.reshape(-1)
        is_far = torch.isin(expert, torch.tensor(sorted(self.far.held(layer)), dtype=torch.int64))
        self.far_pairs += int(is_far.sum())
        self.near_pairs += int((~is_far).sum())
        near, far = (
            shard.compute(layer, rows, pair_row[mine], expert[mine], weight[mine])
            for shard, mine in ((self.near, ~is_far), (self.far, is_far))
        )
        return near + far

    def tally(self) -> RowTally:
        none = [0] * self._rows
        return RowTally(none, none, none, none)

    def fork(self) -> Split:
        return Split(self.near, self.far)


class Recorder:
    """A trunk that remembers the logits it gave, by slot."""

    def __init__(self, trunk: Trunk) -> None:
        self._trunk = trunk
        self.seen: list[tuple[list[int], list[int], torch.Tensor]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trunk, name)

    def forward(self, tokens: torch.Tensor, lane: Lane) -> tuple[torch.Tensor, RowTally]:
        logits, tally = self._trunk.forward(tokens, lane)
        self.seen.append((list(lane.slots), lane.positions[:, -1].tolist(), logits.clone()))
        return logits, tally


def worker_shard(folder: Path, experts: list[ExpertId]) -> ExpertShard:
    """What a worker loads: by the manifest, from each expert's own file."""
    checkpoint = open_checkpoint(folder)
    indexed = index_checkpoint(checkpoint, name="tiny")
    manifest = decode_manifest(read_source(indexed.blocks[Cid(indexed.model)]))
    assert manifest == indexed.manifest
    maths = ExpertMaths.from_dict(manifest.maths)
    shard = ExpertShard(maths, manifest.hidden_size, manifest.expert_hidden_size)
    for layer, node in manifest.layer_nodes.items():
        blobs = decode_layer_node(read_source(indexed.blocks[node]), manifest, layer).experts
        for expert in experts:
            if expert.layer == layer:
                data = bytearray(_read_blob(indexed.blocks, blobs[expert.index]))
                shard.add(expert, parse_expert_file(data, manifest.expert_parts(layer)))
    return shard


def _read_blob(blocks: Any, blob: BlobRef) -> bytes:
    data = read_source(blocks[blob.cid])
    if is_node(blob.cid):
        data = b"".join(read_source(blocks[cid]) for cid in decode_blob_node(data).blocks)
    return data


def poison(shard: ExpertShard, experts: list[ExpertId]) -> None:
    """Whoever reads these would see NaN."""
    for expert in experts:
        weights = shard._layers[expert.layer].experts[expert.index]
        weights.up.fill_(float("nan"))
        weights.down.fill_(float("nan"))


def serve(trunk: Recorder, jobs: list[Job], slots: int) -> dict[int, list[int]]:
    """Jobs join at random steps and leave when they are done."""
    rng = random.Random(5)
    engine = Engine(trunk, slots=slots, context=CONTEXT, prefill_chunk=8)  # type: ignore[arg-type]
    trunk.seen.clear()
    waiting, answers = list(jobs), {job.id: [] for job in jobs}
    while waiting or not engine.is_idle:
        if waiting and engine.free_slots and (engine.is_idle or rng.random() < 0.6):
            engine.join(waiting.pop(0))
        for event in engine.step():
            answers[event.job_id].append(event.token)
    return answers


def jobs_of(count: int) -> list[Job]:
    rng = random.Random(3)
    greedy = SamplingOptions(temperature=0.0)
    return [Job(n, prompt_of(n, rng.randint(1, 30)), rng.randint(3, 9), greedy, frozenset()) for n in range(count)]


def check(reference: Any, jobs: list[Job], answers: dict[int, list[int]], seen: list[Any]) -> None:
    """Tokens equal, and each of the engine's logits close to some row of the reference at its position."""
    expected: dict[int, list[torch.Tensor]] = {}
    for job in jobs:
        answer = answers[job.id]
        assert len(answer) == job.max_tokens
        with torch.inference_mode():
            logits = reference(input_ids=torch.tensor([[*job.prompt, *answer[:-1]]]), use_cache=False).logits[0]
        assert logits[len(job.prompt) - 1 :].argmax(-1).tolist() == answer
        for position, row in enumerate(logits):
            expected.setdefault(position, []).append(row.float())
    for _, positions, rows in seen:
        for position, row in zip(positions, rows, strict=True):
            assert min(float((row - other).abs().max()) for other in expected[position]) < LOGITS_ATOL


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory):
    def make(family: str) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp(family) / family
        return folder, save_family(family, folder, "150KB" if family in SHARDED else "50GB")

    return make


@pytest.mark.parametrize("family", sorted(SPECIAL))
def test_tokens_and_logits_are_those_of_transformers_wherever_experts_are(made, family):
    folder, reference = made(family)
    checkpoint = open_checkpoint(folder)
    everyone = sorted(checkpoint.experts)
    odd = [expert for expert in everyone if expert.index % 2]
    near = load_from_checkpoint(checkpoint, everyone, torch.float32)
    nobody = ExpertShard(checkpoint.maths, checkpoint.hidden_size, checkpoint.expert_hidden_size)
    dispatch = Split(near, nobody)
    trunk = Recorder(load_trunk(folder, torch.float32, "cpu", dispatch))

    few, many = jobs_of(3), jobs_of(8)
    check(reference, few, serve(trunk, few, 2), trunk.seen)
    assert dispatch.far_pairs == 0

    everywhere = worker_shard(folder, everyone)
    dispatch.far = worker_shard(folder, odd)
    poison(near, odd)
    dispatch.near_pairs = 0
    check(reference, many, serve(trunk, many, 4), trunk.seen)
    assert min(dispatch.near_pairs, dispatch.far_pairs) > 0

    dispatch.far = everywhere
    poison(near, everyone)
    dispatch.near_pairs = 0
    check(reference, few, serve(trunk, few, 2), trunk.seen)
    assert dispatch.near_pairs == 0


def rewrite(folder: Path, change: Callable[[str], str], extra: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    tensors = {change(key): tensor for key, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors | extra, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


def answers_equal(folder: Path, reference: Any) -> None:
    checkpoint = open_checkpoint(folder)
    shard = load_from_checkpoint(checkpoint, checkpoint.experts, torch.float32)
    trunk = Recorder(load_trunk(folder, torch.float32, "cpu", LocalDispatch(shard)))
    jobs = jobs_of(3)
    check(reference, jobs, serve(trunk, jobs, 2), trunk.seen)


def test_of_a_checkpoint_that_also_sees_the_text_model_is_served_and_the_rest_left_out(made):
    folder, reference = made("qwen3_5_moe_text")
    text = json.loads((folder / "config.json").read_text())
    extra = {
        "model.visual.patch_embed.proj.weight": torch.zeros(4, 4),
        "mtp.layers.0.mlp.experts.0.gate_proj.weight": torch.zeros(32, 64),
        "mtp.norm.weight": torch.zeros(64),
    }
    config = {"model_type": "qwen3_5_moe", "text_config": text, "vision_config": {}}
    rewrite(folder, lambda key: key.replace("model.", "model.language_model.", 1), extra, config)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.family == "qwen3_5_moe"
    assert not extra.keys() & checkpoint.trunk.keys()
    answers_equal(folder, reference)


def test_a_head_for_several_tokens_is_neither_trunk_nor_experts_yet_a_real_layer_of_that_number_is_both(
    tmp_path,
):
    folder = tmp_path / "deepseek"
    reference = save_family("deepseek_v3", folder)
    config = json.loads((folder / "config.json").read_text())
    extra = {f"model.layers.61.mlp.experts.{n}.gate_proj.weight": torch.zeros(32, 64) for n in range(8)}
    extra |= {"model.layers.61.eh_proj.weight": torch.zeros(4, 4)}
    rewrite(folder, lambda key: key, extra, config)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.layers == (1, 2)
    assert not extra.keys() & checkpoint.trunk.keys()
    answers_equal(folder, reference)
    deep = family_model("deepseek_v3", num_hidden_layers=62, first_k_dense_replace=61)
    deep.save_pretrained(folder / "deep")
    assert open_checkpoint(folder / "deep").layers == (61,)
    assert any(key.startswith("model.layers.61.") for key in open_checkpoint(folder / "deep").trunk)


def test_experts_on_a_latent_width_get_rows_of_that_width(tmp_path):
    reference = family_model("nemotron_h", moe_latent_size=24)
    reference.save_pretrained(tmp_path)
    assert open_checkpoint(tmp_path).hidden_size == 24
    answers_equal(tmp_path, reference)


def test_a_step_that_fails_moves_no_recurrent_state(made):
    """Everything but the last call of a step may have been computed when it fails, and it is repeated."""
    folder, reference = made("qwen3_next")
    checkpoint = open_checkpoint(folder)
    shard = load_from_checkpoint(checkpoint, checkpoint.experts, torch.float32)

    class Failing(LocalDispatch):
        rng = random.Random(4)

        def __call__(self, *args: Any) -> torch.Tensor:
            if self.rng.random() < 0.15:
                raise ConnectionError("a worker went away")
            return super().__call__(*args)

    trunk = Recorder(load_trunk(folder, torch.float32, "cpu", Failing(shard)))
    engine = Engine(trunk, slots=2, context=CONTEXT, prefill_chunk=8)  # type: ignore[arg-type]
    jobs = jobs_of(2)
    answers: dict[int, list[int]] = {job.id: [] for job in jobs}
    for job in jobs:
        engine.join(job)
    failures = 0
    while not engine.is_idle:
        try:
            events = engine.step()
        except ConnectionError:
            failures += 1
            continue
        for event in events:
            answers[event.job_id].append(event.token)
    assert failures > 5
    check(reference, jobs, answers, trunk.seen)


def test_every_family_is_tested_and_told():
    assert set(SPECIAL) | COMPOSITE == set(FAMILIES)
    assert not set(FAMILIES) & set(REFUSED)
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    missing = [name for name in (*FAMILIES, *REFUSED) if f"`{name}`" not in text]
    assert not missing
    assert len(FAMILIES) >= 24
