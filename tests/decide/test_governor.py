import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_cases import NAMES, costs, like, scene

from kvasir_node.decide.costs import CostBook, Costs, OwnCosts, WorkerCosts
from kvasir_node.decide.governor import FORCED, Decision, Governor, GovernorLimits, Situation
from kvasir_node.decide.planner import Plan, PlanLimits, plan
from kvasir_node.decide.prediction import Prediction, predict

ANN, BOB = NAMES[:2]
OWN = OwnCosts(trunk_s=4e-3, trunk_row_s=2e-4, layer_s=5e-5, expert_s=5e-4, pair_s=3e-5, call_s=3e-4, borrow_s=0.05)
SCENE = scene(3, 48, 4, 1)
LIMITS = GovernorLimits()


def offer(gain: float, *, rows=16, workers=1, lanes=1, name=ANN, idle_s=0.01, obstacle="") -> Plan:
    """A plan with that predicted gain over 100 tokens/s alone, 160 at twice the rows; without workers when it is 1."""
    shares = dict.fromkeys(NAMES[:workers], 0.5 / workers) if gain > 1.0 else {}
    return Plan(
        routes={0: (None, name if gain > 1.0 else None)},
        home={0: (None, None)},
        lanes=lanes,
        rows=rows,
        predicted=Prediction(100.0 * gain, rows / 100.0 / gain, 1e6),
        alone=Prediction(100.0, rows / 100.0, 0.0),
        idle_s=idle_s,
        wide_s=rows / 80.0,
        budget_s=0.5,
        shares=shares,
        layers_shared=1 if gain > 1.0 else 0,
        obstacle=obstacle,
    )


def kept(gain: float, *, rows=16) -> Prediction:
    return Prediction(100.0 * gain, rows / 100.0 / gain, 1e6)


def wanted(offered: Plan, kept_gain: float | None = None, *, queued=9, lost=False) -> Situation:
    return Situation(True, queued, offered, None if kept_gain is None else kept(kept_gain), lost)


CALM = Situation(False, 0, offer(1.7))


# What it says, case by case -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("situation", "on", "reason"),
    [
        (CALM, False, "off: calm"),
        (replace(CALM, calm="switched off by fanout.enabled"), False, "off: switched off by fanout.enabled"),
        (wanted(offer(1.7, workers=2)), True, "on: queue 9, gain 1.7×, 2 workers"),
        (wanted(offer(1.2), queued=0), True, "on: queue 0, gain 1.2×, 1 worker"),
        (wanted(offer(2.0, lanes=3)), True, "on: queue 9, gain 2.0×, 1 worker, 3 lanes"),
        (wanted(offer(1.14)), False, "off: gain 1.14× is less than 1.15×"),
        (wanted(offer(1.0, obstacle="no proven worker")), False, "off: no proven worker"),
    ],
)
def test_the_first_word_and_its_reason(situation, on, reason):
    decision = Governor().consider(situation, 10.0)
    assert (decision.on, decision.reason, decision.changed) == (on, reason, True)
    assert decision.lanes == (situation.offered.lanes if on else 1)


@pytest.mark.parametrize(
    ("offered", "kept_gain", "after_s", "on", "changed"),
    [
        (offer(1.5), 1.5, 0.1, True, False),  # nothing new
        (offer(1.55, name=BOB), 1.5, 10.0, True, False),  # better, but not by enough to change
        (offer(1.6, name=BOB), 1.5, 0.5, True, False),  # better by enough, too soon
        (offer(1.6, name=BOB), 1.5, 10.0, True, True),
        (offer(1.10), 1.10, 10.0, True, False),  # between the two thresholds it stays as it is
        (offer(1.04), 1.04, 0.5, True, False),  # it does not pay any more, too soon to say
        (offer(1.04), 1.04, 10.0, False, True),
        (offer(1.3, name=BOB), 0.9, 0.1, True, True),  # worse than alone: at once
        (offer(1.0, obstacle="far"), 0.9, 0.1, False, True),
        (offer(1.3, name=BOB), 0.3, 0.1, True, True),  # 0.53 s for a token is over the budget, too
    ],
)
def test_what_becomes_of_a_plan_in_force(offered, kept_gain, after_s, on, changed):
    governor = Governor()
    governor.consider(wanted(offer(1.5)), 10.0)
    decision = governor.consider(wanted(offered, kept_gain), 10.0 + after_s)
    assert (decision.on, decision.changed) == (on, changed)
    assert governor.on is on


