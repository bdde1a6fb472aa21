"""The engine against transformers' own generate, and what it owes its neighbours."""

from __future__ import annotations

import random

import pytest
import torch
from model_checkpoints import (
    CONFIGS,
    CONTEXT,
    VOCABULARY,
    TwoShards,
    greedy,
    local_trunk,
    prompt_of,
    reference_model,
    run,
    run_with_failures,
    tokens,
)

from kvasir_node.base.errors import BugError, CapacityError, UsageError
from kvasir_node.base.generation import FinishReason, SamplingOptions
from kvasir_node.model.engine import Engine
from kvasir_node.model.jobs import AnswerTally, BadLogits, Job
from kvasir_node.model.trunk import load_trunk

GREEDY = SamplingOptions(temperature=0.0)


def job(
    number: int,
    prompt: tuple[int, ...],
    max_tokens: int = 48,
    *,
    sampling: SamplingOptions = GREEDY,
    end_tokens: frozenset[int] = frozenset(),
    ignore_end: bool = False,
) -> Job:
    return Job(number, prompt, max_tokens, sampling, end_tokens, ignore_end)


@pytest.fixture(scope="module")
def folder(checkpoint_folder):
    return checkpoint_folder("qwen3_moe")


@pytest.fixture(scope="module")
def trunk(folder):
    return local_trunk(folder)


@pytest.fixture(scope="module")
def reference(folder):
    return reference_model("qwen3_moe", folder)


@pytest.mark.parametrize("name", CONFIGS)
def test_48_greedy_tokens_equal_generate_in_every_family(checkpoint_folder, name):
    folder = checkpoint_folder(name)
    prompt = prompt_of(1, 20)
    engine = Engine(local_trunk(folder), slots=1, context=CONTEXT, prefill_chunk=7)
    (events,) = run(engine, job(1, prompt)).values()
    assert tokens(events) == greedy(reference_model(name, folder), prompt, 48)
    assert len(set(tokens(events))) > 4  # a model that repeats one token would prove little


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe", "mixtral"])
def test_eight_requests_that_join_and_leave_equal_their_solo_runs(checkpoint_folder, name):
    folder = checkpoint_folder(name)
    model = reference_model(name, folder)
    rng = random.Random(5)
    waiting = [job(n, prompt_of(n, rng.randint(1, 60)), rng.randint(5, 48)) for n in range(8)]
    expected = {one.id: greedy(model, one.prompt, one.max_tokens) for one in waiting}
    engine = Engine(local_trunk(folder), slots=4, context=CONTEXT, prefill_chunk=16)
    answers: dict[int, list[int]] = {one.id: [] for one in waiting}
    while waiting or not engine.is_idle:
        if waiting and engine.free_slots and rng.random() < 0.5:
            engine.join(waiting.pop(0))
        for event in engine.step():
            answers[event.job_id].append(event.token)
    assert answers == expected


def test_half_of_the_experts_elsewhere_changes_no_token(folder, reference):
    prompts = [prompt_of(n, 5 + 9 * n) for n in range(3)]
    engine = Engine(load_trunk(folder, torch.float32, "cpu", TwoShards(folder)), 3, CONTEXT, 16)
    events = run(engine, *(job(n, prompt) for n, prompt in enumerate(prompts)))
    for number, prompt in enumerate(prompts):
        assert tokens(events[number]) == greedy(reference, prompt, 48)
    last = events[1][-1].tally
    assert last.remote_pairs > 0
    # 14 tokens of prompt and 47 fed tokens of answer, 3 layers, 2 experts each.
    assert last.local_pairs + last.remote_pairs == (14 + 47) * 3 * 2


def test_the_tally_counts_this_job_alone_and_includes_the_prompt(trunk):
    events = run(Engine(trunk, 2, CONTEXT, 4), job(1, prompt_of(1, 9), 3), job(2, prompt_of(2, 30), 10))
    assert [event.tally for event in events[1]] == [AnswerTally(local_pairs=6 * n) for n in (9, 10, 11)]


