"""Calls that wait for credit, and results that go into the caller's own memory, over streams."""

import math

import pytest
import trio
from test_rpc import BODY_MAX, ECHO, SLOW, Handler, call_pair, calls_on, connected, raw_peer

from kvasir_node.base.errors import CallTimeout, Misbehaved, RejectReason, UsageError
from kvasir_node.net.memory_net import Link
from kvasir_node.net.rpc import CallStream
from kvasir_node.net.rpc_credits import FIRST, Priority
from kvasir_node.net.rpc_frames import HEADER, Grant, Kind, encode_grant, pack_header

PROTOCOL = "/test/calls/1"


class Gate:
    """A handler that answers with the body once it is let through; remembers the order it was asked in."""

    def __init__(self) -> None:
        self.asked, self.cancelled, self.let = [], [], trio.Semaphore(0)

    async def __call__(self, method, body) -> list:
        self.asked.append(bytes(body))
        try:
            await self.let.acquire()
        except trio.Cancelled:
            self.cancelled.append(bytes(body))
            raise
        return [body]


async def settle():
    await trio.sleep(0.001)


async def test_more_calls_than_credit_wait_and_all_are_answered(autojump_clock):
    handler = Handler()
    async with call_pair(Link(latency_s=0.01), right_handler=handler, in_flight_max=3) as (ours, _):
        results = []

        async def call(number):
            results.append(bytes(await ours.call(SLOW if number < 3 else ECHO, b"%d" % number, timeout_s=60)))

        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(call, number)
        assert len(results) == 20
        assert handler.peak == 3
        shown = ours.statistics()
        assert (shown.sent, shown.sent_peak, shown.waiting, shown.waiting_peak) == (0, 3, 0, 19)


async def test_the_first_call_needs_no_round_trip(autojump_clock):
    async with call_pair(Link(latency_s=1), right_handler=Handler()) as (ours, _):
        began_at = trio.current_time()
        await ours.call(ECHO, bytes(1000), timeout_s=60)
        assert trio.current_time() - began_at < 2.5


async def test_the_most_urgent_call_goes_first(autojump_clock):
    gate = Gate()
    async with call_pair(right_handler=gate, in_flight_max=1) as (ours, _):
        delivered = []
        for body, priority in ((b"a", None), (b"bulk", Priority.BULK), (b"plain", None), (b"token", Priority.TOKEN)):
            ours.submit(ECHO, [body], delivered.append, priority=priority)
        for _ in range(4):
            await settle()
            gate.let.release()
        await settle()
        assert gate.asked == [b"a", b"token", b"plain", b"bulk"]


async def test_a_stream_that_gives_way_waits_as_bulk(autojump_clock):
    gate = Gate()
    async with call_pair(right_handler=gate, in_flight_max=1, gives_way=True) as (ours, _):
        for body, priority in ((b"a", None), (b"block", None), (b"plain", Priority.PLAIN)):
            ours.submit(ECHO, [body], lambda result: None, priority=priority)
        for _ in range(3):
            await settle()
            gate.let.release()
        assert gate.asked == [b"a", b"plain", b"block"]


async def test_the_deadline_counts_while_a_call_waits_for_credit(autojump_clock):
    gate = Gate()
    async with call_pair(right_handler=gate, in_flight_max=1) as (ours, theirs):
        first = ours.submit(ECHO, [b"first"], lambda result: None)
        with pytest.raises(CallTimeout, match="within 2 s"):
            await ours.call(ECHO, b"second", timeout_s=2)
        assert (ours.in_flight, ours.statistics().waiting) == (1, 0)
        assert ours.cancel(first)
        await settle()
        assert (gate.asked, gate.cancelled, theirs.serving) == ([b"first"], [b"first"], 0)


async def test_a_waiting_call_that_is_cancelled_is_never_sent(autojump_clock):
    gate = Gate()
    async with call_pair(right_handler=gate, in_flight_max=1) as (ours, _):
        delivered = []
        ours.submit(ECHO, [b"first"], delivered.append)
        with trio.move_on_after(1):
            await ours.call(ECHO, b"second", timeout_s=60)
        ours.submit(ECHO, [b"third"], delivered.append)
        for _ in range(3):
            await settle()
            gate.let.release()
        await settle()
        assert gate.asked == [b"first", b"third"]
        assert [bytes(each) for each in delivered] == [b"first", b"third"]


async def test_waiting_calls_fail_with_their_stream(autojump_clock):
    delivered = []
    async with call_pair(right_handler=Gate(), in_flight_max=1) as (ours, _):
        for _ in range(3):
            ours.submit(ECHO, [], delivered.append)
    assert len(delivered) == 3
    assert ours.in_flight == ours.statistics().waiting == 0


