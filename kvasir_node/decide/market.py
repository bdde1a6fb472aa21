"""The hub's mind: what is wanted, what is leased, what to offer, and whom to let go.

It commands nobody: it answers polls and renewals. It does not know signatures, streams or clocks; `now` is
monotonic seconds, `wall` seconds since 1970. A copy counts only when the slice's own coordinator lists the peer as
proven, or, for a bounded time, while a lease on it makes progress.

Several hubs agree without a leader. A coordinator's list of proven peers, the most useful first, is the same for all
of them: those beyond the wanted number leave, the last first. Of leases that are not proven yet hubs tell each other
the number (`news`, `hear`). Each slice is filled first by one of the hubs (the highest hash of both names), which also
keeps its leases when two hubs have granted too many.

Every operation costs about the same with ten thousand leases as with ten: what falls due lies in a heap, what is open
in an index.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvasir_node.base.errors import RejectReason
from kvasir_node.base.ids import ModelId, PeerId, SliceId
from kvasir_node.decide.demand import Wanted
from kvasir_node.decide.market_books import (
    Book,
    Demand,
    Key,
    Lease,
    LeaseOffer,
    LeaseReport,
    MarketLimits,
    OpenBooks,
    ProofTimes,
    TableEntry,
)
from kvasir_node.decide.market_hubs import OtherHubs
from kvasir_node.decide.market_offers import Asker, Chooser, IdleWorkers, Issuer, Strikes
from kvasir_node.decide.trial_caps import address_range

__all__ = ["Demand", "Key", "LeaseOffer", "LeaseReport", "Market", "MarketLimits", "TableEntry"]

REST_POLLS_S = 20.0  # when nothing is open, all idle nodes together are asked to poll this often
USUAL_BYTES_S = 2e6  # a fetch that is no slower than this is not late, however quick others were
SLOWEST_BYTES_S = 250e3  # of a fetch that is waited for, however often it says that it gets on
LOOK_S = 5.0  # how often a lease that is not proven is looked at: what is usual is learnt meanwhile
MEET_S = 3.0  # a hub that began grants nothing so long: by then it has met the other hubs, or there are none
DUE_SLACK = 1024  # entries of ended leases that are kept before all are made anew
LATE_RATIO_MAX = 0.08  # of all copies wanted, over all hubs, so many at most are asked for again as a lease is late


class Market:
    """Merged demand, leases, and the answers to polls and renewals.

    `name` makes lease ids unique over hubs and their restarts; `started_at` is when this hub began. It first meets the
    others, which may be granting already; until every coordinator has had time to report, leases that others granted
    are taken over unseen.
    """

    REMEMBERED_PER_ISSUER = 4  # issuers_max × this are remembered after their demand has expired, against replays

    def __init__(self, limits: MarketLimits, name: str, started_at: float) -> None:
        self._limits = limits
        self._name = name
        self._met_at = started_at + MEET_S
        self._young_until = started_at + limits.lease_ttl_s
        self._issuers: dict[PeerId, Issuer] = {}
        self._heard: dict[PeerId, tuple[int, int]] = {}  # newest (epoch, sequence); heard longest ago first
        self._books: dict[Key, Book] = {}
        self._open = OpenBooks()
        self._leases: dict[str, Lease] = {}
        self._of_worker: dict[PeerId, dict[str, Lease]] = {}
        self._of_origin: Counter[str] = Counter()  # unproven leases by range of addresses
        self._strikes = Strikes(limits.progress_timeout_s, limits.pollers_max)
        self._idle = IdleWorkers(limits.pollers_max)
        self._retry_s = limits.poll_interval_s  # told last
        self._granted = 0
        self._due: list[tuple[float, int, str]] = []  # when to look at which lease again; may be too soon
        self._dues = 0
        self._issuer_due = math.inf
        self._proof_times = ProofTimes(limits.progress_timeout_s)
        self._late = 0  # leases that are
        self._want_total = 0
        self._hubs = OtherHubs(name, limits.told_ttl_s, limits.hubs_max, limits.leases_max)
        self._news: dict[Key, int] = {}
        self._chooser = Chooser(
            self._issuers,
            self._books,
            self._open,
            self._hubs,
            self._strikes,
            limits.stand_back_s,
            limits.guest_layers_max,
        )

    @property
    def lease_count(self) -> int:
        return len(self._leases)

    @property
    def coordinator_count(self) -> int:
        return len(self._issuers)

    @property
    def open_copies(self) -> int:
        return self._open.copies

    @property
    def retry_s(self) -> float:
        """What those who got nothing were last told to wait."""
        return self._retry_s

    def idle_count(self, now: float) -> int:
        """Peers that polled lately and hold no lease."""
        window_s = max(10 * self._limits.poll_interval_s, 2 * self._retry_s)
        self._idle.trim(now - window_s)
        return len(self._idle)

    # Demand ---------------------------------------------------------------------------------------------------

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
        entry = self._issuers.get(demand.issuer)
        expires_at = now + demand.ttl_s
        self._issuer_due = min(self._issuer_due, expires_at)
        if entry is not None and entry.demand.model != demand.model:
            self._forget_issuer(entry, now)
            entry = None
        if entry is None:
            entry = self._issuers[demand.issuer] = Issuer(demand, expires_at)
        entry.demand, entry.expires_at = demand, expires_at
        self._take_wants(entry, now)
        for worker in demand.refused:
            self._end_refused(worker, demand.issuer, now)
        return None

    def _end_refused(self, worker: PeerId, issuer: PeerId, now: float) -> None:
        """Whom its coordinator will not use holds no place for others; it came to nothing."""
        leases = self._of_worker.get(worker)
        for lease in list(leases.values()) if leases else ():
            if lease.key[0] == issuer and lease.proven_at is None:
                self._strikes.add(worker, lease.key[1], now)
                self._end(lease, now)

    def _take_wants(self, entry: Issuer, now: float) -> None:
        """Most of demand is as it was: of the same slices only what differs is looked at."""
        demand, told = entry.demand, entry.wants_told
        entry.wants_told = demand.wants
        if told is demand.wants:
            return
        if len(told) == len(demand.wants) and all(a.slice == b.slice for a, b in zip(told, demand.wants, strict=True)):
            for known, wanted in zip(told, demand.wants, strict=True):
                if wanted is not known and wanted != known:
                    entry.wants[wanted.slice] = wanted
                    self._set_wanted(self._book((demand.issuer, demand.model, wanted.slice)), wanted, now)
            return
        before = entry.replace_wants()
        for part, wanted in entry.wants.items():
            known = before.pop(part, None)
            if wanted is not known and wanted != known:
                self._set_wanted(self._book((demand.issuer, demand.model, part)), wanted, now)
        for part in before:
            self._set_wanted(self._book((demand.issuer, demand.model, part)), None, now)

    def _forget_issuer(self, entry: Issuer, now: float) -> None:
        del self._issuers[entry.demand.issuer]
        for part in entry.wants:
            self._set_wanted(self._book((entry.demand.issuer, entry.demand.model, part)), None, now)

    def _set_wanted(self, book: Book, wanted: Wanted | None, now: float) -> None:
        self._want_total += (0 if wanted is None else wanted.want) - book.want
        book.wanted = wanted
        book.proven = frozenset(() if wanted is None else wanted.proven)
        self._refresh(book, now)

    def _note_heard(self, demand: Demand) -> None:
        self._heard.pop(demand.issuer, None)
        self._heard[demand.issuer] = (demand.epoch, demand.sequence)
        if len(self._heard) > self.REMEMBERED_PER_ISSUER * self._limits.issuers_max:
            del self._heard[next(iter(self._heard))]

    def _book(self, key: Key) -> Book:
        book = self._books.get(key)
        if book is None:
            book = self._books[key] = Book(key, self._hubs.first_for(key))
        return book

    def _refresh(self, book: Book, now: float) -> None:
        """Works out anew what follows from a book's demand, leases and news; forgets it when nothing is left."""
        unproven = 0
        for lease in book.leases.values():
            if (lease.worker in book.proven) is not (lease.proven_at is not None):
                self._note_proof(lease, lease.proven_at is None, now)
            unproven += lease.counts
        if unproven != book.unproven:
            self._news[book.key] = book.unproven = unproven
        before, elsewhere = book.open, book.elsewhere
        book.open = 0 if book.wanted is None else book.want - len(book.proven) - unproven - elsewhere
        if book.open > 0 >= before:
            book.open_since = now
        self._open.put(book, before)
        copies = len(book.proven) + unproven + elsewhere
        stragglers = len(book.proven) >= book.want and any(lease.is_late for lease in book.leases.values())
        unwanted = book.wanted is None and bool(book.leases)
        if copies > book.want or stragglers or unwanted:
            book.surplus_since = now if book.surplus_since is None else book.surplus_since
        else:
            book.surplus_since = None
        if book.is_empty:
            del self._books[book.key]

    def _note_proof(self, lease: Lease, is_proven: bool, now: float) -> None:
        if is_proven:
            self._proof_times.note(now - lease.granted_at)
            self._not_late(lease)
            lease.proven_at, lease.is_lost = now, False
            self._strikes.forgive(lease.worker, lease.key[1])
            self._idle.note_good(lease.worker)
            self._of_origin[lease.origin] -= 1
        else:
            lease.proven_at, lease.progress_at, lease.granted_at, lease.is_lost = None, now, now, True
            lease.progress = max(lease.progress, 1)  # what was proven once has not come to nothing
            self._of_origin[lease.origin] += 1
            self._watch(lease)

    def _not_late(self, lease: Lease) -> None:
        self._late -= lease.is_late
        lease.is_late = False

    # Polls ----------------------------------------------------------------------------------------------------

    def poll(
        self,
        worker: PeerId,
        *,
        memory_bytes: int,
        have: Iterable[tuple[ModelId, SliceId]],
        busy: Iterable[tuple[ModelId, SliceId]],
        round_trips: Iterable[tuple[PeerId, float]] = (),
        address: str = "",
        is_guest: bool = False,
        now: float,
    ) -> LeaseOffer | float:
        """A lease on the slice that needs this worker most, or after how many seconds to ask again.

        While more nodes are idle than copies open, nobody gets a second lease before the first is proven.
        """
        self.tick(now)
        self._note_idle(worker, now)
        if now < self._met_at:
            return self._met_at - now
        origin = address_range(address) if address else ""
        stands_back = not self._idle.is_good(worker) and self._idle.good >= self._open.copies
        if len(self._leases) < self._limits.leases_max and self._may_have_another(worker, origin, now):
            leases = self._of_worker.get(worker, {}).values()
            asker = Asker(worker, memory_bytes, frozenset(busy), dict(round_trips), leases, stands_back, is_guest, now)
            book = self._chooser.choose(asker, have)
            if book is not None:
                return self._grant(worker, book, origin, now)
        if stands_back and self._open.copies:
            return self._limits.stand_back_s  # what is still open then is for everybody
        self._retry_s = max(self._limits.poll_interval_s, self.idle_count(now) / REST_POLLS_S)
        return self._retry_s

    def _note_idle(self, worker: PeerId, now: float) -> None:
        """The worker was heard of: it is idle unless it holds a lease."""
        if worker in self._of_worker:
            self._idle.drop(worker)
        else:
            self._idle.put(worker, now)

    def _may_have_another(self, worker: PeerId, origin: str, now: float) -> bool:
        if origin and self._of_origin[origin] >= self._limits.unproven_per_address_max:
            return False
        unproven = sum(lease.proven_at is None for lease in self._of_worker.get(worker, {}).values())
        idle = self.idle_count(now)
        return not unproven or not idle or unproven < self._open.copies / idle

    def _grant(self, worker: PeerId, book: Book, origin: str, now: float) -> LeaseOffer:
        self._granted += 1
        while f"{self._name}.{self._granted}" in self._leases:  # a worker may renew an id that was never granted
            self._granted += 1
        lease = self._insert(f"{self._name}.{self._granted}", worker, book, origin, now)
        key, demand = book.key, self._issuers[book.key[0]].demand
        return LeaseOffer(lease.id, key[1], demand.dtype, key[2], key[0], demand.addresses, self._limits.lease_ttl_s)

    def _insert(self, lease_id: str, worker: PeerId, book: Book, origin: str, now: float) -> Lease:
        lease = Lease(
            lease_id,
            worker,
            book.key,
            origin,
            granted_at=now,
            expires_at=now + self._limits.lease_ttl_s,
            want_then=book.want,
            progress_at=now,
            renewed_at=now,
        )
        self._leases[lease_id] = book.leases[lease_id] = lease
        self._of_worker.setdefault(worker, {})[lease_id] = lease
        self._of_origin[origin] += 1
        self._idle.drop(worker)
        self._watch(lease)
        self._refresh(book, now)
        return lease

    # Leases ---------------------------------------------------------------------------------------------------

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
        if self._is_overtaken(lease):
            self._strikes.add(worker, key[1], now)
        elif not self._is_surplus(lease, now):
            lease.renew(self._limits.lease_ttl_s, now)
            return self._limits.lease_ttl_s, ""
        self._end(lease, now)
        self._note_idle(worker, now)
        return 0.0, "no longer needed"

    def _is_overtaken(self, lease: Lease) -> bool:
        """Whether it was late, and others that were asked instead have proven all copies."""
        book = self._books[lease.key]
        return lease.is_late and len(book.proven) >= book.want > 0

    def release(self, worker: PeerId, lease_id: str, now: float) -> None:
        """The worker gives a lease back; unknown ones are ignored."""
        lease = self._leases.get(lease_id)
        if lease is not None and lease.worker == worker:
            self._end(lease, now)
            self._note_idle(worker, now)

    def end_unlisted(self, worker: PeerId, busy: Iterable[tuple[ModelId, SliceId]], now: float) -> None:
        """Ends the leases that a worker does not list when it asks: it was restarted, or never heard of them."""
        listed = set(busy)
        for lease in list(self._of_worker.get(worker, {}).values()):
            if lease.key[1:] not in listed:
                self._end(lease, now)

    def _adopt(self, worker: PeerId, lease_id: str, key: Key, now: float) -> Lease | None:
        """Takes over a lease that another hub, or this one before a restart, had granted."""
        if (
            len(self._leases) >= self._limits.leases_max
            or key[0] == worker
            or self._strikes.must_wait(worker, key[1], now)
            or (key[0] in self._issuers and worker in self._issuers[key[0]].demand.refused)
        ):
            return None
        book = self._book(key)
        known = worker in book.proven or (book.wanted is not None and book.open > 0)
        known = known or self._take_from_granter(book, lease_id)
        held = any(lease.worker == worker for lease in book.leases.values())
        if held or not (known or now < self._young_until):
            self._refresh(book, now)
            return None
        return self._insert(lease_id, worker, book, "", now)

    def _take_from_granter(self, book: Book, lease_id: str) -> bool:
        """Whether the hub that granted a lease of that name has told of one on this slice; it is ours from now on."""
        for peer, count in book.told.items():
            if self._hubs.granted(peer, lease_id):
                self._hubs.note(peer, book.key, count - 1)
                book.told[peer] = count - 1
                if count == 1:
                    del book.told[peer]
                return True
        return False

    def _end(self, lease: Lease, now: float) -> None:
        del self._leases[lease.id]
        own = self._of_worker[lease.worker]
        del own[lease.id]
        if not own:
            del self._of_worker[lease.worker]
        self._not_late(lease)
        if lease.proven_at is None:
            self._of_origin[lease.origin] -= 1
        if not self._of_origin[lease.origin]:
            del self._of_origin[lease.origin]
        book = self._books[lease.key]
        del book.leases[lease.id]
        self._refresh(book, now)

    def _is_surplus(self, lease: Lease, now: float) -> bool:
        """Whether this lease is the one to go: surplus for long enough, past its tenure, last in usefulness.

        Usefulness: proven before unproven, then as its coordinator lists them; unproven ones by age, late ones last. Of
        one hub one goes at a time, each at its own renewal. Grace and tenure protect from demand that flaps: not a
        proven copy that was never wanted, which is there because another one was late, or hubs were apart.
        """
        book = self._books[lease.key]
        if book.wanted is None and now < self._young_until:
            return False  # its coordinator may not have reported to us yet
        if book.surplus_since is None:
            return False
        is_lasting = now - book.surplus_since >= self._limits.surplus_grace_s
        if lease.proven_at is None:
            if not is_lasting:
                return False
            rivals = [other for other in book.leases.values() if other.proven_at is None]
            last = max(rivals, key=lambda other: (other.is_late, other.granted_at, other.id))
            return last is lease and len(rivals) > max(0, book.want - len(book.proven) - self._before_us(book))
        assert book.wanted is not None  # it lists the worker
        is_settled = is_lasting and now - lease.proven_at >= self._limits.tenure_min_s
        if book.want < lease.want_then and not is_settled:
            return False
        places = {peer: place for place, peer in enumerate(book.wanted.proven)}
        place = places[lease.worker]
        own = max(places[other.worker] for other in book.leases.values() if other.proven_at is not None)
        return place >= book.want and place == own

    # Time -----------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Ends what expired: demand that was not repeated, leases not renewed, or without progress."""
        if self._issuer_due <= now:
            for entry in [entry for entry in self._issuers.values() if entry.expires_at <= now]:
                self._forget_issuer(entry, now)
            self._issuer_due = min((entry.expires_at for entry in self._issuers.values()), default=math.inf)
        for peer in self._hubs.silent(now):
            self._forget_hub(peer, now)
            self._share_out(now)
        while self._due and self._due[0][0] <= now:
            lease = self._leases.get(heapq.heappop(self._due)[2])
            if lease is not None:
                self._look_at(lease, now)

    def _watch(self, lease: Lease) -> None:
        """Has the lease looked at when something may be due; entries that came too soon are put off then."""
        self._push(min(self._due_at(lease), lease.granted_at + LOOK_S), lease)
        if len(self._due) > 2 * len(self._leases) + DUE_SLACK:  # most of it is of leases that have ended
            self._due = []
            for other in self._leases.values():
                self._push(self._due_at(other), other)

    def _push(self, at: float, lease: Lease) -> None:
        self._dues += 1
        heapq.heappush(self._due, (at, self._dues, lease.id))

    def _due_at(self, lease: Lease) -> float:
        if lease.proven_at is not None:
            return lease.expires_at
        patience = self._limits.progress_timeout_s
        at = min(lease.expires_at, lease.progress_at + patience, lease.granted_at + self._proof_within_s(lease))
        return min(at, lease.missed_at(self._limits.lease_ttl_s)) if lease.is_lost else at

    def _proof_within_s(self, lease: Lease) -> float:
        """How long a lease may last without proof, whatever progress it claims: a large slice takes long to fetch."""
        return max(10 * self._limits.progress_timeout_s, self._fetch_s(lease, SLOWEST_BYTES_S))

    def _fetch_s(self, lease: Lease, bytes_s: float) -> float:
        entry = self._issuers.get(lease.key[0])
        return 0.0 if entry is None else entry.demand.slice_bytes / bytes_s

    def _look_at(self, lease: Lease, now: float) -> None:
        came_to_nothing = lease.proven_at is None and self._is_stuck(lease, now)
        if came_to_nothing and self._books[lease.key].want > 0:  # else its coordinator has gone, or is served
            self._strikes.add(lease.worker, lease.key[1], now)
        # Lost by its coordinator and silent here: the machine is gone, so another is asked before the lease would end.
        is_gone = lease.is_lost and lease.missed_at(self._limits.lease_ttl_s) <= now
        if came_to_nothing or is_gone or lease.expires_at <= now:
            self._end(lease, now)
            return
        late_s = max(self._proof_times.late_s, self._fetch_s(lease, USUAL_BYTES_S))
        is_late = lease.counts and now - lease.granted_at >= late_s
        if is_late and self._late + 1 <= LATE_RATIO_MAX * self._want_total / self._hubs.count:
            lease.is_late = True
            self._late += 1
            self._refresh(self._books[lease.key], now)
        look_at = min(self._due_at(lease), now + LOOK_S) if lease.counts else self._due_at(lease)
        # Just past what is due: a deadline that is reached is not yet missed.
        self._push(max(look_at, math.nextafter(now, math.inf)), lease)

    def _is_stuck(self, lease: Lease, now: float) -> bool:
        """Whether an unproven lease gets nowhere: no step by its end, none for long, or no proof for very long."""
        patience = self._limits.progress_timeout_s
        nothing_yet = lease.expires_at <= now and lease.progress == 0
        is_long = now - lease.granted_at > self._proof_within_s(lease)
        return nothing_yet or now - lease.progress_at > patience or is_long

    # Other hubs -----------------------------------------------------------------------------------------------

    def news(self) -> dict[Key, int]:
        """Slices whose number of unproven leases here has changed since the last call, for the other hubs."""
        news, self._news = self._news, {}
        return news

    def all_news(self) -> dict[Key, int]:
        """The same of all slices, for a hub that has heard nothing yet."""
        return {key: book.unproven for key, book in self._books.items() if book.unproven}

    def hear(self, peer: PeerId, name: str, counts: Mapping[Key, int], now: float, *, is_all: bool) -> None:
        """What another hub, which names its leases so, tells; with `is_all` what it does not mention is none.

        A hub that says nothing for `told_ttl_s` is forgotten, so also nothing new must be told.
        """
        if self._hubs.is_new(peer, name):
            self._forget_hub(peer, now)
            self._hubs.meet(peer, name, now)
            self._share_out(now)
        for key, count in self._hubs.take(peer, counts, now, is_all=is_all).items():
            self._tell(peer, key, count, now)

    def _forget_hub(self, peer: PeerId, now: float) -> None:
        for key in self._hubs.forget(peer):
            self._tell(peer, key, 0, now)

    def _tell(self, peer: PeerId, key: Key, count: int, now: float) -> None:
        book = self._book(key)
        if count:
            book.told[peer] = count
        else:
            book.told.pop(peer, None)
        self._refresh(book, now)

    def _share_out(self, now: float) -> None:
        """Hubs came or went: some slices are now others' to fill first."""
        for key, book in list(self._books.items()):
            book.first = self._hubs.first_for(key)
            self._refresh(book, now)

    def _before_us(self, book: Book) -> int:
        """Unproven leases of hubs that keep theirs before we do."""
        return sum(count for peer, count in book.told.items() if self._hubs.comes_before_us(peer, book.key))

    # What others see ------------------------------------------------------------------------------------------

    def table(self) -> tuple[TableEntry, ...]:
        """Every slice with a want, a proven copy or a lease, in order."""
        counts: dict[tuple[ModelId, SliceId], list[int]] = {}
        for (_, model, part), book in self._books.items():
            row = counts.setdefault((model, part), [0, 0, 0])
            row[0] += book.want
            row[1] += len(book.proven)
            row[2] += sum(lease.proven_at is None for lease in book.leases.values()) + book.elsewhere
        return tuple(TableEntry(model, part, *row) for (model, part), row in sorted(counts.items()) if any(row))

    def held(self) -> Iterator[tuple[Key, int]]:
        """How many leases there are on each slice, proven or not."""
        return ((key, len(book.leases)) for key, book in self._books.items() if book.leases)

    def slice_bytes(self) -> dict[ModelId, int]:
        """Of each model wanted, what a slice takes in memory, for the coordinator with the smallest ones."""
        found: dict[ModelId, int] = {}
        for entry in self._issuers.values():
            size = entry.demand.slice_bytes
            found[entry.demand.model] = min(found.get(entry.demand.model, size), size)
        return found
