"""Over any span the bytes spent stay within rate × span + one burst + one answer, and nobody waits without need."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_node.decide.rate import BURST_S, TokenBucket


def test_without_a_rate_nobody_waits():
    bucket = TokenBucket(0)
    bucket.spend(10**12, 1.0)
    assert bucket.wait_s(1.0) == 0


def test_a_burst_is_free_and_a_debt_is_waited_for():
    bucket = TokenBucket(100)
    assert bucket.wait_s(5.0) == 0
    bucket.spend(300, 5.0)
    assert bucket.wait_s(5.0) == pytest.approx(2.0)
    assert bucket.wait_s(6.0) == pytest.approx(1.0)
    assert bucket.wait_s(7.0) == 0


def test_a_pause_saves_one_burst_and_no_more():
    bucket = TokenBucket(100)
    bucket.spend(100, 0.0)
    assert bucket.wait_s(1000.0) == 0
    bucket.spend(101, 1000.0)
    assert bucket.wait_s(1000.0) > 0


def test_a_clock_that_steps_back_gives_nothing_away():
    bucket = TokenBucket(100)
    bucket.spend(200, 10.0)
    assert bucket.wait_s(3.0) == pytest.approx(1.0)
    assert bucket.wait_s(10.0) == pytest.approx(1.0)


@given(st.lists(st.tuples(st.floats(0, 2), st.integers(1, 500)), min_size=1, max_size=60))
def test_the_rate_holds_over_the_whole_run(steps):
    rate, now, sent = 100.0, 0.0, 0
    bucket = TokenBucket(rate)
    for pause_s, size in steps:
        now += pause_s
        now += bucket.wait_s(now)
        assert bucket.wait_s(now) <= 1e-9
        bucket.spend(size, now)
        sent += size
        assert sent <= rate * (now + BURST_S) + 500 + 1e-6
