import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvasir_node.base.ids import PeerId, SliceId
from kvasir_node.decide.ledger import TELLING_FIRST, Ledger, LedgerLimits, PairView, Standing

ANN, BOB = PeerId("ann"), PeerId("bob")
PART, OTHER = SliceId(0, 0, 7), SliceId(1, 0, 7)
HOME, AWAY = "198.51.100.1", "203.0.113.1"
LIMITS = LedgerLimits(
    cool_off_s=5.0,
    cool_off_max_s=40.0,
    ban_after=3,
    proof_ttl_s=600.0,
    trials_per_address_max=2,
    trial_window_s=60.0,
)


def attached(limits: LedgerLimits = LIMITS) -> Ledger:
    ledger = Ledger(limits)
    ledger.attach(ANN, PART)
    return ledger


def in_standing(standing: Standing, limits: LedgerLimits = LIMITS) -> Ledger:
    """A ledger where ANN has the standing for PART, at time 0."""
    ledger = attached(limits)
    if standing in (Standing.TRIAL, Standing.PROVEN):
        ledger.begin_trial(ANN, PART, HOME, 0.0)
    if standing is Standing.PROVEN:
        ledger.right(ANN, PART, 0.0)
    if standing is Standing.SUSPECT:
        ledger.failed(ANN, PART, 0.0, "silent", wrong=False)
    if standing is Standing.BANNED:
        for _ in range(limits.ban_after):
            ledger.failed(ANN, PART, 0.0, "wrong", wrong=True)
    assert ledger.standing(ANN, PART) is standing
    return ledger


EVENTS = {
    "attach": lambda ledger: ledger.attach(ANN, PART),
    "detach": lambda ledger: ledger.detach(ANN, PART),
    "give_up_trial": lambda ledger: ledger.give_up_trial(ANN, PART),
    "right": lambda ledger: ledger.right(ANN, PART, 1.0),
    "right, served": lambda ledger: ledger.right(ANN, PART, 1.0, served=True),
    "silence": lambda ledger: ledger.failed(ANN, PART, 1.0, "silent", wrong=False),
    "wrong": lambda ledger: ledger.failed(ANN, PART, 1.0, "wrong", wrong=True),
    "proof_ttl passes": lambda ledger: ledger.tick(601.0),
}
NEW, TRIAL, PROVEN, SUSPECT, BANNED = Standing
TRANSITIONS = {
    #                    from: NEW      TRIAL    PROVEN   SUSPECT  BANNED
    "attach": (NEW, TRIAL, PROVEN, SUSPECT, BANNED),
    "detach": (NEW, NEW, PROVEN, SUSPECT, BANNED),
    "give_up_trial": (NEW, NEW, PROVEN, SUSPECT, BANNED),
    "right": (NEW, PROVEN, PROVEN, SUSPECT, BANNED),
    "right, served": (NEW, TRIAL, PROVEN, SUSPECT, BANNED),
    "silence": (SUSPECT, SUSPECT, SUSPECT, SUSPECT, BANNED),
    "wrong": (SUSPECT, SUSPECT, SUSPECT, SUSPECT, BANNED),
    "proof_ttl passes": (NEW, TRIAL, NEW, SUSPECT, BANNED),
}


@pytest.mark.parametrize("event", TRANSITIONS)
@pytest.mark.parametrize("standing", list(Standing))
def test_transitions(standing, event):
    ledger = in_standing(standing)
    EVENTS[event](ledger)
    assert ledger.standing(ANN, PART) is TRANSITIONS[event][list(Standing).index(standing)]


@pytest.mark.parametrize(
    ("standing", "may"), [(NEW, True), (TRIAL, False), (PROVEN, False), (SUSPECT, True), (BANNED, False)]
)
def test_a_trial_may_begin_for_a_new_pair_and_for_a_suspect_that_cooled_off(standing, may):
    assert in_standing(standing).may_try(ANN, PART, HOME, 5.0) is may


def test_playbook_of_a_worker_that_fails_cools_off_and_proves_itself_again():
    ledger = attached()
    assert ledger.may_try(ANN, PART, HOME, 0.0)
    ledger.begin_trial(ANN, PART, HOME, 0.0)
    assert ledger.right(ANN, PART, 0.1) is True
    assert ledger.proven() == ((ANN, PART),)
    assert ledger.right(ANN, PART, 1.0, served=True) is False
    ledger.failed(ANN, PART, 2.0, "no answer within 50 ms", wrong=False)
    assert ledger.proven() == ()
    assert ledger.pairs() == (PairView(ANN, PART, SUSPECT, True, 1, "no answer within 50 ms"),)
    assert not ledger.may_try(ANN, PART, HOME, 6.9)
    assert ledger.may_try(ANN, PART, HOME, 7.0)
    ledger.begin_trial(ANN, PART, HOME, 7.0)
    assert ledger.right(ANN, PART, 7.1) is True
    assert ledger.pairs() == (PairView(ANN, PART, PROVEN, True, 0, ""),)
    assert ledger.tick(607.0) is False
    assert ledger.tick(607.2) is True
    assert ledger.proven() == ()


