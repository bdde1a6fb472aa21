"""The worker's mind: when to ask the market, what to do with a lease, and when to leave.

Nobody sends it anywhere: it asks, and every step is its own. It does not know how blocks are fetched, where weights
lie or how a coordinator is reached: `handle` takes an event and returns commands, roles/worker.py carries them out.

    (offer) FETCHING -> LOADING -> TRIAL -> SERVING -> DRAINING -> gone
    lost coordinator: back to TRIAL, connecting again with growing pauses until the lease or patience ends
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kvasir_node.base.ids import ModelId, PeerId, SliceId


class Chance(Protocol):
    """A seeded source of chance, such as random.Random."""

    def uniform(self, a: float, b: float, /) -> float: ...


class Stage(StrEnum):
    FETCHING = "fetching"
    LOADING = "loading"
    TRIAL = "trial"
    SERVING = "serving"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Assignment:
    """A lease as the worker holds it."""

    lease: str
    model: ModelId
    slice: SliceId
    coordinator: PeerId
    addresses: tuple[str, ...]
    hub: PeerId


# Events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HubsKnown:
    """The hubs that are connected now."""

    hubs: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class DemandSeen:
    """Copies that gossiped tables say are open, over all slices."""

    open_copies: int


@dataclass(frozen=True, slots=True)
class OfferReceived:
    assignment: Assignment
    ttl_s: float


@dataclass(frozen=True, slots=True)
class NothingOffered:
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class PollFailed:
    hub: PeerId


@dataclass(frozen=True, slots=True)
class StepDone:
    """The fetch, load or attach that was commanded is done."""

    lease: str


@dataclass(frozen=True, slots=True)
class StepFailed:
    """... or has failed; `retry` = the same step may succeed later (a lost peer), else the lease is given back."""

    lease: str
    retry: bool


@dataclass(frozen=True, slots=True)
class StandingTold:
    """The coordinator counts this slice of ours as proven, or no longer."""

    lease: str
    proven: bool


@dataclass(frozen=True, slots=True)
class CoordinatorLost:
    lease: str


@dataclass(frozen=True, slots=True)
class Renewed:
    """`ttl_s` 0 = the lease has ended."""

    lease: str
    ttl_s: float


@dataclass(frozen=True, slots=True)
class RenewFailed:
    """The hub did not answer; the lease goes on until it expires, through another hub if there is one."""

    lease: str
    hub: PeerId


@dataclass(frozen=True, slots=True)
class Drained:
    lease: str


@dataclass(frozen=True, slots=True)
class Paused:
    """Take nothing new and drain what is there (a user's wish, or our own coordinator is busy)."""


@dataclass(frozen=True, slots=True)
class Resumed:
    pass


@dataclass(frozen=True, slots=True)
class Tick:
    pass


Event = (
    HubsKnown
    | DemandSeen
    | OfferReceived
    | NothingOffered
    | PollFailed
    | StepDone
    | StepFailed
    | StandingTold
    | CoordinatorLost
    | Renewed
    | RenewFailed
    | Drained
    | Paused
    | Resumed
    | Tick
)

# Commands -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PollHub:
    hub: PeerId


@dataclass(frozen=True, slots=True)
class Fetch:
    assignment: Assignment


@dataclass(frozen=True, slots=True)
class LoadSlice:
    assignment: Assignment


@dataclass(frozen=True, slots=True)
class Attach:
    assignment: Assignment


@dataclass(frozen=True, slots=True)
class RenewLease:
    hub: PeerId
    assignment: Assignment
    serving: bool


@dataclass(frozen=True, slots=True)
class Drain:
    """Tell the coordinator, finish what is in flight, unload; answer with Drained."""

    assignment: Assignment


@dataclass(frozen=True, slots=True)
class Release:
    hub: PeerId
    assignment: Assignment


Command = PollHub | Fetch | LoadSlice | Attach | RenewLease | Drain | Release


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


@dataclass(slots=True)
class _Held:
    assignment: Assignment
    stage: Stage
    expires_at: float
    renew_at: float
    attach_at: float | None = None  # when to try to attach again
    attach_pause_s: float = 0.0
    lost_at: float | None = None


class Placement:
    """Leases of one worker and the times of its next acts. The same events give the same commands, given `chance`."""

    def __init__(self, limits: PlacementLimits, chance: Chance) -> None:
        self._limits = limits
        self._chance = chance
        self._held: dict[str, _Held] = {}
        self._hubs: tuple[PeerId, ...] = ()
        self._poll_at: float | None = None  # None = a poll is under way, or there is no hub
        self._open_copies: int | None = None
        self._table_at = float("-inf")
        self._paused = False

    @property
    def paused(self) -> bool:
        return self._paused

    def stages(self) -> dict[str, tuple[Assignment, Stage]]:
        return {lease: (held.assignment, held.stage) for lease, held in self._held.items()}

    def next_at(self) -> float | None:
        """When `Tick` must come at the latest; None = only an event can change anything."""
        moments = [held.renew_at for held in self._held.values() if held.stage is not Stage.DRAINING]
        moments += [held.expires_at for held in self._held.values() if held.stage is not Stage.DRAINING]
        moments += [held.attach_at for held in self._held.values() if held.attach_at is not None]
        if self._poll_at is not None and self._wants_more():
            moments.append(self._poll_at)
        return min(moments, default=None)

    def handle(self, event: Event, now: float) -> list[Command]:
        """Takes one event; returns what must be done about it, in order."""
        match event:
            case HubsKnown(hubs):
                return self._on_hubs(hubs, now)
            case DemandSeen(open_copies):
                self._on_demand(open_copies, now)
            case OfferReceived(assignment, ttl_s):
                return self._on_offer(assignment, ttl_s, now)
            case NothingOffered(retry_after_s):
                self._poll_at = now + retry_after_s * self._chance.uniform(0.75, 1.25) * self._rarity(now)
            case PollFailed(hub):
                self._on_poll_failed(hub, now)
            case Paused():
                self._paused = True
                return [c for lease in list(self._held) for c in self._start_drain(lease, release=True)]
            case Resumed():
                self._paused = False
                self._poll_at = now if self._hubs else None
            case Tick():
                return self._on_tick(now)
            case _:
                held = self._held.get(event.lease)
                return [] if held is None else self._on_lease_event(held, event, now)
        return []

    def _wants_more(self) -> bool:
        return not self._paused and bool(self._hubs) and len(self._held) < self._limits.slices_max

    def _rarity(self, now: float) -> float:
        """How much rarer than usual to poll: much, when a fresh table says that nothing is wanted."""
        known = now - self._table_at < self._limits.table_ttl_s
        return self._limits.idle_poll_factor if known and self._open_copies == 0 else 1.0

    def _on_hubs(self, hubs: tuple[PeerId, ...], now: float) -> list[Command]:
        had = bool(self._hubs)
        self._hubs = hubs
        if hubs and not had:
            self._poll_at = now + self._chance.uniform(0, 0.25) * self._limits.poll_interval_s
        elif not hubs:
            self._poll_at = None
        return []

    def _on_demand(self, open_copies: int, now: float) -> None:
        """Demand appeared: poll soon, but not all idle nodes at once."""
        rose = open_copies > 0 and not self._open_copies
        self._open_copies, self._table_at = open_copies, now
        if rose and self._poll_at is not None:
            soon = now + self._chance.uniform(0, 0.25) * self._limits.poll_interval_s
            self._poll_at = min(self._poll_at, soon)

    def _on_offer(self, assignment: Assignment, ttl_s: float, now: float) -> list[Command]:
        # The next slice may be open too: ask again soon, while this one is being fetched.
        self._poll_at = now + self._chance.uniform(0.05, 0.15) * self._limits.poll_interval_s
        taken = {(held.assignment.model, held.assignment.slice) for held in self._held.values()}
        if self._paused or len(self._held) >= self._limits.slices_max or (assignment.model, assignment.slice) in taken:
            return [Release(assignment.hub, assignment)]
        renew_at = now + self._limits.renew_interval_s
        self._held[assignment.lease] = _Held(assignment, Stage.FETCHING, now + ttl_s, renew_at)
        return [Fetch(assignment)]

    def _on_poll_failed(self, hub: PeerId, now: float) -> None:
        if hub in self._hubs and len(self._hubs) > 1:  # the next poll goes to another one
            self._hubs = (*(h for h in self._hubs if h != hub), hub)
        self._poll_at = now + self._limits.poll_interval_s * self._chance.uniform(0.5, 1.5) if self._hubs else None

    def _on_lease_event(self, held: _Held, event: Event, now: float) -> list[Command]:
        lease = held.assignment.lease
        match event:
            case StepDone():
                return self._on_step_done(held)
            case StepFailed(_, retry):
                if retry and held.stage is Stage.TRIAL:
                    return self._retry_attach(held, now)
                return self._start_drain(lease, release=True)
            case StandingTold(_, proven):
                if held.stage in (Stage.TRIAL, Stage.SERVING):
                    held.stage = Stage.SERVING if proven else Stage.TRIAL
            case CoordinatorLost():
                if held.stage in (Stage.TRIAL, Stage.SERVING):
                    return self._retry_attach(held, now)
            case Renewed(_, ttl_s):
                if ttl_s <= 0:
                    return self._start_drain(lease, release=False)
                held.expires_at = now + ttl_s
            case RenewFailed(_, hub):
                if hub in self._hubs and len(self._hubs) > 1:
                    self._hubs = (*(h for h in self._hubs if h != hub), hub)
                held.renew_at = min(held.renew_at, now + self._limits.renew_interval_s / 3)
            case Drained():
                del self._held[lease]
                # A worker that was let go has room again.
                if self._poll_at is None and self._hubs:
                    self._poll_at = now + self._limits.poll_interval_s
            case _:
                pass
        return []

    def _on_step_done(self, held: _Held) -> list[Command]:
        if held.stage is Stage.FETCHING:
            held.stage = Stage.LOADING
            return [LoadSlice(held.assignment)]
        if held.stage is Stage.LOADING:
            held.stage = Stage.TRIAL
            return [Attach(held.assignment)]
        if held.stage is Stage.TRIAL:
            held.attach_at, held.attach_pause_s, held.lost_at = None, 0.0, None
        return []

    def _retry_attach(self, held: _Held, now: float) -> list[Command]:
        held.stage = Stage.TRIAL
        if held.lost_at is None:
            held.lost_at = now
        if now - held.lost_at > self._limits.attach_patience_s:
            return self._start_drain(held.assignment.lease, release=True)
        held.attach_pause_s = min(
            self._limits.attach_pause_max_s, max(self._limits.attach_pause_s, 2 * held.attach_pause_s)
        )
        held.attach_at = now + held.attach_pause_s * self._chance.uniform(0.75, 1.25)
        return []

    def _start_drain(self, lease: str, *, release: bool) -> list[Command]:
        held = self._held[lease]
        if held.stage is Stage.DRAINING:
            return []
        held.stage, held.attach_at = Stage.DRAINING, None
        commands: list[Command] = [Drain(held.assignment)]
        if release:
            commands.append(Release(self._hub_for(held.assignment), held.assignment))
        return commands

    def _hub_for(self, assignment: Assignment) -> PeerId:
        """The hub that granted the lease while it is there, else the first that is."""
        return assignment.hub if assignment.hub in self._hubs or not self._hubs else self._hubs[0]

    def _on_tick(self, now: float) -> list[Command]:
        commands: list[Command] = []
        for lease, held in list(self._held.items()):
            if held.stage is Stage.DRAINING:
                continue
            if now >= held.expires_at:
                commands += self._start_drain(lease, release=False)
                continue
            if now >= held.renew_at:
                held.renew_at = now + self._limits.renew_interval_s
                serving = held.stage is Stage.SERVING
                commands.append(RenewLease(self._hub_for(held.assignment), held.assignment, serving))
            if held.attach_at is not None and now >= held.attach_at:
                held.attach_at = None
                commands.append(Attach(held.assignment))
        if self._poll_at is not None and now >= self._poll_at and self._wants_more():
            self._poll_at = None
            commands.append(PollHub(self._hubs[0]))
        return commands


def offered(held: Iterable[tuple[Assignment, Stage]]) -> tuple[tuple[ModelId, SliceId], ...]:
    """What a poll must list as busy."""
    return tuple((assignment.model, assignment.slice) for assignment, _ in held)
