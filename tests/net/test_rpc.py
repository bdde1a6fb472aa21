import random
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from kvasir_node.base.errors import (
    CallTimeout,
    KvasirError,
    Misbehaved,
    NotFoundError,
    PeerError,
    RejectReason,
    Unreachable,
    UsageError,
)
from kvasir_node.net.memory_net import Link, open_memory_network
from kvasir_node.net.rpc import BODIES_GRANTED, CANCELLED_IDS_MAX, CallStream, call_handler, one_call
from kvasir_node.net.rpc_credits import Grant
from kvasir_node.net.rpc_frames import HEADER, Kind, encode_grant, pack_header
from kvasir_node.net.stream_io import read_exactly

PROTOCOL = "/test/calls/1"
ECHO, SLOW, FAIL, BUG, BIG = 1, 2, 3, 4, 5
BODY_MAX = 100_000
PERFECT = Link()


class Handler:
    """Answers by method; remembers what was cancelled and the most calls at once."""

    def __init__(self) -> None:
        self.cancelled, self.at_once, self.peak = 0, 0, 0

    async def __call__(self, method, body) -> list:
        self.at_once += 1
        self.peak = max(self.peak, self.at_once)
        try:
            return await self.answer(method, body)
        except trio.Cancelled:
            self.cancelled += 1
            raise
        finally:
            self.at_once -= 1

    async def answer(self, method, body):
        if method == ECHO:
            return [b"<", body, b">"]
        if method == SLOW:
            await trio.sleep(10)
            return [b"slept"]
        if method == FAIL:
            raise NotFoundError("no such model")
        if method == BUG:
            raise ZeroDivisionError("oops")
        return [bytes(BODY_MAX + 1)]


def calls_on(stream, handler=None, in_flight_max=4, **more: Any):
    return CallStream(stream, handler=handler, in_flight_max=in_flight_max, body_bytes_max=BODY_MAX, **more)


@asynccontextmanager
async def connected(link=PERFECT):
    """Two peers of a memory network; yields (network, left, right)."""
    async with open_memory_network(1) as network:
        left, right = network.transport("left"), network.transport("right")
        network.set_link(None, None, link)
        await left.connect(right.addresses())
        yield network, left, right


@asynccontextmanager
async def call_pair(link=PERFECT, *, left_handler=None, right_handler=None, **more: Any):
    """Two call streams on one stream, both running."""
    async with connected(link) as (_, left, right):
        accepted, done = trio.Event(), trio.Event()
        streams = []

        async def accept(stream):
            streams.append(stream)
            accepted.set()
            await done.wait()

        right.set_handler(PROTOCOL, accept)
        ours = calls_on(await left.open_stream(right.peer_id, PROTOCOL), left_handler, **more)
        await accepted.wait()
        theirs = calls_on(streams[0], right_handler, **more)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ours.run)
            nursery.start_soon(theirs.run)
            yield ours, theirs
            done.set()
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def raw_peer(handler=None, in_flight_max=4):
    """A running call stream whose other end is written by hand; yields (calls, raw stream, outcome list)."""
    async with connected() as (_, left, right):
        outcome, made, raised = [], trio.Event(), trio.Event()

        async def serve(stream):
            outcome.append(calls_on(stream, handler, in_flight_max))
            made.set()
            try:
                await outcome[0].run()
            except Misbehaved as error:
                outcome.append(error)
            raised.set()

        right.set_handler(PROTOCOL, serve)
        raw = await left.open_stream(right.peer_id, PROTOCOL)
        await made.wait()
        if handler is not None:
            grant = encode_grant(Grant(in_flight_max, BODIES_GRANTED * BODY_MAX))
            assert await read_exactly(raw.read, HEADER.size + len(grant)) == pack_header(Kind.GRANT, 0, 0, 8) + grant
        yield outcome[0], raw, outcome, raised


async def read_all(stream):
    received = b""
    while chunk := await stream.read():
        received += chunk
    return received


async def write_for_ever(stream, data):
    while True:
        await stream.write(data)


# --- calls ---


