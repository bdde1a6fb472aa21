"""What the worker's mind hears and what it asks for: plain values, one class each.

It does not know what follows from them: that is decide/placement.py. An event tells what has happened; a command is
the mind's only way to the outer world, and roles/worker.py carries it out.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvasir_node.base.ids import ModelId, PeerId, SliceId


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
    dtype: str  # to compute in
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
    """Copies that gossiped tables say are open, over all slices that would fit in here, and how many nodes are idle."""

    open_copies: int
    idle: int = 0


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
    """... or has failed; `retry` = through a peer. Attaching is tried again then, else the lease is given back."""

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
class RenewLeases:
    """All leases that this hub renews, each with whether it serves; answer each with Renewed or RenewFailed."""

    hub: PeerId
    leases: tuple[tuple[Assignment, bool], ...]


@dataclass(frozen=True, slots=True)
class Drain:
    """Tell the coordinator, finish what is in flight, unload; answer with Drained."""

    assignment: Assignment


@dataclass(frozen=True, slots=True)
class Release:
    hub: PeerId
    assignments: tuple[Assignment, ...]


Command = PollHub | Fetch | LoadSlice | Attach | RenewLeases | Drain | Release
