"""A scripted NodePort: for tests, and for looking at the screen without a model.

It does not compute anything: an answer is the script's pieces, one each `piece_s`, in every choice. Slots, the queue
and leaving early behave as the real node promises, and can be watched (`busy`, `left_early_count`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import trio

from kvasir_node import __version__
from kvasir_node.base.errors import CapacityError, QueueFull, UsageError
from kvasir_node.base.events import EventLog
from kvasir_node.base.generation import (
    AnswerEvent,
    AnswerFacts,
    ChoiceEnded,
    Finished,
    FinishReason,
    GenerationRequest,
    TextDelta,
)
from kvasir_node.base.settings import Settings
from kvasir_node.base.snapshot import (
    DemandSnapshot,
    ExpertLayerSnapshot,
    FanoutSnapshot,
    HubSnapshot,
    MetricsSnapshot,
    ModelSnapshot,
    NetSnapshot,
    NodeSnapshot,
    RequestsSnapshot,
    SlotsSnapshot,
    ThroughputSnapshot,
    WorkerPeerSnapshot,
    WorkerSnapshot,
)
from kvasir_node.surfaces.ports import AnswerEvents, ModelCard


@dataclass(frozen=True, slots=True)
class FakeCard:
    id: str
    name: str
    created_at: int


@dataclass(frozen=True, slots=True)
class FakeInvite:
    link: str
    host: str
    expires_s: float
    is_local: bool = False


FAKE_CARD = FakeCard("bafyreifakemodel", "demo", 1_700_000_000)
FAKE_PEER = "12D3KooWFakePeerFakePeerFakePeerFakePeerFakePeerFake"
FAKE_PIECES = ("It is a truth ", "universally ", "acknowledged")


class FakeNode:
    """`failure_at` raises `failure` instead of that piece; context is counted in prompt characters."""

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        pieces: Sequence[str] = FAKE_PIECES,
        piece_s: float = 0.0,
        failure: Exception | None = None,
        failure_at: int | None = None,
        context: int = 4096,
        cards: tuple[ModelCard, ...] = (FAKE_CARD,),
    ) -> None:
        self._settings = settings or Settings()
        self.pieces, self.piece_s = tuple(pieces), piece_s
        self.failure, self.failure_at = failure, failure_at
        self.context, self.cards = context, cards
        self.requests: list[GenerationRequest] = []
        self.busy = self.waiting = self.left_early_count = self.drained_count = 0
        self._places = trio.Semaphore(self._settings.coordinator.slots)
        self._draining = False
        self.invited = 0
        self.invite_is_local = False
        self._open = 0
        self._idle = trio.Event()
        self._idle.set()
        self.status: NodeSnapshot = fake_snapshot()
        self.events = EventLog()
        self.running = RequestsSnapshot()
        self.measured = MetricsSnapshot()

    @property
    def settings(self) -> Settings:
        return self._settings

    def snapshot(self) -> NodeSnapshot:
        limits = self._settings.coordinator
        slots = SlotsSnapshot(limits.slots, self.busy, self.waiting, limits.queue)
        pressure = (slots.busy + slots.queued) / slots.total
        return replace(self.status, slots=replace(slots, pressure=pressure))

    def requests_snapshot(self) -> RequestsSnapshot:
        return self.running

    def metrics(self) -> MetricsSnapshot:
        return self.measured

    def experts(self) -> tuple[ExpertLayerSnapshot, ...]:
        return fake_experts() if self.cards else ()

    def ticket(self) -> str:
        return "kvasir1fake"

    def invite_phone(self, expires_s: float | None = None) -> FakeInvite:
        if expires_s is not None and not 10 <= expires_s <= 86_400:
            raise UsageError(f"a code serves from 10 s to 24 h; got {expires_s:g} s", param="expires_s")
        self.invited += 1
        serves_s = 600.0 if expires_s is None else expires_s
        return FakeInvite(f"kvasirp1fake{self.invited}", "192.0.2.7", serves_s, self.invite_is_local)

    def models(self) -> tuple[ModelCard, ...]:
        return self.cards

    def find_model(self, name: str) -> ModelCard | None:
        return next((card for card in self.cards if name in (card.id, card.name)), None)

    def ready_info(self) -> dict[str, Any]:
        model = {"id": FAKE_CARD.id, "name": FAKE_CARD.name} if self.cards else None
        return {
            "schema": "kvasir.ready/1",
            "peer_id": self.status.peer_id,
            "name": self.status.name,
            "roles": list(self.status.roles),
            "listen": [],
            "ticket": self.ticket(),
            "model": model,
        }

    async def pull(self, ref: str, progress: Callable[[str, int, int], None] | None = None) -> str:
        """A fetch of two steps; `failure` ends it."""
        for done in (0, 50):
            if progress is not None:
                progress("fetched", done, 100)
            await trio.sleep(self.piece_s)
        if self.failure is not None:
            raise self.failure
        return FAKE_CARD.id

    def pause(self) -> None:
        self._set_pause("paused", "paused by its owner")

    def resume(self) -> None:
        self._set_pause("idle", "")

    def _set_pause(self, state: str, reason: str) -> None:
        if self.status.worker is None:
            raise UsageError("this node is no worker, so there is nothing to pause or resume")
        self.status = replace(self.status, worker=replace(self.status.worker, state=state, reason=reason))

    def revoke(self, peer: str, *, is_revoked: bool) -> bool:
        if len(peer) < 46:
            raise UsageError(f"a peer id is what `kvasir-node id` and `peers --json` print; got {peer!r}", param="peer")
        before = self.status.revoked
        others = tuple(each for each in before if each != peer)
        self.status = replace(self.status, revoked=(*others, peer) if is_revoked else others)
        return self.status.revoked != before

    def begin_drain(self) -> None:
        self._draining = True
        worker = self.status.worker and replace(self.status.worker, state="paused", leases=(), slices=())
        self.status = replace(self.status, worker=worker, draining=True)

    async def drain(self) -> None:
        self.begin_drain()
        await self._idle.wait()
        self.drained_count += 1

    @asynccontextmanager
    async def generate(self, request: GenerationRequest) -> AsyncIterator[AnswerEvents]:
        self._refuse(request)
        self.requests.append(request)
        ended: list[Finished] = []
        with self._counted():
            events = self._events(request, ended)
            try:
                yield events
            finally:
                await events.aclose()
                self.left_early_count += not ended

    def _refuse(self, request: GenerationRequest) -> None:
        if self.failure is not None and self.failure_at is None:
            raise self.failure
        prompt = _prompt_text(request)
        if len(prompt) > self.context:
            message = f"the prompt has {len(prompt)} tokens, the context is {self.context}"
            param = "prompt" if request.messages is None else "messages"
            raise UsageError(message, param=param, code="context_length_exceeded")
        if self._draining:
            raise CapacityError("this node is stopping")
        if self._places.value == 0 and self.waiting >= self._settings.coordinator.queue:
            raise QueueFull("the queue is full; try again later", retry_after_s=0.2)

    async def _wait_for_place(self) -> None:
        self.waiting += 1
        try:
            await self._places.acquire()
        finally:
            self.waiting -= 1

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Open answers keep `drain` waiting."""
        self._open += 1
        self._idle = self._idle if not self._idle.is_set() else trio.Event()
        try:
            yield
        finally:
            self._open -= 1
            if self._open == 0:
                self._idle.set()

    async def _events(self, request: GenerationRequest, ended: list[Finished]) -> AsyncGenerator[AnswerEvent, None]:
        try:
            self._places.acquire_nowait()
        except trio.WouldBlock:
            await self._wait_for_place()
        self.busy += 1
        try:
            limit = request.max_tokens or len(self.pieces)
            for index, piece in enumerate(self.pieces[:limit]):
                await trio.sleep(self.piece_s)
                if index == self.failure_at and self.failure is not None:
                    raise self.failure
                for choice in range(request.answer_count):
                    yield TextDelta(piece, choice)
            count, last = min(limit, len(self.pieces)) * request.answer_count, request.answer_count - 1
            reason = FinishReason.LENGTH if limit < len(self.pieces) else FinishReason.STOP
            for choice in range(last):
                yield ChoiceEnded(reason, choice)
            ended.append(Finished(reason, len(_prompt_text(request)), count, AnswerFacts(local_pairs=12 * count), last))
            yield ended[0]
        finally:
            self.busy -= 1
            self._places.release()


