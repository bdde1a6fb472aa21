"""What a job may ask for: shared prompts, penalties, biases, scores and constraints, beside plain neighbours."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from model_checkpoints import (
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

from kvasir_node.base.errors import UsageError
from kvasir_node.base.generation import FinishReason, SamplingOptions
from kvasir_node.model.engine import Engine
from kvasir_node.model.jobs import ConstraintFailed, Job
from kvasir_node.model.trunk import load_trunk

GREEDY = SamplingOptions(temperature=0.0)
PROMPT = prompt_of(1, 21)


class Cycle:
    """A constraint that allows one token after the other; `fails_at` asks too much of it there."""

    def __init__(self, tokens: list[int], *, fails_at: int | None = None) -> None:
        self.tokens, self.fails_at = tokens, fails_at
        self.taken: list[int] = []

    @property
    def ended(self) -> bool:
        return len(self.taken) == len(self.tokens)

    def allowed(self, vocabulary: int) -> torch.Tensor:
        if len(self.taken) == self.fails_at:
            raise UsageError("too complex", param="response_format")
        mask = torch.zeros(vocabulary, dtype=torch.bool)
        mask[self.tokens[len(self.taken)]] = True
        return mask

    def take(self, token: int) -> None:
        self.taken.append(token)


def job(number: int, prompt: tuple[int, ...] = PROMPT, max_tokens: int = 16, **more) -> Job:  # noqa: ANN003
    return Job(number, prompt, max_tokens, **{"sampling": GREEDY, "end_tokens": frozenset(), **more})


@pytest.fixture(scope="module")
def folder(checkpoint_folder):
    return checkpoint_folder("qwen3_moe")


@pytest.fixture(scope="module")
def trunk(folder):
    return local_trunk(folder)


@pytest.fixture(scope="module")
def expected(folder):
    return greedy(reference_model("qwen3_moe", folder), PROMPT, 16)


def test_jobs_of_one_prompt_compute_it_once_and_each_equals_its_solo_run(trunk, expected):
    seeded = [job(n, sampling=SamplingOptions(seed=n)) for n in range(3)]
    solo = {one.id: tokens(run(Engine(trunk, 1, CONTEXT, 8), one)[one.id]) for one in seeded}
    events = run(Engine(trunk, 6, CONTEXT, 8), job(7), *seeded, job(8, prompt_of(2, 21)), job(9))
    assert tokens(events[7]) == tokens(events[9]) == expected
    assert {number: tokens(events[number]) for number in solo} == solo
    assert len({tuple(answer) for answer in solo.values()}) == 3
    pairs = {number: found[0].tally.local_pairs for number, found in events.items()}
    assert pairs == {
        7: 21 * 6,
        0: 0,
        1: 0,
        2: 0,
        8: 21 * 6,
        9: 0,
    }  # the prompt's pairs are counted where it was computed


def test_a_prompt_that_is_shared_leaves_nothing_that_another_request_could_see(trunk, expected):
    engine = Engine(trunk, 3, CONTEXT, 8)
    for number in range(3):
        engine.join(job(number, max_tokens=1 if number == 0 else 16))
    while engine.busy_slots == 3:
        engine.step()
    engine.leave(1)
    engine.leave(2)
    answers = run(engine, job(3, prompt_of(3, 5)))
    assert tokens(answers[3]) == tokens(run(Engine(trunk, 1, CONTEXT, 8), job(3, prompt_of(3, 5)))[3])
    assert engine.free_slots == 3
    assert tokens(run(engine, job(4))[4]) == expected


def test_a_penalty_keeps_a_token_from_coming_twice_and_a_bias_decides(trunk, expected):
    once = replace(GREEDY, presence_penalty=1e4)
    always = replace(GREEDY, logit_bias=((5, 1e4),))
    never = replace(GREEDY, logit_bias=((expected[0], -1e4),))
    events = run(
        Engine(trunk, 4, CONTEXT, 64),
        job(1, sampling=once),
        job(2, sampling=always),
        job(3, sampling=never),
        job(4),
    )
    assert len(set(tokens(events[1]))) == 16
    assert tokens(events[2]) == [5] * 16
    assert expected[0] not in tokens(events[3])
    assert tokens(events[4]) == expected


def test_scores_are_for_those_who_ask_and_do_not_follow_biases(trunk, expected):
    biased = replace(GREEDY, logit_bias=((5, 1e4),))
    events = run(Engine(trunk, 3, CONTEXT, 64), job(1, top_logprobs=3), job(2, top_logprobs=1, sampling=biased), job(3))
    for event in events[1]:
        assert event.scores is not None
        assert event.scores.likeliest[0] == (event.token, event.scores.logprob)
        assert len(event.scores.likeliest) == 3
    first = events[2][0].scores
    assert first is not None
    assert first.likeliest[0][0] == expected[0] != events[2][0].token
    assert first.logprob < first.likeliest[0][1]
    assert all(event.scores is None for event in events[3])


def test_a_constraint_decides_ends_the_answer_and_leaves_neighbours_alone(trunk, expected):
    hot = SamplingOptions(temperature=2.0, seed=1, logit_bias=((9, 100.0),))
    events = run(Engine(trunk, 2, CONTEXT, 64), job(1, constraint=Cycle([7, 3, 7, 200]), sampling=hot), job(2))
    assert tokens(events[1]) == [7, 3, 7, 200]
    assert [event.finished for event in events[1]] == [None, None, None, FinishReason.STOP]
    assert all(event.is_text for event in events[1])  # unlike an end token, its last token is text
    assert tokens(events[2]) == expected


def test_an_end_token_is_no_text(trunk):
    events = run(Engine(trunk, 1, CONTEXT, 64), job(1, constraint=Cycle([7, 3]), end_tokens=frozenset({3})))
    assert [(event.token, event.is_text) for event in events[1]] == [(7, True), (3, False)]


def test_a_constraint_that_fails_costs_its_own_job_alone(trunk, expected):
    engine = Engine(trunk, 2, CONTEXT, 64)
    engine.join(job(1))
    engine.join(job(2, constraint=Cycle([7, 3, 7, 200], fails_at=2)))
    answer: list[int] = []
    failed = None
    while not engine.is_idle:
        try:
            answer += [event.token for event in engine.step() if event.job_id == 1]
        except ConstraintFailed as error:
            failed = error
            engine.leave(error.job_id)
    assert failed is not None
    assert (failed.job_id, failed.param) == (2, "response_format")
    assert answer == expected


def test_steps_that_raised_and_were_repeated_leave_no_trace_in_what_jobs_ask_for(folder):
    dispatch = TwoShards(folder)
    engine = Engine(load_trunk(folder, torch.float32, "cpu", dispatch), 4, CONTEXT, 8, reuses_prefixes=False)

    def jobs() -> list[Job]:
        varied = SamplingOptions(seed=3, presence_penalty=0.4, frequency_penalty=0.2)
        cycle = Cycle([n * 11 % VOCABULARY for n in range(12)])
        return [job(1, sampling=varied, top_logprobs=2), job(2, sampling=varied), job(3, constraint=cycle), job(4)]

    calm = run(engine, *jobs())
    seen, failures = run_with_failures(engine, dispatch, random.Random(2), 9, *jobs())
    assert failures > 5
    assert seen == calm


def test_a_bias_outside_of_the_vocabulary_is_the_callers_mistake(trunk):
    with pytest.raises(UsageError, match="the vocabulary has 256") as caught:
        Engine(trunk, 1, CONTEXT, 64).join(job(1, sampling=SamplingOptions(logit_bias=((VOCABULARY, 1.0),))))
    assert caught.value.param == "logit_bias"
