"""A worker that is silent: its fault, or an absence that costs share and no standing."""

from __future__ import annotations

import pytest

from kvasir_node.base.ids import PeerId
from kvasir_node.decide.absences import AbsenceLimits, Absences

ANN, BOB = PeerId("ann"), PeerId("bob")
LIMITS = AbsenceLimits(rest_s=5.0, rest_max_s=40.0, peers_max=100)


@pytest.fixture
def absences() -> Absences:
    return Absences(LIMITS)


def test_law_8_who_answers_its_connection_at_once_and_not_its_calls_is_to_blame(absences):
    assert absences.late(ANN, 10.0)
    assert absences.is_away(ANN, 10.0)
    assert absences.answered(ANN, 0.01, 0.001, 10.1)
    assert not absences.is_away(ANN, 10.1)


@pytest.mark.parametrize(
    ("took_s", "round_trip_s", "is_fault"), [(0.3, 0.0, False), (0.3, 0.1, True), (3.0, 0.1, False)]
)
def test_law_8_a_way_that_was_silent_itself_is_no_fault(absences, took_s, round_trip_s, is_fault):
    absences.late(ANN, 10.0)
    assert absences.answered(ANN, took_s, round_trip_s, 10.0 + took_s) is is_fault
    assert not absences.is_away(ANN, 10.0 + took_s)  # the first costs no rest


def test_one_silence_is_asked_about_once_and_judges_all_that_was_sent_before_its_end(absences):
    assert absences.late(ANN, 1.0)
    assert not absences.late(ANN, 1.1)
    assert absences.late(BOB, 1.1)
    absences.answered(ANN, 2.0, 0.0, 3.0)
    assert not absences.late(ANN, 2.9)
    assert absences.late(ANN, 3.1)
    absences.lost(ANN, 4.0)
    assert not absences.late(ANN, 3.9)
    assert absences.late(ANN, 4.1)


def rests(absences: Absences, times: list[float]) -> list[float]:
    """How long the peer rests after losses at these times."""
    found = []
    for now in times:
        absences.lost(ANN, now)
        rest_s = 0.0
        while absences.is_away(ANN, now + rest_s):
            rest_s += 1.0
        found.append(rest_s)
    return found


def test_who_is_away_again_and_again_rests_longer_each_time_up_to_a_bound(absences):
    assert rests(absences, [0, 10, 20, 40, 60, 100, 150]) == [0, 0, 5, 10, 20, 40, 40]


def test_who_stayed_for_a_minute_or_as_long_as_its_last_rest_begins_anew(absences):
    assert rests(absences, [0, 10, 20, 86, 87, 88]) == [0, 0, 5, 0, 0, 5]
    slow = Absences(AbsenceLimits(rest_s=100.0, rest_max_s=1000.0))
    assert rests(slow, [0, 10, 20, 210, 700]) == [0, 0, 100, 200, 0]  # 90 s after a rest of 100, 290 after one of 200


def test_our_own_absence_counts_for_nothing_and_settles_what_was_asked(absences):
    for now in range(0, 50, 10):
        assert absences.late(ANN, now + 0.5)
        absences.dismiss(ANN, now + 1.0)
        assert not absences.is_away(ANN, now + 1.0)
    assert rests(absences, [100, 110]) == [0, 0]


def test_a_connection_and_what_goes_over_it_end_in_one_absence(absences):
    assert rests(absences, [0, 0.1, 0.5, 0.9]) == [0, 0, 0, 0]
    assert rests(absences, [10, 20]) == [0, 5]


def test_the_end_of_a_rest_is_told_once(absences):
    rests(absences, [0, 1, 2])
    assert absences.rested(6.9) == []
    assert absences.rested(7.0) == [ANN]
    assert absences.rested(8.0) == []


def test_law_7_no_more_peers_are_remembered_than_allowed(absences):
    for number in range(1000):
        for at in range(4):
            absences.lost(PeerId(f"peer-{number}"), float(at))
    assert len(absences._records) == LIMITS.peers_max
    assert len(absences._resting) <= LIMITS.peers_max
