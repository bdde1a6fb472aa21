"""Measures the network against its baselines, between this process and a peer process.

It does not know how figures are shown. Stacks take turns in short rounds and each figure is the median of its
rounds, so that other load on the machine meets all of them alike; only ratios within one run mean anything.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import trio

from kvasir_node.base.errors import Unreachable
from kvasir_node.net.bench_peer import CALL_BYTES_MAX, CALLS_IN_FLIGHT_MAX
from kvasir_node.net.bench_stacks import (
    CALLS_PROTOCOL,
    ECHO,
    SINK,
    Pipe,
    begin,
    open_bench_transport,
    open_kvasir,
    open_plain,
    open_stock,
    open_tls,
    read_exactly,
)
from kvasir_node.net.rpc import CallStream
from kvasir_node.net.single_error import single_error_unwrapped

MESSAGE_BYTES = 16 * 1024
BULK_WRITE_BYTES = 1024 * 1024
BULK_BYTES = 8 * BULK_WRITE_BYTES  # between two answers of the far end
CALL_TIMEOUT_S = 30.0
PEER_START_TIMEOUT_S = 60.0
WARM_UP = 50  # round trips before the first that counts
ROUNDS = 8
MEASUREMENTS = 12  # of each round, about

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class NetFigures:
    """What `bench net` tells: by kind, then by stack. Round trips are of 16 KiB; ours is one of `CallStream.call`."""

    rtt_16k_us: dict[str, float]
    bulk_mb_s: dict[str, float]
    calls_per_s: dict[str, float]
    call_under_bulk_us: dict[str, float]


async def measure(seconds: float, say: Say) -> NetFigures:
    """Everything, in about `seconds`. Raises Unreachable when the peer process does not start.

    Cancel-safety: the peer process ends with the call.
    """
    share_s = seconds / (ROUNDS * MEASUREMENTS)
    rounds: list[dict[str, float]] = []
    with single_error_unwrapped():
        async with _open_bench() as bench:
            for number in range(ROUNDS):
                say(f"round {number + 1} of {ROUNDS}")
                rounds.append(await bench.round(share_s))
    return NetFigures(
        rtt_16k_us=_middle(rounds, "rtt_16k_us"),
        bulk_mb_s=_middle(rounds, "bulk_mb_s"),
        calls_per_s=_middle(rounds, "calls_per_s"),
        call_under_bulk_us=_middle(rounds, "call_under_bulk_us"),
    )


def _middle(rounds: list[dict[str, float]], kind: str) -> dict[str, float]:
    """The median over all rounds of each "kind.name", by name."""
    names = [key.removeprefix(f"{kind}.") for key in rounds[0] if key.startswith(f"{kind}.")]
    return {name: round(statistics.median(each[f"{kind}.{name}"] for each in rounds), 3) for name in names}


@asynccontextmanager
async def _peer_process() -> AsyncIterator[dict[str, Any]]:
    command = [sys.executable, "-P", "-m", "kvasir_node.net.bench_peer"]
    process = await trio.lowlevel.open_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        line = b""
        with trio.move_on_after(PEER_START_TIMEOUT_S):
            line = await _first_line(process)
        if not line:
            raise Unreachable(f"the peer process did not start within {PEER_START_TIMEOUT_S:g} s")
        yield json.loads(line)
    finally:
        process.kill()
        with trio.CancelScope(shield=True):  # pyright: ignore[reportCallIssue]  (libp2p brings outdated trio stubs)
            await process.wait()


async def _first_line(process: trio.Process) -> bytes:
    assert process.stdout is not None
    received = b""
    while b"\n" not in received:
        chunk = await process.stdout.receive_some()
        if not chunk:
            raise Unreachable(f"the peer process ended before it listened, after {received[:200]!r}")
        received += chunk
    return received


@asynccontextmanager
async def _open_bench() -> AsyncIterator[_Bench]:
    """Both processes, with every pipe open and warm."""
    async with AsyncExitStack() as stack:
        where = await stack.enter_async_context(_peer_process())
        transport = await stack.enter_async_context(open_bench_transport())
        openers = {
            "plain_tcp": lambda: open_plain(where["plain_tcp"]),
            "tls": lambda: open_tls(where["tls"]),
            "stock": lambda: open_stock(where["stock"]),
            "kvasir": lambda: open_kvasir(transport, where["kvasir"]),
        }
        echoes = {name: await stack.enter_async_context(openers[name]()) for name in ("plain_tcp", "stock")}
        sinks = {name: await stack.enter_async_context(opener()) for name, opener in openers.items()}
        stream = await transport.open_stream(await transport.connect(where["kvasir"]), CALLS_PROTOCOL)
        calls = CallStream(stream, handler=None, in_flight_max=CALLS_IN_FLIGHT_MAX, body_bytes_max=CALL_BYTES_MAX)
        nursery = await stack.enter_async_context(trio.open_nursery())
        nursery.start_soon(calls.run)
        bench = _Bench(echoes, sinks, calls)
        await bench.warm_up()
        yield bench
        nursery.cancel_scope.cancel()


class _Bench:
    def __init__(self, echoes: dict[str, Pipe], sinks: dict[str, Pipe], calls: CallStream) -> None:
        self._echoes = echoes
        self._sinks = sinks
        self._calls = calls
        self._body = bytes(MESSAGE_BYTES)

    async def warm_up(self) -> None:
        for echo in self._echoes.values():
            await begin(echo, ECHO, MESSAGE_BYTES)
            await _round_trips(echo, WARM_UP)
        for sink in self._sinks.values():
            await begin(sink, SINK, BULK_BYTES)
            await _bulk_rate(sink, 0.0)
        for _ in range(WARM_UP):
            await self.call()

    async def call(self) -> None:
        await self._calls.call(1, self._body, timeout_s=CALL_TIMEOUT_S)

    async def round(self, share_s: float) -> dict[str, float]:
        """Every figure once, by "kind.name"."""
        found: dict[str, float] = {}
        for name, echo in self._echoes.items():
            found[f"rtt_16k_us.{name}"] = await _typical_us(partial(_round_trips, echo, 1), share_s)
        found["rtt_16k_us.kvasir"] = await _typical_us(self.call, share_s)
        for name, sink in self._sinks.items():
            found[f"bulk_mb_s.{name}"] = await _bulk_rate(sink, share_s)
        found["calls_per_s.one_at_a_time"] = await _calls_per_s(self.call, 1, share_s)
        found[f"calls_per_s.in_flight_{CALLS_IN_FLIGHT_MAX}"] = await _calls_per_s(
            self.call, CALLS_IN_FLIGHT_MAX, share_s
        )
        found["call_under_bulk_us.idle"] = await _typical_us(self.call, share_s)
        found["call_under_bulk_us.busy"] = await self._call_beside_bulk_us(share_s)
        return found

    async def _call_beside_bulk_us(self, share_s: float) -> float:
        enough = trio.Event()
        typical_us = 0.0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_bulk_until, self._sinks["kvasir"], enough)
            typical_us = await _typical_us(self.call, share_s)
            enough.set()
        return typical_us


async def _round_trips(pipe: Pipe, count: int) -> None:
    message = bytes(MESSAGE_BYTES)
    for _ in range(count):
        await pipe.send(message)
        await read_exactly(pipe, MESSAGE_BYTES)


async def _typical_us(action: Callable[[], Awaitable[object]], during_s: float) -> float:
    """The median time of one action, repeated for a while."""
    times_s: list[float] = []
    started_at = ended_at = perf_counter()
    while not times_s or ended_at - started_at < during_s:
        began_at = perf_counter()
        await action()
        ended_at = perf_counter()
        times_s.append(ended_at - began_at)
    return statistics.median(times_s) * 1e6


async def _bulk_rate(pipe: Pipe, during_s: float) -> float:
    """MB/s (10^6) from the first byte sent to the far end's word that it has the last."""
    sent_bytes, started_at = 0, perf_counter()
    while not sent_bytes or perf_counter() - started_at < during_s:
        await _send_bulk(pipe)
        sent_bytes += BULK_BYTES
    return sent_bytes / (perf_counter() - started_at) / 1e6


async def _bulk_until(pipe: Pipe, enough: trio.Event) -> None:
    while not enough.is_set():
        await _send_bulk(pipe)


async def _send_bulk(pipe: Pipe) -> None:
    block = bytes(BULK_WRITE_BYTES)
    for _ in range(BULK_BYTES // BULK_WRITE_BYTES):
        await pipe.send(block)
    await read_exactly(pipe, 1)


async def _calls_per_s(call: Callable[[], Awaitable[None]], at_once: int, during_s: float) -> float:
    answered, started_at = 0, perf_counter()

    async def keep_calling() -> None:
        nonlocal answered
        while perf_counter() - started_at < during_s:
            await call()
            answered += 1

    async with trio.open_nursery() as nursery:
        for _ in range(at_once):
            nursery.start_soon(keep_calling)
    return answered / (perf_counter() - started_at)