def test_a_step_that_raised_can_be_repeated_without_a_trace(folder, reference):
    dispatch = TwoShards(folder)
    engine = Engine(load_trunk(folder, torch.float32, "cpu", dispatch), 3, CONTEXT, 8, reuses_prefixes=False)
    sampling = SamplingOptions(temperature=1.0, seed=3)
    jobs = [job(1, prompt_of(1, 20), 24), job(2, prompt_of(2, 11), 24, sampling=sampling), job(3, prompt_of(3, 40), 24)]
    calm = run(engine, *jobs)
    # a step makes 3 or 6 calls
    seen, failures = run_with_failures(engine, dispatch, random.Random(2), 9, *jobs)
    assert failures > 10
    assert seen == calm


def test_a_seeded_job_does_not_depend_on_its_neighbours(trunk):
    sampling = SamplingOptions(temperature=0.9, top_p=0.95, seed=11)
    alone = run(Engine(trunk, 1, CONTEXT, 64), job(1, prompt_of(1, 12), 40, sampling=sampling))
    crowd = [job(n, prompt_of(n, 3 * n), 30, sampling=SamplingOptions(seed=n)) for n in range(2, 6)]
    together = run(Engine(trunk, 6, CONTEXT, 5), *crowd, job(1, prompt_of(1, 12), 40, sampling=sampling))
    assert tokens(together[1]) == tokens(alone[1])
    other = run(
        Engine(trunk, 1, CONTEXT, 64),
        job(1, prompt_of(1, 12), 40, sampling=SamplingOptions(temperature=0.9, top_p=0.95, seed=12)),
    )
    assert tokens(other[1]) != tokens(alone[1])


def test_unseeded_jobs_differ(trunk):
    jobs = [job(n, prompt_of(1, 12), 20, sampling=SamplingOptions()) for n in range(2)]
    first, second = run(Engine(trunk, 2, CONTEXT, 64), *jobs).values()
    assert tokens(first) != tokens(second)


def test_a_reused_slot_never_shows_what_was_in_it(trunk, reference):
    """Random aborts, in prefill and in decode; and whatever they left behind is poison (NaN) until it is cleared."""
    rng = random.Random(9)
    engine = Engine(trunk, slots=3, context=CONTEXT, prefill_chunk=8, reuses_prefixes=False)
    expected = {n: greedy(reference, prompt_of(n, 4 + n), 12) for n in range(4)}
    answers: dict[int, list[int]] = {}
    kinds: dict[int, int] = {}
    number = finished = aborted = 0
    while finished < 14:
        while engine.free_slots and rng.random() < 0.7:
            kinds[number] = rng.randrange(4)
            answers[number] = []
            engine.join(job(number, prompt_of(kinds[number], 4 + kinds[number]), 12))
            number += 1
        for event in engine.step():
            answers[event.job_id].append(event.token)
            if event.finished:
                assert answers[event.job_id] == expected[kinds[event.job_id]]
                finished += 1
        if rng.random() < 0.3 and engine.busy_slots:
            aborted += 1
            victim = rng.randrange(number)
            if len(answers[victim]) < 12:
                _poison(engine, victim)
            engine.leave(victim)
    assert aborted > 3
    assert engine.busy_slots + engine.free_slots == 3


def _poison(engine: Engine, job_id: int) -> None:
    seats = [*engine._joining, *engine._running.values()]
    for seat in seats:
        if seat.job.id == job_id:
            for pool in (*engine._cache.keys.values(), *engine._cache.values.values()):
                pool[seat.slot, :, : len(seat.fed)] = float("nan")


def test_not_finite_logits_cost_one_job_and_not_its_neighbours(trunk, reference):
    engine = Engine(trunk, slots=2, context=CONTEXT, prefill_chunk=64)
    prompts = {1: prompt_of(1, 9), 2: prompt_of(2, 17)}
    for number, prompt in prompts.items():
        engine.join(job(number, prompt, 10))
    good = [event.token for _ in range(4) for event in engine.step() if event.job_id == 2]
    _poison(engine, 1)
    with pytest.raises(BadLogits, match="job 1 at position") as failure:
        engine.step()
    engine.leave(failure.value.job_id)
    while not engine.is_idle:
        good += [event.token for event in engine.step()]
    assert good == greedy(reference, prompts[2], 10)
    assert engine.free_slots == 2


