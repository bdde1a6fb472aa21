"""Credits without streams: the caller's account and the answering side's agree, whatever crosses on the way."""

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_node.base.errors import Misbehaved, Overloaded, RejectReason, UsageError
from kvasir_node.net.rpc_credits import FIRST, WAITING_MAX, Credits, Grant, Priority, Served


def granted(calls=2, total_bytes=1 << 20, own_max=8):
    credits_ = Credits(own_max)
    assert credits_.granted(Grant(calls, total_bytes)) == []
    return credits_


def test_before_the_grant_one_small_call_may_go():
    credits_ = Credits(8)
    assert not credits_.take(1, FIRST.bytes + 1)
    assert credits_.take(2, FIRST.bytes)
    assert not credits_.take(3, 0)


def test_the_smaller_of_the_grant_and_our_own_limit_holds():
    assert [granted(calls=5, own_max=2).take(n, 0) for n in range(1)] == [True]
    for calls, own_max in ((5, 2), (2, 5)):
        credits_ = granted(calls, own_max=own_max)
        assert [credits_.take(n, 0) for n in range(3)] == [True, True, False]


def test_bytes_are_counted_together():
    credits_ = granted(calls=8, total_bytes=100_000)
    assert credits_.take(1, 60_000)
    assert not credits_.take(2, 60_000)
    credits_.give_back(1)
    assert credits_.take(2, 60_000)


def test_the_most_urgent_goes_first_and_equals_in_their_order():
    credits_ = granted(calls=1)
    assert credits_.take(0, 0)
    order = [(1, Priority.BULK), (2, Priority.PLAIN), (3, Priority.TOKEN), (4, Priority.PLAIN), (5, Priority.TOKEN)]
    for call_id, priority in order:
        credits_.wait(call_id, 0, priority)
    went = []
    for over in (0, 3, 5, 2, 4):
        assert credits_.give_back(over)
        went += credits_.next_calls()
    assert went == [3, 5, 2, 4, 1]


def test_a_large_call_at_the_front_is_not_overtaken():
    credits_ = granted(calls=8, total_bytes=100_000)
    assert credits_.take(1, 90_000)
    credits_.wait(2, 50_000, Priority.PLAIN)
    assert not credits_.take(3, 1)
    credits_.wait(3, 1, Priority.PLAIN)
    assert list(credits_.next_calls()) == []
    credits_.give_back(1)
    assert list(credits_.next_calls()) == [2, 3]


def test_one_that_only_waited_leaves_the_queue():
    credits_ = granted(calls=1)
    credits_.take(1, 0)
    credits_.wait(2, 0, Priority.PLAIN)
    assert not credits_.give_back(2)
    assert credits_.waiting_count == 0


def test_the_queue_is_bounded():
    credits_ = granted(calls=1)
    credits_.take(0, 0)
    for call_id in range(1, WAITING_MAX + 1):
        credits_.wait(call_id, 0, Priority.PLAIN)
    with pytest.raises(Overloaded, match="256 wait"):
        credits_.wait(WAITING_MAX + 1, 0, Priority.TOKEN)


def test_a_body_that_no_grant_holds_waits_no_longer():
    credits_ = Credits(8)
    credits_.wait(1, 200_000, Priority.PLAIN)
    credits_.wait(2, 90_000, Priority.PLAIN)
    assert credits_.granted(Grant(8, 100_000)) == [1]
    assert list(credits_.next_calls()) == [2]
    with pytest.raises(UsageError, match="at most 100000 at once"):
        credits_.wait(3, 200_000, Priority.PLAIN)


def test_a_grant_never_shrinks():
    credits_ = granted(calls=4)
    credits_.granted(Grant(5, 1 << 20))
    for less in (Grant(4, 1 << 20), Grant(5, 1 << 19)):
        with pytest.raises(Misbehaved):
            credits_.granted(less)


