"""Who waits for frames that come at once spins; who is called seldom, or is in others' way, sleeps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_node.decide.spinning import CROWDED, LEAST_S, REST_S, SPIN_S, Spinning


def after(*waits: float) -> Spinning:
    spinning = Spinning()
    for wait_s in waits:
        spinning.waited(wait_s, came=True)
    return spinning


def test_who_gives_way_to_others_sleeps():
    spinning = Spinning(allowed=False)
    for _ in range(20):
        spinning.waited(0.0, came=True)
    assert spinning.spin_s(1.0) == 0.0


def test_at_first_it_sleeps():
    assert Spinning().spin_s(0.0) == 0.0


@pytest.mark.parametrize(
    ("waits", "spins"),
    [
        ([0.001] * 20, True),
        ([0.0] * 20, True),
        ([0.001] * 2, False),  # too soon to say
        ([0.008] * 20, False),
        ([0.001] * 20 + [0.1], True),  # one pause is none
        ([0.001] * 20 + [0.1] * 8, False),  # nobody calls any more
        ([0.1] * 1000 + [0.001] * 20, True),  # however long that was, it is soon forgotten
        ([0.001, 0.001, 0.001, 0.005] * 20, True),  # the layers of a step, and what is between steps
    ],
)
def test_it_spins_where_the_next_usually_comes_within_a_moment(waits, spins):
    assert (after(*waits).spin_s(1.0) > 0) == spins


def test_what_was_given_up_soon_tells_nothing_and_what_was_long_in_vain_does():
    spinning, impatient = after(*[0.001] * 20), Spinning()
    for _ in range(20):
        impatient.waited(0.001, came=False)
    assert impatient.spin_s(1.0) == 0.0
    for _ in range(8):
        spinning.waited(0.1, came=False)
    assert spinning.spin_s(1.0) == 0.0


def test_it_spins_no_longer_than_that():
    assert after(*[0.001] * 20).spin_s(1.0) == SPIN_S


@pytest.mark.parametrize(("share", "rests"), [(1.0, False), (0.9, False), (1 - CROWDED - 0.05, True), (0.1, True)])
def test_where_others_want_the_core_it_rests_and_tries_again(share, rests):
    spinning = after(*[0.001] * 20)
    for _ in range(40):
        spinning.spun(0.001, 0.001 * share, 10.0)
    assert (spinning.spin_s(10.0) == 0.0) == rests
    assert spinning.spin_s(10.0 + REST_S) == SPIN_S


def test_one_spin_that_was_interrupted_is_an_accident():
    spinning = after(*[0.001] * 20)
    spinning.spun(0.002, 0.0004, 10.0)
    assert spinning.spin_s(10.0) == SPIN_S


def test_spins_that_found_something_at_once_say_nothing_of_others():
    spinning = after(*[0.001] * 20)
    for _ in range(100):
        spinning.spun(LEAST_S / 2, 0.0, 10.0)
    assert spinning.spin_s(10.0) == SPIN_S


@given(
    st.lists(st.tuples(st.floats(0, 1e9), st.floats(0, 10), st.floats(0, 10))),
    st.floats(0, 1e9),
)
def test_law_7_it_never_spins_for_longer_whatever_it_is_told(told, now):
    spinning = Spinning()
    for wait_s, took_s, used_s in told:
        spinning.waited(wait_s, came=took_s > 5)
        spinning.spun(took_s, used_s, now)
        assert spinning.spin_s(now) in (0.0, SPIN_S)