async def test_calls_go_both_ways_on_one_stream(autojump_clock):
    async with call_pair(left_handler=Handler(), right_handler=Handler()) as (ours, theirs):
        assert bytes(await ours.call(ECHO, b"a", memoryview(b"b"), timeout_s=1)) == b"<ab>"
        assert bytes(await theirs.call(ECHO, timeout_s=1)) == b"<>"


async def test_calls_run_at_once_and_answers_come_in_any_order(autojump_clock):
    handler = Handler()
    async with call_pair(Link(latency_s=0.05), right_handler=handler) as (ours, _):
        results = []

        async def call(method):
            results.append(bytes(await ours.call(method, timeout_s=60)))

        async with trio.open_nursery() as nursery:
            for method in (SLOW, SLOW, ECHO):
                nursery.start_soon(call, method)
        assert results == [b"<>", b"slept", b"slept"]
        assert handler.peak >= 2
        assert trio.current_time() < 11


async def test_an_error_comes_back_as_its_class_and_the_stream_lives(autojump_clock):
    async with call_pair(right_handler=Handler()) as (ours, _):
        with pytest.raises(NotFoundError, match="no such model"):
            await ours.call(FAIL, timeout_s=1)
        with pytest.raises(PeerError, match="ZeroDivisionError"):
            await ours.call(BUG, timeout_s=1)
        with pytest.raises(PeerError, match="at most 100000 may be sent"):
            await ours.call(BIG, timeout_s=1)
        assert bytes(await ours.call(ECHO, timeout_s=1)) == b"<>"


async def test_a_side_without_a_handler_says_so(autojump_clock):
    async with call_pair(right_handler=Handler()) as (_, theirs):
        with pytest.raises(Misbehaved, match="takes no calls") as caught:
            await theirs.call(ECHO, timeout_s=1)
        assert caught.value.reason is RejectReason.UNKNOWN_METHOD


async def test_a_call_has_a_deadline_and_the_peer_is_told(autojump_clock):
    handler = Handler()
    async with call_pair(right_handler=handler) as (ours, theirs):
        with pytest.raises(CallTimeout, match="within 2 s"):
            await ours.call(SLOW, timeout_s=2)
        await trio.sleep(0.1)
        assert (handler.cancelled, theirs.serving, ours.in_flight) == (1, 0, 0)
        assert bytes(await ours.call(ECHO, timeout_s=1)) == b"<>"


async def test_a_cancelled_call_is_cancelled_at_the_peer(autojump_clock):
    handler = Handler()
    async with call_pair(right_handler=handler) as (ours, _):
        with trio.move_on_after(1):
            await ours.call(SLOW, timeout_s=60)
        await trio.sleep(0.1)
        assert handler.cancelled == 1


async def test_a_result_that_crosses_its_cancel_is_dropped(autojump_clock):
    async with call_pair(Link(latency_s=1), right_handler=Handler()) as (ours, _):
        with pytest.raises(CallTimeout):
            await ours.call(ECHO, timeout_s=1.5)  # the answer is under way by then
        await trio.sleep(5)
        assert bytes(await ours.call(ECHO, timeout_s=5)) == b"<>"


async def test_submit_never_waits_and_delivers_once(autojump_clock):
    async with call_pair(right_handler=Handler(), in_flight_max=3) as (ours, _):
        delivered = []
        ids = [ours.submit(ECHO, [b"%d" % n], delivered.append) for n in range(5)]
        assert len(set(ids)) == 5
        await trio.sleep(1)
        assert [bytes(result) for result in delivered] == [b"<0>", b"<1>", b"<2>", b"<3>", b"<4>"]
        assert not ours.cancel(ids[0])


async def test_a_cancelled_submission_is_never_delivered(autojump_clock):
    async with call_pair(right_handler=Handler()) as (ours, _):
        delivered = []
        assert ours.cancel(ours.submit(ECHO, [], delivered.append))
        await trio.sleep(1)
        assert delivered == []


async def test_a_body_too_large_is_our_own_mistake(autojump_clock):
    async with call_pair(right_handler=Handler()) as (ours, _):
        with pytest.raises(UsageError, match="at most 100000"):
            await ours.call(ECHO, bytes(BODY_MAX + 1), timeout_s=1)


