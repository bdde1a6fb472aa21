from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvasir_node.base.errors import RejectReason
from kvasir_node.base.ids import DAG_CBOR_CODEC, ModelId, PeerId, SliceId, cid_of
from kvasir_node.decide.demand import Wanted
from kvasir_node.decide.market import (
    DUE_SLACK,
    MEET_S,
    REST_POLLS_S,
    Demand,
    LeaseOffer,
    LeaseReport,
    Market,
    MarketLimits,
    TableEntry,
)

CARL, CORA = PeerId("carl"), PeerId("cora")  # coordinators
WILL, WANDA, WU = PeerId("will"), PeerId("wanda"), PeerId("wu")  # workers
MODEL, OTHER_MODEL = (ModelId(cid_of(name, DAG_CBOR_CODEC)) for name in (b"one", b"two"))
LOW, HIGH = SliceId(0, 0, 3), SliceId(0, 4, 7)
WALL = 1_700_000_000.0
LIMITS = MarketLimits(
    lease_ttl_s=15.0,
    progress_timeout_s=60.0,
    tenure_min_s=10.0,
    surplus_grace_s=5.0,
    leases_max=8,
    issuers_max=2,
    clock_skew_max_s=600.0,
    poll_interval_s=2.0,
)
RICH = 1 << 40


def wanted(want: int, *proven: PeerId, part: SliceId = LOW) -> Wanted:
    return Wanted(part, want, proven)


class World:
    """A market, its clock and what each coordinator last said."""

    def __init__(self, *, started_at: float = -100.0, limits: MarketLimits = LIMITS) -> None:
        self.market = Market(limits, "hub", started_at)
        self.now = 0.0
        self.sequence = 0

    def report(
        self,
        *wants: Wanted,
        issuer=CARL,
        model=MODEL,
        ttl_s=1000.0,
        sequence=None,
        slice_bytes=1,
        wall=None,
        refused=(),
    ):
        self.sequence += 1
        demand = Demand(
            issuer=issuer,
            epoch=1,
            sequence=self.sequence if sequence is None else sequence,
            issued_at=WALL + self.now if wall is None else wall,
            ttl_s=ttl_s,
            model=model,
            dtype="float32",
            slice_bytes=slice_bytes,
            addresses=("/ip4/192.0.2.1/tcp/1",),
            wants=wants,
            refused=refused,
        )
        return self.market.report(demand, self.now, WALL + self.now)

    def poll(self, worker, *, have=(), busy=(), memory_bytes=RICH, rtt_s=0.0, address=""):
        return self.market.poll(
            worker,
            memory_bytes=memory_bytes,
            have=have,
            busy=busy,
            round_trips=[(CARL, rtt_s)],
            address=address,
            now=self.now,
        )

    def lease(self, worker, **asked: object) -> LeaseOffer:
        offer = self.poll(worker, **asked)
        assert isinstance(offer, LeaseOffer)
        return offer

    def renew(self, worker, offer, progress=0):
        key = (offer.coordinator, offer.model, offer.slice)
        return self.market.renew(worker, offer.lease, key, progress=progress, now=self.now)

    def keep(self, until: float, *held: tuple[PeerId, LeaseOffer], progress=False) -> None:
        """Lets time pass with a renewal of each lease every 3 s."""
        while self.now < until:
            self.now = min(until, self.now + 3.0)
            for worker, offer in held:
                assert self.renew(worker, offer, int(self.now) if progress else 0)[0] > 0

    def counts(self) -> list[tuple[SliceId, int, int, int]]:
        return [(e.slice, e.want, e.proven, e.leased) for e in self.market.table()]


def test_playbook_of_a_surge():
    world = World()
    assert world.report(wanted(1, part=LOW), wanted(1, part=HIGH)) is None
    offer = world.lease(WILL)
    assert offer == LeaseOffer("hub.1", MODEL, "float32", LOW, CARL, ("/ip4/192.0.2.1/tcp/1",), 15.0)
    assert world.counts() == [(LOW, 1, 0, 1), (HIGH, 1, 0, 0)]
    world.now = 3.0
    assert world.renew(WILL, offer, progress=1) == (15.0, "")
    world.report(wanted(1, WILL, part=LOW), wanted(1, part=HIGH))
    assert world.counts() == [(LOW, 1, 1, 0), (HIGH, 1, 0, 0)]
    world.keep(20.0, (WILL, offer))
    world.report(wanted(0, WILL, part=LOW))  # the load is gone
    world.keep(24.0, (WILL, offer))
    world.now = 26.0
    assert world.renew(WILL, offer) == (0.0, "no longer needed")
    world.report()
    assert world.counts() == []
    assert world.market.lease_count == 0


