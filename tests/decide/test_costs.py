import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_node.base.ids import PeerId
from kvasir_node.decide.costs import (
    LINK_PRIOR,
    WORKERS_MAX,
    AffineFit,
    CostBook,
)

ANN, BOB = PeerId("ann"), PeerId("bob")
PRIOR = (5e-5, 2e-4, 2e-5)
TRUTH = (1e-3, 3e-3, 1e-4)  # another level, other proportions
SIZES = [
    (1.0, float(activated), float(pairs)) for activated, pairs in ((8, 8), (20, 32), (42, 64), (56, 128), (63, 256))
]


def of(theta, size) -> float:
    return sum(each * x for each, x in zip(theta, size, strict=True))


def fitted(sizes=SIZES, *, rounds=10, noise=0.05, theta=TRUTH, fit=None, start=0.0) -> AffineFit:
    chance = random.Random(7)
    fit = AffineFit() if fit is None else fit
    for step in range(rounds):
        for size in sizes:
            fit.observe(size, of(theta, size) * chance.uniform(1 - noise, 1 + noise), start + 0.1 * step)
    return fit


def test_before_anything_was_measured_the_prior_speaks():
    found = AffineFit().estimate(PRIOR, 0.6, 0.0)
    assert (found.theta, found.doubt, found.age_s) == (PRIOR, 0.6, math.inf)


def test_a_few_observations_give_the_level_and_leave_the_proportions():
    fit = AffineFit()
    for step in range(6):
        fit.observe((1.0, 40.0, 64.0), 100 * of(PRIOR, (1.0, 40.0, 64.0)), 0.01 * step)
    theta = fit.estimate(PRIOR, 0.6, 0.0).theta
    assert of(theta, (1.0, 40.0, 64.0)) == pytest.approx(100 * of(PRIOR, (1.0, 40.0, 64.0)), rel=0.1)
    assert theta[1] / theta[2] == pytest.approx(PRIOR[1] / PRIOR[2], rel=0.5)


def test_sizes_that_differ_tell_the_coefficients_apart():
    found = fitted().estimate(PRIOR, 0.6, 1.0)
    for size in [*SIZES, (1.0, 30.0, 48.0), (1.0, 64.0, 400.0)]:
        assert found.at(*size) == pytest.approx(of(TRUTH, size), rel=0.08)
    assert found.theta[1] == pytest.approx(TRUTH[1], rel=0.15)


def test_a_hiccup_in_twenty_changes_little():
    fit = AffineFit()
    for step in range(200):
        size = SIZES[step % 5]
        fit.observe(size, of(TRUTH, size) * (50.0 if step % 20 == 7 else 1.0), 0.1 * step)
    assert fit.estimate(PRIOR, 0.6, 20.0).at(*SIZES[2]) == pytest.approx(of(TRUTH, SIZES[2]), rel=0.12)


@pytest.mark.parametrize("times", [10.0, 0.1, 2.5])
def test_a_machine_that_changes_is_believed_within_a_dozen_calls_at_sizes_not_seen_since_too(times):
    fit = fitted()
    for step in range(12):
        fit.observe(SIZES[3], times * of(TRUTH, SIZES[3]), 1.0 + 0.1 * step)
    found = fit.estimate(PRIOR, 0.6, 2.2)
    assert found.at(*SIZES[3]) == pytest.approx(times * of(TRUTH, SIZES[3]), rel=0.2)
    assert found.at(*SIZES[1]) == pytest.approx(times * of(TRUTH, SIZES[1]), rel=0.35)


def test_sizes_seen_since_a_change_are_left_alone_when_old_ones_are_found_wrong():
    """A machine was slow, was let alone, and is quick: new sizes first, then the old ones again."""
    fit = fitted(SIZES[:2], theta=tuple(30 * each for each in TRUTH))
    for step in range(20):
        for size in SIZES[3:] if step < 10 else SIZES[:2]:
            fit.observe(size, of(TRUTH, size), 60.0 + 0.1 * step)
    found = fit.estimate(PRIOR, 0.6, 62.0)
    for size in SIZES:
        assert found.at(*size) == pytest.approx(of(TRUTH, size), rel=0.3)


def test_one_size_that_was_wrong_does_not_spoil_the_others():
    """As when a core was taken from a worker while it computed calls of one size: what was right before stays right,
    and is believed again as soon as it is seen."""
    small, large = SIZES[1], SIZES[4]
    fit = fitted([small])
    for step in range(8):
        fit.observe(large, 3 * of(TRUTH, large), 1.0 + 0.1 * step)
    for step in range(12):
        fit.observe(large, of(TRUTH, large), 2.0 + 0.1 * step)  # a third of what it was
    assert fit.estimate(PRIOR, 0.6, 3.2).at(*large) == pytest.approx(of(TRUTH, large), rel=0.1)
    fit.observe(small, of(TRUTH, small), 3.3)
    found = fit.estimate(PRIOR, 0.6, 3.3)
    for size in (small, large):
        assert found.at(*size) == pytest.approx(of(TRUTH, size), rel=0.15)


