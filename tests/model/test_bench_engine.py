"""Both sides of `bench model` do the work that is asked of them, and what is counted is what was computed."""

from __future__ import annotations

import pytest
import torch
from model_checkpoints import VOCABULARY, prompt_of

from kvasir_node.base.errors import DataError
from kvasir_node.model.bench_engine import EngineBench
from kvasir_node.model.bench_memory import ReadBench
from kvasir_node.model.bench_reference import EXPERTS_IMPLEMENTATIONS, TransformersBench
from kvasir_node.model.checkpoint import open_checkpoint

STEPS = 3
PROMPTS = [prompt_of(seed, 12) for seed in range(4)]


@pytest.fixture(scope="module")
def folder(checkpoint_folder):
    return checkpoint_folder("qwen3_moe")


@pytest.fixture(scope="module")
def bench(folder) -> EngineBench:
    # Chunks shorter than the prompts: the first requests answer long before the last prompt is computed.
    return EngineBench(open_checkpoint(folder), torch.float32, slots=4, tokens_max=12 + STEPS, prefill_chunk=5)


def test_a_burst_may_be_repeated_and_needs_no_more_room_than_was_taken(bench):
    for prompts in (PROMPTS, PROMPTS[:1], PROMPTS):
        bench.warm_up(prompts, STEPS)
        burst = bench.burst(prompts, STEPS)
        assert burst.prefill_tokens_s > 0
        assert burst.decode_tokens_s > 0


def test_a_profile_counts_the_weights_that_the_router_chose(bench, folder):
    checkpoint = open_checkpoint(folder)
    one, four = bench.profiles([PROMPTS[:1], PROMPTS], STEPS)
    assert one.experts_read == checkpoint.chosen_per_row == 2
    assert 2 < four.experts_read < 4 * 2 == checkpoint.experts_per_layer  # some were chosen by several rows
    assert bench.vocabulary == VOCABULARY
    expert_bytes = 3 * 64 * 32 * 4
    embedding_bytes = VOCABULARY * 64 * 4
    trunk_bytes = sum(tensor.nbytes for tensor in checkpoint.trunk.values()) - embedding_bytes
    assert one.touched_bytes == trunk_bytes + len(checkpoint.layers) * 2 * expert_bytes
    assert four.touched_bytes == pytest.approx(trunk_bytes + len(checkpoint.layers) * four.experts_read * expert_bytes)


def test_a_profile_splits_the_whole_step(bench):
    (profile,) = bench.profiles([PROMPTS], STEPS)
    assert min(profile.trunk_s, profile.experts_s, profile.rest_s) > 0


def test_transformers_is_measured_at_its_best(folder):
    bench = TransformersBench(folder, torch.float32)
    bench.warm_up(PROMPTS, STEPS)
    assert bench.implementations[4] in EXPERTS_IMPLEMENTATIONS
    burst = bench.burst(PROMPTS, STEPS)
    assert burst.prefill_tokens_s > 0
    assert burst.decode_tokens_s > 0


def test_a_folder_that_transformers_cannot_read_is_refused(tmp_path):
    with pytest.raises(DataError, match="into transformers as the baseline"):
        TransformersBench(tmp_path, torch.float32)


def test_memory_is_read_at_some_speed():
    assert ReadBench(1 << 20).gb_s() > 0
