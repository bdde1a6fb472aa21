"""What a step is made of and what it costs, seen with a trunk that takes no time; and engines that serve for long."""

from __future__ import annotations

import gc
import random
import statistics
import time

import psutil
import pytest
import torch
from model_checkpoints import local_trunk, prompt_of
from stub_trunk import stub_trunk

from kvasir_node.base.generation import SamplingOptions
from kvasir_node.base.settings import CoordinatorSettings
from kvasir_node.model.checkpoint import open_checkpoint
from kvasir_node.model.engine import Engine
from kvasir_node.model.experts import ExpertShard, load_from_checkpoint
from kvasir_node.model.jobs import Job
from kvasir_node.model.trunk import LocalDispatch, load_trunk
from kvasir_node.roles.library import demo_folder

GREEDY = SamplingOptions(temperature=0.0)
CHUNK = CoordinatorSettings().prefill_chunk


def job(number: int, length: int, max_tokens: int) -> Job:
    return Job(number, tuple((number * 31 + n) % 4000 for n in range(length)), max_tokens, GREEDY, frozenset())


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_prompt_of_2000_tokens_holds_the_others_up_by_one_chunk_at_a_time(lanes):
    trunk = stub_trunk()
    engine = Engine(trunk, 4, 4096, CHUNK)
    engine.lanes = lanes
    for number in range(3):
        engine.join(job(number, 8, 100))
    while len(engine.step()) < 3:
        pass
    engine.join(job(9, 2000, 5))
    trunk.widths.clear()
    steps = 0
    while True:
        events = engine.step()
        assert [event.job_id for event in events][:3] == [0, 1, 2]  # each of them, in every step
        steps += 1
        if len(events) == 4:
            break
    assert steps == -(-2000 // CHUNK)
    assert trunk.widths.count(1) == steps * lanes
    between = [width for width in trunk.widths if width > 1]
    assert len(between) == steps
    assert max(between) == CHUNK
    assert sum(between) == 2000


def test_prompts_that_arrive_together_are_computed_one_chunk_per_step_in_their_order():
    trunk = stub_trunk()
    engine = Engine(trunk, 4, 4096, 100)
    for number in range(3):
        engine.join(job(number, 250, 100))
    first = {}
    for step in range(9):
        for event in engine.step():
            first.setdefault(event.job_id, step)
    assert first == {0: 2, 1: 5, 2: 8}


def step_us(jobs: int, vocabulary: int, sampling: SamplingOptions = GREEDY) -> float:
    """Median of 1000 steps."""
    engine = Engine(stub_trunk(vocabulary), jobs, 4096, CHUNK)
    for number in range(jobs):
        engine.join(Job(number, (1, 2, number), 4000, sampling, frozenset({3}), ignore_end=True))
    times: list[float] = []
    for _ in range(jobs + 1100):
        started = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started)
    return statistics.median(times[-1000:]) * 1e6


@pytest.mark.soak
def test_a_step_costs_little_besides_its_forward():
    torch.set_num_threads(1)
    for vocabulary in (4096, 151_936):
        found = {jobs: step_us(jobs, vocabulary) for jobs in (1, 4, 16, 32)}
        print(f"µs per step, {vocabulary} tokens, greedy: " + ", ".join(f"{n}: {us:.0f}" for n, us in found.items()))
        if vocabulary == 4096:
            assert found[1] <= 120
            assert found[16] <= 400
    sampled = SamplingOptions(temperature=0.8, seed=1)
    found = {jobs: step_us(jobs, 4096, sampled) for jobs in (1, 4, 16, 32)}
    print("µs per step, 4096 tokens, sampled: " + ", ".join(f"{n}: {us:.0f}" for n, us in found.items()))


def first_token_s(engine: Engine, number: int, prompt: tuple[int, ...]) -> float:
    started = time.perf_counter()
    engine.join(Job(number, prompt, 1, GREEDY, frozenset()))
    while not engine.step():
        pass
    return time.perf_counter() - started


@pytest.mark.soak
def test_a_repeated_prefix_of_500_tokens_is_answered_in_a_quarter_of_the_time():
    torch.set_num_threads(1)
    checkpoint = open_checkpoint(demo_folder())
    shard = load_from_checkpoint(checkpoint, checkpoint.experts, torch.float32)
    trunk = load_trunk(demo_folder(), torch.float32, "cpu", LocalDispatch(shard))
    engine, ratios = Engine(trunk, 4, 2048, CHUNK), []
    for number in range(20):
        prefix = prompt_of(number, 500)
        first, again = (
            first_token_s(engine, 2 * number + n, prefix + prompt_of(100 + 2 * number + n, 20)) for n in (0, 1)
        )
        ratios.append(again / first)
    median = statistics.median(ratios)
    print(f"500 shared tokens, then 20 others: x{median:.3f} of the first time to a token")
    assert median <= 0.25


