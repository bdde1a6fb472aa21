"""Forwards that hold the next tokens of running jobs and chunks of several prompts: the same tokens, fewer forwards."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from family_configs import VOCABULARY, family_config
from model_checkpoints import all_experts, prompt_of, run, run_with_failures, tokens
from stub_trunk import StubTrunk
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from kvasir_node.base.errors import BugError
from kvasir_node.base.generation import SamplingOptions
from kvasir_node.model.cache import Lane, SlotCache
from kvasir_node.model.engine import LANES_MAX, Engine
from kvasir_node.model.forwards import Forward, Seat
from kvasir_node.model.jobs import BadLogits, Job, StepToken
from kvasir_node.model.missing import ExpertsMissing, JobsWait
from kvasir_node.model.trunk import LocalDispatch, RowTally, Trunk, load_trunk
from kvasir_node.roles.library import demo_folder

CONTEXT = 160
LAYERS, CHOSEN = 2, 2
GREEDY = SamplingOptions(temperature=0.0)


class Unpacked(Trunk):
    """The same kernels with a forward for each prompt, as for a family without them."""

    def packs(self, cache: SlotCache) -> bool:
        return False


class Spoiling(LocalDispatch):
    """Remembers the rows of each forward, fails where it is told to, and may lack experts."""

    def __init__(self, shard: Any) -> None:
        super().__init__(shard)
        self.shard = shard
        self.rows: list[int] = []
        self.calls = self.fail_at = 0
        self.lacks: tuple[int, ...] = ()

    def begin(self, rows: int) -> None:
        self.rows.append(rows)
        super().begin(rows)

    def __call__(self, layer: int, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.fail_at:
            raise ConnectionError("a worker went away")
        wanting = torch.isin(chosen, torch.tensor(self.lacks, dtype=torch.int64)).any(1)
        if wanting.any():
            raise ExpertsMissing(layer, self.lacks, wanting.nonzero().reshape(-1).tolist())
        return super().__call__(layer, rows, chosen, weights)

    def fork(self) -> Spoiling:
        return Spoiling(self.shard)


class PackedStub(StubTrunk):
    """Takes no time; remembers (position, tokens) of each row of each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards: list[list[tuple[int, int]]] = []

    def packs(self, cache: SlotCache) -> bool:
        return True

    def forward(self, tokens: torch.Tensor, lane: Lane) -> tuple[torch.Tensor, RowTally]:
        ends = [-1, *lane.last]
        counts = [end - before for before, end in zip(ends, lane.last, strict=False)]
        assert tokens.shape == lane.rows.shape == lane.positions.shape
        self.forwards.append(list(zip(lane.starts, counts, strict=True)))
        none = [0] * len(tokens)
        return self._logits[: len(counts)], RowTally([8] * len(tokens), none, none, none)


def stub_engine(slots: int, chunk: int) -> tuple[Engine, list[list[tuple[int, int]]]]:
    trunk: Any = PackedStub()
    return Engine(trunk, slots, 4096, chunk), trunk.forwards


def unlike(number: int, length: int) -> tuple[int, ...]:
    """A prompt of the stub's vocabulary that begins like no other."""
    return tuple((number * 31 + n) % 4000 for n in range(length))


def job(number: int, prompt: tuple[int, ...], max_tokens: int = 12, sampling: SamplingOptions = GREEDY) -> Job:
    return Job(number, prompt, max_tokens, sampling, frozenset())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(5)
    sizes = {"head_dim": 32, "num_experts_per_tok": CHOSEN, "num_hidden_layers": LAYERS}
    config = family_config("qwen3_moe", mlp_only_layers=[], use_sliding_window=False, **sizes)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.1) if parameter.dim() > 1 else parameter.uniform_(-0.5, 1.5)
    folder = tmp_path_factory.mktemp("packed") / "model"
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def dispatch(shard) -> Spoiling:
    return Spoiling(shard)


@pytest.fixture(scope="module")
def shard(folder):
    return all_experts(folder)


