import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_node.base.ids import Cid, PeerId, cid_of
from kvasir_node.decide.fetching import (
    COPIES_MAX,
    Ask,
    Blame,
    BlockArrived,
    BlockBad,
    BlockMissing,
    BlockPostponed,
    BlocksWanted,
    Done,
    Fetch,
    FetchCommand,
    FetchEvent,
    FetchLimits,
    GiveUp,
    Leave,
    LeaveReason,
    ProviderJoined,
    ProviderLost,
    RequestFailed,
    Tick,
)

ANN, BOB, CYD = PeerId("ann"), PeerId("bob"), PeerId("cyd")
CIDS = tuple(cid_of(bytes((n,))) for n in range(64))
LIMITS = FetchLimits(in_flight_max=2, ask_max=1, attempts_max=3, bad_blocks_max=3, failures_max=3)


def started(wanted: int, *providers: PeerId, limits: FetchLimits = LIMITS) -> tuple[Fetch, list[FetchCommand]]:
    fetch = Fetch(limits)
    for provider in providers:
        assert fetch.handle(ProviderJoined(provider), 0.0) == []
    return fetch, fetch.handle(BlocksWanted(CIDS[:wanted]), 0.0)


def asked(commands: list[FetchCommand]) -> list[tuple[PeerId, Cid]]:
    return [(command.provider, cid) for command in commands if isinstance(command, Ask) for cid in command.cids]


def test_work_is_dealt_round_by_round_in_the_order_wanted():
    _, commands = started(5, ANN, BOB)
    assert commands == [Ask(ANN, CIDS[0:1]), Ask(BOB, CIDS[1:2]), Ask(ANN, CIDS[2:3]), Ask(BOB, CIDS[3:4])]


def test_a_request_holds_several_blocks_up_to_the_bound_in_flight():
    _, commands = started(9, ANN, limits=FetchLimits(in_flight_max=5, ask_max=3))
    assert commands == [Ask(ANN, CIDS[0:3]), Ask(ANN, CIDS[3:5])]


def test_playbook_of_a_plain_download():
    fetch, commands = started(3, ANN)
    assert commands == [Ask(ANN, CIDS[0:1]), Ask(ANN, CIDS[1:2])]
    assert fetch.handle(BlockArrived(ANN, CIDS[1]), 0.1) == [Ask(ANN, CIDS[2:3])]
    assert fetch.handle(BlockArrived(ANN, CIDS[0]), 0.2) == []
    assert fetch.handle(BlockArrived(ANN, CIDS[2]), 0.3) == [Done()]
    assert fetch.over
    assert fetch.handle(ProviderLost(ANN), 0.4) == []


def test_more_blocks_may_be_wanted_before_the_last_one_arrives():
    fetch, _ = started(1, ANN)
    assert fetch.handle(BlocksWanted(CIDS[1:2]), 0.1) == [Ask(ANN, CIDS[1:2])]
    assert fetch.handle(BlockArrived(ANN, CIDS[0]), 0.2) == []
    assert fetch.handle(BlocksWanted(CIDS[0:2]), 0.3) == []
    assert fetch.handle(BlockArrived(ANN, CIDS[1]), 0.4) == [Done()]


def test_a_bad_block_is_blamed_and_asked_of_the_other_one():
    fetch, _ = started(1, ANN, BOB)
    assert fetch.handle(BlockBad(ANN, CIDS[0]), 0.1) == [Blame(ANN, CIDS[0]), Ask(BOB, CIDS[0:1])]
    # Bob is full of it, Ann is idle, yet the block never goes back to her while Bob may have it.
    assert asked(fetch.handle(Tick(), 100.0)) == []
    assert fetch.handle(BlockArrived(BOB, CIDS[0]), 100.1) == [Done()]


