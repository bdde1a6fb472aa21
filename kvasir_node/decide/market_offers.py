"""Which slice to offer to a worker that asks, and who has to wait.

It does not know how leases begin and end: that is decide/market.py, whose books and demand it reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from kvasir_node.base.ids import ModelId, PeerId, SliceId
from kvasir_node.decide.demand import Wanted
from kvasir_node.decide.guests import layers_for
from kvasir_node.decide.market_books import Book, Demand, Key, Lease, OpenBooks
from kvasir_node.decide.market_hubs import OtherHubs

OTHERS_FIRST_S = 3.0  # a slice is left to the hub that fills it first until that has granted nothing for so long


@dataclass(slots=True)
class Issuer:
    """A coordinator, and its demand that has not expired."""

    demand: Demand
    expires_at: float
    wants_told: tuple[Wanted, ...] = ()  # that its books were made from
    wants: dict[SliceId, Wanted] = field(default_factory=dict[SliceId, Wanted])
    layers: dict[int, list[SliceId]] = field(default_factory=dict[int, list[SliceId]])

    def replace_wants(self) -> dict[SliceId, Wanted]:
        """Takes the slices of its demand up; returns what it wanted before."""
        before = self.wants
        self.wants = {wanted.slice: wanted for wanted in self.demand.wants}
        self.layers = {}
        for part in self.wants:
            self.layers.setdefault(part.layer, []).append(part)
        return before


@dataclass(frozen=True, slots=True)
class Asker:
    """`busy` = slices that it holds; `round_trips` (s) to coordinators, as it has measured them."""

    worker: PeerId
    memory_bytes: int
    busy: frozenset[tuple[ModelId, SliceId]]
    round_trips: Mapping[PeerId, float]
    leases: Collection[Lease]
    stands_back: bool  # others that are known to be good could take all that is open
    is_guest: bool  # see decide/guests
    now: float


class IdleWorkers:
    """Who asked lately and holds nothing, and how many of them were ever proven; each table has `workers_max`."""

    def __init__(self, workers_max: int) -> None:
        self._workers_max = workers_max
        self._asked_at: dict[PeerId, float] = {}  # who asked longest ago first
        self._good: dict[PeerId, None] = {}  # proven once, by any coordinator
        self.good = 0  # of those that are idle

    def __len__(self) -> int:
        return len(self._asked_at)

    def put(self, worker: PeerId, now: float) -> None:
        self.drop(worker)
        self._asked_at[worker] = now
        self.good += worker in self._good
        if len(self._asked_at) > self._workers_max:
            self.drop(next(iter(self._asked_at)))

    def drop(self, worker: PeerId) -> None:
        if self._asked_at.pop(worker, None) is not None:
            self.good -= worker in self._good

    def trim(self, before: float) -> None:
        """Forgets those that did not ask since."""
        while self._asked_at:
            first = next(iter(self._asked_at))
            if self._asked_at[first] > before:
                return
            self.drop(first)

    def is_good(self, worker: PeerId) -> bool:
        return worker in self._good

    def note_good(self, worker: PeerId) -> None:
        if worker not in self._good:
            self._good[worker] = None
            self.good += worker in self._asked_at
            if len(self._good) > self._workers_max:
                eldest = next(iter(self._good))
                self.good -= eldest in self._asked_at
                del self._good[eldest]


@dataclass(slots=True)
class _Strike:
    count: int
    until: float


class Strikes:
    """Leases that came to nothing, by worker and model: it waits, longer each time, before the next."""

    def __init__(self, pause_s: float, workers_max: int) -> None:
        self._pause_s = pause_s
        self._workers_max = workers_max
        self._strikes: dict[tuple[PeerId, ModelId], _Strike] = {}

    def __len__(self) -> int:
        return len(self._strikes)

    def __contains__(self, pair: tuple[PeerId, ModelId]) -> bool:
        return pair in self._strikes

    def add(self, worker: PeerId, model: ModelId, now: float) -> None:
        strike = self._strikes.setdefault((worker, model), _Strike(0, 0.0))
        strike.count += 1
        strike.until = now + self._pause_s * 2.0 ** min(strike.count - 1, 10)
        if len(self._strikes) > self._workers_max:
            del self._strikes[next(iter(self._strikes))]

    def forgive(self, worker: PeerId, model: ModelId) -> None:
        self._strikes.pop((worker, model), None)

    def must_wait(self, worker: PeerId, model: ModelId, now: float) -> bool:
        strike = self._strikes.get((worker, model))
        return strike is not None and now < strike.until


@dataclass(slots=True)
class Chooser:
    """`stand_back_s` = a worker with a strike, or one that is not known while enough others are, gets only what has
    been open for so long; `guest_layers_max` = layers that one guest serves."""

    issuers: Mapping[PeerId, Issuer]
    books: Mapping[Key, Book]
    open: OpenBooks
    hubs: OtherHubs
    strikes: Strikes
    stand_back_s: float
    guest_layers_max: int

    def choose(self, asker: Asker, have: Iterable[tuple[ModelId, SliceId]]) -> Book | None:
        """Where a copy is missing most, by the share of those wanted; of equals what is on its disk, else in turn.

        A worker that is far from a coordinator, as that sees it, first fills the layers that it has a part in: each
        layer costs a round trip. One that is near, or has not measured yet, spreads over them. A guest is never near.
        """
        if not self.open.copies:
            return None
        return self._beside(asker) or self._neediest(asker, have)

    def _beside(self, asker: Asker) -> Book | None:
        best: Book | None = None
        for issuer, model, layer in sorted({(*lease.key[:2], lease.key[2].layer) for lease in asker.leases}):
            entry = self.issuers.get(issuer)
            if entry is None or entry.demand.model != model or not self._may_serve(issuer, asker):
                continue
            if not asker.is_guest and asker.round_trips.get(issuer, 0.0) < entry.demand.near_rtt_s:
                continue
            for part in entry.layers.get(layer, ()):
                book = self.books[issuer, model, part]
                if book.rank is None or not self._suits(book, asker):
                    continue
                if best is None or best.rank is None or book.rank > best.rank:
                    best = book
        return best

    def _neediest(self, asker: Asker, have: Iterable[tuple[ModelId, SliceId]]) -> Book | None:
        on_disk = [
            book
            for model, part in have
            for issuer in self.issuers
            if (book := self.books.get((issuer, model, part))) is not None and book.rank is not None
        ]
        for row in self.open.rows():
            for book in on_disk:
                issuer, _, part = book.key
                is_here = row.get(issuer, {}).get(part) is book
                if is_here and self._may_serve(issuer, asker) and self._suits(book, asker):
                    return book
            found = self._least_beside(row, asker)
            if found is not None:
                self.open.turn(found)
                return found
        return None

    def _least_beside(self, row: Mapping[PeerId, Mapping[SliceId, Book]], asker: Asker) -> Book | None:
        """Of books that need a copy equally, one in a layer where the worker holds nothing, or little."""
        held = Counter((*lease.key[:2], lease.key[2].layer) for lease in asker.leases)
        best: tuple[int, Book] | None = None
        for issuer, books in row.items():
            if not self._may_serve(issuer, asker):
                continue
            for book in books.values():
                beside = held[issuer, book.key[1], book.key[2].layer]
                if (best is None or beside < best[0]) and self._suits(book, asker):
                    if not beside:
                        return book
                    best = beside, book
        return None if best is None else best[1]

    def _may_serve(self, issuer: PeerId, asker: Asker) -> bool:
        demand = self.issuers[issuer].demand
        if issuer == asker.worker or demand.slice_bytes > asker.memory_bytes or asker.worker in demand.refused:
            return False
        return not self.strikes.must_wait(asker.worker, demand.model, asker.now)

    def _suits(self, book: Book, asker: Asker) -> bool:
        if book.key[1:] in asker.busy or book.holds(asker.worker):
            return False
        if asker.is_guest and not self._suits_guest(book, asker):
            return False
        if book.first is not None:
            waits_since = max(book.open_since, self.hubs.granted_at(book.first))
            if asker.now - waits_since < OTHERS_FIRST_S:
                return False
        is_last = asker.stands_back or (asker.worker, book.key[1]) in self.strikes
        return not is_last or asker.now - book.open_since >= self.stand_back_s

    def _suits_guest(self, book: Book, asker: Asker) -> bool:
        """It has others' copies, and is of a layer that the guest has a part in, or can take on."""
        issuer, _, part = book.key
        entry = self.issuers[issuer]
        if part in entry.demand.kept:
            return False
        served = {(lease.key[0], lease.key[2].layer) for lease in asker.leases}
        if (issuer, part.layer) in served:
            return True
        call_s = asker.round_trips.get(issuer)
        most = layers_for(call_s, entry.demand.near_rtt_s, len(entry.layers), self.guest_layers_max)
        return len(served) < most
