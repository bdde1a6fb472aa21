import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvasir_node.base.ids import PeerId, SliceId
from kvasir_node.decide.ledger import REFUSED_MAX, TELLING_FIRST, Doubt, Ledger, LedgerLimits, PairView, Standing

ANN, BOB = PeerId("ann"), PeerId("bob")
PART, OTHER = SliceId(0, 0, 7), SliceId(1, 0, 7)
HOME, AWAY = "/ip4/198.51.100.1", "/ip4/203.0.113.1"
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
    "caught": lambda ledger: ledger.caught(ANN, 1.0, "differs"),
    "caught twice": lambda ledger: [ledger.caught(ANN, 1.0, "differs") for _ in range(2)],
    "a minute passes": lambda ledger: ledger.tick(60.1),
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
    "caught": (SUSPECT, SUSPECT, SUSPECT, SUSPECT, BANNED),
    "caught twice": (BANNED, BANNED, BANNED, BANNED, BANNED),
    "a minute passes": (NEW, NEW, PROVEN, SUSPECT, BANNED),
    "proof_ttl passes": (NEW, NEW, NEW, SUSPECT, BANNED),
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
    assert ledger.pairs() == (PairView(ANN, PART, PROVEN, True, 1, ""),)
    ledger.right(ANN, PART, 12.2, served=True)  # proven for as long as its pause was
    assert ledger.pairs() == (PairView(ANN, PART, PROVEN, True, 0, ""),)
    assert ledger.tick(612.0) is False
    assert ledger.tick(612.3) is True
    assert ledger.proven() == ()


def test_the_pause_doubles_with_each_failure_up_to_the_cap():
    ledger = attached()
    for pause_s in (5.0, 10.0, 20.0, 40.0, 40.0):
        ledger.failed(ANN, PART, 0.0, "silent", wrong=False)
        assert not ledger.may_try(ANN, PART, HOME, pause_s - 0.1)
        assert ledger.may_try(ANN, PART, HOME, pause_s)


@pytest.mark.parametrize(("served_at", "pause_s"), [(139.9, 40.0), (140.0, 5.0)])
def test_the_next_pause_is_short_again_once_the_proof_lasted_as_long_as_the_last_one(served_at, pause_s):
    ledger = attached()
    for _ in range(4):
        ledger.failed(ANN, PART, 0.0, "silent", wrong=False)
    ledger.begin_trial(ANN, PART, HOME, 100.0)
    ledger.right(ANN, PART, 100.0)
    ledger.right(ANN, PART, served_at, served=True)
    ledger.failed(ANN, PART, 200.0, "silent", wrong=False)
    assert not ledger.may_try(ANN, PART, HOME, 200.0 + pause_s - 0.1)
    assert ledger.may_try(ANN, PART, HOME, 200.0 + pause_s)


def test_a_worker_that_passes_every_trial_and_fails_at_once_gets_longer_and_longer_pauses():
    ledger, now, begun = attached(), 0.0, []
    while now < 200.0:
        if ledger.may_try(ANN, PART, HOME, now):
            begun.append(now)
            ledger.begin_trial(ANN, PART, HOME, now)
            ledger.right(ANN, PART, now)
            ledger.right(ANN, PART, now + 0.5, served=True)
            ledger.failed(ANN, PART, now + 1.0, "gone", wrong=False)
        now += 1.0
    assert begun == [0.0, 6.0, 17.0, 38.0, 79.0, 120.0, 161.0]


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


def test_only_attached_and_proven_pairs_count():
    ledger = in_standing(PROVEN)
    ledger.attach(BOB, PART)
    ledger.attach(BOB, OTHER)
    assert ledger.proven() == ((ANN, PART),)
    ledger.detach(ANN, PART)
    assert ledger.proven() == ()
    ledger.attach(ANN, PART)  # it never failed: the proof stands
    assert ledger.proven() == ((ANN, PART),)


# Caught in served work ------------------------------------------------------------------------------------------


