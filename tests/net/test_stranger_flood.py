"""A thousand strangers that say hello cost a hub bounded memory, and a member's calls little time."""

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
from kvasir_node.net.hello import REFUSALS_MAX, Membership
from kvasir_node.net.libp2p_host import open_libp2p_transport

SECRET, ECHO = b"s" * 32, "/test/echo/1"
STRANGERS = 1000
PAUSE_S = 0.02


async def echo(stream) -> None:
    while chunk := await stream.read():
        await stream.write(bytes(chunk))


async def call_s(stream, count: int) -> float:
    """The median of some calls, one each 10 ms."""
    took: list[float] = []
    for _ in range(count):
        began_at = time.perf_counter()
        await stream.write(b"x" * 1000)
        left = 1000
        while left:
            left -= len(await stream.read())
        took.append(time.perf_counter() - began_at)
        await trio.sleep(0.01)
    return statistics.median(took)


@pytest.mark.soak
@pytest.mark.timeout(300)
async def test_a_thousand_strangers_slow_a_members_calls_by_less_than_a_fifth(tmp_path, capsys):
    settings = NetworkSettings(listen=("/ip4/127.0.0.1/tcp/0",))
    async with (
        open_libp2p_transport(settings, tmp_path / "hub") as hub,
        open_libp2p_transport(settings, tmp_path / "ann") as ann,
        trio.open_nursery() as nursery,
    ):
        of_hub, of_ann = Membership(hub, SECRET, b"hub"), Membership(ann, SECRET, b"ann")
        hub.set_handler(ECHO, of_hub.guard(echo))
        for membership in (of_hub, of_ann):
            nursery.start_soon(membership.run)
        await ann.connect(hub.addresses())
        await of_ann.require(hub.peer_id, 5)
        await of_hub.require(ann.peer_id, 5)
        stream = await ann.open_stream(hub.peer_id, ECHO)
        alone_s = await call_s(stream, 300)
        memory = psutil.Process().memory_info
        before_bytes = memory().rss
        script = str(Path(__file__).with_name("stranger_flood.py"))
        arguments = [sys.executable, script, hub.addresses()[0], str(STRANGERS), str(PAUSE_S)]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as strangers:  # noqa: ASYNC220
            assert strangers.stdout is not None
            assert await trio.to_thread.run_sync(strangers.stdout.readline) == "begun\n"
            beset_s = await call_s(stream, 1000)
            assert await trio.to_thread.run_sync(strangers.stdout.readline) == "done\n"
        grown_bytes = memory().rss - before_bytes
        with capsys.disabled():
            print(f"\nalone {alone_s * 1e3:.2f} ms, beset {beset_s * 1e3:.2f} ms, {grown_bytes / MIB:.1f} MiB more")
        assert len(of_hub._refusals) <= REFUSALS_MAX
        assert of_hub.members() == (ann.peer_id,)
        assert grown_bytes < 64 * MIB
        assert beset_s < 1.2 * alone_s
        nursery.cancel_scope.cancel()
