"""300 MB over real sockets from providers of which one dies, one lies and one is slow (run with -m soak)."""

from __future__ import annotations

import ctypes
import gc
import random
import shutil
import statistics
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from time import perf_counter

import psutil
import pytest
import trio
from test_content import SETTINGS, add_blob
from test_content_limits import OnePercentServer

from kvasir_node.base.settings import NetworkSettings
from kvasir_node.net.libp2p_host import open_libp2p_transport
from kvasir_node.roles.content import BlockServer, Fetcher, open_block_calls, read_blob
from kvasir_node.roles.download import FetchTally
from kvasir_node.roles.throttle import Throttle
from kvasir_node.store.blocks import BlockStore
from kvasir_node.wire.blobs import BlobRef
from kvasir_node.wire.messages import BLOCKS_PROTOCOL

SIZE = 300 * 1000 * 1000
BLOCK_BYTES = 1 << 20
GROWN_BYTES_MAX = 64 << 20
PAIRS = 7
LISTEN = replace(NetworkSettings(), listen=("/ip4/127.0.0.1/tcp/0",))
pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


def random_content() -> bytes:
    rng = random.Random(3)
    return b"".join(rng.randbytes(1_000_000) for _ in range(SIZE // 1_000_000))


class Provider:
    """A transport with a block server, opened in a task of its own so that it can end before the others."""

    def __init__(self, folder: Path, name: str, server: BlockServer) -> None:
        self.key, self.server = folder / f"{name}.key", server
        self.end = trio.Event()

    async def run(self, *, task_status) -> None:
        async with open_libp2p_transport(LISTEN, self.key) as transport:
            transport.set_handler(BLOCKS_PROTOCOL, self.server.serve)
            task_status.started(transport)
            await self.end.wait()


class MemoryWatch:
    """By how much the memory of this process changed while `run` ran, looked at a hundred times a second."""

    def __init__(self) -> None:
        self.seen_bytes: list[int] = []

    @property
    def range_bytes(self) -> int:
        return max(self.seen_bytes) - min(self.seen_bytes)

    async def run(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what the allocator keeps would hide growth
        while True:
            self.seen_bytes.append(psutil.Process().memory_info().rss)
            await trio.sleep(0.01)


async def fetch(
    folder: Path, source: BlockStore, blob: BlobRef, servers: dict[str, BlockServer], watch: MemoryWatch | None = None
) -> tuple[float, FetchTally]:
    """Seconds that the fetch took; a provider named victim dies when half of it is here."""
    tally, store = FetchTally(), BlockStore(folder / "own")
    async with trio.open_nursery() as nursery, AsyncExitStack() as opened:
        providers = {name: Provider(folder, name, server) for name, server in servers.items()}
        own = await opened.enter_async_context(open_libp2p_transport(LISTEN, folder / "own.key"))
        transports = [await nursery.start(provider.run) for provider in providers.values()]
        peers = [await own.connect(transport.addresses()) for transport in transports]

        async def kill_half_way() -> None:
            while "victim" in providers and tally.bytes_fetched < blob.size / 2:  # noqa: ASYNC110
                await trio.sleep(0.01)
            if "victim" in providers:
                providers["victim"].end.set()

        nursery.start_soon(kill_half_way)
        if watch is not None:
            nursery.start_soon(watch.run)
        began = perf_counter()
        await Fetcher(open_block_calls(own), store, SETTINGS, tally).fetch_blobs(peers, [blob])
        took_s = perf_counter() - began
        for provider in providers.values():
            provider.end.set()
        nursery.cancel_scope.cancel()
    assert await trio.to_thread.run_sync(read_blob, store, blob) == await trio.to_thread.run_sync(
        read_blob, source, blob
    )
    return took_s, tally


async def test_law_6_faulty_providers_cost_a_fifth_at_most_and_never_a_wrong_byte(tmp_path):
    source = BlockStore(tmp_path / "source")
    blob = add_blob(source, random_content(), BLOCK_BYTES)
    healthy = {"healthy1": BlockServer(source), "healthy2": BlockServer(source)}
    liar = OnePercentServer(source)
    liar._run_blocking = BlockServer(source)._run_blocking
    healthy_s, faulty_s = [], []

    async def timed(name: str, servers: dict[str, BlockServer]) -> tuple[float, FetchTally]:
        (tmp_path / name).mkdir()
        took_s, tally = await fetch(tmp_path / name, source, blob, servers)
        shutil.rmtree(tmp_path / name)
        return took_s, tally

    healthy_s.append((await timed("healthy", healthy))[0])
    for _ in range(PAIRS):
        slow = BlockServer(source, throttle=Throttle(SIZE / 2 / healthy_s[-1] / 50))
        took_s, tally = await timed("faulty", {"victim": BlockServer(source), "liar": liar, "slow": slow, **healthy})
        faulty_s.append(took_s)
        healthy_s.append((await timed("healthy", healthy))[0])
        assert tally.bytes_wasted < 0.05 * SIZE
    # Each beside the healthy runs before and after it, as the machine may have other work.
    ratios = [2 * faulty / sum(around) for faulty, around in zip(faulty_s, pairwise(healthy_s), strict=True)]
    print("healthy", *(f"{each:.2f}" for each in healthy_s), "faulty", *(f"{each:.2f}" for each in faulty_s))
    print(f"median x{statistics.median(ratios):.2f} of", *(f"{each:.2f}" for each in ratios))
    assert statistics.median(ratios) <= 1.2, ratios


async def test_law_7_a_fetch_of_300_mb_takes_little_memory(tmp_path):
    """Both ends in this process: blocks in flight, windows, and what disk threads hold."""
    source = BlockStore(tmp_path / "source")
    blob = add_blob(source, random_content(), BLOCK_BYTES)
    (tmp_path / "warm").mkdir()
    await fetch(tmp_path / "warm", source, blob, {"healthy1": BlockServer(source)})
    (tmp_path / "watched").mkdir()
    watch = MemoryWatch()
    await fetch(tmp_path / "watched", source, blob, {name: BlockServer(source) for name in ("a", "b")}, watch)
    print(f"grown by {watch.range_bytes / 2**20:.0f} MiB, {len(watch.seen_bytes)} looks")
    assert len(watch.seen_bytes) > 20
    assert watch.range_bytes < GROWN_BYTES_MAX
