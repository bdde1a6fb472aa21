"""Who has proven what: one standing per (peer, slice).

It does not compute, compare or send anything: roles/ tell it what happened and ask what is allowed.

    NEW --trial begins--> TRIAL --right--> PROVEN --failure--> SUSPECT --trial begins (after cool-off)--> TRIAL
    TRIAL --failure--> SUSPECT;  TRIAL --too many wrong answers in a row--> BANNED
    PROVEN --no right answer for proof_ttl_s--> NEW;  TRIAL --its end was never told--> NEW or SUSPECT
    any --caught lying in served work: once--> SUSPECT, twice--> BANNED, with all slices of the peer

Silence, errors and lost connections only cool off, longer each time; the pauses become short again once the pair
stayed proven for as long as its last pause. A *wrong* answer (mismatch, NaN, bad shape) in a trial costs no token, so
it takes several in a row to ban. In served work it is found by a check of few rows, so many others were probably wrong:
it is the peer that is doubted then, not a slice, and no trial redeems it. One such answer may come from a memory that
failed once; it stays on record. Leaving and coming back changes nothing, so re-attaching buys no trial.

Doubt outlives the coordinator (`doubts`, `strikes`, `restore`); proof does not: to prove it again costs one trial.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvasir_node.base.ids import PeerId, SliceId
from kvasir_node.decide.trial_caps import TrialCaps


class Standing(StrEnum):
    NEW = "new"
    TRIAL = "trial"
    PROVEN = "proven"
    SUSPECT = "suspect"
    BANNED = "banned"


REFUSED_MAX = 256  # peers that the market is told of; those that came last

TELLING_FIRST = (Standing.PROVEN, Standing.TRIAL, Standing.SUSPECT, Standing.NEW, Standing.BANNED)
"""Of several slices of one peer, which standing says most about it: one that failed says more than one never tried."""


@dataclass(frozen=True, slots=True)
class LedgerLimits:
    cool_off_s: float  # pause after the first failure; doubles with each one after it ...
    cool_off_max_s: float  # ... up to this
    ban_after: int  # wrong answers in trials without a right one between them
    proof_ttl_s: float
    trials_per_address_max: int  # under way or failed within trial_window_s, by range of addresses
    trial_window_s: float
    strikes_max: int = 2  # wrong answers in served work, ever
    trial_max_s: float = 60.0  # a trial whose end was not told by then is given up
    pairs_max: int = 65_536  # (peer, slice) remembered; who left longest ago is forgotten first
    addresses_max: int = 65_536  # ranges of addresses with trials that count; one more gets none
    strikes_peers_max: int = 65_536  # peers that were caught; the eldest makes room


@dataclass(slots=True)
class _Record:
    standing: Standing = Standing.NEW
    attached: bool = False
    failures: int = 0  # any kind, since it was last proven for long enough
    wrong: int = 0  # in trials, in a row
    cooled_at: float = 0.0  # no trial before
    proven_at: float = 0.0  # the latest proof
    right_at: float = 0.0  # last right answer
    reason: str = ""
    trial: tuple[str, float] | None = None  # address and beginning of the latest one


@dataclass(frozen=True, slots=True)
class PairView:
    """What can be seen of one (peer, slice)."""

    peer: PeerId
    slice: SliceId
    standing: Standing
    attached: bool
    failures: int
    reason: str


@dataclass(frozen=True, slots=True)
class Doubt:
    """What must outlive the process of one (peer, slice) that failed."""

    peer: PeerId
    slice: SliceId
    failures: int
    wrong: int
    banned: bool
    cools_for_s: float  # from now
    reason: str


@dataclass(slots=True)
class Ledger:
    limits: LedgerLimits
    changes: int = 0  # of what must outlive the process; grows
    _caps: TrialCaps = field(init=False)
    _records: dict[tuple[PeerId, SliceId], _Record] = field(default_factory=dict[tuple[PeerId, SliceId], _Record])
    _gone: dict[tuple[PeerId, SliceId], None] = field(default_factory=dict[tuple[PeerId, SliceId], None])
    _strikes: dict[PeerId, int] = field(default_factory=dict[PeerId, int])

    def __post_init__(self) -> None:
        limits = self.limits
        self._caps = TrialCaps(limits.trials_per_address_max, limits.trial_window_s, limits.addresses_max)

    def attach(self, peer: PeerId, part: SliceId) -> None:
        """The peer says that it can serve the slice: noted, worth nothing until proven."""
        pair = (peer, part)
        record = self._records.get(pair)
        if record is None:
            if len(self._records) >= self.limits.pairs_max and not self._forget_one():
                return  # a newcomer never pushes out who is here; unknown pairs get no trial
            record = self._records[pair] = _Record()
            if self._is_out(peer):
                record.standing, record.reason = Standing.BANNED, "it was caught giving wrong answers"
        record.attached = True
        self._gone.pop(pair, None)

    def detach(self, peer: PeerId, part: SliceId) -> None:
        """The peer left, or its connection is gone. A trial under way counts as not held, not as failed."""
        record = self._records.get((peer, part))
        if record is not None and record.attached:
            record.attached = False
            self._gone[(peer, part)] = None
            self.give_up_trial(peer, part)

    def give_up_trial(self, peer: PeerId, part: SliceId) -> None:
        """A trial ends without a verdict; the next may begin after the cool-off that it started."""
        record = self._records.get((peer, part))
        if record is not None and record.standing is Standing.TRIAL:
            record.standing = Standing.SUSPECT if record.failures else Standing.NEW

    def may_try(self, peer: PeerId, part: SliceId, address: str, now: float) -> bool:
        """Whether a trial may begin: attached, not proven or banned, cooled off, and its address below the cap."""
        record = self._records.get((peer, part))
        if record is None or not record.attached or now < record.cooled_at:
            return False
        return record.standing in (Standing.NEW, Standing.SUSPECT) and self._caps.allow(address, now)

    def begin_trial(self, peer: PeerId, part: SliceId, address: str, now: float) -> None:
        self._caps.trim(now)
        if not self.may_try(peer, part, address, now):
            raise ValueError(f"no trial is allowed for {part} of {peer} now")
        record = self._records[(peer, part)]
        record.standing = Standing.TRIAL
        record.cooled_at = now + self.limits.cool_off_s  # a trial that is given up is not repeated at once
        record.trial = (address, now)
        self._caps.begin(address, now)

    def right(self, peer: PeerId, part: SliceId, now: float, *, served: bool = False) -> bool:
        """A right answer; True when the pair became PROVEN by it.

        `served` = to a call of served work. It keeps a proof alive and never makes one: it may be the late answer to a
        call of before a failure, come while the trial after it is under way.
        """
        record = self._records.get((peer, part))
        if record is None or record.standing not in (Standing.TRIAL, Standing.PROVEN):
            return False
        if served and record.standing is Standing.TRIAL:
            return False
        became = record.standing is Standing.TRIAL
        if became:
            if record.trial is not None:
                self._caps.refund(*record.trial)
                record.trial = None
            record.standing, record.proven_at, record.wrong = Standing.PROVEN, now, 0
        if record.failures and now - record.proven_at >= self._pause_s(record):
            record.failures = 0  # until then it may be one that passes its trial and fails at once, over and over
            self.changes += 1
        record.right_at = now
        record.reason = ""
        return became

    def failed(self, peer: PeerId, part: SliceId, now: float, reason: str, *, wrong: bool) -> None:
        """A call failed through the peer's fault; `wrong` = it answered, but not the truth.

        For a wrong answer to served work see `caught`.
        """
        record = self._records.get((peer, part))
        if record is not None and record.standing is not Standing.BANNED:
            record.wrong += wrong
            self._doubt(record, now, reason, bans=record.wrong >= self.limits.ban_after)

    def caught(self, peer: PeerId, now: float, reason: str) -> bool:
        """The peer gave a wrong answer to served work; True when that bans it. All its slices are doubted."""
        strikes = self._strikes.pop(peer, 0) + 1
        self._strikes[peer] = strikes
        if len(self._strikes) > self.limits.strikes_peers_max:
            del self._strikes[next(iter(self._strikes))]
        for (owner, _), record in self._records.items():
            if owner == peer and record.standing is not Standing.BANNED:
                self._doubt(record, now, reason, bans=self._is_out(peer))
        return self._is_out(peer)

    def _doubt(self, record: _Record, now: float, reason: str, *, bans: bool) -> None:
        record.failures += 1
        record.reason = reason
        record.cooled_at = now + self._pause_s(record)
        record.standing = Standing.BANNED if bans else Standing.SUSPECT
        self.changes += 1

    def _pause_s(self, record: _Record) -> float:
        pause_s = self.limits.cool_off_s * 2.0 ** min(record.failures - 1, 32)
        return min(self.limits.cool_off_max_s, pause_s)

    def _is_out(self, peer: PeerId) -> bool:
        return self._strikes.get(peer, 0) >= self.limits.strikes_max

    def tick(self, now: float) -> bool:
        """Lets proofs decay, and gives trials up whose end was never told; True when who is proven changed."""
        self._caps.trim(now)
        decayed = False
        for (peer, part), record in self._records.items():
            if record.standing is Standing.PROVEN and now - record.right_at > self.limits.proof_ttl_s:
                record.standing = Standing.NEW
                decayed = True
            elif record.standing is Standing.TRIAL and record.trial and now - record.trial[1] > self.limits.trial_max_s:
                self.give_up_trial(peer, part)
        return decayed

    def standing(self, peer: PeerId, part: SliceId) -> Standing:
        record = self._records.get((peer, part))
        if record is None:
            return Standing.BANNED if self._is_out(peer) else Standing.NEW
        return record.standing

    def proven(self) -> tuple[tuple[PeerId, SliceId], ...]:
        """Attached and proven pairs: the only ones that may carry load, the only ones that count as coverage."""
        return tuple(pair for pair, r in self._records.items() if r.attached and r.standing is Standing.PROVEN)

    def refused(self) -> tuple[PeerId, ...]:
        """Peers that will not be used, as the market should know: banned ones, and those here that answered wrong or
        failed more than once. One failure may be anybody's."""
        found = {
            peer: None
            for (peer, _), r in self._records.items()
            if r.standing is Standing.BANNED
            or (r.attached and r.standing is Standing.SUSPECT and (r.wrong or r.failures > 1))
        }
        return tuple(found)[-REFUSED_MAX:]

    def pairs(self) -> tuple[PairView, ...]:
        return tuple(
            PairView(peer, part, r.standing, r.attached, r.failures, r.reason)
            for (peer, part), r in self._records.items()
        )

    def strikes(self) -> Mapping[PeerId, int]:
        """How often each peer was caught giving wrong answers in served work."""
        return dict(self._strikes)

    def doubts(self, now: float) -> tuple[Doubt, ...]:
        """All pairs that failed, bans first, then those that failed most."""
        found = [
            Doubt(peer, part, r.failures, r.wrong, banned, max(0.0, r.cooled_at - now), r.reason)
            for (peer, part), r in self._records.items()
            if (banned := r.standing is Standing.BANNED) or r.failures
        ]
        return tuple(sorted(found, key=lambda doubt: (not doubt.banned, -doubt.failures)))

    def restore(self, strikes: Mapping[PeerId, int], doubts: Iterable[Doubt], now: float) -> None:
        """Takes up what an earlier process of this coordinator knew; for a ledger that is new."""
        self._strikes.update(strikes)
        for doubt in doubts:
            self.attach(doubt.peer, doubt.slice)
            self.detach(doubt.peer, doubt.slice)
            record = self._records.get((doubt.peer, doubt.slice))
            if record is not None:
                record.failures, record.wrong, record.reason = doubt.failures, doubt.wrong, doubt.reason
                record.cooled_at = now + min(doubt.cools_for_s, self.limits.cool_off_max_s)
                record.standing = Standing.BANNED if doubt.banned or self._is_out(doubt.peer) else Standing.SUSPECT

    def _forget_one(self) -> bool:
        """Makes room: forgets who left longest ago; False when nobody has left."""
        pair = next(iter(self._gone), None)
        if pair is None:
            return False
        del self._gone[pair], self._records[pair]
        return True
