"""A worker whose line is cut, or whose machine slept, keeps what it holds and is back by itself."""

from __future__ import annotations

import pytest
import trio
from role_fakes import SLICES, open_world, with_slices

from kvasir_node.decide.placement import HubsKnown, Stage


@pytest.mark.parametrize("outage_s", [3.0, 30.0])
async def test_law_8_an_outage_of_its_line_costs_a_worker_no_slice_and_no_fetch(autojump_clock, tmp_path, outage_s):
    async with open_world(tmp_path) as world:
        carl, hub = world.coordinator, world.hub_transport
        carl.wants = with_slices()
        world.nursery.start_soon(world.keep_reporting)
        ann = await world.add_worker()
        await world.until(lambda: ann.stages().count(Stage.SERVING) == len(SLICES))
        fetched, held = ann.worker.snapshot().bytes_fetched, ann.worker._holdings.leases()
        for peer in (carl.transport.peer_id, hub.peer_id):
            world.network.partition(peer, ann.peer_id)
        await trio.sleep(outage_s)
        for peer in (carl.transport.peer_id, hub.peer_id):
            world.network.heal(peer, ann.peer_id)
        await ann.transport.connect(hub.addresses())
        ann.worker.tell(HubsKnown((hub.peer_id,)))
        healed_at = trio.current_time()
        await world.until(lambda: len(carl.proven) == len(SLICES))
        assert trio.current_time() - healed_at < 13.0  # it tries again after 8 s and a quarter of that at most
        await world.until(lambda: ann.stages() == [Stage.SERVING] * len(SLICES))
        assert ann.worker._holdings.leases() == held
        assert ann.worker.snapshot().bytes_fetched == fetched
        await trio.sleep(20)
        assert world.hub.snapshot().leases == len(SLICES)  # the hub took them up again, whatever it had ended
