import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvasir_node.base.content import FilePiece
from kvasir_node.base.errors import CapacityError, DataError
from kvasir_node.base.ids import Cid, cid_of
from kvasir_node.store.blocks import BlockStore

DATA = b"some bytes of a block"
CID = cid_of(DATA)


@pytest.fixture
def store(tmp_path) -> BlockStore:
    return BlockStore(tmp_path)


def files_in(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def test_a_block_comes_back_also_from_another_store_on_the_same_folder(store, tmp_path):
    assert store.get(CID) is None
    assert not store.has(CID)
    store.put(CID, memoryview(DATA))
    for reader in (store, BlockStore(tmp_path)):
        assert reader.get(CID) == DATA
        assert reader.size(CID) == len(DATA)
    assert [path.name for path in files_in(tmp_path)] == [CID]


def test_wrong_bytes_are_never_stored(store, tmp_path):
    with pytest.raises(DataError, match="another sha2-256"):
        store.put(CID, b"other bytes")
    assert files_in(tmp_path) == []


def test_a_damaged_copy_counts_as_absent_and_can_be_stored_again(store, tmp_path):
    store.put(CID, DATA)
    (file,) = files_in(tmp_path)
    file.write_bytes(b"X" + DATA[1:])
    assert store.get(CID) is None
    assert not store.has(CID)
    store.put(CID, DATA)
    assert store.get(CID) == DATA


def test_delete_forgets_the_file_and_the_mapping(store, tmp_path):
    store.put(CID, DATA)
    store.map(CID, (DATA,))
    store.delete(CID)
    assert not store.has(CID)
    assert store.get(CID) is None


@pytest.mark.parametrize("name", ["../../etc/passwd", "", "b" * 59, "x", CID.upper(), CID[:-1] + "/"])
def test_a_name_that_is_not_a_cid_never_becomes_a_path(store, name):
    for act in (store.get, store.has, store.delete):
        with pytest.raises(DataError):
            act(Cid(name))


def test_mapped_blocks_are_read_from_where_they_lie(store, tmp_path):
    file = tmp_path / "shard"
    file.write_bytes(b"....head of the tensor....")
    data = b"inline:head of tensor"
    source = (b"inline:", FilePiece(file, 4, 8), FilePiece(file, 16, 6))
    assert cid_of(data) == cid_of(b"inline:" + b"head of " + b"tensor")
    store.map(cid_of(data), source)
    assert store.size(cid_of(data)) == len(data)
    assert store.get(cid_of(data)) == data
    store.unmap(cid_of(data))
    assert store.get(cid_of(data)) is None


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda file: file.write_bytes(b"TTTTTTTT"), "no longer matches"),
        (lambda file: file.write_bytes(b"tens"), "ends before byte 8"),
        (lambda file: file.unlink(), "cannot read"),
    ],
)
def test_a_checkpoint_that_changed_is_an_error_that_names_the_file(store, tmp_path, spoil, says):
    file = tmp_path / "shard"
    file.write_bytes(b"tensors!")
    cid = cid_of(b"tensors!")
    store.map(cid, (FilePiece(file, 0, 8),))
    spoil(file)
    with pytest.raises(DataError, match=says) as caught:
        store.get(cid)
    assert "shard" in str(caught.value)
    assert "add the model again" in str(caught.value)


def test_an_own_copy_is_preferred_to_a_mapping_that_changed(store, tmp_path):
    file = tmp_path / "shard"
    file.write_bytes(DATA)
    store.map(CID, (FilePiece(file, 0, len(DATA)),))
    store.put(CID, DATA)
    file.write_bytes(b"")
    assert store.get(CID) == DATA


def test_a_full_disk_is_a_capacity_error_and_leaves_nothing(store, tmp_path):
    data = bytes(100_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(CapacityError, match="free some disk space"):
            store.put(cid_of(data), data)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert files_in(tmp_path) == []
    store.put(cid_of(data), data)
    assert store.get(cid_of(data)) == data


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one MiB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no file system may be mounted here: {mounted.stderr.decode().strip()[:80]}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_disk_without_space_keeps_what_is_whole_and_takes_more_once_there_is_room(small_disk):
    store = BlockStore(small_disk)
    blocks = [n.to_bytes(4, "big") * 25_000 for n in range(11)]  # 100,000 bytes each
    stored = []

    def fill() -> None:
        for data in blocks:
            store.put(cid_of(data), data)
            stored.append(data)

    with pytest.raises(CapacityError, match="No space left on device; free some disk space"):
        fill()
    assert 8 <= len(stored) < 11
    assert sorted(cid for cid, _ in store.own()) == sorted(map(cid_of, stored))
    assert all(store.get(cid_of(data)) == data for data in stored)
    assert sum(path.is_file() for path in small_disk.rglob("*")) == len(stored)
    store.delete(cid_of(stored[0]))
    store.put(cid_of(blocks[-1]), blocks[-1])
    assert store.get(cid_of(blocks[-1])) == blocks[-1]


WRITER = """
import sys
from pathlib import Path
from kvasir_node.base.ids import cid_of
from kvasir_node.store.blocks import BlockStore
store = BlockStore(Path(sys.argv[1]))
for n in range(1_000_000):
    data = n.to_bytes(4, "big") * 16384
    store.put(cid_of(data), data)
    if n == 20:
        print("writing", flush=True)
"""


def test_kill_9_while_writing_leaves_whole_blocks_and_no_temporary_files(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout as output:
        assert output.readline() == b"writing\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
    store = BlockStore(tmp_path)
    assert files_in(tmp_path / "tmp") == []
    stored = files_in(tmp_path / "blocks")
    assert len(stored) > 20
    for path in stored:
        data = store.get(Cid(path.name))
        assert data is not None
        assert cid_of(data) == path.name


def test_a_new_store_clears_dead_temporary_files_and_leaves_those_being_written(store, tmp_path):
    dead = tmp_path / "tmp" / "123-1-1"
    dead.write_bytes(b"half a block")
    with store._temporary_file() as (_, living):
        BlockStore(tmp_path)
        assert not dead.exists()
        assert living.exists()
    assert not living.exists()


def test_many_threads_may_put_and_get_the_same_blocks(store, tmp_path):
    blocks = [os.urandom(5000) for _ in range(20)]
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for data in blocks:
                store.put(cid_of(data), data)
                assert store.get(cid_of(data)) == data
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(files_in(tmp_path)) == 20