def test_a_plan_whose_peer_is_lost_is_changed_at_once():
    governor = Governor()
    governor.consider(wanted(offer(2.0, workers=2)), 10.0)
    decision = governor.consider(wanted(offer(1.5, name=BOB), 1.4, lost=True), 10.1)
    assert (decision.on, decision.changed, decision.plan.routes[0][1]) == (True, True, BOB)
    gone = governor.consider(wanted(offer(1.0, obstacle="no proven worker"), 1.0, lost=True), 10.2)
    assert (gone.on, gone.reason) == (False, "off: no proven worker")


def test_a_token_over_the_budget_ends_a_plan_that_gains():
    governor = Governor()
    governor.consider(wanted(offer(1.5, rows=64)), 10.0)
    late = Situation(True, 9, offer(1.2, rows=64, name=BOB), Prediction(130.0, 0.6, 0.0))
    assert governor.consider(late, 10.1).plan.routes[0][1] is BOB


def test_load_comes_and_goes_without_a_dwell():
    governor = Governor()
    said = [governor.consider(CALM if step % 2 else wanted(offer(1.5), 1.5), 0.1 * step) for step in range(6)]
    assert [each.on for each in said] == [True, False] * 3
    assert all(each.changed for each in said)


def test_what_did_not_pay_is_not_tried_again_at_once():
    governor = Governor()
    governor.consider(wanted(offer(1.5)), 0.0)
    governor.consider(wanted(offer(1.0, obstacle="far"), 0.9), 1.0)
    again = governor.consider(wanted(offer(1.5)), 1.5)
    assert (again.on, again.reason) == (False, "off: it did not pay a moment ago")
    assert governor.consider(wanted(offer(1.5)), 3.1).on


# Measured against alone ---------------------------------------------------------------------------------------------


def considered(governor: Governor, gains: Sequence[float], since: float, *, every=1.0) -> list[bool]:
    """Whether it is on, at each of some moments in a row, when so much is promised."""
    found: list[bool] = []
    for number, gain in enumerate(gains):
        situation = wanted(offer(gain), gain if governor.on else None)
        found.append(governor.consider(situation, since + number * every).on)
    return found


def test_what_promises_a_little_for_a_while_is_tried_now_and_then():
    governor = Governor()
    assert considered(governor, [1.1] * 5, 10.0) == [False, False, False, True, True]
    governor.consider(CALM, 20.0)
    assert considered(governor, [1.1] * 5, 21.0) == [False] * 5  # not again so soon
    assert considered(governor, [1.1] * 2, 10.0 + 3.0 + LIMITS.try_again_s) == [True] * 2


@pytest.mark.parametrize("gap", [1.0, 1.04])
def test_what_promises_a_little_only_at_times_is_not_tried(gap):
    assert not any(considered(Governor(), [1.1, 1.1, 1.1, gap] * 5, 10.0))
    assert not any(considered(Governor(), [1.1] * 100, 10.0, every=0.02))


def test_what_promises_a_little_is_not_tried_in_calm():
    governor = Governor()
    for number in range(20):
        governor.consider(wanted(offer(1.1)) if number % 3 else CALM, 10.0 + number)
        assert not governor.on


def test_what_promises_a_little_is_not_tried_long_after_a_loss():
    governor = Governor()
    governor.consider(wanted(offer(1.5)), 10.0)
    measured(governor, 60.0, 10.3, 11.3)
    assert not governor.consider(wanted(offer(1.5), 1.5), 11.3).on
    assert not any(considered(governor, [1.1] * 290, 12.0))
    assert considered(governor, [1.1], 11.4 + LIMITS.backoff_max_s) == [True]


def test_a_try_that_loses_keeps_no_plan_from_being_used_that_promises_much():
    governor = Governor()
    for number in range(40):  # each loses, for hours
        at = 10.0 + number * 2 * LIMITS.backoff_max_s
        assert considered(governor, [1.1] * 4, at) == [False, False, False, True]
        measured(governor, 60.0, at + 3.3, at + 4.3)
        decision = governor.consider(wanted(offer(1.1), 1.1), at + 4.3)
        assert (decision.on, decision.reason) == (False, "off: measured 0.60× alone when it was tried")
        assert not any(considered(governor, [1.1] * 20, at + 5.0, every=14.0))
        assert considered(governor, [2.0], at + 290.0) == [True]
        governor.consider(CALM, at + 291.0)