def test_a_size_not_seen_for_long_is_begun_anew():
    fit = fitted(SIZES[:1], theta=tuple(30 * each for each in TRUTH))
    fit.observe(SIZES[0], of(TRUTH, SIZES[0]), 100.0)
    assert fit.estimate(TRUTH, 0.6, 100.0).at(*SIZES[0]) == pytest.approx(of(TRUTH, SIZES[0]), rel=0.01)


def test_a_thousand_steps_of_one_size_do_not_wash_out_another():
    fit = fitted()
    for step in range(1000):
        fit.observe(SIZES[2], of(TRUTH, SIZES[2]), 1.0 + 0.01 * step)
    found = fit.estimate(PRIOR, 0.6, 11.0)
    assert found.at(*SIZES[0]) == pytest.approx(of(TRUTH, SIZES[0]), rel=0.15)


def test_what_is_old_decays_towards_the_prior_and_is_doubted():
    fit = fitted()
    young, old, ancient = (fit.estimate(PRIOR, 0.6, now) for now in (1.0, 200.0, 2000.0))
    assert young.doubt < 0.1 < old.doubt < ancient.doubt
    assert young.at(*SIZES[2]) > old.at(*SIZES[2]) > ancient.at(*SIZES[2])
    assert ancient.at(*SIZES[2]) == pytest.approx(of(PRIOR, SIZES[2]), rel=0.01)
    assert (young.age_s, old.age_s) == (pytest.approx(0.1), pytest.approx(199.1))


def test_a_jittering_machine_is_doubted_more_than_a_steady_one():
    steady, jittering = fitted(noise=0.02), fitted(noise=0.9, rounds=20)
    assert jittering.estimate(PRIOR, 0.6, 2.0).doubt > 3 * steady.estimate(PRIOR, 0.6, 2.0).doubt


def test_a_worker_that_was_slow_at_many_sizes_while_it_loaded_is_believed_at_the_one_that_it_has_now():
    fit = fitted([(1.0, float(n), 2.0 * n) for n in range(1, 65, 3)], theta=tuple(1.6 * each for each in TRUTH))
    size = (1.0, 44.0, 90.0)
    for step in range(24):  # two steps of a model of twelve layers
        fit.observe(size, of(TRUTH, size), 2.0 + 0.05 * step)
    assert fit.estimate(PRIOR, 0.6, 3.2).at(*size) == pytest.approx(of(TRUTH, size), rel=0.1)


def test_sizes_of_one_bin_that_take_longer_as_they_are_larger_are_no_jitter():
    """A call of 8 experts and one of 15 are of one bin; each took what it should."""
    chance, fit = random.Random(3), AffineFit()
    for step in range(200):
        activated = chance.randrange(8, 16)
        size = (1.0, float(activated), 2.0 * activated)
        fit.observe(size, of(TRUTH, size), 0.05 * step)
        fit.estimate(TRUTH, 0.6, 0.05 * step)
    found = fit.estimate(TRUTH, 0.6, 10.0)
    assert found.doubt < 0.1
    for size in ((1.0, 8.0, 16.0), (1.0, 15.0, 30.0)):
        assert found.at(*size) == pytest.approx(of(TRUTH, size), rel=0.02)


observations = st.lists(
    st.tuples(
        st.floats(0, 1e4),
        st.floats(0, 1e7),
        st.one_of(st.floats(1e-9, 1e5), st.sampled_from([0.0, -1.0, math.inf, math.nan])),
        st.floats(0, 1e4),
    ),
    max_size=80,
)


@given(observations)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_whatever_is_observed_costs_are_finite_not_negative_and_the_memory_bounded(drawn):
    fit = AffineFit()
    now = 0.0
    for activated, pairs, took_s, later_s in drawn:
        now += later_s
        fit.observe((1.0, activated, pairs), took_s, now)
    found = fit.estimate(PRIOR, 0.6, now + 1.0)
    assert all(0.0 <= each < math.inf for each in found.theta)
    assert 0.0 <= found.doubt < math.inf
    assert fit.sizes <= AffineFit.BINS_MAX


# The book -----------------------------------------------------------------------------------------------------------


def measured_book() -> CostBook:
    book = CostBook(borrow_s=0.05)
    for step in range(20):
        now = 0.1 * step
        for rows in (1, 8, 16):
            book.observe_trunk(rows, 7e-3 + 6e-4 * rows, now)
        for activated, pairs in ((8, 8), (42, 64), (56, 128)):
            book.observe_layer(activated, pairs, 5e-5 + 2.3e-4 * activated + 1.4e-5 * pairs, now)
        book.observe_own_call(3e-4, now)
    return book


