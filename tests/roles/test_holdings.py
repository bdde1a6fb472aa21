"""Experts in a worker's memory: room, sharing, and what is left after failures."""

from __future__ import annotations

import pytest
import torch
import trio
from role_fakes import EXPERT_BYTES, HIDDEN, SLICES, request_for, tiny_checkpoint

from kvasir_node.base.errors import CapacityError, DataError, UsageError
from kvasir_node.base.ids import ExpertId, SliceId
from kvasir_node.model.checkpoint import open_checkpoint
from kvasir_node.model.experts import load_from_checkpoint
from kvasir_node.model.indexing import index_checkpoint
from kvasir_node.model.manifest import decode_layer_node
from kvasir_node.roles.content import read_block, run_inline
from kvasir_node.roles.holdings import Holdings
from kvasir_node.roles.link import compute_here
from kvasir_node.store.blocks import BlockStore


class Model:
    def __init__(self, folder, memory_bytes: int = 1 << 20) -> None:
        self.checkpoint = open_checkpoint(tiny_checkpoint(folder / "tiny"))
        indexed = index_checkpoint(self.checkpoint, block_bytes=500)
        self.id, self.manifest = indexed.model, indexed.manifest
        self.store = BlockStore(folder / "store")
        for cid, block in indexed.blocks.items():
            self.store.map(cid, block)
        self.holdings = Holdings(memory_bytes, torch.device("cpu"), self.store, run_inline)

    def experts(self, part: SliceId):
        node = decode_layer_node(
            read_block(self.store, self.manifest.layer_nodes[part.layer]), self.manifest, part.layer
        )
        return {expert: node.experts[expert.index] for expert in part.experts()}

    async def load(self, lease: str, part: SliceId, dtype: str = "float32") -> None:
        await self.holdings.load(lease, self.id, dtype, self.manifest, self.experts(part))


async def test_what_is_loaded_computes_what_the_checkpoint_says(autojump_clock, tmp_path):
    model = Model(tmp_path)
    reference = load_from_checkpoint(model.checkpoint, model.checkpoint.experts, torch.float32)
    for number, part in enumerate(SLICES):
        await model.load(f"lease {number}", part)
        request = request_for(part)
        assert torch.equal(
            compute_here(model.holdings.shard(model.id, "float32"), request), compute_here(reference, request)
        )
    assert model.holdings.reserved_bytes == model.holdings.shard(model.id, "float32").nbytes == 16 * EXPERT_BYTES
    assert model.holdings.leases() == {f"lease {n}" for n in range(8)}
    assert model.holdings.bytes_of(model.id, "float32", 3) == 3 * EXPERT_BYTES


async def test_experts_that_two_leases_need_count_once_and_stay_until_the_last_goes(autojump_clock, tmp_path):
    model = Model(tmp_path, memory_bytes=3 * EXPERT_BYTES)
    await model.load("a", SliceId(0, 0, 1))
    await model.load("b", SliceId(0, 1, 2))
    shard = model.holdings.shard(model.id, "float32")
    assert model.holdings.reserved_bytes == 3 * EXPERT_BYTES
    model.holdings.drop("a", model.id, "float32")
    model.holdings.drop("a", model.id, "float32")
    assert shard.held(0) == {1, 2}
    model.holdings.drop("b", model.id, "float32")
    assert shard.held(0) == set()
    assert model.holdings.reserved_bytes == 0
    assert model.holdings.bytes_of(model.id, "float32", 1) is None


async def test_law_7_room_is_reserved_before_anything_is_read(autojump_clock, tmp_path):
    model = Model(tmp_path, memory_bytes=3 * EXPERT_BYTES)
    ended: list[str] = []

    async def load(lease: str, part: SliceId) -> None:
        try:
            await model.load(lease, part)
            ended.append("loaded")
        except CapacityError as error:
            ended.append(str(error))

    async with trio.open_nursery() as nursery:
        for number in range(4):
            nursery.start_soon(load, f"lease {number}", SLICES[number])
    assert ended.count("loaded") == 1
    assert sum("worker.memory_bytes" in words for words in ended) == 3
    assert model.holdings.shard(model.id, "float32").nbytes == 2 * EXPERT_BYTES