def measured(governor: Governor, tokens_per_s: float, since: float, until: float, *, rows=16) -> None:
    parts = round((until - since) / 0.05)
    for part in range(parts):
        governor.observe(0.05 * tokens_per_s, rows, 0.05, since + 0.05 * (part + 1))


def test_a_measured_loss_ends_it_within_a_second_and_each_next_one_costs_less():
    governor, now, tried = Governor(), 0.0, []
    bad_s = 0.0
    while now < 120.0:
        decision = governor.consider(wanted(offer(1.5), 1.5), now)
        if decision.on and decision.changed:
            tried.append(now)
        if decision.on:
            measured(governor, 60.0, now, now + 0.25)
            bad_s += 0.25
        now += 0.25
    gaps = [later - earlier for earlier, later in pairwise(tried)]
    assert gaps == sorted(gaps)
    assert gaps[0] >= LIMITS.backoff_s
    assert gaps[-1] > 4 * gaps[0]
    assert bad_s / len(tried) <= 1.5
    assert "measured 0.60× alone" in governor.consider(wanted(offer(1.5), 1.5), now).reason


def test_a_measured_gain_keeps_it_and_forgives():
    governor = Governor()
    for step in range(400):
        now = 0.25 * step
        assert governor.consider(wanted(offer(1.5), 1.5), now).on
        measured(governor, 140.0, now, now + 0.25)
    assert governor.measured_gain == pytest.approx(1.4)


def test_a_single_slow_step_is_not_yet_a_loss():
    governor = Governor()
    governor.consider(wanted(offer(1.5)), 0.0)
    measured(governor, 140.0, 0.5, 1.0)
    governor.observe(16, 16, 0.25, 1.25)
    assert governor.consider(wanted(offer(1.5), 1.5), 1.3).on


def test_a_small_loss_must_be_found_twice_in_a_row():
    governor, now = Governor(), 0.5
    governor.consider(wanted(offer(1.5)), 0.0)
    said = []
    for tokens_per_s in (90.0, 140.0, 90.0, 140.0, 90.0, 90.0):
        measured(governor, tokens_per_s, now, now + 0.6)
        now += 0.6
        said.append(governor.consider(wanted(offer(1.5), 1.5), now).on)
    assert said == [True] * 5 + [False]


def test_a_step_that_was_under_way_at_the_change_is_not_judged():
    governor = Governor()
    governor.consider(wanted(offer(1.5)), 0.0)
    governor.observe(16, 16, 1.1, 0.1)
    assert governor.consider(wanted(offer(1.5), 1.5), 0.25).on


def test_losses_of_long_ago_are_forgiven():
    """A second loss right after the first costs twice the pause; one after a sound while costs the first again."""
    pauses = []
    for sound_s in (1.0, 30.0):
        governor = Governor()
        governor.consider(wanted(offer(1.5)), 0.0)
        measured(governor, 60.0, 0.5, 1.5)
        assert not governor.consider(wanted(offer(1.5), 1.5), 1.5).on
        assert governor.consider(wanted(offer(1.5)), 6.0).on
        for second in range(int(sound_s)):
            measured(governor, 140.0, 6.5 + second, 7.5 + second)
            assert governor.consider(wanted(offer(1.5), 1.5), 7.5 + second).on
        measured(governor, 60.0, 6.5 + sound_s, 7.5 + sound_s)
        pauses.append(governor.consider(wanted(offer(1.5), 1.5), 7.5 + sound_s).reason[-3:])
    assert pauses == ["8 s", "4 s"]


def test_what_alone_really_gave_is_what_fan_out_is_held_against():
    """Costs say 100 tokens/s alone, really it was 70: 90 is then a gain."""
    governor = Governor()
    governor.consider(CALM, 0.0)
    measured(governor, 70.0, 0.5, 20.0)
    governor.consider(wanted(offer(1.5)), 20.0)
    measured(governor, 90.0, 20.5, 30.0)
    assert governor.consider(wanted(offer(1.5), 1.5), 30.0).on
    assert governor.measured_gain == pytest.approx(90 / 70, rel=0.03)