@pytest.mark.parametrize(
    ("asked", "gets"),
    [
        ({}, LOW),
        ({"have": [(MODEL, HIGH)]}, HIGH),  # what is on its disk is quicker there
        ({"busy": [(MODEL, LOW)]}, HIGH),
        ({"busy": [(MODEL, LOW), (MODEL, HIGH)]}, None),
        ({"memory_bytes": 99}, None),
        ({"memory_bytes": 100}, LOW),
        ({"worker": CARL}, None),  # its own demand
    ],
)
def test_what_a_poll_is_offered(asked, gets):
    world = World()
    world.report(wanted(1, part=LOW), wanted(1, part=HIGH), slice_bytes=100)
    answer = world.poll(**{"worker": WILL, **asked})
    assert (answer.slice if isinstance(answer, LeaseOffer) else None) == gets


def test_the_slice_with_the_largest_share_open_is_offered_first():
    world = World()
    world.report(wanted(4, WU, part=LOW), wanted(1, part=HIGH))
    assert world.lease(WILL).slice == HIGH


def test_who_gets_nothing_is_told_when_to_ask_again_and_a_crowd_asks_more_rarely():
    world = World()
    assert world.poll(WILL) == 2.0
    for number in range(499):
        world.poll(PeerId(f"idle {number}"))
    assert world.poll(WILL) == 500 / REST_POLLS_S
    assert world.market.idle_count(world.now) == 500
    assert world.market.idle_count(world.now + 2 * 500 / REST_POLLS_S - 0.1) == 500
    assert world.market.idle_count(world.now + 2 * 500 / REST_POLLS_S) == 0


def test_while_more_nodes_are_idle_than_copies_open_nobody_gets_a_second_lease_before_the_first_is_proven():
    world = World()
    world.report(wanted(1, part=LOW))
    world.poll(WANDA)
    world.poll(WU)
    world.report(wanted(1, WANDA, part=LOW), wanted(1, part=HIGH), wanted(1, part=SliceId(1, 0, 3)))
    world.market.idle_count(world.now)
    world.lease(WILL)
    assert isinstance(world.poll(WILL, busy=[(MODEL, HIGH)]), float)  # WU is idle and one is open
    world.market.end_unlisted(WANDA, (), world.now)
    world.lease(WU)
    world.report(wanted(1, WILL, part=HIGH), wanted(2, WU, part=SliceId(1, 0, 3)))
    world.lease(WILL, busy=[(MODEL, HIGH)])


def test_whom_a_coordinator_refuses_holds_no_place_and_gets_none():
    world = World()
    world.report(wanted(1, part=LOW), wanted(1, part=HIGH))
    offer = world.lease(WILL)
    world.report(wanted(1, part=LOW), wanted(1, part=HIGH), refused=(WILL,))
    assert world.market.lease_count == 0
    assert world.renew(WILL, offer, 9) == (0.0, "unknown or ended lease")
    assert isinstance(world.poll(WILL), float)
    assert world.market.renew(WILL, "made-up", KEY, progress=1, now=world.now)[0] == 0
    world.report(wanted(1), issuer=CORA, model=OTHER_MODEL)
    world.now += 60.0
    assert world.lease(WILL).coordinator == CORA  # what one says counts for its own slices
    world.report(wanted(1, WILL, part=LOW), refused=())
    assert world.market.renew(WILL, offer.lease, KEY, progress=1, now=world.now)[0] > 0
    world.report(wanted(1, WILL, part=LOW), refused=(WILL,))  # it contradicts itself: a proven copy counts
    assert (LOW, 1, 1, 0) in world.counts()


def test_workers_that_were_proven_once_come_before_unknown_ones_while_there_are_enough_of_them():
    world = World()
    world.report(wanted(1), ttl_s=1e6)
    offer = world.lease(WILL)
    world.report(wanted(1, WILL), ttl_s=1e6)
    world.market.release(WILL, offer.lease, world.now)
    world.report(wanted(1, part=HIGH), ttl_s=1e6)
    assert world.poll(WANDA) == LIMITS.stand_back_s
    world.report(wanted(1, part=HIGH), wanted(1, part=SliceId(1, 0, 3)), ttl_s=1e6)
    world.lease(WANDA)  # two are open, and only one is known
    assert world.poll(WU) == LIMITS.stand_back_s
    world.now += LIMITS.stand_back_s
    world.lease(WU)  # WILL had its chance


