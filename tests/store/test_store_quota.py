"""Room for fetched blocks: the longest unused goes first, what is in use never does, and the count stays true."""

import os
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_node.base.errors import CapacityError
from kvasir_node.base.ids import Cid, cid_of
from kvasir_node.store.blocks import BlockStore

SIZE = 100


def block(number: int, size: int = SIZE) -> bytes:
    return number.to_bytes(4, "little") * (size // 4)


def put(store: BlockStore, number: int, used_at: int | None = None) -> Cid:
    data = block(number)
    store.put(cid_of(data), data)
    if used_at is not None:
        use(store, cid_of(data), used_at)
    return cid_of(data)


def use(store: BlockStore, cid: Cid, at: int) -> None:
    os.utime(store._path(cid), ns=(at, at))


def own_bytes(store: BlockStore) -> int:
    return sum(size for _, size in store.own())


def test_the_longest_unused_goes_first(tmp_path):
    store = BlockStore(tmp_path, quota_bytes=10 * SIZE)
    cids = [put(store, n, used_at=1000 + n) for n in range(10)]
    use(store, cids[0], 5000)
    put(store, 10)
    assert store.has(cids[0])
    assert not store.has(cids[1])
    assert own_bytes(store) <= 10 * SIZE


def test_reading_a_block_counts_as_use(tmp_path):
    store = BlockStore(tmp_path, quota_bytes=4 * SIZE)
    cids = [put(store, n, used_at=1000 + n) for n in range(4)]
    assert store.get(cids[0]) is not None
    put(store, 4)
    assert store.has(cids[0])
    assert not store.has(cids[1])


def test_what_is_pinned_is_never_evicted_and_a_full_store_says_what_to_do(tmp_path):
    store = BlockStore(tmp_path, quota_bytes=4 * SIZE)
    cids = [put(store, n, used_at=1000 + n) for n in range(4)]
    store.pin("lease", cids[:2])
    store.pin("lease", cids[2:3])
    put(store, 4)
    assert [store.has(cid) for cid in cids] == [True, True, True, False]
    store.pin("other", [cid_of(block(4))])
    with pytest.raises(CapacityError, match="quota_bytes"):
        put(store, 5)
    store.unpin("lease")
    put(store, 5)
    assert store.has(cid_of(block(4)))
    assert not store.has(cids[0])


def test_mapped_blocks_take_no_room(tmp_path):
    store = BlockStore(tmp_path, quota_bytes=SIZE)
    for number in range(5):
        store.map(cid_of(block(number)), (block(number),))
    put(store, 9)
    assert all(store.has(cid_of(block(number))) for number in range(5))


def test_a_second_start_counts_what_is_there(tmp_path):
    store = BlockStore(tmp_path, quota_bytes=4 * SIZE)
    for number in range(4):
        put(store, number, used_at=1000 + number)
    (tmp_path / "blocks" / "stray").write_bytes(b"x" * 1000)
    again = BlockStore(tmp_path, quota_bytes=4 * SIZE)
    put(again, 7)
    assert own_bytes(again) <= 4 * SIZE
    assert again.has(cid_of(block(7)))


def test_dropping_own_copies_makes_room(tmp_path):
    store = BlockStore(tmp_path, quota_bytes=2 * SIZE)
    cids = [put(store, n) for n in range(2)]
    store.pin("all", cids)
    store.map(cids[0], (block(0),))
    store.drop_own(cids[0])
    put(store, 2)
    assert store.get(cids[0]) == block(0)


def test_a_failed_write_gives_its_room_back(tmp_path):
    store = BlockStore(tmp_path, quota_bytes=2 * SIZE)
    put(store, 0)
    (tmp_path / "tmp").rmdir()
    for _ in range(3):
        with pytest.raises(CapacityError, match="cannot store"):
            put(store, 1)
    (tmp_path / "tmp").mkdir()
    put(store, 1)
    assert store.has(cid_of(block(0)))


def test_threads_never_take_more_than_the_quota(tmp_path):
    store = BlockStore(tmp_path, quota_bytes=8 * SIZE)
    seen: list[int] = []

    def write(first: int) -> None:
        for number in range(first, first + 15):
            put(store, number)
            seen.append(own_bytes(store))

    threads = [threading.Thread(target=write, args=(first * 100,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(seen) <= 8 * SIZE
    assert own_bytes(store) > 0


@settings(deadline=None, max_examples=30, derandomize=True)
@given(
    steps=st.lists(st.tuples(st.sampled_from(("put", "pin", "unpin", "get", "drop")), st.integers(0, 9)), max_size=40)
)
def test_the_quota_and_the_pins_hold_whatever_happens(tmp_path_factory, steps):
    store = BlockStore(tmp_path_factory.mktemp("store"), quota_bytes=4 * SIZE)
    pinned: dict[str, Cid] = {}
    for act, number in steps:
        cid = cid_of(block(number))
        match act:
            case "put":
                held = {each for each in pinned.values() if store.has(each)}
                try:
                    put(store, number)
                except CapacityError:
                    assert len(held) == 4
                assert all(store.has(each) for each in held)
            case "pin":
                pinned[str(number)] = cid
                store.pin(str(number), [cid])
            case "unpin":
                pinned.pop(str(number), None)
                store.unpin(str(number))
            case "get":
                assert store.get(cid) in (None, block(number))
            case _:
                store.drop_own(cid)
        assert own_bytes(store) <= 4 * SIZE
