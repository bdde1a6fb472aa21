"""Jobs whose rows chose an expert that is nowhere are named, can be paused, and go on as if nothing had been."""

from __future__ import annotations

import pytest
import torch
from model_checkpoints import CONTEXT, TwoShards, greedy, prompt_of, reference_model

from kvasir_node.base.generation import SamplingOptions
from kvasir_node.model.engine import Engine
from kvasir_node.model.jobs import Job
from kvasir_node.model.missing import ExpertsMissing, JobsWait
from kvasir_node.model.trunk import load_trunk


class Lacking(TwoShards):
    """Cannot compute the experts in `lacks` of any layer."""

    lacks: tuple[int, ...] = ()

    def __call__(self, layer: int, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        wanting = torch.isin(chosen, torch.tensor(self.lacks, dtype=torch.int64)).any(1)
        if wanting.any():
            raise ExpertsMissing(layer, self.lacks, wanting.nonzero().reshape(-1).tolist())
        return super().__call__(layer, rows, chosen, weights)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("lacks", [(0,), (3,), (1, 2, 5)])
def test_law_1_neighbours_go_on_and_a_paused_job_ends_with_the_same_tokens(checkpoint_folder, name, lacks):
    folder = checkpoint_folder(name)
    model, dispatch = reference_model(name, folder), Lacking(folder)
    engine = Engine(load_trunk(folder, torch.float32, "cpu", dispatch), slots=4, context=CONTEXT, prefill_chunk=5)
    jobs = [Job(n, prompt_of(n, 3 + 4 * n), 12, SamplingOptions(temperature=0.0), frozenset()) for n in range(4)]
    answers: dict[int, list[int]] = {one.id: [] for one in jobs}
    for one in jobs:
        engine.join(one)
    paused: set[int] = set()
    waits: list[tuple[frozenset[int], frozenset[int], frozenset[int]]] = []  # experts, jobs, those paused already
    step = 0
    while not engine.is_idle or paused:
        step += 1
        assert step < 400
        dispatch.lacks = () if step % 9 == 0 else lacks  # it comes, and goes again
        if step % 9 == 0:
            for number in sorted(paused):
                engine.resume(number)
            paused.clear()
        try:
            tokens = engine.step()
        except JobsWait as wait:
            waits.append((wait.experts, frozenset(wait.job_ids), frozenset(paused)))
            for number in wait.job_ids:
                engine.pause(number)
            paused |= set(wait.job_ids)
            continue
        for token in tokens:
            assert token.job_id not in paused
            answers[token.job_id].append(token.token)
    assert waits
    for experts, named, before in waits:
        assert experts == set(lacks)
        assert named
        assert not named & before
    for one in jobs:
        assert answers[one.id] == greedy(model, one.prompt, 12)
    assert engine.free_slots == 4


def test_a_job_can_leave_while_it_is_paused_and_its_slot_is_free(checkpoint_folder):
    folder = checkpoint_folder("qwen3_moe")
    dispatch = Lacking(folder)
    engine = Engine(load_trunk(folder, torch.float32, "cpu", dispatch), slots=1, context=CONTEXT, prefill_chunk=5)
    for number in (1, 2):
        engine.join(Job(number, prompt_of(number, 8), 4, SamplingOptions(temperature=0.0), frozenset()))
        if number == 1:
            engine.step()
        engine.pause(number)
        assert engine.is_idle
        assert engine.free_slots == 0
        engine.leave(number)
        engine.resume(number)
        assert engine.is_idle
        assert engine.free_slots == 1