def test_the_pause_doubles_with_each_failure_up_to_the_cap():
    ledger = attached()
    for pause_s in (5.0, 10.0, 20.0, 40.0, 40.0):
        ledger.failed(ANN, PART, 0.0, "silent", wrong=False)
        assert not ledger.may_try(ANN, PART, HOME, pause_s - 0.1)
        assert ledger.may_try(ANN, PART, HOME, pause_s)


def test_a_right_answer_makes_the_next_pause_short_again():
    ledger = attached()
    for _ in range(4):
        ledger.failed(ANN, PART, 0.0, "silent", wrong=False)
    ledger.begin_trial(ANN, PART, HOME, 100.0)
    ledger.right(ANN, PART, 100.0)
    ledger.failed(ANN, PART, 200.0, "silent", wrong=False)
    assert ledger.may_try(ANN, PART, HOME, 205.0)


def test_a_hundred_failures_do_not_overflow_the_pause():
    ledger = attached()
    for _ in range(2000):
        ledger.failed(ANN, PART, 0.0, "silent", wrong=False)
    assert ledger.may_try(ANN, PART, HOME, 40.0)


def test_wrong_answers_count_to_a_ban_only_while_no_right_one_is_between_them():
    ledger = attached()
    for now in (0.0, 100.0, 200.0, 300.0):
        ledger.failed(ANN, PART, now, "wrong", wrong=True)
        ledger.failed(ANN, PART, now, "wrong", wrong=True)
        ledger.begin_trial(ANN, PART, HOME, now + 50)
        ledger.right(ANN, PART, now + 50)
    assert ledger.standing(ANN, PART) is PROVEN


def test_a_trial_given_up_is_neither_right_nor_wrong_and_is_not_repeated_at_once():
    ledger = in_standing(TRIAL)
    ledger.give_up_trial(ANN, PART)
    assert ledger.pairs() == (PairView(ANN, PART, NEW, True, 0, ""),)
    assert ledger.right(ANN, PART, 0.1) is False
    assert not ledger.may_try(ANN, PART, HOME, 4.9)
    assert ledger.may_try(ANN, PART, HOME, 5.0)


def test_a_trial_given_up_after_failures_leaves_the_pair_suspect():
    ledger = in_standing(SUSPECT)
    ledger.begin_trial(ANN, PART, HOME, 5.0)
    ledger.give_up_trial(ANN, PART)
    assert ledger.standing(ANN, PART) is SUSPECT


def test_a_trial_that_is_not_allowed_is_our_own_mistake():
    with pytest.raises(ValueError, match="no trial is allowed"):
        in_standing(SUSPECT).begin_trial(ANN, PART, HOME, 1.0)


def test_trials_that_fail_are_capped_per_address_and_window_and_those_that_end_well_are_not():
    ledger = Ledger(LIMITS)
    parts = [SliceId(layer, 0, 7) for layer in range(6)]
    for part in parts:
        ledger.attach(ANN, part)
    for part in parts[:3]:  # they end well
        ledger.begin_trial(ANN, part, HOME, 0.0)
        ledger.right(ANN, part, 0.0)
    for part, now in ((parts[3], 1.0), (parts[4], 10.0)):
        ledger.begin_trial(ANN, part, HOME, now)
        ledger.failed(ANN, part, now, "silent", wrong=False)
    assert not ledger.may_try(ANN, parts[5], HOME, 60.9)
    assert ledger.may_try(ANN, parts[5], AWAY, 60.9)
    assert ledger.may_try(ANN, parts[5], HOME, 61.0)
    ledger.begin_trial(ANN, parts[5], HOME, 61.0)
    ledger.attach(BOB, PART)
    assert not ledger.may_try(BOB, PART, HOME, 69.9)
    assert ledger.may_try(BOB, PART, HOME, 70.0)


def test_a_question_about_an_old_address_does_not_break_the_next_trial():
    ledger = attached()
    ledger.attach(BOB, PART)
    ledger.begin_trial(ANN, PART, HOME, 0.0)
    ledger.failed(ANN, PART, 0.0, "silent", wrong=False)
    assert ledger.may_try(ANN, PART, HOME, 100.0)
    ledger.begin_trial(BOB, PART, AWAY, 100.0)
    assert ledger.standing(BOB, PART) is TRIAL


def test_coverage_counts_attached_and_proven_copies_only():
    ledger = in_standing(PROVEN)
    ledger.attach(BOB, PART)
    ledger.attach(BOB, OTHER)
    assert ledger.coverage() == {PART: 1}
    ledger.detach(ANN, PART)
    assert ledger.coverage() == {}
    ledger.attach(ANN, PART)  # it never failed: the proof stands
    assert ledger.coverage() == {PART: 1}