def call(book: CostBook, peer: PeerId, now: float, *, slower=1.0, rtt_s=2e-3, tells=True, pairs=64) -> None:
    activated = pairs * 2 // 3
    computed_s = slower * (5e-5 + 2.3e-4 * activated + 1.4e-5 * pairs)
    book.observe_call(
        peer,
        activated=activated,
        pairs=pairs,
        sent_bytes=20_000,
        received_bytes=20_000,
        took_s=rtt_s + 40_000 / 1e8 + computed_s,
        computed_s=computed_s if tells else None,
        now=now,
    )


def test_our_own_costs_come_from_what_was_measured():
    own = measured_book().costs(2.0).own
    assert own.trunk(12) == pytest.approx(7e-3 + 6e-4 * 12, rel=0.05)
    assert own.layer_s + 50 * own.expert_s + 96 * own.pair_s == pytest.approx(5e-5 + 0.0115 + 96 * 1.4e-5, rel=0.08)
    assert own.call_s == pytest.approx(3e-4, rel=0.05)
    assert own.doubt < 0.1


def test_a_worker_nobody_heard_of_is_our_equal_in_doubt():
    book = measured_book()
    own, worker = book.costs(2.0).own, book.worker(ANN, 2.0)
    assert ANN not in book.costs(2.0).workers
    assert worker.expert_s == pytest.approx(own.expert_s)
    assert (worker.rtt_s, worker.sent_byte_s) == LINK_PRIOR[:2]
    assert worker.doubt == pytest.approx(0.6)
    assert worker.age_s == math.inf


@pytest.mark.parametrize("tells", [True, False])
def test_a_slow_worker_and_a_far_one_are_told_apart(tells):
    book = measured_book()
    for step in range(10):
        for peer, rtt_s in ((ANN, 1e-3), (BOB, 0.05)):
            book.observe_round_trip(peer, rtt_s, 0.1 * step)
        for pairs in (16, 64):
            call(book, ANN, 0.1 * step, slower=10.0, rtt_s=1e-3, tells=tells, pairs=pairs)
            call(book, BOB, 0.1 * step, rtt_s=0.05, tells=tells, pairs=pairs)
    ann, bob = (book.costs(1.0).workers[peer] for peer in (ANN, BOB))
    assert ann.expert_s == pytest.approx(2.3e-3, rel=0.25)
    assert ann.rtt_s < 3e-3
    assert bob.rtt_s == pytest.approx(0.05, rel=0.1)
    assert bob.expert_s < 1e-3


def test_a_round_trip_far_shorter_than_thought_is_believed_at_once_and_a_longer_one_is_not():
    book = measured_book()
    for step in range(40):
        call(book, ANN, 0.1 * step, rtt_s=0.012)
    assert book.worker(ANN, 4.0).rtt_s == pytest.approx(0.012, rel=0.15)
    book.observe_round_trip(ANN, 7e-4, 4.0)
    assert book.worker(ANN, 4.0).rtt_s == pytest.approx(7e-4, rel=0.3)
    for step in range(40):
        call(book, ANN, 4.0 + 0.1 * step, rtt_s=7e-4)
    before = book.worker(ANN, 8.0)
    book.observe_round_trip(ANN, 0.03, 8.0)
    after = book.worker(ANN, 8.0)
    assert after.rtt_s == pytest.approx(before.rtt_s, rel=0.25)
    assert after.rtt_s + 20_000 * (after.sent_byte_s + after.received_byte_s) == pytest.approx(7e-4 + 4e-4, rel=0.2)


def test_what_a_worker_says_of_its_time_never_adds_to_what_we_measured():
    book = measured_book()
    for step in range(10):
        book.observe_call(
            ANN,
            activated=40,
            pairs=64,
            sent_bytes=0,
            received_bytes=0,
            took_s=0.01,
            computed_s=1e6,
            now=0.1 * step,
        )
    ann = book.costs(1.0).workers[ANN]
    assert ann.call_s + 40 * ann.expert_s + 64 * ann.pair_s == pytest.approx(0.01, rel=0.05)


def test_who_left_is_forgotten_and_memory_is_bounded():
    book = CostBook(borrow_s=1.0)
    book.observe_round_trip(ANN, 0.01, 0.0)
    book.forget(ANN)
    book.forget(ANN)
    assert not book.costs(0.0).workers
    for number in range(WORKERS_MAX + 3):
        book.observe_round_trip(PeerId(f"w{number}"), 0.01, float(number))
    found = book.costs(2000.0).workers
    assert len(found) == WORKERS_MAX
    assert PeerId("w2") not in found
    assert PeerId(f"w{WORKERS_MAX + 2}") in found
