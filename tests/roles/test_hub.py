"""The hub as its peers see it: records, polls, renewals, tables; hostile ones too."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from role_fakes import EXPERT_BYTES, KEYS, SECRET, SLICES, WALL, World, hub_on, open_world, tables_of, wall, with_slices

from kvasir_node.base.errors import KvasirError, Misbehaved, RejectReason
from kvasir_node.base.ids import DAG_CBOR_CODEC, ModelId, PeerId, cid_of
from kvasir_node.decide.demand import Wanted
from kvasir_node.decide.market import MEET_S
from kvasir_node.net.memory_gossip import MemoryGossip
from kvasir_node.net.memory_net import open_memory_network
from kvasir_node.net.rpc import CallStream, one_call
from kvasir_node.roles.demand_tables import HUBS_MAX, TABLE_KIND
from kvasir_node.roles.hub import DEMAND_KIND, MESH_COPIES, MODELS_MAX, TABLE_OVERHEAD_BYTES
from kvasir_node.wire.envelope import seal
from kvasir_node.wire.hub_proof import with_hub_proof
from kvasir_node.wire.messages import (
    MARKET_PROTOCOL,
    DemandRecord,
    DemandTable,
    HubNews,
    LeaseVerdict,
    MarketMethod,
    NoOffer,
    Offer,
    Poll,
    Renewal,
    Renewals,
    Verdicts,
    read_poll_answer,
)

ANN, BOB = PeerId("ann"), PeerId("bob")


async def poll(
    world: World, worker: PeerId = ANN, memory_bytes: int = 1 << 30, busy: Offer | None = None
) -> Offer | NoOffer:
    listed = () if busy is None else ((busy.model, busy.slice),)
    (answer,) = await world.hub.handle(worker, MarketMethod.POLL, Poll(memory_bytes, (), listed).to_bytes())
    return read_poll_answer(answer)


def renewal(*offers: Offer, progress: int = 0) -> bytes:
    return Renewals(
        tuple(Renewal(o.lease, o.model, o.slice, o.coordinator, serving=False, progress=progress) for o in offers)
    ).to_bytes()


async def renew(world: World, offer: Offer, worker: PeerId = ANN, progress: int = 0) -> LeaseVerdict:
    (answer,) = await world.hub.handle(worker, MarketMethod.RENEW, renewal(offer, progress=progress))
    (verdict,) = Verdicts.from_bytes(answer).verdicts
    return verdict


async def test_demand_is_offered_leased_renewed_released_and_shown(autojump_clock, tmp_path):
    async with open_world(tmp_path) as world:
        world.coordinator.wants = with_slices(SLICES[:1])
        assert isinstance(await poll(world), NoOffer)
        await world.coordinator.report(world.hub)
        offer = await poll(world)
        assert isinstance(offer, Offer)
        assert (offer.slice, offer.coordinator) == (SLICES[0], world.coordinator.transport.peer_id)
        assert offer.addresses == world.coordinator.transport.addresses()
        (row,) = world.hub.snapshot().demand
        assert (row.model, row.want, row.proven, row.leased) == ("tiny", 1, 0, 1)
        assert (await renew(world, offer)).ttl_s == 15.0
        assert isinstance(await poll(world, BOB), NoOffer)
        await world.hub.handle(ANN, MarketMethod.RELEASE, renewal(offer))
        assert isinstance(await poll(world, BOB), Offer)
        snapshot = world.hub.snapshot()
        assert (snapshot.coordinators, snapshot.leases, snapshot.idle_nodes) == (1, 1, 1)


async def test_whom_its_coordinator_refuses_loses_the_lease_and_waits(autojump_clock, tmp_path):
    async with open_world(tmp_path) as world:
        carl = world.coordinator
        carl.wants = with_slices(SLICES[:1])
        await carl.report(world.hub)
        assert isinstance(await poll(world), Offer)
        carl.refused = (ANN,)
        await carl.report(world.hub)
        assert world.hub.snapshot().leases == 0
        assert isinstance(await poll(world), NoOffer)
        await trio.sleep(5)
        assert isinstance(await poll(world, BOB), Offer)


async def test_many_leases_are_renewed_and_given_back_in_one_message(autojump_clock, tmp_path):
    async with open_world(tmp_path) as world:
        world.coordinator.wants = with_slices()
        await world.coordinator.report(world.hub)
        offers: list[Offer] = []
        for _ in SLICES:
            listed = tuple((offer.model, offer.slice) for offer in offers)
            (answer,) = await world.hub.handle(ANN, MarketMethod.POLL, Poll(1 << 30, (), listed).to_bytes())
            offer = read_poll_answer(answer)
            assert isinstance(offer, Offer)
            offers.append(offer)
        await world.hub.handle(ANN, MarketMethod.RELEASE, renewal(*offers[:3]))
        assert world.hub.snapshot().leases == len(SLICES) - 3
        world.coordinator.wants = with_slices(SLICES[1:])
        await world.coordinator.report(world.hub)
        (answer,) = await world.hub.handle(ANN, MarketMethod.RENEW, renewal(*offers))
        assert [v.ttl_s for v in Verdicts.from_bytes(answer).verdicts] == [15.0] * len(SLICES)  # it knows them again
        for _ in range(2):  # a hub as young as this one does not yet say that something is not wanted
            await trio.sleep(10)
            (answer,) = await world.hub.handle(ANN, MarketMethod.RENEW, renewal(*offers))
        ended = [offer.slice for offer, v in zip(offers, Verdicts.from_bytes(answer).verdicts, strict=True) if v.reason]
        assert ended == [SLICES[0]]


async def test_a_slice_larger_than_the_memory_is_not_offered(autojump_clock, tmp_path):
    async with open_world(tmp_path) as world:
        world.coordinator.wants = with_slices()
        await world.coordinator.report(world.hub)
        assert isinstance(await poll(world, memory_bytes=2 * EXPERT_BYTES - 1), NoOffer)


async def test_ten_polls_at_once_get_ten_different_slices(autojump_clock, tmp_path):
    # kvasir-net hub.py: no lease, so all volunteers got the same range
    async with open_world(tmp_path) as world:
        world.coordinator.wants = {part: 2 if part in SLICES[:2] else 1 for part in SLICES}
        await world.coordinator.report(world.hub)
        got: list[Offer | NoOffer] = []

        async def ask(number: int) -> None:
            got.append(await poll(world, PeerId(f"worker {number}")))

        async with trio.open_nursery() as nursery:
            for number in range(10):
                nursery.start_soon(ask, number)
        assert sorted(offer.slice for offer in got if isinstance(offer, Offer)) == sorted([*SLICES, *SLICES[:2]])


async def test_law_3_a_worker_that_claims_progress_and_proves_nothing_is_never_counted_and_must_wait(
    autojump_clock, tmp_path
):
    # AI-Horde issues/71: credit for presence
    async with open_world(tmp_path) as world:
        world.coordinator.wants = with_slices(SLICES[:1])
        world.nursery.start_soon(world.keep_reporting)
        await trio.sleep(0.1)
        offer = await poll(world)
        assert isinstance(offer, Offer)
        progress = 0
        while (await renew(world, offer, progress=progress)).ttl_s > 0:
            progress += 1
            assert world.hub.snapshot().demand[0].proven == 0
            await trio.sleep(3)
        assert trio.current_time() < 700
        assert isinstance(await poll(world), NoOffer)
        assert isinstance(await poll(world, BOB), Offer)


async def test_law_8_a_coordinator_that_dies_leaves_its_worker_without_a_strike(autojump_clock, tmp_path):
    # AI-Horde issues/417: a hub outage put innocents in maintenance
    async with open_world(tmp_path) as world:
        world.coordinator.wants = with_slices(SLICES[:1])
        await world.coordinator.report(world.hub)
        offer = await poll(world)
        assert isinstance(offer, Offer)
        for _ in range(20):
            verdict = await renew(world, offer)
            await trio.sleep(3)
        assert verdict.ttl_s == 0
        await world.coordinator.report(world.hub)
        assert isinstance(await poll(world), Offer)


async def test_a_worker_that_comes_back_under_its_key_takes_no_second_place_and_gets_its_own_at_once(
    autojump_clock, tmp_path
):
    # parallax issues/342: a ghost and a duplicate blocked the cluster
    async with open_world(tmp_path) as world:
        world.coordinator.wants = with_slices(SLICES[:1], want=2)
        await world.coordinator.report(world.hub)
        first = await poll(world)
        assert isinstance(first, Offer)
        assert isinstance(await poll(world, busy=first), NoOffer)
        again = await poll(world)  # it was restarted: it holds nothing
        assert isinstance(again, Offer)
        assert world.hub.snapshot().leases == 1
        assert (await renew(world, again)).ttl_s > 0


# Restart --------------------------------------------------------------------------------------------------------


async def test_leases_survive_a_restart_of_the_hub_though_it_has_heard_of_no_demand_yet(autojump_clock, tmp_path):
    async with open_world(tmp_path) as world:
        world.coordinator.wants = with_slices()
        await world.coordinator.report(world.hub)
        offers = [await poll(world, PeerId(f"worker {n}")) for n in range(len(SLICES))]
        world.hub = hub_on(world.hub_transport)
        for number, offer in enumerate(offers):
            assert isinstance(offer, Offer)
            assert (await renew(world, offer, PeerId(f"worker {number}"))).ttl_s > 0
        await world.coordinator.report(world.hub)
        await trio.sleep(MEET_S)
        assert isinstance(await poll(world), NoOffer)  # all are taken, as before
        assert world.hub.snapshot().leases == len(SLICES)


async def test_nobody_can_renew_anothers_lease_or_release_it(autojump_clock, tmp_path):
    async with open_world(tmp_path) as world:
        world.coordinator.wants = with_slices(SLICES[:1])
        await world.coordinator.report(world.hub)
        offer = await poll(world)
        assert isinstance(offer, Offer)
        await trio.sleep(14)
        assert (await renew(world, offer, BOB)).ttl_s == 0
        await world.hub.handle(BOB, MarketMethod.RELEASE, renewal(offer))
        assert (await renew(world, offer)).ttl_s > 0


# Records that change nothing ------------------------------------------------------------------------------------


async def test_a_replayed_or_older_record_changes_nothing(autojump_clock, tmp_path):
    # go-libp2p-pubsub issues/524: a seen-cache is no protection against replays
    async with open_world(tmp_path) as world:
        carl = world.coordinator
        carl.wants = with_slices()
        first = carl.record()
        await world.hub.handle(carl.transport.peer_id, MarketMethod.REPORT, first)
        carl.wants = {}
        await carl.report(world.hub)
        for _ in range(2):
            with pytest.raises(Misbehaved, match="or newer") as refused:
                await world.hub.handle(carl.transport.peer_id, MarketMethod.REPORT, first)
            assert refused.value.reason is RejectReason.STALE
            assert world.hub.snapshot().demand == ()
            await trio.sleep(100)  # its demand has expired, what was heard has not


@pytest.mark.parametrize(("ahead_s", "words"), [(700.0, "700 s ahead"), (-700.0, "700 s behind")])
async def test_a_clock_more_than_ten_minutes_off_is_told_in_words(autojump_clock, tmp_path, ahead_s, words):
    # avalanchego issues/260: 0 peers, and no message
    async with open_world(tmp_path) as world:
        world.coordinator.wants, world.coordinator.issued_ahead_s = with_slices(), ahead_s
        with pytest.raises(Misbehaved, match=f"clock skew: .*{words}"):
            await world.coordinator.report(world.hub)
        world.coordinator.issued_ahead_s = ahead_s * 6 / 7 - ahead_s / abs(ahead_s)
        await world.coordinator.report(world.hub)
        assert len(world.hub.snapshot().demand) == len(SLICES)


async def test_law_7_a_report_in_anothers_name_or_with_any_byte_flipped_changes_nothing(autojump_clock, tmp_path):
    async with open_world(tmp_path) as world:
        carl = world.coordinator
        carl.wants = with_slices(SLICES[:1])
        good = carl.record()
        with pytest.raises(Misbehaved) as refused:
            await world.hub.handle(ANN, MarketMethod.REPORT, good)
        assert refused.value.reason is RejectReason.BAD_SIGNATURE
        for index in range(len(good)):
            bad = bytearray(good)
            bad[index] ^= 1 << index % 8
            with pytest.raises(Misbehaved):
                await world.hub.handle(carl.transport.peer_id, MarketMethod.REPORT, bytes(bad))
        assert world.hub.snapshot().demand == ()
        await world.hub.handle(carl.transport.peer_id, MarketMethod.REPORT, good)
        assert len(world.hub.snapshot().demand) == 1


@settings(max_examples=150, deadline=None, derandomize=True)
@given(method=st.integers(0, 6), body=st.binary(max_size=120), flip=st.integers(0, 200))
def test_what_any_member_sends_is_answered_or_refused_and_nothing_else(tmp_path_factory, method, body, flip):
    async def run() -> None:
        async with open_memory_network() as network:
            hub = hub_on(network.transport("hub"))
            samples = [body]
            for good in (
                Poll(1, (), ()).to_bytes(),
                Renewals((Renewal("l", ModelId(cid_of(b"m", DAG_CBOR_CODEC)), SLICES[0], BOB, True, 1),)).to_bytes(),
            ):
                bad = bytearray(good)
                bad[flip % len(bad)] ^= 1 + flip % 255
                samples.append(bytes(bad))
            for sample in samples:
                with suppress(Misbehaved):
                    await hub.handle(ANN, method, sample)
            hub.snapshot()

    trio.run(run)


async def test_a_method_that_a_hub_does_not_have_costs_the_call_and_not_the_stream(autojump_clock, tmp_path):
    async with open_world(tmp_path) as world:
        ann = world.network.transport("ann")
        await ann.connect(world.hub_transport.addresses())
        stream = await ann.open_stream(world.hub_transport.peer_id, MARKET_PROTOCOL)
        calls = CallStream(stream, handler=None, in_flight_max=4, body_bytes_max=1 << 20)
        world.nursery.start_soon(calls.run)
        for method in (0, 6, 77, 255):
            with pytest.raises(Misbehaved, match="no method"):
                await calls.call(method, b"", timeout_s=5)
        body = await calls.call(MarketMethod.POLL, Poll(1, (), ()).to_bytes(), timeout_s=5)
        assert isinstance(read_poll_answer(body), NoOffer)


async def test_law_7_a_member_that_invents_leases_and_models_fills_no_table_beyond_its_bound(autojump_clock, tmp_path):
    async with open_world(tmp_path, market__leases_max=50) as world:
        world.coordinator.wants = with_slices()
        await world.coordinator.report(world.hub)
        for number in range(300):
            invented = Renewal(f"x{number}", world.coordinator.model, SLICES[0], PeerId(f"peer {number}"), True, 1)
            await world.hub.handle(ANN, MarketMethod.RENEW, Renewals((invented,)).to_bytes())
        assert world.hub.snapshot().leases <= 50
        await trio.sleep(40)  # not renewed: gone
        await world.coordinator.report(world.hub)
        assert isinstance(await poll(world, BOB), Offer)


async def test_law_7_names_of_models_are_remembered_up_to_a_bound(autojump_clock, tmp_path):
    async with open_world(tmp_path) as world:
        carl, hub = world.coordinator, world.hub
        peer = carl.transport.peer_id
        hub._names |= {f"an earlier model {number}": "" for number in range(MODELS_MAX)}
        for number in range(1, 50):
            model = ModelId(cid_of(number.to_bytes(4, "big"), DAG_CBOR_CODEC))
            wants = (Wanted(SLICES[0], 1, ()),)
            said = DemandRecord(1, number, wall(), 30.0, model, f"model {number}", "float32", 1, (), 1, 1, 1, wants)
            sealed = seal(DEMAND_KIND, said.to_bytes(), peer, carl.transport.sign)
            await hub.handle(peer, MarketMethod.REPORT, sealed)
        assert len(hub._names) == MODELS_MAX
        (row,) = hub.snapshot().demand
        assert row.model == "model 49"


# Tables ---------------------------------------------------------------------------------------------------------


async def test_tables_are_gossiped_when_demand_changes_at_most_once_a_second_and_refreshed(autojump_clock, tmp_path):
    tables: list[DemandTable] = []
    async with open_world(tmp_path) as world:
        hub = hub_on(world.hub_transport, tables, market__gossip_bytes_s=100_000)
        reader = tables_of()
        ann = world.network.transport("ann")
        await ann.connect(world.hub_transport.addresses())
        heard = await MemoryGossip(ann).subscribe("topic", reader.take)
        world.nursery.start_soon(hub.run)
        await trio.sleep(60)
        assert 6 <= len(tables) <= 8
        began = len(tables)
        world.coordinator.wants = with_slices()
        for number in range(100):
            world.coordinator.wants[SLICES[0]] = number
            await world.coordinator.report(hub)
            await trio.sleep(0.1)
        assert 9 <= len(tables) - began <= 12
        await trio.sleep(2)
        assert reader.open_copies() == 99 + len(SLICES) - 1
        assert heard.statistics().current_buffer_used == len(tables)


async def test_law_7_hubs_that_a_member_makes_up_do_not_silence_this_one(autojump_clock, tmp_path):
    tables: list[DemandTable] = []
    async with open_world(tmp_path) as world:
        hub = hub_on(world.hub_transport, tables)
        world.nursery.start_soon(hub.run)
        for number in range(500):
            await hub.handle(PeerId(f"hub {number}"), MarketMethod.TELL, HubNews(number, True, ()).to_bytes())
        for number in range(4):
            world.coordinator.wants = with_slices() if number % 2 else {}
            await world.coordinator.report(hub)
            began = len(tables)
            await trio.sleep(2)
            assert len(tables) == began + 1
            assert bool(tables[-1].rows) is bool(number % 2)
        assert len(hub._others) <= HUBS_MAX


async def test_law_7_tables_have_a_budget_and_what_idle_nodes_act_on_goes_out_at_once(autojump_clock, tmp_path):
    tables: list[DemandTable] = []
    async with open_world(tmp_path) as world:
        hub = hub_on(world.hub_transport, tables)
        world.nursery.start_soon(hub.run)
        for number in range(1800):  # every 2 s something else that only people look at
            world.coordinator.wants = {SLICES[0]: 3 + number % 2}
            await world.coordinator.report(hub)
            await trio.sleep(2)
        heard_bytes = sum(MESH_COPIES * (TABLE_OVERHEAD_BYTES + len(table.to_bytes())) for table in tables)
        assert 60 * 3600 * 0.8 < heard_bytes < 60 * (3600 + 600) + 2000  # one more than the budget had
        for wants in ({}, with_slices()):
            world.coordinator.wants = wants
            await world.coordinator.report(hub)
            began = len(tables)
            await trio.sleep(2)
            assert len(tables) == began + 1
            assert [row.want for row in tables[-1].rows] == list(wants.values())
            await trio.sleep(2)


async def test_a_table_is_cut_to_its_most_wanted_rows(autojump_clock, tmp_path):
    tables: list[DemandTable] = []
    async with open_world(tmp_path) as world:
        hub = hub_on(world.hub_transport, tables)
        for number in range(300):
            carl = world.network.transport(f"coordinator {number}")
            model = ModelId(cid_of(number.to_bytes(2, "big"), DAG_CBOR_CODEC))
            wants = tuple(Wanted(part, 1 + (number == 299), ()) for part in SLICES)
            said = DemandRecord(1, 1, wall(), 30.0, model, "m", "float32", 1, (), 1, 1, 1, wants)
            sealed = seal(DEMAND_KIND, said.to_bytes(), carl.peer_id, carl.sign)
            await hub.handle(carl.peer_id, MarketMethod.REPORT, sealed)
        world.nursery.start_soon(hub.run)
        await trio.sleep(3)
        table = DemandTable.from_bytes(tables[-1].to_bytes())
        assert 0 < len(table.rows) < 300 * len(SLICES)
        assert [row.slice for row in table.rows if row.want == 2] == list(SLICES)


@pytest.mark.parametrize(("ahead_s", "told"), [(599.0, False), (-599.0, False), (700.0, True), (-700.0, True)])
async def test_a_reader_says_how_far_off_a_hubs_clock_is(autojump_clock, ahead_s, told):
    async with open_memory_network() as network:
        hub = network.transport("hub")
        reader = tables_of()
        table = DemandTable(1, 1, wall() + ahead_s, 30.0, (), ())
        sealed = seal(TABLE_KIND, table.to_bytes(), hub.peer_id, hub.sign)
        assert reader.take(hub.peer_id, with_hub_proof((KEYS,), hub.peer_id, sealed)) is not told
        assert reader.skews() == ({hub.peer_id: pytest.approx(ahead_s)} if told else {})
        await trio.sleep(31)
        assert reader.skews() == {}


async def test_law_7_ten_thousand_tables_of_ever_new_hubs_leave_a_bounded_reader(autojump_clock):
    # exo issues/2262: memory climbs while idle
    reader = tables_of()
    rng = random.Random(3)
    for number in range(10_000):
        at = wall() + (0 if rng.random() < 0.5 else 5000)
        reader.keep(PeerId(f"hub {number % 500}"), DemandTable(1, number, at, 30.0, (), ()))
    assert len(reader._hubs) <= HUBS_MAX
    assert len(reader._skews) <= HUBS_MAX
    assert wall() == WALL + trio.current_time()


async def test_a_stranger_is_told_nothing_by_a_hub_behind_the_door(autojump_clock, tmp_path):
    from kvasir_node.net.hello import Membership

    async with open_world(tmp_path) as world:
        membership = Membership(world.hub_transport, SECRET, b"")
        world.hub_transport.set_handler(MARKET_PROTOCOL, membership.guard(world.hub.serve))
        ann = world.network.transport("ann")
        await ann.connect(world.hub_transport.addresses())
        with pytest.raises(KvasirError):
            await one_call(
                ann, world.hub_transport.peer_id, MARKET_PROTOCOL, 2, Poll(1, (), ()).to_bytes(), timeout_s=4
            )
        assert world.hub.snapshot().idle_nodes == 0
