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


BEST_FIRST = (Standing.PROVEN, Standing.TRIAL, Standing.NEW, Standing.SUSPECT, Standing.BANNED)


@dataclass(frozen=True, slots=True)
class LedgerLimits:
    cool_off_s: float  # pause after the first failure; doubles with each one after it ...
    cool_off_max_s: float  # ... up to this
    ban_after: int  # wrong answers without a right one between them
    proof_ttl_s: float
    trials_per_address_max: int  # within trial_window_s
    trial_window_s: float
    pairs_max: int = 65_536  # (peer, slice) remembered; the oldest that is not attached is forgotten first


@dataclass(slots=True)
class _Record:
    standing: Standing = Standing.NEW
    attached: bool = False
    failures: int = 0  # in a row, any kind
    wrong: int = 0  # in a row
    cooled_at: float = 0.0  # no trial before
    right_at: float = 0.0  # last right answer
    reason: str = ""


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
    _trials: dict[str, deque[float]] = field(default_factory=dict[str, deque[float]])

    def attach(self, peer: PeerId, part: SliceId) -> None:
        """The peer says that it can serve the slice: noted, worth nothing until proven."""
        record = self._records.pop((peer, part), _Record())
        record.attached = True
        self._records[(peer, part)] = record  # newest last
        self._forget_oldest()

    def detach(self, peer: PeerId, part: SliceId) -> None:
        """The peer left, or its connection is gone. A trial under way counts as not held, not as failed."""
        record = self._records.get((peer, part))
        if record is not None:
            record.attached = False
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
        recent = self._trials.get(address)
        if recent is None:
            return True
        while recent and recent[0] <= now - self.limits.trial_window_s:
            recent.popleft()
        return len(recent) < self.limits.trials_per_address_max

    def begin_trial(self, peer: PeerId, part: SliceId, address: str, now: float) -> None:
        if not self.may_try(peer, part, address, now):
            raise ValueError(f"no trial is allowed for {part} of {peer} now")
        record = self._records[(peer, part)]
        record.standing = Standing.TRIAL
        # Until the trial ends no other begins; if its end is never told, the cool-off still frees the pair.
        record.cooled_at = now + self.limits.cool_off_s
        self._trials.setdefault(address, deque()).append(now)
        self._trim_addresses(now)

    def right(self, peer: PeerId, part: SliceId, now: float) -> bool:
        """A right answer, of a trial or of served work; True when the pair became PROVEN by it."""
        record = self._records.get((peer, part))
        if record is None or record.standing in (Standing.NEW, Standing.SUSPECT, Standing.BANNED):
            return False  # a late answer of before the failure proves nothing
        became = record.standing is Standing.TRIAL
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

    def _forget_oldest(self) -> None:
        while len(self._records) > self.limits.pairs_max:
            gone = next((pair for pair, r in self._records.items() if not r.attached), next(iter(self._records)))
            del self._records[gone]

    def _trim_addresses(self, now: float) -> None:
        """Keeps only addresses with a trial inside the window, so that the table cannot grow without end."""
        edge = now - self.limits.trial_window_s
        self._trials = {address: times for address, times in self._trials.items() if times[-1] > edge}
