"""Two hosts on real sockets under cancels, resets and load: short here, at full length with `-m soak`."""

import ctypes
import gc
import os
import random
from dataclasses import dataclass, field

import psutil
import pytest
import trio

from kvasir_node.base.errors import Unreachable
from kvasir_node.net.rpc import CallStream, call_handler

ECHO, CALLS = "/test/echo/1", "/test/calls/1"
MIB = 1024 * 1024


def in_ci_and_soak(short, full):
    return pytest.mark.parametrize(
        "amount", [short, pytest.param(full, marks=[pytest.mark.soak, pytest.mark.timeout(900)])]
    )


async def echo(stream):
    while chunk := await stream.read():
        await stream.write(chunk)


async def echo_call(method, body):
    await trio.sleep(method / 1e4)
    return (body,)


def serve(host):
    host.set_handler(ECHO, echo)
    host.set_handler(CALLS, call_handler(lambda _: echo_call, in_flight_max=64, body_bytes_max=MIB))


async def read_exactly(stream, count):
    received = bytearray()
    while len(received) < count:
        chunk = await stream.read()
        assert chunk
        received += chunk
    return received


# --- cancels ---


@dataclass
class Cancels:
    wanted: int
    rng: random.Random
    reads: int = 0
    writes: int = 0
    calls: int = 0
    answered: int = 0
    sent: bytearray = field(default_factory=bytearray)
    received: bytearray = field(default_factory=bytearray)

    @property
    def is_enough(self):
        return min(self.reads, self.writes, self.calls) >= self.wanted // 3

    def soon(self, within_s=0.0004):
        return trio.move_on_after(self.rng.random() * within_s)


async def write_cancelled(stream, counts):
    while not counts.is_enough:
        data = counts.rng.randbytes(counts.rng.choice((10, 1000, 60_000, 200_000)))
        with counts.soon() as scope:
            await stream.write(data)
        if scope.cancelled_caught:
            counts.writes += 1  # nothing of it was queued
        else:
            counts.sent += data
    await stream.close()


async def read_cancelled(stream, counts):
    while True:
        chunk = None
        with counts.soon():
            chunk = await stream.read(counts.rng.choice((1, 100, 100_000)))
        if chunk is None:
            counts.reads += 1
        elif not chunk:
            return
        else:
            counts.received += chunk


async def call_cancelled(calls, counts):
    while not counts.is_enough:
        body = counts.rng.randbytes(counts.rng.choice((1, 16_384, 100_000)))
        result = None
        with counts.soon(0.03):
            result = await calls.call(counts.rng.choice((0, 1, 5)), body, timeout_s=30)
        if result is None:
            counts.calls += 1
        else:
            counts.answered += 1
            assert result == body


@in_ci_and_soak(300, 10_000)
async def test_cancelled_reads_writes_and_calls_lose_nothing(open_hosts, amount):
    counts = Cancels(amount, random.Random(amount))
    async with open_hosts(2) as (left, right), trio.open_nursery() as running:
        serve(right)
        await left.connect(right.addresses())
        stream = await left.open_stream(right.peer_id, ECHO)
        calls = CallStream(
            await left.open_stream(right.peer_id, CALLS), handler=None, in_flight_max=64, body_bytes_max=MIB
        )
        running.start_soon(calls.run)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(write_cancelled, stream, counts)
            nursery.start_soon(read_cancelled, stream, counts)
            for _ in range(4):
                nursery.start_soon(call_cancelled, calls, counts)
        assert counts.received == counts.sent
        assert counts.reads + counts.writes + counts.calls >= counts.wanted // 3 * 3
        assert counts.answered
        assert await calls.call(0, b"still here", timeout_s=5) == b"still here"
        assert len(left.connections()) == 1
        running.cancel_scope.cancel()


# --- connections that come and go ---


