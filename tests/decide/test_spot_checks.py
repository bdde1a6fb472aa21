"""Which rows are checked, and what that does to liars: ledger and spot checks together, over many seeds."""

import random
from collections import Counter
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_node.base.ids import PeerId, SliceId
from kvasir_node.decide.ledger import Ledger, LedgerLimits, Standing
from kvasir_node.decide.spot_checks import PEERS_MAX, WATCHED_ROWS, SpotChecks

ANN, BOB = PeerId("ann"), PeerId("bob")
PARTS = (SliceId(0, 0, 31), SliceId(1, 0, 31))
HOME = "198.51.100.1"
LIMITS = LedgerLimits(5.0, 600.0, 5, 600.0, trials_per_address_max=8, trial_window_s=60.0)
SEEDS = 1000
ROWS = 16  # of one call


def no_expert(row):
    return ()


def test_without_a_ratio_nothing_is_checked_and_with_all_of_it_everything():
    assert SpotChecks(0.0, random.Random(1)).pick(ANN, 0, 10_000, no_expert) == ()
    assert SpotChecks(1.0, random.Random(1)).pick(ANN, 0, 5, no_expert) == (0, 1, 2, 3, 4)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.floats(0.0, 1.0),
    st.lists(st.tuples(st.sampled_from([ANN, BOB]), st.integers(1, 40)), max_size=30),
    st.integers(0, 99),
)
def test_what_is_picked_are_rows_of_the_call_each_once_and_in_order(ratio, calls, seed):
    checks = SpotChecks(ratio, random.Random(seed))
    for peer, rows in calls:
        picked = checks.pick(peer, 0, rows, lambda row: (row % 7,))
        assert list(picked) == sorted(set(picked))
        assert set(picked) <= set(range(rows))


