"""What `fanout.private_layers` promises: no row of the first layers leaves, whatever the load and whoever is there."""

from __future__ import annotations

import pytest
import trio
from swarm import load, open_swarm, until

from kvasir_node.base.ids import parse_slice

PRIVATE = 2
BUSY = {"fanout__when": "forced", "coordinator__slots": "2", "fanout__private_layers": str(PRIVATE)}


@pytest.mark.parametrize("hold", ["all", "none"])
async def test_workers_get_and_compute_only_what_is_not_private(tmp_path, hold):
    async with open_swarm(tmp_path, **BUSY, coordinator__hold=hold) as swarm:
        worker = await swarm.add("worker")
        shipped: set[int] = set()
        async with load(swarm.main):
            await until(worker, lambda s: s.worker is not None and s.worker.rows > 200, "rows computed", 60)
            for _ in range(20):
                routes = swarm.main.coordinator.steering.routes
                shipped |= {layer for layer, peers in routes.items() if any(peers)}
                await trio.sleep(0.05)
        assert shipped
        assert min(shipped) >= PRIVATE
        held = worker.snapshot().worker.slices
        assert held
        assert all(parse_slice(part).layer >= PRIVATE for part in held)
        assert all(parse_slice(row.slice).layer >= PRIVATE for row in swarm.main.snapshot().hub.demand)


async def test_where_all_layers_are_private_nobody_is_asked_for(tmp_path):
    async with open_swarm(tmp_path, **{**BUSY, "fanout__private_layers": "1000"}) as swarm:
        await swarm.add("worker")
        async with load(swarm.main):
            await trio.sleep(3)
        snapshot = swarm.main.snapshot()
        assert snapshot.hub.demand == ()
        assert (snapshot.fanout.remote_pairs, snapshot.fanout.trial_pairs) == (0, 0)
