"""Whether fan-out is on, with which plan, and why: slow to change its mind for a gain, quick to say no to a loss.

It does not know how plans are made or carried out, nor which experts are where. It is told of the load with a plan that
was made for it (`consider`), and of what was computed in which time (`observe`), and says what should be in force.

    off --wanted, and the plan promises on_gain--> on
    off --wanted, and it promises off_gain for try_after_s--> on     now and then, while nothing was lost for long
    on  --not wanted--> off                                          at once: idle is local
    on  --measured less than alone--> off, and backs off             at once, twice as long each time
    on  --too many tokens over the budget--> off, and backs off      the same
    on  --what is in force loses, is over the budget, or lost its peers--> another plan, or off      at once
    on  --what is in force promises less than off_gain--> off        after the dwell
    on  --another plan promises change_gain more--> that             after the dwell

What alone would give is the plan's prediction, corrected by what steps really took while fan-out was off. So is the
budget, max_slowdown × the time of a token when idle: a plan may gain in the mean and yet let some tokens wait for ever
so long, for a worker that answers late at random; of a steady one a token never takes longer than alone.

A plan that promises little is tried now and then: what a worker costs is only known well while it is used, and one that
was busy with other things when it was timed last would seem slow for long. What promises nothing is not tried: looks
(`decide/looks`) keep what is believed of workers from growing old meanwhile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from kvasir_node.decide.planner import Plan
from kvasir_node.decide.prediction import Prediction


@dataclass(frozen=True, slots=True)
class GovernorLimits:
    on_gain: float = 1.15
    off_gain: float = 1.05  # below on_gain, or it would flap
    change_gain: float = 1.05  # of another plan over the one in force: changing costs a step or two
    try_after_s: float = 3.0  # that a plan promises off_gain and not on_gain, until it is tried ...
    try_again_s: float = 60.0  # ... not so soon after the last try, nor within backoff_max_s of a loss
    dwell_s: float = 2.0  # between two changes that are made for a gain
    settle_s: float = 0.2  # after a change nothing is judged: steps under way are the old ones
    judge_s: float = 0.5  # computed time over which fan-out is held against alone
    worth: float = 1.0  # what is in force must promise at least this, as a multiple of alone
    loss: float = 0.97  # measured, as a multiple of alone: less is a loss, when it is found twice in a row ...
    sure_loss: float = 0.85  # ... or less than this once: a single slow step among a few is no loss yet
    late_share: float = 0.1  # of tokens that may take longer than the budget, with some room for the clock's sake
    backoff_s: float = 4.0  # after a first loss; doubles with each one ...
    backoff_max_s: float = 300.0  # ... up to this
    sound_s: float = 20.0  # on for so long without a loss: the losses before are forgotten


FORCED = GovernorLimits(
    on_gain=0.0, off_gain=0.0, change_gain=1.05, dwell_s=0.0, worth=0.0, loss=0.0, sure_loss=0.0, late_share=1.0
)
"""What can be shared is, at any loss: for tests of the way to the workers and back."""


@dataclass(frozen=True, slots=True)
class Situation:
    """`wanted`: saturated, or fanout.when says so at any load. `calm`: the words for why not, when it is not wanted.

    `offered`: the best plan for the load. `kept`: what the routes in force would give for the same rows at the costs
    of now; None when fan-out is off. `lost`: a peer of the routes in force may not carry load any more.
    """

    wanted: bool
    queued: int
    offered: Plan
    kept: Prediction | None = None
    lost: bool = False
    calm: str = "calm"


@dataclass(frozen=True, slots=True)
class Decision:
    """`plan` is in force when `on`; else its `home` routes are, in one lane. `changed` = carry it out anew."""

    on: bool
    plan: Plan
    gain: float  # predicted of what is in force; of the offer when off
    reason: str
    changed: bool

    @property
    def lanes(self) -> int:
        return self.plan.lanes if self.on else 1


@dataclass(slots=True)
class _Judged:
    """What was computed since the last judgement, and what alone would have given in the same time."""

    tokens: float = 0.0
    alone_tokens: float = 0.0
    took_s: float = 0.0
    count: int = 0


@dataclass(slots=True)
class Governor:
    BIAS_LIMITS: ClassVar[tuple[float, float]] = (0.5, 2.0)  # alone as measured, as a multiple of predicted
    ROWS_MAX: ClassVar[int] = 2  # times those planned for: what more of them would take alone is not predicted
    LATE: ClassVar[float] = 1.5  # budgets: less is an honest step on a machine that does other things as well
    LATE_STEPS: ClassVar[int] = 32  # over which the share of late ones is smoothed: one or two are no habit

    limits: GovernorLimits = field(default_factory=GovernorLimits)
    measured_gain: float | None = None  # tokens per second of the last judgement, as a multiple of alone
    _plan: Plan | None = None  # in force, None = off
    _reference: Plan | None = None  # whose predictions for alone are the newest
    _changed_at: float = -math.inf
    _home: object = None  # routes in force while off
    _bias: float = 1.0
    _judged: _Judged = field(default_factory=_Judged)
    _late_share: float = 0.0  # of steps since the last change
    _is_doubted: bool = False  # the last judgement was a loss, but not a sure one
    _losses: int = 0  # in a row
    _lost_at: float = -math.inf
    _blocked_until: float = -math.inf  # by a loss
    _blocked_for: str = ""  # in words
    _promised_since: float = math.inf  # a little, while off
    _is_try: bool = False  # of what promised only a little: its loss says nothing of plans that promise much
    _no_try_until: float = -math.inf
    _rests_until: float = -math.inf  # by the dwell, after it did not pay any more

    @property
    def on(self) -> bool:
        return self._plan is not None

    @property
    def plan(self) -> Plan | None:
        """What is in force; None while off."""
        return self._plan

    def observe(self, tokens: float, rows: int, took_s: float, now: float) -> None:
        """So many tokens, of answers and prompts, were computed in steps of about so many rows in that time.

        Steps of far more rows than were planned for do not count. Those with a short prompt do, by whichever routes
        such go: where answers are short, most steps have one, and a loss would last.
        """
        reference = self._reference
        if reference is None or tokens <= 0.0 or took_s <= 0.0 or now - self._changed_at < self.limits.settle_s:
            return
        if rows > self.ROWS_MAX * reference.rows:
            return
        alone = took_s * self._alone_tokens_per_s(reference, rows)
        if self._plan is None:
            low, high = self.BIAS_LIMITS
            self._bias += (min(high, max(low, tokens / alone)) - self._bias) / 8
            return
        self._judged.tokens += tokens
        self._judged.alone_tokens += alone * self._bias
        self._judged.took_s += took_s
        self._judged.count += 1
        if rows <= reference.rows:  # a prompt takes its time
            is_late = took_s > self.LATE * reference.budget_s / self._bias
            self._late_share += (is_late - self._late_share) / self.LATE_STEPS

    def _alone_tokens_per_s(self, plan: Plan, rows: int) -> float:
        """A step's time between two of the three that are predicted, as a power of the rows."""
        if rows > plan.rows:
            power = math.log2(plan.wide_s / plan.alone.token_s)
            return rows / (plan.alone.token_s * (rows / plan.rows) ** power)
        if plan.rows <= 1:
            return rows / plan.idle_s
        power = math.log(plan.alone.token_s / plan.idle_s) / math.log(plan.rows)
        return rows / (plan.idle_s * max(1, rows) ** power)

    def consider(self, situation: Situation, now: float) -> Decision:
        """What should be in force from now on; to be asked some times a second, and when who is proven changes."""
        self._reference = situation.offered
        lost = self._is_loss(now) or self._is_late(now)
        if not situation.wanted:
            self._promised_since = math.inf
            return self._off(situation, now, f"off: {situation.calm}")
        if lost:
            return self._off(situation, now, self._loss_words(now))
        if self._plan is None:
            return self._consider_on(situation, now)
        return self._consider_change(situation, now)

    def _is_loss(self, now: float) -> bool:
        """Judges what was computed, when it is enough; True when alone would have given more."""
        judged, limits = self._judged, self.limits
        enough = judged.took_s >= limits.judge_s and (judged.count > 1 or judged.took_s >= 2 * limits.judge_s)
        if self._plan is None or not enough:
            return False
        self.measured_gain = judged.tokens / judged.alone_tokens
        self._judged = _Judged()
        was_doubted, self._is_doubted = self._is_doubted, limits.sure_loss <= self.measured_gain < limits.loss
        if self._is_doubted and not was_doubted:
            return False
        if self.measured_gain >= limits.loss:
            if now - max(self._changed_at, self._lost_at) >= limits.sound_s:
                self._losses = 0
            return False
        self._block(f"measured {self.measured_gain:.2f}× alone", now)
        return True

    def _is_late(self, now: float) -> bool:
        if self._plan is None or self._late_share <= self.limits.late_share:
            return False
        budget_ms = 1000 * self._plan.budget_s
        self._block(f"{100 * self._late_share:.0f} % of tokens took far longer than {budget_ms:.0f} ms", now)
        return True

    def _block(self, words: str, now: float) -> None:
        self._no_try_until = now + self.limits.backoff_max_s
        self._blocked_for = words
        if self._is_try:
            return
        self._losses += 1
        self._lost_at = now
        pause_s = self.limits.backoff_s * 2.0 ** min(self._losses - 1, 32)
        self._blocked_until = now + min(self.limits.backoff_max_s, pause_s)

    def _loss_words(self, now: float) -> str:
        if now >= self._blocked_until:
            return f"off: {self._blocked_for} when it was tried"
        return f"off: {self._blocked_for}, tried again in {self._blocked_until - now:.0f} s"

    def _consider_on(self, situation: Situation, now: float) -> Decision:
        offered = situation.offered
        self._note_promise(offered, now)
        if offered.layers_shared == 0:
            return self._off(situation, now, f"off: {offered.obstacle}")
        if now < self._blocked_until:
            return self._off(situation, now, self._loss_words(now))
        if now < self._rests_until:
            return self._off(situation, now, "off: it did not pay a moment ago")
        if offered.gain < self.limits.on_gain:
            if not self._is_to_be_tried(now):
                words = f"off: gain {offered.gain:.2f}× is less than {self.limits.on_gain:.2f}×"
                return self._off(situation, now, words)
            self._no_try_until = now + self.limits.try_again_s
        return self._put(situation, now)

    def _note_promise(self, offered: Plan, now: float) -> None:
        is_promising = offered.layers_shared > 0 and offered.gain >= self.limits.off_gain
        self._promised_since = min(self._promised_since, now) if is_promising else math.inf

    def _is_to_be_tried(self, now: float) -> bool:
        """Whether what promises only a little should be put in force to see what it gives."""
        return now - self._promised_since >= self.limits.try_after_s and now >= self._no_try_until

    def _consider_change(self, situation: Situation, now: float) -> Decision:
        assert self._plan is not None
        offered, limits = situation.offered, self.limits
        kept = situation.kept
        kept_gain = 0.0 if kept is None else kept.tokens_per_s / offered.alone.tokens_per_s
        late = kept is not None and kept.token_s > offered.budget_s
        must = situation.lost or late or kept_gain < limits.worth
        may = must or now - self._changed_at >= limits.dwell_s
        better = offered.gain >= limits.change_gain * kept_gain or must
        if may and better and offered.layers_shared and offered.gain >= limits.off_gain:
            return self._put(situation, now)
        if may and (must or kept_gain < limits.off_gain):
            words = offered.obstacle or f"gain {max(kept_gain, offered.gain):.2f}× is less than {limits.off_gain:.2f}×"
            return self._off(situation, now, f"off: {words}")
        return Decision(True, self._plan, kept_gain, self._on_words(situation, self._plan, kept_gain), False)

    def _put(self, situation: Situation, now: float) -> Decision:
        plan = situation.offered
        self._is_try = plan.gain < self.limits.on_gain and (self._plan is None or self._is_try)
        changed = self._plan is None or (plan.routes, plan.lanes) != (self._plan.routes, self._plan.lanes)
        self._plan, self._home, self._promised_since = plan, None, math.inf
        if changed:
            self._changed_at = now
            self._judged, self._late_share, self._is_doubted = _Judged(), 0.0, False
        return Decision(True, plan, plan.gain, self._on_words(situation, plan, plan.gain), changed)

    def _on_words(self, situation: Situation, plan: Plan, gain: float) -> str:
        many = len(plan.shares)
        lanes = f", {plan.lanes} lanes" if plan.lanes > 1 else ""
        return f"on: queue {situation.queued}, gain {gain:.1f}×, {many} worker{'s' if many > 1 else ''}{lanes}"

    def _off(self, situation: Situation, now: float, words: str) -> Decision:
        was_on, self._plan = self._plan is not None, None
        changed = was_on or self._home != situation.offered.home
        self._home = situation.offered.home
        if was_on:
            self._changed_at = now
            paid = not situation.wanted or situation.lost  # who left says nothing of those who stay or come
            self._rests_until = -math.inf if paid else now + self.limits.dwell_s
            self._judged, self._late_share, self._is_doubted = _Judged(), 0.0, False
        return Decision(False, situation.offered, situation.offered.gain, words, changed)
