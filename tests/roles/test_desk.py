"""The desk over a scripted engine, on a virtual clock: no thread, no model."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import trio

from kvasir_node.base.errors import BugError, CapacityError, DataError, KvasirError, QueueFull, UsageError
from kvasir_node.base.events import Happening
from kvasir_node.base.generation import ChoiceEnded, Finished, FinishReason, GenerationRequest, TextDelta
from kvasir_node.decide.admission import AdmissionLimits, Load
from kvasir_node.model.jobs import AnswerTally, BadLogits, Job, StepToken
from kvasir_node.model.text import LONG_TEXT_CHARACTERS
from kvasir_node.roles.desk import STEP_ATTEMPTS_MAX, Answer, Desk
from kvasir_node.roles.measured import StepMeasured

END = 0
STEP_S = 0.1


class FakeText:
    """One token is one letter; token 0 ends an answer."""

    end_tokens = frozenset({END})
    special_tokens = frozenset({END})
    template = None

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def chat(self, messages, tools=None) -> tuple[int, ...]:
        return self.encode("".join(message["content"] for message in messages))

    def token_id(self, piece: str) -> int | None:
        return None

    def token_bytes(self, token: int, shown: frozenset[int] = frozenset()) -> bytes:
        return b"" if token == END else chr(token).encode()


@dataclass
class _Seat:
    job: Job
    given: int = 0


class FakeEngine:
    """Answers a prompt with itself, letter by letter, over and over; "." in a prompt ends the answer there.

    As strict as the real one about its slots, and raises what `faults` says for a step, once each.
    """

    context = 64
    prompt_tokens = reused_tokens = rows_computed = 0

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.seats: dict[int, _Seat] = {}
        self.paused: dict[int, _Seat] = {}
        self.faults: deque[Exception | None] = deque()
        self.steps = 0
        self.most_busy = 0
        self.refuse_join: KvasirError | None = None

    @property
    def is_idle(self) -> bool:
        return not self.seats

    @property
    def is_prefilling(self) -> bool:
        return any(not seat.given for seat in self.seats.values())

    def check(self, job: Job) -> None:
        if job.max_tokens < 1:
            raise UsageError("max_tokens must be at least 1", param="max_tokens")

    def join(self, job: Job) -> None:
        if self.refuse_join is not None:
            raise self.refuse_join
        assert len(self.seats) < self.slots, "the desk let more in than there are slots"
        assert job.id not in self.seats, "a request joined twice"
        self.seats[job.id] = _Seat(job)
        self.most_busy = max(self.most_busy, len(self.seats))

    def leave(self, job_id: int) -> None:
        self.seats.pop(job_id, None)
        self.paused.pop(job_id, None)

    def pause(self, job_id: int) -> None:
        if job_id in self.seats:
            self.paused[job_id] = self.seats.pop(job_id)

    def resume(self, job_id: int) -> None:
        if job_id in self.paused:
            self.seats[job_id] = self.paused.pop(job_id)

    def step(self) -> list[StepToken]:
        self.steps += 1
        fault = self.faults.popleft() if self.faults else None
        if fault is not None:
            raise fault
        seats = list(self.seats.values())
        self.rows_computed += sum(1 if seat.given else len(seat.job.prompt) for seat in seats)
        return [self._next(seat) for seat in seats]

    def _next(self, seat: _Seat) -> StepToken:
        token = seat.job.prompt[seat.given % len(seat.job.prompt)]
        token = END if token == ord(".") else token
        seat.given += 1
        reason = FinishReason.LENGTH if seat.given >= seat.job.max_tokens else None
        reason = FinishReason.STOP if token in seat.job.end_tokens else reason
        if reason is not None:
            del self.seats[seat.job.id]
        tally = AnswerTally(local_pairs=2 * seat.given)
        return StepToken(seat.job.id, token, reason, tally, is_text=token not in seat.job.end_tokens)


@dataclass
class Room:
    """A desk that is open, and what a test wants to see around it."""

    desk: Desk
    engine: FakeEngine
    load_changes: list[Load] = field(default_factory=list)
    steps: list[StepMeasured] = field(default_factory=list)
    inline_calls: int = 0
    told: list[Happening] = field(default_factory=list)

    def assert_empty(self) -> None:
        assert (self.desk.admission.busy, self.desk.admission.queued) == (0, 0)
        assert self.engine.is_idle
        assert not self.desk._choices
        assert not self.desk._joining
        assert not self.engine.paused

    async def ask(self, prompt: str, tokens: int = 5, stop: tuple[str, ...] = ()) -> tuple[str, Finished]:
        async with self.desk.generate(GenerationRequest(prompt=prompt, max_tokens=tokens, stop=stop)) as answer:
            return await read(answer)


async def read_all(answer: Answer, choices: int = 1) -> tuple[list[str], Finished]:
    """The text of each choice, and the end of the last one; every choice must end, once, with nothing after it."""
    texts = [""] * choices
    ends: dict[int, ChoiceEnded | Finished] = {}
    async for event in answer:
        assert event.choice not in ends
        if isinstance(event, TextDelta):
            texts[event.choice] += event.text
        else:
            assert isinstance(event, ChoiceEnded | Finished)
            ends[event.choice] = event
    assert len(ends) == choices
    (finished,) = (end for end in ends.values() if isinstance(end, Finished))
    return texts, finished


async def read(answer: Answer) -> tuple[str, Finished]:
    texts, end = await read_all(answer)
    return texts[0], end


@asynccontextmanager
async def open_room(slots: int = 2, queue: int = 3) -> AsyncIterator[Room]:
    async def run_blocking(function, *args: object):
        room.inline_calls += 1
        await trio.sleep(STEP_S)
        return function(*args)

    engine = FakeEngine(slots)
    limits = AdmissionLimits(slots, queue, saturated_after_s=0.5, calm_after_s=2.0, calm_busy_ratio=0.75)
    desk = Desk(
        engine,
        FakeText(),  # type: ignore[arg-type]
        limits,
        load_changed=lambda: room.load_changes.append(room.desk.admission.load),
        stepped=lambda step: room.steps.append(step),
        tell=lambda happening: room.told.append(happening),
        run_blocking=run_blocking,
    )
    room = Room(desk, engine)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(desk.run)
        nursery.start_soon(desk.watch_load)
        yield room
        nursery.cancel_scope.cancel()


async def test_an_answer_and_its_facts(autojump_clock):
    async with open_room() as room:
        text, end = await room.ask("abc", 5)
        assert text == "abcab"
        assert (end.reason, end.prompt_tokens, end.completion_tokens) == (FinishReason.LENGTH, 3, 5)
        assert (end.facts.local_pairs, end.facts.queue_ms) == (10, 0.0)
        assert end.facts.prefill_ms == pytest.approx(100)
        assert end.facts.decode_ms == pytest.approx(400)
        text, end = await room.ask("ab.", 9)
        assert (text, end.reason, end.completion_tokens) == ("ab", FinishReason.STOP, 3)
        assert (room.desk.tokens_total, room.desk.requests_total) == (8, 2)
        room.assert_empty()


async def test_requests_beyond_the_slots_wait_their_turn_and_beyond_the_queue_are_refused(autojump_clock):
    async with open_room(slots=1, queue=1) as room:
        ends: list[Finished] = []

        async def client() -> None:
            ends.append((await room.ask("abc", 5))[1])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(client)
            await trio.sleep(0.01)
            nursery.start_soon(client)
            await trio.sleep(0.01)
            with pytest.raises(QueueFull) as refused:
                await room.ask("abc")
            assert refused.value.retry_after_s >= 1
        assert [end.facts.queue_ms for end in ends] == [0.0, pytest.approx(500, abs=150)]
        room.assert_empty()


async def test_saturation_is_told_when_it_comes_and_when_it_goes(autojump_clock):
    async with open_room(slots=1, queue=3) as room:
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(room.ask, "abc", 20)
        assert Load.SATURATED in room.load_changes
        assert room.desk.slots().state == "saturated"
        await trio.sleep(5)
        assert room.load_changes[-1] is Load.CALM


@pytest.mark.parametrize("stop_at", ["the last token", "the end token"])
async def test_a_stop_string_that_ends_in_the_same_step_as_the_answer_ends_it_once(autojump_clock, stop_at):
    async with open_room() as room:
        prompt, tokens = ("abc", 3) if stop_at == "the last token" else ("abc.", 9)
        text, end = await room.ask(prompt, tokens, ("bc",))
        assert (text, end.reason, end.completion_tokens) == ("a", FinishReason.STOP, 3)
        await trio.sleep(1)
        room.assert_empty()


async def test_a_stop_string_in_the_middle_frees_the_slot_at_the_next_token_boundary(autojump_clock):
    async with open_room(slots=1) as room:
        text, end = await room.ask("abcdef", 50, ("de",))
        assert (text, end.completion_tokens) == ("abc", 5)
        assert room.desk.admission.busy == 0
        text, _ = await room.ask("xyz", 3)
        assert text == "xyz"
        room.assert_empty()
        assert room.engine.steps == 5 + 3


@pytest.mark.parametrize("gone_after_s", [0.0, 0.001, 0.05, 0.15, 0.1 * 7])
async def test_a_client_that_leaves_frees_its_place_whether_queued_joining_or_in_a_step(autojump_clock, gone_after_s):
    async with open_room(slots=1) as room:
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(room.ask, "abc", 50)
            await trio.sleep(gone_after_s)
            nursery.cancel_scope.cancel()
        assert (room.desk.admission.busy, room.desk.admission.queued) == (0, 0)
        text, _ = await room.ask("xyz", 3)
        assert text == "xyz"
        room.assert_empty()
        assert room.engine.most_busy == 1


async def test_a_drain_finishes_what_is_queued_and_refuses_what_is_new_and_two_drains_both_end(autojump_clock):
    async with open_room(slots=1) as room:
        texts: list[str] = []

        async def client() -> None:
            texts.append((await room.ask("abc", 5))[0])

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(client)
            await trio.sleep(0.05)
            nursery.start_soon(room.desk.drain)
            nursery.start_soon(room.desk.drain)
            await trio.sleep(0.05)
            with pytest.raises(CapacityError, match="shutting down"):
                await room.ask("abc")
        assert texts == ["abcab"] * 3
        with trio.fail_after(1):
            await room.desk.drain()
        room.assert_empty()


async def test_each_step_is_told_with_its_rows_its_time_and_whether_it_had_prompts(autojump_clock):
    async with open_room() as room:
        room.engine.faults.extend([None, DataError("the disk")])
        await room.ask("abc", 3)
    assert [(step.rows, step.has_prompt) for step in room.steps] == [(3, True), (0, False), (1, False), (1, False)]
    assert {len(step.requests) for step in room.steps} == {1}
    assert all(step.took_s == pytest.approx(STEP_S) for step in room.steps)


async def test_law_8_a_step_that_fails_is_repeated_and_no_request_notices(autojump_clock):
    async with open_room() as room:
        for _ in range(2):
            room.engine.faults.extend(
                [DataError("the disk"), DataError("the disk"), None, RuntimeError("memory"), None]
            )
            assert (await room.ask("abc", 5))[0] == "abcab"


@pytest.mark.parametrize("fault", [DataError("the disk is gone"), RuntimeError("CUDA out of memory")])
async def test_a_step_that_keeps_failing_ends_the_requests_it_meets_and_not_the_node(autojump_clock, fault, caplog):
    async with open_room(slots=2, queue=3) as room:
        errors: list[KvasirError] = []
        texts: list[str] = []

        async def client(prompt: str) -> None:
            try:
                texts.append((await room.ask(prompt, 3))[0])
            except KvasirError as error:
                errors.append(error)

        room.engine.faults.extend([fault] * STEP_ATTEMPTS_MAX)
        async with trio.open_nursery() as nursery:
            for prompt in ("abc", "def", "ghi"):
                nursery.start_soon(client, prompt)
        assert [type(error) for error in errors] == [DataError if isinstance(fault, DataError) else BugError] * 2
        assert len(texts) == 1
        # The count began anew: later requests have all their attempts.
        room.engine.faults.extend([fault] * (STEP_ATTEMPTS_MAX - 1))
        assert (await room.ask("xyz", 3))[0] == "xyz"
        room.assert_empty()
        assert not any("CUDA" in str(error) for error in errors)


async def test_logits_that_are_not_finite_cost_one_request_and_not_its_neighbours(autojump_clock):
    async with open_room() as room:
        async with trio.open_nursery() as nursery:
            texts: list[str] = []

            async def neighbour() -> None:
                texts.append((await room.ask("abc", 6))[0])

            nursery.start_soon(neighbour)
            await trio.sleep(0.25)
            room.engine.faults.append(BadLogits("not finite", job_id=2))
            with pytest.raises(BadLogits):
                await room.ask("xyz", 6)
        assert texts == ["abcabc"]
        room.assert_empty()


async def test_a_request_that_the_engine_refuses_gives_its_place_to_the_next(autojump_clock):
    async with open_room(slots=1) as room:
        room.engine.refuse_join = UsageError("never fits")
        with pytest.raises(UsageError, match="never fits"):
            await room.ask("abc")
        room.engine.refuse_join = None
        assert (await room.ask("abc", 3))[0] == "abc"
        room.assert_empty()


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (GenerationRequest(prompt=""), "prompt"),
        (GenerationRequest(prompt="x" * 64), "prompt"),
        (GenerationRequest(prompt="x" * (LONG_TEXT_CHARACTERS + 1)), "prompt"),
        (GenerationRequest(prompt_tokens=tuple([65] * 100)), "prompt"),
        (GenerationRequest(messages=({"role": "user", "content": "x" * 64},)), "messages"),
        (GenerationRequest(prompt="x", max_tokens=0), "max_tokens"),
        (GenerationRequest(prompt="x", stop=("",)), "stop"),
    ],
)
async def test_what_cannot_be_computed_is_refused_before_it_takes_a_place(autojump_clock, request_, param):
    async with open_room() as room:
        with pytest.raises(UsageError) as refused:
            async with room.desk.generate(request_):
                raise AssertionError("it was let in")
        assert refused.value.param == param
        assert room.desk.requests_total == 0
        room.assert_empty()


async def test_a_long_prompt_is_cut_into_tokens_off_the_loop_and_a_drain_meanwhile_refuses_it(autojump_clock):
    async with open_room() as room:
        room.engine.context = 100_000  # type: ignore[misc]
        text, _ = await room.ask("x" * LONG_TEXT_CHARACTERS, 2)
        assert text == "xx"
        assert room.inline_calls == 1 + 2
        async with trio.open_nursery() as nursery:

            async def refused() -> None:
                with pytest.raises(CapacityError):
                    await room.ask("x" * LONG_TEXT_CHARACTERS, 2)

            nursery.start_soon(refused)
            await trio.sleep(0.05)
            await room.desk.drain()
        room.assert_empty()


async def test_max_tokens_is_cut_to_the_room_that_the_context_leaves(autojump_clock):
    async with open_room() as room:
        _, end = await room.ask("a" * 60, 1000)
        assert (end.completion_tokens, end.reason) == (4, FinishReason.LENGTH)


@pytest.mark.parametrize("seed", range(12))
async def test_law_7_no_place_is_lost_or_doubled_and_no_answer_mixed_whatever_clients_and_steps_do(
    autojump_clock, seed
):
    rng = random.Random(seed)
    slots = rng.randint(1, 3)
    async with open_room(slots=slots, queue=4) as room:
        served = 0

        async def client(number: int) -> None:
            nonlocal served
            await trio.sleep(rng.uniform(0, 4))
            prompt = "".join(rng.choices("abcdef.", weights=[3] * 6 + [1], k=rng.randint(1, 9)))
            stop = tuple(rng.sample(["ab", "f", "cd"], rng.randint(0, 2)))
            with trio.move_on_after(rng.choice([0.0, 0.15, 1.0, 1e9])):
                choices, tokens = rng.choice([1, 1, 2]), rng.randint(1, 12)
                request = GenerationRequest(prompt=prompt, max_tokens=tokens, stop=stop, choices=choices)
                try:
                    async with room.desk.generate(request) as answer:
                        texts, end = await read_all(answer, choices)
                except (QueueFull, BadLogits, DataError):
                    return
                assert all((prompt * 12).split(".")[0].startswith(text) for text in texts)
                assert not any(each in text for each in stop for text in texts)
                assert end.facts.local_pairs == 2 * end.completion_tokens
                served += 1

        async def trouble() -> None:
            while True:
                await trio.sleep(rng.uniform(0, 2))
                fault = rng.choice([DataError("disk"), BadLogits("nan", job_id=rng.randint(1, 30))])
                room.engine.faults.append(fault)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trouble)
            async with trio.open_nursery() as clients:
                for number in range(30):
                    clients.start_soon(client, number)
            nursery.cancel_scope.cancel()
        await trio.sleep(1)
        room.assert_empty()
        assert served >= 1
        assert room.engine.most_busy <= slots
        with trio.fail_after(1):
            await room.desk.drain()
