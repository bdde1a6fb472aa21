"""Which block to ask of which provider next: the mind of a download.

It does not know bytes, streams or disks: events tell it what happened, it answers with commands. Rules, in order:

1. A block is asked of one provider at a time, and never twice at once of the same one; a provider has at most
   `in_flight_max` blocks to answer.
2. A block that came bad is not asked of that provider again while another one may have it. A provider with several
   bad blocks is left; the last one only when most of what it sends is bad.
3. A failed request pauses its provider, twice as long each time; then it owes one block until one has come, and after
   several failures in a row the provider is left.
4. When nothing new is left to ask, a provider with room is asked for blocks that others owe for too long
   (`late_factor` × the typical time of a block), or that it would bring well before them, going by what each took
   lately: so the slowest does not hold back the end. One that takes `late_factor` × the typical time owes one block.
5. After `attempts_max` failed tries, a block is asked only of providers that were not tried for it yet.
6. When a block cannot come any more (nobody left to ask for it), the whole download gives up.
7. A provider that said "not here" `scarce_after` times in a row has one request at a time, from the other end of what
   waits: it costs little, and one that holds another part of the content is found out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from statistics import median_low

from kvasir_node.base.ids import Cid, PeerId


@dataclass(frozen=True, slots=True)
class FetchLimits:
    in_flight_max: int = 8  # blocks asked of one provider at once
    ask_max: int = 4  # blocks of one request; below in_flight_max, so that one is answered while another travels
    attempts_max: int = 8  # failed tries of one block, over all providers, before only untried ones are asked
    providers_max: int = 32
    scarce_after: int = 8  # blocks in a row that a provider did not have
    bad_blocks_max: int = 3  # of one provider
    failures_max: int = 5  # requests to one provider that failed in a row
    pause_s: float = 0.25  # after the first failure; doubles with each one
    pause_max_s: float = 5.0
    late_factor: float = 4.0  # a block is late after this × the typical time ...
    late_floor_s: float = 0.25  # ... but never before this
    overtake_factor: float = 2.0  # × its own typical time: how soon a provider must bring what another one owes
    typical_first_s: float = 1.0  # the typical time of a block until one has arrived


COPIES_MAX = 2  # providers that owe us the same block at once
SCAN_MAX = 256  # waiting blocks looked at for one provider at one event
RECENT = 31  # arrivals that the typical time is the median of ...
RECENT_OF_ONE = 7  # ... and those for a single provider's


@dataclass(frozen=True, slots=True)
class BlocksWanted:
    """More blocks to fetch; those known already change nothing."""

    cids: tuple[Cid, ...]


@dataclass(frozen=True, slots=True)
class ProviderJoined:
    provider: PeerId


@dataclass(frozen=True, slots=True)
class ProviderLost:
    """The provider is gone for good; a short failure is a RequestFailed."""

    provider: PeerId


@dataclass(frozen=True, slots=True)
class BlockArrived:
    """The block came, its hash is right, and it is stored."""

    provider: PeerId
    cid: Cid


@dataclass(frozen=True, slots=True)
class BlockBad:
    """Bytes came that are not the block."""

    provider: PeerId
    cid: Cid


@dataclass(frozen=True, slots=True)
class BlockMissing:
    """The provider says that it does not have the block."""

    provider: PeerId
    cid: Cid


@dataclass(frozen=True, slots=True)
class BlockPostponed:
    """The provider had no room for the block in an answer that held others."""

    provider: PeerId
    cid: Cid


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """No usable answer: a timeout, a broken stream, a refusal."""

    provider: PeerId
    cids: tuple[Cid, ...]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time went by."""


FetchEvent = (
    BlocksWanted
    | ProviderJoined
    | ProviderLost
    | BlockArrived
    | BlockBad
    | BlockMissing
    | BlockPostponed
    | RequestFailed
    | Tick
)