async def test_a_body_that_the_peer_never_takes_is_refused_here(autojump_clock):
    async with connected() as (_, left, right):
        right.set_handler(
            PROTOCOL, lambda stream: CallStream(stream, handler=Handler(), in_flight_max=1, body_bytes_max=40_000).run()
        )
        calls = calls_on(await left.open_stream(right.peer_id, PROTOCOL))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(calls.run)
            for _ in range(2):
                with pytest.raises(UsageError, match="takes at most 80000"):
                    await calls.call(ECHO, bytes(BODY_MAX), timeout_s=5)
            assert bytes(await calls.call(ECHO, timeout_s=5)) == b"<>"
            nursery.cancel_scope.cancel()


async def test_calls_whose_handlers_outlive_their_cancel_hold_up_later_ones_and_no_more(autojump_clock):
    """What runs in a thread cannot be cancelled: such tasks are bounded, and calls wait for one."""
    running, peak = 0, 0

    async def stubborn(method, body):
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        with trio.move_on_after(math.inf) as scope:
            scope.shield = True
            await trio.sleep(1)
        running -= 1
        return [body]

    async with call_pair(right_handler=stubborn, in_flight_max=2) as (ours, theirs):
        for _ in range(10):
            ids = [ours.submit(ECHO, [], lambda result: None) for _ in range(2)]
            await settle()
            for call_id in ids:
                ours.cancel(call_id)
        await settle()
        assert (peak, theirs.serving) == (4, 0)
        assert bytes(await ours.call(ECHO, b"after", timeout_s=10)) == b"after"
        assert trio.current_time() < 3


async def test_a_peer_that_overruns_its_bytes_is_cut_off(autojump_clock):
    async with raw_peer(Handler()) as (calls, raw, outcome, raised):
        frames = [pack_header(Kind.CALL, SLOW, n, BODY_MAX) + bytes(BODY_MAX) for n in range(3)]
        await raw.write(*frames[:2])
        await settle()
        assert (calls.serving, raised.is_set()) == (2, False)
        await raw.write(frames[2])
        await raised.wait()
        assert outcome[1].reason is RejectReason.TOO_MANY


async def test_calls_wait_for_the_grant_and_then_go(autojump_clock):
    async with raw_peer(None) as (calls, raw, _, _):
        for number in range(3):
            calls.submit(ECHO, [b"%d" % number], lambda result: None)
        await settle()
        assert bytes(await raw.read()) == pack_header(Kind.CALL, ECHO, 1, 1) + b"0"
        await raw.write(pack_header(Kind.GRANT, 0, 0, 8), encode_grant(Grant(2, FIRST.bytes)))
        await settle()
        assert bytes(await raw.read()) == pack_header(Kind.CALL, ECHO, 2, 1) + b"1"


# --- results into the caller's memory ---


async def test_a_result_lands_in_the_callers_buffer(autojump_clock):
    async with call_pair(Link(latency_s=0.01), right_handler=Handler()) as (ours, _):
        buffer = bytearray(b"." * 10)
        result = await ours.call(ECHO, b"abc", timeout_s=5, into=memoryview(buffer))
        assert (bytes(result), buffer) == (b"<abc>", b"<abc>.....")
        assert result.obj is buffer


async def test_a_result_too_large_fails_its_call_alone(autojump_clock):
    async with call_pair(right_handler=Handler()) as (ours, _):
        buffer = bytearray(4)
        with pytest.raises(Misbehaved, match="5 bytes, for which the caller has no room") as caught:
            await ours.call(ECHO, b"abc", timeout_s=5, into=memoryview(buffer))
        assert caught.value.reason is RejectReason.TOO_LARGE
        assert buffer == bytes(4)
        assert bytes(await ours.call(ECHO, b"ab", timeout_s=5, into=memoryview(buffer))) == b"<ab>"
        assert bytes(await ours.call(ECHO, b"without", timeout_s=5)) == b"<without>"


async def test_a_call_given_up_in_the_middle_of_its_result_writes_no_more(autojump_clock):
    async with raw_peer(None) as (calls, raw, _, _):
        buffer, delivered = bytearray(8), []
        call_id = calls.submit(ECHO, [], delivered.append, into=memoryview(buffer))
        await raw.write(pack_header(Kind.RESULT, ECHO, call_id, 8), b"abcd")
        await settle()
        assert buffer == b"abcd\0\0\0\0"
        assert calls.cancel(call_id)
        await raw.write(b"efgh")
        await settle()
        assert buffer == b"abcd\0\0\0\0"
        assert delivered == []
        following = calls.submit(ECHO, [], delivered.append)
        await raw.write(pack_header(Kind.RESULT, ECHO, following, 2), b"ok")
        await settle()
        assert [bytes(each) for each in delivered] == [b"ok"]


async def test_an_error_leaves_the_buffer_alone(autojump_clock):
    async with raw_peer(None) as (calls, raw, _, _):
        buffer, delivered = bytearray(8), []
        call_id = calls.submit(ECHO, [], delivered.append, into=memoryview(buffer))
        body = b"\x04busy"
        await raw.write(HEADER.pack(len(body), Kind.ERROR, 0, call_id), body)
        await settle()
        assert str(delivered[0]) == "busy"
        assert buffer == bytes(8)