def test_a_sole_provider_of_bad_blocks_is_asked_again_until_the_attempts_end():
    fetch, _ = started(1, ANN, limits=FetchLimits(attempts_max=3, bad_blocks_max=9))
    assert fetch.handle(BlockBad(ANN, CIDS[0]), 0.1) == [Blame(ANN, CIDS[0]), Ask(ANN, CIDS[0:1])]
    assert fetch.handle(BlockBad(ANN, CIDS[0]), 0.2) == [Blame(ANN, CIDS[0]), Ask(ANN, CIDS[0:1])]
    blame, gave_up = fetch.handle(BlockBad(ANN, CIDS[0]), 0.3)
    assert blame == Blame(ANN, CIDS[0])
    assert isinstance(gave_up, GiveUp)


def test_dead_providers_never_use_up_the_tries_of_a_living_one():
    names = [PeerId(f"dead{n}") for n in range(9)]
    fetch, commands = started(1, *names, ANN, limits=FetchLimits(attempts_max=3, late_floor_s=100))
    for tries in range(3 + len(names)):
        ((provider, cid),) = asked(commands)
        if provider == ANN:
            break
        commands = fetch.handle(RequestFailed(provider, (cid,)), tries * 1000.0)
    assert tries > 3
    assert fetch.handle(BlockArrived(ANN, CIDS[0]), 99_000.0) == [Done()]


def test_a_block_that_one_provider_always_fails_is_given_up_although_its_others_arrive():
    fetch, _ = started(40, ANN, limits=FetchLimits(in_flight_max=2, ask_max=1, attempts_max=3, pause_s=0.1))
    now, gave_up = 0.0, None
    while gave_up is None:
        now += 1.0
        held = fetch.owed_by(ANN)
        commands = fetch.handle(Tick(), now)
        for cid in held:
            event = RequestFailed(ANN, (cid,)) if cid == CIDS[0] else BlockArrived(ANN, cid)
            commands += fetch.handle(event, now)
        gave_up = next((command for command in commands if isinstance(command, GiveUp)), None)
        assert now < 100
    assert gave_up == GiveUp(f"block {CIDS[0]} failed 3 times")


def test_a_provider_with_several_bad_blocks_is_left():
    fetch, _ = started(8, ANN, BOB, limits=FetchLimits(in_flight_max=4, ask_max=4, bad_blocks_max=2))
    fetch.handle(BlockBad(ANN, CIDS[0]), 0.1)
    commands = fetch.handle(BlockBad(ANN, CIDS[1]), 0.2)
    assert commands[:2] == [Blame(ANN, CIDS[1]), Leave(ANN, LeaveReason.BAD_BLOCKS)]
    assert fetch.handle(ProviderJoined(ANN), 0.3) == []
    assert fetch.owed_by(ANN) == ()
    # What Ann sends although she was left is welcome: it was verified.
    fetch.handle(BlockArrived(ANN, CIDS[2]), 0.4)
    for cid in (*CIDS[3:8], *CIDS[0:2]):
        assert not fetch.over
        commands = fetch.handle(BlockArrived(BOB, cid), 0.5)
    assert commands == [Done()]


def test_the_last_provider_is_left_only_when_most_of_it_is_bad():
    fetch, _ = started(20, ANN, limits=FetchLimits(in_flight_max=1, ask_max=1, bad_blocks_max=2, attempts_max=9))
    commands = fetch.handle(Tick(), 0.0)
    for cid in CIDS[:3]:
        fetch.handle(BlockArrived(ANN, cid), 0.1)
    for cid in CIDS[3:6]:
        commands = fetch.handle(BlockBad(ANN, cid), 0.2)
        assert isinstance(commands[-1], Ask)
    commands = fetch.handle(BlockBad(ANN, CIDS[6]), 0.3)
    assert commands[1] == Leave(ANN, LeaveReason.BAD_BLOCKS)
    assert isinstance(commands[2], GiveUp)


def test_a_missing_block_is_asked_elsewhere_and_given_up_when_nobody_has_it():
    fetch, _ = started(1, ANN, BOB)
    assert fetch.handle(BlockMissing(ANN, CIDS[0]), 0.1) == [Ask(BOB, CIDS[0:1])]
    (gave_up,) = fetch.handle(BlockMissing(BOB, CIDS[0]), 0.2)
    assert gave_up == GiveUp(f"none of 2 providers has block {CIDS[0]}")


