"""What a hub's mind keeps of each slice, and an index of those that need copies.

It does not judge: that is decide/market.py. A `Book` is one slice of one coordinator: what is wanted, who is proven,
the leases that this hub knows, and how many unproven ones other hubs have told of.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvasir_node.base.ids import ModelId, PeerId, SliceId
from kvasir_node.decide.demand import Wanted

Key = tuple[PeerId, ModelId, SliceId]  # (coordinator, model, slice)
PROOF_TIMES = 64  # leases whose time until proof is remembered ...
PROOF_TIMES_MIN = 8  # ... and needed, before they say what is usual
MISSED_FACTOR = 1.25  # a renewal is missed this × the longest time between two after the last one
LATE_FACTOR = 1.5  # a lease is late after this × the time in which nine of ten were proven
TOLD_TTL_S = 30.0  # three heartbeats of a hub
Rank = tuple[bool, float, int]  # ours to fill, share of the copies wanted that is open, copies open


@dataclass(frozen=True, slots=True)
class MarketLimits:
    lease_ttl_s: float
    progress_timeout_s: float  # without progress an unproven lease ends; about ten times this even with it
    tenure_min_s: float  # a proven worker is let go no sooner
    surplus_grace_s: float  # ... and only when it has been surplus this long
    leases_max: int
    issuers_max: int
    clock_skew_max_s: float
    poll_interval_s: float
    pollers_max: int = 65_536
    unproven_per_address_max: int = 64  # leases of one range of addresses that are not proven
    hubs_max: int = 64
    guest_layers_max: int = 4  # that one guest serves
    told_ttl_s: float = TOLD_TTL_S  # what another hub told counts this long

    @property
    def stand_back_s(self) -> float:
        """What is open so long is for everybody, also for those that came to nothing before or are not known."""
        return 2 * self.poll_interval_s


@dataclass(frozen=True, slots=True)
class Demand:
    """What one coordinator wants of one model; a newer (epoch, sequence) replaces an older one."""

    issuer: PeerId
    epoch: int
    sequence: int
    issued_at: float  # the issuer's wall clock
    ttl_s: float
    model: ModelId
    dtype: str
    slice_bytes: int  # in memory, in this dtype
    addresses: tuple[str, ...]
    wants: tuple[Wanted, ...]
    near_rtt_s: float = 0.005  # nearer workers take a share of every layer, others whole layers
    refused: tuple[PeerId, ...] = ()  # workers that it will not use: they answered wrong, or not, and more than once
    kept: frozenset[SliceId] = frozenset()  # slices that are for no guest: they have too few other copies


@dataclass(frozen=True, slots=True)
class LeaseOffer:
    lease: str
    model: ModelId
    dtype: str
    slice: SliceId
    coordinator: PeerId
    addresses: tuple[str, ...]
    ttl_s: float


@dataclass(frozen=True, slots=True)
class TableEntry:
    """One slice over all coordinators: copies wanted, proven, and leased but not proven yet."""

    model: ModelId
    slice: SliceId
    want: int
    proven: int
    leased: int


@dataclass(frozen=True, slots=True)
class LeaseReport:
    """What a worker says of one lease when it renews it; `progress` grows while it gets anywhere."""

    lease: str
    key: Key
    progress: int


@dataclass(slots=True)
class Lease:
    id: str
    worker: PeerId
    key: Key
    origin: str  # range of addresses that the worker came from
    granted_at: float
    expires_at: float
    want_then: int  # copies that were wanted when it was granted
    progress: int = 0
    progress_at: float = 0.0
    renewed_at: float = 0.0
    renewals: int = 0
    renewal_gap_s: float = 0.0  # the longest between two renewals
    proven_at: float | None = None
    is_lost: bool = False  # its coordinator no longer counts on it, and its worker has not been heard of since
    is_late: bool = False  # unproven for so long that it no longer counts as a copy

    @property
    def counts(self) -> bool:
        """Whether it stands for a copy that is not proven yet."""
        return self.proven_at is None and not self.is_late

    def renew(self, ttl_s: float, now: float) -> None:
        if self.renewals:
            self.renewal_gap_s = max(self.renewal_gap_s, now - self.renewed_at)
        self.renewals += 1
        self.renewed_at, self.expires_at, self.is_lost = now, now + ttl_s, False

    def missed_at(self, ttl_s: float) -> float:
        """When its next renewal is missed. Workers renew at least three times in `ttl_s`, and all their leases at once:
        so the time to the first renewal says nothing of how often they come."""
        usual_s = self.renewal_gap_s if self.renewals > 2 else ttl_s / 3
        return self.renewed_at + MISSED_FACTOR * usual_s


@dataclass(slots=True)
class Book:
    key: Key
    first: PeerId | None  # the hub that fills it before all others; None = this one
    wanted: Wanted | None = None
    proven: frozenset[PeerId] = frozenset()
    leases: dict[str, Lease] = field(default_factory=dict[str, Lease])
    unproven: int = 0  # leases here that count
    told: dict[PeerId, int] = field(default_factory=dict[PeerId, int])  # the same at other hubs
    open: int = 0  # may be negative
    open_since: float = 0.0
    surplus_since: float | None = None
    rank: Rank | None = None  # where it lies in the index

    @property
    def want(self) -> int:
        return 0 if self.wanted is None else self.wanted.want

    @property
    def elsewhere(self) -> int:
        return sum(self.told.values()) if self.told else 0

    @property
    def is_empty(self) -> bool:
        return self.wanted is None and not self.leases and not self.told

    def holds(self, worker: PeerId) -> bool:
        return worker in self.proven or any(lease.worker == worker for lease in self.leases.values())


class OpenBooks:
    """Books with open copies, by how badly they need one; among equals first come, first served."""

    def __init__(self) -> None:
        self._ranks: dict[Rank, dict[PeerId, dict[SliceId, Book]]] = {}
        self.copies = 0  # open in all

    def put(self, book: Book, copies_before: int) -> None:
        """Files the book anew after its `open` changed from `copies_before`."""
        self.copies += max(0, book.open) - max(0, copies_before)
        rank = (book.first is None, book.open / book.want, book.open) if book.open > 0 else None
        if rank == book.rank:
            return
        issuer, _, part = book.key
        if book.rank is not None:
            row = self._ranks[book.rank]
            del row[issuer][part]
            if not row[issuer]:
                del row[issuer]
            if not row:
                del self._ranks[book.rank]
        if rank is not None:
            self._ranks.setdefault(rank, {}).setdefault(issuer, {})[part] = book
        book.rank = rank

    def rows(self) -> Iterator[dict[PeerId, dict[SliceId, Book]]]:
        """Open books by coordinator, those with the greatest need first."""
        for rank in sorted(self._ranks, reverse=True):
            yield self._ranks[rank]

    def turn(self, book: Book) -> None:
        """Of coordinators that need equally much, this one had its turn."""
        if book.rank is not None:
            row = self._ranks[book.rank]
            row[book.key[0]] = row.pop(book.key[0])


class ProofTimes:
    """How long leases took until they were proven, lately; so after how long one is late."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._proof_s: deque[float] = deque(maxlen=PROOF_TIMES)
        self.late_s = patience_s

    def note(self, proof_s: float) -> None:
        self._proof_s.append(proof_s)
        if len(self._proof_s) >= PROOF_TIMES_MIN:
            usual_s = sorted(self._proof_s)[len(self._proof_s) * 9 // 10]
            self.late_s = max(LATE_FACTOR * usual_s, self._patience_s / 4)
