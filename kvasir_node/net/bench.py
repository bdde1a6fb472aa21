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
from kvasir_node.net.libp2p_host import Libp2pTransport
from kvasir_node.net.rpc import CallStream
from kvasir_node.net.single_error import single_error_unwrapped

MESSAGE_BYTES = 16 * 1024
BULK_WRITE_BYTES = 1024 * 1024
BULK_BYTES = 16 * BULK_WRITE_BYTES  # between two answers of the far end
CALL_TIMEOUT_S = 30.0
PEER_START_TIMEOUT_S = 60.0
WARM_UP = 50  # round trips before the first that counts
ROUNDS = 8
MEASUREMENTS = 12  # of each round, about

Say = Callable[[str], None]
Series = dict[str, list[float]]
"""Figures by stack, one of each round."""


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
    with single_error_unwrapped():
        async with _peer_process() as where, open_bench_transport() as transport:
            pipes = await _measure_pipes(where, transport, share_s, say)
            calls = await _measure_calls(where["kvasir"], transport, share_s, say)
    rtt, bulk = pipes
    middle = {name: round(statistics.median(values), 1) for name, values in (rtt | calls).items()}
    return NetFigures(
        rtt_16k_us={name: middle[name] for name in ("plain_tcp", "stock", "kvasir")},
        bulk_mb_s={name: round(statistics.median(values), 1) for name, values in bulk.items()},
        calls_per_s={name: middle[name] for name in ("one_at_a_time", "in_flight_64")},
        call_under_bulk_us={name: middle[name] for name in ("idle", "busy")},
    )


@asynccontextmanager
async def _peer_process() -> AsyncIterator[dict[str, Any]]:
    command = [sys.executable, "-m", "kvasir_node.net.bench_peer"]
    process = await trio.lowlevel.open_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        with trio.move_on_after(PEER_START_TIMEOUT_S):
            yield json.loads(await _first_line(process))
            return
        raise Unreachable(f"the peer process did not start within {PEER_START_TIMEOUT_S:g} s")
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


# --- pipes ---


async def _measure_pipes(
    where: dict[str, Any], transport: Libp2pTransport, share_s: float, say: Say
) -> tuple[Series, Series]:
    """Round trips and bulk of all stacks, in turns."""
    rtt: Series = {}
    bulk: Series = {}
    async with AsyncExitStack() as stack:
        openers = {
            "plain_tcp": lambda: open_plain(where["plain_tcp"]),
            "tls": lambda: open_tls(where["tls"]),
            "stock": lambda: open_stock(where["stock"]),
            "kvasir": lambda: open_kvasir(transport, where["kvasir"]),
        }
        echoes = {name: await stack.enter_async_context(openers[name]()) for name in ("plain_tcp", "stock")}
        sinks = {name: await stack.enter_async_context(opener()) for name, opener in openers.items()}
        for echo in echoes.values():
            await begin(echo, ECHO, MESSAGE_BYTES)
            await _round_trips(echo, WARM_UP)
        for sink in sinks.values():
            await begin(sink, SINK, BULK_BYTES)
            await _bulk_rate(sink, 0.0)
        for number in range(ROUNDS):
            say(f"pipes, round {number + 1} of {ROUNDS}")
            for name, echo in echoes.items():
                rtt.setdefault(name, []).append(await _typical_us(lambda e=echo: _round_trips(e, 1), share_s))
            for name, sink in sinks.items():
                bulk.setdefault(name, []).append(await _bulk_rate(sink, share_s))
    return rtt, bulk


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
    block, sent_bytes = bytes(BULK_WRITE_BYTES), 0
    started_at = perf_counter()
    while not sent_bytes or perf_counter() - started_at < during_s:
        for _ in range(BULK_BYTES // BULK_WRITE_BYTES):
            await pipe.send(block)
        await read_exactly(pipe, 1)
        sent_bytes += BULK_BYTES
    return sent_bytes / (perf_counter() - started_at) / 1e6


# --- calls ---


async def _measure_calls(addresses: list[str], transport: Libp2pTransport, share_s: float, say: Say) -> Series:
    peer = await transport.connect(addresses)
    stream = await transport.open_stream(peer, CALLS_PROTOCOL)
    calls = CallStream(stream, handler=None, in_flight_max=CALLS_IN_FLIGHT_MAX, body_bytes_max=CALL_BYTES_MAX)
    body, found = bytes(MESSAGE_BYTES), Series()

    async def call() -> None:
        await calls.call(1, body, timeout_s=CALL_TIMEOUT_S)

    async with trio.open_nursery() as nursery, open_kvasir(transport, addresses) as sink:
        nursery.start_soon(calls.run)
        await begin(sink, SINK, BULK_BYTES)
        for number in range(ROUNDS):
            say(f"calls, round {number + 1} of {ROUNDS}")
            found.setdefault("kvasir", []).append(await _typical_us(call, 2 * share_s))
            found.setdefault("one_at_a_time", []).append(await _calls_per_s(call, 1, share_s))
            found.setdefault("in_flight_64", []).append(await _calls_per_s(call, CALLS_IN_FLIGHT_MAX, share_s))
            found.setdefault("idle", []).append(await _typical_us(call, share_s))
            async with trio.open_nursery() as beside:
                beside.start_soon(_bulk_rate, sink, 1e9)
                found.setdefault("busy", []).append(await _typical_us(call, share_s))
                beside.cancel_scope.cancel()
        nursery.cancel_scope.cancel()
    return found


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