def test_a_postponed_block_goes_to_the_end_and_costs_no_attempt():
    fetch, _ = started(3, ANN, limits=FetchLimits(in_flight_max=2, ask_max=2, attempts_max=1))
    assert fetch.handle(BlockPostponed(ANN, CIDS[1]), 0.1) == [Ask(ANN, CIDS[2:3])]
    assert fetch.handle(BlockArrived(ANN, CIDS[0]), 0.2) == [Ask(ANN, CIDS[1:2])]


def test_a_failure_pauses_the_provider_twice_as_long_each_time():
    limits = FetchLimits(in_flight_max=1, ask_max=1, pause_s=1.0, failures_max=4, attempts_max=9)
    fetch, _ = started(1, ANN, limits=limits)
    now = 0.0
    for pause_s in (1.0, 2.0, 4.0):
        assert fetch.handle(RequestFailed(ANN, CIDS[0:1]), now) == []
        assert fetch.wake_at(now) == now + pause_s
        assert fetch.handle(Tick(), now + pause_s - 0.01) == []
        now += pause_s
        assert fetch.handle(Tick(), now) == [Ask(ANN, CIDS[0:1])]
    left, gave_up = fetch.handle(RequestFailed(ANN, CIDS[0:1]), now)
    assert left == Leave(ANN, LeaveReason.FAILURES)
    assert isinstance(gave_up, GiveUp)


def test_a_block_that_arrives_ends_the_row_of_failures():
    limits = FetchLimits(in_flight_max=1, ask_max=1, pause_s=1.0, failures_max=2, attempts_max=9)
    fetch, _ = started(3, ANN, limits=limits)
    fetch.handle(RequestFailed(ANN, CIDS[0:1]), 0.0)
    ((_, cid),) = asked(fetch.handle(Tick(), 1.0))
    fetch.handle(BlockArrived(ANN, cid), 1.1)
    assert fetch.handle(RequestFailed(ANN, fetch.owed_by(ANN)), 2.0) == []
    assert fetch.wake_at(2.0) == 3.0


def test_requests_that_break_together_are_one_failure():
    fetch, _ = started(2, ANN, limits=FetchLimits(in_flight_max=2, ask_max=1, failures_max=2))
    assert fetch.handle(RequestFailed(ANN, CIDS[0:1]), 1.0) == []
    assert fetch.handle(RequestFailed(ANN, CIDS[1:2]), 1.0) == []


def test_a_lost_provider_hands_its_blocks_to_the_others():
    fetch, _ = started(4, ANN, BOB)
    commands = fetch.handle(ProviderLost(ANN), 0.1)
    assert commands == []  # Bob is full
    commands = fetch.handle(BlockArrived(BOB, CIDS[1]), 0.2)
    assert asked(commands) == [(BOB, CIDS[0])]
    assert fetch.handle(ProviderLost(BOB), 0.3) == [GiveUp("no provider is left; 3 blocks are missing")]


def test_a_late_block_is_asked_of_a_second_provider_but_never_of_a_third():
    limits = FetchLimits(in_flight_max=4, ask_max=1, late_factor=4.0, late_floor_s=0.25)
    fetch, commands = started(2, ANN, BOB, limits=limits)
    assert asked(commands) == [(ANN, CIDS[0]), (BOB, CIDS[1])]
    assert fetch.handle(BlockArrived(BOB, CIDS[1]), 0.1) == []  # typical 0.1 s: late after 0.4 s
    assert fetch.wake_at(0.1) == pytest.approx(0.4)
    assert fetch.handle(Tick(), 0.39) == []
    assert fetch.handle(Tick(), 0.4) == [Ask(BOB, CIDS[0:1])]
    assert fetch.handle(ProviderJoined(CYD), 50.0) == []
    assert fetch.handle(BlockArrived(BOB, CIDS[0]), 50.1) == [Done()]


