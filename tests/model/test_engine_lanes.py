"""Lanes: several forwards of one step at the same time, with the same tokens as one after the other."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from family_configs import save_family
from model_checkpoints import all_experts, local_trunk, prompt_of, run, tokens

from kvasir_node.base.errors import UsageError
from kvasir_node.base.generation import SamplingOptions
from kvasir_node.model.engine import LANES_MAX, Engine
from kvasir_node.model.jobs import BadLogits, Job, StepToken
from kvasir_node.model.trunk import LocalDispatch, load_trunk

CONTEXT = 160
GREEDY = SamplingOptions(temperature=0.0)


class Meeting(LocalDispatch):
    """Forwards wait for each other before each layer, if there is somebody to meet; remembers who computed."""

    def __init__(self, shard, meets: threading.Barrier | None = None) -> None:
        super().__init__(shard)
        self.shard, self.meets, self.forks = shard, meets, []
        self.threads: set[threading.Thread] = set()
        self.rows = 0
        self.fails = False

    def begin(self, rows: int) -> None:
        self.rows = rows
        super().begin(rows)

    def __call__(self, layer: int, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        self.threads.add(threading.current_thread())
        if self.meets is not None:
            self.meets.wait(timeout=20)
        if self.fails and layer == 1:
            raise ConnectionError("a worker went away")
        return super().__call__(layer, rows, chosen, weights)

    def fork(self) -> Meeting:
        self.forks.append(Meeting(self.shard, self.meets))
        return self.forks[-1]


def jobs_of(count: int, max_tokens: int = 16) -> list[Job]:
    return [Job(n, prompt_of(n, 6 + 5 * n), max_tokens, GREEDY, frozenset()) for n in range(count)]


@pytest.fixture(scope="module")
def folder(checkpoint_folder):
    return checkpoint_folder("qwen3_moe")


@pytest.fixture(scope="module")
def shard(folder):
    return all_experts(folder)


@pytest.fixture(scope="module")
def alone(folder):
    """What each job answers when nobody else is there."""
    trunk = local_trunk(folder)
    return {job.id: tokens(run(Engine(trunk, 1, CONTEXT, 64), job)[job.id]) for job in jobs_of(16)}


@pytest.mark.parametrize("lanes", range(1, LANES_MAX + 1))
def test_tokens_and_tallies_are_those_of_one_lane(folder, shard, alone, lanes):
    engine = Engine(load_trunk(folder, torch.float32, "cpu", LocalDispatch(shard)), 6, CONTEXT, 16)
    engine.lanes = lanes
    events = run(engine, *jobs_of(6))
    assert {number: tokens(found) for number, found in events.items()} == {n: alone[n] for n in range(6)}
    assert [found[-1].tally.local_pairs for found in events.values()] == [(6 + 5 * n + 15) * 6 for n in range(6)]


@pytest.mark.parametrize("family", ["qwen3_next", "deepseek_v3", "gemma4_text"])
def test_lanes_keep_states_latents_and_windows_apart(tmp_path, family):
    save_family(family, tmp_path)
    trunk = load_trunk(tmp_path, torch.float32, "cpu", LocalDispatch(all_experts(tmp_path)))
    expected = run(Engine(trunk, 5, CONTEXT, 16), *jobs_of(5))
    engine = Engine(trunk, 5, CONTEXT, 16)
    engine.lanes = 3
    found = run(engine, *jobs_of(5))
    assert {n: tokens(each) for n, each in found.items()} == {n: tokens(each) for n, each in expected.items()}


def test_lanes_are_under_way_at_the_same_time_each_in_a_thread_of_its_own(folder, shard, alone):
    dispatch = Meeting(shard)
    engine = Engine(load_trunk(folder, torch.float32, "cpu", dispatch), 4, CONTEXT, 64)
    for job in jobs_of(4):
        engine.join(job)
    seen: dict[int, list[int]] = {n: [] for n in range(4)}

    def step() -> None:
        for event in engine.step():
            seen[event.job_id].append(event.token)

    for _ in range(4):
        step()
    assert dispatch.threads == {threading.current_thread()}  # with one lane no thread is involved
    engine.lanes = 2
    step()
    dispatch.meets = dispatch.forks[0].meets = threading.Barrier(2)
    for _ in range(3):
        step()
    assert (dispatch.rows, dispatch.forks[0].rows) == (2, 2)
    assert not dispatch.threads & dispatch.forks[0].threads
    dispatch.meets = dispatch.forks[0].meets = None
    engine.lanes = 1
    while not engine.is_idle:
        step()
    assert seen == {n: alone[n] for n in range(4)}


@pytest.mark.parametrize("failing", [0, 1])
def test_a_step_of_which_one_lane_failed_can_be_repeated(folder, shard, alone, failing):
    dispatch = Meeting(shard)
    engine = Engine(load_trunk(folder, torch.float32, "cpu", dispatch), 4, CONTEXT, 64)
    engine.lanes = 2
    for job in jobs_of(4):
        engine.join(job)
    seen: dict[int, list[int]] = {n: [] for n in range(4)}
    failures = 0
    while not engine.is_idle:
        lanes = [dispatch, *dispatch.forks]
        if len(lanes) > 1:
            lanes[failing].fails = not lanes[failing].fails
        try:
            for event in engine.step():
                seen[event.job_id].append(event.token)
        except ConnectionError:
            failures += 1
    assert failures > 5
    assert seen == {n: alone[n] for n in range(4)}


class Late(Meeting):
    """A fork goes on only when the first one has failed."""

    def __init__(self, shard, failed: threading.Event | None = None) -> None:
        super().__init__(shard)
        self.failed, self.is_first = failed or threading.Event(), failed is None
        self.is_done = False

    def __call__(self, layer: int, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if self.is_first and self.fails:
            self.failed.set()
            raise ConnectionError("a worker went away")
        if not self.is_first:
            self.failed.wait(timeout=20)
        self.is_done = layer == 2
        return super().__call__(layer, rows, chosen, weights)

    def fork(self) -> Late:
        self.forks.append(Late(self.shard, self.failed))
        return self.forks[-1]


def test_no_lane_is_under_way_any_more_when_a_step_ends(folder, shard):
    dispatch = Late(shard)
    engine = Engine(load_trunk(folder, torch.float32, "cpu", dispatch), 2, CONTEXT, 64)
    for job in jobs_of(2):
        engine.join(job)
    for _ in range(3):
        engine.step()
    engine.lanes, dispatch.fails = 2, True
    with pytest.raises(ConnectionError):
        engine.step()
    assert dispatch.forks[0].is_done


def test_bad_logits_in_one_lane_name_their_job_and_the_other_lane_goes_on(folder, shard, alone):
    engine = Engine(load_trunk(folder, torch.float32, "cpu", LocalDispatch(shard)), 2, CONTEXT, 64)
    engine.lanes = 2
    good: list[StepToken] = []
    for job in jobs_of(2):
        engine.join(job)
    for _ in range(4):
        good += [event for event in engine.step() if event.job_id == 0]
    for pool in engine._cache.values.values():
        pool[engine._running[1].slot, :, :3] = float("nan")
    with pytest.raises(BadLogits) as failure:
        engine.step()
    assert failure.value.job_id == 1
    engine.leave(1)
    while not engine.is_idle:
        good += engine.step()
    assert tokens(good) == alone[0]


@pytest.mark.parametrize("count", [0, LANES_MAX + 1])
def test_lanes_are_bounded(folder, shard, count):
    engine = Engine(load_trunk(folder, torch.float32, "cpu", LocalDispatch(shard)), 2, CONTEXT, 64)
    with pytest.raises(UsageError, match=f"{count} lanes: expected 1 to {LANES_MAX}"):
        engine.lanes = count


def test_sixteen_prompts_at_once_with_random_aborts_and_lanes_each_equal_their_solo_run(folder, shard, alone):
    """Those that were aborted come again, so that slots are reused, copied and taken over in every state."""
    rng = random.Random(8)
    engine = Engine(load_trunk(folder, torch.float32, "cpu", LocalDispatch(shard)), 16, CONTEXT, 24)
    jobs = {job.id: job for job in jobs_of(16)}
    answers: dict[int, list[int]] = {}
    for job in jobs.values():
        engine.join(job)
        answers[job.id] = []
    aborted = whole = 0
    while not engine.is_idle:
        engine.lanes = rng.randint(1, LANES_MAX)
        for event in engine.step():
            answers[event.job_id].append(event.token)
            if event.finished:
                assert answers[event.job_id] == alone[event.job_id]
                whole += 1
        running = [number for number, answer in answers.items() if len(answer) < 16]
        if running and aborted < 24 and rng.random() < 0.5:
            number = rng.choice(running)
            engine.leave(number)
            engine.join(jobs[number])
            answers[number] = []
            aborted += 1
    assert (whole, aborted) == (16, 24)
    assert engine.free_slots == 16
