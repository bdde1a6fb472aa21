"""Rates up and down, several providers of unequal worth, and what a resumed download costs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import trio
from test_content import BLOCK_BYTES, LINK, SETTINGS, Swarm, add_blob, open_swarm, random_bytes

from kvasir_node.base.ids import PeerId
from kvasir_node.roles.content import BlockServer, Fetcher, open_block_calls, read_blob, run_inline
from kvasir_node.roles.download import FetchTally
from kvasir_node.roles.throttle import Throttle
from kvasir_node.store.blocks import BlockStore

RATE = 25 * BLOCK_BYTES  # a quarter of what the link can
FAST = replace(LINK, bandwidth_bytes_s=20 * LINK.bandwidth_bytes_s)


async def test_the_download_rate_is_kept_over_all_downloads_together(autojump_clock, tmp_path):
    async with open_swarm(tmp_path) as swarm:
        blobs = [add_blob(swarm.source, random_bytes(n, 75)) for n in range(2)]
        provider = await swarm.provider("p", link=FAST)
        swarm.fetcher = replace(swarm.fetcher, throttle=Throttle(RATE))
        started_at = trio.current_time()
        async with trio.open_nursery() as nursery:
            for blob in blobs:
                nursery.start_soon(swarm.fetcher.fetch_blobs, [provider], [blob])
        took_s = trio.current_time() - started_at
        assert 150 / 25 - 1.5 < took_s < 150 / 25 + 3


async def test_the_upload_rate_is_kept_over_all_askers_together(autojump_clock, tmp_path):
    async with open_swarm(tmp_path) as swarm:
        blob = add_blob(swarm.source, random_bytes(1, 75))
        server = BlockServer(swarm.source, run_blocking=run_inline, throttle=Throttle(RATE))
        provider = await swarm.provider("p", server, link=FAST)
        others = [Fetcher(open_block_calls(swarm.own), BlockStore(tmp_path / n), SETTINGS, FetchTally(), run_inline)
                  for n in ("x", "y")]  # fmt: skip
        started_at = trio.current_time()
        async with trio.open_nursery() as nursery:
            for fetcher in others:
                nursery.start_soon(fetcher.fetch_blobs, [provider], [blob])
        took_s = trio.current_time() - started_at
        assert server.bytes_served > 150 * BLOCK_BYTES - 400
        assert 150 / 25 - 1.5 < took_s < 150 / 25 + 3


async def test_without_a_rate_a_fetch_takes_what_the_link_takes(autojump_clock, tmp_path):
    async with open_swarm(tmp_path) as swarm:
        blob = add_blob(swarm.source, random_bytes(1, 75))
        provider = await swarm.provider("p", link=FAST)
        started_at = trio.current_time()
        await swarm.fetcher.fetch_blobs([provider], [blob])
        assert trio.current_time() - started_at < 1.0


async def test_members_that_have_nothing_cost_little_and_those_that_have_it_help(autojump_clock, tmp_path):
    async def seconds(folder: Path, empty: int, full: int) -> float:
        async with open_swarm(folder) as swarm:
            data = random_bytes(1, 200)
            blob = add_blob(swarm.source, data)
            coordinator = await swarm.provider("coordinator")
            nothing = BlockStore(folder / "nothing")
            members = [
                await swarm.provider(f"empty{n}", BlockServer(nothing, run_blocking=run_inline)) for n in range(empty)
            ]
            members += [await swarm.provider(f"full{n}") for n in range(full)]
            fetcher = replace(swarm.fetcher, others=lambda: (*members, coordinator))
            started_at = trio.current_time()
            await fetcher.fetch_blobs([coordinator], [blob])
            assert read_blob(swarm.store, blob) == data
            return trio.current_time() - started_at

    alone = await seconds(tmp_path / "1", 0, 0)
    assert await seconds(tmp_path / "2", 6, 0) < 1.2 * alone
    assert await seconds(tmp_path / "3", 3, 1) < 0.7 * alone


class OnePercentServer(BlockServer):
    """Flips a bit in one block of a hundred."""

    def __init__(self, store: BlockStore) -> None:
        super().__init__(store, run_blocking=run_inline)
        self.rng = random.Random(8)

    async def handle(self, method: int, body: memoryview) -> Sequence[bytes | memoryview]:
        parts = [bytes(part) for part in await super().handle(method, body)]
        return [
            part[:-1] + bytes((part[-1] ^ 1,)) if len(part) > 4 and self.rng.random() < 0.01 else part for part in parts
        ]


BIG_BLOCK_BYTES = 32 * 1024
WIDE = replace(LINK, bandwidth_bytes_s=100 * BIG_BLOCK_BYTES)


async def fetch_beside_faulty_ones(folder: Path, blocks: int, faulty: bool) -> tuple[float, FetchTally]:
    """Seconds that two healthy providers take for one blob; beside them one that dies, a liar and a slow one."""
    async with open_swarm(folder) as swarm:
        data = random.Random(1).randbytes(blocks * BIG_BLOCK_BYTES)
        blob = add_blob(swarm.source, data, BIG_BLOCK_BYTES)
        providers = [await swarm.provider(name, link=WIDE) for name in ("healthy1", "healthy2")]
        if faulty:
            slow = replace(WIDE, bandwidth_bytes_s=WIDE.bandwidth_bytes_s / 50)
            victim = await swarm.provider("victim", link=WIDE)
            liar = await swarm.provider("liar", OnePercentServer(swarm.source), link=WIDE)
            providers = [victim, liar, await swarm.provider("slow", link=slow), *providers]
        started_at = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(swarm.fetcher.fetch_blobs, providers, [blob])
            if faulty:
                nursery.start_soon(kill_half_way, swarm, victim, blob.size)
        assert read_blob(swarm.store, blob) == data
        return trio.current_time() - started_at, swarm.tally


async def kill_half_way(swarm: Swarm, victim: PeerId, size: int) -> None:
    while swarm.tally.bytes_fetched < size / 2:  # noqa: ASYNC110
        await trio.sleep(0.05)
    swarm.network.kill(victim)


async def test_a_dying_a_lying_and_a_slow_provider_cost_at_most_a_fifth(autojump_clock, tmp_path):
    blocks = 640  # 20 MiB
    healthy_s, _ = await fetch_beside_faulty_ones(tmp_path / "1", blocks, faulty=False)
    faulty_s, tally = await fetch_beside_faulty_ones(tmp_path / "2", blocks, faulty=True)
    assert faulty_s < 1.2 * healthy_s
    assert tally.bytes_wasted < 0.05 * blocks * BIG_BLOCK_BYTES