def test_machines_of_one_range_of_addresses_hold_so_many_unproven_leases_and_no_more():
    world = World(limits=replace(LIMITS, unproven_per_address_max=2, leases_max=100))
    world.report(wanted(50))
    near = [world.poll(PeerId(f"near {n}"), address=f"/ip4/198.51.100.{n}/tcp/1") for n in range(5)]
    assert [isinstance(answer, LeaseOffer) for answer in near] == [True, True, False, False, False]
    world.lease(WILL, address="/ip4/203.0.113.1/tcp/1")
    world.report(wanted(50, PeerId("near 0")))
    world.lease(PeerId("near 3"), address="/ip4/198.51.100.3/tcp/1")


def test_who_came_to_nothing_before_gets_what_others_have_left():
    world = World()
    world.report(wanted(1), ttl_s=1e6)
    world.lease(WILL)
    world.now = 15.0  # never heard of again
    world.lease(WANDA)
    world.now = 80.0
    world.report(wanted(1), wanted(1, part=HIGH), ttl_s=1e6)
    assert isinstance(world.poll(WILL), float)
    assert world.lease(WU).slice == HIGH
    world.report(wanted(2), ttl_s=1e6)
    world.now += 4.0
    assert world.lease(WILL).slice == LOW


def test_a_lease_that_is_late_is_open_again_and_the_first_to_be_proven_stays():
    world = World(limits=replace(LIMITS, leases_max=1000))
    peers = [PeerId(f"peer {number}") for number in range(30)]
    world.report(wanted(30), ttl_s=1e6)
    crew = [(peer, world.lease(peer)) for peer in peers]
    world.keep(6.0, *crew, progress=True)
    world.report(wanted(30, *peers[:27]), ttl_s=1e6)
    world.keep(12.0, *crew, progress=True)
    assert isinstance(world.poll(WILL), float)
    world.keep(24.0, *crew, progress=True)  # later than a quarter of the patience: 2 of 3, eight in a hundred of 30
    replaced = [(worker, world.lease(worker)) for worker in (WILL, WANDA)]
    assert isinstance(world.poll(WU), float)
    world.report(wanted(30, *peers[:28], WILL, WANDA), ttl_s=1e6)
    verdicts = {worker: world.renew(worker, offer, 99)[0] > 0 for worker, offer in (*crew, *replaced)}
    assert [worker for worker, stays in verdicts.items() if not stays] == [peers[28]]
    world.report(wanted(32, *peers[:28], WILL, WANDA), ttl_s=1e6)
    assert isinstance(world.poll(peers[28]), float)  # overtaken: it waits before the next
    world.lease(WU)


def test_a_copy_that_was_never_wanted_goes_without_tenure():
    world = World(started_at=0.0)
    world.report(wanted(1, WILL), ttl_s=1e6)
    assert world.market.renew(WILL, "old.1", KEY, progress=1, now=0.0)[0] > 0
    assert world.market.renew(WANDA, "old.2", KEY, progress=1, now=0.0)[0] > 0
    world.report(wanted(1, WILL, WANDA), ttl_s=1e6)
    world.now = 5.0  # the grace is over, the tenure is not
    assert world.market.renew(WILL, "old.1", KEY, progress=2, now=world.now)[0] > 0
    assert world.market.renew(WANDA, "old.2", KEY, progress=2, now=world.now) == (0.0, "no longer needed")
    world.report(wanted(1, WILL), ttl_s=1e6)
    assert world.counts() == [(LOW, 1, 1, 0)]


def served_by(*workers: PeerId) -> tuple[World, list[LeaseOffer]]:
    """A copy for each worker, granted a second after the other, renewed together every 3 s, and proven."""
    world = World()
    world.report(wanted(len(workers)))
    offers = []
    for worker in workers:
        offers.append(world.lease(worker))
        world.now += 1.0
    world.keep(world.now + 9.0, *zip(workers, offers, strict=True))
    world.report(wanted(len(workers), *workers))
    return world, offers


def test_a_machine_that_is_gone_is_replaced_as_soon_as_it_misses_a_renewal():
    world, _ = served_by(WILL)
    renewed_at = world.now
    world.now += 1.0
    world.report(wanted(1))  # its coordinator has lost it
    assert world.counts() == [(LOW, 1, 0, 1)]
    world.now = renewed_at + 1.24 * 3.0
    assert isinstance(world.poll(WANDA), float)
    world.now = renewed_at + 1.26 * 3.0  # its lease would end 15 s after the renewal
    assert isinstance(world.poll(WANDA), LeaseOffer)
    assert world.counts() == [(LOW, 1, 0, 1)]
    assert isinstance(world.poll(WILL), float)