def test_fewer_rows_are_held_against_alone_with_fewer_rows():
    governor = Governor()
    governor.consider(wanted(offer(1.5, idle_s=0.02)), 0.0)
    measured(governor, 60.0, 0.5, 5.0, rows=1)  # alone gives one request 50
    assert governor.consider(wanted(offer(1.5), 1.5), 5.0).on
    assert governor.measured_gain == pytest.approx(60 / 50, rel=0.01)


@pytest.mark.parametrize(("rows", "ends"), [(16, True), (31, True), (32, True), (33, False)])
def test_steps_with_a_short_prompt_are_judged_and_those_with_a_long_one_are_not(rows, ends):
    """Alone gives 100 tokens/s at 16 rows and 160 at 32, so half of that is a loss at either."""
    governor = Governor()
    governor.consider(wanted(offer(1.5)), 0.0)
    for step in range(8):
        governor.observe(rows, rows, rows / 80.0, 1.0 + step)
    assert governor.consider(wanted(offer(1.5), 1.5), 9.0).on is not ends


@pytest.mark.parametrize("rows", [1, 16])
def test_alone_with_twice_the_rows_is_what_was_predicted(rows):
    """Steps with prompts, while off, leave no bias that others are held against, and their gain is no loss."""
    governor = Governor()
    governor.consider(Situation(False, 0, offer(1.5, rows=rows)), 0.0)
    for step in range(40):
        governor.observe(2 * rows, 2 * rows, 2 * rows / 160.0, 1.0 + step)
    governor.consider(wanted(offer(1.5, rows=rows)), 50.0)
    for step in range(80):
        governor.observe(2 * rows, 2 * rows, 2 * rows / 160.0 / 1.25, 51.0 + step)
        assert governor.consider(wanted(offer(1.5, rows=rows), 1.5), 51.0 + step).on
    assert governor.measured_gain == pytest.approx(1.25)
    for step in range(80):
        governor.observe(rows, rows, rows / 100.0 / 1.25, 151.0 + step)
        governor.consider(wanted(offer(1.5, rows=rows), 1.5), 151.0 + step)
    assert governor.measured_gain == pytest.approx(1.25)


def test_a_step_with_a_prompt_may_take_longer_than_the_budget():
    governor = Governor()
    governor.consider(wanted(offer(2.0)), 0.0)
    for step in range(40):
        governor.observe(400, 32, 0.9, 1.0 + step)
        assert governor.consider(wanted(offer(2.0), 2.0), 1.0 + step).on


@pytest.mark.parametrize(("every", "stays"), [(40, True), (6, False)])
def test_tokens_that_now_and_then_wait_for_ever_so_long_end_a_plan_that_gains_in_the_mean(every, stays):
    """Steps of 16 tokens in 10 ms, 16 times as quick as alone; some take 0.9 s, of a budget of 0.5 s."""
    governor, now = Governor(), 1.0
    governor.consider(wanted(offer(2.0)), 0.0)
    said = []
    for step in range(1, 200):
        took_s = 0.9 if step % every == 0 else 0.01
        now += took_s
        governor.observe(16, 16, took_s, now)
        said.append(governor.consider(wanted(offer(2.0), 2.0), now))
        if not said[-1].on:
            break
    assert said[-1].on is stays
    if not stays:
        assert said[-1].reason.endswith("% of tokens took far longer than 500 ms, tried again in 4 s")
        assert governor.consider(wanted(offer(2.0)), now + 3.0).reason.endswith("tried again in 1 s")
        assert governor.consider(wanted(offer(2.0)), now + 4.1).on


def test_what_is_forced_stays_whatever_it_costs():
    governor = Governor(FORCED)
    lossy = replace(offer(1.2), predicted=Prediction(10.0, 1.6, 1e6))
    assert governor.consider(wanted(lossy), 0.0).on
    measured(governor, 5.0, 0.5, 10.0)
    again = governor.consider(wanted(lossy, 0.1), 10.0)
    assert (again.on, again.changed) == (True, False)
    assert governor.measured_gain == pytest.approx(0.05)
    assert governor.consider(wanted(offer(1.0, obstacle="no proven worker"), 0.1, lost=True), 11.0).on is False
    assert governor.consider(wanted(lossy), 11.1).on


def test_those_who_come_back_are_not_made_to_wait_for_those_who_left():
    governor = Governor()
    governor.consider(wanted(offer(2.0)), 0.0)
    assert not governor.consider(wanted(offer(1.0, obstacle="no proven worker"), 1.0, lost=True), 1.0).on
    assert governor.consider(wanted(offer(2.0)), 1.2).on