def test_running_jobs_get_a_token_in_every_step_of_a_long_prefill(trunk):
    engine = Engine(trunk, slots=3, context=CONTEXT, prefill_chunk=10)
    engine.join(job(1, prompt_of(1, 5), 40))
    engine.step()
    engine.join(job(2, prompt_of(2, 95), 5))
    engine.join(job(3, prompt_of(3, 20), 5))
    per_step = [[event.job_id for event in engine.step()] for _ in range(12)]
    assert per_step[:9] == [[1]] * 9  # 95 tokens in chunks of 10 take ten steps
    assert per_step[9] == [1, 2]
    assert per_step[10] == [1, 2]
    assert per_step[11] == [1, 2, 3]  # the third waits for the second


def test_an_answer_ends_at_its_end_token_and_says_so(trunk, reference):
    prompt = prompt_of(1, 20)
    answer = greedy(reference, prompt, 12)
    end = answer[5]
    first = answer.index(end)
    engine = Engine(trunk, 2, CONTEXT, 64)
    stopped = run(engine, job(1, prompt, 12, end_tokens=frozenset({end})))[1]
    assert tokens(stopped) == answer[: first + 1]
    assert [event.finished for event in stopped] == [None] * first + [FinishReason.STOP]
    ignored = run(engine, job(1, prompt, 12, end_tokens=frozenset({end}), ignore_end=True))[1]
    assert tokens(ignored) == answer
    assert ignored[-1].finished is FinishReason.LENGTH


def test_an_answer_ends_where_the_context_does(trunk, reference):
    prompt = prompt_of(4, 50)
    events = run(Engine(trunk, 1, 64, 16), job(1, prompt, 1000))[1]
    assert tokens(events) == greedy(reference, prompt, 14)
    assert events[-1].finished is FinishReason.LENGTH


def test_one_token_answers_and_the_longest_prompt(trunk):
    engine = Engine(trunk, 1, 64, 16)
    events = run(engine, job(1, prompt_of(1, 63), 5))[1]
    assert [event.finished for event in events] == [FinishReason.LENGTH]
    events = run(engine, job(2, prompt_of(1, 1), 1))[2]
    assert [event.finished for event in events] == [FinishReason.LENGTH]
    assert engine.free_slots == 1


def test_no_slot_is_a_matter_of_capacity_and_leaving_frees_one_at_once(trunk):
    engine = Engine(trunk, 2, CONTEXT, 16)
    engine.join(job(1, prompt_of(1, 30)))
    engine.join(job(2, prompt_of(2, 30)))
    with pytest.raises(CapacityError, match="all 2 slots"):
        engine.join(job(3, (1, 2)))
    engine.leave(2)
    engine.leave(2)
    engine.leave(77)
    engine.join(job(3, (1, 2)))
    assert (engine.free_slots, engine.busy_slots) == (0, 2)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "param"),
    [
        ((), 4, "prompt"),
        ((1,) * CONTEXT, 4, "prompt"),
        ((1, VOCABULARY), 4, "prompt"),
        ((1, -1), 4, "prompt"),
        ((1,), 0, "max_tokens"),
    ],
)
def test_a_job_that_cannot_be_computed_is_the_callers_mistake(trunk, prompt, max_tokens, param):
    engine = Engine(trunk, 1, CONTEXT, 16)
    with pytest.raises(UsageError) as failure:
        engine.join(job(1, prompt, max_tokens))
    assert failure.value.param == param
    assert engine.free_slots == 1


class MeddlingId(int):
    """Whoever compares it finds that a step has taken a job out meanwhile."""

    engine: Engine

    def __eq__(self, other: object) -> bool:
        self.engine._joining.rotate(1)
        return int(self) == other

    __hash__ = int.__hash__


def test_whether_a_job_can_be_computed_is_asked_while_a_step_takes_others_in(trunk):
    engine = Engine(trunk, 3, CONTEXT, 16)
    first, second = MeddlingId(1), MeddlingId(2)
    first.engine = second.engine = engine
    engine.join(job(first, (1, 2)))
    engine.join(job(second, (1, 2)))
    engine.check(job(3, (1, 2)))


def test_joining_twice_is_a_bug(trunk):
    engine = Engine(trunk, 2, CONTEXT, 16)
    engine.join(job(1, (1, 2)))
    with pytest.raises(BugError, match="job 1 joined twice"):
        engine.join(job(1, (1, 2)))


def test_a_context_beyond_the_models_own_is_refused(trunk):
    with pytest.raises(UsageError, match="the model allows 1 to 512"):
        Engine(trunk, 1, 513, 16)
