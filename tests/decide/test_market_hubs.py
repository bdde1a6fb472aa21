"""Several hubs of one swarm: they grant, and let go, as one would."""

import random

import pytest

from kvasir_node.base.ids import DAG_CBOR_CODEC, ModelId, PeerId, SliceId, cid_of
from kvasir_node.decide.demand import Wanted
from kvasir_node.decide.market import MEET_S, Demand, LeaseOffer, LeaseReport, Market, MarketLimits
from kvasir_node.decide.market_offers import OTHERS_FIRST_S

CARL, MODEL = PeerId("carl"), ModelId(cid_of(b"model", DAG_CBOR_CODEC))
PARTS = tuple(SliceId(0, n, n) for n in range(40))
LIMITS = MarketLimits(15.0, 60.0, 10.0, 5.0, 1000, 10, 600.0, 2.0)


class Swarm:
    """Hubs that hear the same coordinator, and each other when told to; unless `strangers`, they have met."""

    def __init__(self, count: int, *, started_at: float = -100.0, strangers: bool = False) -> None:
        self.now = 0.0
        self.hubs = [Market(LIMITS, f"hub{number}", started_at) for number in range(count)]
        self.wants: dict[SliceId, Wanted] = {}
        self.held: dict[str, tuple[PeerId, LeaseOffer, int]] = {}  # and the hub that renews it
        self.sequence = 0
        if not strangers:
            self.share(all_of_it=True)

    def report(self, *wants: Wanted) -> None:
        self.sequence += 1
        demand = Demand(CARL, 1, self.sequence, self.now, 1e6, MODEL, "float32", 1, (), wants)
        for hub in self.hubs:
            assert hub.report(demand, self.now, self.now) is None

    def share(self, *, all_of_it: bool = False) -> None:
        told = [hub.all_news() if all_of_it else hub.news() for hub in self.hubs]
        for number, counts in enumerate(told):
            for other, hub in enumerate(self.hubs):
                if other != number:
                    hub.hear(PeerId(f"peer of hub{number}"), f"hub{number}", counts, self.now, is_all=all_of_it)

    def poll(self, worker: PeerId, number: int) -> LeaseOffer | None:
        answer = self.hubs[number].poll(worker, memory_bytes=1, have=(), busy=(), now=self.now)
        if not isinstance(answer, LeaseOffer):
            return None
        self.held[answer.lease] = worker, answer, number
        return answer

    def renew(self, lease: str) -> bool:
        worker, offer, number = self.held[lease]
        report = LeaseReport(lease, (CARL, MODEL, offer.slice), int(self.now) + 1)
        ((ttl_s, _),) = self.hubs[number].renew_all(worker, [report], self.now)
        if ttl_s <= 0:
            del self.held[lease]
        return ttl_s > 0

    def keep(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1.0
            for lease in list(self.held):
                self.renew(lease)
            self.share()

    def copies(self) -> dict[SliceId, int]:
        found = dict.fromkeys(PARTS, 0)
        for _, offer, _ in self.held.values():
            found[offer.slice] += 1
        return found


def all_wanted(want: int = 1, proven: dict[SliceId, tuple[PeerId, ...]] | None = None) -> list[Wanted]:
    return [Wanted(part, want, (proven or {}).get(part, ())) for part in PARTS]


def test_hubs_fill_different_slices_first_so_that_askers_of_the_same_second_do_not_collide():
    swarm = Swarm(2)
    swarm.report(*all_wanted())
    for number in range(16):
        assert swarm.poll(PeerId(f"worker {number}"), number % 2) is not None
    assert max(swarm.copies().values()) == 1


def test_hubs_that_begin_when_demand_does_grant_no_more_than_one_would():
    swarm = Swarm(3, started_at=0.0, strangers=True)
    swarm.report(*all_wanted())
    asked = 0
    while swarm.now < MEET_S + OTHERS_FIRST_S + 1.0:
        for number in (0, 1, 2) * 3:
            asked += 1
            swarm.poll(PeerId(f"worker {asked}"), number)
        if swarm.now == MEET_S - 0.5:
            swarm.share(all_of_it=True)  # they have found each other
        elif swarm.now > MEET_S:
            swarm.share()
        swarm.now += 0.5
    assert set(swarm.copies().values()) == {1}


def test_what_another_hub_fills_first_is_left_to_it_as_long_as_it_grants_anything():
    swarm = Swarm(2)
    swarm.report(*all_wanted())
    granted = 0
    while swarm.poll(PeerId(f"worker {granted}"), 0) is not None:
        granted += 1
    assert 10 < granted < 30  # about half of 40
    for second in range(1, 8):
        swarm.now = float(second)
        if second < 4:
            assert swarm.poll(PeerId(f"worker of the other {second}"), 1) is not None
        swarm.share()
        assert (swarm.poll(PeerId(f"worker {second}"), 0) is None) is (second < 6)


def test_a_hub_that_nobody_asks_leaves_nothing_open():
    swarm = Swarm(2)
    swarm.report(*all_wanted())
    swarm.now += OTHERS_FIRST_S
    for number in range(len(PARTS)):
        assert swarm.poll(PeerId(f"worker {number}"), 0) is not None
    swarm.share()
    assert swarm.poll(PeerId("late"), 1) is None
    assert [hub.open_copies for hub in swarm.hubs] == [0, 0]


@pytest.mark.parametrize("hubs", [2, 3, 5])
def test_what_was_granted_twice_while_hubs_were_apart_is_granted_once_again_within_a_grace(hubs):
    swarm = Swarm(hubs)
    swarm.report(*all_wanted())
    swarm.now += OTHERS_FIRST_S
    for number in range(hubs * len(PARTS)):  # apart: each grants all
        assert swarm.poll(PeerId(f"worker {number}"), number % hubs) is not None
    assert set(swarm.copies().values()) == {hubs}
    swarm.keep(10)
    assert set(swarm.copies().values()) == {1}
    assert all(hub.open_copies == 0 for hub in swarm.hubs)


def test_of_proven_copies_hubs_let_the_same_ones_go_whoever_granted_them():
    swarm = Swarm(3)
    swarm.report(*all_wanted(3))
    for number in range(3 * len(PARTS)):
        asked = (swarm.poll(PeerId(f"worker {number}"), (number + turn) % 3) for turn in range(3))
        assert next(filter(None, asked), None) is not None
        swarm.share()
    assert set(swarm.copies().values()) == {3}
    order = random.Random(1)
    proven = {part: [w for w, offer, _ in swarm.held.values() if offer.slice == part] for part in PARTS}
    for peers in proven.values():
        order.shuffle(peers)
    best = {part: peers[0] for part, peers in proven.items()}
    for _ in range(20):
        here = {worker: offer.slice for worker, offer, _ in swarm.held.values()}
        told = {part: tuple(w for w in peers if here.get(w) == part) for part, peers in proven.items()}
        assert all(told.values())  # nobody is let go that should have stayed
        swarm.report(*all_wanted(3 if swarm.now < 12 else 1, told))
        swarm.keep(2)
    assert {offer.slice: worker for worker, offer, _ in swarm.held.values()} == best


def test_when_a_hub_dies_another_takes_its_leases_over_also_those_that_are_not_proven():
    swarm = Swarm(2)
    swarm.report(*all_wanted())
    swarm.now += OTHERS_FIRST_S
    for number in range(len(PARTS)):
        assert swarm.poll(PeerId(f"worker {number}"), 1) is not None
    swarm.share()
    dead = swarm.hubs.pop()
    swarm.held = {lease: (worker, offer, 0) for lease, (worker, offer, _) in swarm.held.items()}
    assert all(swarm.renew(lease) for lease in list(swarm.held))
    assert swarm.hubs[0].lease_count == dead.lease_count == len(PARTS)
    assert swarm.hubs[0].open_copies == 0
    assert swarm.poll(PeerId("late"), 0) is None
    swarm.now += LIMITS.told_ttl_s
    swarm.hubs[0].tick(swarm.now)  # the leases were not renewed meanwhile: all is open, nothing counts twice
    assert swarm.hubs[0].open_copies == len(PARTS)


def test_a_worker_cannot_make_up_leases_of_another_hub():
    swarm = Swarm(2)
    swarm.report(Wanted(PARTS[0], 1, ()))
    swarm.now += OTHERS_FIRST_S
    assert swarm.poll(PeerId("will"), 1) is not None
    swarm.share()
    reports = [LeaseReport(f"hub1.{n}", (CARL, MODEL, PARTS[0]), 1) for n in range(9)]
    verdicts = [
        swarm.hubs[0].renew_all(PeerId(f"liar {n}"), [report], swarm.now)[0][0] for n, report in enumerate(reports)
    ]
    assert sum(ttl_s > 0 for ttl_s in verdicts) == 1  # one lease was told of, and one is taken over
    assert swarm.hubs[0].lease_count == 1


def test_a_hub_that_is_silent_no_longer_counts_and_its_slices_are_filled_by_others():
    swarm = Swarm(2)
    swarm.report(*all_wanted())
    swarm.now += OTHERS_FIRST_S
    for number in range(20):
        assert swarm.poll(PeerId(f"worker {number}"), 1) is not None
    swarm.share()
    (hub, _) = swarm.hubs
    assert hub.open_copies == 20
    hub.tick(swarm.now + LIMITS.told_ttl_s - 0.1)
    assert hub.open_copies == 20
    hub.tick(swarm.now + LIMITS.told_ttl_s)
    assert hub.open_copies == 40


def test_a_hub_that_restarted_has_a_new_name_and_what_it_told_before_is_forgotten():
    swarm = Swarm(2)
    swarm.report(*all_wanted())
    hub, peer = swarm.hubs[0], PeerId("peer of hub1")
    hub.hear(peer, "hub1", {(CARL, MODEL, part): 1 for part in PARTS[:30]}, 0.0, is_all=False)
    assert hub.open_copies == 10
    hub.hear(peer, "hub1", {(CARL, MODEL, PARTS[0]): 0}, 0.0, is_all=False)
    assert hub.open_copies == 11
    hub.hear(peer, "hub1 anew", {(CARL, MODEL, PARTS[1]): 1}, 1.0, is_all=True)
    assert hub.open_copies == 39
    hub.hear(peer, "hub1 anew", {}, 2.0, is_all=True)
    assert hub.open_copies == 40
    assert hub.table()[0].leased == 0


def test_hubs_and_what_they_tell_are_bounded():
    limits = MarketLimits(15.0, 60.0, 10.0, 5.0, 5, 10, 600.0, 2.0, hubs_max=3)
    hub = Market(limits, "hub", 0.0)
    for number in range(10):
        told = {(CARL, MODEL, part): 1 for part in PARTS}
        hub.hear(PeerId(f"peer {number}"), f"hub{number}", told, 0.0, is_all=False)
    assert sum(entry.leased for entry in hub.table()) == 3 * 5
    assert len(hub._books) == 5
    hub.tick(limits.told_ttl_s)
    assert hub.table() == ()