async def test_notices_arrive_in_order(autojump_clock):
    seen = []
    async with call_pair(on_notice=lambda method, body: seen.append((method, bytes(body)))) as (ours, _):
        for number in range(200):
            await ours.notify(9, b"%d" % number)
        await trio.sleep(1)
    assert seen == [(9, b"%d" % number) for number in range(200)]


# --- the end ---


async def test_pending_calls_fail_when_the_peer_is_killed(autojump_clock):
    async with connected() as (network, left, right):
        right.set_handler(PROTOCOL, call_handler(lambda peer: Handler(), in_flight_max=4, body_bytes_max=9))
        calls = calls_on(await left.open_stream(right.peer_id, PROTOCOL))
        delivered = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(calls.run)
            calls.submit(SLOW, [], delivered.append)
            await trio.sleep(1)
            network.kill(right.peer_id)
        assert isinstance(delivered[0], Unreachable)
        with pytest.raises(Unreachable, match="the stream ended"):
            calls.submit(ECHO, [], delivered.append)
        assert len(delivered) == 1


async def test_a_stopped_run_fails_its_calls(autojump_clock):
    async with call_pair(right_handler=Handler()) as (ours, _):
        delivered = []
        ours.submit(SLOW, [], delivered.append)
    assert isinstance(delivered[0], Unreachable)


async def test_a_peer_that_closes_its_side_still_gets_its_answers(autojump_clock):
    async with raw_peer(Handler()) as (_, raw, _, raised):
        await raw.write(pack_header(Kind.CALL, SLOW, 1, 0))
        await raw.close()
        assert await read_all(raw) == pack_header(Kind.RESULT, SLOW, 1, 5) + b"slept"
        await raised.wait()


# --- hostile peers ---


@pytest.mark.parametrize(
    ("wire", "reason"),
    [
        (pack_header(Kind.CALL, ECHO, 1, BODY_MAX + 1), RejectReason.TOO_LARGE),
        (HEADER.pack(0, 99, 0, 0), RejectReason.BAD_FRAME),
        (pack_header(Kind.CALL, SLOW, 1, 0) * 2, RejectReason.BAD_FRAME),
        (pack_header(Kind.RESULT, ECHO, 12345, 0), RejectReason.BAD_FRAME),
        (pack_header(Kind.GRANT, 0, 0, 8) + encode_grant(Grant(0, 1 << 20)), RejectReason.BAD_FRAME),
        (pack_header(Kind.GRANT, 0, 0, 7) + bytes(7), RejectReason.BAD_FRAME),
        (b"".join(pack_header(Kind.CALL, SLOW, n, 0) for n in range(5)), RejectReason.TOO_MANY),
        (
            b"".join(pack_header(Kind.CALL, SLOW, n, BODY_MAX) + bytes(BODY_MAX) for n in range(3)),
            RejectReason.TOO_MANY,
        ),
    ],
)
async def test_hostile_frames_end_the_stream(autojump_clock, wire, reason):
    async with raw_peer(Handler()) as (_, raw, outcome, raised):
        await raw.write(wire)
        await raised.wait()
        assert outcome[1].reason is reason
        with pytest.raises(Unreachable):
            await read_all(raw)


async def test_an_error_that_is_none_fails_its_own_call_too(autojump_clock):
    async with raw_peer(Handler()) as (calls, raw, outcome, raised):
        delivered = []
        call_id = calls.submit(ECHO, [], delivered.append)
        await raw.write(pack_header(Kind.ERROR, 0, call_id, 5) + b"\x84busy")
        await raised.wait()
        assert outcome[1].reason is RejectReason.BAD_FRAME
        assert [type(each) for each in delivered] == [Misbehaved]


async def test_a_cancel_for_nothing_is_harmless(autojump_clock):
    async with raw_peer(Handler()) as (_, raw, _, raised):
        await raw.write(pack_header(Kind.CANCEL, 0, 77, 0), pack_header(Kind.CALL, ECHO, 1, 0))
        assert HEADER.unpack(await raw.read(HEADER.size))[1] == Kind.RESULT
        assert not raised.is_set()