@pytest.mark.parametrize("rows", [1, 16, 256])
def test_the_share_that_is_checked_is_the_ratio_whatever_the_size_of_a_call(rows):
    checks = SpotChecks(0.01, random.Random(3))
    picked = sum(len(checks.pick(ANN, 0, rows, lambda row: (row % 8, 9))) for _ in range(400_000 // rows))
    assert picked == pytest.approx(4000, rel=0.06)  # 4 standard deviations


def test_no_position_in_a_call_is_safe():
    checks = SpotChecks(0.05, random.Random(4))
    seen = Counter(row for _ in range(20_000) for row in checks.pick(ANN, 0, ROWS, lambda row: (row % 8,)))
    assert min(seen[row] for row in range(ROWS)) > 0.8 * max(seen.values())


def test_the_same_seed_gives_the_same_checks():
    def story(seed):
        checks = SpotChecks(0.1, random.Random(seed))
        return [checks.pick(ANN, 0, ROWS, lambda row: (row % 5,)) for _ in range(50)]

    assert story(1) == story(1) != story(2)


def test_a_peer_that_is_watched_is_checked_wholly_for_a_while_and_others_are_not():
    checks = SpotChecks(0.0, random.Random(1))
    checks.watch(ANN)
    for _ in range(WATCHED_ROWS // 100):
        assert len(checks.pick(ANN, 0, 100, no_expert)) == 100
        assert checks.pick(BOB, 0, 100, no_expert) == ()
    assert checks.pick(ANN, 0, 100, no_expert) == ()


def test_law_7_the_tables_are_bounded():
    checks = SpotChecks(0.5, random.Random(1))
    for number in range(2 * PEERS_MAX):
        checks.watch(PeerId(f"watched {number}"))
        checks.pick(PeerId(f"peer {number}"), 0, ROWS, lambda row: (row,))
    assert len(checks._watched) == len(checks._checked) == PEERS_MAX


class Worker:
    """Serves calls of ROWS rows through ledger and spot checks; `is_wrong(rng, experts)` decides row by row."""

    def __init__(self, seed, is_wrong, heat=None, experts_per_row=2, honest_after=0) -> None:
        self.rng = random.Random(seed)
        self.checks = SpotChecks(0.01, random.Random(seed + 1_000_000))
        self.is_wrong = is_wrong
        self.heat = heat
        self.each = experts_per_row
        self.ledger = Ledger(LIMITS)
        self.rows = self.now = 0
        self.honest_until = 0
        self.honest_after = honest_after  # rows for which a clever one behaves once it was caught
        for part in PARTS:
            self.ledger.attach(ANN, part)

    def prove(self):
        """It behaves in its trials."""
        for part in PARTS:
            if self.ledger.standing(ANN, part) is not Standing.PROVEN:
                self.now += 1000
                self.ledger.begin_trial(ANN, part, HOME, self.now)
                assert self.ledger.right(ANN, part, self.now)

    def rows_until_banned(self, most):
        while self.rows < most and self.ledger.standing(ANN, PARTS[0]) is not Standing.BANNED:
            self.prove()
            self.call()
        return self.rows

    def call(self):
        chosen = {}

        def experts_of(row):
            if row not in chosen and self.heat is not None:
                chosen[row] = self.rng.choices(range(len(self.heat)), cum_weights=self.heat, k=self.each)
            return chosen.get(row, ())

        picked = self.checks.pick(ANN, 0, ROWS, experts_of)
        for row in picked:  # whether any other row is wrong makes no difference to what follows
            if self.rows + row >= self.honest_until and self.is_wrong(self.rng, experts_of(row)):
                self.ledger.caught(ANN, self.now, "differs")
                self.checks.watch(ANN)
                self.honest_until = self.rows + self.honest_after
                break
        self.rows += ROWS


def banned_within(limit, is_wrong, seeds=SEEDS, **changes: object):
    """The share of seeds in which it is banned within `limit` of its rows."""
    found = [Worker(seed, is_wrong, **changes).rows_until_banned(limit + ROWS) for seed in range(seeds)]
    return sum(rows <= limit for rows in found) / seeds


def test_a_liar_on_every_row_is_banned_within_500_of_its_rows():
    assert banned_within(500, lambda rng, experts: True) >= 0.99


def test_a_liar_on_one_row_of_a_hundred_is_banned_within_50_000_of_its_rows():
    assert banned_within(50_000, lambda rng, experts: rng.random() < 0.01, seeds=600) >= 0.99


def test_a_liar_that_behaves_once_it_was_caught_is_not_forgiven():
    within = banned_within(1000 + 2 * WATCHED_ROWS, lambda rng, experts: True, honest_after=2 * WATCHED_ROWS)
    assert within >= 0.99


HEAT = tuple(
    accumulate(1 / (1 + index) for index in range(64))
)  # the coldest is chosen 64 times as seldom as the hottest


def test_one_bad_expert_of_many_is_found_also_when_it_is_seldom_used():
    worst = banned_within(50_000, lambda rng, experts: 63 in experts, seeds=300, heat=HEAT)
    assert worst >= 0.99


def test_checks_are_spread_over_experts_more_evenly_than_work_is():
    rng, checks = random.Random(7), SpotChecks(0.02, random.Random(8))
    worked, checked = Counter(), Counter()
    for _ in range(10_000):
        chosen = [rng.choices(range(64), cum_weights=HEAT, k=2) for _ in range(ROWS)]
        worked.update(index for experts in chosen for index in experts)
        picked = checks.pick(ANN, 0, ROWS, lambda row, chosen=chosen: chosen[row])
        checked.update(index for row in picked for index in chosen[row])
    cold = range(48, 64)
    share_of_work = sum(worked[index] for index in cold) / worked.total()
    share_of_checks = sum(checked[index] for index in cold) / checked.total()
    assert share_of_checks > 1.5 * share_of_work
    assert min(checked[index] for index in range(64)) > 0


def test_an_honest_worker_is_checked_and_never_doubted():
    worker = Worker(1, lambda rng, experts: False)
    assert worker.rows_until_banned(100_000) >= 100_000
    assert worker.ledger.strikes() == {}
