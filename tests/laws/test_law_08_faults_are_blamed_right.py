"""Law 8: a bad request never demerits a worker, a dead coordinator never demerits a worker, silence is not a lie."""

import pytest
import torch

from kvasir_node.base.errors import Misbehaved, RejectReason
from kvasir_node.base.ids import DAG_CBOR_CODEC, ModelId, PeerId, SliceId, cid_of
from kvasir_node.decide.absences import AbsenceLimits, Absences
from kvasir_node.decide.demand import Wanted
from kvasir_node.decide.ledger import Ledger, LedgerLimits, Standing
from kvasir_node.decide.market import Demand, LeaseOffer, Market, MarketLimits
from kvasir_node.wire.tensors import ExpertRequest, read_request, request_parts

ANN, CARL, PART = PeerId("ann"), PeerId("carl"), SliceId(0, 0, 7)
MODEL = ModelId(cid_of(b"model", DAG_CBOR_CODEC))
LEDGER = LedgerLimits(5.0, 600.0, 3, 600.0, trials_per_address_max=8, trial_window_s=60.0)
MARKET = MarketLimits(
    lease_ttl_s=15.0,
    progress_timeout_s=60.0,
    tenure_min_s=10.0,
    surplus_grace_s=100.0,
    leases_max=100,
    issuers_max=10,
    clock_skew_max_s=600.0,
    poll_interval_s=2.0,
)


def attached() -> Ledger:
    ledger = Ledger(LEDGER)
    ledger.attach(ANN, PART)
    return ledger


def test_silence_cools_off_and_never_bans():
    ledger = attached()
    for now in range(1000):
        ledger.failed(ANN, PART, float(now), "no answer", wrong=False)
    assert ledger.standing(ANN, PART) is Standing.SUSPECT
    assert ledger.may_try(ANN, PART, "192.0.2.1", 999.0 + 600.0)


def test_wrong_answers_ban():
    ledger = attached()
    for now in (0.0, 10.0, 30.0):
        assert ledger.standing(ANN, PART) is not Standing.BANNED
        ledger.failed(ANN, PART, now, "differs", wrong=True)
    assert ledger.standing(ANN, PART) is Standing.BANNED
    assert not ledger.may_try(ANN, PART, "192.0.2.1", 1e9)


@pytest.mark.parametrize("way", ["answers late", "ends"])
def test_what_is_lost_with_the_way_to_a_worker_costs_no_standing_however_often(way):
    ledger, absences = attached(), Absences(AbsenceLimits(rest_s=5.0, rest_max_s=600.0))
    ledger.begin_trial(ANN, PART, "192.0.2.1", 0.0)
    ledger.right(ANN, PART, 0.0)
    for now in range(10, 500, 10):
        assert absences.late(ANN, now - 1.0)  # calls were under way
        if way == "ends":
            absences.lost(ANN, now)
            ledger.detach(ANN, PART)
            assert ledger.proven() == ()  # nor is it coverage meanwhile
            ledger.attach(ANN, PART)
        else:
            assert not absences.answered(ANN, 3.0, 0.1, now)
    assert ledger.proven() == ((ANN, PART),)
    assert ledger.pairs()[0].failures == 0
    assert absences.is_away(ANN, 500.0)  # but it gets no work for a while, so that waiting for it has an end


@pytest.mark.parametrize("end", ["give_up_trial", "detach"])
def test_a_trial_that_ends_through_no_fault_of_the_worker_is_no_failure(end):
    ledger = attached()
    for now in (0.0, 5.0, 10.0):
        ledger.attach(ANN, PART)
        ledger.begin_trial(ANN, PART, "192.0.2.1", now)
        getattr(ledger, end)(ANN, PART)
        (view,) = ledger.pairs()
        assert (view.standing, view.failures, view.reason) == (Standing.NEW, 0, "")


def leased(*, demand_ttl_s: float) -> tuple[Market, LeaseOffer]:
    market = Market(MARKET, "hub", -100.0)
    market.report(Demand(CARL, 1, 1, 0.0, demand_ttl_s, MODEL, "float32", 1, (), (Wanted(PART, 1, ()),)), 0.0, 0.0)
    offer = market.poll(ANN, memory_bytes=1, have=(), busy=(), now=0.0)
    assert isinstance(offer, LeaseOffer)
    return market, offer


def wait_of(market: Market, now: float) -> bool:
    """Whether ANN is refused a new lease on demand that has just appeared."""
    market.report(Demand(CARL, 2, 1, now, 1000.0, MODEL, "float32", 1, (), (Wanted(PART, 1, ()),)), now, now)
    return isinstance(market.poll(ANN, memory_bytes=1, have=(), busy=(), now=now), float)


@pytest.mark.parametrize(("demand_ttl_s", "must_wait"), [(20.0, False), (1000.0, True)])
def test_a_lease_that_came_to_nothing_counts_against_its_worker_only_while_its_coordinator_is_there(
    demand_ttl_s, must_wait
):
    market, offer = leased(demand_ttl_s=demand_ttl_s)
    now = 0.0
    while now < 61.0:
        now += 3.0
        market.renew(ANN, offer.lease, (CARL, MODEL, PART), progress=0, now=now)
    assert market.lease_count == 0
    assert wait_of(market, now + 1.0) is must_wait


def test_a_lease_given_back_counts_against_nobody():
    market, offer = leased(demand_ttl_s=1000.0)
    market.release(ANN, offer.lease, 0.0)
    assert not wait_of(market, 1.0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["rows", "pair_weight"])
def test_a_worker_refuses_a_request_whose_answer_would_be_held_against_it(where, bad):
    parts = {
        "layer": 0,
        "rows": torch.ones(2, 4),
        "pair_row": torch.tensor([0, 1], dtype=torch.int32),
        "pair_expert": torch.tensor([0, 0], dtype=torch.int32),
        "pair_weight": torch.ones(2),
    }
    parts[where].view(-1)[1] = bad
    body = memoryview(bytearray(b"".join(request_parts(ExpertRequest(**parts)))))
    with pytest.raises(Misbehaved) as refused:
        read_request(body, hidden_size=4)
    assert refused.value.reason is RejectReason.BAD_FRAME  # the caller's fault: no bad result
