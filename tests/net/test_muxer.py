import itertools
import random
from dataclasses import replace

import pytest
import trio
import trio.testing
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable, MuxedStreamEOF, MuxedStreamReset
from libp2p.stream_muxer.yamux.yamux import Yamux
from net_helpers import LOOPBACK, muxer_pair, session_pair, socket_session_pair

from kvasir_node.base.errors import Overloaded, Unreachable
from kvasir_node.net import muxer_frames as frames
from kvasir_node.net.muxer import (
    BATCH_BYTES_MAX,
    CONTROL_FRAMES_MAX,
    FINISHED_LINGER_S,
    FRAME_PAYLOAD_BYTES,
    LEAST_BYTES,
    YamuxConnection,
)
from kvasir_node.net.muxer_frames import INITIAL_WINDOW_BYTES, Flag, FrameType, pack
from kvasir_node.net.muxer_stream import GROWTH_S

MIB = 1024 * 1024
QUIET = replace(LOOPBACK, keepalive_interval_s=1e6, keepalive_timeout_s=1e6)


async def receive_exactly(stream, count):
    received = bytearray()
    while len(received) < count:
        chunk = await stream.receive(count - len(received))
        assert chunk, f"ended after {len(received)} of {count} bytes"
        received += chunk
    return bytes(received)


async def receive_all(stream):
    received = bytearray()
    while chunk := await stream.receive():
        received += chunk
    return bytes(received)


async def stream_pair(left, right):
    """One stream, seen from both ends."""
    ours = await left.open_stream()
    return ours, await right.accept_stream()


async def echo_streams(connection):
    async def echo(stream):
        while chunk := await stream.receive():
            await stream.send(bytes(chunk))
        await stream.close()

    async with trio.open_nursery() as nursery:
        while True:
            try:
                nursery.start_soon(echo, await connection.accept_stream())
            except MuxedConnUnavailable:
                return


# --- what a stream does ---


