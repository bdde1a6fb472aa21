"""How many calls of ours may be under way on a stream, and which goes next when one is over.

Pure: it does not know streams, tasks, time or what a call says.

The answering side grants a number of calls and of bytes, the sum of their bodies. Until its GRANT has come, `FIRST`
holds, so that a first call needs no round trip. A call takes its credit when it is sent and gives it back when its
result came or its CANCEL was sent; the answering side counts the same frames in the same order, so an honest caller
never overruns it. Who finds no credit waits: the most urgent first, and among equals whoever came first; a large body
at the front is not overtaken by smaller ones behind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from kvasir_node.base.errors import Misbehaved, Overloaded, RejectReason, UsageError

WAITING_MAX = 256  # calls of one stream that wait for credit


class Priority(IntEnum):
    """Who goes first where calls wait for credit."""

    TOKEN = 0  # an answer that a token waits for
    PLAIN = 1
    BULK = 2


class Grant(NamedTuple):
    """What may be under way at once: calls, and bytes of their bodies together."""

    calls: int
    bytes: int


FIRST = Grant(1, 64 * 1024)


@dataclass(frozen=True, slots=True)
class CallStatistics:
    """One stream's use of its bounds; a `_peak` is the most there ever was at once.

    `sent_max` is the smaller of the peer's grant and our own limit; `served` are the peer's calls.
    """

    sent: int
    sent_peak: int
    sent_max: int
    sent_bytes: int
    sent_bytes_peak: int
    sent_bytes_max: int
    waiting: int
    waiting_peak: int
    waiting_max: int
    served: int
    served_peak: int
    served_max: int


def body_beyond_grant(size_bytes: int, grant: Grant) -> UsageError:
    return UsageError(f"a call's body of {size_bytes} bytes; the peer takes at most {grant.bytes} at once")


class Credits:
    """The calling side's account. `calls_max` is our own limit, whatever was granted."""

    def __init__(self, calls_max: int) -> None:
        self._own_max = calls_max
        self._grant = FIRST
        self._is_granted = False
        self._calls_max = min(calls_max, FIRST.calls)
        self._sent: dict[int, int] = {}  # id -> bytes of its body
        self._sent_bytes = 0
        self._waiting: tuple[dict[int, int], ...] = tuple({} for _ in Priority)  # each in the order they came
        self._waiting_count = 0
        self._sent_peak = self._sent_bytes_peak = self._waiting_peak = 0

    @property
    def waiting_count(self) -> int:
        return self._waiting_count

    def granted(self, grant: Grant) -> list[int]:
        """The peer's word; the ids of waiting calls that it will never take, which wait no more.

        Raises Misbehaved for less than was granted before, as that may be under way.
        """
        if grant.calls < self._grant.calls or grant.bytes < self._grant.bytes:
            text = f"a grant of {grant.calls} calls and {grant.bytes} bytes after one of"
            raise Misbehaved(RejectReason.BAD_FRAME, f"{text} {self._grant.calls} and {self._grant.bytes}")
        self._grant, self._is_granted = grant, True
        self._calls_max = min(self._own_max, grant.calls)
        hopeless = [call_id for lane in self._waiting for call_id, size in lane.items() if size > grant.bytes]
        for call_id in hopeless:
            self.give_back(call_id)
        return hopeless

    def take(self, call_id: int, size_bytes: int) -> bool:
        """Whether the call may be sent now; its credit is then taken. Nobody is overtaken."""
        if self._waiting_count or not self._fits(size_bytes):
            return False
        self._note_sent(call_id, size_bytes)
        return True

    def wait(self, call_id: int, size_bytes: int, priority: Priority) -> None:
        """Raises Overloaded when too many wait, UsageError for a body that the peer will never take."""
        if self._is_granted and size_bytes > self._grant.bytes:
            raise body_beyond_grant(size_bytes, self._grant)
        if self._waiting_count >= WAITING_MAX:
            text = f"{len(self._sent)} calls are under way and {WAITING_MAX} wait for one of them to end"
            raise Overloaded(f"{text}, which is all that may; ask less at once, or another peer")
        self._waiting[priority][call_id] = size_bytes
        self._waiting_count += 1
        self._waiting_peak = max(self._waiting_peak, self._waiting_count)

    def next_calls(self) -> Iterator[int]:
        """The waiting calls that may go now, one after the other; each has taken its credit."""
        while self._waiting_count:
            lane = next(lane for lane in self._waiting if lane)
            call_id = next(iter(lane))
            if not self._fits(lane[call_id]):
                return
            self._note_sent(call_id, lane.pop(call_id))
            self._waiting_count -= 1
            yield call_id

    def give_back(self, call_id: int) -> bool:
        """The call is over; False when it had not been sent and only waited."""
        size = self._sent.pop(call_id, None)
        if size is not None:
            self._sent_bytes -= size
            return True
        for lane in self._waiting:
            if lane.pop(call_id, None) is not None:
                self._waiting_count -= 1
        return False

    def _fits(self, size_bytes: int) -> bool:
        return len(self._sent) < self._calls_max and self._sent_bytes + size_bytes <= self._grant.bytes

    def _note_sent(self, call_id: int, size_bytes: int) -> None:
        self._sent[call_id] = size_bytes
        self._sent_bytes += size_bytes
        if len(self._sent) > self._sent_peak:
            self._sent_peak = len(self._sent)
        if self._sent_bytes > self._sent_bytes_peak:
            self._sent_bytes_peak = self._sent_bytes

    def statistics(self, served: Served) -> CallStatistics:
        return CallStatistics(
            sent=len(self._sent),
            sent_peak=self._sent_peak,
            sent_max=self._calls_max,
            sent_bytes=self._sent_bytes,
            sent_bytes_peak=self._sent_bytes_peak,
            sent_bytes_max=self._grant.bytes,
            waiting=self._waiting_count,
            waiting_peak=self._waiting_peak,
            waiting_max=WAITING_MAX,
            served=len(served.sizes),
            served_peak=served.peak,
            served_max=served.grant.calls,
        )


class Served:
    """The answering side's account of one caller."""

    def __init__(self, grant: Grant) -> None:
        self.grant = Grant(max(grant.calls, FIRST.calls), max(grant.bytes, FIRST.bytes))
        self.sizes: dict[int, int] = {}  # id -> bytes of the body
        self.peak = 0
        self._bytes = 0

    def arrived(self, call_id: int, size_bytes: int) -> None:
        """Raises Misbehaved for a call beyond the grant, or an id that is in use."""
        if call_id in self.sizes:
            raise Misbehaved(RejectReason.BAD_FRAME, f"call id {call_id} is used twice at once")
        if len(self.sizes) >= self.grant.calls or self._bytes + size_bytes > self.grant.bytes:
            text = f"a call of {size_bytes} bytes beside {len(self.sizes)} of {self._bytes} overruns the grant of"
            raise Misbehaved(RejectReason.TOO_MANY, f"{text} {self.grant.calls} calls and {self.grant.bytes} bytes")
        self.sizes[call_id] = size_bytes
        self._bytes += size_bytes
        if len(self.sizes) > self.peak:
            self.peak = len(self.sizes)

    def over(self, call_id: int) -> bool:
        """Answered or cancelled; False when it was over already."""
        size = self.sizes.pop(call_id, None)
        if size is None:
            return False
        self._bytes -= size
        return True