def _prompt_text(request: GenerationRequest) -> str:
    if request.messages is not None:
        return "".join(str(message["content"]) for message in request.messages)
    prompts = request.prompts or (request.prompt if request.prompt is not None else request.prompt_tokens or (),)
    return "".join(prompt if isinstance(prompt, str) else "t" * len(prompt) for prompt in prompts)


def fake_snapshot(**changes: Any) -> NodeSnapshot:
    """A calm node with every part filled in; `changes` replace whole fields."""
    calm = NodeSnapshot(
        version=__version__,
        peer_id=FAKE_PEER,
        name="attic",
        roles=("coordinator", "hub", "worker"),
        uptime_s=62.0,
        warnings=(),
        model=ModelSnapshot(FAKE_CARD.id, FAKE_CARD.name, "qwen3_moe", 6, 16, 12, 12),
        slots=SlotsSnapshot(4, 0, 0, 64),
        fanout=FanoutSnapshot(reason="off: calm"),
        throughput=ThroughputSnapshot(0.0, 0, 0),
        workers=(),
        hub=HubSnapshot(1, 0, 0, ()),
        worker=WorkerSnapshot(),
        net=NetSnapshot(),
    )
    return replace(calm, **changes)


def fake_experts(layers: int = 6, experts: int = 16) -> tuple[ExpertLayerSnapshot, ...]:
    """Some of everything: hot and cold ones, held, mapped, at workers and nowhere."""
    return tuple(
        ExpertLayerSnapshot(
            layer,
            tuple((37 * index + 11 * layer) % 101 for index in range(experts)),
            "".join("hhhwwm."[(index + layer) % 7] for index in range(experts)),
            tuple((index + layer) % 3 for index in range(experts)),
        )
        for layer in range(layers)
    )