@pytest.mark.parametrize("size", [1, 1000, INITIAL_WINDOW_BYTES, INITIAL_WINDOW_BYTES + 1, 3 * MIB])
async def test_bytes_arrive_in_order_through_any_window(size):
    data = random.Random(size).randbytes(size)
    async with muxer_pair() as (left, right), trio.open_nursery() as nursery:
        nursery.start_soon(echo_streams, right)
        stream = await left.open_stream()
        nursery.start_soon(stream.send, data[: size // 2], data[size // 2 :])
        assert await receive_exactly(stream, size) == data
        nursery.cancel_scope.cancel()


async def test_each_direction_is_closed_alone():
    async with muxer_pair() as (left, right):
        ours, theirs = await stream_pair(left, right)
        await ours.send(b"question")
        await ours.close()
        assert await receive_all(theirs) == b"question"
        await theirs.send(b"answer")
        await theirs.close()
        assert await receive_all(ours) == b"answer"
        with pytest.raises(Unreachable, match="closed by us"):
            await ours.send(b"more")
        await trio.testing.wait_all_tasks_blocked()
        assert left.stream_count == right.stream_count == 0
        assert left.buffered_bytes == right.buffered_bytes == 0


async def test_a_reset_ends_both_directions_and_no_other_stream():
    async with muxer_pair() as (left, right):
        ours, theirs = await stream_pair(left, right)
        other, _ = await stream_pair(left, right)
        await ours.reset()
        with pytest.raises(Unreachable, match="reset by"):
            await theirs.receive()
        with pytest.raises(Unreachable, match="reset by us"):
            await ours.send(b"x")
        await other.send(b"x")
        assert left.stream_count == right.stream_count == 1


async def test_what_libp2p_itself_expects_of_a_stream():
    async with muxer_pair() as (left, right):
        ours, theirs = await stream_pair(left, right)
        await ours.write(b"abc")
        assert await theirs.read(2) == b"ab"
        assert await theirs.read() == b"c"
        assert await theirs.read(0) == b""
        await ours.close()
        with pytest.raises(MuxedStreamEOF):
            await theirs.read(1)
        await ours.reset()
        with pytest.raises(MuxedStreamReset):
            await ours.write(b"x")


async def test_what_came_before_the_connection_ended_can_still_be_read():
    async with muxer_pair() as (left, right):
        ours, theirs = await stream_pair(left, right)
        await ours.send(b"last words")
        await trio.testing.wait_all_tasks_blocked()
        await left.close()
        await right.wait_ended()
        assert await theirs.receive() == b"last words"
        with pytest.raises(Unreachable, match="said goodbye"):
            await theirs.receive()
        with pytest.raises(Unreachable, match="closed by us"):
            left.open_stream_now()


async def test_a_finished_stream_drops_what_comes_and_gives_its_window_back():
    async with muxer_pair() as (left, right):
        ours, theirs = await stream_pair(left, right)
        theirs.finish()
        await ours.send(bytes(2 * MIB))
        await ours.close()
        assert await receive_all(ours) == b""
        await trio.testing.wait_all_tasks_blocked()
        assert right.stream_count == 0
        assert right.buffered_bytes == 0


async def test_a_finished_stream_that_the_peer_keeps_open_is_reset_in_the_end(autojump_clock):
    async with muxer_pair() as (left, right):
        ours, theirs = await stream_pair(left, right)
        theirs.finish()
        await trio.sleep(FINISHED_LINGER_S + 10)
        with pytest.raises(Unreachable, match="reset by"):
            await ours.send(b"x")


# --- cancellation ---


@pytest.mark.parametrize("seed", [1, 2])
async def test_a_thousand_cancels_lose_no_byte(seed):
    """Reads and writes on one stream are cancelled at random; an echo must come back whole and in order."""
    rng = random.Random(seed)
    async with muxer_pair(QUIET, sockets=True) as (left, right), trio.open_nursery() as nursery:
        nursery.start_soon(echo_streams, right)
        stream = await left.open_stream()
        sent, received, cancels = bytearray(), bytearray(), 0

        async def write():
            nonlocal cancels
            while cancels < 1000:
                data = rng.randbytes(rng.choice((10, 1000, 60_000)))
                with trio.move_on_after(rng.random() * 0.0002) as scope:
                    await stream.send(data)
                if scope.cancelled_caught:
                    cancels += 1  # documented: nothing of it was queued
                else:
                    sent.extend(data)
            await stream.close()

        async def read():
            nonlocal cancels
            while True:
                chunk = None
                with trio.move_on_after(rng.random() * 0.0002):
                    chunk = await stream.receive(rng.choice((1, 100, 100_000)))
                if chunk is None:
                    cancels += 1
                elif not chunk:
                    break
                else:
                    received.extend(chunk)
            nursery.cancel_scope.cancel()

        with trio.fail_after(60):
            async with trio.open_nursery() as both:
                both.start_soon(write)
                both.start_soon(read)
        assert received == sent
        assert cancels >= 1000
        assert left.is_established


async def test_cancelling_a_blocked_write_leaves_the_connection_whole(autojump_clock):
    async with muxer_pair() as (left, right):
        ours, theirs = await stream_pair(left, right)
        with trio.move_on_after(1) as scope:
            for number in range(100):
                await ours.send(bytes([number]) * 100_000)
        assert scope.cancelled_caught
        await ours.close()
        received = await receive_all(theirs)
        assert received == b"".join(bytes([n]) * 100_000 for n in range(len(received) // 100_000))


# --- back-pressure and bounds ---


async def test_a_paused_reader_is_waited_for_and_nothing_is_lost(autojump_clock):
    async with muxer_pair() as (left, right), trio.open_nursery() as nursery:
        ours, theirs = await stream_pair(left, right)
        sent_bytes = 0

        async def send_much():
            nonlocal sent_bytes
            for _ in range(160):
                await ours.send(bytes(100_000))
                sent_bytes += 100_000
            await ours.close()

        nursery.start_soon(send_much)
        await trio.sleep(120)
        assert 0 < sent_bytes < 2 * MIB
        assert len(await receive_all(theirs)) == 16_000_000


async def test_windows_grow_and_their_sum_stays_under_the_limit():
    settings = replace(QUIET, connection_buffer_bytes=4 * MIB)
    async with muxer_pair(settings) as (left, right), trio.open_nursery() as nursery:
        peak = 0
        await trio.testing.wait_all_tasks_blocked()
        right.min_rtt_s = 60.0  # a long way, which large windows pay for

        async def pump(stream):
            for _ in range(40):
                await stream.send(bytes(256 * 1024))
            await stream.close()

        async def drain(stream):
            nonlocal peak
            while await stream.receive():
                peak = max(peak, right.buffered_bytes)

        for _ in range(6):
            ours, theirs = await stream_pair(left, right)
            nursery.start_soon(pump, ours)
            nursery.start_soon(drain, theirs)
    assert 6 * INITIAL_WINDOW_BYTES < peak <= 4 * MIB


async def test_a_window_stays_small_where_a_larger_one_would_only_queue():
    async with muxer_pair(QUIET) as (left, right), trio.open_nursery() as nursery:
        ours, theirs = await stream_pair(left, right)
        await trio.testing.wait_all_tasks_blocked()
        right.min_rtt_s = 0.0
        times = itertools.count(trio.current_time() + 1, 2 * GROWTH_S)
        right.now = lambda: next(times)  # each quarter of a window takes so long to be read
        nursery.start_soon(ours.send, bytes(4 * MIB))
        await receive_exactly(theirs, 4 * MIB)
        assert right.buffered_bytes <= INITIAL_WINDOW_BYTES


async def hostile_peer(session, right, payload):
    """Opens a stream by hand and sends `payload` on it, whatever the window says."""
    await session.write(pack(FrameType.WINDOW_UPDATE, Flag.SYN, 1, 0))
    await session.write_parts([pack(FrameType.DATA, Flag.NONE, 1, len(payload)), payload])


async def test_a_peer_that_sends_past_its_window_is_cut_off():
    attacker, session = await session_pair()
    right = YamuxConnection(session, session.get_remote_peer(), QUIET)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(right.start)
        await right.event_started.wait()
        await hostile_peer(attacker, right, bytes(INITIAL_WINDOW_BYTES))
        stream = await right.accept_stream()
        await attacker.write_parts([pack(FrameType.DATA, Flag.NONE, 1, 1), b"x"])
        await right.wait_ended()
    assert "overruns its window" in (right.end_reason or "")
    assert len(await receive_exactly(stream, INITIAL_WINDOW_BYTES)) == INITIAL_WINDOW_BYTES


async def test_tiny_frames_cost_little_more_than_their_bytes():
    """80,000 frames of one byte: kept as one object each they would take ten megabytes and more."""
    attacker, session = await session_pair()
    right = YamuxConnection(session, session.get_remote_peer(), QUIET)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(right.start)
        await right.event_started.wait()
        await attacker.write(pack(FrameType.WINDOW_UPDATE, Flag.SYN, 1, 0))
        await attacker.write((pack(FrameType.DATA, Flag.NONE, 1, 1) + b"x") * 80_000)
        stream = await right.accept_stream()
        await trio.testing.wait_all_tasks_blocked()
        assert len(stream._received) <= 5
        assert await receive_exactly(stream, 80_000) == b"x" * 80_000
        await right.close()


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (pack(FrameType.WINDOW_UPDATE, Flag.SYN, 2, 0), "cannot open stream 2"),
        (pack(FrameType.WINDOW_UPDATE, Flag.SYN, 0, 0), "cannot open stream 0"),
        (pack(FrameType.WINDOW_UPDATE, Flag.SYN, 1, 0) * 2, "cannot open stream 1"),
        (pack(FrameType.WINDOW_UPDATE, Flag.SYN, 1, 2**32 - 1), "overruns its window"),
        (b"\x07" + bytes(11), "not a yamux frame"),
        (pack(FrameType.GO_AWAY, Flag.NONE, 0, 0), "said goodbye"),
    ],
)
async def test_frames_no_honest_peer_sends_end_the_connection(frame, reason):
    attacker, session = await session_pair()
    right = YamuxConnection(session, session.get_remote_peer(), QUIET)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(right.start)
        await attacker.write(frame)
        with trio.fail_after(5):
            await right.wait_ended()
    assert reason in (right.end_reason or "")


async def test_a_peer_that_asks_and_never_reads_is_cut_off():
    attacker, session = await socket_session_pair()
    right = YamuxConnection(session, session.get_remote_peer(), QUIET)
    pings = pack(FrameType.PING, Flag.SYN, 0, 1) * CONTROL_FRAMES_MAX
    async with trio.open_nursery() as nursery:
        nursery.start_soon(right.start)
        with pytest.raises(Exception, match=r"reset|broken|closed|Broken"):  # noqa: PT012
            for _ in range(1000):
                await attacker.write(pings)
        await right.wait_ended()
    await attacker.close()
    assert "asks and does not read" in (right.end_reason or "")


async def test_streams_are_limited_on_both_sides():
    async with muxer_pair(replace(LOOPBACK, streams_max=4)) as (left, right):
        for _ in range(4):
            await stream_pair(left, right)
        with pytest.raises(Overloaded, match="no more than 4"):
            left.open_stream_now()
        right.open_stream_now()  # its own four are still free


async def test_a_stream_too_many_is_reset_and_the_others_live():
    async with muxer_pair(replace(LOOPBACK, streams_max=2)) as (left, right):
        pairs = [await stream_pair(left, right) for _ in range(2)]
        left._settings = replace(left._settings, streams_max=3)
        extra = await left.open_stream()
        with pytest.raises(Unreachable, match="reset by"):
            await extra.receive()
        await pairs[0][0].send(b"still here")
        assert await pairs[0][1].receive() == b"still here"


# --- fairness ---


async def test_bulk_on_one_stream_does_not_keep_a_small_call_waiting():
    """Counted, not timed: between a small message and its sending stands at most one batch of bulk."""
    async with muxer_pair(QUIET) as (left, right):
        bulk, _ = await stream_pair(left, right)
        small, _ = await stream_pair(left, right)
        await bulk.send(bytes(8 * MIB))
        await small.send(b"x" * 16_384)
        batch = left._next_batch()
        position = batch.index(pack(FrameType.DATA, Flag.NONE, small.stream_id, 16_384))
        assert sum(len(part) for part in batch[:position]) < BATCH_BYTES_MAX
        assert max(len(part) for part in batch) <= FRAME_PAYLOAD_BYTES


def streams_of(batch):
    """The streams whose data frames a batch holds, in order, with their sizes."""
    found = []
    for part in batch:
        if len(part) == frames.HEADER_BYTES:
            _, kind, _, stream_id, length = frames.HEADER.unpack(part)
            if kind == FrameType.DATA:
                found.append((stream_id, length))
    return found


async def test_calls_go_before_bulk_and_blocks_after_both():
    async with muxer_pair(QUIET) as (left, right):
        blocks, bulk, call = [(await stream_pair(left, right))[0] for _ in range(3)]
        blocks.yields = True
        for stream, size in ((blocks, MIB), (bulk, MIB), (call, 1000)):
            assert stream.send_now(bytes(size))
        sent = streams_of(left._next_batch())
        assert sent[0] == (call.stream_id, 1000)
        assert sent[1][0] == bulk.stream_id
        assert sent[-1] == (blocks.stream_id, LEAST_BYTES)  # a little of it goes in every batch
        assert sum(size for stream_id, size in sent if stream_id == blocks.stream_id) == LEAST_BYTES


async def test_a_stream_that_yields_is_never_starved():
    async with muxer_pair(QUIET) as (left, right), trio.open_nursery() as nursery:
        blocks, theirs = await stream_pair(left, right)
        bulk, sink = await stream_pair(left, right)
        blocks.yields = True

        async def flood():
            while True:
                await bulk.send(bytes(MIB))

        async def drain():
            while await sink.receive():
                pass

        nursery.start_soon(flood)
        nursery.start_soon(drain)
        await blocks.send(bytes(MIB))
        with trio.fail_after(20):
            assert len(await receive_exactly(theirs, MIB)) == MIB
        nursery.cancel_scope.cancel()


async def test_a_send_that_cannot_wait_is_refused_whole_when_there_is_no_room():
    async with muxer_pair(QUIET) as (left, right):
        ours, theirs = await stream_pair(left, right)
        accepted = 0
        while ours.send_now(b"x" * 100_000):
            accepted += 100_000
        assert accepted < 2 * MIB
        assert len(await receive_exactly(theirs, accepted)) == accepted
        await trio.testing.wait_all_tasks_blocked()
        assert ours.send_now(b"y")
        assert await theirs.receive() == b"y"


async def test_a_task_that_only_sends_lets_others_run():
    async with muxer_pair(QUIET, sockets=True) as (left, right), trio.open_nursery() as nursery:
        ours, theirs = await stream_pair(left, right)
        ran = 0

        async def count():
            nonlocal ran
            while True:
                await trio.lowlevel.checkpoint()
                ran += 1

        async def drain():
            while await theirs.receive():
                pass

        nursery.start_soon(count)
        nursery.start_soon(drain)
        for _ in range(1000):
            await ours.send(b"x" * 10)
        assert ran >= 10
        nursery.cancel_scope.cancel()


# --- pumping ---


async def test_a_pump_delivers_what_was_there_what_comes_and_the_end():
    async with muxer_pair() as (left, right):
        ours, theirs = await stream_pair(left, right)
        delivered = []
        await ours.send(b"before")
        await trio.testing.wait_all_tasks_blocked()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(theirs.pump, lambda chunk: delivered.append(bytes(chunk)))
            await trio.testing.wait_all_tasks_blocked()
            await ours.send(b"after")
            await ours.close()
        assert delivered == [b"before", b"after"]


async def test_what_a_delivery_raises_ends_the_pump_and_no_more():
    def refuse(chunk):
        raise ZeroDivisionError("a bug")

    async with muxer_pair() as (left, right):
        ours, theirs = await stream_pair(left, right)
        other, there = await stream_pair(left, right)
        async with trio.open_nursery() as nursery:

            async def pump():
                with pytest.raises(ZeroDivisionError):
                    await theirs.pump(refuse)

            nursery.start_soon(pump)
            await trio.testing.wait_all_tasks_blocked()
            await ours.send(b"x")
        await other.send(b"still here")
        assert await there.receive() == b"still here"


async def test_a_cancelled_pump_loses_nothing(autojump_clock):
    async with muxer_pair() as (left, right):
        ours, theirs = await stream_pair(left, right)
        delivered = []
        with trio.move_on_after(1):
            await theirs.pump(delivered.append)
        await ours.send(b"for a reader")
        assert await theirs.receive() == b"for a reader"
        assert delivered == []


async def test_a_reset_ends_a_pump():
    async with muxer_pair() as (left, right):
        ours, theirs = await stream_pair(left, right)
        async with trio.open_nursery() as nursery:

            async def pump():
                with pytest.raises(Unreachable, match="reset by"):
                    await theirs.pump(lambda chunk: None)

            nursery.start_soon(pump)
            await trio.testing.wait_all_tasks_blocked()
            await ours.reset()


# --- keepalive ---


async def test_a_silent_peer_is_noticed_within_five_seconds(autojump_clock):
    _, session = await session_pair()  # the other end never runs: a stopped process with a live kernel
    right = YamuxConnection(session, session.get_remote_peer(), LOOPBACK)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(right.start)
        started_at = trio.current_time()
        await right.wait_ended()
    assert "nothing heard for 3 s" in (right.end_reason or "")
    assert trio.current_time() - started_at <= 5


async def test_an_idle_connection_stays_and_knows_its_round_trip(autojump_clock):
    async with muxer_pair() as (left, right):
        await trio.sleep(900)
        assert left.is_established
        assert right.is_established
        assert left.rtt_s is not None
        assert left.rtt_s < 1


async def test_a_process_that_was_stopped_itself_gives_its_peer_another_ping(mock_clock):
    async with muxer_pair() as (left, right):
        for _ in range(3):
            mock_clock.jump(30.0)  # both ends: what the other sent meanwhile was there, and not read
            for _ in range(50):
                await trio.testing.wait_all_tasks_blocked()
        assert left.is_established
        assert right.is_established


async def test_a_ping_tells_the_way_there_and_back_and_one_without_an_answer_lasts_as_long_as_the_connection(
    autojump_clock,
):
    async with muxer_pair() as (left, _):
        assert 0 <= await left.ping() < 1
    with pytest.raises(Unreachable):
        await left.ping()
    _, session = await session_pair()  # the other end never runs
    right = YamuxConnection(session, session.get_remote_peer(), LOOPBACK)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(right.start)
        with trio.move_on_after(1):
            await right.ping()
        assert right._asked == {}
        with pytest.raises(Unreachable, match="nothing heard"):
            await right.ping()


# --- with the stock muxer at the other end ---


async def test_speaks_with_the_stock_muxer():
    first, second = await session_pair()
    ours = YamuxConnection(first, first.get_remote_peer(), LOOPBACK)
    stock = Yamux(second, second.get_remote_peer(), is_initiator=False)
    data = random.Random(5).randbytes(2 * MIB)

    async def echo_stock():
        stream = await stock.accept_stream()
        received = b""
        while len(received) < len(data):
            received += await stream.read(65_536)
        await stream.write(received)
        await stream.close()

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ours.start)
            nursery.start_soon(stock.start)
            await ours.event_started.wait()
            nursery.start_soon(echo_stock)
            stream = await ours.open_stream()
            await stream.send(data)
            assert await receive_all(stream) == data
            await ours.close()
            nursery.cancel_scope.cancel()


def test_the_header_is_twelve_bytes():
    assert frames.HEADER_BYTES == 12
