"""Prompts that begin like others: less is computed, the same comes out."""

from __future__ import annotations

import pytest
import torch
from family_configs import save_family
from model_checkpoints import all_experts, prompt_of, run, tokens

from kvasir_node.base.generation import SamplingOptions
from kvasir_node.model.engine import Engine
from kvasir_node.model.jobs import BadLogits, Job
from kvasir_node.model.trunk import LocalDispatch, Trunk, load_trunk

CONTEXT = 240
GREEDY = SamplingOptions(temperature=0.0)
FAMILIES = {"qwen3_moe": "attention", "deepseek_v3": "latents", "mixtral": "window", "qwen3_next": "states"}


class Counting(LocalDispatch):
    """Counts the rows that were computed."""

    computed = 0

    def begin(self, rows: int) -> None:
        self.computed += rows
        super().begin(rows)


def job(number: int, prompt: tuple[int, ...], max_tokens: int = 12) -> Job:
    return Job(number, prompt, max_tokens, GREEDY, frozenset())


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folders = {}

    def make(family: str) -> tuple[Trunk, Counting]:
        if family not in folders:
            folders[family] = tmp_path_factory.mktemp(family) / family
            save_family(family, folders[family])
        dispatch = Counting(all_experts(folders[family]))
        return load_trunk(folders[family], torch.float32, "cpu", dispatch), dispatch

    return make


def solo(trunk: Trunk, prompt: tuple[int, ...]) -> list[int]:
    (events,) = run(Engine(trunk, 1, CONTEXT, 64, reuses_prefixes=False), job(1, prompt)).values()
    return tokens(events)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_repeated_beginning_is_not_computed_again_and_changes_no_token(made, family):
    trunk, dispatch = made(family)
    prefix = prompt_of(1, 90)
    prompts = [prefix + prompt_of(10 + n, 7 + n) for n in range(3)]
    expected = [solo(trunk, prompt) for prompt in prompts]
    engine = Engine(trunk, 2, CONTEXT, 32)
    for number, prompt in enumerate(prompts):
        dispatch.computed = 0
        (events,) = run(engine, job(number, prompt)).values()
        assert tokens(events) == expected[number]
        is_found = number > 0 and FAMILIES[family] != "states"
        assert dispatch.computed == len(prompt) + 11 - (90 if is_found else 0)
    assert engine.prompt_tokens == sum(map(len, prompts))
    assert engine.reused_tokens == (0 if FAMILIES[family] == "states" else 180)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_goes_on_where_it_ended_in_every_kind_of_family(made, family):
    trunk, dispatch = made(family)
    engine = Engine(trunk, 2, CONTEXT, 32)
    prompt = prompt_of(2, 60)
    for number in range(3):
        dispatch.computed = 0
        expected = solo(trunk, prompt)
        dispatch.computed = 0
        (events,) = run(engine, job(number, prompt)).values()
        assert tokens(events) == expected
        assert dispatch.computed == (60 if number == 0 else 1 + 9) + 11
        prompt = (*prompt, *tokens(events), *prompt_of(20 + number, 9))


def test_running_neighbours_with_one_beginning_share_it_as_soon_as_it_is_computed(made):
    trunk, dispatch = made("qwen3_moe")
    prefix = prompt_of(3, 64)
    jobs = [job(number, prefix + prompt_of(30 + number, 5)) for number in range(4)]
    expected = [solo(trunk, each.prompt) for each in jobs]
    dispatch.computed = 0
    events = run(Engine(trunk, 4, CONTEXT, 64), *jobs)
    assert [tokens(events[number]) for number in range(4)] == expected
    assert dispatch.computed == 64 + 4 * 5 + 4 * 11


def test_a_family_that_cannot_go_on_from_a_state_computes_everything(made):
    trunk, dispatch = made("jamba")
    engine = Engine(trunk, 2, CONTEXT, 32)
    prompt = prompt_of(2, 40)
    (first,) = run(engine, job(1, prompt)).values()
    longer = (*prompt, *tokens(first), 5, 6)
    expected = solo(trunk, longer)
    dispatch.computed = 0
    (events,) = run(engine, job(2, longer)).values()
    assert tokens(events) == expected
    assert dispatch.computed == len(longer) + 11


def test_a_slot_with_bad_numbers_is_never_a_source(made):
    trunk, _ = made("qwen3_moe")
    engine = Engine(trunk, 2, CONTEXT, 64)
    prompt = prompt_of(4, 80)
    expected = solo(trunk, prompt)
    engine.join(job(1, prompt))
    engine.step()
    for pool in (*engine._cache.keys.values(), *engine._cache.values.values()):
        pool[engine._joining[0].slot, :, :64] = float("nan")
    with pytest.raises(BadLogits) as failure:
        engine.step()
    engine.leave(failure.value.job_id)
    for number in (2, 3, 4):
        (events,) = run(engine, job(number, prompt)).values()
        assert tokens(events) == expected


def test_leftovers_beyond_a_reused_beginning_never_reach_anybody(made):
    """They are poisoned (NaN), and a neighbour is longer: keys that are masked take part in the arithmetic."""
    trunk, _ = made("qwen3_moe")
    prompt, long = prompt_of(5, 70), prompt_of(7, 130)
    prompts = {number: prompt + prompt_of(number, 3 + 9 * number) for number in range(4)}
    expected = {number: solo(trunk, each) for number, each in prompts.items()}
    engine = Engine(trunk, 3, CONTEXT, 32)
    run(engine, job(8, prompt, 60), job(9, prompt + prompt_of(8, 60)))
    engine.join(job(7, long, 100))
    answers: dict[int, list[int]] = {number: [] for number in (*prompts, 7)}
    for number, each in prompts.items():
        for slot in engine._prefixes._free:
            for pool in (*engine._cache.keys.values(), *engine._cache.values.values()):
                pool[slot, :, 70 : engine._prefixes._dirty[slot]] = float("nan")
        engine.join(job(number, each))
        while len(answers[number]) < 12:
            for event in engine.step():
                answers[event.job_id].append(event.token)
    while not engine.is_idle:
        answers[7] += [event.token for event in engine.step()]
    long_answer = answers.pop(7)
    assert answers == expected
    assert len(long_answer) == 100
    assert long_answer[:12] == solo(trunk, long)
    assert engine.reused_tokens >= 5 * 70


def test_what_is_to_be_forgotten_is_computed_again(made):
    trunk, dispatch = made("qwen3_moe")
    engine = Engine(trunk, 3, CONTEXT, 64)
    prompt = prompt_of(6, 60)
    expected = solo(trunk, prompt)
    run(engine, job(1, prompt), job(2, prompt))
    engine.forget()
    dispatch.computed = 0
    (events,) = run(engine, job(3, prompt)).values()
    assert tokens(events) == expected
    assert dispatch.computed == 60 + 11
    dispatch.computed = 0
    run(engine, job(4, prompt))
    assert dispatch.computed == 1 + 11
