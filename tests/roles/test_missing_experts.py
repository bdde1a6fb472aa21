"""Experts brought from the swarm when they are needed: for whom, how long, and what happens when nobody has them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
import trio
from test_pulling import Pair, open_pair, tiny

from kvasir_node.base.errors import CapacityError
from kvasir_node.base.ids import Cid, ExpertId
from kvasir_node.model.checkpoint import open_checkpoint
from kvasir_node.model.missing import ExpertsMissing
from kvasir_node.model.tensor_file import read_tensor
from kvasir_node.roles.missing_experts import PATIENCE_S, MissingExperts
from kvasir_node.wire.tensors import ExpertRequest


class Lost:
    """A pair of machines, of which ours has nothing, and the experts that it lacks."""

    def __init__(self, pair: Pair, folder: Path) -> None:
        self.pair = pair
        self.indexed = tiny(folder / "tiny")
        self.original = open_checkpoint(folder / "tiny").experts
        pair.serve(self.indexed)
        self.machine = pair.machine()
        self.providers = [pair.other.peer_id]
        self.missing = MissingExperts(self.machine.fetcher, self.indexed.manifest, lambda: self.providers)

    @property
    def served(self) -> int:
        return self.pair.server.bytes_served

    def assert_read(self, layer: int, index: int) -> None:
        tensors = self.missing.read(ExpertId(layer, index))
        assert tensors is not None
        original = self.original[ExpertId(layer, index)]
        assert all(torch.equal(tensors[part], read_tensor(original[part])) for part in original)


@asynccontextmanager
async def open_lost(folder: Path, quota_bytes: int = 0) -> AsyncIterator[Lost]:
    async with open_pair(folder) as pair, trio.open_nursery() as nursery:
        pair.quota_bytes = quota_bytes
        lost = Lost(pair, folder)
        await nursery.start(lost.missing.run)
        yield lost
        nursery.cancel_scope.cancel()


async def test_they_come_once_however_many_need_them_and_stay_for_the_next_time(autojump_clock, tmp_path):
    async with open_lost(tmp_path) as lost:
        assert not lost.missing.has(ExpertId(1, 3))
        assert lost.missing.read(ExpertId(1, 3)) is None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lost.missing.bring, "ann", 1, {3, 1})
            nursery.start_soon(lost.missing.bring, "bob", 1, {3})
        served = lost.served
        for index in (1, 3):
            assert lost.missing.has(ExpertId(1, index))
            lost.assert_read(1, index)
        assert not lost.missing.has(ExpertId(1, 2))
        await lost.missing.bring("ann", 1, {1})
        assert lost.served == served
        blocks = sum(size for _, size in lost.machine.store.own())
        assert blocks < served * 1.1  # nothing was fetched twice


async def test_nobody_who_has_them_is_an_error_after_a_while_and_not_for_ever(autojump_clock, tmp_path):
    async with open_lost(tmp_path) as lost:
        lost.providers = []
        started = trio.current_time()
        with pytest.raises(CapacityError, match=r"experts 2 of layer 0 .* could not be fetched: .*start a worker"):
            await lost.missing.bring("ann", 0, {2})
        assert trio.current_time() - started == pytest.approx(PATIENCE_S, abs=2)
        lost.providers = [lost.pair.other.peer_id]
        await lost.missing.bring("ann", 0, {2})  # it may come back
        lost.assert_read(0, 2)


async def test_somebody_who_comes_within_that_while_is_asked(autojump_clock, tmp_path):
    async with open_lost(tmp_path) as lost, trio.open_nursery() as nursery:
        lost.providers = []
        nursery.start_soon(lost.missing.bring, "ann", 0, {2})
        await trio.sleep(PATIENCE_S / 2)
        lost.providers = [lost.pair.other.peer_id]
        await trio.sleep(2)
        lost.assert_read(0, 2)


async def test_law_7_what_somebody_waits_for_is_not_pushed_out_and_what_does_not_fit_is_an_error(
    autojump_clock, tmp_path
):
    async with open_lost(tmp_path, quota_bytes=6000) as lost:
        await lost.missing.bring("ann", 0, {0})
        await lost.missing.bring("ann", 0, {1})
        with pytest.raises(CapacityError, match=r"store\.quota_bytes"):
            await lost.missing.bring("ann", 1, {0, 1})
        assert lost.missing.has(ExpertId(0, 0))
        assert lost.missing.has(ExpertId(0, 1))
        lost.missing.let_go("ann")
        await lost.missing.bring("bob", 1, {0})
        lost.assert_read(1, 0)
        assert sum(size for _, size in lost.machine.store.own()) <= 6000


async def test_one_who_leaves_does_not_take_the_expert_from_another_who_waits(autojump_clock, tmp_path):
    async with open_lost(tmp_path) as lost, trio.open_nursery() as nursery:
        with trio.move_on_after(0.0001):
            await lost.missing.bring("ann", 0, {2})
        nursery.start_soon(lost.missing.bring, "bob", 0, {2})
        await trio.sleep(1)
        lost.assert_read(0, 2)


async def test_what_was_wanted_by_the_way_comes_without_anybody_waiting(autojump_clock, tmp_path):
    async with open_lost(tmp_path) as lost:
        lost.missing.want(1, {0})
        lost.missing.want(1, {0})
        await trio.sleep(1)
        lost.assert_read(1, 0)
        lost.providers = []
        lost.missing.want(0, {0})
        await trio.sleep(2 * PATIENCE_S)
        assert not lost.missing.has(ExpertId(0, 0))


async def test_a_check_in_a_thread_waits_for_what_it_lacks(tmp_path):
    with trio.fail_after(30):
        async with open_lost(tmp_path) as lost:
            calls = 0

            def compute(request: ExpertRequest) -> torch.Tensor:
                nonlocal calls
                calls += 1
                if not lost.missing.has(ExpertId(1, 2)):
                    raise ExpertsMissing(1, {2}, (0,))
                return request.rows

            none = torch.zeros(1, dtype=torch.int32)
            request = ExpertRequest(1, torch.ones(1, 8), none, none + 2, torch.ones(1))
            sums = await trio.to_thread.run_sync(lost.missing.patient(compute), request)
            assert torch.equal(sums, request.rows)
            assert calls == 2
            assert Cid(lost.indexed.model) not in {cid for cid, _ in lost.machine.store.own()}