# A world in which it acts -------------------------------------------------------------------------------------------


@dataclass
class World:
    """Steps take what the formulas say of the true costs; what is believed comes from observing them."""

    truth: Costs
    rows: int = 16
    proven: bool = True
    wanted: bool = True
    told_call_s: float = 0.0  # what is said of our own part of a call; 0 = the truth
    now: float = 0.0
    book: CostBook = field(default_factory=lambda: CostBook(OWN.borrow_s))
    governor: Governor = field(default_factory=Governor)
    decision: Decision | None = None
    log: list[tuple[float, float, float]] = field(default_factory=list)  # at, tokens, what alone would have given
    asked_at: float = -1.0

    def scene(self):
        return SCENE if self.proven else replace(SCENE, proven=())

    def set_worker(self, **changes: float) -> None:
        self.truth = Costs(self.truth.own, {ANN: replace(self.truth.workers[ANN], **changes)})

    def ask(self) -> Decision:
        if self.proven:
            self.book.observe_round_trip(ANN, self.truth.workers[ANN].rtt_s, self.now)
        known = self.book.costs(self.now)
        believed = Costs(known.own, {ANN: self.book.worker(ANN, self.now)})
        best = plan(self.scene(), believed, self.rows, PlanLimits(4.0))
        force = self.governor.plan
        now_gives = None
        if force is not None:
            now_gives = predict(self.scene(), believed, self.rows, force.lanes, force.routes)
        lost = force is not None and bool(force.shares) and not self.proven
        situation = Situation(self.wanted, 9 if self.wanted else 0, best, now_gives, lost)
        self.asked_at, self.decision = self.now, self.governor.consider(situation, self.now)
        return self.decision

    def run(self, until: float) -> None:
        while self.now < until:
            if self.now >= self.asked_at + 0.25:
                self.ask()
            self.step()

    def step(self) -> None:
        assert self.decision is not None
        routes = self.decision.plan.routes if self.decision.on else self.decision.plan.home
        found = predict(SCENE, self.truth, self.rows, self.decision.lanes, routes)
        alone = predict(SCENE, self.truth, self.rows, 1, {})
        self.now += found.token_s
        self.governor.observe(self.rows, self.rows, found.token_s, self.now)
        self.log.append((self.now, self.rows, found.token_s * alone.tokens_per_s))
        self.observe(routes)

    def observe(self, routes) -> None:
        own, rows = self.truth.own, self.rows
        self.book.observe_trunk(rows, own.trunk(rows), self.now)
        for row in routes.values():
            for peer in (None, ANN):
                count = row.count(peer)
                activated, pairs = round(count * (1 - (1 - 4 / 48) ** rows)), round(rows * 4 * count / 48)
                if count and peer is None:
                    took_s = own.layer_s + own.expert_s * activated + own.pair_s * pairs
                    self.book.observe_layer(activated, pairs, took_s, self.now)
                elif count:
                    self.observe_call(self.truth.workers[ANN], activated, pairs)

    def observe_call(self, ann: WorkerCosts, activated: int, pairs: int) -> None:
        computed_s = ann.call_s + ann.expert_s * activated + ann.pair_s * pairs
        self.book.observe_own_call(self.told_call_s or self.truth.own.call_s, self.now)
        self.book.observe_call(
            ANN,
            activated=activated,
            pairs=pairs,
            sent_bytes=2048 * self.rows,
            received_bytes=2048 * self.rows,
            took_s=ann.rtt_s + 4096 * self.rows * ann.sent_byte_s + computed_s,
            computed_s=computed_s,
            now=self.now,
        )

    def ratio(self, since: float, until: float) -> float:
        """Tokens in that time, as a multiple of what alone would have given."""
        part = [each for each in self.log if since < each[0] <= until]
        return sum(each[1] for each in part) / sum(each[2] for each in part)

    def worst_two_seconds(self, since: float, until: float) -> float:
        starts = [since + 0.25 * index for index in range(int((until - since - 2.0) * 4) + 1)]
        return min(self.ratio(start, start + 2.0) for start in starts)


def test_playbook_of_a_good_worker():
    world = World(costs(OWN, like(OWN)))
    world.run(20.0)
    assert world.decision is not None
    assert world.decision.on
    assert world.decision.reason.startswith("on: queue 9, gain 1.")
    assert world.ratio(5.0, 20.0) > 1.4
    assert world.worst_two_seconds(0.0, 20.0) > 0.97