def test_a_tick_at_the_time_it_was_asked_for_is_never_too_early():
    rng = random.Random(0)  # sums of such numbers are rounded, so a difference may come out below what was added
    for _ in range(1000):
        start_at, typical_s = rng.uniform(0, 1000), rng.uniform(0.1, 3)
        fetch = Fetch(FetchLimits(in_flight_max=1, typical_first_s=typical_s))
        fetch.handle(ProviderJoined(ANN), start_at)
        fetch.handle(BlocksWanted(CIDS[:1]), start_at)
        fetch.handle(ProviderJoined(BOB), start_at)
        wake_at = fetch.wake_at(start_at)
        assert wake_at is not None
        assert asked(fetch.handle(Tick(), wake_at)) == [(BOB, CIDS[0])]


def test_what_a_slow_provider_owes_is_overtaken_before_it_is_late_and_it_owes_one_block():
    limits = FetchLimits(in_flight_max=2, ask_max=1, late_floor_s=100.0)
    fetch, commands = started(14, ANN, BOB, limits=limits)
    assert asked(commands) == [(ANN, CIDS[0]), (BOB, CIDS[1]), (ANN, CIDS[2]), (BOB, CIDS[3])]
    for number in range(8):  # quick ones
        (owed, *_) = fetch.owed_by(BOB)
        assert asked(fetch.handle(BlockArrived(BOB, owed), 0.1 * number))[0] == (BOB, CIDS[4 + number])
    assert fetch.handle(BlockArrived(ANN, CIDS[0]), 5.0) == []  # it owes CIDS[2] still, and shall have no more
    assert asked(fetch.handle(BlockArrived(ANN, CIDS[2]), 5.1)) == [(ANN, CIDS[12])]
    assert asked(fetch.handle(BlockArrived(BOB, CIDS[10]), 5.2)) == [(BOB, CIDS[13])]
    commands = fetch.handle(BlockArrived(BOB, CIDS[11]), 5.3)  # what ANN was asked for at 5.1 comes at 10.1
    assert asked(commands) == [(BOB, CIDS[12])]
    fetch.handle(BlockArrived(BOB, CIDS[12]), 5.4)
    assert fetch.handle(BlockArrived(BOB, CIDS[13]), 5.4) == [Done()]


def test_equals_do_not_overtake_one_another():
    limits = FetchLimits(in_flight_max=1, ask_max=1, late_floor_s=100.0)
    fetch, _ = started(3, ANN, BOB, limits=limits)
    fetch.handle(BlockArrived(ANN, CIDS[0]), 1.0)
    assert fetch.handle(BlockArrived(BOB, CIDS[1]), 1.1) == []
    assert fetch.owed_by(ANN) == CIDS[2:3]


def test_nothing_happens_before_a_provider_joins():
    fetch = Fetch(LIMITS)
    assert fetch.handle(BlocksWanted(CIDS[:2]), 0.0) == []
    assert fetch.wake_at(0.0) is None
    assert asked(fetch.handle(ProviderJoined(ANN), 1.0)) == [(ANN, CIDS[0]), (ANN, CIDS[1])]


def test_the_number_of_providers_is_bounded():
    fetch = Fetch(FetchLimits(providers_max=2))
    for name in (ANN, BOB, CYD):
        fetch.handle(ProviderJoined(name), 0.0)
    assert {provider for provider, _ in asked(fetch.handle(BlocksWanted(CIDS), 0.0))} == {ANN, BOB}