def test_an_overrun_is_named():
    served = Served(Grant(2, 100_000))
    served.arrived(1, 80_000)
    with pytest.raises(Misbehaved, match="overruns the grant of 2 calls and 100000 bytes") as caught:
        served.arrived(2, 20_001)
    assert caught.value.reason is RejectReason.TOO_MANY
    with pytest.raises(Misbehaved, match="twice"):
        served.arrived(1, 0)
    assert served.over(1)
    assert not served.over(1)
    served.arrived(2, 100_000)


def test_use_and_peaks_are_visible():
    credits_, served = granted(calls=2), Served(Grant(3, 1 << 20))
    credits_.take(1, 10)
    credits_.take(2, 20)
    credits_.wait(3, 5, Priority.PLAIN)
    credits_.give_back(1)
    list(credits_.next_calls())
    served.arrived(1, 1)
    served.over(1)
    shown = credits_.statistics(served)
    assert (shown.sent, shown.sent_peak, shown.sent_max) == (2, 2, 2)
    assert (shown.sent_bytes, shown.sent_bytes_peak, shown.sent_bytes_max) == (25, 30, 1 << 20)
    assert (shown.waiting, shown.waiting_peak, shown.waiting_max) == (0, 1, WAITING_MAX)
    assert (shown.served, shown.served_peak, shown.served_max) == (0, 1, 3)


class TwoEnds:
    """A caller, an answering side, and frames under way in both directions, each direction in order."""

    def __init__(self, grant, own_max) -> None:
        self.served = Served(grant)
        self.credits = Credits(own_max)
        self.to_server, self.to_caller = deque(), deque([("grant", self.served.grant)])
        self.sizes, self.live, self.next_id, self.answered = {}, set(), 1, 0

    def call(self, size, priority):
        call_id, self.next_id = self.next_id, self.next_id + 1
        self.sizes[call_id] = size
        if self.credits.take(call_id, size):
            self.to_server.append(("call", call_id))
        else:
            try:
                self.credits.wait(call_id, size, priority)
            except UsageError:
                return
        self.live.add(call_id)

    def cancel(self, call_id):
        self.live.discard(call_id)
        if self.credits.give_back(call_id):
            self.to_server.append(("cancel", call_id))
        self.send_waiting()

    def send_waiting(self):
        self.to_server.extend(("call", call_id) for call_id in self.credits.next_calls())

    def server_reads(self):
        if self.to_server:
            kind, call_id = self.to_server.popleft()
            if kind == "call":
                self.served.arrived(call_id, self.sizes[call_id])  # raises if the ends disagree
            else:
                self.served.over(call_id)

    def server_answers(self, rng):
        if self.served.sizes:
            call_id = rng.choice(list(self.served.sizes))
            assert self.served.over(call_id)
            self.to_caller.append(("result", call_id))

    def caller_reads(self):
        if self.to_caller:
            kind, what = self.to_caller.popleft()
            if kind == "grant":
                self.live.difference_update(self.credits.granted(what))
            elif what in self.live:
                self.live.discard(what)
                self.answered += 1
                assert self.credits.give_back(what)
            self.send_waiting()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 6), st.integers(1, 300_000))
def test_no_honest_caller_overruns_and_every_call_is_answered_or_cancelled(seed, calls, own_max, total_bytes):
    rng = random.Random(seed)
    ends = TwoEnds(Grant(calls, total_bytes), own_max)
    for _ in range(300):
        match rng.randrange(6):
            case 0 | 1:
                ends.call(rng.choice((0, 10, 50_000, 200_000)), rng.choice(list(Priority)))
            case 2 if ends.live:
                ends.cancel(rng.choice(sorted(ends.live)))
            case 3:
                ends.server_reads()
            case 4:
                ends.server_answers(rng)
            case _:
                ends.caller_reads()
        assert len(ends.served.sizes) <= ends.served.grant.calls
    for _ in range(3 * ends.next_id):
        for _ in range(3):
            ends.caller_reads()
            ends.server_reads()
            ends.server_answers(rng)
    assert not ends.live
    assert ends.credits.waiting_count == 0