def test_law_8_who_is_lost_by_its_coordinator_but_renews_keeps_its_lease():
    world, (offer,) = served_by(WILL)
    world.report(wanted(1))
    world.keep(world.now + 12.0, (WILL, offer))
    world.now += 14.0  # late now, but not missed: it has been heard of since
    assert world.renew(WILL, offer, progress=1)[0] > 0
    world.report(wanted(1, WILL))
    assert world.counts() == [(LOW, 1, 1, 0)]


def test_a_renewal_that_is_late_ends_no_lease_that_its_coordinator_counts_on():
    world, (offer,) = served_by(WILL)
    world.now += 14.0
    assert isinstance(world.poll(WANDA), float)
    assert world.renew(WILL, offer)[0] > 0


def test_how_often_a_worker_renews_is_not_told_by_its_first_renewal():
    world = World()
    world.report(wanted(1))
    offer = world.lease(WILL)
    for now in (0.5, 1.0):  # it renews other leases then, and this one along
        world.now = now
        assert world.renew(WILL, offer)[0] > 0
    world.report(wanted(1, WILL))
    world.report(wanted(1))
    world.now = 1.0 + 1.24 * LIMITS.lease_ttl_s / 3
    assert world.renew(WILL, offer)[0] > 0


def test_a_hub_that_has_just_begun_first_meets_the_others():
    world = World(started_at=0.0)
    world.report(wanted(1))
    assert world.poll(WILL) == MEET_S
    world.now = MEET_S - 0.5
    assert world.poll(WILL) == 0.5
    world.now = MEET_S
    assert isinstance(world.poll(WILL), LeaseOffer)


def test_entries_of_leases_that_ended_do_not_gather():
    world = World()
    world.report(wanted(1))
    for _ in range(5000):
        world.market.release(WILL, world.lease(WILL).lease, world.now)
    assert len(world.market._due) <= DUE_SLACK + 2
    world.lease(WILL)
    world.now = 15.0
    world.market.tick(world.now)
    assert world.market.lease_count == 0


def test_simultaneous_askers_get_different_slices():
    world = World()
    world.report(wanted(1, part=LOW), wanted(1, part=HIGH))
    assert {world.lease(worker).slice for worker in (WILL, WANDA)} == {LOW, HIGH}
    assert isinstance(world.poll(WU), float)


def test_a_worker_never_holds_two_leases_on_one_slice():
    world = World()
    world.report(wanted(2))
    world.lease(WILL)
    assert isinstance(world.poll(WILL), float)
    world.lease(WANDA)


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        ({"sequence": 1}, RejectReason.STALE),  # a replay
        ({"sequence": 0}, RejectReason.STALE),
        ({"wall": WALL - 601}, RejectReason.STALE),
        ({"wall": WALL + 601}, RejectReason.STALE),
        ({"issuer": PeerId("third")}, RejectReason.TOO_MANY),
    ],
)
def test_a_record_that_is_refused_changes_nothing(second, reason):
    world = World()
    world.report(wanted(1), sequence=1)
    world.report(wanted(1), issuer=CORA, model=OTHER_MODEL, sequence=1)
    before = world.market.table()
    assert world.report(wanted(7), **second) is reason
    assert world.market.table() == before


def test_a_replay_of_demand_that_has_expired_changes_nothing():
    world = World()
    world.report(wanted(1), sequence=1, ttl_s=30.0)
    world.now = 31.0
    world.market.tick(world.now)
    assert world.counts() == []
    assert world.report(wanted(1), sequence=1, wall=WALL) is RejectReason.STALE
    assert world.counts() == []
    assert world.report(wanted(1), sequence=2) is None


def test_what_was_heard_of_issuers_that_left_is_bounded():
    world = World()
    for number in range(100):
        assert world.report(wanted(1), issuer=PeerId(f"coordinator {number}"), ttl_s=0.5) is None
        world.now += 1.0
        world.market.tick(world.now)
    assert len(world.market._heard) == LIMITS.issuers_max * Market.REMEMBERED_PER_ISSUER


def test_only_what_the_coordinator_lists_counts_as_proven():
    world = World()
    world.report(wanted(1))
    offer = world.lease(WILL)
    world.keep(30.0, (WILL, offer), progress=True)  # it renews as if it served: still only leased
    assert world.counts() == [(LOW, 1, 0, 1)]
    world.report(wanted(1), issuer=CORA, model=OTHER_MODEL)
    world.report(wanted(1, WILL), issuer=CORA, model=OTHER_MODEL)  # what another coordinator says counts there alone
    assert [(e.model, e.proven, e.leased) for e in sorted(world.market.table(), key=lambda e: e.model != MODEL)] == [
        (MODEL, 0, 1),
        (OTHER_MODEL, 1, 0),
    ]