def busy_snapshot() -> NodeSnapshot:
    """A saturated node with workers in several states and a warning."""
    workers = (
        WorkerPeerSnapshot(
            FAKE_PEER[:-1] + "A", "cellar", ("0:0-7", "1:0-7"), "proven", "direct", 0.8, 812, 9031, 0, ""
        ),
        WorkerPeerSnapshot(FAKE_PEER[:-1] + "B", "phone", ("2:0-7",), "suspect", "relay", 81.5, 12, 90, 3, "timed out"),
        WorkerPeerSnapshot(FAKE_PEER[:-1] + "C", "new one", (), "trial", "direct", None, 0, 0, 0, ""),
    )
    demand = (DemandSnapshot("demo", "0:0-7", 2, 1, 1), DemandSnapshot("demo", "3:8-15", 1, 0, 0))
    return fake_snapshot(
        warnings=("cannot reach /ip4/192.0.2.1/tcp/9481: timed out after 4 s",),
        slots=SlotsSnapshot(4, 4, 9, 64, 1.25, "saturated", 3.25),
        fanout=FanoutSnapshot(True, "on: queue 9, gain 1.7x, 2 workers", 1.7, 1, 52000, 18100, 16, 12, 3, 40, 0),
        throughput=ThroughputSnapshot(61.4, 15320, 212),
        workers=workers,
        hub=HubSnapshot(1, 2, 3, demand),
        worker=WorkerSnapshot("serving", ("demo 0:0-7",), ("0:0-7",), 10, 20, 5_000_000, 1024),
        net=NetSnapshot(4, 3, 1, 1_500_000, 2_200_000, "private"),
    )