class LeaveReason(StrEnum):
    BAD_BLOCKS = "bad_blocks"
    FAILURES = "failures"


@dataclass(frozen=True, slots=True)
class Ask:
    """Request these blocks of the provider in one call."""

    provider: PeerId
    cids: tuple[Cid, ...]


@dataclass(frozen=True, slots=True)
class Blame:
    """The provider sent bytes that are not the block it was asked for."""

    provider: PeerId
    cid: Cid


@dataclass(frozen=True, slots=True)
class Leave:
    """Nothing more will be asked of the provider; what it still sends is welcome."""

    provider: PeerId
    reason: LeaveReason


@dataclass(frozen=True, slots=True)
class Done:
    """Every wanted block arrived; the last command."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """A block cannot come; the last command."""

    reason: str


FetchCommand = Ask | Blame | Leave | Done | GiveUp


@dataclass(slots=True)
class _Block:
    asked_at: dict[PeerId, float] = field(default_factory=dict[PeerId, float])
    bad_from: set[PeerId] = field(default_factory=set[PeerId])
    missing_at: set[PeerId] = field(default_factory=set[PeerId])
    tried: set[PeerId] = field(default_factory=set[PeerId])  # failed or sent it bad
    attempts: int = 0


@dataclass(slots=True)
class _Provider:
    owes: dict[Cid, None] = field(default_factory=dict[Cid, None])  # an ordered set
    good: int = 0
    bad: int = 0
    missing: int = 0  # in a row
    failures: int = 0  # in a row
    resume_at: float = float("-inf")
    took_s: deque[float] = field(default_factory=lambda: deque[float](maxlen=RECENT_OF_ONE))
    typical_s: float | None = None

    def note_took(self, took_s: float) -> None:
        self.took_s.append(took_s)
        self.typical_s = median_low(self.took_s)


class Fetch:
    """One download. `handle` never raises for a well-typed event, in any order, also a late or repeated one.

    A block is in exactly one place: waiting (asked of nobody), owed (by one or two providers), or arrived.
    """

    def __init__(self, limits: FetchLimits) -> None:
        self._limits = limits
        self._blocks: dict[Cid, _Block] = {}  # all that have not arrived
        self._waiting: dict[Cid, None] = {}  # an ordered set: front = asked next
        self._owed: dict[Cid, None] = {}
        self._arrived: set[Cid] = set()
        self._providers: dict[PeerId, _Provider] = {}
        self._left: set[PeerId] = set()
        self._met_any = False
        self._took_s: deque[float] = deque(maxlen=RECENT)
        self._typical_s = limits.typical_first_s
        self._over = False

    @property
    def over(self) -> bool:
        """Whether Done or GiveUp was given."""
        return self._over

    def owed_by(self, provider: PeerId) -> tuple[Cid, ...]:
        """The blocks that the provider was asked for and has not answered."""
        known = self._providers.get(provider)
        return tuple(known.owes) if known else ()

    def handle(self, event: FetchEvent, now: float) -> list[FetchCommand]:
        if self._over:
            return []
        commands: list[FetchCommand] = []
        match event:
            case BlocksWanted(cids):
                self._want(cids)
            case ProviderJoined(provider):
                self._join(provider)
            case ProviderLost(provider):
                self._remove(provider)
            case BlockArrived(provider, cid):
                self._take(provider, cid, now)
            case BlockBad(provider, cid):
                commands += self._blame(provider, cid)
            case BlockMissing(provider, cid):
                self._note_missing(provider, cid)
            case BlockPostponed(provider, cid):
                self._unask(provider, cid)
            case RequestFailed(provider, cids):
                commands += self._fail(provider, cids, now)
            case Tick():
                pass
        return commands + self._go_on(event, now)

    def wake_at(self, now: float) -> float | None:
        """When a Tick may bring a command although nothing else happens; None = it never will."""
        if self._over:
            return None
        times = [provider.resume_at for provider in self._providers.values()]
        owed = (self._blocks[cid] for cid in self._owed)
        times += [self._late_at(block) for block in owed if len(block.asked_at) < COPIES_MAX]
        return min((at for at in times if at > now), default=None)

    # Events.

    def _want(self, cids: Iterable[Cid]) -> None:
        for cid in cids:
            if cid not in self._blocks and cid not in self._arrived:
                self._blocks[cid] = _Block()
                self._waiting[cid] = None

    def _join(self, provider: PeerId) -> None:
        if provider in self._left or len(self._providers) >= self._limits.providers_max:
            return
        self._met_any = True
        self._providers.setdefault(provider, _Provider())

    def _remove(self, provider: PeerId) -> None:
        known = self._providers.get(provider)
        if known is not None:
            for cid in tuple(known.owes):
                self._unask(provider, cid)
            del self._providers[provider]

    def _leave(self, provider: PeerId, reason: LeaveReason) -> Leave:
        self._remove(provider)
        self._left.add(provider)
        return Leave(provider, reason)

    def _take(self, provider: PeerId, cid: Cid, now: float) -> None:
        block, known = self._blocks.get(cid), self._providers.get(provider)
        if block is not None and provider in block.asked_at:
            took_s = now - block.asked_at[provider]
            self._took_s.append(took_s)
            self._typical_s = median_low(self._took_s)
            if known is not None:
                known.note_took(took_s)
        self._unask(provider, cid)
        if known is not None:
            known.good += 1
            known.missing = 0
            known.failures = 0
        if block is not None:
            del self._blocks[cid]
            self._waiting.pop(cid, None)
            self._owed.pop(cid, None)
            self._arrived.add(cid)

    def _note_missing(self, provider: PeerId, cid: Cid) -> None:
        if (known := self._providers.get(provider)) is not None and cid in known.owes:
            known.missing += 1
        if (block := self._unask(provider, cid)) is not None:
            block.missing_at.add(provider)

    def _blame(self, provider: PeerId, cid: Cid) -> Iterator[FetchCommand]:
        known = self._providers.get(provider)
        if known is None or cid not in known.owes:
            return
        yield Blame(provider, cid)
        if (block := self._unask(provider, cid)) is not None:
            block.bad_from.add(provider)
            block.tried.add(provider)
            block.attempts += 1
        known.bad += 1
        alone = len(self._providers) == 1
        if known.bad >= self._limits.bad_blocks_max and (not alone or known.bad > known.good):
            yield self._leave(provider, LeaveReason.BAD_BLOCKS)

    def _fail(self, provider: PeerId, cids: Iterable[Cid], now: float) -> Iterator[FetchCommand]:
        known = self._providers.get(provider)
        if known is None:
            return
        for cid in cids:
            if cid in known.owes and (block := self._unask(provider, cid)) is not None:
                block.tried.add(provider)
                block.attempts += 1
        if now < known.resume_at:
            return  # several requests that broke together are one failure
        known.failures += 1
        known.resume_at = now + min(self._limits.pause_max_s, self._limits.pause_s * 2 ** (known.failures - 1))
        if known.failures >= self._limits.failures_max:
            yield self._leave(provider, LeaveReason.FAILURES)

    def _unask(self, provider: PeerId, cid: Cid) -> _Block | None:
        """The provider owes the block no more; returns the block if it is still to come."""
        known, block = self._providers.get(provider), self._blocks.get(cid)
        if known is not None:
            known.owes.pop(cid, None)
        if block is not None and block.asked_at.pop(provider, None) is not None and not block.asked_at:
            del self._owed[cid]
            self._waiting[cid] = None
        return block

    # What to do next.

    def _go_on(self, event: FetchEvent, now: float) -> list[FetchCommand]:
        if not self._blocks:
            if self._arrived:
                return self._finish(Done())
            return []
        if (reason := self._hopeless(event)) is not None:
            return self._finish(GiveUp(reason))
        return list(self._asks(now))

    def _finish(self, command: Done | GiveUp) -> list[FetchCommand]:
        self._over = True
        return [command]

    def _hopeless(self, event: FetchEvent) -> str | None:
        """Looks only at what the event may have made hopeless: a download has thousands of blocks."""
        if not self._met_any:
            return None
        if not self._providers:
            return f"no provider is left; {len(self._blocks)} blocks are missing"
        match event:
            case BlockArrived() | BlockPostponed() | Tick():
                return None
            case BlockMissing(_, cid):
                suspects: Iterable[Cid] = (cid,)
            case _:
                suspects = self._waiting
        for cid in suspects:
            block = self._blocks.get(cid)
            if block is None or block.asked_at:
                continue
            if all(provider in block.missing_at for provider in self._providers):
                return f"none of {len(self._providers)} providers has block {cid}"
            if not any(self._may_ask(provider, block) for provider in self._providers):
                return f"block {cid} failed {block.attempts} times"
        return None

    def _asks(self, now: float) -> Iterator[Ask]:
        # One request each per round, the provider with the least to answer first: all get work before one is full.
        asked = True
        while asked:
            asked = False
            for name in sorted(self._providers, key=lambda name: len(self._providers[name].owes)):
                if cids := self._choose(name, now):
                    self._note_asked(name, cids, now)
                    asked = True
                    yield Ask(name, cids)

    def _note_asked(self, name: PeerId, cids: Iterable[Cid], now: float) -> None:
        for cid in cids:
            self._waiting.pop(cid, None)
            self._owed[cid] = None
            self._blocks[cid].asked_at[name] = now
            self._providers[name].owes[cid] = None

    def _choose(self, name: PeerId, now: float) -> tuple[Cid, ...]:
        provider = self._providers[name]
        room = min(self._limits.ask_max, self._limits.in_flight_max - len(provider.owes))
        if room <= 0 or now < provider.resume_at:
            return ()
        waiting: Iterable[Cid] = self._waiting
        if provider.missing >= self._limits.scarce_after:
            if provider.owes:
                return ()
            waiting = reversed(self._waiting)
        if self._is_slow(provider) or provider.failures:
            if provider.owes:
                return ()
            room = 1
        fresh = (cid for cid in islice(waiting, SCAN_MAX) if self._may_ask(name, self._blocks[cid]))
        return tuple(islice(fresh, room)) or tuple(islice(self._late(name, now), room))

    def _late(self, name: PeerId, now: float) -> Iterator[Cid]:
        for cid in self._owed:
            block = self._blocks[cid]
            if (
                name not in block.asked_at
                and len(block.asked_at) < COPIES_MAX
                and (self._late_at(block) <= now or self._overtakes(name, block, now))
                and self._may_ask(name, block)
            ):
                yield cid

    def _is_slow(self, provider: _Provider) -> bool:
        return provider.typical_s is not None and provider.typical_s > self._limits.late_factor * self._typical_s

    def _overtakes(self, name: PeerId, block: _Block, now: float) -> bool:
        own_s = self._providers[name].typical_s
        if own_s is None:
            return False
        for owner, asked_at in block.asked_at.items():
            their_s = self._providers[owner].typical_s
            if their_s is None or now + self._limits.overtake_factor * own_s >= asked_at + their_s:
                return False
        return True

    def _may_ask(self, name: PeerId, block: _Block) -> bool:
        if name in block.missing_at or (block.attempts >= self._limits.attempts_max and name in block.tried):
            return False
        return name not in block.bad_from or all(
            other in block.bad_from or other in block.missing_at for other in self._providers
        )

    def _late_at(self, block: _Block) -> float:
        # The one place for this sum: a caller that compared differences instead could sleep past the moment.
        return min(block.asked_at.values()) + max(self._limits.late_floor_s, self._limits.late_factor * self._typical_s)