def test_two_coordinators_of_one_model_share_a_row_and_have_leases_of_their_own():
    world = World()
    world.report(wanted(1), issuer=CARL)
    world.report(wanted(1), issuer=CORA)
    assert world.market.table() == (TableEntry(MODEL, LOW, 2, 0, 0),)
    assert {world.lease(worker).coordinator for worker in (WILL, WANDA)} == {CARL, CORA}
    assert world.market.table() == (TableEntry(MODEL, LOW, 2, 0, 2),)


# Leases end -----------------------------------------------------------------------------------------------------


def test_a_lease_that_is_not_renewed_is_open_again():
    world = World()
    world.report(wanted(1))
    offer = world.lease(WILL)
    world.renew(WILL, offer, progress=1)
    world.now = 14.9
    assert isinstance(world.poll(WANDA), float)
    world.now = 15.0
    assert world.lease(WANDA).slice == LOW
    assert world.renew(WILL, offer, progress=2) == (0.0, "unknown or ended lease")


def test_a_lease_without_progress_ends_and_its_worker_waits_longer_each_time():
    world = World()
    world.report(wanted(1), ttl_s=1e6)
    for wait_s in (60.0, 120.0, 240.0):
        offer = world.lease(WILL)
        began_at = world.now
        world.keep(began_at + 60.0, (WILL, offer))
        world.now += 1.0
        assert world.renew(WILL, offer)[0] == 0
        struck_at = world.now
        world.now = struck_at + wait_s - 1.0
        assert isinstance(world.poll(WILL), float)
        world.now = struck_at + wait_s


def test_a_worker_that_takes_a_lease_and_is_never_heard_of_again_waits_too():
    world = World()
    world.report(wanted(1))
    world.lease(WILL)
    world.now = 15.0
    world.market.tick(world.now)
    assert isinstance(world.poll(WILL), float)
    assert world.lease(WANDA).slice == LOW


def test_progress_for_ever_without_proof_ends_too():
    world = World()
    world.report(wanted(1), ttl_s=1e6)
    offer = world.lease(WILL)
    world.keep(600.0, (WILL, offer), progress=True)
    world.now = 601.0
    assert world.renew(WILL, offer, 9999)[0] == 0


def test_a_large_slice_may_take_as_long_as_a_slow_link_needs():
    world = World()
    world.report(wanted(1), ttl_s=1e6, slice_bytes=1 << 28)
    offer = world.lease(WILL)
    world.keep(1070.0, (WILL, offer), progress=True)  # 2^28 bytes at 250 kB a second
    world.now = 1075.0
    assert world.renew(WILL, offer, 9999)[0] == 0


def test_proof_wipes_the_slate_clean():
    world = World()
    world.report(wanted(1), ttl_s=1e6)
    offer = world.lease(WILL)
    world.now = 15.0
    assert isinstance(world.poll(WILL), float)
    world.now = 75.0
    offer = world.lease(WILL)
    world.report(wanted(1, WILL))
    world.market.release(WILL, offer.lease, world.now)
    world.report(wanted(1))
    assert world.lease(WILL).slice == LOW


def test_a_proof_that_is_lost_gives_the_lease_time_to_be_proven_again():
    world = World()
    world.report(wanted(1), ttl_s=1e6)
    offer = world.lease(WILL)
    world.report(wanted(1, WILL), ttl_s=1e6)
    world.keep(300.0, (WILL, offer))
    world.report(wanted(1), ttl_s=1e6)
    world.keep(359.0, (WILL, offer))
    world.now = 361.0
    assert world.renew(WILL, offer)[0] == 0


def test_a_lease_given_back_is_open_at_once_and_only_its_holder_can_give_it_back():
    world = World()
    world.report(wanted(1))
    offer = world.lease(WILL)
    world.market.release(WANDA, offer.lease, 0.0)
    world.market.release(WILL, "no such lease", 0.0)
    assert isinstance(world.poll(WANDA), float)
    world.market.release(WILL, offer.lease, world.now)
    assert world.lease(WANDA).slice == LOW


@pytest.mark.parametrize("change", ["worker", "slice", "coordinator"])
def test_a_renewal_that_is_not_the_lease_s_own_is_refused_and_harms_nobody(change):
    world = World()
    world.report(wanted(1, part=LOW), wanted(0, part=HIGH))
    offer = world.lease(WILL)
    worker, key = WILL, (CARL, MODEL, LOW)
    match change:
        case "worker":
            worker = WANDA
        case "slice":
            key = (CARL, MODEL, HIGH)
        case "coordinator":
            key = (CORA, MODEL, LOW)
    assert world.market.renew(worker, offer.lease, key, progress=1, now=0.0) == (0.0, "unknown or ended lease")
    assert world.renew(WILL, offer)[0] > 0