class Bookkeeper:
    """Checks every command against its own count of what is owed by whom."""

    def __init__(self, limits: FetchLimits, wanted: int) -> None:
        self.limits = limits
        self.fetch = Fetch(limits)
        self.owed: dict[PeerId, list[tuple[float, tuple[Cid, ...]]]] = {}
        self.left: set[PeerId] = set()
        self.bad: set[tuple[PeerId, Cid]] = set()
        self.now = 0.0
        self.end: Done | GiveUp | None = None
        self.send(BlocksWanted(CIDS[:wanted]))

    def send(self, event: FetchEvent) -> None:
        for command in self.fetch.handle(event, self.now):
            assert self.end is None, "a command after the last one"
            match command:
                case Ask(provider, cids):
                    held = [cid for _, request in self.owed.get(provider, ()) for cid in request]
                    assert provider not in self.left
                    assert cids
                    assert len(cids) <= self.limits.ask_max
                    assert not set(cids) & set(held), "one block asked twice at once of one provider"
                    assert len(held) + len(cids) <= self.limits.in_flight_max
                    self.owed.setdefault(provider, []).append((self.now, cids))
                    everywhere = [c for requests in self.owed.values() for _, request in requests for c in request]
                    assert all(everywhere.count(cid) <= COPIES_MAX for cid in cids)
                case Leave(provider, _):
                    self.left.add(provider)
                    self.owed.pop(provider, None)
                case Done() | GiveUp():
                    self.end = command
                case Blame():
                    pass

    def lose(self, provider: PeerId) -> None:
        self.owed.pop(provider, None)
        self.send(ProviderLost(provider))

    def answer(self, provider: PeerId, outcomes: list[str]) -> None:
        _, cids = self.owed[provider].pop(0)
        if not self.owed[provider]:
            del self.owed[provider]
        if outcomes[0] == "fail":
            self.send(RequestFailed(provider, cids))
            return
        kinds = {"bad": BlockBad, "missing": BlockMissing, "postponed": BlockPostponed}
        # The provider still holds the blocks of this request that were not answered yet.
        for index, cid in enumerate(cids):
            rest = cids[index + 1 :]
            if rest and provider not in self.left:
                self.owed.setdefault(provider, []).insert(0, (self.now, rest))
            self.send(kinds.get(outcomes[index % len(outcomes)], BlockArrived)(provider, cid))
            if rest and provider in self.owed:
                self.owed[provider].pop(0)
                if not self.owed[provider]:
                    del self.owed[provider]


OUTCOMES = st.lists(st.sampled_from(["good"] * 6 + ["bad", "missing", "postponed", "fail"]), min_size=1, max_size=4)


@settings(max_examples=200, deadline=None)
@given(
    wanted=st.integers(1, 40),
    in_flight_max=st.integers(1, 6),
    ask_max=st.integers(1, 4),
    steps=st.lists(
        st.tuples(st.integers(0, 4), st.floats(0, 3), OUTCOMES, st.sampled_from(["answer"] * 8 + ["lose", "join"])),
        max_size=150,
    ),
)
def test_invariants_hold_whatever_providers_do(wanted, in_flight_max, ask_max, steps):
    names = [PeerId(f"p{n}") for n in range(5)]
    book = Bookkeeper(FetchLimits(in_flight_max=in_flight_max, ask_max=ask_max, attempts_max=4), wanted)
    for name in names[:3]:
        book.send(ProviderJoined(name))
    for pick, passed_s, outcomes, kind in steps:
        book.now += passed_s
        name = names[pick]
        if kind == "lose":
            book.lose(name)
        elif kind == "join":
            book.send(ProviderJoined(name))
        elif name in book.owed:
            book.answer(name, outcomes)
        else:
            book.send(Tick())
    # From here on everyone behaves: the download must come to an end by itself, one way or the other.
    for _ in range(2000):
        if book.end is not None:
            break
        if book.owed:
            book.answer(min(book.owed), ["good"])
        else:
            wake_at = book.fetch.wake_at(book.now)
            assert wake_at is not None, "stuck: nothing is owed, and no tick would help"
            book.now = wake_at
            book.send(Tick())
    assert book.end is not None


