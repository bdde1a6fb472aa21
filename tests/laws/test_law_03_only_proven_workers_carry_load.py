"""Law 3: proof belongs to one (peer, slice); who only connected, or only claims, carries and counts nothing."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_node.base.ids import DAG_CBOR_CODEC, ModelId, PeerId, SliceId, cid_of
from kvasir_node.decide.costs import CostBook
from kvasir_node.decide.demand import Demands
from kvasir_node.decide.ledger import Ledger, LedgerLimits, Standing
from kvasir_node.decide.market import Demand, LeaseOffer, Market, MarketLimits
from kvasir_node.decide.planner import PlanLimits, plan
from kvasir_node.decide.prediction import Scene
from kvasir_node.decide.routes import without_unproven

STEADY = settings(max_examples=200, deadline=None, derandomize=True)
LIMITS = LedgerLimits(
    cool_off_s=5.0,
    cool_off_max_s=600.0,
    ban_after=5,
    proof_ttl_s=600.0,
    trials_per_address_max=8,
    trial_window_s=60.0,
)
PEERS = [PeerId("ann"), PeerId("bob")]
LOW, HIGH = SliceId(0, 0, 3), SliceId(0, 4, 7)


def carriers(ledger: Ledger) -> set[tuple[PeerId, SliceId]]:
    """Who gets pairs of which slice, when everything may leave: by a new plan, or by what is left of older routes."""
    proven = tuple(ledger.proven())
    old = without_unproven({0: tuple(PEERS) * 4}, proven)
    rows = [planned_for(proven), old[0]]
    return {(peer, LOW if index < 4 else HIGH) for row in rows for index, peer in enumerate(row) if peer is not None}


@cache
def planned_for(proven: tuple[tuple[PeerId, SliceId], ...]) -> tuple[PeerId | None, ...]:
    costs = CostBook(borrow_s=0.01).costs(0.0, PEERS)  # also of who may carry nothing
    return plan(Scene((0,), 8, 2, 1024, {}, proven, {}), costs, 4, PlanLimits(4.0)).routes[0]


def told(ledger: Ledger) -> set[tuple[PeerId, SliceId]]:
    """Which copies the market hears of as proven."""
    demands = Demands((LOW, HIGH), 1, 5.0)
    demands.observe(0.0, saturated=True, pressure=1.0, load=1.0)
    found = demands.wants((LOW, HIGH), ledger.proven())
    return {(peer, wanted.slice) for wanted in found for peer in wanted.proven}


events = st.lists(
    st.tuples(
        st.sampled_from(["attach", "detach", "begin", "right", "served", "silent", "wrong", "pass time"]),
        st.sampled_from(PEERS),
        st.sampled_from([LOW, HIGH]),
    ),
    max_size=40,
)


@STEADY
@given(events)
def test_load_and_coverage_are_of_pairs_that_passed_a_trial_after_their_last_failure(story):
    ledger, now = Ledger(LIMITS), 0.0
    on_trial, passed = set(), set()
    for event, peer, part in story:
        pair = (peer, part)
        match event:
            case "attach":
                ledger.attach(*pair)
            case "detach":
                ledger.detach(*pair)
                on_trial.discard(pair)
            case "begin" if ledger.may_try(*pair, "192.0.2.1", now):
                ledger.begin_trial(*pair, "192.0.2.1", now)
                on_trial.add(pair)
            case "right" | "served":
                ledger.right(*pair, now, served=event == "served")
                passed |= {pair} & on_trial if event == "right" else set()
                on_trial -= {pair} if event == "right" else set()
            case "silent" | "wrong":
                ledger.failed(*pair, now, event, wrong=event == "wrong")
                on_trial.discard(pair)
                passed.discard(pair)
            case _:
                now += 7.0
        assert carriers(ledger) <= set(ledger.proven()) <= passed
        assert told(ledger) == set(ledger.proven())


def test_proof_of_one_slice_says_nothing_of_another_nor_of_another_peer():
    ledger = Ledger(LIMITS)
    for peer in PEERS:
        for part in (LOW, HIGH):
            ledger.attach(peer, part)
    ledger.begin_trial(PEERS[0], LOW, "192.0.2.1", 0.0)
    assert carriers(ledger) == set()
    ledger.right(PEERS[0], LOW, 0.1)
    assert carriers(ledger) == {(PEERS[0], LOW)}
    assert told(ledger) == {(PEERS[0], LOW)}


def test_coming_back_buys_neither_proof_nor_a_trial():
    ledger = Ledger(LIMITS)
    ledger.attach(PEERS[0], LOW)
    ledger.failed(PEERS[0], LOW, 0.0, "silent", wrong=False)
    for now in (0.1, 1.0, 4.9):
        ledger.detach(PEERS[0], LOW)
        ledger.attach(PEERS[0], LOW)
        assert ledger.standing(PEERS[0], LOW) is Standing.SUSPECT
        assert not ledger.may_try(PEERS[0], LOW, "192.0.2.1", now)


@pytest.mark.parametrize("served", [True, False])
def test_an_answer_that_was_on_its_way_when_the_worker_failed_proves_nothing(served):
    ledger = Ledger(LIMITS)
    ledger.attach(PEERS[0], LOW)
    ledger.begin_trial(PEERS[0], LOW, "192.0.2.1", 0.0)
    ledger.right(PEERS[0], LOW, 0.1)
    ledger.failed(PEERS[0], LOW, 1.0, "silent", wrong=False)
    assert ledger.right(PEERS[0], LOW, 1.1, served=served) is False
    assert carriers(ledger) == set()
    ledger.begin_trial(PEERS[0], LOW, "192.0.2.1", 6.0)
    assert ledger.right(PEERS[0], LOW, 6.1, served=True) is False  # not the trial's answer
    assert carriers(ledger) == set()


def test_at_the_hub_a_lease_counts_as_leased_whatever_its_worker_claims():
    model = ModelId(cid_of(b"model", DAG_CBOR_CODEC))
    limits = MarketLimits(15.0, 60.0, 10.0, 5.0, 100, 10, 600.0, 2.0)
    market = Market(limits, "hub", -100.0)
    wants = Demands((LOW,), 0, 5.0).wants((LOW,), ())
    market.report(Demand(PeerId("carl"), 1, 1, 0.0, 1000.0, model, "float32", 1, (), wants), 0.0, 0.0)
    offer = market.poll(PEERS[0], memory_bytes=1, have=[(model, LOW)], busy=(), now=0.0)
    assert isinstance(offer, LeaseOffer)
    for now in range(1, 50, 3):
        market.renew(PEERS[0], offer.lease, ("carl", model, LOW), progress=10**9 + now, now=float(now))
        (entry,) = market.table()
        assert (entry.proven, entry.leased) == (0, 1)