async def test_a_call_cancelled_in_the_same_breath_runs_no_handler(autojump_clock):
    handler = Handler()
    async with raw_peer(handler) as (calls, raw, _, raised):
        frames = (pack_header(Kind.CALL, SLOW, n, 0) + pack_header(Kind.CANCEL, 0, n, 0) for n in range(8))
        await raw.write(b"".join(frames))
        await trio.sleep(1)
        assert (handler.peak, calls.serving) == (0, 0)
        assert not raised.is_set()


async def test_a_peer_that_calls_and_never_reads_is_cut_off(autojump_clock):
    async with raw_peer(None) as (_, raw, outcome, raised):
        frame = pack_header(Kind.CALL, ECHO, 1, 0)
        with trio.fail_after(60), pytest.raises(Unreachable):
            await write_for_ever(raw, frame * 5000)
        await raised.wait()
        assert outcome[1].reason is RejectReason.TOO_MANY


async def test_byte_by_byte_arrival(autojump_clock):
    async with raw_peer(Handler()) as (_, raw, _, _):
        for byte in pack_header(Kind.CALL, ECHO, 1, 3) + b"abc":
            await raw.write(bytes([byte]))
        expected = pack_header(Kind.RESULT, ECHO, 1, 5) + b"<abc>"
        received = b""
        while len(received) < len(expected):
            received += await raw.read(1)
        assert received == expected


async def test_many_cancels_stay_bounded(autojump_clock):
    async with call_pair(right_handler=Handler(), in_flight_max=4) as (ours, _):
        for _ in range(CANCELLED_IDS_MAX + 100):
            ours.cancel(ours.submit(SLOW, [], lambda result: None))
            await trio.lowlevel.checkpoint()
        assert len(ours._cancelled) == CANCELLED_IDS_MAX
        await trio.sleep(1)
        assert bytes(await ours.call(ECHO, timeout_s=1)) == b"<>"


@pytest.mark.parametrize("seed", range(3))
async def test_a_thousand_calls_with_random_deadlines_answer_right_or_time_out(autojump_clock, seed):
    rng = random.Random(seed)

    async def handler(method, body):
        await trio.sleep(rng.random() * 0.02)
        return [body]

    counts = {"right": 0, "late": 0}
    link = Link(latency_s=0.005, loss_ratio=0.01)
    async with call_pair(link, right_handler=handler, in_flight_max=8) as (ours, _):

        async def caller():
            for _ in range(50):
                body = rng.randbytes(rng.randrange(5000))
                try:
                    answer = await ours.call(1, body, timeout_s=rng.choice((0.015, 1)))
                except CallTimeout:
                    counts["late"] += 1
                else:
                    assert answer == body
                    counts["right"] += 1

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(caller)
        assert ours.end_reason is None
    assert counts["right"] > 100
    assert counts["late"] > 10
    assert sum(counts.values()) == 1000


# --- one call ---


async def test_one_call_opens_and_leaves_nothing(autojump_clock):
    async with connected(Link(latency_s=0.01)) as (_, left, right):
        right.set_handler(PROTOCOL, call_handler(lambda peer: Handler(), in_flight_max=4, body_bytes_max=BODY_MAX))
        assert bytes(await one_call(left, right.peer_id, PROTOCOL, ECHO, b"hi", timeout_s=1)) == b"<hi>"
        with pytest.raises(NotFoundError):
            await one_call(left, right.peer_id, PROTOCOL, FAIL, timeout_s=1)
        with pytest.raises(CallTimeout):
            await one_call(left, right.peer_id, PROTOCOL, SLOW, timeout_s=1)
        with pytest.raises(Unreachable, match="does not speak"):
            await one_call(left, right.peer_id, "/no/such/1", ECHO, timeout_s=1)
        await trio.sleep(1)
        assert left.streams == right.streams == set()


async def test_one_call_to_a_liar_is_misbehaviour(autojump_clock):
    async def liar(stream):
        await stream.write(HEADER.pack(0, 99, 0, 0))
        await trio.sleep(5)

    async with connected() as (_, left, right):
        right.set_handler(PROTOCOL, liar)
        with pytest.raises(Misbehaved):
            await one_call(left, right.peer_id, PROTOCOL, ECHO, timeout_s=1)


def test_every_error_of_calls_is_a_kvasir_error():
    assert issubclass(CallTimeout, KvasirError)