# Surplus --------------------------------------------------------------------------------------------------------


def proven_crew(world: World) -> list[tuple[PeerId, LeaseOffer]]:
    """WILL, WANDA and WU hold LOW, proven in this order at 0, 1 and 2 s."""
    world.report(wanted(3), ttl_s=1e6)
    crew = [(worker, world.lease(worker)) for worker in (WILL, WANDA, WU)]
    for count in (1, 2, 3):
        world.report(wanted(3, *(worker for worker, _ in crew[:count])), ttl_s=1e6)
        world.now += 1.0
    return crew


@pytest.mark.parametrize(
    ("rtt_s", "layers"),
    [
        (0.0, [0, 1, 2, 0, 1, 2]),  # near, or not measured yet: a share of every layer
        (0.0049, [0, 1, 2, 0, 1, 2]),
        (0.005, [0, 0, 1, 1, 2, 2]),  # far: whole layers, as each costs a round trip
    ],
)
def test_a_worker_far_from_the_coordinator_takes_whole_layers_and_a_near_one_a_share_of_every_layer(rtt_s, layers):
    world = World()
    world.report(*(wanted(1, part=SliceId(layer, first, first + 3)) for first in (0, 4) for layer in range(3)))
    got = [world.lease(WILL, rtt_s=rtt_s).slice.layer for _ in range(6)]
    assert got == layers


def test_a_far_worker_completes_its_layer_though_others_are_scarcer():
    world = World()
    last = SliceId(0, 8, 11)
    world.report(wanted(2, part=LOW), wanted(2, part=HIGH))
    first = world.lease(WILL, rtt_s=0.1)
    world.report(
        wanted(2, part=LOW), wanted(2, part=HIGH), wanted(2, WANDA, part=last), wanted(2, part=SliceId(1, 0, 3))
    )
    assert world.lease(WILL, rtt_s=0.1).slice.layer == first.slice.layer == 0
    assert world.lease(WILL, rtt_s=0.1).slice == last
    assert world.lease(WILL, rtt_s=0.1).slice.layer == 1


def test_leases_that_are_renewed_together_are_judged_each_by_itself_in_order():
    world = World()
    world.report(wanted(1, part=LOW), wanted(1, part=HIGH), ttl_s=1e6)
    low, high = world.lease(WILL), world.lease(WILL)
    reports = [
        LeaseReport(low.lease, (CARL, MODEL, low.slice), 1),
        LeaseReport("made up", (CARL, MODEL, high.slice), 1),
        LeaseReport(high.lease, (CARL, MODEL, high.slice), 1),
    ]
    ended = (0.0, "unknown or ended lease")
    assert world.market.renew_all(WILL, reports, 1.0) == [(15.0, ""), ended, (15.0, "")]
    assert world.market.renew_all(WANDA, reports, 1.0) == [ended] * 3


def test_the_smallest_slice_of_a_model_is_what_a_node_needs_room_for():
    world = World()
    world.report(wanted(1), slice_bytes=100)
    world.report(wanted(1), issuer=CORA, slice_bytes=70)
    assert world.market.slice_bytes() == {MODEL: 70}


def test_surplus_leaves_one_by_one_the_least_useful_first():
    world = World()
    crew = proven_crew(world)
    world.keep(30.0, *crew)
    world.report(wanted(1, WILL, WANDA, WU), ttl_s=1e6)
    world.now = 36.0
    assert [world.renew(worker, offer)[0] > 0 for worker, offer in crew] == [True, True, False]  # WU, proven last
    assert [world.renew(worker, offer)[0] > 0 for worker, offer in crew[:2]] == [True, False]
    world.report(wanted(1, WILL), ttl_s=1e6)
    assert world.renew(*crew[0])[0] > 0
    world.now += 14.0
    assert world.renew(*crew[0])[0] > 0  # one is wanted, one is there


def test_an_unproven_copy_is_less_useful_than_any_proven_one():
    world = World()
    world.report(wanted(2), ttl_s=1e6)
    first, second = world.lease(WILL), world.lease(WANDA)
    world.report(wanted(2, WANDA), ttl_s=1e6)
    world.keep(20.0, (WILL, first), (WANDA, second), progress=True)
    world.report(wanted(1, WANDA), ttl_s=1e6)
    world.now = 26.0
    assert world.renew(WANDA, second, 99)[0] > 0
    assert world.renew(WILL, first, 99) == (0.0, "no longer needed")


