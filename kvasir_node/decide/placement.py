"""The worker's mind: when to ask the market, what to do with a lease, and when to leave.

Nobody sends it anywhere: it asks, and every step is its own. It does not know how blocks are fetched, where weights
lie or how a coordinator is reached: `handle` takes an event and returns commands, roles/worker.py carries them out.

    (offer) FETCHING -> LOADING -> TRIAL -> SERVING -> DRAINING -> gone
    lost coordinator: back to TRIAL, connecting again with growing pauses until patience ends, or the lease if the
    slice was not proven: of one that was, the coordinator remembers the proof, and an outage may be our own
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from kvasir_node.base.ids import ModelId, PeerId, SliceId
from kvasir_node.decide.placement_events import (
    Assignment,
    Attach,
    Command,
    CoordinatorLost,
    DemandSeen,
    Drain,
    Drained,
    Event,
    Fetch,
    HubsKnown,
    LoadSlice,
    NothingOffered,
    OfferReceived,
    Paused,
    PollFailed,
    PollHub,
    Release,
    Renewed,
    RenewFailed,
    RenewLeases,
    Resumed,
    Stage,
    StandingTold,
    StepDone,
    StepFailed,
    Tick,
)

__all__ = [
    "Assignment",
    "Attach",
    "Chance",
    "Command",
    "CoordinatorLost",
    "DemandSeen",
    "Drain",
    "Drained",
    "Event",
    "Fetch",
    "HubsKnown",
    "LoadSlice",
    "NothingOffered",
    "OfferReceived",
    "Paused",
    "Placement",
    "PlacementLimits",
    "PollFailed",
    "PollHub",
    "Release",
    "RenewFailed",
    "RenewLeases",
    "Renewed",
    "Resumed",
    "Stage",
    "StandingTold",
    "StepDone",
    "StepFailed",
    "Tick",
    "offered",
]


class Chance(Protocol):
    """A seeded source of chance, such as random.Random."""

    def uniform(self, a: float, b: float, /) -> float: ...


@dataclass(frozen=True, slots=True)
class PlacementLimits:
    slices_max: int
    poll_interval_s: float
    renew_interval_s: float
    attach_pause_s: float = 0.5  # before the first new attempt; doubles ...
    attach_pause_max_s: float = 8.0  # ... up to this
    attach_patience_s: float = 60.0  # without a coordinator this long, the lease is given back
    idle_poll_factor: float = 5.0  # polls are this much rarer while tables say that nothing is wanted
    table_ttl_s: float = 30.0  # after this long without a table nothing is known
    retry_max_s: float = 600.0  # a hub that asks for more patience than this gets this much
    failure_pause_max_s: float = 300.0  # polls pause after a failed fetch or load: an interval, doubling, up to this
    crowd_polls_s: float = 300.0  # when demand appears, all idle nodes together poll at most this often ...
    askers_per_copy: float = 3.0  # ... and in a poll interval about so many of them for each copy that is open ...
    askers_min: float = 16.0  # ... or this many, if that is more
    renewals_max: int = 256  # leases in one message
    hubs_per_round: int = 4  # hubs that are asked, in turn, in the time that one hub wants to be left alone


@dataclass(slots=True)
class _Held:
    assignment: Assignment
    stage: Stage
    hub: PeerId  # that renews the lease: who granted it, until it fails to answer
    expires_at: float
    renew_at: float
    attaching: bool = False  # an attempt is under way
    lost_meanwhile: bool = False  # ... and the coordinator was lost since it began
    attach_at: float | None = None  # when to try to attach again
    attach_pause_s: float = 0.0
    lost_at: float | None = None
    is_proven: bool = False  # by the coordinator's last word
    is_renewing: bool = False  # a hub was asked and has not answered: two that renew one lease would count it twice
    unanswered: bool = False  # no hub has answered the latest renewal


class Placement:
    """Leases of one worker and the times of its next acts. The same events give the same commands, given `chance`."""

    def __init__(self, limits: PlacementLimits, chance: Chance) -> None:
        self._limits = limits
        self._chance = chance
        self._held: dict[str, _Held] = {}
        self._hubs: tuple[PeerId, ...] = ()
        self._asked: PeerId | None = None  # by the poll that is under way
        self._poll_at = 0.0
        self._failures = 0  # fetches and loads that failed through no peer, since a slice of ours was proven
        self._no_poll_before = 0.0  # because of them
        self._rest_at = 0.0  # when to poll if no demand had appeared
        self._open_copies: int | None = None
        self._acted_on = 0  # open copies that our next poll was moved forward for
        self._idle = 0  # nodes that would poll with us
        self._table_at = float("-inf")
        self._paused = False

    @property
    def paused(self) -> bool:
        return self._paused

    def stages(self) -> dict[str, tuple[Assignment, Stage]]:
        return {lease: (held.assignment, held.stage) for lease, held in self._held.items()}

    def next_at(self) -> float | None:
        """When `Tick` must come at the latest; None = only an event can change anything."""
        at = max(self._poll_at, self._no_poll_before) if self._may_poll() else math.inf
        for held in self._held.values():
            if held.stage is not Stage.DRAINING:
                at = at if held.is_renewing else min(at, held.renew_at)
                at = at if held.is_proven else min(at, held.expires_at)
                at = at if held.attach_at is None else min(at, held.attach_at)
        return None if at == math.inf else at

    def handle(self, event: Event, now: float) -> list[Command]:
        """Takes one event; returns what must be done about it, in order."""
        match event:
            case HubsKnown(hubs):
                self._on_hubs(hubs, now)
            case DemandSeen(open_copies, idle):
                self._on_demand(open_copies, idle, now)
            case OfferReceived(assignment, ttl_s):
                return self._on_offer(assignment, ttl_s, now)
            case NothingOffered(retry_after_s):
                self._on_nothing_offered(retry_after_s, now)
            case PollFailed(hub):
                self._on_poll_failed(hub, now)
            case Paused():
                self._paused = True
                return self._drain_all()
            case Resumed():
                self._paused = False
                self._poll_at = now
            case Tick():
                return self._on_tick(now)
            case _:
                held = self._held.get(event.lease)
                return [] if held is None else self._on_lease_event(held, event, now)
        return []

    # Polls ----------------------------------------------------------------------------------------------------

    def _may_poll(self) -> bool:
        wants_more = not self._paused and len(self._held) < self._limits.slices_max
        return wants_more and bool(self._hubs) and self._asked is None

    def _pause_min_s(self, now: float) -> float:
        """Between two polls: much, when a fresh table says that nothing is wanted."""
        known = now - self._table_at < self._limits.table_ttl_s
        return self._limits.poll_interval_s * self._limits.idle_poll_factor if known and self._open_copies == 0 else 0.0

    def _spread_s(self) -> float:
        """Within how long to poll when there is reason to: a crowd takes as long as its hub needs."""
        return max(0.25 * self._limits.poll_interval_s, self._idle / self._limits.crowd_polls_s)

    def _on_hubs(self, hubs: tuple[PeerId, ...], now: float) -> None:
        """New hubs are asked first; the others keep their turn. One that came (back) hears soon of leases that none
        has renewed, or that were its own: it may have been restarted and know nothing."""
        if hubs and not self._hubs:
            self._poll_at = self._rest_at = now + self._chance.uniform(0, self._spread_s())
        known, came = self._hubs, [hub for hub in hubs if hub not in self._hubs]
        self._hubs = (*came, *(hub for hub in known if hub in hubs))
        for held in self._held.values():
            if self._hubs and held.hub not in self._hubs:
                held.hub = self._hubs[0]  # and stays with it: two hubs that renew one lease would count it twice
            soon_at = now + self._chance.uniform(0, 0.25) * self._limits.renew_interval_s if came else math.inf
            if held.unanswered or held.hub in came:
                held.renew_at = min(held.renew_at, soon_at)
            if held.attach_at is not None:  # the way to a lost coordinator may be back with it
                held.attach_at = min(held.attach_at, soon_at)

    def _on_demand(self, open_copies: int, idle: int, now: float) -> None:
        """Demand appeared, or has become much more: some of all idle nodes poll soon, as many as are needed; when it is
        met before our turn comes, we go back to rest."""
        limits = self._limits
        self._open_copies, self._idle, self._table_at = open_copies, idle, now
        if open_copies > 2 * self._acted_on:
            askers = max(limits.askers_min, limits.askers_per_copy * open_copies)
            spread_s = max(self._spread_s(), limits.poll_interval_s * idle / askers)
            self._poll_at = min(self._poll_at, now + self._chance.uniform(0, spread_s))
            self._acted_on = open_copies
        elif not open_copies:
            self._poll_at, self._acted_on = max(self._poll_at, self._rest_at), 0

    def _on_nothing_offered(self, retry_after_s: float, now: float) -> None:
        """The hub says when to ask again; within reason, so that it can neither drive us nor silence us.

        Another hub may know of other demand, so the hubs are asked in turn.
        """
        if self._asked is not None:
            self._put_last(self._asked)
        self._asked = None
        retry_s = min(max(retry_after_s, self._limits.poll_interval_s / 10), self._limits.retry_max_s)
        turns = max(1, min(len(self._hubs), self._limits.hubs_per_round))
        pause_s = max(retry_s, self._pause_min_s(now)) / turns
        self._poll_at = self._rest_at = now + pause_s * self._chance.uniform(0.75, 1.25)

    def _on_offer(self, assignment: Assignment, ttl_s: float, now: float) -> list[Command]:
        # The next slice may be open too: ask again soon, while this one is being fetched.
        self._asked = None
        self._poll_at = self._rest_at = now + self._chance.uniform(0.05, 0.15) * self._limits.poll_interval_s
        namesake = self._held.get(assignment.lease)
        if namesake is not None and namesake.hub == assignment.hub:
            return []  # giving it back would end the lease that we hold
        taken = {(held.assignment.model, held.assignment.slice) for held in self._held.values()}
        full = len(self._held) >= self._limits.slices_max
        if self._paused or full or namesake is not None or (assignment.model, assignment.slice) in taken:
            return [Release(assignment.hub, (assignment,))]
        self._held[assignment.lease] = _Held(
            assignment, Stage.FETCHING, assignment.hub, now + ttl_s, self._renewal_due(ttl_s, now)
        )
        return [Fetch(assignment)]

    def _on_poll_failed(self, hub: PeerId, now: float) -> None:
        self._asked = None
        self._put_last(hub)
        self._poll_at = self._rest_at = now + self._limits.poll_interval_s * self._chance.uniform(0.5, 1.5)

    def _put_last(self, hub: PeerId) -> None:
        """What is asked next goes to another hub, if there is one."""
        if hub in self._hubs:
            self._hubs = (*(h for h in self._hubs if h != hub), hub)

    # One lease ------------------------------------------------------------------------------------------------

    def _on_lease_event(self, held: _Held, event: Event, now: float) -> list[Command]:
        lease = held.assignment.lease
        match event:
            case StepDone():
                return self._on_step_done(held, now)
            case StepFailed(_, retry):
                return self._on_step_failed(held, now, retry=retry)
            case StandingTold(_, proven):
                if held.stage in (Stage.TRIAL, Stage.SERVING):
                    held.stage = Stage.SERVING if proven else Stage.TRIAL
                    held.is_proven = proven
                    self._failures = 0 if proven else self._failures
            case CoordinatorLost():
                return self._on_coordinator_lost(held, now)
            case Renewed(_, ttl_s):
                held.is_renewing = False
                if ttl_s <= 0:
                    return self._start_drain(lease, release=False)
                held.expires_at, held.unanswered = now + ttl_s, False
                held.renew_at = min(held.renew_at, self._renewal_due(ttl_s, now))
            case RenewFailed(_, hub):
                self._put_last(hub)
                held.is_renewing, held.unanswered = False, True
                if self._hubs and (hub == held.hub or held.hub not in self._hubs):
                    held.hub = self._hubs[0]
                held.renew_at = min(held.renew_at, now + self._limits.renew_interval_s / 3)
            case Drained():
                del self._held[lease]
                # A worker that was let go has room again, but does not ask for the same slice at once.
                self._poll_at = max(self._poll_at, now + self._chance.uniform(1, 1.5) * self._limits.poll_interval_s)
                self._rest_at = self._poll_at
            case _:
                pass
        return []

    def _renewal_due(self, ttl_s: float, now: float) -> float:
        """Often enough that one renewal may fail, however short the hub's leases are."""
        interval_s = self._limits.renew_interval_s
        return now + min(interval_s, max(ttl_s / 3, interval_s / 10))

    def _on_step_done(self, held: _Held, now: float) -> list[Command]:
        match held.stage:
            case Stage.FETCHING:
                held.stage = Stage.LOADING
                return [LoadSlice(held.assignment)]
            case Stage.LOADING:
                held.stage = Stage.TRIAL
                return [self._attach(held)]
            case Stage.TRIAL | Stage.SERVING:
                held.attaching = False
                if held.lost_meanwhile:
                    return self._retry_attach(held, now)
                held.attach_pause_s, held.lost_at = 0.0, None
            case Stage.DRAINING:
                pass
        return []

    def _on_step_failed(self, held: _Held, now: float, *, retry: bool) -> list[Command]:
        if held.stage in (Stage.TRIAL, Stage.SERVING):
            held.attaching = False
            if retry:
                return self._retry_attach(held, now)
        elif held.stage in (Stage.FETCHING, Stage.LOADING):
            # A peer's fault, such as a coordinator that died, is no reason to keep away from all others for long.
            doublings = 0 if retry else min(self._failures, 32)
            pause_s = self._limits.poll_interval_s * 2.0**doublings
            self._no_poll_before = now + min(self._limits.failure_pause_max_s, pause_s)
            self._failures += not retry
        return self._start_drain(held.assignment.lease, release=True)

    def _on_coordinator_lost(self, held: _Held, now: float) -> list[Command]:
        if held.stage not in (Stage.TRIAL, Stage.SERVING):
            return []
        held.stage = Stage.TRIAL
        if held.attaching:  # how the attempt ends is still to be told
            held.lost_meanwhile = True
            return []
        return self._retry_attach(held, now)

    def _attach(self, held: _Held) -> Attach:
        held.attaching, held.lost_meanwhile, held.attach_at = True, False, None
        return Attach(held.assignment)

    def _retry_attach(self, held: _Held, now: float) -> list[Command]:
        limits = self._limits
        held.stage, held.lost_meanwhile = Stage.TRIAL, False
        if held.lost_at is None:
            held.lost_at = now
        if now - held.lost_at > limits.attach_patience_s:
            return self._start_drain(held.assignment.lease, release=True)
        if held.attach_at is None:
            pause_s = max(limits.attach_pause_s, 2 * held.attach_pause_s)
            held.attach_pause_s = min(limits.attach_pause_max_s, pause_s)
            held.attach_at = now + held.attach_pause_s * self._chance.uniform(0.75, 1.25)
        return []

    def _start_drain(self, lease: str, *, release: bool) -> list[Command]:
        held = self._held[lease]
        if held.stage is Stage.DRAINING:
            return []
        held.stage, held.attach_at = Stage.DRAINING, None
        commands: list[Command] = [Drain(held.assignment)]
        if release:
            commands.append(Release(self._hub_of(held), (held.assignment,)))
        return commands

    def _drain_all(self) -> list[Command]:
        leaving = [held for held in self._held.values() if held.stage is not Stage.DRAINING]
        commands = [c for held in leaving for c in self._start_drain(held.assignment.lease, release=False)]
        for hub, group in self._by_hub(leaving):
            commands.append(Release(hub, tuple(held.assignment for held in group)))
        return commands

    def _by_hub(self, leases: Iterable[_Held]) -> Iterator[tuple[PeerId, list[_Held]]]:
        """What one message tells one hub: of all these leases, or of as many as fit."""
        groups: dict[PeerId, list[_Held]] = {}
        for held in leases:
            groups.setdefault(self._hub_of(held), []).append(held)
        for hub, group in groups.items():
            for at in range(0, len(group), self._limits.renewals_max):
                yield hub, group[at : at + self._limits.renewals_max]

    def _hub_of(self, held: _Held) -> PeerId:
        """The hub that renews the lease while it is there, else the first that is."""
        return held.hub if held.hub in self._hubs or not self._hubs else self._hubs[0]

    # Time -----------------------------------------------------------------------------------------------------

    def _on_tick(self, now: float) -> list[Command]:
        commands = self._look_after_leases(now) if self._held else []
        if self._may_poll() and now >= max(self._poll_at, self._no_poll_before):
            self._asked = self._hubs[0]
            commands.append(PollHub(self._asked))
        return commands

    def _look_after_leases(self, now: float) -> list[Command]:
        commands: list[Command] = []
        for lease, held in self._held.items():
            # Of a proven slice a hub must say that its lease has ended: silence may be our own absence.
            if held.stage is not Stage.DRAINING and now >= held.expires_at and not held.is_proven:
                commands += self._start_drain(lease, release=False)
        active = [held for held in self._held.values() if held.stage is not Stage.DRAINING]
        commands += self._renew(active, now)
        commands += [self._attach(held) for held in active if held.attach_at is not None and now >= held.attach_at]
        return commands

    def _renew(self, active: list[_Held], now: float) -> Iterator[Command]:
        """When one lease is due, all that its hub renews go along: many then cost what one does, and stay in step."""
        active = [held for held in active if not held.is_renewing]
        due = {self._hub_of(held) for held in active if now >= held.renew_at}
        for hub, group in self._by_hub(held for held in active if self._hub_of(held) in due):
            for held in group:
                held.renew_at, held.is_renewing = now + self._limits.renew_interval_s, True
            yield RenewLeases(hub, tuple((held.assignment, held.stage is Stage.SERVING) for held in group))


def offered(held: Iterable[tuple[Assignment, Stage]]) -> tuple[tuple[ModelId, SliceId], ...]:
    """What a poll must list as busy."""
    return tuple((assignment.model, assignment.slice) for assignment, _ in held)
