"""Grouped maths against the naive version, and experts that come and go while others compute."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_checkpoints import all_experts, reference_model

from kvasir_node.base.errors import BugError, DataError
from kvasir_node.base.ids import ExpertId
from kvasir_node.model.checkpoint import ExpertMaths, open_checkpoint
from kvasir_node.model.experts import ExpertShard, load_from_checkpoint

D, WIDE, E = 24, 16, 6


def random_expert(generator: torch.Generator) -> dict[str, torch.Tensor]:
    shapes = {"gate": (WIDE, D), "up": (WIDE, D), "down": (D, WIDE)}
    return {part: torch.randn(shape, generator=generator) / 4 for part, shape in shapes.items()}


def make_shard(dtype: torch.dtype = torch.float32, seed: int = 0) -> ExpertShard:
    generator = torch.Generator().manual_seed(seed)
    shard = ExpertShard(ExpertMaths(), D, WIDE, dtype)
    for index in range(E):
        shard.add(ExpertId(2, index), random_expert(generator))
    return shard


SHARDS = {dtype: make_shard(dtype) for dtype in (torch.float32, torch.bfloat16)}


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, E - 1)), max_size=40),
    st.sampled_from(list(SHARDS)),
    st.integers(0, 1000),
)
def test_grouped_equals_naive(pairs, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(5, D, generator=generator).to(dtype)
    row, expert = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).unbind(1)
    weight = torch.rand(len(pairs), generator=generator).to(dtype)
    shard = SHARDS[dtype]
    fast = shard.compute(2, rows, row, expert, weight)
    slow = shard.compute_naive(2, rows, row, expert, weight)
    assert fast.dtype is torch.float32
    assert fast.shape == rows.shape
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(fast, slow, rtol=tolerance, atol=tolerance)
    assert torch.equal(fast, shard.compute(2, rows, row, expert, weight))


def test_pairs_of_other_shards_add_up_to_the_whole():
    shard = SHARDS[torch.float32]
    generator = torch.Generator().manual_seed(4)
    rows = torch.randn(7, D, generator=generator)
    row = torch.arange(7).repeat_interleave(3)
    expert = torch.stack([torch.randperm(E, generator=generator)[:3] for _ in range(7)]).flatten()
    weight = torch.rand(21, generator=generator)
    whole = shard.compute(2, rows, row, expert, weight)
    parts = [shard.compute(2, rows, row[m], expert[m], weight[m]) for m in (expert < 2, expert >= 2)]
    torch.testing.assert_close(parts[0] + parts[1], whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_the_maths_are_those_of_transformers(checkpoint_folder, name):
    folder = checkpoint_folder(name)
    layer = reference_model(name, folder).model.layers[1]
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(9, 64, generator=generator)
    chosen = torch.stack([torch.randperm(8, generator=generator)[:2] for _ in range(9)])
    weights = torch.rand(9, 2, generator=generator)
    with torch.inference_mode():
        expected = layer.mlp.experts(rows, chosen, weights)
    row = torch.arange(9).repeat_interleave(2)
    got = all_experts(folder).compute(1, rows, row, chosen.flatten(), weights.flatten())
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-6)


def test_what_is_held_and_what_it_weighs():
    shard = make_shard(torch.bfloat16)
    assert shard.held(2) == frozenset(range(E))
    assert shard.held(0) == frozenset()
    assert shard.expert_bytes == 3 * D * WIDE * 2
    assert shard.nbytes == E * shard.expert_bytes
    shard.remove(ExpertId(2, 4))
    shard.remove(ExpertId(2, 4))
    shard.remove(ExpertId(9, 9))
    assert shard.held(2) == frozenset({0, 1, 2, 3, 5})
    assert not shard.holds(ExpertId(2, 4))
    assert shard.holds(ExpertId(2, 5))
    assert shard.nbytes == (E - 1) * shard.expert_bytes


def test_an_expert_that_is_not_held_is_the_callers_bug():
    one = torch.zeros(1, dtype=torch.int64)
    for compute in (SHARDS[torch.float32].compute, SHARDS[torch.float32].compute_naive):
        with pytest.raises(BugError, match="expert 6 of layer 2"):
            compute(2, torch.zeros(1, D), one, one + E, torch.ones(1))


def test_misshapen_or_missing_matrices_are_refused():
    shard = ExpertShard(ExpertMaths(), D, WIDE)
    good = random_expert(torch.Generator().manual_seed(0))
    with pytest.raises(DataError, match=r"expert 0 of layer 0: down has the shape \[16, 24\], expected \[24, 16\]"):
        shard.add(ExpertId(0, 0), good | {"down": good["gate"]})
    with pytest.raises(DataError, match="no up matrix"):
        shard.add(ExpertId(0, 0), {"gate": good["gate"], "down": good["down"]})
    assert shard.nbytes == 0


def test_the_callers_buffers_may_be_reused():
    shard = ExpertShard(ExpertMaths(), D, WIDE)
    tensors = random_expert(torch.Generator().manual_seed(0))
    shard.add(ExpertId(0, 0), tensors)
    one = torch.zeros(1, dtype=torch.int64)
    before = shard.compute(0, torch.ones(1, D), one, one, torch.ones(1))
    for tensor in tensors.values():
        tensor.fill_(float("nan"))
    assert torch.equal(shard.compute(0, torch.ones(1, D), one, one, torch.ones(1)), before)


def test_results_may_be_changed_outside_of_inference_mode():
    shard = SHARDS[torch.float32]
    one = torch.zeros(1, dtype=torch.int64)
    total = torch.zeros(1, D)
    total += shard.compute(2, torch.ones(1, D, requires_grad=True), one, one, torch.ones(1)).mul_(2)
    assert not total.requires_grad


def test_computing_threads_do_not_mind_experts_that_come_and_go():
    shard = make_shard()
    pairs = torch.arange(4)
    rows = torch.randn(4, D, generator=torch.Generator().manual_seed(1))
    expected = shard.compute(2, rows, pairs, pairs, torch.ones(4))
    results: list[bool] = []

    def compute() -> None:
        results.extend(torch.equal(shard.compute(2, rows, pairs, pairs, torch.ones(4)), expected) for _ in range(100))

    threads = [threading.Thread(target=compute) for _ in range(2)]
    for thread in threads:
        thread.start()
    spare = random_expert(torch.Generator().manual_seed(9))
    for _ in range(100):
        shard.add(ExpertId(2, 5), spare)
        shard.remove(ExpertId(2, 5))
    for thread in threads:
        thread.join()
    assert results == [True] * 200


def test_loading_a_part_of_a_checkpoint(checkpoint_folder):
    checkpoint = open_checkpoint(checkpoint_folder("qwen3_moe"))
    shard = load_from_checkpoint(checkpoint, [ExpertId(0, 1), ExpertId(2, 7)], torch.bfloat16)
    assert (shard.held(0), shard.held(1), shard.held(2)) == (frozenset({1}), frozenset(), frozenset({7}))
    with pytest.raises(DataError, match="no expert 8 in layer 0"):
        load_from_checkpoint(checkpoint, [ExpertId(0, 8)], torch.float32)
