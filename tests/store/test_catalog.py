import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import cbor2
import pytest

from kvasir_node.base.content import BlockSource, FilePiece
from kvasir_node.base.errors import CapacityError, DataError, NotFoundError, UsageError
from kvasir_node.base.ids import DAG_CBOR_CODEC, Cid, ModelId, cid_of
from kvasir_node.store.blocks import BlockStore
from kvasir_node.store.catalog import Catalog, CatalogEntry


@dataclass(frozen=True)
class Content:
    model: ModelId
    name: str
    blocks: Mapping[Cid, BlockSource]


class FolderIndexer:
    """One block per file of a folder and a node that names them all; counts how often it was run."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, folder: Path, name: str | None, progress) -> Content:
        if not folder.is_dir():
            raise UsageError(f"no checkpoint folder at {folder}", param="model")
        self.runs += 1
        blocks: dict[Cid, BlockSource] = {}
        for file in sorted(folder.iterdir()):
            half = file.stat().st_size // 2
            pieces = (FilePiece(file, 0, half), FilePiece(file, half, file.stat().st_size - half))
            blocks[cid_of(b"head " + file.read_bytes())] = (b"head ", *pieces)
        name = name or folder.name
        node = (name + " " + " ".join(blocks)).encode()
        model = cid_of(node, DAG_CBOR_CODEC)
        return Content(ModelId(model), name, {**blocks, model: (node,)})


class World:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.data_dir = root / "data"
        self.indexer = FolderIndexer()
        self.demo = self.checkpoint("package/demo", b"demo weights")
        self.restart()

    def restart(self) -> None:
        self.store = BlockStore(self.data_dir)
        self.catalog = Catalog(self.data_dir, self.store, self.indexer, self.demo)

    def checkpoint(self, name: str, data: bytes) -> Path:
        folder = self.root / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "weights").write_bytes(data)
        return folder


@pytest.fixture
def world(tmp_path) -> World:
    return World(tmp_path)


def head(data: bytes) -> Cid:
    return cid_of(b"head " + data)


def test_an_added_model_is_known_by_name_id_and_path_and_is_readable(world):
    folder = world.checkpoint("alpha", b"alpha weights")
    entry = world.catalog.add(folder)
    assert entry == CatalogEntry(entry.model, "alpha", folder)
    assert world.catalog.list() == (entry,)
    assert world.catalog.find("alpha") == world.catalog.find(entry.model) == world.catalog.find(str(folder)) == entry
    assert world.store.get(head(b"alpha weights")) == b"head alpha weights"


def test_a_second_start_hashes_nothing(world):
    entry = world.catalog.add(world.checkpoint("alpha", b"alpha weights"))
    world.restart()
    assert world.store.get(head(b"alpha weights")) is None
    for ref in ("alpha", entry.model, str(entry.path)):
        assert world.catalog.open(ref) == entry
    assert world.store.get(head(b"alpha weights")) == b"head alpha weights"
    assert world.indexer.runs == 1


def test_a_checkpoint_that_changed_is_indexed_again_by_name_but_not_by_id(world):
    folder = world.checkpoint("alpha", b"alpha weights")
    old = world.catalog.add(folder)
    world.checkpoint("alpha", b"other weights")
    with pytest.raises(DataError, match="changed since it was indexed"):
        world.catalog.open(old.model)
    new = world.catalog.open("alpha")
    assert new.model != old.model
    assert world.catalog.list() == (new,)
    assert world.store.get(head(b"other weights")) is not None
    assert not world.store.has(head(b"alpha weights"))
    assert len(list((world.data_dir / "index").iterdir())) == 1


def test_the_same_size_with_another_time_is_a_change(world):
    folder = world.checkpoint("alpha", b"alpha weights")
    world.catalog.add(folder)
    os.utime(folder / "weights", ns=(1, 1))
    world.catalog.open("alpha")
    assert world.indexer.runs == 2


def test_a_checkpoint_that_is_gone_is_an_error_that_names_it(world):
    folder = world.checkpoint("alpha", b"alpha weights")
    entry = world.catalog.add(folder)
    (folder / "weights").unlink()
    folder.rmdir()
    with pytest.raises(DataError, match=str(folder)):
        world.catalog.open(entry.model)
    with pytest.raises(UsageError, match=str(folder)):
        world.catalog.open("alpha")


def test_names_are_unique(world):
    world.catalog.add(world.checkpoint("one/alpha", b"first"))
    other = world.checkpoint("two/alpha", b"second")
    with pytest.raises(UsageError, match="taken by the model at"):
        world.catalog.add(other)
    assert len(world.catalog.list()) == 1
    assert world.catalog.add(other, name="beta").name == "beta"
    with pytest.raises(UsageError, match="taken"):
        world.catalog.add(other, name="demo")


def test_an_unknown_ref_says_what_is_known(world):
    world.catalog.add(world.checkpoint("alpha", b"x"))
    with pytest.raises(NotFoundError, match="known: demo, alpha;"):
        world.catalog.open("gamma")
    with pytest.raises(NotFoundError):
        world.catalog.remove("gamma")


def test_a_path_that_is_new_is_added(world):
    folder = world.checkpoint("alpha", b"x")
    assert world.catalog.open(str(folder)).name == "alpha"
    with pytest.raises(UsageError, match="no checkpoint folder"):
        world.catalog.open(str(world.root / "nowhere"))


def test_the_embedded_model_needs_no_adding_and_follows_the_package(world):
    entry = world.catalog.open("demo")
    assert (entry.name, entry.path) == ("demo", world.demo)
    assert world.store.get(head(b"demo weights")) is not None
    world.restart()
    assert world.catalog.open("demo") == entry
    assert world.indexer.runs == 1
    world.demo = world.checkpoint("upgraded/demo", b"demo weights 2")
    world.restart()
    assert world.catalog.open("demo").path == world.demo
    assert [e.path for e in world.catalog.list()] == [world.demo]


def test_removing_a_model_keeps_the_blocks_it_shares_with_another(world):
    alpha, beta = world.checkpoint("alpha", b"alpha"), world.checkpoint("beta", b"beta")
    for folder in (alpha, beta):
        (folder / "tokenizer").write_bytes(b"same")
        world.catalog.add(folder)
    removed = world.catalog.remove("beta")
    assert removed.path == beta
    assert world.store.has(head(b"same"))
    assert world.store.has(head(b"alpha"))
    assert not world.store.has(head(b"beta"))
    assert (beta / "weights").exists()
    assert [entry.name for entry in world.catalog.list()] == ["alpha"]


def test_a_fetched_model_has_no_path_and_a_known_one_keeps_its(world):
    model = ModelId(cid_of(b"manifest", DAG_CBOR_CODEC))
    entry = world.catalog.note_fetched(model, "far")
    assert entry == CatalogEntry(model, "far", None)
    assert world.catalog.open("far") == entry
    alpha = world.catalog.add(world.checkpoint("alpha", b"x"))
    assert world.catalog.note_fetched(alpha.model, "alias") == alpha
    with pytest.raises(UsageError, match="taken"):
        world.catalog.note_fetched(ModelId(cid_of(b"another", DAG_CBOR_CODEC)), "far")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not cbor",
        cbor2.dumps({"v": 2, "kind": "catalog", "models": []}, canonical=True),
        cbor2.dumps({"v": 1, "kind": "index", "models": []}, canonical=True),
        cbor2.dumps({"v": 1, "kind": "catalog", "models": [["../x", "n", None]]}, canonical=True),
        cbor2.dumps({"v": 1, "kind": "catalog", "models": [1]}, canonical=True),
    ],
)
def test_a_damaged_catalog_says_what_to_do(world, data):
    (world.data_dir / "catalog.cbor").write_bytes(data)
    with pytest.raises(DataError, match=r"catalog\.cbor is damaged .* delete it and add the models again"):
        world.catalog.list()


def test_a_damaged_index_need_only_be_deleted(world):
    entry = world.catalog.add(world.checkpoint("alpha", b"alpha weights"))
    file = world.data_dir / "index" / f"{entry.model}.cbor"
    file.write_bytes(b"not cbor")
    world.restart()
    with pytest.raises(DataError, match=r"\.cbor is damaged .* delete it: the model is indexed again") as caught:
        world.catalog.open("alpha")
    assert "add PATH" not in str(caught.value)
    file.unlink()
    assert world.catalog.open("alpha") == entry


@pytest.mark.parametrize("name", ["", " "])
def test_a_model_needs_a_name(world, name):
    with pytest.raises(UsageError, match="name of a model") as caught:
        world.catalog.add(world.checkpoint("alpha", b"x"), name=name)
    assert caught.value.param == "name"
    assert world.catalog.list() == ()


def test_a_flipped_byte_of_an_index_is_an_error_or_harmless(world):
    entry = world.catalog.add(world.checkpoint("alpha", b"alpha weights"))
    file = world.data_dir / "index" / f"{entry.model}.cbor"
    good = file.read_bytes()
    for at in range(len(good)):
        file.write_bytes(good[:at] + bytes((good[at] ^ 0x21,)) + good[at + 1 :])
        world.restart()
        try:
            world.catalog.open(entry.model)
            data = world.store.get(head(b"alpha weights"))
        except DataError:
            continue
        assert data in (None, b"head alpha weights")


def test_a_full_disk_leaves_the_old_catalog(world):
    world.catalog.add(world.checkpoint("alpha", b"x"))
    before = world.catalog.list()
    folder = world.checkpoint("beta", b"y")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))
    try:
        with pytest.raises(CapacityError, match="free some disk space"):
            world.catalog.add(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert world.catalog.list() == before
    assert not list(world.data_dir.rglob("*.tmp"))
