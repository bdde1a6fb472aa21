"""A program: `python stranger_flood.py ADDRESS COUNT AT_ONCE` knocks COUNT times, each time as another stranger.

So many of them are under way at once. Each asks for a place at the relay, then says hello with a secret of its own.
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import trio

from kvasir_node.base.errors import KvasirError, Unreachable
from kvasir_node.base.settings import NetworkSettings
from kvasir_node.net.circuit import RELAY_PROTOCOL, Ask
from kvasir_node.net.hello import HELLO_PROTOCOL
from kvasir_node.net.libp2p_host import open_libp2p_transport


async def knock(address: str, key: Path) -> str:
    """What came of it: how the hub answered the hello, or why there was none."""
    async with open_libp2p_transport(NetworkSettings(listen=()), key) as stranger:
        try:
            hub = await stranger.connect([address])
            with suppress(Unreachable):  # reset as soon as it was opened
                await (await stranger.open_stream(hub, RELAY_PROTOCOL)).write(bytes([Ask.RESERVE]))
            stream = await stranger.open_stream(hub, HELLO_PROTOCOL)
            await stream.write(bytes(32), b"\x01", bytes(16))
            return "refused" if bytes(await stream.read()) == b"\0" else "let in"
        except KvasirError:
            return "turned away"


async def flood(address: str, count: int, at_once: int) -> None:
    limit, came = trio.CapacityLimiter(at_once), dict.fromkeys(("refused", "let in", "turned away"), 0)

    async def one(number: int) -> None:
        async with limit:
            came[await knock(address, Path(folder) / str(number))] += 1

    began_at = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        async with trio.open_nursery() as nursery:
            for number in range(count):
                nursery.start_soon(one, number)
    print(f"{time.perf_counter() - began_at:.1f} s:", ", ".join(f"{n} {how}" for how, n in came.items()), flush=True)


if __name__ == "__main__":
    print("begun", flush=True)
    trio.run(flood, sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