@pytest.mark.parametrize(("gone_for_s", "goes"), [(4.9, False), (5.0, True)])
def test_nobody_is_let_go_before_the_grace_is_over(gone_for_s, goes):
    world = World()
    crew = proven_crew(world)
    world.keep(30.0, *crew)
    world.report(wanted(0, WILL, WANDA, WU), ttl_s=1e6)
    world.now = 30.0 + gone_for_s
    assert (world.renew(*crew[2])[0] == 0) is goes


def test_demand_that_comes_back_within_the_grace_keeps_everybody():
    world = World()
    crew = proven_crew(world)
    world.keep(30.0, *crew)
    world.report(wanted(0, WILL, WANDA, WU), ttl_s=1e6)
    world.now = 34.0
    world.report(wanted(3, WILL, WANDA, WU), ttl_s=1e6)
    world.now = 36.0
    assert all(world.renew(worker, offer)[0] > 0 for worker, offer in crew)


@pytest.mark.parametrize(("served_s", "goes"), [(9.0, False), (10.0, True)])
def test_nobody_is_let_go_before_its_tenure_is_over(served_s, goes):
    world = World()
    world.report(wanted(1), ttl_s=1e6)
    offer = world.lease(WILL)
    world.report(wanted(1, WILL), ttl_s=1e6)
    world.report(wanted(0, WILL), ttl_s=1e6)
    world.now = served_s
    assert (world.renew(WILL, offer)[0] == 0) is goes


# Restarts and hostile renewals ----------------------------------------------------------------------------------

KEY = (CARL, MODEL, LOW)


def test_a_hub_that_restarted_takes_over_the_leases_it_does_not_know():
    world = World(started_at=0.0)
    assert world.market.renew(WILL, "old.7", KEY, progress=3, now=0.0) == (15.0, "")
    assert world.market.table() == (TableEntry(MODEL, LOW, 0, 0, 1),)
    world.now = 9.0  # the coordinator repeats its demand after 10 s: until it can have, nobody is surplus
    assert world.market.renew(WILL, "old.7", KEY, progress=3, now=world.now) == (15.0, "")
    world.now = 10.0
    world.report(wanted(1, WILL))
    assert world.counts() == [(LOW, 1, 1, 0)]
    assert isinstance(world.poll(WANDA), float)


def test_a_lease_taken_over_whose_coordinator_never_reports_ends():
    world = World(started_at=0.0)
    for now in (0.0, 7.0, 14.0):
        assert world.market.renew(WILL, "old.7", KEY, progress=3, now=now)[0] > 0
    assert world.market.renew(WILL, "old.7", KEY, progress=3, now=21.0) == (0.0, "no longer needed")


def test_a_hub_that_knows_the_demand_takes_over_only_what_is_wanted():
    world = World()
    world.report(wanted(1, WILL, part=LOW), wanted(1, part=HIGH))
    assert world.market.renew(WILL, "other.1", KEY, progress=1, now=0.0)[0] > 0  # proven
    assert world.market.renew(WANDA, "other.2", KEY, progress=1, now=0.0)[0] == 0  # one too many
    assert world.market.renew(WU, "other.3", (CARL, MODEL, HIGH), progress=1, now=0.0)[0] > 0  # open
    assert world.market.renew(WU, "other.4", (CORA, OTHER_MODEL, HIGH), progress=1, now=0.0)[0] == 0  # unknown
    assert world.market.lease_count == 2


def test_nobody_takes_over_a_lease_on_its_own_demand():
    world = World(started_at=0.0)
    world.report(wanted(1))
    assert world.market.renew(CARL, "made-up", KEY, progress=1, now=0.0)[0] == 0


def test_a_worker_that_must_wait_cannot_make_up_a_lease_instead():
    world = World()
    world.report(wanted(1))
    world.lease(WILL)
    world.now = 15.0
    world.market.tick(world.now)
    assert world.market.renew(WILL, "made-up", KEY, progress=1, now=world.now)[0] == 0


def test_a_made_up_lease_id_does_not_collide_with_one_that_is_granted_later():
    world = World()
    world.report(wanted(1, part=LOW), wanted(1, part=HIGH))
    assert world.market.renew(WU, "hub.1", KEY, progress=1, now=0.0)[0] > 0
    offer = world.lease(WILL)
    assert offer.lease != "hub.1"
    assert world.market.lease_count == 2
    world.now = 1000.0
    world.market.tick(world.now)
    assert world.market.lease_count == 0
    assert world.market.table() == ()


