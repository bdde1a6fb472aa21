"""Law 7: every table of every machine has a bound, however many peers, slices, addresses or requests come."""

import random
from collections.abc import Sized

from kvasir_node.base.ids import DAG_CBOR_CODEC, ModelId, PeerId, SliceId, cid_of
from kvasir_node.decide.admission import Admission, AdmissionLimits
from kvasir_node.decide.call_times import CallTimes, DeadlineLimits
from kvasir_node.decide.demand import Wanted
from kvasir_node.decide.ledger import Ledger, LedgerLimits
from kvasir_node.decide.market import DUE_SLACK, Demand, Market, MarketLimits
from kvasir_node.decide.placement import Assignment, HubsKnown, OfferReceived, Placement, PlacementLimits

MODEL = ModelId(cid_of(b"model", DAG_CBOR_CODEC))


def largest_table(machine: object) -> int:
    """The size of the largest container among a machine's attributes."""
    names = list(vars(machine)) if hasattr(machine, "__dict__") else list(type(machine).__slots__)
    values = [getattr(machine, name) for name in names]
    return max(len(value) for value in values if isinstance(value, Sized) and not isinstance(value, str))


def test_admission():
    admission = Admission(AdmissionLimits(4, 16, saturated_after_s=0.5, calm_after_s=5.0, calm_busy_ratio=0.75))
    for request in range(1000):
        admission.arrive(request, float(request))
    assert largest_table(admission) == 16


def ledger_limits(**changed: int) -> LedgerLimits:
    return LedgerLimits(5.0, 600.0, 5, 600.0, trials_per_address_max=8, trial_window_s=60.0, **changed)


def test_pairs_of_the_ledger_and_who_is_here_is_not_pushed_out_by_newcomers():
    ledger = Ledger(ledger_limits(pairs_max=50))
    ann, part = PeerId("ann"), SliceId(0, 0, 7)
    ledger.attach(ann, part)
    ledger.begin_trial(ann, part, "192.0.2.1", 0.0)
    ledger.right(ann, part, 0.0)
    ledger.detach(ann, part)
    ledger.attach(ann, part)  # who came back is here
    for number in range(1000):
        ledger.attach(PeerId(f"peer {number}"), part)
    assert largest_table(ledger) == 50
    assert ledger.proven() == ((ann, part),)
    for number in range(1000, 2000):  # those who left make room, longest gone first
        ledger.detach(PeerId(f"peer {number - 1000}"), part)
        ledger.attach(PeerId(f"peer {number}"), part)
        ledger.detach(PeerId(f"peer {number}"), part)
    assert largest_table(ledger) == 50
    assert ledger.proven() == ((ann, part),)


def test_addresses_of_the_ledger():
    ledger = Ledger(ledger_limits(addresses_max=20))
    part = SliceId(0, 0, 7)
    for number in range(200):
        peer, address = PeerId(f"peer {number}"), f"/ip4/192.0.{number}.1"
        ledger.attach(peer, part)
        if ledger.may_try(peer, part, address, 0.0):
            ledger.begin_trial(peer, part, address, 0.0)
        ledger.detach(peer, part)
    assert len(ledger._caps._begun) == 20
    ledger.tick(60.0)
    assert len(ledger._caps._begun) == 0
    ledger.attach(PeerId("late"), part)
    assert ledger.may_try(PeerId("late"), part, "/ip4/198.51.100.1", 60.0)


def test_peers_that_were_caught():
    ledger = Ledger(ledger_limits(strikes_peers_max=50))
    for number in range(1000):
        ledger.caught(PeerId(f"peer {number}"), 0.0, "differs")
    assert largest_table(ledger) == 50


def test_call_times():
    times = CallTimes(DeadlineLimits(4.0, 0.05, 2.0))
    for number in range(CallTimes.PEERS_MAX + 100):
        for pairs in range(0, 65_537, 4096):
            times.observe(PeerId(f"peer {number}"), pairs, 0.1)
    assert largest_table(times) == CallTimes.PEERS_MAX
    assert max(map(len, times._estimates.values())) <= (65_536).bit_length() + 1


def test_market():
    limits = MarketLimits(
        15.0,
        60.0,
        10.0,
        5.0,
        leases_max=30,
        issuers_max=10,
        clock_skew_max_s=600.0,
        poll_interval_s=2.0,
        pollers_max=40,
    )
    market, chance = Market(limits, "hub", 0.0), random.Random(1)
    parts = [SliceId(0, n, n) for n in range(5)]
    for number in range(3000):
        now, peer = number * 0.3, PeerId(f"peer {chance.randrange(500)}")
        wants = tuple(Wanted(part, 100, ()) for part in parts)
        market.report(Demand(peer, number, 1, now, 20.0, MODEL, "float32", 1, (), wants), now, now)
        market.poll(peer, memory_bytes=1, have=(), busy=(), now=now)
        key = (peer, MODEL, chance.choice(parts))
        market.renew(PeerId(f"peer {chance.randrange(500)}"), f"made-up {number}", key, progress=1, now=now)
        assert market.lease_count <= 30
        assert market.coordinator_count <= 10
        assert len(market._idle) <= 40
        assert len(market._strikes) <= 40
        assert len(market._heard) <= 10 * Market.REMEMBERED_PER_ISSUER
        assert len(market._books) <= 10 * len(parts) + 30
        assert len(market._of_origin) <= 30
        assert len(market._due) <= 2 * 30 + DUE_SLACK


def test_placement():
    mind = Placement(PlacementLimits(slices_max=4, poll_interval_s=2.0, renew_interval_s=3.0), random.Random(1))
    mind.handle(HubsKnown((PeerId("hub"),)), 0.0)
    for number in range(100):
        assignment = Assignment(
            f"lease {number}", MODEL, "float32", SliceId(number, 0, 7), PeerId("carl"), (), PeerId("hub")
        )
        mind.handle(OfferReceived(assignment, 15.0), 0.0)
    assert len(mind.stages()) == 4
