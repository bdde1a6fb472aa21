"""The worker: carries out what `decide/placement` decides, and computes experts for coordinators.

It pulls: it asks hubs, fetches, connects out, and leaves when its lease ends. It does not know the market's rules,
how blocks are chosen, or what a coordinator does with the sums. Whatever goes wrong becomes an event for the mind:
every task of the worker ends in `_carry_out` or `_take_step`, and no error leaves them.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import trio

from kvasir_node.base.errors import KvasirError, Misbehaved, PeerError, RejectReason
from kvasir_node.base.events import LendingChanged, Tell, tell_nobody
from kvasir_node.base.ids import ExpertId, ModelId, PeerId
from kvasir_node.base.settings import Settings
from kvasir_node.base.snapshot import WorkerSnapshot
from kvasir_node.decide import placement
from kvasir_node.decide.placement import Assignment, Placement, PlacementLimits, Stage
from kvasir_node.model.manifest import Manifest
from kvasir_node.model.threads import Threads
from kvasir_node.net.transport import Transport
from kvasir_node.roles.content import Fetcher
from kvasir_node.roles.download import RunBlocking
from kvasir_node.roles.holdings import Holdings
from kvasir_node.roles.link import Compute, Link, compute_here
from kvasir_node.roles.loading import pick_device, thread_count
from kvasir_node.roles.slice_notes import SliceNotes
from kvasir_node.wire.blobs import BlobRef
from kvasir_node.wire.messages import (
    RENEWALS_MAX,
    MarketMethod,
    Offer,
    Poll,
    Renewal,
    Renewals,
    Verdicts,
    read_poll_answer,
)

logger = logging.getLogger(__name__)

AskHub = Callable[[PeerId, MarketMethod, bytes], Awaitable[bytes | memoryview]]
"""One request to a hub, wherever it is; raises PeerError."""

RequireMember = Callable[[PeerId], Awaitable[None]]
"""Returns when the peer has proven its membership; raises PeerError."""

UNLOAD_GRACE_S = 1.0  # calls that were on their way when we detached are still answered
FINISH_CALLS_S = 10.0  # ... and those being computed may take this long
PROBLEM_SHOWN_S = 60.0  # a failed step is a warning of the node for this long
_STATE_ORDER = (Stage.SERVING, Stage.TRIAL, Stage.LOADING, Stage.FETCHING, Stage.DRAINING)
_STEP_FETCH, _STEP_LOAD, _STEP_ATTACH = range(3)  # in the order in which a slice takes them
_LinkKey = tuple[PeerId, ModelId, str]  # coordinator, model, dtype
_Events = tuple[placement.Event, ...]


@dataclass(slots=True, eq=False)
class _Step:
    """A fetch, load or attach under way; made when it is commanded, so that a drain finds it even before it begins."""

    scope: trio.CancelScope = field(default_factory=lambda: trio.move_on_after(math.inf))
    ended: trio.Event = field(default_factory=trio.Event)


@dataclass(frozen=True, slots=True)
class _Problem:
    """A step that failed lately; `until` is when it is told no more."""

    coordinator: PeerId
    kind: int
    words: str
    until: float
    is_lost: bool  # the coordinator could not be reached


class Worker:
    """See the module. `compute` is replaced only by the shipped faults (roles/faults.py).

    `run_blocking` computes: by default in one thread, inside which torch uses `node.threads`.
    """

    def __init__(
        self,
        settings: Settings,
        transport: Transport,
        fetcher: Fetcher,
        *,
        ask_hub: AskHub,
        require_member: RequireMember,
        compute: Compute = compute_here,
        tell: Tell = tell_nobody,
        run_blocking: RunBlocking | None = None,
        seed: int | None = None,
        notes_path: Path | None = None,
    ) -> None:
        """`notes_path` = the file of which slices were fetched. Raises UsageError for a device that is not there."""
        self._settings = settings
        self._transport = transport
        self._fetcher = fetcher
        self._ask_hub = ask_hub
        self._require_member = require_member
        self._compute = compute
        self._tell_others = tell
        self._lending = LendingChanged("idle", 0, "")  # as told last
        self._run_blocking = run_blocking or partial(trio.to_thread.run_sync, limiter=trio.CapacityLimiter(1))
        market, worker = settings.market, settings.worker
        limits = PlacementLimits(
            worker.slices_max, market.poll_interval_s, market.renew_interval_s, renewals_max=RENEWALS_MAX
        )
        self._mind = Placement(limits, random.Random(seed))
        device = pick_device(settings.node.device)
        threads = Threads(thread_count(worker.threads or settings.node.threads))
        self._holdings = Holdings(worker.memory_bytes, device, fetcher.store, fetcher.run_blocking, threads)
        self._nursery: trio.Nursery | None = None
        self._woken = trio.Event()  # the mind has heard something, so its next moment may be another one
        self._settled = trio.lowlevel.ParkingLot()  # those who drain; woken whenever a task of ours is over
        self._under_way = 0  # commands that are being carried out
        self._steps: dict[str, _Step] = {}
        self._fetched: dict[str, tuple[Manifest, Mapping[ExpertId, BlobRef]]] = {}  # and not loaded yet
        self._on_disk = SliceNotes(notes_path, fetcher.store)
        self._noting = trio.Lock()  # one thread at a time writes them
        self._progress: dict[str, int] = {}
        self._links: dict[_LinkKey, Link] = {}
        self._linking: dict[_LinkKey, trio.Event] = {}
        self._problem: _Problem | None = None
        self._pause_reason = ""
        self._is_leaving = False
        self.calls = 0
        self.rows = 0

    def tell(self, event: placement.Event) -> None:
        """Tells the mind something; what it commands is begun at once. Before `run` only what commands nothing."""
        problem = self._problem
        if isinstance(event, placement.HubsKnown) and problem and problem.is_lost and problem.coordinator in event.hubs:
            self._problem = None  # the coordinator, a hub too, is connected again
        self._handle(event)
        self._woken.set()

    async def run(self) -> None:
        """Asks, fetches, serves and leaves, until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            await self._fetcher.run_blocking(self._on_disk.read)
            while True:
                self._woken = trio.Event()
                next_at = self._mind.next_at()
                with trio.move_on_at(math.inf if next_at is None else next_at):
                    await self._woken.wait()
                self._handle(placement.Tick())

    def leave(self) -> None:
        """Gives everything back in good order and takes nothing new, for good. Does not wait."""
        self._is_leaving = True
        self.tell(placement.Paused())

    async def drain(self) -> None:
        """Gives everything back in good order; returns when nothing is held and nobody is left to be told.

        Bounded by the timeouts of its calls, also when hub and coordinator are frozen. Cancel-safe.
        """
        self.leave()
        while self._mind.stages() or self._under_way:
            await self._settled.park()

    def pause(self, reason: str) -> None:
        """Gives everything back in good order and takes nothing new; nothing in flight is dropped. Does not wait."""
        self._pause_reason = reason
        self.tell(placement.Paused())

    def resume(self) -> None:
        self._pause_reason = ""
        if not self._is_leaving:
            self.tell(placement.Resumed())

    def problems(self) -> tuple[str, ...]:
        """What lately kept this worker from work, in words."""
        if self._problem is None or trio.current_time() >= self._problem.until:
            return ()
        return (self._problem.words,)

    # Commands -------------------------------------------------------------------------------------------------

    def _handle(self, event: placement.Event) -> None:
        for command in self._mind.handle(event, trio.current_time()):
            self._begin(command)
        self._tell_lending()

    def _tell_lending(self) -> None:
        lending = LendingChanged(self.state(), len(self._mind.stages()), self._pause_reason)
        if lending != self._lending:
            self._lending = lending
            self._tell_others(lending)

    def _begin(self, command: placement.Command) -> None:
        match command:
            case placement.PollHub(hub):
                self._start(partial(self._poll, hub), placement.PollFailed(hub))
            case placement.RenewLeases(hub, leases):
                failed = [placement.RenewFailed(assignment.lease, hub) for assignment, _ in leases]
                self._start(partial(self._renew, hub, leases), *failed)
            case placement.Release(hub, assignments):
                self._start(partial(self._release, hub, assignments))
            case placement.Drain(assignment):
                step = self._steps.pop(assignment.lease, None)
                if step is not None:
                    step.scope.cancel()
                self._start(partial(self._drain, assignment, step), placement.Drained(assignment.lease))
            case placement.Fetch(assignment):
                self._start_step(assignment, _STEP_FETCH, self._fetch)
            case placement.LoadSlice(assignment):
                self._start_step(assignment, _STEP_LOAD, self._load)
            case placement.Attach(assignment):
                self._start_step(assignment, _STEP_ATTACH, self._attach)

    def _start(self, act: Callable[[], Awaitable[_Events]], *failed: placement.Event) -> None:
        self._start_task(partial(self._carry_out, act, failed))

    def _start_step(self, assignment: Assignment, kind: int, act: Callable[[Assignment], Awaitable[None]]) -> None:
        step = self._steps[assignment.lease] = _Step()
        self._start_task(partial(self._take_step, step, kind, assignment, partial(act, assignment)))

    def _start_task(self, task: Callable[[], Awaitable[_Events]]) -> None:
        async def run() -> None:
            events = await task()
            self._under_way -= 1
            for event in events:
                self.tell(event)
            self._settled.unpark_all()

        assert self._nursery is not None, "only `run` gives commands"
        self._under_way += 1
        self._nursery.start_soon(run)

    async def _carry_out(self, act: Callable[[], Awaitable[_Events]], failed: _Events) -> _Events:
        try:
            return await act()
        except KvasirError as error:
            logger.info("%s", error)
        except Exception:  # a door of the worker: a bug costs one command, not the node
            logger.exception("a bug of ours, followed by %s", failed)
        return failed

    async def _take_step(
        self, step: _Step, kind: int, assignment: Assignment, act: Callable[[], Awaitable[None]]
    ) -> _Events:
        try:
            with step.scope:
                await act()
                self._advance(assignment.lease)
                self._clear_problem(assignment, kind)
                return (placement.StepDone(assignment.lease),)
            return ()  # the lease ended meanwhile
        except KvasirError as error:
            logger.warning("slice %s: %s", assignment.slice, error)
            self._note_problem(assignment, kind, str(error), is_lost=isinstance(error, PeerError))
            retry = isinstance(error, PeerError) and error.retryable
        except Exception as error:  # a door of the worker: a bug costs one lease, not the node
            logger.exception("slice %s: a bug of ours", assignment.slice)
            self._note_problem(assignment, kind, f"a bug of ours, {type(error).__name__}")
            retry = False
        finally:
            step.ended.set()
        return (placement.StepFailed(assignment.lease, retry=retry),)

    def _note_problem(self, assignment: Assignment, kind: int, text: str, *, is_lost: bool = False) -> None:
        words = f"slice {assignment.slice} of this worker: {text}"
        until = trio.current_time() + PROBLEM_SHOWN_S
        self._problem = _Problem(assignment.coordinator, kind, words, until, is_lost)

    def _clear_problem(self, assignment: Assignment, kind: int) -> None:
        """What failed for a coordinator has now succeeded for it, with whichever slice."""
        problem = self._problem
        if problem is not None and problem.coordinator == assignment.coordinator and kind >= problem.kind:
            self._problem = None

    def _advance(self, lease: str) -> None:
        self._progress[lease] = self._progress.get(lease, 0) + 1

    # The market -----------------------------------------------------------------------------------------------

    async def _poll(self, hub: PeerId) -> _Events:
        poll = Poll(
            self.room(),
            have=self._on_disk.pairs(),
            busy=placement.offered(self._mind.stages().values()),
            round_trips=self._round_trips(),
        )
        answer = read_poll_answer(await self._ask_hub(hub, MarketMethod.POLL, poll.to_bytes()))
        if not isinstance(answer, Offer):
            return (placement.NothingOffered(answer.retry_after_s),)
        logger.info("took a lease on slice %s of %s", answer.slice, answer.model)
        assignment = Assignment(
            answer.lease, answer.model, answer.dtype, answer.slice, answer.coordinator, answer.addresses, hub
        )
        return (placement.OfferReceived(assignment, answer.ttl_s),)

    def _round_trips(self) -> tuple[tuple[PeerId, float], ...]:
        """Of everyone we are connected to, as we do not know who of them is a coordinator."""
        delay_s = self._settings.compute.answer_delay_s
        measured = ((each.peer, each.rtt_s) for each in self._transport.connections())
        return tuple((peer, rtt_s + delay_s) for peer, rtt_s in measured if rtt_s is not None)

    def room(self) -> int:
        """Memory that is free when all that is being fetched has come; what a slice of an unknown model takes is
        guessed to be as much as slices may have here."""
        held = self._holdings.leases()
        coming = 0
        for lease, (assignment, stage) in self._mind.stages().items():
            if lease not in held and stage is not Stage.DRAINING:
                known = self._holdings.bytes_of(assignment.model, assignment.dtype, assignment.slice.count)
                coming += self._settings.market.slice_bytes if known is None else known
        return max(0, self._settings.worker.memory_bytes - self._holdings.reserved_bytes - coming)

    async def _renew(self, hub: PeerId, leases: Sequence[tuple[Assignment, bool]]) -> _Events:
        request = Renewals(tuple(self._renewal(assignment, serving) for assignment, serving in leases))
        verdicts = Verdicts.from_bytes(await self._ask_hub(hub, MarketMethod.RENEW, request.to_bytes())).verdicts
        if len(verdicts) != len(leases):
            raise Misbehaved(
                RejectReason.BAD_MESSAGE, f"hub {hub} answered {len(leases)} renewals with {len(verdicts)} verdicts"
            )
        for (assignment, _), verdict in zip(leases, verdicts, strict=True):
            if verdict.ttl_s <= 0:
                logger.info("the lease on slice %s ends: %s", assignment.slice, verdict.reason)
        return tuple(
            placement.Renewed(assignment.lease, verdict.ttl_s)
            for (assignment, _), verdict in zip(leases, verdicts, strict=True)
        )

    async def _release(self, hub: PeerId, assignments: Sequence[Assignment]) -> _Events:
        """A hub that is not told loses nothing: the leases expire by themselves."""
        request = Renewals(tuple(self._renewal(assignment, serving=False) for assignment in assignments))
        await self._ask_hub(hub, MarketMethod.RELEASE, request.to_bytes())
        return ()

    def _renewal(self, assignment: Assignment, serving: bool) -> Renewal:
        progress = self._progress.get(assignment.lease, 0)
        return Renewal(assignment.lease, assignment.model, assignment.slice, assignment.coordinator, serving, progress)

    # Fetch, load, attach, leave -------------------------------------------------------------------------------

    async def _fetch(self, assignment: Assignment) -> None:
        await self._reach(assignment)
        self._fetched[assignment.lease] = await self._fetcher.fetch_slice(
            (assignment.coordinator,),
            assignment.model,
            assignment.slice,
            progress=lambda *_: self._advance(assignment.lease),
            owner=assignment.lease,
        )
        if self._on_disk.add(assignment.model, assignment.slice):
            async with self._noting:
                await self._fetcher.run_blocking(self._on_disk.write)

    async def _reach(self, assignment: Assignment) -> None:
        """Connected to the coordinator, and both sides have proved that they are of one swarm."""
        coordinator = assignment.coordinator
        if not any(connection.peer == coordinator for connection in self._transport.connections()):
            await self._transport.connect([a for a in assignment.addresses if a.endswith(f"/p2p/{coordinator}")])
        await self._require_member(coordinator)

    async def _load(self, assignment: Assignment) -> None:
        manifest, experts = self._fetched.pop(assignment.lease)
        await self._holdings.load(assignment.lease, assignment.model, assignment.dtype, manifest, experts)

    async def _attach(self, assignment: Assignment) -> None:
        await self._reach(assignment)
        link = await self._link_to(assignment)
        await link.attach(assignment)

    async def _link_to(self, assignment: Assignment) -> Link:
        """The link that all slices of one coordinator share; opened by the first that needs it."""
        key = _link_key(assignment)
        while key in self._linking:
            await self._linking[key].wait()
        if key in self._links:
            return self._links[key]
        link = Link(
            *key,
            self._holdings.shard(assignment.model, assignment.dtype),
            body_bytes_max=self._settings.network.frame_bytes_max,
            in_flight_max=self._settings.fanout.in_flight_max,
            compute=self._compute,
            run_blocking=self._run_blocking,
            computed=self._count,
            standing_told=self._on_standing,
            answer_delay_s=self._settings.compute.answer_delay_s,
            express=self._settings.fanout.express,
        )
        self._linking[key] = trio.Event()
        try:
            await link.open(self._transport)
        finally:
            self._linking.pop(key).set()
        self._links[key] = link
        assert self._nursery is not None
        self._nursery.start_soon(link.run, self._link_ended)
        return link

    def _link_ended(self, link: Link) -> None:
        self._forget_link(link)
        for lease in link.leases():
            self.tell(placement.CoordinatorLost(lease))

    def _forget_link(self, link: Link) -> None:
        """At once: whoever attaches next opens a new one."""
        key = (link.coordinator, link.model, link.dtype)
        if self._links.get(key) is link:
            del self._links[key]

    def _on_standing(self, told: placement.StandingTold) -> None:
        if told.proven:
            self._problem = None
        self.tell(told)

    def _count(self, rows: int) -> None:
        self.calls += 1
        self.rows += rows

    async def _drain(self, assignment: Assignment, step: _Step | None) -> _Events:
        """Orderly: tell the coordinator, answer what is still on its way, then forget the weights."""
        if step is not None:
            await step.ended.wait()
        link = self._links.get(_link_key(assignment))
        try:
            if link is not None and await link.detach(assignment):
                await trio.sleep(UNLOAD_GRACE_S)
                with trio.move_on_after(FINISH_CALLS_S):
                    await link.finish_calls()
        finally:
            self._holdings.drop(assignment.lease, assignment.model, assignment.dtype)
            self._fetched.pop(assignment.lease, None)
            self._fetcher.store.unpin(assignment.lease)
            self._progress.pop(assignment.lease, None)
            if link is not None and not link.leases():
                self._forget_link(link)
                link.close()
        logger.info("left slice %s", assignment.slice)
        return (placement.Drained(assignment.lease),)

    def state(self) -> str:
        present = {stage for _, stage in self._mind.stages().values()}
        if self._mind.paused and not present:
            return "paused"
        return next((str(stage) for stage in _STATE_ORDER if stage in present), "idle")

    def snapshot(self) -> WorkerSnapshot:
        stages = self._mind.stages()
        loaded = [a for a, stage in stages.values() if stage in (Stage.TRIAL, Stage.SERVING)]
        return WorkerSnapshot(
            state=self.state(),
            reason=self._pause_reason,
            leases=tuple(sorted(stages)),
            slices=tuple(str(a.slice) for a in sorted(loaded, key=lambda a: a.slice)),
            calls=self.calls,
            rows=self.rows,
            bytes_fetched=self._fetcher.tally.bytes_fetched,
            bytes_reused=self._fetcher.tally.bytes_reused,
        )


def _link_key(assignment: Assignment) -> _LinkKey:
    return assignment.coordinator, assignment.model, assignment.dtype
