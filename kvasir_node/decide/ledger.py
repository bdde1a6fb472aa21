"""Who has proven what: one standing per (peer, slice).

It does not compute, compare or send anything: roles/ tell it what happened and ask what is allowed.

    NEW --trial begins--> TRIAL --right--> PROVEN --failure--> SUSPECT --trial begins (after cool-off)--> TRIAL
    TRIAL --failure--> SUSPECT;  SUSPECT --too many wrong answers in a row--> BANNED (for this process's life)
    PROVEN --no right answer for proof_ttl_s--> NEW

A *wrong* answer (mismatch, NaN, bad shape) counts towards a ban; silence, errors and lost connections only cool
off, longer each time. Leaving and coming back changes nothing, so re-attaching buys no trial.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

from kvasir_node.base.ids import PeerId, SliceId


class Standing(StrEnum):
    NEW = "new"
    TRIAL = "trial"
    PROVEN = "proven"
    SUSPECT = "suspect"
    BANNED = "banned"


TELLING_FIRST = (Standing.PROVEN, Standing.TRIAL, Standing.SUSPECT, Standing.NEW, Standing.BANNED)
"""Of several slices of one peer, which standing says most about it: one that failed says more than one never tried."""


@dataclass(frozen=True, slots=True)
class LedgerLimits:
    cool_off_s: float  # pause after the first failure; doubles with each one after it ...
    cool_off_max_s: float  # ... up to this
    ban_after: int  # wrong answers without a right one between them
    proof_ttl_s: float
    trials_per_address_max: int  # under way or failed within trial_window_s
    trial_window_s: float
    pairs_max: int = 65_536  # (peer, slice) remembered; who left longest ago is forgotten first
    addresses_max: int = 65_536  # addresses with trials that count; one more gets none


@dataclass(slots=True)
class _Record:
    standing: Standing = Standing.NEW
    attached: bool = False
    failures: int = 0  # in a row, any kind
    wrong: int = 0  # in a row
    cooled_at: float = 0.0  # no trial before
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


@dataclass(slots=True)
class Ledger:
    limits: LedgerLimits
    _records: dict[tuple[PeerId, SliceId], _Record] = field(default_factory=dict[tuple[PeerId, SliceId], _Record])
    _gone: dict[tuple[PeerId, SliceId], None] = field(default_factory=dict[tuple[PeerId, SliceId], None])
    _trials: dict[str, deque[float]] = field(default_factory=dict[str, deque[float]])

    def attach(self, peer: PeerId, part: SliceId) -> None:
        """The peer says that it can serve the slice: noted, worth nothing until proven."""
        pair = (peer, part)
        record = self._records.get(pair)
        if record is None:
            if len(self._records) >= self.limits.pairs_max and not self._forget_one():
                return  # a newcomer never pushes out who is here; unknown pairs get no trial
            record = self._records[pair] = _Record()
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
        if record.standing not in (Standing.NEW, Standing.SUSPECT):
            return False
        counted = self._trials.get(address)
        if counted is None:
            return len(self._trials) < self.limits.addresses_max
        edge = now - self.limits.trial_window_s
        return sum(1 for began_at in counted if began_at > edge) < self.limits.trials_per_address_max

    def begin_trial(self, peer: PeerId, part: SliceId, address: str, now: float) -> None:
        self._trim_addresses(now)
        if not self.may_try(peer, part, address, now):
            raise ValueError(f"no trial is allowed for {part} of {peer} now")
        record = self._records[(peer, part)]
        record.standing = Standing.TRIAL
        record.cooled_at = now + self.limits.cool_off_s  # a trial that is given up is not repeated at once
        record.trial = (address, now)
        self._trials.setdefault(address, deque()).append(now)

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
            self._refund_trial(record)
        record.standing = Standing.PROVEN
        record.failures = record.wrong = 0
        record.right_at = now
        record.reason = ""
        return became

    def failed(self, peer: PeerId, part: SliceId, now: float, reason: str, *, wrong: bool) -> None:
        """A call failed through the peer's fault; `wrong` = it answered, but not the truth."""
        record = self._records.get((peer, part))
        if record is None or record.standing is Standing.BANNED:
            return
        record.failures += 1
        record.wrong += wrong
        record.reason = reason
        pause = self.limits.cool_off_s * 2.0 ** min(record.failures - 1, 32)
        record.cooled_at = now + min(self.limits.cool_off_max_s, pause)
        record.standing = Standing.BANNED if record.wrong >= self.limits.ban_after else Standing.SUSPECT

    def tick(self, now: float) -> bool:
        """Lets proofs decay; True when one did."""
        self._trim_addresses(now)
        decayed = False
        for record in self._records.values():
            if record.standing is Standing.PROVEN and now - record.right_at > self.limits.proof_ttl_s:
                record.standing = Standing.NEW
                decayed = True
        return decayed

    def standing(self, peer: PeerId, part: SliceId) -> Standing:
        record = self._records.get((peer, part))
        return Standing.NEW if record is None else record.standing

    def proven(self) -> tuple[tuple[PeerId, SliceId], ...]:
        """Attached and proven pairs: the only ones that may carry load, the only ones that count as coverage."""
        return tuple(pair for pair, r in self._records.items() if r.attached and r.standing is Standing.PROVEN)

    def coverage(self) -> dict[SliceId, int]:
        """Proven copies of each slice."""
        counts: dict[SliceId, int] = {}
        for _, part in self.proven():
            counts[part] = counts.get(part, 0) + 1
        return counts

    def pairs(self) -> tuple[PairView, ...]:
        return tuple(
            PairView(peer, part, r.standing, r.attached, r.failures, r.reason)
            for (peer, part), r in self._records.items()
        )

    def _refund_trial(self, record: _Record) -> None:
        """The cap per address is there to bound what liars cost: a trial that ended well does not count."""
        if record.trial is not None:
            address, began_at = record.trial
            record.trial = None
            recent = self._trials.get(address, deque())
            if began_at in recent:
                recent.remove(began_at)
            if not recent:
                self._trials.pop(address, None)

    def _forget_one(self) -> bool:
        """Makes room: forgets who left longest ago; False when nobody has left."""
        pair = next(iter(self._gone), None)
        if pair is None:
            return False
        del self._gone[pair], self._records[pair]
        return True

    def _trim_addresses(self, now: float) -> None:
        """Forgets what the window has passed, so that the table cannot grow without end."""
        edge = now - self.limits.trial_window_s
        for address, counted in list(self._trials.items()):
            while counted and counted[0] <= edge:
                counted.popleft()
            if not counted:
                del self._trials[address]
