"""What a node believes of gossiped demand tables: the validator of the topic."""

from __future__ import annotations

import pytest
import trio
from role_fakes import KEYS, SECRET, tables_of, wall

from kvasir_node.base.ids import ModelId, PeerId, SliceId, cid_of
from kvasir_node.net.identity import key_from_seed, peer_id_of, sign_with
from kvasir_node.roles.demand_tables import HUBS_MAX, HUBS_UNMET_MAX, TABLE_KIND, DemandTables
from kvasir_node.wire.envelope import seal
from kvasir_node.wire.hub_proof import HubProofs, with_hub_proof
from kvasir_node.wire.lists import TableRow
from kvasir_node.wire.messages import DemandTable
from kvasir_node.wire.swarm_keys import SwarmKeys, lesser_secret, read_secret, replacing_secret

HUB_KEY, OTHER_KEY = key_from_seed(b"h" * 32), key_from_seed(b"o" * 32)
HUB, OTHER = peer_id_of(HUB_KEY), peer_id_of(OTHER_KEY)
MODEL = ModelId(cid_of(b"model"))


def table(
    sequence: int = 1, *, epoch: int = 1, ahead_s: float = 0.0, want: int = 2, ttl_s: float = 30.0
) -> DemandTable:
    rows = (TableRow(MODEL, SliceId(0, 0, 3), want, 0, 1),)
    return DemandTable(1, sequence, wall() + ahead_s, ttl_s, (), rows, {MODEL: 100}, 7)


def sent(sequence: int = 1, *, secret: bytes = SECRET, key=HUB_KEY, **fields: object) -> bytes:
    body = table(sequence, **fields).to_bytes()
    sealed = seal(TABLE_KIND, body, peer_id_of(key), lambda message: sign_with(key, message))
    return with_hub_proof((read_secret(secret),), peer_id_of(key), sealed)


@pytest.fixture
def tables(autojump_clock) -> DemandTables:
    return tables_of()


async def test_a_members_newer_table_counts_and_replays_change_nothing(autojump_clock, tables):
    first = sent(1)
    assert tables.take(HUB, first)
    assert (tables.open_copies(), tables.idle()) == (1, 7)
    assert not tables.take(HUB, first)
    await trio.sleep(2)
    assert tables.take(HUB, sent(2, want=4))
    assert tables.open_copies() == 3
    assert not tables.take(HUB, first)
    assert tables.open_copies() == 3


async def test_copies_that_do_not_fit_into_the_memory_are_not_open(autojump_clock, tables):
    tables.take(HUB, sent())
    assert tables.open_copies(99) == 0
    assert tables.open_copies(100) == 1


async def test_law_7_a_stranger_and_a_forger_change_nothing(autojump_clock, tables):
    good = bytearray(sent())
    assert not tables.take(HUB, bytes(good[1 + 32 + 64 :]))
    assert not tables.take(HUB, sent(secret=b"x" * 32))
    for index in range(len(good)):
        good[index] ^= 1
        assert not tables.take(HUB, bytes(good))
        good[index] ^= 1
        await trio.sleep(1)
    assert tables.open_copies() == 0
    assert tables.take(HUB, bytes(good))


async def test_who_has_a_workers_ticket_cannot_be_heard_as_a_hub(autojump_clock, tables):
    worker, coordinator = (read_secret(lesser_secret(SECRET, [role])) for role in ("worker", "coordinator"))
    assert not tables.take(OTHER, with_hub_proof((worker,), OTHER, b"record"))
    forged = SwarmKeys(worker.name, worker.entry, worker.public, coordinator.private | {"hub": bytes(32)}, False)
    sealed = seal(TABLE_KIND, table().to_bytes(), OTHER, lambda message: sign_with(OTHER_KEY, message))
    assert not tables.take(OTHER, with_hub_proof((forged,), OTHER, sealed))
    grant_of_hub = KEYS.grants(HUB)["hub"]  # heard in gossip, put behind a MAC of one's own
    mac = with_hub_proof((forged,), OTHER, sealed)[:33]
    assert not tables.take(OTHER, mac + grant_of_hub + sealed)
    assert tables.table_of(OTHER) is None
    assert tables.take(OTHER, mac + KEYS.grants(OTHER)["hub"] + sealed)


async def test_while_a_secret_is_replaced_who_has_either_hears_and_is_heard(autojump_clock):
    new = read_secret(replacing_secret(SECRET))
    sealed = seal(TABLE_KIND, table().to_bytes(), HUB, lambda message: sign_with(HUB_KEY, message))
    data = with_hub_proof((new, KEYS), HUB, sealed)
    for held in ((KEYS,), (new,), (new, KEYS)):
        reader = DemandTables(
            HubProofs(lambda held=held: held),
            clock_skew_max_s=600.0,
            interval_min_s=1.0,
            is_met=lambda peer: False,
            wall=wall,
        )
        assert reader.take(HUB, data)
    assert not tables_of().take(HUB, with_hub_proof((new,), HUB, sealed))


async def test_a_member_cannot_publish_in_a_hubs_name(autojump_clock, tables):
    # the envelope is right, but another peer of the swarm put it into gossip: a replay, at the least
    assert not tables.take(OTHER, sent(key=HUB_KEY))
    assert tables.table_of(HUB) is None
    assert tables.take(HUB, sent(key=HUB_KEY))


async def test_law_7_a_hub_that_publishes_without_end_is_heard_at_twice_its_rate_and_no_more(autojump_clock, tables):
    taken = 0
    for number in range(1000):
        taken += tables.take(HUB, sent(number + 1))
        await trio.sleep(0.01)
    assert 19 <= taken <= 24  # ten seconds
    assert tables.take(OTHER, sent(1, key=OTHER_KEY))


async def test_law_7_a_member_that_makes_up_hubs_leaves_room_for_those_that_were_met(autojump_clock):
    met = [PeerId(f"met {number}") for number in range(HUBS_MAX)]
    tables = tables_of(met=met)
    invented = [tables.keep(PeerId(f"invented {number}"), table()) for number in range(500)]
    assert sum(invented) == HUBS_UNMET_MAX
    assert all(tables.keep(peer, table()) for peer in met)
    assert not tables.keep(PeerId("one more"), table())
    assert len(tables._hubs) == HUBS_MAX


async def test_a_clock_ten_minutes_off_is_tolerated_and_more_is_not(autojump_clock, tables):
    assert not tables.take(HUB, sent(ahead_s=-700.0))
    assert tables.take(HUB, sent(ahead_s=-500.0))


async def test_a_table_ends_with_its_ttl_and_its_replay_still_changes_nothing(autojump_clock, tables):
    data = sent(ttl_s=5)
    assert tables.take(HUB, data)
    await trio.sleep(6)
    assert (tables.open_copies(), tables.idle()) == (0, 0)
    tables.take(OTHER, sent(key=OTHER_KEY))
    assert not tables.take(HUB, data)
    assert tables.open_copies() == 1  # the other's
