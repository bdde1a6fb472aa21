from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvasir_node.base.ids import PeerId, SliceId
from kvasir_node.decide.fanout import CallTimes, DeadlineLimits, Route, plan_route, predicted_gain

ANN, BOB, CYD = PeerId("ann"), PeerId("bob"), PeerId("cyd")
STEADY = settings(max_examples=150, deadline=None, derandomize=True)


def plan(held, proven, *, experts=4, layers=(0,), heat=None, spread=True) -> Route:
    return plan_route(
        layers=layers,
        experts_per_layer=experts,
        held={layer: frozenset(held) for layer in layers},
        proven=proven,
        heat={} if heat is None else heat,
        spread=spread,
        reason="because",
    )


@pytest.mark.parametrize(
    ("held", "proven", "spread", "row", "on"),
    [
        # everything is held: it leaves only while spread
        ((0, 1, 2, 3), [(ANN, SliceId(0, 0, 3))], False, (None, None, None, None), False),
        ((0, 1, 2, 3), [(ANN, SliceId(0, 0, 3))], True, (None, ANN, None, ANN), True),
        ((0, 1, 2, 3), [], True, (None, None, None, None), False),
        # what is not held is remote wherever it can be, and here (from the checkpoint) where it cannot
        ((0, 1), [(ANN, SliceId(0, 2, 3))], False, (None, None, ANN, ANN), False),
        ((0, 1), [(ANN, SliceId(0, 2, 2))], False, (None, None, ANN, None), False),
        ((), [(ANN, SliceId(0, 0, 3)), (BOB, SliceId(0, 0, 3))], False, (ANN, BOB, ANN, BOB), False),
        # a slice of another layer, or beyond the last expert, changes nothing
        ((0, 1, 2, 3), [(ANN, SliceId(7, 0, 3))], True, (None, None, None, None), False),
        ((), [(ANN, SliceId(0, 3, 900))], False, (None, None, None, ANN), False),
    ],
)
def test_where_the_experts_of_a_layer_are_computed(held, proven, spread, row, on):
    route = plan(held, proven, spread=spread)
    assert route.peers[0] == row
    assert route.on is on


def test_the_hottest_expert_weighs_as_much_as_the_others_together():
    route = plan((0, 1, 2, 3), [(ANN, SliceId(0, 0, 3))], heat={0: [1.0, 6.0, 2.0, 3.0]})
    assert route.peers[0] == (ANN, None, ANN, ANN)


def test_the_same_facts_in_another_order_give_the_same_plan():
    proven = [(ANN, SliceId(0, 0, 3)), (BOB, SliceId(0, 0, 3)), (CYD, SliceId(0, 2, 3))]
    assert plan((0,), proven) == plan((0,), proven[::-1])


def test_playbook_of_a_surge_and_its_end():
    everything = (0, 1, 2, 3)
    calm = plan(everything, [], spread=False)
    alone = plan(everything, [], spread=True)
    helped = plan(everything, [(ANN, SliceId(0, 0, 3))], spread=True)
    lost = plan(everything, [], spread=True)
    after = plan(everything, [(ANN, SliceId(0, 0, 3))], spread=False)
    assert [route.on for route in (calm, alone, helped, lost, after)] == [False, False, True, False, False]
    assert after.peers == calm.peers == {0: (None, None, None, None)}


facts = st.fixed_dictionaries(
    {
        "held": st.sets(st.integers(0, 7)),
        "proven": st.lists(
            st.builds(
                lambda peer, layer, first, more: (peer, SliceId(layer, first, first + more)),
                st.sampled_from([ANN, BOB, CYD]),
                st.integers(0, 2),
                st.integers(0, 7),
                st.integers(0, 7),
            ),
            max_size=8,
            unique=True,
        ),
        "heat": st.dictionaries(st.integers(0, 1), st.lists(st.floats(0, 1e6), max_size=9)),
    }
)


@STEADY
@given(facts=facts, spread=st.booleans())
def test_experts_go_only_to_peers_that_proved_them_and_held_ones_only_while_spread(facts, spread):
    route = plan(**facts, experts=8, layers=(0, 1), spread=spread)
    moved = False
    for layer, row in route.peers.items():
        assert len(row) == 8
        for index, peer in enumerate(row):
            able = {p for p, part in facts["proven"] if part.layer == layer and part.first <= index <= part.last}
            assert peer is None or peer in able
            if index in facts["held"]:
                assert peer is None or spread
                moved = moved or peer is not None
            else:
                assert (peer is None) == (not able)
    assert route.on is moved


@STEADY
@given(heat=st.lists(st.integers(0, 50), min_size=1, max_size=7), workers=st.integers(1, 2))
def test_the_busiest_machine_carries_at_most_four_thirds_of_what_it_would_in_the_best_plan(heat, workers):
    experts, machines = len(heat), (None, ANN, BOB)[: workers + 1]
    proven = [(peer, SliceId(0, 0, experts - 1)) for peer in machines if peer is not None]
    route = plan(range(experts), proven, experts=experts, heat={0: [float(h) for h in heat]})
    still = sum(heat) / (100 * experts) or 1.0  # what an unused expert weighs

    def busiest(row):
        return max(sum(h + still for h, where in zip(heat, row, strict=True) if where == m) for m in machines)

    best = min(map(busiest, product(machines, repeat=experts)))
    assert busiest(route.peers[0]) <= best * 4 / 3 + 1e-9


