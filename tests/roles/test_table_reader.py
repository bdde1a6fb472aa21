"""What a node believes of gossiped demand tables."""

from __future__ import annotations

import time

import pytest

from kvasir_node.base.ids import ModelId, SliceId, cid_of
from kvasir_node.net.identity import key_from_seed, peer_id_of, sign_with
from kvasir_node.roles.hub import TABLE_KIND, TableReader
from kvasir_node.wire.envelope import seal, with_membership
from kvasir_node.wire.lists import TableRow
from kvasir_node.wire.messages import DemandTable

SECRET = b"s" * 32
HUB = key_from_seed(b"h" * 32)
MODEL = ModelId(cid_of(b"model"))


def table(sequence: int = 1, *, epoch: int = 1, at: float | None = None, want: int = 2, ttl_s: float = 30) -> bytes:
    rows = (TableRow(MODEL, SliceId(0, 0, 3), want, 0, 1),)
    body = DemandTable(epoch, sequence, time.time() if at is None else at, ttl_s, (), rows).to_bytes()
    return seal(TABLE_KIND, body, peer_id_of(HUB), lambda message: sign_with(HUB, message))


@pytest.fixture
def reader(autojump_clock):
    return TableReader(SECRET, clock_skew_max_s=600)


async def test_a_members_newer_table_counts_and_replays_change_nothing(autojump_clock, reader):
    first = with_membership(SECRET, table(1))
    assert reader.take(first)
    assert reader.open_copies() == 1
    assert not reader.take(first)
    assert reader.take(with_membership(SECRET, table(2, want=4)))
    assert reader.open_copies() == 3
    assert not reader.take(first)
    assert reader.open_copies() == 3


async def test_law_7_a_stranger_and_a_forger_change_nothing(autojump_clock, reader):
    assert not reader.take(table())
    assert not reader.take(with_membership(b"x" * 32, table()))
    good = bytearray(with_membership(SECRET, table()))
    for index in range(len(good)):
        good[index] ^= 1
        assert not reader.take(bytes(good))
        good[index] ^= 1
    assert reader.open_copies() == 0
    assert reader.take(bytes(good))


async def test_a_clock_ten_minutes_off_is_tolerated_and_more_is_not(autojump_clock, reader):
    assert not reader.take(with_membership(SECRET, table(1, at=time.time() - 700)))
    assert reader.take(with_membership(SECRET, table(1, at=time.time() - 500)))


async def test_a_table_ends_with_its_ttl_and_its_replay_still_changes_nothing(autojump_clock, reader):
    import trio

    sent = with_membership(SECRET, table(1, ttl_s=5))
    assert reader.take(sent)
    await trio.sleep(6)
    assert reader.open_copies() == 0
    assert not reader.take(sent)
    assert reader.open_copies() == 0
