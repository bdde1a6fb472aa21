"""The hub's mind: what is wanted, what is leased, what to offer, and whom to let go.

It commands nobody: it answers polls and renewals. It does not know signatures, streams or clocks; `now` is
monotonic seconds, `wall` seconds since 1970. A copy counts only when the slice's own coordinator lists the peer as
proven, or, for a bounded time, while a lease on it makes progress.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvasir_node.base.errors import RejectReason
from kvasir_node.base.ids import ModelId, PeerId, SliceId
from kvasir_node.decide.demand import Wanted


@dataclass(frozen=True, slots=True)
class MarketLimits:
    lease_ttl_s: float
    progress_timeout_s: float  # without progress an unproven lease ends; ten times this even with it
    tenure_min_s: float  # a proven worker is let go no sooner
    surplus_grace_s: float  # ... and only when it has been surplus this long
    leases_max: int
    issuers_max: int
    clock_skew_max_s: float
    poll_interval_s: float
    pollers_max: int = 65_536


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


Key = tuple[PeerId, ModelId, SliceId]  # (coordinator, model, slice)


@dataclass(frozen=True, slots=True)
class LeaseReport:
    """What a worker says of one lease when it renews it; `progress` grows while it gets anywhere."""

    lease: str
    key: Key
    progress: int


@dataclass(slots=True)
class _Lease:
    id: str
    worker: PeerId
    key: Key
    granted_at: float
    expires_at: float
    progress: int = 0
    progress_at: float = 0.0
    proven_at: float | None = None


@dataclass(slots=True)
class _Issuer:
    demand: Demand
    expires_at: float
    wants: dict[SliceId, Wanted] = field(default_factory=dict[SliceId, Wanted])


@dataclass(slots=True)
class _Strike:
    count: int
    until: float


class Market:
    """Merged demand, leases, and the answers to polls and renewals.

    `name` makes lease ids unique over hubs and their restarts; `started_at` is when this hub began: until every
    coordinator has had time to report, leases that others granted are taken over unseen.
    """

    REMEMBERED_PER_ISSUER = 4  # issuers_max × this are remembered after their demand has expired, against replays

    def __init__(self, limits: MarketLimits, name: str, started_at: float) -> None:
        self._limits = limits
        self._name = name
        self._young_until = started_at + limits.lease_ttl_s
        self._issuers: dict[PeerId, _Issuer] = {}
        self._heard: dict[PeerId, tuple[int, int]] = {}  # newest (epoch, sequence); heard longest ago first
        self._leases: dict[str, _Lease] = {}
        self._of_key: dict[Key, dict[str, _Lease]] = {}
        self._of_worker: dict[PeerId, dict[str, _Lease]] = {}
        self._surplus_since: dict[Key, float] = {}
        self._strikes: dict[tuple[PeerId, ModelId], _Strike] = {}
        self._pollers: dict[PeerId, float] = {}
        self._granted = 0

    @property
    def lease_count(self) -> int:
        return len(self._leases)

    @property
    def coordinator_count(self) -> int:
        return len(self._issuers)

    def idle_count(self, now: float) -> int:
        """Peers that polled lately and hold no lease."""
        recent = (peer for peer, at in self._pollers.items() if now - at < self._recent_s())
        return sum(1 for peer in recent if peer not in self._of_worker)

    def report(self, demand: Demand, now: float, wall: float) -> RejectReason | None:
        """Takes a coordinator's demand; the reason when it changes nothing."""
        if abs(demand.issued_at - wall) > self._limits.clock_skew_max_s:
            return RejectReason.STALE
        heard = self._heard.get(demand.issuer)
        if heard is not None and (demand.epoch, demand.sequence) <= heard:
            return RejectReason.STALE
        if demand.issuer not in self._issuers and len(self._issuers) >= self._limits.issuers_max:
            return RejectReason.TOO_MANY
        self._note_heard(demand)
        wants = {wanted.slice: wanted for wanted in demand.wants}
        self._issuers[demand.issuer] = _Issuer(demand, now + demand.ttl_s, wants)
        self._observe(now)
        return None

    def poll(
        self,
        worker: PeerId,
        *,
        memory_bytes: int,
        have: Iterable[tuple[ModelId, SliceId]],
        busy: Iterable[tuple[ModelId, SliceId]],
        round_trips: Iterable[tuple[PeerId, float]] = (),
        now: float,
    ) -> LeaseOffer | float:
        """A lease on the slice that needs this worker most, or after how many seconds to ask again.

        `round_trips` (s) as the worker has measured them: one that is far from a coordinator first fills the layers
        that it already has a part in; one that is near, or has not measured yet, spreads over them.
        """
        self.tick(now)
        self._note_poll(worker, now)
        on_disk, taken, away_s = set(have), set(busy), dict(round_trips)
        held = Counter((*lease.key[:2], lease.key[2].layer) for lease in self._of_worker.get(worker, {}).values())
        best: tuple[tuple[float, ...], Key] | None = None
        for key in self._open_keys():
            issuer, model, part = key
            demand = self._issuers[issuer].demand
            if issuer == worker or demand.slice_bytes > memory_bytes or (model, part) in taken:
                continue
            if self._holds(key, worker) or self._must_wait(worker, model, now):
                continue
            want, opened = self._issuers[issuer].wants[part].want, self._open(key)
            far = away_s.get(issuer, 0.0) >= demand.near_rtt_s
            beside = held[issuer, model, part.layer]
            rank = (far and beside > 0, opened / want, (model, part) in on_disk, 0 if far else -beside, opened)
            if best is None or rank > best[0]:
                best = (rank, key)
        if best is None or len(self._leases) >= self._limits.leases_max:
            return self._limits.poll_interval_s * (1 + self.idle_count(now) / 100)
        return self._grant(worker, best[1], now)

    def renew_all(self, worker: PeerId, reports: Sequence[LeaseReport], now: float) -> list[tuple[float, str]]:
        """For each lease (ttl, "") to go on, or (0, reason) when it has ended; in order."""
        self.tick(now)
        return [self._renew(worker, each.lease, each.key, each.progress, now) for each in reports]

    def renew(self, worker: PeerId, lease_id: str, key: Key, *, progress: int, now: float) -> tuple[float, str]:
        """One lease, as in `renew_all`."""
        return self.renew_all(worker, [LeaseReport(lease_id, key, progress)], now)[0]

    def _renew(self, worker: PeerId, lease_id: str, key: Key, progress: int, now: float) -> tuple[float, str]:
        lease = self._leases.get(lease_id)
        if lease is None:
            lease = self._adopt(worker, lease_id, key, now)
        if lease is None or lease.worker != worker or lease.key != key:
            return 0.0, "unknown or ended lease"
        if progress > lease.progress:
            lease.progress, lease.progress_at = progress, now
        if self._is_surplus(lease, now):
            self._end(lease)
            return 0.0, "no longer needed"
        lease.expires_at = now + self._limits.lease_ttl_s
        return self._limits.lease_ttl_s, ""

    def release(self, worker: PeerId, lease_id: str) -> None:
        """The worker gives a lease back; unknown ones are ignored."""
        lease = self._leases.get(lease_id)
        if lease is not None and lease.worker == worker:
            self._end(lease)

    def end_unlisted(self, worker: PeerId, busy: Iterable[tuple[ModelId, SliceId]]) -> None:
        """Ends the leases that a worker does not list when it asks: it was restarted, or never heard of them."""
        listed = set(busy)
        for lease in list(self._of_worker.get(worker, {}).values()):
            if lease.key[1:] not in listed:
                self._end(lease)

    def tick(self, now: float) -> None:
        """Ends what expired: demand that was not repeated, leases not renewed, or without progress."""
        for issuer in [peer for peer, entry in self._issuers.items() if entry.expires_at <= now]:
            del self._issuers[issuer]
        self._observe(now)
        for lease in list(self._leases.values()):
            came_to_nothing = lease.proven_at is None and self._is_stuck(lease, now)
            if came_to_nothing and self._is_needed(lease.key):  # else it is the coordinator that has gone, or is served
                self._strike(lease, now)
            if came_to_nothing or lease.expires_at <= now:
                self._end(lease)

    def table(self) -> tuple[TableEntry, ...]:
        """Every slice with a want, a proven copy or a lease, in order."""
        counts: dict[tuple[ModelId, SliceId], list[int]] = {}
        for issuer, entry in self._issuers.items():
            for part, wanted in entry.wants.items():
                row = counts.setdefault((entry.demand.model, part), [0, 0, 0])
                row[0] += wanted.want
                row[1] += len(wanted.proven)
                row[2] += self._unproven((issuer, entry.demand.model, part))
        for key in self._of_key:
            if self._wanted(key) is None:
                row = counts.setdefault(key[1:], [0, 0, 0])
                row[2] += self._unproven(key)
        return tuple(TableEntry(model, part, *row) for (model, part), row in sorted(counts.items()) if any(row))

    def slice_bytes(self) -> dict[ModelId, int]:
        """Of each model wanted, what a slice takes in memory, for the coordinator with the smallest ones."""
        found: dict[ModelId, int] = {}
        for entry in self._issuers.values():
            size = entry.demand.slice_bytes
            found[entry.demand.model] = min(found.get(entry.demand.model, size), size)
        return found

    def _recent_s(self) -> float:
        return 10 * self._limits.poll_interval_s

    def _note_poll(self, worker: PeerId, now: float) -> None:
        self._pollers.pop(worker, None)
        self._pollers[worker] = now
        if len(self._pollers) > self._limits.pollers_max:
            del self._pollers[next(iter(self._pollers))]

    def _note_heard(self, demand: Demand) -> None:
        self._heard.pop(demand.issuer, None)
        self._heard[demand.issuer] = (demand.epoch, demand.sequence)
        if len(self._heard) > self.REMEMBERED_PER_ISSUER * self._limits.issuers_max:
            del self._heard[next(iter(self._heard))]

    def _wanted(self, key: Key) -> Wanted | None:
        entry = self._issuers.get(key[0])
        return entry.wants.get(key[2]) if entry is not None and entry.demand.model == key[1] else None

    def _unproven(self, key: Key) -> int:
        wanted = self._wanted(key)
        proven = wanted.proven if wanted is not None else ()
        return sum(1 for lease in self._of_key.get(key, {}).values() if lease.worker not in proven)

    def _open(self, key: Key) -> int:
        wanted = self._wanted(key)
        return 0 if wanted is None else wanted.want - len(wanted.proven) - self._unproven(key)

    def _open_keys(self) -> list[Key]:
        return [
            key
            for issuer, entry in self._issuers.items()
            for part in entry.wants
            if self._open(key := (issuer, entry.demand.model, part)) > 0
        ]

    def _holds(self, key: Key, worker: PeerId) -> bool:
        return any(lease.worker == worker for lease in self._of_key.get(key, {}).values())

    def _grant(self, worker: PeerId, key: Key, now: float) -> LeaseOffer:
        self._granted += 1
        while f"{self._name}.{self._granted}" in self._leases:  # a worker may renew an id that was never granted
            self._granted += 1
        lease = self._insert(f"{self._name}.{self._granted}", worker, key, now)
        demand = self._issuers[key[0]].demand
        return LeaseOffer(lease.id, key[1], demand.dtype, key[2], key[0], demand.addresses, self._limits.lease_ttl_s)

    def _insert(self, lease_id: str, worker: PeerId, key: Key, now: float) -> _Lease:
        lease = _Lease(lease_id, worker, key, now, now + self._limits.lease_ttl_s, progress_at=now)
        self._leases[lease_id] = lease
        self._of_key.setdefault(key, {})[lease_id] = lease
        self._of_worker.setdefault(worker, {})[lease_id] = lease
        return lease

    def _adopt(self, worker: PeerId, lease_id: str, key: Key, now: float) -> _Lease | None:
        """Takes over a lease that another hub, or this one before a restart, had granted."""
        if len(self._leases) >= self._limits.leases_max or self._holds(key, worker) or key[0] == worker:
            return None
        if self._must_wait(worker, key[1], now):
            return None
        wanted = self._wanted(key)
        known = wanted is not None and (worker in wanted.proven or self._open(key) > 0)
        return self._insert(lease_id, worker, key, now) if known or now < self._young_until else None

    def _end(self, lease: _Lease) -> None:
        del self._leases[lease.id]
        own = self._of_worker[lease.worker]
        del own[lease.id]
        if not own:
            del self._of_worker[lease.worker]
        siblings = self._of_key[lease.key]
        del siblings[lease.id]
        if not siblings:
            del self._of_key[lease.key]
            self._surplus_since.pop(lease.key, None)

    def _is_stuck(self, lease: _Lease, now: float) -> bool:
        """Whether an unproven lease gets nowhere: no step by its end, none for long, or no proof for very long."""
        patience = self._limits.progress_timeout_s
        nothing_yet = lease.expires_at <= now and lease.progress == 0
        return nothing_yet or now - lease.progress_at > patience or now - lease.granted_at > 10 * patience

    def _is_needed(self, key: Key) -> bool:
        wanted = self._wanted(key)
        return wanted is not None and wanted.want > 0

    def _must_wait(self, worker: PeerId, model: ModelId, now: float) -> bool:
        strike = self._strikes.get((worker, model))
        return strike is not None and now < strike.until

    def _strike(self, lease: _Lease, now: float) -> None:
        """A lease that came to nothing: this worker waits, longer each time, before the next on the same model."""
        pair = (lease.worker, lease.key[1])
        strike = self._strikes.setdefault(pair, _Strike(0, 0.0))
        strike.count += 1
        strike.until = now + self._limits.progress_timeout_s * 2.0 ** min(strike.count - 1, 10)
        if len(self._strikes) > self._limits.pollers_max:
            del self._strikes[next(iter(self._strikes))]

    def _observe(self, now: float) -> None:
        """Notes which leases are proven, and since when a slice has more copies than wanted."""
        for key, leases in self._of_key.items():
            wanted = self._wanted(key)
            for lease in leases.values():
                if wanted is not None and lease.worker in wanted.proven:
                    if lease.proven_at is None:
                        lease.proven_at = now
                    self._strikes.pop((lease.worker, key[1]), None)
                elif lease.proven_at is not None:
                    lease.proven_at, lease.progress_at, lease.granted_at = None, now, now
            if len(leases) > (0 if wanted is None else wanted.want):
                self._surplus_since.setdefault(key, now)
            else:
                self._surplus_since.pop(key, None)

    def _is_surplus(self, lease: _Lease, now: float) -> bool:
        """Whether this lease is the one to go: surplus for long enough, past its tenure, last in usefulness.

        Usefulness: proven before unproven, then the longer proven. One goes at a time, each at its own renewal.
        """
        if self._wanted(lease.key) is None and now < self._young_until:
            return False  # its coordinator may not have reported to us yet
        since = self._surplus_since.get(lease.key)
        if since is None or now - since < self._limits.surplus_grace_s:
            return False
        if lease.proven_at is not None and now - lease.proven_at < self._limits.tenure_min_s:
            return False
        last = max(
            self._of_key[lease.key].values(),
            key=lambda other: (other.proven_at is None, other.proven_at or 0.0, other.granted_at, other.id),
        )
        return last is lease