@pytest.mark.parametrize(
    ("trunk_s", "experts_s", "workers", "gain"),
    [(0.0, 0.0, 3, 1.0), (1.0, 0.0, 3, 1.0), (0.0, 1.0, 3, 4.0), (1.0, 1.0, 1, 4 / 3), (1.0, 1.0, 0, 1.0)],
)
def test_predicted_gain_is_amdahls_law(trunk_s, experts_s, workers, gain):
    assert predicted_gain(trunk_s, experts_s, workers) == pytest.approx(gain)


# Deadlines ------------------------------------------------------------------------------------------------------

LIMITS = DeadlineLimits(factor=4.0, floor_s=0.05, ceiling_s=2.0)


def test_playbook_of_a_deadline():
    times = CallTimes(LIMITS)
    assert times.deadline_s(ANN, 8) == 2.0  # nothing is known
    assert times.expected_s(ANN) is None
    times.observe(ANN, 8, 0.1)
    assert times.expected_s(ANN) == 0.1
    assert times.deadline_s(ANN, 15) == pytest.approx(4 * (0.1 + 4 * 0.05))  # 8 to 15 are one class of size
    assert times.deadline_s(ANN, 3) == times.deadline_s(ANN, 8)  # a smaller call takes no longer
    assert times.deadline_s(ANN, 16) == 2.0  # a larger one may
    times.observe(ANN, 2, 0.001)
    assert times.expected_s(ANN) == 0.001
    assert times.deadline_s(ANN, 2) == 0.05  # the floor
    times.forget(ANN)
    assert times.deadline_s(ANN, 8) == 2.0


def test_what_is_much_work_may_take_longer_than_the_ceiling():
    times = CallTimes(LIMITS)
    assert times.deadline_s(ANN, 8, 3.0) == 5.0
    times.observe(ANN, 8, 100.0)
    assert times.deadline_s(ANN, 8) == 2.0
    assert times.deadline_s(ANN, 8, 3.0) == 5.0
    times.observe(BOB, 8, 0.1)
    assert times.deadline_s(BOB, 8, 3.0) == times.deadline_s(BOB, 8)  # it needs no more


def test_a_size_that_was_not_measured_is_expected_to_take_as_long_as_its_neighbours_say():
    times = CallTimes(LIMITS)
    assert times.expected_call_s(ANN, 8) is None
    times.observe(ANN, 8, 0.1)
    times.observe(ANN, 256, 0.4)
    expected = {pairs: times.expected_call_s(ANN, pairs) for pairs in (1, 15, 16, 511, 512, 4096)}
    assert expected == {1: 0.1, 15: 0.1, 16: 0.4, 511: 0.4, 512: 0.8, 4096: 6.4}
    times.forget_size(ANN, 100)
    assert times.expected_call_s(ANN, 256) == pytest.approx(0.1 * 2**5)
    times.forget_size(BOB, 1)
    times.forget_size(ANN, 1)
    assert times.expected_call_s(ANN, 8) is None


def test_a_steady_worker_is_soon_expected_to_be_steady():
    times = CallTimes(LIMITS)
    for _ in range(60):
        times.observe(ANN, 8, 0.1)
    assert times.deadline_s(ANN, 8) == pytest.approx(0.4, rel=0.01)


def test_times_of_peers_that_left_do_not_pile_up():
    times = CallTimes(LIMITS)
    for number in range(2 * CallTimes.PEERS_MAX):
        times.observe(PeerId(f"peer {number}"), 8, 0.1)
    known = [n for n in range(2 * CallTimes.PEERS_MAX) if times.expected_s(PeerId(f"peer {n}")) is not None]
    assert known == list(range(CallTimes.PEERS_MAX, 2 * CallTimes.PEERS_MAX))


@STEADY
@given(took_s=st.floats(0.02, 0.1), slower=st.floats(1.5, 4.0), history=st.integers(1, 40))
def test_the_deadline_grows_with_slower_answers(took_s, slower, history):
    times = CallTimes(DeadlineLimits(factor=4.0, floor_s=1e-6, ceiling_s=1e6))
    for _ in range(history + 8):
        times.observe(ANN, 8, took_s)
    before = times.deadline_s(ANN, 8)
    for _ in range(3):
        times.observe(ANN, 8, took_s * slower)
        assert times.deadline_s(ANN, 8) > before
        before = times.deadline_s(ANN, 8)


class AnyTimes(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.times = CallTimes(LIMITS)

    @rule(peer=st.sampled_from([ANN, BOB]), pairs=st.integers(0, 65_536), took_s=st.floats(0, 1e4))
    def observe(self, peer, pairs, took_s):
        self.times.observe(peer, pairs, took_s)

    @rule(peer=st.sampled_from([ANN, BOB]))
    def forget(self, peer):
        self.times.forget(peer)

    @invariant()
    def deadlines_are_within_floor_and_ceiling(self):
        for peer in (ANN, BOB):
            for pairs in (0, 1, 100, 65_536):
                assert LIMITS.floor_s <= self.times.deadline_s(peer, pairs) <= LIMITS.ceiling_s


TestAnyTimes = AnyTimes.TestCase
TestAnyTimes.settings = settings(max_examples=40, stateful_step_count=30, deadline=None, derandomize=True)