def test_one_wrong_answer_in_served_work_casts_doubt_on_all_slices_of_the_peer_and_on_no_other_peer():
    ledger = in_standing(PROVEN)
    for peer, part in ((ANN, OTHER), (BOB, PART)):
        ledger.attach(peer, part)
        ledger.begin_trial(peer, part, AWAY, 0.0)
        ledger.right(peer, part, 0.0)
    assert ledger.caught(ANN, 1.0, "differs") is False
    assert ledger.proven() == ((BOB, PART),)
    assert {ledger.standing(ANN, part) for part in (PART, OTHER)} == {SUSPECT}
    assert ledger.strikes() == {ANN: 1}


def test_no_trial_and_no_time_redeems_who_was_caught():
    ledger = in_standing(PROVEN)
    ledger.caught(ANN, 1.0, "differs")
    ledger.begin_trial(ANN, PART, HOME, 100.0)
    ledger.right(ANN, PART, 100.0)
    for now in range(100, 10_000, 10):
        ledger.right(ANN, PART, float(now), served=True)
    assert ledger.caught(ANN, 10_000.0, "differs again") is True
    assert ledger.standing(ANN, PART) is BANNED
    ledger.attach(ANN, OTHER)  # a slice that it never had
    assert ledger.standing(ANN, OTHER) is BANNED
    assert not ledger.may_try(ANN, OTHER, HOME, 1e9)


# Restarts -------------------------------------------------------------------------------------------------------


def restarted(ledger: Ledger, now: float) -> Ledger:
    """The ledger of the next process, whose clock begins at 0."""
    following = Ledger(LIMITS)
    following.restore(ledger.strikes(), ledger.doubts(now), 0.0)
    return following


def test_bans_strikes_and_pauses_outlive_the_process_and_proof_does_not():
    ledger = in_standing(PROVEN)
    ledger.attach(BOB, PART)
    ledger.failed(BOB, PART, 0.0, "silent", wrong=False)
    ledger.failed(BOB, PART, 0.0, "wrong", wrong=True)  # until 10.0
    ledger.attach(BOB, OTHER)
    for _ in range(LIMITS.ban_after):
        ledger.failed(BOB, OTHER, 0.0, "wrong", wrong=True)
    ledger.caught(ANN, 0.0, "differs")  # until 5.0
    following = restarted(ledger, 3.0)
    assert following.proven() == ()
    assert following.strikes() == {ANN: 1}
    for peer in (ANN, BOB):
        for part in (PART, OTHER):
            following.attach(peer, part)
    assert following.standing(BOB, OTHER) is BANNED
    assert following.standing(BOB, PART) is SUSPECT
    assert [following.may_try(BOB, PART, HOME, now) for now in (6.9, 7.0)] == [False, True]
    assert [following.may_try(ANN, PART, HOME, now) for now in (1.9, 2.0)] == [False, True]
    following.failed(BOB, PART, 100.0, "silent", wrong=False)  # the third in a row
    assert [following.may_try(BOB, PART, HOME, now) for now in (119.9, 120.0)] == [False, True]
    assert following.caught(ANN, 200.0, "differs") is True


def test_what_outlives_the_process_is_of_those_alone_who_failed_and_its_changes_are_counted():
    ledger = in_standing(PROVEN)
    assert (ledger.doubts(0.0), ledger.changes) == ((), 0)
    ledger.failed(ANN, PART, 1.0, "silent", wrong=False)
    assert ledger.doubts(2.0) == (Doubt(ANN, PART, 1, 0, False, 4.0, "silent"),)
    assert ledger.changes == 1
    ledger.begin_trial(ANN, PART, HOME, 6.0)
    ledger.right(ANN, PART, 6.0)
    assert ledger.changes == 1
    ledger.right(ANN, PART, 11.0, served=True)  # forgiven
    assert (ledger.doubts(11.0), ledger.changes) == ((), 2)


