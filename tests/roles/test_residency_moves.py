"""Heat decides which experts stay in memory: one at a time, room first, on a virtual clock."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
from fanout_fakes import EXPERTS, LAYERS, make_checkpoint, make_shard

from kvasir_node.base.errors import DataError
from kvasir_node.base.ids import ExpertId
from kvasir_node.roles.content import run_inline
from kvasir_node.roles.own_experts import OwnExperts
from kvasir_node.roles.residency import INTERVAL_S, Residency

WANTED = frozenset(ExpertId(layer, index) for layer in LAYERS for index in range(EXPERTS))


class Memory:
    """Real experts of which two of each layer are held, and a heat that the test sets."""

    def __init__(self, folder) -> None:
        checkpoint = make_checkpoint(folder)
        self.shard = make_shard(checkpoint, lambda index: index < 2)
        self.held = {layer: self.shard.held(layer) for layer in LAYERS}
        self.own = OwnExperts(self.shard, checkpoint, self.held, self.shard.expert_bytes, moves=True)
        self.heat = {layer: [0.0] * EXPERTS for layer in LAYERS}
        self.changed: list[tuple[frozenset[int], int]] = []  # layers, experts in memory by then
        self.residency = Residency(
            self.own,
            WANTED,
            self.held,
            self.shard.expert_bytes,
            heat=lambda: self.heat,
            changed=lambda layers: self.changed.append((layers, self.in_memory)),
            run_blocking=run_inline,
        )

    @property
    def in_memory(self) -> int:
        return sum(len(self.shard.held(layer)) for layer in LAYERS)


@asynccontextmanager
async def running(folder) -> AsyncIterator[Memory]:
    memory = Memory(folder)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(memory.residency.run)
        yield memory
        nursery.cancel_scope.cancel()


async def test_the_hottest_stay_and_memory_never_holds_more(autojump_clock, tmp_path):
    async with running(tmp_path) as memory:
        await trio.sleep(3 * INTERVAL_S)
        assert memory.changed == []
        memory.heat[1][5] = 20.0
        memory.heat[0][1] = 3.0
        memory.heat[0][6] = 6.0
        await trio.sleep(INTERVAL_S + 0.1)
        assert memory.residency.swaps == 2
        assert ExpertId(1, 5).index in memory.held[1]
        assert 6 in memory.held[0]
        assert 1 in memory.held[0]  # warm itself; the cold ones went
        assert memory.in_memory == sum(map(len, memory.held.values())) == 6
        assert [count for _, count in memory.changed] == [5, 6, 5, 6]
        assert {1} in [set(layers) for layers, _ in memory.changed]
        await trio.sleep(5 * INTERVAL_S)
        assert memory.residency.swaps == 2


async def test_one_that_cannot_be_read_is_not_tried_again_and_costs_no_room(autojump_clock, tmp_path, caplog):
    async with running(tmp_path) as memory:
        keep = memory.own.keep

        def damaged(expert: ExpertId) -> None:
            if expert == ExpertId(2, 7):
                raise DataError("its file is damaged")
            keep(expert)

        memory.own.keep = damaged  # type: ignore[method-assign]
        memory.heat[2][7] = 50.0
        await trio.sleep(4 * INTERVAL_S)
        assert memory.residency.swaps == 0
        assert memory.in_memory == 6
        assert len([record for record in caplog.records if "damaged" in record.message]) == 1
        memory.heat[2][6] = 50.0
        await trio.sleep(INTERVAL_S)
        assert 6 in memory.held[2]
