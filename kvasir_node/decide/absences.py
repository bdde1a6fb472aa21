"""What it means that nothing is heard of a worker: whether it is at fault, or was only out of reach.

It does not know connections or calls. A call that is late says nothing by itself: the worker may not answer, or the way
to it may be dead, or its machine asleep. So whoever owns this asks the connection itself as soon as a call is late:

    answered at once     the worker is there and did not answer the call: its fault
    answered late        the way or the whole machine was away: an absence, nobody's fault
    the connection ends  an absence

An absence costs share, not standing: nothing is sent while it lasts, and proof goes on from where it was. Few of them
cost nothing more. Who is away again and again rests after each, longer each time, or every absence would cost those
who wait for it a deadline; it begins anew once it stayed as long as its last rest, and at least a minute.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvasir_node.base.ids import PeerId


@dataclass(frozen=True, slots=True)
class AbsenceLimits:
    rest_s: float  # after the first absence that costs one; doubles with each ...
    rest_max_s: float  # ... up to this
    free: int = 2  # absences in a row that cost no rest
    one_s: float = 1.0  # absences within this are one: a connection and what goes over it end one after the other
    prompt_s: float = 0.25  # a connection that answers within this and two round trips was there all the time
    calm_s: float = 60.0  # without an absence for so long, and for as long as the last rest, all are forgotten
    peers_max: int = 4096  # remembered; the one heard of longest ago makes room


@dataclass(slots=True)
class _Record:
    is_asked: bool = False  # its connection is being asked whether it is there
    judged_at: float = float("-inf")  # what was sent before is judged already
    absences: int = 0
    noted_at: float = float("-inf")
    rests_until: float = float("-inf")
    rest_s: float = 0.0


@dataclass(slots=True)
class Absences:
    limits: AbsenceLimits
    _records: dict[PeerId, _Record] = field(default_factory=dict[PeerId, _Record])
    _resting: set[PeerId] = field(default_factory=set[PeerId])

    def late(self, peer: PeerId, sent_at: float) -> bool:
        """A call that was sent then is late. True = ask the peer's connection now, and tell `answered` or `lost`."""
        record = self._record(peer)
        if record.is_asked or sent_at <= record.judged_at:
            return False
        record.is_asked = True
        return True

    def answered(self, peer: PeerId, took_s: float, round_trip_s: float, now: float) -> bool:
        """The connection answered after `took_s`; True = the peer was there all the time, so the silence is its fault.

        `round_trip_s`: what such an answer usually takes.
        """
        record = self._record(peer)
        record.is_asked = False
        record.judged_at = now
        if took_s <= self.limits.prompt_s + 2 * round_trip_s:
            return True
        self._note(peer, record, now)
        return False

    def lost(self, peer: PeerId, now: float) -> None:
        """Its connection has ended."""
        self.dismiss(peer, now)
        self._note(peer, self._record(peer), now)

    def dismiss(self, peer: PeerId, now: float) -> None:
        """It was not the peer that was away, but we: that counts for nothing."""
        record = self._record(peer)
        record.is_asked = False
        record.judged_at = now

    def _note(self, peer: PeerId, record: _Record, now: float) -> None:
        limits = self.limits
        if now - record.noted_at < limits.one_s:
            return
        record.noted_at = now
        if now - record.rests_until > max(limits.calm_s, record.rest_s):
            record.absences, record.rest_s = 0, 0.0
        record.absences += 1
        beyond = record.absences - limits.free
        if beyond > 0:
            record.rest_s = min(limits.rest_max_s, limits.rest_s * 2.0 ** min(beyond - 1, 32))
            self._resting.add(peer)
        record.rests_until = now + record.rest_s

    def is_away(self, peer: PeerId, now: float) -> bool:
        """Whether nothing is to be sent to a peer: its connection is being asked, or it rests."""
        record = self._records.get(peer)
        return record is not None and (record.is_asked or now < record.rests_until)

    def rested(self, now: float) -> list[PeerId]:
        """Whose rest has ended since the last call."""
        over = [peer for peer in self._resting if now >= self._records[peer].rests_until]
        self._resting.difference_update(over)
        return over

    def _record(self, peer: PeerId) -> _Record:
        """The peer's, which becomes the newest."""
        record = self._records.pop(peer, None) or _Record()
        self._records[peer] = record
        if len(self._records) > self.limits.peers_max:
            oldest = next(iter(self._records))
            del self._records[oldest]
            self._resting.discard(oldest)
        return record
