"""Requests of several choices at the desk: places, ends, failures; on a virtual clock, with a scripted engine."""

from __future__ import annotations

from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import trio
from test_reply import make_text

from kvasir_node.base.errors import CapacityError, KvasirError, QueueFull, UsageError
from kvasir_node.base.generation import (
    AnswerEvent,
    ChoiceEnded,
    Finished,
    FinishReason,
    GenerationRequest,
    JsonFormat,
    SamplingOptions,
    TextDelta,
    Tool,
    Tools,
    ToolUse,
)
from kvasir_node.decide.admission import AdmissionLimits
from kvasir_node.model.jobs import AnswerTally, ConstraintFailed, Job, StepToken
from kvasir_node.roles.desk import Desk


@dataclass
class ScriptedEngine:
    """Each step takes a second and gives each job the token of its seed, until its max_tokens."""

    slots: int
    context: int = 64
    prompt_tokens: int = 0
    reused_tokens: int = 0
    rows_computed: int = 0
    jobs: dict[int, Job] = field(default_factory=dict)
    answered: Counter[int] = field(default_factory=Counter)
    joined: list[Job] = field(default_factory=list)
    failure: KvasirError | None = None
    peak: int = 0

    @property
    def is_idle(self) -> bool:
        return not self.jobs

    is_prefilling = False

    def check(self, job: Job) -> None:
        if job.max_tokens < 1:
            raise UsageError("too few")

    def join(self, job: Job) -> None:
        assert len(self.jobs) < self.slots
        self.jobs[job.id] = job
        self.joined.append(job)
        self.peak = max(self.peak, len(self.jobs))

    def leave(self, job_id: int) -> None:
        self.jobs.pop(job_id, None)

    def step(self) -> list[StepToken]:
        if self.failure is not None and self.jobs:
            if isinstance(self.failure, UsageError):
                raise ConstraintFailed(self.failure, job_id=next(iter(self.jobs)))
            raise self.failure
        return [self._token(job) for job in list(self.jobs.values())]

    def _token(self, job: Job) -> StepToken:
        self.answered[job.id] += 1
        is_last = self.answered[job.id] == job.max_tokens
        if is_last:
            self.jobs.pop(job.id)
        token = 40 + (job.sampling.seed or 0) % 20
        return StepToken(job.id, token, FinishReason.LENGTH if is_last else None, AnswerTally(local_pairs=7))


async def run_slowly(work: Any, *arguments: Any) -> Any:
    """What takes a thread elsewhere takes a second of the virtual clock here."""
    await trio.sleep(1)
    return work(*arguments)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return make_text(tmp_path_factory.mktemp("desk"))


@asynccontextmanager
async def open_desk(text, *, slots: int = 2, queue: int = 4, engine: ScriptedEngine | None = None):
    engine = engine or ScriptedEngine(slots)
    limits = AdmissionLimits(slots, queue, 0.5, 5.0, 0.75)
    desk = Desk(engine, text, limits, load_changed=lambda: None, run_blocking=run_slowly)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(desk.run)
        yield desk, engine
        nursery.cancel_scope.cancel()


def ask(choices: int = 1, **fields: Any) -> GenerationRequest:
    return GenerationRequest(prompt_tokens=(1, 2, 3), max_tokens=fields.pop("max_tokens", 3), choices=choices, **fields)


async def answer(desk: Desk, request: GenerationRequest) -> list[AnswerEvent]:
    async with desk.generate(request) as events:
        return [event async for event in events]


async def test_every_choice_ends_once_and_the_last_of_them_ends_the_answer(text, autojump_clock):
    async with open_desk(text) as (desk, engine):
        events = await answer(desk, ask(5, sampling=SamplingOptions(seed=1)))
    ends = [event for event in events if isinstance(event, ChoiceEnded | Finished)]
    assert sorted(end.choice for end in ends) == [0, 1, 2, 3, 4]
    assert [type(end) for end in ends] == [ChoiceEnded] * 4 + [Finished]
    assert ends[-1] is events[-1]
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert (finished.prompt_tokens, finished.completion_tokens, finished.facts.local_pairs) == (3, 15, 35)
    assert (finished.facts.queue_ms, finished.facts.prefill_ms, finished.facts.decode_ms) == (0, 1000, 8000)
    texts = Counter(event.choice for event in events if isinstance(event, TextDelta))
    assert texts == dict.fromkeys(range(5), 3)
    assert engine.peak == 2  # never more than there are slots
    assert len({job.sampling.seed for job in engine.joined}) == 5
    assert engine.joined[0].sampling.seed == 1