@pytest.mark.parametrize("slower", [10.0, 30.0])
def test_playbook_of_a_worker_that_turns_slower(slower):
    world = World(costs(OWN, like(OWN)))
    world.run(10.0)
    turned = like(OWN, slower=slower)
    world.set_worker(call_s=turned.call_s, expert_s=turned.expert_s, pair_s=turned.pair_s)
    steps_before = len(world.log)
    world.run(40.0)
    slow = [each for each in world.log[steps_before:] if each[2] > 1.2 * each[1]]
    alone_s = 16 / predict(SCENE, world.truth, 16, 1, {}).tokens_per_s
    assert len(slow) <= 4
    assert sum(alone_s * (would - tokens) / tokens for _, tokens, would in slow) < 2.0
    assert world.ratio(20.0, 40.0) > 0.99


def test_playbook_of_a_worker_that_flaps():
    """Ten times slower for two seconds, fine for two, and so on: never long below alone."""
    world = World(costs(OWN, like(OWN)))
    world.run(8.0)
    for turn in range(15):
        now_like = like(OWN, slower=1.0 if turn % 2 else 10.0)
        world.set_worker(call_s=now_like.call_s, expert_s=now_like.expert_s, pair_s=now_like.pair_s)
        world.run(8.0 + 2.0 * (turn + 1))
    assert world.ratio(8.0, 38.0) > 0.95
    assert world.worst_two_seconds(10.0, 38.0) > 0.9


def test_playbook_of_a_worker_that_vanishes_and_comes_back():
    world = World(costs(OWN, like(OWN)))
    world.run(5.0)
    world.proven = False
    gone = world.ask()
    assert (gone.on, gone.changed, gone.reason) == (False, True, "off: no proven worker")
    world.run(8.0)
    assert world.ratio(5.0, 8.0) == pytest.approx(1.0, abs=0.01)
    world.proven = True
    world.run(12.0)
    assert world.decision is not None
    assert world.decision.on


def test_playbook_of_load_that_comes_and_goes():
    world = World(costs(OWN, like(OWN)))
    for turn in range(10):
        world.wanted, world.rows = turn % 2 == 0, 16 if turn % 2 == 0 else 1
        decision = world.ask()
        world.run(2.0 * (turn + 1))
        assert decision.on is world.wanted
        if not world.wanted:
            assert decision.reason == "off: calm"
            assert all(peer is None for row in decision.plan.home.values() for peer in row)
    assert world.ratio(0.0, 20.0) > 1.1


def test_playbook_of_a_far_worker():
    world = World(costs(OWN, like(OWN, rtt_s=0.08)))
    world.run(15.0)
    assert world.decision is not None
    assert not world.decision.on
    assert "worker RTT 8" in world.decision.reason
    assert world.ratio(5.0, 15.0) > 0.97


def test_playbook_of_costs_that_promise_too_much():
    """Our own part of a call is far dearer than is measured: only steps as wholes tell, and they are heard."""
    world = World(costs(replace(OWN, call_s=0.03), like(OWN)), told_call_s=2e-4)
    world.run(60.0)
    assert any(each[2] > 1.1 * each[1] for each in world.log)  # it was tried
    assert world.ratio(0.0, 60.0) > 0.93
    assert world.ratio(30.0, 60.0) > 0.96


@given(st.integers(0, 10_000))
@settings(max_examples=8, deadline=None, derandomize=True)
def test_whatever_a_worker_does_alone_is_nearly_kept(seed):
    """Speeds, distances, losses and loads at random: in all, at most a few per cent less than alone."""
    chance = random.Random(seed)
    world = World(costs(OWN, like(OWN)))
    world.run(2.0)
    for _ in range(8):
        now_like = like(OWN, slower=10 ** chance.uniform(-0.5, 1.2), rtt_s=10 ** chance.uniform(-4, -1.5))
        world.set_worker(
            rtt_s=now_like.rtt_s, call_s=now_like.call_s, expert_s=now_like.expert_s, pair_s=now_like.pair_s
        )
        world.wanted, world.proven = chance.random() < 0.8, chance.random() < 0.8
        world.ask()
        world.run(world.now + chance.uniform(0.5, 4.0))
    assert world.ratio(0.0, world.now) > 0.9