@pytest.mark.parametrize("seed", range(5))
def test_one_honest_provider_is_enough_among_liars(seed):
    """Whatever the others do, all blocks arrive as long as one provider has them all and is alive."""
    rng = random.Random(seed)
    liars = [PeerId(f"liar{n}") for n in range(4)]
    book = Bookkeeper(FetchLimits(attempts_max=50), 60)
    for name in (*liars, ANN):
        book.send(ProviderJoined(name))
    while book.end is None:
        book.now += 0.05
        if not book.owed:
            book.send(Tick())
            continue
        name = rng.choice(sorted(book.owed))
        book.answer(name, ["good"] if name == ANN else [rng.choice(["bad", "missing", "fail", "postponed"])])
    assert book.end == Done()


def test_a_provider_fifty_times_slower_does_not_hold_back_the_end():
    """Two quick providers alone need 0.1 s × 60 / 2 per block in flight; the slow one may cost 20 % at most."""
    quick_s, slow_s = 0.1, 5.0

    def run(names: dict[PeerId, float]) -> float:
        book = Bookkeeper(FetchLimits(in_flight_max=2, ask_max=1), 60)
        for name in names:
            book.send(ProviderJoined(name))
        while book.end is None:
            ready = [(requests[0][0] + names[name], name) for name, requests in book.owed.items()]
            wake_at = book.fetch.wake_at(book.now)
            at, name = min(ready)
            if wake_at is not None and wake_at < at:
                book.now = wake_at
                book.send(Tick())
            else:
                book.now = max(book.now, at)
                book.answer(name, ["good"])
        assert book.end == Done()
        return book.now

    alone_s = run({ANN: quick_s, BOB: quick_s})
    with_slow_s = run({ANN: quick_s, BOB: quick_s, CYD: slow_s})
    assert with_slow_s <= 1.2 * alone_s + 4 * quick_s


def test_ten_thousand_blocks_cost_linear_work():
    cids = tuple(cid_of(n.to_bytes(4, "big")) for n in range(10_000))
    fetch = Fetch(FetchLimits())
    for name in (ANN, BOB):
        fetch.handle(ProviderJoined(name), 0.0)
    queue = fetch.handle(BlocksWanted(cids), 0.0)
    events = 0
    while not fetch.over:
        command = queue.pop(0)
        assert isinstance(command, Ask)
        for cid in command.cids:
            queue += fetch.handle(BlockArrived(command.provider, cid), events * 1e-3)
            events += 1
    assert events == 10_000


SCARCE = FetchLimits(in_flight_max=4, ask_max=2, scarce_after=4)


def test_a_provider_that_has_nothing_is_asked_little():
    fetch, commands = started(64, ANN, BOB, limits=SCARCE)
    held = {provider: [cid for name, cid in asked(commands) if name == provider] for provider in (ANN, BOB)}
    now = 0.0
    for cid in held[BOB]:
        now += 0.01
        commands = fetch.handle(BlockMissing(BOB, cid), now)
    assert len(fetch.owed_by(BOB)) <= SCARCE.in_flight_max
    while len(fetch.owed_by(BOB)) > 2:
        now += 0.01
        fetch.handle(BlockMissing(BOB, fetch.owed_by(BOB)[0]), now)
    fetch.handle(BlockMissing(BOB, fetch.owed_by(BOB)[0]), now + 0.01)
    assert len(fetch.owed_by(BOB)) == 1
    assert asked(fetch.handle(BlockMissing(BOB, fetch.owed_by(BOB)[0]), now + 0.02))[0][0] == BOB
    assert len(fetch.owed_by(BOB)) == 2


def test_providers_of_different_halves_complete_each_other():
    """Whatever is asked of whom: each 'not here' is an answer, never a loss."""
    fetch, commands = started(64, ANN, BOB, limits=SCARCE)
    halves = {ANN: set(CIDS[:32]), BOB: set(CIDS[32:])}
    waiting, now, answers = asked(commands), 0.0, 0
    while not fetch.over:
        now += 0.001
        provider, cid = waiting.pop(0)
        answers += 1
        event = BlockArrived(provider, cid) if cid in halves[provider] else BlockMissing(provider, cid)
        commands = fetch.handle(event, now)
        waiting += asked(commands)
    assert commands == [Done()]
    assert answers < 64 + 48  # asked in order by both, it would be nearly 128