async def test_all_choices_find_a_place_or_none_does(text, autojump_clock):
    async with open_desk(text) as (desk, _), desk.generate(ask(2)):
        with pytest.raises(QueueFull, match="2 of 2 slots are busy and 0 of 4 places") as full:
            await answer(desk, ask(5))
        assert full.value.retry_after_s >= 1
        assert (desk.admission.busy, desk.admission.queued, desk.requests_total) == (2, 0, 1)
        async with desk.generate(ask(4)):
            assert desk.admission.queued == 4
        assert (desk.admission.busy, desk.admission.queued) == (2, 0)


async def test_each_of_several_prompts_has_its_choices_and_their_seeds(text, autojump_clock):
    async with open_desk(text, slots=6) as (desk, engine):
        several = GenerationRequest(
            prompts=((1, 2), "the", (4,)), max_tokens=2, choices=2, sampling=SamplingOptions(seed=3)
        )
        events = await answer(desk, several)
    prompts = [(1, 2), text.encode("the"), (4,)]
    assert [job.prompt for job in engine.joined] == [prompt for prompt in prompts for _ in range(2)]
    seeds = [job.sampling.seed for job in engine.joined]
    assert seeds == seeds[:2] * 3
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert (finished.prompt_tokens, finished.completion_tokens) == (sum(map(len, prompts)), 12)
    assert {event.choice for event in events} == set(range(6))


async def test_one_prompt_that_is_too_long_refuses_them_all(text, autojump_clock):
    async with open_desk(text) as (desk, engine):
        with pytest.raises(UsageError, match="the prompt has 64 tokens") as refused:
            await answer(desk, GenerationRequest(prompts=((1,), (1,) * 64), max_tokens=2))
        assert (refused.value.param, engine.joined) == ("prompt", [])


async def test_more_choices_than_places_can_never_come(text, autojump_clock):
    async with open_desk(text) as (desk, _):
        with pytest.raises(UsageError, match="has 6 places") as refused:
            await answer(desk, ask(7))
        assert refused.value.param == "n"


async def test_a_reader_that_leaves_frees_the_places_of_all_choices(text, autojump_clock):
    async with open_desk(text) as (desk, engine):
        async with desk.generate(ask(5, max_tokens=50)) as events:
            await anext(events)
        assert (desk.admission.busy, desk.admission.queued) == (0, 0)
        assert isinstance((await answer(desk, ask()))[-1], Finished)
        assert engine.is_idle
        assert len(engine.joined) == 3  # the three choices that waited never started


async def test_a_choice_that_cannot_go_on_ends_its_request_and_no_other(text, autojump_clock):
    async with (
        open_desk(text, slots=3) as (desk, engine),
        desk.generate(ask(2)) as failing,
        desk.generate(ask()) as other,
    ):
        await anext(other)
        engine.failure = UsageError("too complex", param="response_format")
        with pytest.raises(ConstraintFailed) as failure:
            [event async for event in failing]
        engine.failure = None
        assert failure.value.param == "response_format"
        rest = [event async for event in other]
        assert isinstance(rest[-1], Finished)


async def test_a_grammar_is_compiled_beside_the_loop_and_each_choice_reads_its_own(text, autojump_clock):
    async with open_desk(text) as (desk, engine):
        before = trio.current_time()
        async with desk.generate(ask(2, format=JsonFormat({"type": "object"}))):
            assert trio.current_time() == before + 1
            await trio.sleep(1.5)
        first, second = (job.constraint for job in engine.joined)
        assert first is not None
        assert second is not None
        assert first is not second


async def test_a_schema_that_cannot_be_had_takes_no_place(text, autojump_clock):
    async with open_desk(text) as (desk, engine):
        with pytest.raises(UsageError) as refused:
            await answer(desk, ask(format=JsonFormat({"type": "thing"})))
        assert refused.value.param == "response_format"
        broken = Tool("f", None, {"type": "thing"})
        with pytest.raises(UsageError) as refused:
            await answer(desk, ask(tools=Tools((broken,), ToolUse.REQUIRED)))
        assert refused.value.param == "tools"
        assert (desk.admission.busy, engine.joined) == (0, [])


async def test_draining_waits_for_every_choice_and_refuses_new_requests(text, autojump_clock):
    async with open_desk(text) as (desk, _), desk.generate(ask(3)) as events, trio.open_nursery() as nursery:
        nursery.start_soon(desk.drain)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(CapacityError, match="shutting down"):
            await answer(desk, ask())
        assert isinstance([event async for event in events][-1], Finished)
