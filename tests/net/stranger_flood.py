"""A program: `python stranger_flood.py ADDRESS COUNT PAUSE_S` says hello COUNT times, each as another stranger."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import trio

from kvasir_node.base.errors import KvasirError
from kvasir_node.base.settings import NetworkSettings
from kvasir_node.net.hello import HELLO_PROTOCOL
from kvasir_node.net.libp2p_host import open_libp2p_transport


async def flood(address: str, count: int, pause_s: float) -> None:
    settings = NetworkSettings(listen=("/ip4/127.0.0.1/tcp/0",))
    for number in range(count):
        with tempfile.TemporaryDirectory() as folder:
            async with open_libp2p_transport(settings, Path(folder) / "key") as stranger:
                try:
                    hub = await stranger.connect([address])
                    stream = await stranger.open_stream(hub, HELLO_PROTOCOL)
                    await stream.write(bytes(32), b"\x01", bytes(16))
                    await stream.read()
                except KvasirError:
                    pass  # refused, which is what it is for
        await trio.sleep(pause_s)
        if number == 0:
            print("begun", flush=True)
    print("done", flush=True)


if __name__ == "__main__":
    trio.run(flood, sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
