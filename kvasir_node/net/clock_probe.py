"""How far a hub's clock is from ours: it is asked for its time over a stream, and half the round trip is allowed for.

It does not know what follows. Source: RFC 5905 (NTP) section 8, with one clock's own delay taken as nothing.

    CLOCK_PROTOCOL: u8 anything, as often as one likes, eight times at most; each answered by u64 ms since 1970
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import trio

from kvasir_node.base.errors import Unreachable
from kvasir_node.base.ids import PeerId
from kvasir_node.net.stream_io import read_exactly
from kvasir_node.net.transport import Stream, Transport

CLOCK_PROTOCOL = "/kvasir/clock/1.0.0"
ASKS = 3  # of which the quickest counts: what waited longest is most in doubt
ASKS_MAX = 8
CLOCK_S = 4.0  # one hub

Wall = Callable[[], float]
"""Seconds since 1970."""


@dataclass(frozen=True, slots=True)
class ClockReading:
    """`ahead_s`: how far the other clock is ahead of ours, give or take `doubt_s`."""

    ahead_s: float
    doubt_s: float


async def ask_clock(transport: Transport, hub: PeerId, wall: Wall) -> ClockReading:
    """Raises Unreachable. Cancel-safety: nothing is left open."""
    readings: list[ClockReading] = []
    with trio.move_on_after(CLOCK_S):
        stream = await transport.open_stream(hub, CLOCK_PROTOCOL)
        try:
            while len(readings) < ASKS:
                began_at = trio.current_time()
                await stream.write(b"?")
                theirs_s = int.from_bytes(await read_exactly(stream.read, 8), "big") / 1000
                doubt_s = (trio.current_time() - began_at) / 2
                readings.append(ClockReading(theirs_s - (wall() - doubt_s), doubt_s))
        finally:
            await stream.reset()
    if not readings:
        raise Unreachable(f"{hub} did not say its time in {CLOCK_S:g} s")
    return min(readings, key=lambda each: each.doubt_s)


async def serve_clock(stream: Stream, wall: Wall) -> None:
    with trio.move_on_after(CLOCK_S):
        for _ in range(ASKS_MAX):
            if not await stream.read(1):
                return
            await stream.write(int(wall() * 1000).to_bytes(8, "big"))
