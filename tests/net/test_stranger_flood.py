"""A thousand strangers, one by one or many at once, cost a hub bounded memory, and a member's calls little time."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import trio

from kvasir_node.base.settings import MIB, NetworkSettings
from kvasir_node.net.circuit import RELAY_PROTOCOL
from kvasir_node.net.hello import REFUSALS_MAX, Membership
from kvasir_node.net.libp2p_host import open_libp2p_transport
from kvasir_node.net.relay import Relay

SECRET, ECHO = b"s" * 32, "/test/echo/1"
STRANGERS = 1000


async def echo(stream) -> None:
    while chunk := await stream.read():
        await stream.write(bytes(chunk))


async def call_s(stream) -> float:
    began_at = time.perf_counter()
    await stream.write(b"x" * 1000)
    left = 1000
    while left:
        left -= len(await stream.read())
    return time.perf_counter() - began_at


async def calls_s(stream, until: trio.Event) -> list[float]:
    """One each 10 ms."""
    took: list[float] = []
    while not until.is_set():
        took.append(await call_s(stream))
        await trio.sleep(0.01)
    return took


async def calls_for_s(stream, seconds: float) -> list[float]:
    async with trio.open_nursery() as nursery:
        over = trio.Event()

        async def end() -> None:
            await trio.sleep(seconds)
            over.set()

        nursery.start_soon(end)
        return await calls_s(stream, over)


def told(took: list[float]) -> str:
    spread = statistics.quantiles(took, n=100)
    return f"median {statistics.median(took) * 1e3:.2f} ms, 99 % {spread[98] * 1e3:.1f} ms"


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("at_once", [1, 100])
async def test_a_thousand_strangers_slow_a_members_calls_by_less_than_a_fifth(tmp_path, capsys, at_once):
    settings = NetworkSettings(listen=("/ip4/127.0.0.1/tcp/0",))
    async with (
        open_libp2p_transport(settings, tmp_path / "hub") as hub,
        open_libp2p_transport(settings, tmp_path / "ann") as ann,
        trio.open_nursery() as nursery,
    ):
        of_hub, of_ann = Membership(hub, SECRET, b"hub"), Membership(ann, SECRET, b"ann")
        relay = Relay(hub, settings)
        hub.set_handler(ECHO, of_hub.guard(echo))
        hub.set_handler(RELAY_PROTOCOL, of_hub.guard(relay.serve))
        for membership in (of_hub, of_ann):
            nursery.start_soon(membership.run)
        await ann.connect(hub.addresses())
        await of_ann.require(hub.peer_id, 5)
        await of_hub.require(ann.peer_id, 5)
        stream = await ann.open_stream(hub.peer_id, ECHO)
        alone = await calls_for_s(stream, 5)
        memory = psutil.Process().memory_info
        before_bytes, over = memory().rss, trio.Event()
        script = str(Path(__file__).with_name("stranger_flood.py"))
        arguments = [sys.executable, script, hub.addresses()[0], str(STRANGERS), str(at_once)]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as strangers:  # noqa: ASYNC220
            assert strangers.stdout is not None
            assert await trio.to_thread.run_sync(strangers.stdout.readline) == "begun\n"
            said: list[str] = []

            async def wait() -> None:
                said.append(await trio.to_thread.run_sync(strangers.stdout.readline))
                over.set()

            nursery.start_soon(wait)
            beset = await calls_s(stream, over)
        grown_bytes = memory().rss - before_bytes
        with capsys.disabled():
            print(f"\nalone {told(alone)}; beset {told(beset)}; {grown_bytes / MIB:.1f} MiB more; {said[0]}", end="")
        assert ", 0 let in," in said[0]
        assert len(of_hub._refusals) <= REFUSALS_MAX
        assert of_hub.members() == (ann.peer_id,)
        assert relay.reservations == 0
        assert grown_bytes < 64 * MIB
        assert statistics.median(beset) < 1.2 * statistics.median(alone)
        nursery.cancel_scope.cancel()
