import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvasir_node.decide.admission import Admission, AdmissionLimits, Admitted, Load, Queued, Refused

LIMITS = AdmissionLimits(slots=2, queue=2, saturated_after_s=0.5, calm_after_s=5.0, calm_busy_ratio=0.75)


def filled(requests: int, limits: AdmissionLimits = LIMITS) -> Admission:
    admission = Admission(limits)
    for request in range(requests):
        admission.arrive(request, 0.0)
    return admission


@pytest.mark.parametrize(
    ("here_already", "answer"),
    [
        (0, Admitted(9)),
        (1, Admitted(9)),
        (2, Queued(9, ahead=0)),
        (3, Queued(9, ahead=1)),
        (4, Refused(9, retry_after_s=1.5)),  # one second a request, so (2 + 1) / 2 slots
    ],
)
def test_who_arrives_gets_a_place_then_a_queue_place_then_a_refusal(here_already, answer):
    assert filled(here_already).arrive(9, 0.0) == answer


@pytest.mark.parametrize(
    ("leaver", "admitted", "busy", "queued"),
    [(0, (2,), 2, 1), (1, (2,), 2, 1), (2, (), 2, 1), (3, (), 2, 1)],
)
def test_a_leaver_of_a_slot_lets_the_longest_waiter_in_and_one_of_the_queue_nobody(leaver, admitted, busy, queued):
    admission = filled(4)
    assert admission.leave(leaver, 1.0) == admitted
    assert (admission.busy, admission.queued) == (busy, queued)


def test_without_a_queue_the_first_beyond_the_slots_is_refused():
    limits = AdmissionLimits(slots=1, queue=0, saturated_after_s=0.5, calm_after_s=5.0, calm_busy_ratio=0.75)
    assert isinstance(filled(1, limits).arrive(9, 0.0), Refused)


def test_the_fair_time_to_wait_follows_how_long_requests_take():
    admission = filled(2)
    for request, now in ((2, 0.0), (3, 0.0)):
        admission.arrive(request, now)
    for request in range(40):  # each holds its slot for 10 s
        admission.leave(request, 10.0 * (request // 2 + 1))
        admission.arrive(request + 4, 10.0 * (request // 2 + 1))
    refused = admission.arrive(99, 200.0)
    assert isinstance(refused, Refused)
    assert refused.retry_after_s == pytest.approx(10.0 * 3 / 2, rel=0.01)


def test_the_same_request_cannot_arrive_twice():
    for request in (0, 2):
        with pytest.raises(ValueError, match="is here already"):
            filled(3).arrive(request, 0.0)


def test_playbook_of_saturation_and_its_hysteresis():
    admission = Admission(LIMITS)
    assert admission.arrive(1, 0.0) == Admitted(1)
    assert admission.arrive(2, 0.0) == Admitted(2)
    assert not admission.tick(9.0)  # full, but nobody waits: calm
    assert admission.arrive(3, 10.0) == Queued(3, ahead=0)
    assert admission.pressure == 1.5
    assert not admission.tick(10.4)
    assert admission.oldest_wait_s(10.4) == pytest.approx(0.4)
    assert admission.tick(10.5)  # full with a queue for 0.5 s
    assert admission.load is Load.SATURATED
    assert admission.leave(1, 11.0) == (3,)
    assert admission.oldest_wait_s(11.0) == 0.0
    assert not admission.tick(60.0)  # no queue, but more than 75 % busy: still saturated
    assert admission.leave(2, 60.0) == ()
    assert not admission.tick(64.9)
    assert admission.tick(65.0)  # half busy and no queue for 5 s
    assert admission.load is Load.CALM


def test_a_gap_in_the_queue_starts_the_wait_for_saturation_anew():
    admission = filled(3)
    admission.leave(2, 0.25)
    admission.arrive(5, 0.5)
    assert not admission.tick(0.75)
    assert admission.tick(1.0)


def test_a_burst_while_it_calms_down_keeps_it_saturated():
    admission = filled(3)
    assert admission.tick(0.5)
    for request in (0, 1, 2):
        admission.leave(request, 1.0)
    admission.arrive(7, 5.0)
    admission.arrive(8, 5.0)  # all slots busy at 5 s: the calm time begins again
    admission.leave(7, 5.1)
    assert not admission.tick(6.0)
    assert not admission.tick(10.0)
    assert admission.tick(10.1)


class AnyOrder(RuleBasedStateMachine):
    """Against the obvious model: a list of holders and a list of waiters."""

    @initialize(slots=st.integers(1, 4), queue=st.integers(0, 4))
    def start(self, slots, queue):
        self.limits = AdmissionLimits(slots, queue, saturated_after_s=0.5, calm_after_s=5.0, calm_busy_ratio=0.75)
        self.admission = Admission(self.limits)
        self.now, self.counter = 0.0, 0
        self.holders: set[int] = set()
        self.waiters: list[int] = []
        self.full_since: float | None = None
        self.light_since: float | None = 0.0

    def observe(self):
        """Follows how long it was full with a queue, and how long light, from outside."""
        full = len(self.holders) == self.limits.slots and bool(self.waiters)
        light = not self.waiters and len(self.holders) <= 0.75 * self.limits.slots
        self.full_since = (self.now if self.full_since is None else self.full_since) if full else None
        self.light_since = (self.now if self.light_since is None else self.light_since) if light else None

    @rule()
    def arrive(self):
        self.counter += 1
        answer = self.admission.arrive(self.counter, self.now)
        if len(self.holders) < self.limits.slots:
            assert answer == Admitted(self.counter)
            self.holders.add(self.counter)
        elif len(self.waiters) < self.limits.queue:
            assert answer == Queued(self.counter, len(self.waiters))
            self.waiters.append(self.counter)
        else:
            assert isinstance(answer, Refused)
            assert answer.retry_after_s >= 1.0
        self.observe()

    @precondition(lambda self: self.holders or self.waiters)
    @rule(data=st.data())
    def leave(self, data):
        leaver = data.draw(st.sampled_from(sorted(self.holders) + self.waiters))
        expected = ()
        if leaver in self.waiters:
            self.waiters.remove(leaver)
        else:
            self.holders.remove(leaver)
            expected = tuple(self.waiters[:1])
            self.holders.update(expected)
            del self.waiters[:1]
        assert self.admission.leave(leaver, self.now) == expected
        self.observe()

    @rule(passed_s=st.sampled_from([0.0, 0.1, 0.5, 2.0, 5.0]))
    def time_passes(self, passed_s):
        self.now += passed_s
        before = self.admission.load
        changed = self.admission.tick(self.now)
        assert changed == (self.admission.load is not before)
        if changed and self.admission.load is Load.SATURATED:
            assert self.full_since is not None
            assert self.now - self.full_since >= 0.5
        if changed and self.admission.load is Load.CALM:
            assert self.light_since is not None
            assert self.now - self.light_since >= 5.0

    @invariant()
    def no_place_is_lost_or_doubled(self):
        assert self.admission.busy == len(self.holders) <= self.limits.slots
        assert self.admission.queued == len(self.waiters) <= self.limits.queue
        assert not (self.waiters and len(self.holders) < self.limits.slots)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
