"""Requests for text: from a prompt to a place, through the engine, to deltas and an end.

It does not know HTTP, workers or the market. It owns the computing thread's loop: requests join and leave between
two steps, so the engine is only ever touched by one thread at a time.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import trio

from kvasir_node.base.errors import BugError, CapacityError, KvasirError, QueueFull, UsageError
from kvasir_node.base.generation import AnswerFacts, Finished, FinishReason, GenerationRequest, TextDelta
from kvasir_node.base.snapshot import SlotsSnapshot, ThroughputSnapshot
from kvasir_node.decide.admission import Admission, AdmissionLimits, Load, Queued, Refused
from kvasir_node.model.engine import AnswerTally, BadLogits, Job, StepToken
from kvasir_node.model.text import LONG_TEXT_CHARACTERS, TextModel, TextStream

logger = logging.getLogger(__name__)

RATE_WINDOW_S = 5.0
STEP_ATTEMPTS_MAX = 3  # a step that raises has changed nothing and is repeated this often in all
LONG_TEXTS_MAX = 2  # cut into tokens at once, in threads
RunBlocking = Callable[..., Awaitable[Any]]
"""Runs a blocking call: in a thread, or (under a virtual clock) inline."""
AnswerItem = TextDelta | Finished | KvasirError


class Computes(Protocol):
    """What the desk needs of `model.engine.Engine`; see there for what each promises."""

    @property
    def context(self) -> int: ...

    @property
    def is_idle(self) -> bool: ...

    def check(self, job: Job) -> None: ...

    def join(self, job: Job) -> None: ...

    def leave(self, job_id: int) -> None: ...

    def step(self) -> list[StepToken]: ...


@dataclass(slots=True, eq=False)
class _Request:
    job: Job
    stream: TextStream
    arrived_at: float
    # Holds at most a delta per token of the answer, so it is bounded by max_tokens.
    send: trio.MemorySendChannel[AnswerItem]
    admitted_at: float | None = None
    first_token_at: float | None = None
    tokens: int = 0
    tally: AnswerTally = field(default_factory=AnswerTally)
    placed: bool = True  # admission still counts it
    joined: bool = False  # the engine has it


@dataclass(slots=True)
class Answer:
    """The events of one answer; a KvasirError among them is raised."""

    items: trio.MemoryReceiveChannel[AnswerItem]
    ended: bool = False

    def __aiter__(self) -> AsyncIterator[TextDelta | Finished]:
        return self

    async def __anext__(self) -> TextDelta | Finished:
        if self.ended:
            raise StopAsyncIteration
        item = await self.items.receive()
        self.ended = not isinstance(item, TextDelta)
        if isinstance(item, KvasirError):
            raise item
        return item


@dataclass(slots=True)
class StepTimes:
    """Smoothed seconds of one engine step."""

    step_s: float = 0.0

    def observe(self, took_s: float) -> None:
        self.step_s += (took_s - self.step_s) / 8 if self.step_s else took_s


class Desk:
    """Admission, the engine's loop, and each request's way through them.

    `load_changed` is called on the loop when the saturation state, or the number of requests, may have changed.
    """

    def __init__(
        self,
        engine: Computes,
        text: TextModel,
        limits: AdmissionLimits,
        *,
        load_changed: Callable[[], None],
        run_blocking: RunBlocking = trio.to_thread.run_sync,
    ) -> None:
        self._engine = engine
        self._text = text
        self._limits = limits
        self._load_changed = load_changed
        self._run_blocking = run_blocking
        self._long_texts = trio.CapacityLimiter(LONG_TEXTS_MAX)
        self.admission = Admission(limits)
        self._requests: dict[int, _Request] = {}
        self._joining: deque[_Request] = deque()
        self._leaving: list[int] = []
        self._wake = trio.Event()
        self._counter = 0
        self._draining = False
        self._empty = trio.Event()
        self._recent: deque[tuple[float, int]] = deque()
        self.times = StepTimes()
        self.tokens_total = 0
        self.requests_total = 0

    @property
    def saturated(self) -> bool:
        return self.admission.load is Load.SATURATED

    @asynccontextmanager
    async def generate(self, request: GenerationRequest) -> AsyncIterator[Answer]:
        """See surfaces/ports.py. Cancel-safety: leaving by any way frees the place at the next token boundary."""
        prompt = await self._tokens_of(request)
        now = trio.current_time()
        entry, items = self._prepare(request, prompt, now)
        self._enter(entry, now)
        try:
            self._load_changed()
            yield Answer(items)
        finally:
            self._leave(entry)
            items.close()

    async def drain(self) -> None:
        """Refuses new requests; returns when none is left. Cancel-safe."""
        self._draining = True
        while self._requests:
            await self._empty.wait()

    async def run(self) -> None:
        """Computes for ever: one step after the other in a thread, asleep when there is nothing to do."""
        attempts = 0
        while True:
            self._apply_changes()
            if self._engine.is_idle:
                self._wake = trio.Event()
                await self._wake.wait()
                continue
            error = await self._step()
            attempts = attempts + 1 if error is not None else 0
            if error is not None:
                logger.error("a step failed (%d of %d): %s", attempts, STEP_ATTEMPTS_MAX, error)
                if attempts == STEP_ATTEMPTS_MAX:
                    attempts = 0
                    for entry in [each for each in self._requests.values() if each.joined]:
                        self._fail(entry, error)

    async def _step(self) -> KvasirError | None:
        """One step of the engine and what follows from it; returns why it failed for everybody."""
        started = trio.current_time()
        try:
            tokens = await self._run_blocking(self._engine.step)
        except BadLogits as error:
            self._fail(self._requests.get(error.job_id), error)
            return None
        except KvasirError as error:
            return error
        except Exception as error:
            # The one door of the computing thread: memory that ran out on a device, or a bug in a model's code, must
            # cost the requests it meets and not the node.
            logger.exception("computing a step raised %s", type(error).__name__)
            return BugError(f"computing failed with {type(error).__name__}; the node's log says more, please report it")
        now = trio.current_time()
        self.times.observe(now - started)
        for token in tokens:
            self._deliver(token, now)
        return None

    async def watch_load(self) -> None:
        """Lets the saturation state follow time, for ever."""
        while True:
            await trio.sleep(0.1 if self._requests or self.saturated else 0.5)
            if self.admission.tick(trio.current_time()):
                self._load_changed()

    def _prepare(
        self, request: GenerationRequest, prompt: tuple[int, ...], now: float
    ) -> tuple[_Request, trio.MemoryReceiveChannel[AnswerItem]]:
        if self._draining:
            raise CapacityError("this node is shutting down; ask another one, or try again later")
        room = self._engine.context - len(prompt)
        if room < 1:
            param = "messages" if request.messages is not None else "prompt"
            raise UsageError(
                f"the prompt has {len(prompt)} tokens; with at least one token of answer it must fit into the context "
                f"of {self._engine.context} tokens",
                param=param,
                code="context_length_exceeded",
            )
        if not prompt:
            raise UsageError("the prompt is empty; send at least one token", param="prompt")
        self._counter += 1
        wanted = room if request.max_tokens is None else min(request.max_tokens, room)
        job = Job(self._counter, prompt, wanted, request.sampling, self._text.end_tokens)
        self._engine.check(job)
        send, receive = trio.open_memory_channel[AnswerItem](math.inf)
        return _Request(job, TextStream(self._text, request.stop), now, send), receive

    async def _tokens_of(self, request: GenerationRequest) -> tuple[int, ...]:
        if self._draining or (request.messages is None and request.prompt is None):
            return request.prompt_tokens or ()
        if _characters(request) < LONG_TEXT_CHARACTERS:
            return self._encode(request)
        async with self._long_texts:
            return await self._run_blocking(self._encode, request)

    def _encode(self, request: GenerationRequest) -> tuple[int, ...]:
        if request.messages is not None:
            return self._text.chat(request.messages)
        return self._text.encode(request.prompt or "")

    def _enter(self, entry: _Request, now: float) -> None:
        verdict = self.admission.arrive(entry.job.id, now)
        if isinstance(verdict, Refused):
            raise QueueFull(
                f"all {self._limits.slots} slots are busy and {self._limits.queue} requests wait already; "
                f"try again in {verdict.retry_after_s:.0f} s",
                retry_after_s=verdict.retry_after_s,
            )
        self.requests_total += 1
        if not self._requests:
            self._empty = trio.Event()  # only here: several may be draining
        self._requests[entry.job.id] = entry
        if not isinstance(verdict, Queued):
            self._start(entry, now)

    def _start(self, entry: _Request, now: float) -> None:
        entry.admitted_at = now
        self._joining.append(entry)
        self._wake.set()

    def _leave(self, entry: _Request) -> None:
        """The request is over, or its reader has gone. Does nothing the second time."""
        self._give_up_place(entry)
        if self._requests.pop(entry.job.id, None) is not None:
            entry.send.close()
            if entry in self._joining:
                self._joining.remove(entry)
            elif entry.joined:
                self._leaving.append(entry.job.id)
                self._wake.set()
            if not self._requests:
                self._empty.set()

    def _give_up_place(self, entry: _Request) -> None:
        if not entry.placed:
            return
        entry.placed = False
        now = trio.current_time()
        for following in self.admission.leave(entry.job.id, now):
            self._start(self._requests[following], now)
        self._load_changed()

    def _apply_changes(self) -> None:
        """Between two steps: leavers first, so that their slots are free for those who join."""
        for job_id in self._leaving:
            self._engine.leave(job_id)
        self._leaving.clear()
        while self._joining:
            entry = self._joining.popleft()
            try:
                self._engine.join(entry.job)
                entry.joined = True
            except KvasirError as error:
                self._fail(entry, error)

    def _deliver(self, token: StepToken, now: float) -> None:
        entry = self._requests.get(token.job_id)
        if entry is None:
            return  # it left while this step was computed
        if entry.first_token_at is None:
            entry.first_token_at = now
        entry.tokens += 1
        entry.tally = token.tally
        self._count_token(now)
        ended = token.finished is FinishReason.STOP  # the end token itself is not text
        text = "" if ended else entry.stream.push((token.token,))
        if token.finished is not None:
            text += entry.stream.finish()
        if text:
            entry.send.send_nowait(TextDelta(text))
        if token.finished is not None or entry.stream.stopped:
            self._finish(entry, FinishReason.STOP if entry.stream.stopped or ended else FinishReason.LENGTH, now)

    def _finish(self, entry: _Request, reason: FinishReason, now: float) -> None:
        admitted = entry.arrived_at if entry.admitted_at is None else entry.admitted_at
        first = now if entry.first_token_at is None else entry.first_token_at
        facts = AnswerFacts(
            local_pairs=entry.tally.local_pairs,
            remote_pairs=entry.tally.remote_pairs,
            fallbacks=entry.tally.fallbacks,
            hedges=entry.tally.hedges,
            queue_ms=round((admitted - entry.arrived_at) * 1000, 3),
            prefill_ms=round((first - admitted) * 1000, 3),
            decode_ms=round((now - first) * 1000, 3),
        )
        entry.send.send_nowait(Finished(reason, len(entry.job.prompt), entry.tokens, facts))
        self._leave(entry)

    def _fail(self, entry: _Request | None, error: KvasirError) -> None:
        if entry is not None:
            entry.send.send_nowait(error)
            self._leave(entry)

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
        return ThroughputSnapshot(round(recent / RATE_WINDOW_S, 2), self.tokens_total, self.requests_total)


def _characters(request: GenerationRequest) -> int:
    if request.messages is None:
        return len(request.prompt or "")
    return sum(len(str(message.get("content", ""))) for message in request.messages)