def test_a_pause_of_before_a_restart_is_never_longer_than_the_longest():
    following = Ledger(LIMITS)
    following.restore({}, [Doubt(ANN, PART, 1, 0, False, 1e9, "a clock that was wrong")], 0.0)
    following.attach(ANN, PART)
    assert following.may_try(ANN, PART, HOME, LIMITS.cool_off_max_s)


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
        self.strikes: dict = {}

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
            self.wrong_in_a_row[pair] = 0

    @rule(pair=pairs, wrong=st.booleans())
    def failed(self, pair, wrong):
        known = self.is_known(pair)
        self.ledger.failed(*pair, self.now, "it failed", wrong=wrong)
        if known:
            self.trial_running.discard(pair)
            self.passed_since_failure.discard(pair)
            self.failed_at[pair] = self.now
            self.wrong_in_a_row[pair] = self.wrong_in_a_row.get(pair, 0) + wrong

    def is_known(self, pair):
        return any((v.peer, v.slice) == pair for v in self.ledger.pairs())

    @precondition(lambda self: self.now > 100)  # seldom, or nobody is left
    @rule(peer=st.sampled_from(PEERS))
    def caught(self, peer):
        self.strikes[peer] = self.strikes.get(peer, 0) + 1
        assert self.ledger.caught(peer, self.now, "differs") == (self.strikes[peer] >= LIMITS.strikes_max)
        for pair in [(peer, part) for part in PARTS if self.is_known((peer, part))]:
            self.trial_running.discard(pair)
            self.passed_since_failure.discard(pair)
            self.failed_at[pair] = self.now

    @rule(passed_s=st.sampled_from([1.0, 5.0, 61.0, 601.0]))
    def time_passes(self, passed_s):
        self.now += passed_s
        self.ledger.tick(self.now)
        begun = {pair: at for pair, (_, at) in self.trial_of.items()}
        self.trial_running = {pair for pair in self.trial_running if self.now - begun[pair] <= LIMITS.trial_max_s}

    @precondition(lambda self: self.ledger.proven())
    @invariant()
    def proof_is_of_a_trial_after_the_last_failure(self):
        assert set(self.ledger.proven()) <= self.passed_since_failure

    @invariant()
    def only_wrong_answers_ban(self):
        for view in self.ledger.pairs():
            wrong = self.wrong_in_a_row.get((view.peer, view.slice), 0)
            is_out = self.strikes.get(view.peer, 0) >= LIMITS.strikes_max
            assert (view.standing is BANNED) == (wrong >= LIMITS.ban_after or is_out)

    @invariant()
    def who_is_on_trial_is_so_for_a_bounded_time(self):
        on_trial = {(v.peer, v.slice) for v in self.ledger.pairs() if v.standing is TRIAL}
        assert on_trial <= self.trial_running


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=100, stateful_step_count=50, deadline=None, derandomize=True)


# What the market is told ----------------------------------------------------------------------------------------


def test_who_failed_once_is_not_refused_who_answered_wrong_or_failed_again_is_while_it_is_here():
    ledger = attached()
    ledger.attach(BOB, PART)
    ledger.failed(ANN, PART, 0.0, "silent", wrong=False)
    ledger.failed(BOB, PART, 0.0, "wrong", wrong=True)
    assert ledger.refused() == (BOB,)
    ledger.failed(ANN, PART, 0.0, "silent", wrong=False)
    assert ledger.refused() == (ANN, BOB)
    ledger.begin_trial(BOB, PART, HOME, 100.0)
    ledger.right(BOB, PART, 100.0)
    ledger.detach(ANN, PART)
    assert ledger.refused() == ()


def test_the_banned_are_refused_also_when_they_are_gone_and_the_list_is_bounded():
    ledger = Ledger(LIMITS)
    for number in range(REFUSED_MAX + 10):
        ledger.attach(PeerId(f"peer {number}"), PART)
        for _ in range(LIMITS.ban_after):
            ledger.failed(PeerId(f"peer {number}"), PART, 0.0, "wrong", wrong=True)
        ledger.detach(PeerId(f"peer {number}"), PART)
    assert ledger.refused() == tuple(PeerId(f"peer {number}") for number in range(10, REFUSED_MAX + 10))
