"""Deadlines, when a call is late, and what is done about it then."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvasir_node.base.ids import PeerId
from kvasir_node.decide.call_times import CallTimes, DeadlineLimits, Here, Wait, second_way

ANN, BOB = PeerId("ann"), PeerId("bob")
STEADY = settings(max_examples=100, deadline=None, derandomize=True)
LIMITS = DeadlineLimits(factor=4.0, floor_s=0.05, ceiling_s=2.0, hedge_floor_s=0.01)


def deadline_s(times: CallTimes, peer: PeerId, pairs: int, more_s: float = 0.0) -> float:
    return times.limits_of(peer, pairs, more_s).deadline_s


def test_playbook_of_a_deadline():
    times = CallTimes(LIMITS)
    assert deadline_s(times, ANN, 8) == 2.0  # nothing is known
    assert times.expected_s(ANN) is None
    times.observe(ANN, 8, 0.1)
    assert times.expected_s(ANN) == 0.1
    assert deadline_s(times, ANN, 15) == pytest.approx(4 * (0.1 + 4 * 0.05))  # 8 to 15 are one class of size
    assert deadline_s(times, ANN, 3) == deadline_s(times, ANN, 8)  # a smaller call takes no longer
    assert deadline_s(times, ANN, 16) == 2.0  # a larger one may
    times.observe(ANN, 2, 0.001)
    assert times.expected_s(ANN) == 0.001
    assert deadline_s(times, ANN, 2) == 0.05  # the floor
    times.forget(ANN)
    assert deadline_s(times, ANN, 8) == 2.0


def test_what_is_much_work_may_take_longer_than_the_ceiling():
    times = CallTimes(LIMITS)
    assert deadline_s(times, ANN, 8, 3.0) == 5.0
    times.observe(ANN, 8, 100.0)
    assert deadline_s(times, ANN, 8) == 2.0
    assert deadline_s(times, ANN, 8, 3.0) == 5.0
    times.observe(BOB, 8, 0.1)
    assert deadline_s(times, BOB, 8, 3.0) == deadline_s(times, BOB, 8)  # it needs no more


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
    assert deadline_s(times, ANN, 8) == pytest.approx(0.4, rel=0.01)


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
    before = deadline_s(times, ANN, 8)
    for _ in range(3):
        times.observe(ANN, 8, took_s * slower)
        assert deadline_s(times, ANN, 8) > before
        before = deadline_s(times, ANN, 8)


def test_a_call_is_late_long_before_its_deadline_but_never_for_a_moment_of_a_busy_machine():
    times = CallTimes(LIMITS)
    assert times.limits_of(ANN, 8).hedge_s == 2.0  # nothing like it was measured: nothing is late
    for _ in range(60):
        times.observe(ANN, 8, 0.1)
        times.observe(BOB, 8, 0.001)
    assert times.limits_of(ANN, 8).hedge_s == pytest.approx(0.1, rel=0.02)
    assert times.limits_of(BOB, 8).hedge_s == 0.01
    for took_s in (0.1, 0.2) * 30:
        times.observe(ANN, 8, took_s)
    assert times.limits_of(ANN, 8).hedge_s > 0.3  # calls that differ much are waited for longer


@pytest.mark.parametrize(
    ("own_s", "replicas", "left_s", "way"),
    [
        (0.01, [], 1.0, Here()),
        (2.0, [], 1.0, Wait()),  # it would be computed here at the deadline, too
        (None, [], 1.0, Wait()),
        (0.01, [(ANN, 0.1)], 1.0, Here()),
        (0.1, [(ANN, 0.01)], 1.0, ANN),
        (0.1, [(ANN, 0.02), (BOB, 0.01)], 1.0, BOB),
        (0.1, [(ANN, None)], 1.0, Here()),
        (2.0, [(ANN, None)], 1.0, Wait()),
        (None, [(BOB, None), (ANN, None)], 1.0, ANN),
        (None, [(ANN, 5.0)], 1.0, ANN),  # what is lacking here has no other way
        (2.0, [(ANN, 5.0)], 1.0, Wait()),
        (0.01, [(ANN, 0.01)], 1.0, Here()),
    ],
)
def test_the_second_way_is_the_one_that_ends_first(own_s, replicas, left_s, way):
    assert second_way(own_s, replicas, left_s) == way
    assert second_way(own_s, replicas[::-1], left_s) == way


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
                limits = self.times.limits_of(peer, pairs)
                assert LIMITS.hedge_floor_s <= limits.hedge_s <= limits.deadline_s
                assert LIMITS.floor_s <= deadline_s(self.times, peer, pairs) <= LIMITS.ceiling_s


TestAnyTimes = AnyTimes.TestCase
TestAnyTimes.settings = settings(max_examples=40, stateful_step_count=30, deadline=None, derandomize=True)