def test_leases_are_bounded():
    world = World()
    world.report(wanted(100))
    answers = [world.poll(PeerId(f"worker {number}")) for number in range(20)]
    assert sum(isinstance(answer, LeaseOffer) for answer in answers) == LIMITS.leases_max == world.market.lease_count
    assert world.market.renew(WU, "made-up", KEY, progress=1, now=0.0)[0] == 0


def test_the_table_of_pollers_is_bounded():
    limits = MarketLimits(15.0, 60.0, 10.0, 5.0, 8, 2, 600.0, 2.0, pollers_max=10)
    world = World(limits=limits)
    for number in range(50):
        world.poll(PeerId(f"worker {number}"))
    assert world.market.idle_count(world.now) == 10


# Any order ------------------------------------------------------------------------------------------------------

MODEL_OF = {CARL: MODEL, CORA: OTHER_MODEL}  # so that a row of the table is one coordinator's
WORKERS = [WILL, WANDA, WU, CARL]
parts = st.sampled_from([LOW, HIGH])


class AnyOrder(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World(started_at=-MEET_S)
        self.heard: set[PeerId] = set()
        self.held: dict[str, tuple[PeerId, LeaseOffer]] = {}
        self.ids: set[str] = set()

    @rule(
        issuer=st.sampled_from([CARL, CORA]),
        wants=st.dictionaries(
            parts, st.tuples(st.integers(0, 3), st.lists(st.sampled_from(WORKERS[:3]), unique=True, max_size=3))
        ),
        ttl_s=st.sampled_from([10.0, 1000.0]),
    )
    def report(self, issuer, wants, ttl_s):
        told = [Wanted(part, want, tuple(proven)) for part, (want, proven) in wants.items()]
        assert self.world.report(*told, issuer=issuer, model=MODEL_OF[issuer], ttl_s=ttl_s) is None
        self.heard.add(issuer)

    @rule(issuer=st.sampled_from([CARL, CORA]))
    def replay(self, issuer):
        if issuer in self.heard:
            before = self.world.market.table()
            refused = self.world.report(wanted(9), issuer=issuer, model=MODEL_OF[issuer], sequence=0)
            assert refused is RejectReason.STALE
            assert self.world.market.table() == before

    @rule(worker=st.sampled_from(WORKERS))
    def poll(self, worker):
        mine = {(o.model, o.slice) for w, o in self.held.values() if w == worker}
        answer = self.world.poll(worker, busy=mine)
        if isinstance(answer, float):
            assert answer >= LIMITS.poll_interval_s
            return
        assert answer.coordinator != worker
        assert (answer.model, answer.slice) not in mine
        assert answer.lease not in self.ids
        self.ids.add(answer.lease)
        self.held[answer.lease] = (worker, answer)
        entry = next(e for e in self.world.market.table() if (e.model, e.slice) == (answer.model, answer.slice))
        assert entry.proven + entry.leased <= entry.want

    @rule(data=st.data(), progress=st.integers(0, 100))
    def renew(self, data, progress):
        if self.held:
            worker, offer = self.held[data.draw(st.sampled_from(sorted(self.held)))]
            ttl_s, reason = self.world.renew(worker, offer, progress)
            assert (ttl_s, reason) in ((15.0, ""), (0.0, "no longer needed"), (0.0, "unknown or ended lease"))
            if ttl_s == 0.0:
                del self.held[offer.lease]

    @rule(data=st.data())
    def release(self, data):
        if self.held:
            lease = data.draw(st.sampled_from(sorted(self.held)))
            self.world.market.release(self.held.pop(lease)[0], lease, self.world.now)

    @rule(worker=st.sampled_from(WORKERS), number=st.integers(0, 9), part=parts)
    def make_up_a_lease(self, worker, number, part):
        key = (CARL, MODEL, part)
        self.world.market.renew(worker, f"hub.{number}", key, progress=1, now=self.world.now)

    @rule(passed_s=st.sampled_from([0.5, 5.0, 16.0, 61.0]))
    def time_passes(self, passed_s):
        self.world.now += passed_s
        self.world.market.tick(self.world.now)

    @invariant()
    def everything_is_bounded_and_nothing_is_negative(self):
        market = self.world.market
        assert market.lease_count <= LIMITS.leases_max
        assert market.coordinator_count <= LIMITS.issuers_max
        entries = market.table()
        assert all(min(e.want, e.proven, e.leased) >= 0 for e in entries)
        assert sum(e.leased for e in entries) <= market.lease_count

    def teardown(self):
        self.world.now += 10_000.0
        self.world.market.tick(self.world.now)
        assert self.world.market.lease_count == 0
        assert self.world.market.table() == ()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=100, stateful_step_count=40, deadline=None, derandomize=True)