async def test_a_refused_load_of_a_new_model_leaves_nothing(autojump_clock, tmp_path):
    model = Model(tmp_path, memory_bytes=EXPERT_BYTES)
    with pytest.raises(CapacityError):
        await model.load("a", SLICES[0])
    assert model.holdings.leases() == frozenset()
    assert model.holdings.bytes_of(model.id, "float32", 1) is None
    model.holdings.drop("a", model.id, "float32")


async def test_a_load_that_is_cancelled_leaves_nothing_once_it_is_dropped(autojump_clock, tmp_path):
    model = Model(tmp_path)
    await model.load("b", SLICES[1])
    with trio.CancelScope() as scope:
        seen = 0

        async def cancel_at_the_second(function, *args: object):
            nonlocal seen
            seen += 1
            if seen == 2:
                scope.cancel()
            return await run_inline(function, *args)

        model.holdings._run_blocking = cancel_at_the_second
        await model.load("a", SLICES[0])
    assert scope.cancelled_caught
    model.holdings.drop("a", model.id, "float32")
    assert model.holdings.shard(model.id, "float32").held(0) == {2, 3}


async def test_law_6_a_block_that_is_missing_or_damaged_is_not_loaded(autojump_clock, tmp_path):
    model = Model(tmp_path)
    experts = model.experts(SLICES[0])
    blob = experts[ExpertId(0, 1)]
    swapped = {ExpertId(0, 0): experts[ExpertId(0, 1)], ExpertId(0, 1): model.manifest.config}
    with pytest.raises(DataError):
        await model.holdings.load("x", model.id, "float32", model.manifest, swapped)
    model.holdings.drop("x", model.id, "float32")
    model.store.unmap(blob.cid)
    with pytest.raises(DataError, match="not in the store"):
        await model.load("a", SLICES[0])
    model.holdings.drop("a", model.id, "float32")
    assert model.holdings.reserved_bytes == 0


async def test_experts_whose_values_are_not_finite_here_are_refused_by_the_self_test(autojump_clock, tmp_path):
    model = Model(tmp_path)

    async def overflow(function, *args: object):
        result = await run_inline(function, *args)
        if function == model.holdings._read_in:
            shard, expert = args[0], args[1]
            huge = torch.full((HIDDEN, 16), 1e30)
            shard.add(expert, {"gate": huge.T, "up": huge.T, "down": huge})
        return result

    model.holdings._run_blocking = overflow
    with pytest.raises(DataError, match="not finite"):
        await model.load("a", SLICES[0])


async def test_law_8_two_coordinators_that_compute_in_different_dtypes_are_both_served_in_theirs(
    autojump_clock, tmp_path
):
    model = Model(tmp_path, memory_bytes=3 * EXPERT_BYTES)
    await model.load("a", SLICES[0])
    await model.load("b", SLICES[0], "bfloat16")
    exact, rounded = (model.holdings.shard(model.id, dtype) for dtype in ("float32", "bfloat16"))
    assert (exact.dtype, rounded.dtype) == (torch.float32, torch.bfloat16)
    assert model.holdings.reserved_bytes == exact.nbytes + rounded.nbytes == 3 * EXPERT_BYTES
    assert model.holdings.bytes_of(model.id, "bfloat16", 2) == EXPERT_BYTES
    with pytest.raises(CapacityError):
        await model.load("c", SLICES[1], "bfloat16")
    model.holdings.drop("a", model.id, "float32")
    assert model.holdings.bytes_of(model.id, "float32", 1) is None
    assert rounded.held(0) == {0, 1}


async def test_int8_experts_that_this_machine_cannot_compute_are_refused_before_any_room_is_taken(
    autojump_clock, tmp_path
):
    model = Model(tmp_path)
    with pytest.raises(UsageError, match="int8 experts"):
        await model.load("a", SLICES[0], "int8")  # too narrow for the kernel
    assert (model.holdings.reserved_bytes, model.holdings.leases()) == (0, frozenset())