class FarDispatch(LocalDispatch):
    """As if each layer's experts were a round trip away."""

    def __init__(self, shard: ExpertShard, round_trip_s: float) -> None:
        super().__init__(shard)
        self._far, self._round_trip_s = shard, round_trip_s

    def __call__(self, layer: int, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        time.sleep(self._round_trip_s)
        return super().__call__(layer, rows, chosen, weights)

    def fork(self) -> FarDispatch:
        return FarDispatch(self._far, self._round_trip_s)


@pytest.mark.soak
def test_lanes_compute_while_others_wait():
    torch.set_num_threads(1)
    checkpoint = open_checkpoint(demo_folder())
    shard = load_from_checkpoint(checkpoint, checkpoint.experts, torch.float32)
    for round_trip_s in (0.001, 0.003, 0.01):
        dispatch = FarDispatch(shard, round_trip_s)
        engine = Engine(load_trunk(demo_folder(), torch.float32, "cpu", dispatch), 16, 512, CHUNK)
        for number in range(16):
            engine.join(Job(number, prompt_of(number, 8), 500, GREEDY, frozenset()))
        while engine._joining:
            engine.step()
        found = {}
        for engine.lanes in (1, 2, 4):
            times = []
            for _ in range(30):
                started = time.perf_counter()
                engine.step()
                times.append(time.perf_counter() - started)
            found[engine.lanes] = statistics.median(times)
        text = ", ".join(f"{n} lanes {s * 1000:.0f} ms (x{found[1] / s:.2f})" for n, s in found.items())
        print(f"{round_trip_s * 1000:.0f} ms a layer, 16 jobs, per step: {text}")
    assert found[2] < 1.25 * found[1]  # where waiting is most of it


def serve_many(engine: Engine, first: int, count: int, rng: random.Random) -> int:
    """So many requests, some of which are aborted; returns how many ended by themselves."""
    number, ended, running = first, 0, set[int]()
    while number < first + count or running:
        while number < first + count and engine.free_slots:
            seed = rng.randrange(40)  # some prompts come again
            engine.join(Job(number, prompt_of(seed, 1 + seed), rng.randint(1, 6), GREEDY, frozenset()))
            running.add(number)
            number += 1
        engine.lanes = rng.choice((1, 1, 1, 2))
        for event in engine.step():
            if event.finished:
                running.remove(event.job_id)
                ended += 1
        if running and rng.random() < 0.05:
            victim = rng.choice(sorted(running))
            running.remove(victim)
            engine.leave(victim)
    return ended


def growth(folder: object, before: int, count: int) -> tuple[int, int, int]:
    """(bytes of resident memory, Python objects) that `count` requests after `before` others left behind, and how many
    of all requests were served to their end.

    The least of two windows of so many: what leaks grows in both, what the allocator of a busy process does in one.
    """
    engine, rng = Engine(local_trunk(folder), 8, 96, 16), random.Random(1)  # type: ignore[arg-type]
    ended = serve_many(engine, 0, before, rng)
    grown = []
    for first in (before, before + count):
        gc.collect()
        memory, objects = psutil.Process().memory_info().rss, len(gc.get_objects())
        ended += serve_many(engine, first, count, rng)
        gc.collect()
        assert engine.free_slots == 8
        grown.append((psutil.Process().memory_info().rss - memory, len(gc.get_objects()) - objects))
    return min(memory for memory, _ in grown), min(objects for _, objects in grown), ended


def test_requests_leave_nothing_behind(checkpoint_folder):
    grown_bytes, grown_objects, ended = growth(checkpoint_folder("qwen3_moe"), 60, 120)
    assert grown_bytes < 4 << 20
    assert grown_objects < 200
    assert 170 < ended < 300


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_ten_thousand_requests_leave_memory_flat(checkpoint_folder):
    grown_bytes, grown_objects, ended = growth(checkpoint_folder("qwen3_moe"), 500, 10_000)
    print(f"after 10,000 requests ({ended} served whole): {grown_bytes / 1024:.0f} KiB, {grown_objects} objects more")
    assert grown_bytes < 8 << 20
    assert grown_objects < 200