@pytest.fixture(scope="module")
def loaded(folder, shard) -> Trunk:
    return load_trunk(folder, torch.float32, "cpu", LocalDispatch(shard))


@pytest.fixture
def trunk(loaded, dispatch) -> Trunk:
    trunk = Trunk(loaded._model, loaded._config, loaded._traits, dispatch, loaded._switch, loaded._fused)
    assert trunk.packs(trunk.new_cache(1, CONTEXT))
    return trunk


@pytest.fixture(scope="module")
def unpacked(loaded) -> Trunk:
    return Unpacked(loaded._model, loaded._config, loaded._traits, loaded._dispatch, loaded._switch, loaded._fused)


def mixed_jobs() -> list[Job]:
    """16 of all kinds: twins, prompts that begin alike, short and long ones, greedy and sampled ones."""
    beginning = tuple(token % VOCABULARY for token in prompt_of(99, 40))
    jobs: list[Job] = []
    for number in range(16):
        prompt = tuple(token % VOCABULARY for token in prompt_of(number % 14, 3 + 5 * (number % 14)))
        prompt = beginning + prompt[:20] if number % 4 == 3 else prompt
        sampling = SamplingOptions(temperature=1.0, seed=number) if number % 3 == 0 else GREEDY
        jobs.append(job(number, prompt, 4 + number, sampling))
    return jobs


@pytest.fixture(scope="module")
def alone(unpacked) -> dict[int, list[int]]:
    """What each job answers when nobody else is there, prompts by themselves and whole."""
    engine = Engine(unpacked, 1, CONTEXT, CONTEXT, reuses_prefixes=False)
    return {each.id: tokens(run(engine, each)[each.id]) for each in mixed_jobs()}


def serve(engine: Engine, jobs: Sequence[Job], rng: random.Random, aborts: int) -> dict[int, list[int]]:
    """They join at random steps; some leave at random and come again, so that slots are reused in every state."""
    waiting, by_id = list(jobs), {each.id: each for each in jobs}
    answers: dict[int, list[int]] = {}
    while waiting or not engine.is_idle:
        while waiting and engine.free_slots and rng.random() < 0.7:
            engine.join(waiting[0])
            answers[waiting.pop(0).id] = []
        for event in engine.step():
            answers[event.job_id].append(event.token)
        under_way = [number for number, answer in answers.items() if len(answer) < by_id[number].max_tokens]
        if under_way and aborts and rng.random() < 0.4:
            aborts -= 1
            number = rng.choice(under_way)
            engine.leave(number)
            del answers[number]
            waiting.append(by_id[number])
    return answers


@pytest.mark.parametrize("chunk", [1, 7, 256])
@pytest.mark.parametrize("lanes", range(1, LANES_MAX + 1))
def test_tokens_are_those_of_solo_runs_and_of_forwards_that_are_not_packed(trunk, unpacked, alone, chunk, lanes):
    for reuses in (True, False):
        found = []
        for each in (trunk, unpacked):
            engine = Engine(each, 7, CONTEXT, chunk, reuses_prefixes=reuses)
            engine.lanes = lanes
            found.append(serve(engine, mixed_jobs(), random.Random(chunk + lanes), 12))
            assert engine.free_slots == 7
        assert found == [alone, alone]
    assert len({token for answer in alone.values() for token in answer}) > 60