def test_an_unknown_pair_is_new_and_what_is_told_about_it_changes_nothing():
    ledger = Ledger(LIMITS)
    ledger.failed(ANN, PART, 0.0, "wrong", wrong=True)
    ledger.detach(ANN, PART)
    ledger.give_up_trial(ANN, PART)
    assert ledger.right(ANN, PART, 0.0) is False
    assert ledger.standing(ANN, PART) is NEW
    assert ledger.pairs() == ()


def test_best_first_ranks_every_standing():
    assert sorted(TELLING_FIRST) == sorted(Standing)
    assert TELLING_FIRST[0] is PROVEN
    # A worker killed when only some of its slices were proven is a suspect, not a newcomer.
    assert TELLING_FIRST.index(Standing.SUSPECT) < TELLING_FIRST.index(Standing.NEW)


PEERS = [ANN, BOB, PeerId("cyd")]
PARTS = [PART, OTHER]
ADDRESS_OF = {ANN: HOME, BOB: HOME, PEERS[2]: AWAY}
pairs = st.tuples(st.sampled_from(PEERS), st.sampled_from(PARTS))


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens in whatever order, proof comes from a trial after the last failure and from nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(LIMITS)
        self.now = 0.0
        self.trial_running: set = set()
        self.passed_since_failure: set = set()
        self.wrong_in_a_row: dict = {}
        self.failed_at: dict = {}
        self.counted: dict = {HOME: [], AWAY: []}
        self.trial_of: dict = {}

    @rule(pair=pairs)
    def attach(self, pair):
        could = self.ledger.may_try(*pair, ADDRESS_OF[pair[0]], self.now)
        known = any((v.peer, v.slice) == pair and v.attached for v in self.ledger.pairs())
        standing = self.ledger.standing(*pair)
        self.ledger.attach(*pair)
        assert self.ledger.standing(*pair) is standing
        if known:
            assert self.ledger.may_try(*pair, ADDRESS_OF[pair[0]], self.now) == could

    @rule(pair=pairs)
    def detach(self, pair):
        before = self.failures(pair)
        self.ledger.detach(*pair)
        self.trial_running.discard(pair)
        assert self.failures(pair) == before

    @rule(pair=pairs)
    def give_up_trial(self, pair):
        before = self.failures(pair)
        self.ledger.give_up_trial(*pair)
        self.trial_running.discard(pair)
        assert self.failures(pair) == before

    def failures(self, pair):
        return [v.failures for v in self.ledger.pairs() if (v.peer, v.slice) == pair]

    @rule(pair=pairs)
    def begin_trial(self, pair):
        address = ADDRESS_OF[pair[0]]
        if not self.ledger.may_try(*pair, address, self.now):
            return
        assert self.ledger.standing(*pair) in (NEW, SUSPECT)
        assert self.now >= self.failed_at.get(pair, -1e9) + LIMITS.cool_off_s
        self.ledger.begin_trial(*pair, address, self.now)
        self.trial_running.add(pair)
        self.counted[address].append((pair, self.now))
        self.trial_of[pair] = (pair, self.now)
        recent = [at for _, at in self.counted[address] if at > self.now - LIMITS.trial_window_s]
        assert len(recent) <= LIMITS.trials_per_address_max

    @rule(pair=pairs, served=st.booleans())
    def right(self, pair, served):
        running = pair in self.trial_running
        proved = self.ledger.right(*pair, self.now, served=served)
        assert proved == (running and not served)
        if proved:
            self.passed_since_failure.add(pair)
            self.trial_running.discard(pair)
            self.counted[ADDRESS_OF[pair[0]]].remove(self.trial_of[pair])
        if self.ledger.standing(*pair) is PROVEN:
            self.wrong_in_a_row[pair] = 0

    @rule(pair=pairs, wrong=st.booleans())
    def failed(self, pair, wrong):
        known = any((v.peer, v.slice) == pair for v in self.ledger.pairs())
        self.ledger.failed(*pair, self.now, "it failed", wrong=wrong)
        if known:
            self.trial_running.discard(pair)
            self.passed_since_failure.discard(pair)
            self.failed_at[pair] = self.now
            self.wrong_in_a_row[pair] = self.wrong_in_a_row.get(pair, 0) + wrong

    @rule(passed_s=st.sampled_from([1.0, 5.0, 61.0, 601.0]))
    def time_passes(self, passed_s):
        self.now += passed_s
        self.ledger.tick(self.now)

    @precondition(lambda self: self.ledger.proven())
    @invariant()
    def proof_is_of_a_trial_after_the_last_failure(self):
        assert set(self.ledger.proven()) <= self.passed_since_failure

    @invariant()
    def only_wrong_answers_in_a_row_ban(self):
        for view in self.ledger.pairs():
            wrong = self.wrong_in_a_row.get((view.peer, view.slice), 0)
            assert (view.standing is BANNED) == (wrong >= LIMITS.ban_after)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=100, stateful_step_count=50, deadline=None, derandomize=True)