def footprint():
    """(descriptors, tasks, bytes of memory in use: what the allocator keeps for later is given back first)."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    process = psutil.Process()
    return process.num_fds(), trio.lowlevel.current_statistics().tasks_living, process.memory_info().rss


async def come_and_go(left, right, count, rng):
    for _ in range(count):
        await left.connect(right.addresses())
        stream = await left.open_stream(right.peer_id, ECHO)
        await stream.write(b"x" * 1000)
        if rng.random() < 0.5:
            await left.disconnect(right.peer_id)
        else:
            muxed = left._table.preferred(right.peer_id).muxed
            muxed.session._connection.raw.stream.close_now()  # as a process that is killed
            await muxed.wait_ended()
        with trio.fail_after(5):
            while left.connections() or right.connections():  # noqa: ASYNC110
                await trio.sleep(0.001)


@in_ci_and_soak(60, 1000)
async def test_connections_opened_and_reset_leave_nothing(open_hosts, amount):
    rng = random.Random(3)
    async with open_hosts(2) as (left, right):
        serve(right)
        await come_and_go(left, right, 40, rng)
        await trio.sleep(0.2)  # identify's own tasks end with their streams
        files, tasks, rss = footprint()
        await come_and_go(left, right, amount, rng)
        await trio.sleep(0.2)
        files_after, tasks_after, rss_after = footprint()
    assert files_after <= files
    assert tasks_after <= tasks
    assert rss_after - rss < 8 * MIB


# --- load ---


async def exchange(host, peer, size, counts):
    data = os.urandom(size)
    stream = await host.open_stream(peer, ECHO)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.write, data)
        assert await read_exactly(stream, size) == data
    await stream.close()
    assert await stream.read() == b""
    counts[size] = counts.get(size, 0) + 1


@in_ci_and_soak(3.0, 60.0)
async def test_both_directions_full_beside_fifty_churning_streams(open_hosts, amount):
    ends_at = trio.current_time() + amount
    counts = {}

    async def again_and_again(host, peer, size):
        while trio.current_time() < ends_at:
            with trio.fail_after(20):  # else it is a stall
                await exchange(host, peer, size, counts)

    async with open_hosts(2) as (left, right):
        serve(left)
        serve(right)
        await left.connect(right.addresses())
        async with trio.open_nursery() as nursery:
            for host, other in ((left, right), (right, left)):
                nursery.start_soon(again_and_again, host, other.peer_id, 8 * MIB)
                for _ in range(25):
                    nursery.start_soon(again_and_again, host, other.peer_id, 20_000)
        assert counts[8 * MIB] >= 2
        assert counts[20_000] >= 50
        (live,) = left._table.all()
        assert live.muxed.stream_count <= 2


@in_ci_and_soak(1.0, 60.0)
async def test_a_reader_that_pauses_loses_nothing(open_hosts, amount):
    data = random.Random(6).randbytes(16 * MIB)
    received = bytearray()
    done = trio.Event()

    async def pause_then_read(stream):
        await trio.sleep(amount)
        while chunk := await stream.read():
            received.extend(chunk)
        done.set()

    async with open_hosts(2) as (left, right):
        right.set_handler("/test/pause/1", pause_then_read)
        await left.connect(right.addresses())
        stream = await left.open_stream(right.peer_id, "/test/pause/1")
        await stream.write(data)
        await stream.close()
        with trio.fail_after(amount + 20):
            await done.wait()
    assert received == data


async def test_a_call_on_a_dead_connection_fails_at_once(open_hosts):
    async with open_hosts(2) as (left, right), trio.open_nursery() as nursery:
        serve(right)
        await left.connect(right.addresses())
        calls = CallStream(
            await left.open_stream(right.peer_id, CALLS), handler=None, in_flight_max=8, body_bytes_max=MIB
        )
        nursery.start_soon(calls.run)
        assert await calls.call(0, b"x", timeout_s=5) == b"x"
        left._table.preferred(right.peer_id).muxed.session._connection.raw.stream.close_now()
        with trio.fail_after(2), pytest.raises(Unreachable):
            await calls.call(0, b"x", timeout_s=5)
