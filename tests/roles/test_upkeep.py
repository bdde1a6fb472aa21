"""What is on the disk is found, compared with its address, and given up, without touching what is somebody else's."""

from __future__ import annotations

import pytest
from role_fakes import tiny_checkpoint
from test_pulling import assert_same_weights, open_pair, tiny

from kvasir_node.base.errors import NotFoundError
from kvasir_node.base.ids import SliceId, cid_of
from kvasir_node.model.checkpoint import open_checkpoint
from kvasir_node.model.indexing import index_checkpoint
from kvasir_node.roles.upkeep import content_of, remove, stored_models, verify
from kvasir_node.store.blocks import BlockStore
from kvasir_node.store.catalog import Catalog
from kvasir_node.wire.blobs import is_node


def own_library(folder):
    store = BlockStore(folder)
    return store, Catalog(folder, store, lambda path, name, _: index_checkpoint(open_checkpoint(path), name=name))


async def test_damaged_blocks_are_deleted_and_listed(autojump_clock, tmp_path):
    async with open_pair(tmp_path) as pair:
        model, machine = pair.serve(tiny(tmp_path / "tiny")), pair.machine()
        await machine.fetcher.fetch_slice([pair.other.peer_id], model, SliceId(1, 0, 1))
        (slice_of,) = stored_models(machine.store, machine.catalog)
        assert (slice_of.model, slice_of.name, slice_of.path) == (model, "tiny", None)
        assert slice_of.nbytes == sum(size for _, size in machine.store.own())
        # An expert's block: without the manifest it could not be said whose the rest is.
        victim = next(cid for cid, _ in machine.store.own() if not is_node(cid))
        path = machine.store._path(victim)
        path.write_bytes(b"X" + path.read_bytes()[1:])
        found = verify(machine.store, machine.catalog, machine.models)
        assert found.dropped == (victim,)
        assert not found.is_right
        assert not machine.store.has(victim)
        assert verify(machine.store, machine.catalog, machine.models, model).is_right


async def test_a_damaged_folder_is_named_and_mended_by_pulling_again(autojump_clock, tmp_path):
    async with open_pair(tmp_path) as pair:
        model, machine = pair.serve(tiny(tmp_path / "tiny")), pair.machine()
        path = await machine.pull(model)
        assert verify(machine.store, machine.catalog, machine.models).is_right
        layer = path / "experts-00000-all.safetensors"
        data = bytearray(layer.read_bytes())
        data[-1] ^= 1
        layer.write_bytes(data)
        found = verify(machine.store, machine.catalog, machine.models, "tiny")
        assert found.damaged == ((layer, 1),)
        assert found.to_fetch == (model,)
        before = machine.fetcher.tally.bytes_fetched
        await machine.puller.pull_ref("tiny", "all")
        assert machine.fetcher.tally.bytes_fetched - before <= 500
        assert verify(machine.store, machine.catalog, machine.models).is_right
        assert_same_weights(tmp_path / "tiny", path)


def test_a_checkpoint_that_was_edited_is_the_users_to_mend(tmp_path):
    store, catalog = own_library(tmp_path / "own")
    entry = catalog.add(tiny_checkpoint(tmp_path / "tiny"))
    assert verify(store, catalog, tmp_path / "own" / "models").is_right
    weights = tmp_path / "tiny" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    found = verify(store, catalog, tmp_path / "own" / "models", entry.name)
    assert found.to_add == (entry,)
    assert found.to_fetch == ()
    assert [path for path, _ in found.damaged] == [weights]
    assert remove(store, catalog, tmp_path / "own" / "models", "tiny") == 0
    assert weights.exists()


async def test_removing_a_model_frees_all_that_no_other_needs(autojump_clock, tmp_path):
    async with open_pair(tmp_path) as pair:
        model, machine = pair.serve(tiny(tmp_path / "tiny")), pair.machine()
        path = await machine.pull(model)
        freed = remove(machine.store, machine.catalog, machine.models, "tiny")
        assert freed > 10_000
        assert not path.exists()
        assert list(machine.store.own()) == []
        assert machine.catalog.list() == ()
        assert not machine.store.has(cid_of((tmp_path / "tiny" / "config.json").read_bytes()))


async def test_blocks_that_two_models_share_stay(autojump_clock, tmp_path):
    async with open_pair(tmp_path) as pair:
        indexed, machine = tiny(tmp_path / "tiny"), pair.machine()
        one = pair.serve(indexed)
        renamed = index_checkpoint(open_checkpoint(tmp_path / "tiny"), name="twin", block_bytes=500)
        two = pair.serve(renamed)
        assert one != two
        for model in (one, two):
            await machine.fetcher.fetch_slice([pair.other.peer_id], model, SliceId(1, 0, 1))
        blocks = len(list(machine.store.own()))
        remove(machine.store, machine.catalog, machine.models, two)
        assert len(list(machine.store.own())) == blocks - 1  # its manifest is all that it had alone
        assert verify(machine.store, machine.catalog, machine.models, one).is_right
        assert content_of(machine.store, one) <= set(indexed.blocks)
        remove(machine.store, machine.catalog, machine.models, one)
        assert list(machine.store.own()) == []


def test_what_is_not_here_is_said(tmp_path):
    store, catalog = own_library(tmp_path)
    for ref in ("nothing", cid_of(b"unknown"), "../..", ""):
        for act in (verify, remove):
            with pytest.raises(NotFoundError, match="kvasir-node ls"):
                act(store, catalog, tmp_path / "models", ref)