class Marking(LocalDispatch):
    """A tally that tells rows apart: which experts a row chose stands where its fallbacks would."""

    def __init__(self, shard: Any) -> None:
        super().__init__(shard)
        self.shard = shard

    def begin(self, rows: int) -> None:
        self.marks = torch.zeros(rows, dtype=torch.int64)
        super().begin(rows)

    def __call__(self, layer: int, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        self.marks += (chosen + 1).prod(1) * (layer + 1)
        return super().__call__(layer, rows, chosen, weights)

    def tally(self) -> RowTally:
        return replace(super().tally(), fallback=self.marks.tolist())

    def fork(self) -> Marking:
        return Marking(self.shard)


def test_each_jobs_tally_is_of_its_own_tokens(loaded, shard):
    trunk = Trunk(loaded._model, loaded._config, loaded._traits, Marking(shard), loaded._switch, loaded._fused)
    engine = Engine(trunk, 5, CONTEXT, 11, reuses_prefixes=False)
    jobs = [job(number, unlike_in_vocabulary(number, 4 + 9 * number), 8) for number in range(5)]
    solo = {each.id: run(engine, each)[each.id] for each in jobs}
    engine.lanes = 2
    assert run(engine, *jobs) == solo
    for number, events in solo.items():
        pairs = [(len(jobs[number].prompt) + n) * LAYERS * CHOSEN for n in range(8)]
        assert [event.tally.local_pairs for event in events] == pairs


def unlike_in_vocabulary(number: int, length: int) -> tuple[int, ...]:
    return tuple((number * 31 + n) % VOCABULARY for n in range(length))


def test_sixteen_short_prompts_that_arrive_together_are_one_forward():
    engine, forwards = stub_engine(17, 256)
    engine.join(job(0, unlike(0, 9), 50))
    engine.step()
    for number in range(1, 17):
        engine.join(job(number, unlike(number, 4 + number)))
    forwards.clear()
    assert [event.job_id for event in engine.step()] == list(range(17))
    assert forwards == [[(9, 1), *((0, 4 + number) for number in range(1, 17))]]
    assert len(engine.step()) == 17
    assert [len(each) for each in forwards] == [17, 17]


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_prompt_of_2000_tokens_leaves_every_other_job_its_token_in_every_step(lanes):
    engine, forwards = stub_engine(4, 256)
    engine.lanes = lanes
    for number in range(3):
        engine.join(job(number, unlike(number, 8), 100))
    assert len(engine.step()) == 3
    engine.join(job(9, unlike(9, 2000)))
    forwards.clear()
    for step in range(8):
        assert sorted(event.job_id for event in engine.step()) == [0, 1, 2, 9][: 3 + (step == 7)]
    assert len(forwards) == 8 * lanes  # none for the prompt alone
    chunks = [count for rows in forwards for _, count in rows if count > 1]
    assert chunks == [256] * 7 + [2000 - 7 * 256]
    assert sum(count for rows in forwards for _, count in rows) == 2000 + 8 * 3


def test_prompts_have_their_chunks_in_the_order_in_which_they_came():
    engine, forwards = stub_engine(4, 100)
    for number in range(3):
        engine.join(job(number, unlike(number, 250), 100))
    first: dict[int, int] = {}
    for step in range(8):
        for event in engine.step():
            first.setdefault(event.job_id, step)
    assert first == {0: 2, 1: 4, 2: 7}
    assert forwards[2] == [(200, 50), (0, 50)]
    assert forwards[4] == [(252 - 1, 1), (150, 100)]


def test_prompts_that_begin_alike_wait_for_each_other_unless_it_is_computed_already(trunk, dispatch):
    beginning = unlike_in_vocabulary(3, 64)
    jobs = [job(number, beginning + unlike_in_vocabulary(40 + number, 5), 3) for number in range(4)]
    engine = Engine(trunk, 8, CONTEXT, 256)
    dispatch.rows.clear()
    run(engine, *jobs)
    assert dispatch.rows[:3] == [69, 1 + 3 * 5, 4]
    dispatch.rows.clear()
    later = [job(9 + number, beginning + unlike_in_vocabulary(70 + number, 6), 3) for number in range(4)]
    assert [events[-1].tally.reused_tokens for events in run(engine, *later).values()] == [64] * 4
    assert dispatch.rows == [4 * 6, 4, 4]
    assert engine.reused_tokens == 7 * 64


def test_a_beginning_that_is_being_computed_chunk_by_chunk_is_waited_for_as_long_as_it_is_shared(trunk, dispatch):
    beginning = unlike_in_vocabulary(3, 64)
    engine = Engine(trunk, 4, CONTEXT, 40)
    dispatch.rows.clear()
    run(
        engine,
        job(1, beginning + unlike_in_vocabulary(40, 60), 1),
        job(2, beginning + unlike_in_vocabulary(41, 6), 1),
        job(3, unlike_in_vocabulary(99, 10), 1),
    )
    # 124 = 40 + 40 + 40 + 4 of the first; only the last 4 leave room for the others, of whom one has 64 copied.
    assert dispatch.rows == [40, 40, 40, 4 + 6 + 10]


def test_without_reuse_nobody_waits_for_a_beginning(trunk, dispatch):
    beginning = unlike_in_vocabulary(3, 64)
    engine = Engine(trunk, 4, CONTEXT, 256, reuses_prefixes=False)
    dispatch.rows.clear()
    run(engine, *(job(number, beginning + unlike_in_vocabulary(40 + number, 5), 1) for number in range(3)))
    assert dispatch.rows == [3 * 69]


def test_twins_are_computed_once_beside_others(trunk, dispatch):
    engine = Engine(trunk, 6, CONTEXT, 256, reuses_prefixes=False)
    twin, other = unlike_in_vocabulary(3, 30), unlike_in_vocabulary(50, 20)
    jobs = [job(n, other if n % 2 else twin, 5, SamplingOptions(temperature=1.0, seed=n)) for n in range(6)]
    expected = {each.id: tokens(run(engine, each)[each.id]) for each in jobs}
    dispatch.rows.clear()
    found = run(engine, *jobs)
    assert {n: tokens(events) for n, events in found.items()} == expected
    assert [found[n][-1].tally.reused_tokens for n in range(6)] == [0, 0, 30, 20, 30, 20]
    assert dispatch.rows == [50, 6, 6, 6, 6]
    assert len(set(map(tuple, expected.values()))) == 6


def test_a_failed_forward_can_be_repeated_without_a_trace(trunk, dispatch):
    jobs = [replace(each, max_tokens=10) for each in mixed_jobs()]
    engine = Engine(trunk, 16, CONTEXT, 20, reuses_prefixes=False)
    calm = run(engine, *jobs)
    seen, failures = run_with_failures(engine, dispatch, random.Random(2), 2 * LAYERS, *jobs)
    assert failures > 10
    assert seen == calm


def test_not_finite_logits_name_the_job_whose_prompt_or_token_gave_them(trunk, alone):
    for bad in ("running", "prompt"):
        engine = Engine(trunk, 3, CONTEXT, 50, reuses_prefixes=False)
        jobs = {each.id: each for each in mixed_jobs()}
        good: list[StepToken] = []
        engine.join(jobs[2])
        engine.join(jobs[1])
        good += [event for event in engine.step() if event.job_id == 2]
        engine.join(jobs[13])
        good += [event for event in engine.step() if event.job_id == 2]
        named = 1 if bad == "running" else 13
        seat = engine._running[1] if bad == "running" else engine._joining[0]
        engine._cache.values[0][seat.slot, :, :3] = float("nan")
        with pytest.raises(BadLogits, match=f"job {named} at position") as failure:
            engine.step()
        assert failure.value.job_id == named
        engine.leave(1)
        engine.leave(13)
        while not engine.is_idle:
            good += engine.step()
        assert tokens(good) == alone[2]


def test_the_jobs_that_wait_for_experts_are_those_whose_tokens_need_them():
    class Missing(PackedStub):
        rows: tuple[int, ...] = ()

        def forward(self, tokens: torch.Tensor, lane: Lane) -> tuple[torch.Tensor, RowTally]:
            raise ExpertsMissing(1, [5], self.rows)

    trunk: Any = Missing()
    seats = [Seat(job(number, (1,)), number, 0, is_plain=True) for number in range(4)]
    forward = Forward(SlotCache(4, 9, torch.device("cpu")).lane(), seats, [[1], [2], [3] * 5, [4, 5]], True, [], [])
    for rows, named in (((0,), (0,)), ((1, 2), (1, 2)), ((2, 6), (2,)), ((6, 7, 8), (2, 3)), ((0, 8), (0, 3))):
        trunk.rows = rows
        with pytest.raises(JobsWait) as failure:
            forward.run(trunk)
        assert failure.value.job_ids == named


def test_jobs_that_wait_for_experts_are_left_out_and_end_with_the_same_tokens(trunk, dispatch, alone):
    engine = Engine(trunk, 16, CONTEXT, 30)
    answers: dict[int, list[int]] = {each.id: [] for each in mixed_jobs()}
    for each in mixed_jobs():
        engine.join(each)
    paused: set[int] = set()
    step = 0
    while not engine.is_idle or paused:
        step += 1
        dispatch.lacks = () if step % 7 == 0 else (3,)
        if step % 7 == 0:
            for number in sorted(paused):
                engine.resume(number)
            paused.clear()
        try:
            for event in engine.step():
                answers[event.job_id].append(event.token)
        except JobsWait as wait:
            for number in set(wait.job_ids) - paused:
                engine.pause(number)
            paused |= set(wait.job_ids)
    assert answers == alone


def test_a_lane_aims_at_rows_of_any_length_and_at_equal_ones_again():
    lane = SlotCache(4, 16, torch.device("cpu")).lane()
    lane.begin_packed([2, 0, 3], [5, 0, 9], [1, 3, 2])
    assert lane.rows.tolist() == [2, 0, 0, 0, 3, 3]
    assert lane.positions.tolist() == [5, 0, 1, 2, 9, 10]
    assert (lane.last, lane.length) == ((0, 3, 5), 11)
    lane.begin([2, 0, 3], [7, 4, 12], 2)
    assert (lane.rows.tolist(), lane.positions.tolist()) == ([2, 0, 3], [[7, 8], [4, 5], [12, 13]])
    lane.begin_packed([2, 0, 3], [7, 4, 12], [2, 2, 2])
    assert lane.rows.tolist() == [2, 2, 0, 0, 3, 3]
    lane.begin_packed([2, 0, 3], [6, 3, 11], [1, 1, 1])
    assert (lane.rows.tolist(), lane.positions.tolist(), lane.last) == ([2, 0, 3], [6, 3, 11], (0, 1, 2))
    with pytest.raises(BugError, match="up to position 17"):
        lane.begin_packed([0, 1], [0, 15], [1, 2])
    with pytest.raises(BugError, match="aimed at slots"):
        lane.begin_packed([4], [0], [1])


def prompts_s(trunk: Trunk, prompts: Sequence[tuple[int, ...]]) -> float:
    """Prompts per second until each has its first token."""
    engine = Engine(trunk, len(prompts), 512, 256, reuses_prefixes=False)
    began = time.perf_counter()
    run(engine, *(job(number, prompt, 1) for number, prompt in enumerate(prompts)))
    return len(prompts) / (time.perf_counter() - began)


@pytest.mark.soak
def test_short_prompts_that_arrive_together_are_computed_faster_than_one_by_one():
    torch.set_num_threads(1)
    demo = load_trunk(demo_folder(), torch.float32, "cpu", LocalDispatch(all_experts(demo_folder())))
    single = Unpacked(demo._model, demo._config, demo._traits, demo._dispatch, demo._switch, demo._fused)
    for count, length in ((8, 20), (16, 20), (32, 20), (8, 64), (16, 64), (32, 64)):
        ratios = []
        for number in range(9):
            prompts = [prompt_of(100 * number + n, length) for n in range(count)]
            slow, fast = prompts_s(single, prompts), prompts_s(demo, prompts)
            ratios.append(fast / slow)
        print(f"{count} prompts of {length} tokens: x{statistics.median(ratios):.2f} of the prompts per second")
        assert statistics.median(ratios) > (1.2 if length == 20 else 1.0)
