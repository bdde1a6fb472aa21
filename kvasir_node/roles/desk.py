"""Requests for text: from a prompt to a place, through the engine, to deltas and an end.

It does not know HTTP, workers or the market. It owns the computing thread's loop: requests join and leave between
two steps, so the engine is only ever touched by one thread at a time.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Protocol

import trio

from kvasir_node.base.errors import BugError, CapacityError, KvasirError, QueueFull, UsageError
from kvasir_node.base.events import Tell, tell_nobody
from kvasir_node.base.generation import GenerationRequest, SamplingOptions
from kvasir_node.base.snapshot import SlotsSnapshot, ThroughputSnapshot
from kvasir_node.decide.admission import Admission, AdmissionLimits, Admitted, Load
from kvasir_node.model.dialect import AnswerPlan, Dialect
from kvasir_node.model.jobs import BadLogits, ConstraintFailed, Job, StepToken
from kvasir_node.model.missing import JobsWait
from kvasir_node.model.sampling import seed_of_choice
from kvasir_node.model.text import LONG_TEXT_CHARACTERS, TextModel
from kvasir_node.roles.measured import StepMeasured
from kvasir_node.roles.reply import Answer, AnswerItem, Choice, ChoiceWriter, Request
from kvasir_node.roles.request_book import CANCELLED, FAILED, RequestBook
from kvasir_node.roles.waiting import BringsExperts, WaitingJobs

logger = logging.getLogger(__name__)

RATE_WINDOW_S = 5.0
STEP_ATTEMPTS_MAX = 3  # a step that raises has changed nothing and is repeated this often in all
LONG_TASKS_MAX = 2  # texts cut into tokens and grammars compiled at once, in threads
RunBlocking = Callable[..., Awaitable[Any]]
"""Runs a blocking call: in a thread, or (under a virtual clock) inline."""


class Computes(Protocol):
    """What the desk needs of `model.engine.Engine`; see there for what each promises."""

    @property
    def context(self) -> int: ...

    @property
    def is_idle(self) -> bool: ...

    @property
    def is_prefilling(self) -> bool: ...

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def reused_tokens(self) -> int: ...

    @property
    def rows_computed(self) -> int: ...

    def check(self, job: Job) -> None: ...

    def join(self, job: Job) -> None: ...

    def leave(self, job_id: int) -> None: ...

    def pause(self, job_id: int) -> None: ...

    def resume(self, job_id: int) -> None: ...

    def step(self) -> list[StepToken]: ...


class Desk:
    """Admission, the engine's loop, and each request's way through them.

    `load_changed` is called on the loop when the saturation state, or the number of requests, may have changed;
    `stepped` after each step, before the next one begins.
    """

    def __init__(
        self,
        engine: Computes,
        text: TextModel,
        limits: AdmissionLimits,
        *,
        load_changed: Callable[[], None],
        stepped: Callable[[StepMeasured], None] = lambda step: None,
        missing: BringsExperts | None = None,
        tell: Tell = tell_nobody,
        run_blocking: RunBlocking = trio.to_thread.run_sync,
    ) -> None:
        self._engine = engine
        self._text = text
        self._limits = limits
        self._load_changed = load_changed
        self._stepped = stepped
        self._run_blocking = run_blocking
        self._long_tasks = trio.CapacityLimiter(LONG_TASKS_MAX)
        self._dialect = Dialect(text)
        self.admission = Admission(limits)
        self.book = RequestBook(tell)
        self._choices: dict[int, Choice] = {}  # by the job's id
        self._joining: deque[Choice] = deque()
        self._leaving: list[int] = []
        self.waiting = WaitingJobs(missing, resumed=self._resume, failed=self._fail_job)
        self._resuming: list[int] = []
        self._nursery: trio.Nursery | None = None
        self._wake = trio.Event()
        self._counter = 0
        self._draining = False
        self._empty = trio.Event()
        self._recent: deque[tuple[float, int]] = deque()
        self.tokens_total = 0
        self.requests_total = 0

    @property
    def saturated(self) -> bool:
        return self.admission.load is Load.SATURATED

    @asynccontextmanager
    async def generate(self, request: GenerationRequest) -> AsyncIterator[Answer]:
        """See surfaces/ports.py. Cancel-safety: leaving by any way frees the place at the next token boundary."""
        if self._draining:
            raise CapacityError("this node is shutting down; ask another one, or try again later")
        prompts = await self._tokens_of(request)
        plan = await self._plan(request)
        entry, items = self._prepare(request, prompts, plan, trio.current_time())
        self._enter(entry)
        try:
            self._load_changed()
            yield Answer(items)
        finally:
            self._leave(entry)
            items.close()

    def close(self) -> None:
        """Refuses new requests from now on; does not wait for those that are here."""
        self._draining = True

    async def drain(self) -> None:
        """Refuses new requests; returns when none is left. Cancel-safe."""
        self.close()
        while self._choices:
            await self._empty.wait()

    async def run(self) -> None:
        """Computes for ever: one step after the other in a thread, asleep when there is nothing to do."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            await self._compute()

    async def _compute(self) -> None:
        attempts = 0
        while True:
            self._apply_changes()
            if self._engine.is_idle:
                self._wake = trio.Event()
                await self._wake.wait()
                continue
            requests = sorted({choice.request.number for choice in self._choices.values() if choice.joined})
            error = await self._step(requests)
            attempts = attempts + 1 if error is not None else 0
            if error is not None:
                logger.error("a step failed (%d of %d): %s", attempts, STEP_ATTEMPTS_MAX, error)
                if attempts == STEP_ATTEMPTS_MAX:
                    attempts = 0
                    for choice in [each for each in self._choices.values() if each.joined]:
                        self._fail(choice, error)

    async def _step(self, requests: Sequence[int]) -> KvasirError | None:
        """One step of the engine and what follows from it; returns why it failed for everybody."""
        has_prompt, started, before = self._engine.is_prefilling, trio.current_time(), self._engine.rows_computed
        tokens, error = await self._computed()
        now = trio.current_time()
        for token in tokens:
            self._deliver(token, now)
        self._stepped(StepMeasured(requests, self._engine.rows_computed - before, now - started, has_prompt))
        return error

    async def _computed(self) -> tuple[Sequence[StepToken], KvasirError | None]:
        """The tokens of a step, or none and perhaps why everybody's failed; who fails or waits alone is seen to."""
        try:
            return await self._run_blocking(self._engine.step), None
        except (BadLogits, ConstraintFailed) as error:
            self._fail(self._choices.get(error.job_id), error)
        except JobsWait as error:
            self._let_wait(error)
        except KvasirError as error:
            return (), error
        except Exception as error:
            # The one door of the computing thread: memory that ran out on a device, or a bug in a model's code, must
            # cost the requests it meets and not the node.
            logger.exception("computing a step raised %s", type(error).__name__)
            words = f"computing failed with {type(error).__name__}; the node's log says more, please report it"
            return (), BugError(words)
        return (), None

    def _let_wait(self, error: JobsWait) -> None:
        assert self._nursery is not None, "only `run` computes"
        for job_id in error.job_ids:
            self._engine.pause(job_id)
            if job_id in self._choices:
                logger.info("request %d waits: %s", job_id, error)
                self.waiting.begin(job_id, error, self._nursery)

    def _resume(self, job_id: int) -> None:
        self._resuming.append(job_id)
        self._wake.set()

    async def watch_load(self) -> None:
        """Lets the saturation state follow time, for ever."""
        while True:
            await trio.sleep(0.1 if self._choices or self.saturated else 0.5)
            if self.admission.tick(trio.current_time()):
                self._load_changed()

    def _prepare(
        self, request: GenerationRequest, prompts: Sequence[tuple[int, ...]], plan: AnswerPlan, now: float
    ) -> tuple[Request, trio.MemoryReceiveChannel[AnswerItem]]:
        if self._draining:
            raise CapacityError("this node is shutting down; ask another one, or try again later")
        send, receive = trio.open_memory_channel[AnswerItem](math.inf)
        entry = Request(now, sum(map(len, prompts)), send, open_count=request.answer_count)
        for prompt in prompts:
            self._check_prompt(request, prompt)
            for number in range(request.choices):
                job = self._job(request, prompt, plan, number)
                self._engine.check(job)
                place = len(entry.choices)
                writer = ChoiceWriter(self._text, request.stop, plan, place)
                entry.choices.append(Choice(job, writer, entry, place, is_first=number == 0))
        return entry, receive

    def _check_prompt(self, request: GenerationRequest, prompt: tuple[int, ...]) -> None:
        param = "messages" if request.messages is not None else "prompt"
        if len(prompt) >= self._engine.context:
            raise UsageError(
                f"the prompt has {len(prompt)} tokens; with at least one token of answer it must fit into the context "
                f"of {self._engine.context} tokens",
                param=param,
                code="context_length_exceeded",
            )
        if not prompt:
            raise UsageError("the prompt is empty; send at least one token", param=param)

    def _job(self, request: GenerationRequest, prompt: tuple[int, ...], plan: AnswerPlan, choice: int) -> Job:
        """`choice` counts within this prompt, so that seeded answers are those of the prompt alone."""
        self._counter += 1
        room = self._engine.context - len(prompt)
        return Job(
            self._counter,
            prompt,
            room if request.max_tokens is None else min(request.max_tokens, room),
            _sampling_of(request.sampling, choice),
            self._text.end_tokens,
            top_logprobs=request.top_logprobs,
            constraint=None if plan.grammar is None else plan.grammar.matcher(),
        )

    async def _tokens_of(self, request: GenerationRequest) -> list[tuple[int, ...]]:
        if _characters(request) < LONG_TEXT_CHARACTERS:
            return self._encode(request)
        async with self._long_tasks:
            return await self._run_blocking(self._encode, request)

    async def _plan(self, request: GenerationRequest) -> AnswerPlan:
        if not self._dialect.needs_time(request):
            return self._dialect.plan(request)
        async with self._long_tasks:
            return await self._run_blocking(self._dialect.plan, request)

    def _encode(self, request: GenerationRequest) -> list[tuple[int, ...]]:
        if request.messages is not None:
            return [self._text.chat(request.messages, None if request.tools is None else request.tools.documents())]
        return [self._text.encode(each) if isinstance(each, str) else each for each in _prompts(request)]

    def _enter(self, entry: Request) -> None:
        """All choices find a place, or none does."""
        count, places = len(entry.choices), self._limits.slots + self._limits.queue
        if count > places:
            raise UsageError(f"{count} answers were asked for; this node has {places} places for requests", param="n")
        if count > self.admission.room:
            self.book.refused()
            retry_after_s = self.admission.retry_after_s
            raise QueueFull(
                f"{self.admission.busy} of {self._limits.slots} slots are busy and {self.admission.queued} of "
                f"{self._limits.queue} places in the queue are taken; try again in {retry_after_s:.0f} s",
                retry_after_s=retry_after_s,
            )
        self.requests_total += 1
        if not self._choices:
            self._empty = trio.Event()  # only here: several may be draining
        for choice in entry.choices:
            self._choices[choice.job.id] = choice
            if isinstance(self.admission.arrive(choice.job.id, entry.arrived_at), Admitted):
                self._start(choice, entry.arrived_at)
        self.book.began(entry)

    def _start(self, choice: Choice, now: float) -> None:
        if choice.request.admitted_at is None:
            choice.request.admitted_at = now
        self._joining.append(choice)
        self._wake.set()

    def _leave(self, entry: Request) -> None:
        """The request is over, or its reader has gone. Does nothing the second time."""
        for choice in reversed(entry.choices):  # those that wait first, so that none of them starts meanwhile
            self._leave_choice(choice)
        entry.send.close()
        self.book.ended(entry, CANCELLED, trio.current_time())

    def _leave_choice(self, choice: Choice) -> None:
        self._give_up_place(choice)
        if self._choices.pop(choice.job.id, None) is not None:
            self.waiting.let_go(choice.job.id)
            if choice in self._joining:
                self._joining.remove(choice)
            elif choice.joined:
                self._leaving.append(choice.job.id)
                self._wake.set()
            if not self._choices:
                self._empty.set()

    def _give_up_place(self, choice: Choice) -> None:
        if not choice.placed:
            return
        choice.placed = False
        now = trio.current_time()
        for following in self.admission.leave(choice.job.id, now):
            self._start(self._choices[following], now)
        self._load_changed()

    def _apply_changes(self) -> None:
        """Between two steps: leavers first, so that their slots are free for those who join."""
        for job_id in self._leaving:
            self._engine.leave(job_id)
        self._leaving.clear()
        for job_id in self._resuming:
            self._engine.resume(job_id)
            if job_id not in self._choices:
                self.waiting.let_go(job_id)
        self._resuming.clear()
        while self._joining:
            choice = self._joining.popleft()
            try:
                self._engine.join(choice.job)
                choice.joined = True
            except KvasirError as error:
                self._fail(choice, error)

    def _deliver(self, token: StepToken, now: float) -> None:
        choice = self._choices.get(token.job_id)
        if choice is None:
            return  # it left while this step was computed
        self._count_token(now)
        self.waiting.let_go(token.job_id)
        self.book.token(choice, now)
        if choice.request.deliver(choice, token, now):
            self._leave_choice(choice)
            if choice.request.ended_by is not None:
                self.book.ended(choice.request, str(choice.request.ended_by), now)

    def _fail_job(self, job_id: int, error: KvasirError) -> None:
        self._fail(self._choices.get(job_id), error)

    def _fail(self, choice: Choice | None, error: KvasirError) -> None:
        """One choice that cannot go on ends its whole request."""
        if choice is not None and choice.job.id in self._choices:
            choice.request.send.send_nowait(error)
            self.book.ended(choice.request, FAILED, trio.current_time())
            self._leave(choice.request)

    def _count_token(self, now: float) -> None:
        self.tokens_total += 1
        if self._recent and now - self._recent[-1][0] < 0.05:
            self._recent[-1] = (self._recent[-1][0], self._recent[-1][1] + 1)
        else:
            self._recent.append((now, 1))
        while self._recent[0][0] < now - RATE_WINDOW_S:
            self._recent.popleft()

    def slots(self) -> SlotsSnapshot:
        now, admission = trio.current_time(), self.admission
        return SlotsSnapshot(
            total=self._limits.slots,
            busy=admission.busy,
            queued=admission.queued,
            queue_max=self._limits.queue,
            oldest_wait_s=round(admission.oldest_wait_s(now), 3),
            state=str(admission.load),
            pressure=round(admission.pressure, 3),
        )

    def throughput(self) -> ThroughputSnapshot:
        now = trio.current_time()
        recent = sum(count for at, count in self._recent if at >= now - RATE_WINDOW_S)
        return ThroughputSnapshot(
            round(recent / RATE_WINDOW_S, 2),
            self.tokens_total,
            self.requests_total,
            prompt_tokens_total=self._engine.prompt_tokens,
            prompt_tokens_reused=self._engine.reused_tokens,
        )


def _sampling_of(sampling: SamplingOptions, choice: int) -> SamplingOptions:
    return sampling if sampling.seed is None else replace(sampling, seed=seed_of_choice(sampling.seed, choice))


def _prompts(request: GenerationRequest) -> tuple[str | tuple[int, ...], ...]:
    if request.prompts:
        return request.prompts
    return (request.prompt if request.prompt is not None else request.prompt_tokens or (),)


def _characters(request: GenerationRequest) -> int:
    if request.messages is None:
        return sum(len(each) for each in _prompts(request) if isinstance(each, str))
    return sum(len(str(message.get("content", ""))) for message in request.messages)
