"""What was measured, put into two books: no clock, no thread."""

import pytest

from kvasir_node.base.ids import PeerId
from kvasir_node.decide.costs import LINK_PRIOR
from kvasir_node.roles.costing import NOTES_MAX, Costing
from kvasir_node.roles.measured import CallMeasured, ForwardMeasured, LayerMeasured, LinkMeasured

ANN, BOB = PeerId("ann"), PeerId("bob")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def open_costing() -> tuple[Costing, Clock]:
    clock = Clock()
    return Costing(decode_rows_max=16, chosen=2, borrow_s=0.5, clock=clock), clock


def forward(rows: int, trunk_s: float) -> ForwardMeasured:
    return ForwardMeasured(rows, trunk_s, LayerMeasured(8, 2 * rows, trunk_s / 2), trunk_s / 10)


def call(pairs: int, took_s: float, computed_s: float | None) -> CallMeasured:
    return CallMeasured(ANN, 4, pairs, 1000, 1000, took_s, computed_s)


def test_forwards_of_few_rows_and_of_prompts_have_a_book_each():
    costing, clock = open_costing()
    for step in range(10):
        clock.now = 0.1 * step
        costing.forward_measured(forward(16, 0.02))
        costing.forward_measured(forward(17, 0.4))
    decode, prompt = costing.costs(())
    assert decode.own.trunk(16) == pytest.approx(0.02, rel=0.1)
    assert prompt.own.trunk(17) == pytest.approx(0.4, rel=0.1)
    assert decode.own.call_s == pytest.approx(0.002, rel=0.1)
    assert prompt.own.layer_s + 8 * prompt.own.expert_s + 34 * prompt.own.pair_s == pytest.approx(0.2, rel=0.1)
    assert decode.own.borrow_s == prompt.own.borrow_s == 0.5


def test_forwards_beside_each_other_say_nothing_of_what_one_costs():
    costing, _ = open_costing()
    before = costing.costs(())
    costing.in_one_lane = False
    costing.forward_measured(forward(16, 3.0))
    assert costing.costs(()) == before
    costing.in_one_lane = True
    costing.forward_measured(forward(16, 3.0))
    assert costing.costs(())[0].own.trunk_s > before[0].own.trunk_s


def test_calls_go_by_their_pairs_and_the_way_is_the_same_for_both():
    costing, clock = open_costing()
    for step in range(20):
        clock.now = 0.1 * step
        costing.call_measured(call(32, 0.11, 0.01))
        costing.call_measured(call(33, 0.6, 0.5))
    (decode, prompt) = (each.workers[ANN] for each in costing.costs([ANN]))
    assert decode.call_s + 4 * decode.expert_s + 32 * decode.pair_s == pytest.approx(0.01, rel=0.1)
    assert prompt.call_s + 4 * prompt.expert_s + 33 * prompt.pair_s == pytest.approx(0.5, rel=0.1)
    for worker in (decode, prompt):
        way_s = worker.rtt_s + 1000 * (worker.sent_byte_s + worker.received_byte_s)
        assert way_s == pytest.approx(0.1, rel=0.1)


def test_a_call_that_does_not_say_how_long_it_was_computed_is_taken_apart_by_what_is_known_of_the_way():
    costing, _ = open_costing()
    for took_s in (0.05, 0.051, 0.052):
        costing.round_trips_measured({ANN: took_s})
    for _ in range(8):
        costing.call_measured(call(32, 0.15, None))
    decode, prompt = (each.workers[ANN] for each in costing.costs([ANN]))
    assert decode.call_s + 4 * decode.expert_s + 32 * decode.pair_s == pytest.approx(0.1, rel=0.2)
    assert prompt.rtt_s == pytest.approx(0.05, rel=0.2)


def test_a_round_trip_that_stays_as_it_was_is_taken_again_now_and_then_and_does_not_fade():
    costing, clock = open_costing()
    for _ in range(5):
        costing.round_trips_measured({ANN: 0.05})
    assert len(costing._trips) == 1
    for _ in range(10):
        clock.now += 30.0
        costing.round_trips_measured({ANN: 0.05})
        decode, prompt = costing.costs([ANN, BOB])
        for costs in (decode, prompt):
            assert costs.workers[ANN].rtt_s > 0.03
            assert costs.workers[BOB].rtt_s == LINK_PRIOR[0]  # of whom nothing is known the prior speaks
    clock.now += 300.0
    assert costing.costs([ANN])[0].workers[ANN].rtt_s == pytest.approx(LINK_PRIOR[0], rel=0.1)  # told no more


def test_another_way_to_a_peer_makes_what_was_known_of_the_old_one_void():
    costing, _ = open_costing()
    for _ in range(8):
        costing.call_measured(call(32, 0.6, 0.1))
    assert costing.costs([ANN])[0].workers[ANN].rtt_s > 0.1
    costing.link_measured(LinkMeasured(ANN, [(0, 0.0002), (65_536, 0.0004)] * 2))
    for costs in costing.costs([ANN]):
        worker = costs.workers[ANN]
        assert worker.rtt_s == pytest.approx(0.0002, rel=0.2)
        way_s = worker.rtt_s + 65_536 * (worker.sent_byte_s + worker.received_byte_s)
        assert way_s == pytest.approx(0.0004, rel=0.2)
    decode = costing.costs([ANN])[0].workers[ANN]
    assert decode.call_s + 4 * decode.expert_s + 32 * decode.pair_s == pytest.approx(0.1, rel=0.1)  # it is as quick


def test_law_7_notes_that_nobody_reads_are_bounded():
    costing, _ = open_costing()
    for number in range(NOTES_MAX + 10):
        costing.forward_measured(forward(16, 0.02))
        costing.call_measured(call(32, 0.11, 0.01))
        costing.round_trips_measured({PeerId(f"peer {number}"): 0.01})
    assert {len(notes) for notes in (costing._forwards, costing._calls, costing._trips)} == {NOTES_MAX}
    costing.costs(())
    assert {len(notes) for notes in (costing._forwards, costing._calls, costing._trips)} == {0}
