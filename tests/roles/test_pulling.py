"""A model by its id alone, on this disk: whole, resumed, mended, completed; and hostile ones refused."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import trio
from role_fakes import tiny_checkpoint
from test_content import SETTINGS

from kvasir_node.base.content import FilePiece
from kvasir_node.base.errors import CapacityError, DataError, Unreachable
from kvasir_node.base.ids import DAG_CBOR_CODEC, ModelId, cid_of
from kvasir_node.model.checkpoint import open_checkpoint
from kvasir_node.model.indexing import IndexedModel, index_checkpoint
from kvasir_node.model.manifest import encode_manifest
from kvasir_node.model.tensor_file import read_tensor
from kvasir_node.net.memory_net import open_memory_network
from kvasir_node.roles.content import BlockServer, Fetcher, open_block_calls, run_inline
from kvasir_node.roles.download import FetchTally
from kvasir_node.roles.pulling import PATIENCE_S, Puller, model_to_pull
from kvasir_node.store.blocks import BlockStore
from kvasir_node.store.catalog import Catalog
from kvasir_node.wire.messages import BLOCKS_PROTOCOL

BLOCK_BYTES = 500


class Machine:
    """A disk with a catalog, and the puller that fills it."""

    def __init__(self, fetcher: Fetcher, folder: Path, providers) -> None:
        self.folder = folder
        self.models = (folder / "models").absolute()
        self.fetcher = fetcher
        self.store = fetcher.store
        self.catalog = Catalog(folder, self.store, lambda *_: pytest.fail("nothing is to be indexed"))
        self.puller = Puller(fetcher, self.catalog, self.models, providers)

    async def pull(self, model: ModelId, hold: str = "all") -> Path:
        entry = await self.puller.pull(model, hold)
        assert entry.path is not None
        return entry.path

    def needs(self, model: ModelId, hold: str = "all") -> bool:
        return model_to_pull(self.store, self.catalog, self.models, model, hold) is not None


class Pair:
    """A member that has a model, and an empty machine (as often as it starts anew)."""

    def __init__(self, folder: Path, network) -> None:
        self.folder = folder
        self.own = network.transport("own")
        self.other = network.transport("other")
        self.source = BlockStore(folder / "source")
        self.server = BlockServer(self.source, run_blocking=run_inline)
        self.other.set_handler(BLOCKS_PROTOCOL, self.server.serve)
        self.quota_bytes = 0

    def serve(self, indexed: IndexedModel) -> ModelId:
        for cid, block in indexed.blocks.items():
            self.source.map(cid, block)
        return indexed.model

    def machine(self) -> Machine:
        store = BlockStore(self.folder / "own", quota_bytes=self.quota_bytes)
        fetcher = Fetcher(open_block_calls(self.own), store, SETTINGS, FetchTally(), run_inline)
        return Machine(fetcher, self.folder / "own", lambda: (self.other.peer_id,))


@asynccontextmanager
async def open_pair(folder: Path) -> AsyncIterator[Pair]:
    async with open_memory_network(seed=2) as network:
        pair = Pair(folder, network)
        await pair.own.connect(pair.other.addresses())
        yield pair


def tiny(folder: Path) -> IndexedModel:
    path = tiny_checkpoint(folder, experts=4)
    (path / "tokenizer.json").write_text(json.dumps({"a": "x" * 2000}))
    return index_checkpoint(open_checkpoint(path), block_bytes=BLOCK_BYTES)


def assert_same_weights(original: Path, fetched: Path, hold: str = "all") -> None:
    one, two = open_checkpoint(original), open_checkpoint(fetched)
    expected = {e for e in one.experts if hold == "all" or (hold == "half" and e.index % 2 == 0)}
    assert two.experts.keys() == expected
    for expert in expected:
        for part, tensor in two.experts[expert].items():
            assert torch.equal(read_tensor(tensor), read_tensor(one.experts[expert][part]))
    assert one.trunk.keys() == two.trunk.keys()
    for key, tensor in two.trunk.items():
        assert torch.equal(read_tensor(tensor), read_tensor(one.trunk[key]))
    for name in ("config.json", "tokenizer.json"):
        assert (fetched / name).read_bytes() == (original / name).read_bytes()


async def test_a_model_is_whole_and_served_on_from_where_it_lies(autojump_clock, tmp_path):
    async with open_pair(tmp_path) as pair:
        indexed = tiny(tmp_path / "tiny")
        model, machine = pair.serve(indexed), pair.machine()
        assert machine.needs(model)
        path = await machine.pull(model)
        assert_same_weights(tmp_path / "tiny", path)
        assert list(machine.store.own()) == []  # its blocks take their room once
        assert all(machine.store.get(cid) is not None for cid in indexed.blocks)
        again = pair.machine()
        assert not again.needs(model)
        assert again.catalog.open("tiny").path == path
        assert all(again.store.get(cid) is not None for cid in indexed.blocks)


@pytest.mark.parametrize("seed", range(4))
async def test_killed_at_any_moment_it_refetches_almost_nothing(autojump_clock, tmp_path, seed):
    rng = random.Random(seed)
    async with open_pair(tmp_path) as pair:
        model = pair.serve(tiny(tmp_path / "tiny"))
        fetched = 0
        while True:
            machine = pair.machine()
            with trio.move_on_after(rng.uniform(0.002, 0.02)) as scope:
                await machine.pull(model)
            fetched += machine.fetcher.tally.bytes_fetched
            if not scope.cancelled_caught:
                break
        pair.folder = tmp_path / "whole"
        fresh = pair.machine()
        await fresh.pull(model)
        assert fetched < 1.02 * fresh.fetcher.tally.bytes_fetched
        assert_same_weights(tmp_path / "tiny", tmp_path / "own" / "models" / model)


async def test_half_is_completed_and_all_serves_as_half(autojump_clock, tmp_path):
    async with open_pair(tmp_path) as pair:
        model, machine = pair.serve(tiny(tmp_path / "tiny")), pair.machine()
        path = await machine.pull(model, "none")
        assert_same_weights(tmp_path / "tiny", path, "none")
        none_bytes = machine.fetcher.tally.bytes_fetched
        assert machine.needs(model, "half")
        assert not machine.needs(model, "none")
        await machine.pull(model, "half")
        assert_same_weights(tmp_path / "tiny", path, "half")
        half_bytes = machine.fetcher.tally.bytes_fetched
        await machine.pull(model, "all")
        assert_same_weights(tmp_path / "tiny", path)
        all_bytes = machine.fetcher.tally.bytes_fetched
        assert all_bytes - half_bytes == pytest.approx(half_bytes - none_bytes, rel=0.01)
        assert not machine.needs(model, "half")
        assert len(list(path.glob("experts-*"))) == 2


async def test_what_is_damaged_on_the_disk_is_found_and_only_that_is_fetched(autojump_clock, tmp_path):
    async with open_pair(tmp_path) as pair:
        model, machine = pair.serve(tiny(tmp_path / "tiny")), pair.machine()
        path = await machine.pull(model)
        for name in ("trunk.safetensors", "experts-00001-all.safetensors"):
            data = bytearray((path / name).read_bytes())
            data[-100] ^= 1
            (path / name).write_bytes(data)
        (path / "tokenizer.json").unlink()
        again = pair.machine()
        assert again.needs(model)
        await again.pull(model)
        assert_same_weights(tmp_path / "tiny", path)
        assert 2 * 100 < again.fetcher.tally.bytes_fetched < 2000 + 3 * BLOCK_BYTES + 100


async def test_nobody_has_it(autojump_clock, tmp_path):
    async with open_pair(tmp_path) as pair:
        model = tiny(tmp_path / "tiny").model
        started_at = trio.current_time()
        with pytest.raises(Unreachable, match="--join TICKET"):
            await pair.machine().pull(model)
        assert PATIENCE_S <= trio.current_time() - started_at < PATIENCE_S + 10
        assert not (tmp_path / "own" / "models").exists()


async def test_a_member_that_comes_late_is_asked(autojump_clock, tmp_path):
    async with open_pair(tmp_path) as pair:
        indexed = tiny(tmp_path / "tiny")
        machine = pair.machine()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(machine.pull, indexed.model)
            await trio.sleep(PATIENCE_S - 10)
            pair.serve(indexed)
        assert not machine.needs(indexed.model)


async def test_a_quota_that_holds_one_file_is_enough_and_a_smaller_one_says_so(autojump_clock, tmp_path):
    async with open_pair(tmp_path) as pair:
        indexed = tiny(tmp_path / "tiny")
        model = pair.serve(indexed)
        pair.quota_bytes = 14_000  # a layer's four experts have 6,600 bytes; all lists of blocks are kept beside them
        machine = pair.machine()
        await machine.pull(model)
        assert_same_weights(tmp_path / "tiny", machine.models / model)
        pair.folder, pair.quota_bytes = tmp_path / "small", 3000
        with pytest.raises(CapacityError, match="quota_bytes"):
            await pair.machine().pull(model)


def altered(indexed: IndexedModel, **fields: object) -> IndexedModel:
    """The same model with another manifest, as a liar may write it."""
    manifest = replace(indexed.manifest, **fields)
    data = encode_manifest(manifest)
    return IndexedModel(manifest, {**indexed.blocks, cid_of(data, DAG_CBOR_CODEC): (data,)})


async def test_what_does_not_fit_together_is_refused(autojump_clock, tmp_path):
    async with open_pair(tmp_path) as pair:
        indexed = tiny(tmp_path / "tiny")
        manifest = indexed.manifest
        for fields, words in (
            ({"family": "olmoe"}, "says family"),
            ({"chosen_per_row": 1}, "says experts chosen"),
            ({"trunk": manifest.config}, "header"),
            ({"config": manifest.files["tokenizer.json"]}, "model family"),
            ({"trunk": replace(manifest.trunk, size=manifest.trunk.size + 1)}, "promised"),
            ({"layer_nodes": {0: manifest.layer_nodes[0]}}, "says layers"),
        ):
            model = pair.serve(altered(indexed, **fields))
            machine = pair.machine()
            with pytest.raises(DataError, match=words):
                await machine.pull(model)
            assert machine.catalog.list() == ()
            assert not (machine.models / model).exists()


async def test_a_file_name_that_nothing_reads_is_left_out(autojump_clock, tmp_path):
    async with open_pair(tmp_path) as pair:
        indexed = tiny(tmp_path / "tiny")
        evil = {
            **indexed.manifest.files,
            "model.safetensors": indexed.manifest.config,
            "kvasir.json": indexed.manifest.config,
        }
        model, machine = pair.serve(altered(indexed, files=evil)), pair.machine()
        path = await machine.pull(model)
        assert not (path / "model.safetensors").exists()
        assert_same_weights(tmp_path / "tiny", path)


async def test_blocks_of_different_sizes_are_refused(autojump_clock, tmp_path):
    async with open_pair(tmp_path) as pair:
        path = tiny_checkpoint(tmp_path / "tiny")
        one = index_checkpoint(open_checkpoint(path), block_bytes=500)
        two = index_checkpoint(open_checkpoint(path), block_bytes=400)
        mixed = altered(IndexedModel(one.manifest, {**one.blocks, **two.blocks}), trunk=two.manifest.trunk)
        with pytest.raises(DataError, match="differ in size"):
            await pair.machine().pull(pair.serve(mixed))


async def test_a_name_that_is_taken_gets_a_part_of_the_id(autojump_clock, tmp_path):
    async with open_pair(tmp_path) as pair:
        machine = pair.machine()
        first = pair.serve(tiny(tmp_path / "tiny"))
        shutil.move(tmp_path / "tiny", tmp_path / "moved")
        for cid in list(pair.source._mapped):
            source = pair.source._mapped[cid]
            pair.source.map(cid, tuple(
                FilePiece(tmp_path / "moved" / p.file.name, p.offset, p.nbytes) if isinstance(p, FilePiece) else p
                for p in source))  # fmt: skip
        await machine.pull(first)
        tiny_checkpoint(tmp_path / "tiny")
        second = pair.serve(index_checkpoint(open_checkpoint(tmp_path / "tiny"), block_bytes=BLOCK_BYTES))
        assert second != first
        await machine.pull(second)
        assert {entry.name for entry in machine.catalog.list()} == {"tiny", f"tiny-{second[-8:]}"}
