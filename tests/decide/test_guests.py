"""Guests: never the only copy, few layers each as whole as can be, and no part in what must not depend on them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_node.base.ids import DAG_CBOR_CODEC, ModelId, PeerId, SliceId, cid_of
from kvasir_node.decide.demand import Demands, Wanted
from kvasir_node.decide.guests import TOKEN_SHARE, carriers, copies_wanted, kept_slices, layers_for
from kvasir_node.decide.market import Demand, LeaseOffer, Market, MarketLimits

CARL, WILL, PAGE, TAB = PeerId("carl"), PeerId("will"), PeerId("page"), PeerId("tab")
MODEL = ModelId(cid_of(b"one", DAG_CBOR_CODEC))
LOW, HIGH = SliceId(0, 0, 3), SliceId(0, 4, 7)
LAYERS = 6
PARTS = tuple(SliceId(layer, first, first + 3) for layer in range(LAYERS) for first in (0, 4))
LIMITS = MarketLimits(
    lease_ttl_s=15.0,
    progress_timeout_s=60.0,
    tenure_min_s=10.0,
    surplus_grace_s=5.0,
    leases_max=1000,
    issuers_max=2,
    clock_skew_max_s=600.0,
    poll_interval_s=2.0,
    guest_layers_max=3,
)
NEAR_S = 0.010


# The coordinator's side ---------------------------------------------------------------------------------------------


def test_guests_fill_the_surge_and_never_the_base():
    assert copies_wanted(1, 1, others=1, guests=1) == 2, "one that stays, one guest"
    assert copies_wanted(1, 0, others=1, guests=1) == 1, "when the surge goes the guest does"
    assert copies_wanted(1, 0, others=0, guests=2) == 3, "one place stays open for a worker, whoever else is there"
    assert copies_wanted(0, 2, others=0, guests=2) == 2, "what is held here may be all guests'"


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.integers(0, 2), st.integers(0, 4), st.integers(0, 5), st.integers(0, 5))
def test_as_long_as_workers_are_too_few_a_place_is_open_for_one(always, surge, others, guests):
    is_open = copies_wanted(always, surge, others, guests) - others - guests
    if others < always:
        assert is_open >= always - others


def test_slices_with_too_few_other_copies_are_kept_from_guests():
    proven = [(PAGE, LOW), (WILL, HIGH), (PAGE, HIGH)]
    assert kept_slices({LOW, HIGH}, 1, proven, {PAGE}) == {LOW}
    assert kept_slices({LOW, HIGH}, 2, proven, {PAGE}) == {LOW, HIGH}
    assert kept_slices((), 1, proven, {PAGE}) == frozenset()
    assert kept_slices({LOW, HIGH}, 1, proven, ()) == frozenset()


def test_a_guest_carries_only_what_somebody_else_has_too():
    proven = ((PAGE, LOW), (PAGE, HIGH), (WILL, HIGH))
    assert carriers(proven, (), {PAGE}) == proven, "all is held here"
    assert carriers(proven, {LOW, HIGH}, {PAGE}) == ((PAGE, HIGH), (WILL, HIGH))
    assert carriers(proven, {LOW, HIGH}, ()) == proven


def test_guests_are_listed_last_so_that_they_are_let_go_first():
    demands = Demands((LOW, HIGH), 2, 5.0)
    demands.observe(0.0, saturated=True, pressure=1.0, load=1.0)
    proven = ((PAGE, LOW), (WILL, LOW), (PAGE, HIGH))
    assert demands.wants({LOW}, proven, {PAGE}) == (Wanted(LOW, 2, (WILL, PAGE)), Wanted(HIGH, 1, (PAGE,)))
    assert demands.kept({LOW, HIGH}, proven, {PAGE}) == {HIGH}


# How many layers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call_s", "layers"),
    [(None, 1), (0.0, 1), (10.0, 1), (TOKEN_SHARE * NEAR_S * LAYERS / 2.5, 2), (0.001, 3), (1e-9, 3)],
)
def test_a_guest_gets_as_many_layers_as_it_answers_in_its_share_of_a_token(call_s, layers):
    assert layers_for(call_s, NEAR_S, LAYERS, 3) == layers


# The hub's side -----------------------------------------------------------------------------------------------------


def market_that_wants(want: int = 1, kept=(), proven=()) -> Market:
    market = Market(LIMITS, "hub", -100.0)
    demand = Demand(
        issuer=CARL,
        epoch=1,
        sequence=1,
        issued_at=0.0,
        ttl_s=1000.0,
        model=MODEL,
        dtype="float32",
        slice_bytes=100,
        addresses=(),
        wants=tuple(Wanted(part, want, tuple(proven)) for part in PARTS),
        near_rtt_s=NEAR_S,
        kept=frozenset(kept),
    )
    assert market.report(demand, 0.0, 0.0) is None
    return market


def take_all(market: Market, *, call_s: float, memory_bytes: int = 1 << 40, is_guest: bool = True) -> list[SliceId]:
    taken: list[SliceId] = []
    while len(taken) * 100 + 100 <= memory_bytes:
        offer = market.poll(
            PAGE,
            memory_bytes=memory_bytes - 100 * len(taken),
            have=(),
            busy=tuple((MODEL, part) for part in taken),
            round_trips=[(CARL, call_s)],
            is_guest=is_guest,
            now=0.0,
        )
        if not isinstance(offer, LeaseOffer):
            break
        taken.append(offer.slice)
    return taken


def test_a_guest_fills_whole_layers_and_gets_few():
    taken = take_all(market_that_wants(), call_s=0.001)
    assert len(taken) == 6
    assert [part.layer for part in taken] == sorted(part.layer for part in taken), "one layer after the other"
    assert len({part.layer for part in taken}) == LIMITS.guest_layers_max


def test_a_near_worker_that_is_no_guest_spreads_over_all_layers():
    taken = take_all(market_that_wants(), call_s=0.001, is_guest=False)
    assert len({part.layer for part in taken[:LAYERS]}) == LAYERS
    assert len(taken) == len(PARTS)


def test_a_slow_guest_gets_one_layer_and_a_small_one_part_of_it():
    assert {part.layer for part in take_all(market_that_wants(), call_s=1.0)} == {0}
    assert len(take_all(market_that_wants(), call_s=1.0)) == 2
    assert len(take_all(market_that_wants(), call_s=1.0, memory_bytes=150)) == 1


def test_a_guest_is_offered_nothing_that_is_kept_from_guests_while_others_are():
    assert take_all(market_that_wants(kept=PARTS), call_s=0.001) == []
    assert len(take_all(market_that_wants(kept=PARTS), call_s=0.001, is_guest=False)) == len(PARTS)
    assert take_all(market_that_wants(kept=PARTS[1:]), call_s=0.001) == [PARTS[0]]


def test_two_guests_and_a_worker_play_it_through():
    """The coordinator lacks LOW: a guest may take it only once a worker has proven it, and is let go before it."""
    demands = Demands((LOW,), 1, 5.0)
    demands.observe(0.0, saturated=True, pressure=1.0, load=1.0)
    market = Market(LIMITS, "hub", -100.0)
    sequence = 0

    def report(now: float, *proven: PeerId) -> None:
        nonlocal sequence
        sequence += 1
        pairs, guests = tuple((peer, LOW) for peer in proven), {PAGE, TAB}
        wants, kept = demands.wants({LOW}, pairs, guests), demands.kept({LOW}, pairs, guests)
        demand = Demand(CARL, 1, sequence, now, 1000.0, MODEL, "float32", 1, (), wants, NEAR_S, (), kept)
        assert market.report(demand, now, now) is None

    def poll(peer: PeerId, now: float) -> bool:
        is_guest = peer in (PAGE, TAB)
        asked = market.poll(peer, memory_bytes=10, have=(), busy=(), is_guest=is_guest, now=now)
        return isinstance(asked, LeaseOffer)

    report(0.0)
    assert not poll(PAGE, 0.1)
    assert poll(WILL, 0.2)
    report(1.0, WILL)
    assert poll(PAGE, 1.1)
    report(2.0, PAGE, WILL)
    assert not poll(TAB, 2.1), "both copies are there"
    market.end_unlisted(WILL, (), 3.0)  # the worker has started anew
    report(3.0, PAGE)
    assert not poll(TAB, 3.1), "its place is for no guest"
    assert poll(WILL, 3.2), "but for a worker"
