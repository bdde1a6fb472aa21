import math
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvasir_node.base.ids import DAG_CBOR_CODEC, ModelId, PeerId, SliceId, cid_of
from kvasir_node.decide.placement import (
    Assignment,
    Attach,
    CoordinatorLost,
    DemandSeen,
    Drain,
    Drained,
    Fetch,
    HubsKnown,
    LoadSlice,
    NothingOffered,
    OfferReceived,
    Paused,
    Placement,
    PlacementLimits,
    PollFailed,
    PollHub,
    Release,
    Renewed,
    RenewFailed,
    RenewLeases,
    Resumed,
    Stage,
    StandingTold,
    StepDone,
    StepFailed,
    Tick,
    offered,
)

HUB, HUB_2, CARL = PeerId("hub"), PeerId("hub 2"), PeerId("carl")
MODEL = ModelId(cid_of(b"model", DAG_CBOR_CODEC))
LIMITS = PlacementLimits(slices_max=2, poll_interval_s=2.0, renew_interval_s=3.0)


class Middle:
    """Chance that always takes the middle."""

    def uniform(self, a: float, b: float, /) -> float:
        return (a + b) / 2


def lease(number: int = 1, hub: PeerId = HUB, name: str = "") -> Assignment:
    return Assignment(
        name or f"lease {number}", MODEL, "float32", SliceId(number, 0, 7), CARL, ("/ip4/192.0.2.1/tcp/1",), hub
    )


class Player:
    """A placement and a clock that tests move by hand."""

    def __init__(self, limits: PlacementLimits = LIMITS) -> None:
        self.mind = Placement(limits, Middle())
        self.now = 0.0

    def hears(self, event) -> list:
        return self.mind.handle(event, self.now)

    def ticks(self) -> list:
        """Waits until something is due, and lets it come."""
        at = self.mind.next_at()
        assert at is not None
        self.now = max(self.now, at)
        return self.hears(Tick())

    def waits_for(self, kind: type) -> list:
        """Lets due things come until one of them is a `kind`; the hub answers renewals meanwhile."""
        for _ in range(1000):
            commands = self.ticks()
            for command in commands:
                if isinstance(command, RenewLeases):
                    self.renews(command)
            if any(isinstance(command, kind) for command in commands):
                return commands
        raise AssertionError(f"no {kind.__name__} came")

    def waits_for_renewal(self) -> list:
        """Lets due things come until a hub is asked to renew something, and leaves that unanswered."""
        for _ in range(1000):
            commands = self.ticks()
            if any(isinstance(command, RenewLeases) for command in commands):
                return commands
        raise AssertionError("no renewal came")

    def renews(self, command: RenewLeases) -> None:
        for assignment, _ in command.leases:
            self.hears(Renewed(assignment.lease, 15.0))

    def stage(self, number: int = 1) -> Stage | None:
        found = self.mind.stages().get(f"lease {number}")
        return None if found is None else found[1]


def polling() -> Player:
    player = Player()
    player.hears(HubsKnown((HUB,)))
    assert player.ticks() == [PollHub(HUB)]
    return player


def at_stage(stage: Stage, player: Player | None = None) -> Player:
    player = polling() if player is None else player
    player.hears(OfferReceived(lease(), 15.0))
    if stage is not Stage.FETCHING:
        player.hears(StepDone("lease 1"))
    if stage in (Stage.TRIAL, Stage.SERVING):
        player.hears(StepDone("lease 1"))
        player.hears(StepDone("lease 1"))
    if stage is Stage.SERVING:
        player.hears(StandingTold("lease 1", proven=True))
    if stage is Stage.DRAINING:
        player.hears(Renewed("lease 1", 0.0))
    assert player.stage() is stage
    return player


def test_playbook_from_poll_to_idle():
    player = Player()
    assert player.mind.next_at() is None
    assert player.hears(HubsKnown((HUB,))) == []
    assert player.ticks() == [PollHub(HUB)]
    assert player.mind.next_at() is None  # until the hub answers
    assert player.hears(NothingOffered(2.0)) == []
    assert player.mind.next_at() == pytest.approx(player.now + 2.0)
    assert player.ticks() == [PollHub(HUB)]
    assert player.hears(OfferReceived(lease(), 15.0)) == [Fetch(lease())]
    began_at = player.now
    assert player.ticks() == [PollHub(HUB)]  # the next slice may be open too
    assert player.hears(NothingOffered(100.0)) == []
    assert player.hears(StepDone("lease 1")) == [LoadSlice(lease())]
    assert player.hears(StepDone("lease 1")) == [Attach(lease())]
    assert player.ticks() == [RenewLeases(HUB, ((lease(), False),))]
    assert player.now == began_at + 3.0
    assert player.hears(Renewed("lease 1", 15.0)) == []
    assert player.hears(StepDone("lease 1")) == []
    assert player.hears(StandingTold("lease 1", proven=True)) == []
    assert player.stage() is Stage.SERVING
    assert player.ticks() == [RenewLeases(HUB, ((lease(), True),))]
    assert player.hears(Renewed("lease 1", 0.0)) == [Drain(lease())]
    assert player.stage() is Stage.DRAINING
    assert player.hears(Drained("lease 1")) == []
    assert player.mind.stages() == {}
    assert player.ticks() == [PollHub(HUB)]


F, L, T, S, D = Stage
STEPS = {
    #                     from:      FETCHING  LOADING   TRIAL     SERVING   DRAINING
    StepDone("lease 1"): ((L, LoadSlice), (T, Attach), (T,), (S,), (D,)),
    StepFailed("lease 1", retry=False): ((D, Drain, Release),) * 4 + ((D,),),
    StepFailed("lease 1", retry=True): ((D, Drain, Release), (D, Drain, Release), (T,), (T,), (D,)),
    StandingTold("lease 1", proven=True): ((F,), (L,), (S,), (S,), (D,)),
    StandingTold("lease 1", proven=False): ((F,), (L,), (T,), (T,), (D,)),
    CoordinatorLost("lease 1"): ((F,), (L,), (T,), (T,), (D,)),
    Renewed("lease 1", 15.0): ((F,), (L,), (T,), (S,), (D,)),
    Renewed("lease 1", 0.0): ((D, Drain),) * 4 + ((D,),),
    RenewFailed("lease 1", HUB): ((F,), (L,), (T,), (S,), (D,)),
    Drained("lease 1"): ((None,),) * 5,
    Paused(): ((D, Drain, Release),) * 4 + ((D,),),
}


@pytest.mark.parametrize("stage", list(Stage))
@pytest.mark.parametrize("event", STEPS, ids=repr)
def test_transitions(event, stage):
    player = at_stage(stage)
    became, *commands = STEPS[event][list(Stage).index(stage)]
    assert [type(command) for command in player.hears(event)] == commands
    assert player.stage() is became


@pytest.mark.parametrize(
    "event",
    [
        StepDone("gone"),
        StepFailed("gone", retry=True),
        StandingTold("gone", proven=True),
        CoordinatorLost("gone"),
        Renewed("gone", 15.0),
        RenewFailed("gone", HUB),
        Drained("gone"),
    ],
)
def test_what_is_told_of_an_unknown_lease_changes_nothing(event):
    player = at_stage(Stage.SERVING)
    before = (player.mind.stages(), player.mind.next_at())
    assert player.hears(event) == []
    assert (player.mind.stages(), player.mind.next_at()) == before


# Polls ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "events",
    [
        (Paused(), Resumed()),
        (HubsKnown(()), HubsKnown((HUB_2,))),
        (DemandSeen(0), DemandSeen(5)),
    ],
)
def test_never_two_polls_at_once(events):
    player = polling()
    for event in events:
        player.hears(event)
    player.now += 100.0
    assert player.hears(Tick()) == []
    player.hears(PollFailed(HUB))
    assert [type(command) for command in player.ticks()] == [PollHub]


def test_a_lease_that_drains_away_while_a_poll_is_under_way_starts_no_second_one():
    player = at_stage(Stage.DRAINING)
    assert player.ticks() == [PollHub(HUB)]
    player.hears(Drained("lease 1"))
    player.now += 100.0
    assert player.hears(Tick()) == []


def test_polls_are_rare_while_tables_say_that_nothing_is_wanted_and_soon_when_demand_appears():
    player = polling()
    player.hears(DemandSeen(0))
    player.hears(NothingOffered(2.0))
    assert player.mind.next_at() == player.now + 10.0
    player.now += 1.0
    player.hears(DemandSeen(3))
    assert player.mind.next_at() == player.now + 0.25
    player.hears(DemandSeen(4))  # it is no news that there is some
    assert player.mind.next_at() == player.now + 0.25


def test_a_table_that_is_too_old_says_nothing():
    player = polling()
    player.hears(DemandSeen(0))
    player.now += 30.0
    player.hears(NothingOffered(2.0))
    assert player.mind.next_at() == player.now + 2.0


@pytest.mark.parametrize(("asked_s", "waits_s"), [(0.0, 0.2), (86_400.0, 600.0), (5.0, 5.0)])
def test_a_hub_can_neither_drive_a_worker_nor_silence_it(asked_s, waits_s):
    player = polling()
    player.hears(NothingOffered(asked_s))
    assert player.mind.next_at() == pytest.approx(player.now + waits_s)


def test_a_hub_that_does_not_answer_is_asked_last():
    player = Player()
    player.hears(HubsKnown((HUB, HUB_2)))
    assert player.ticks() == [PollHub(HUB)]
    player.hears(PollFailed(HUB))
    assert player.ticks() == [PollHub(HUB_2)]


def test_hubs_are_asked_in_turn_because_one_may_know_of_demand_that_another_does_not():
    player = Player()
    hubs = tuple(PeerId(f"hub {number}") for number in range(6))
    player.hears(HubsKnown(hubs))
    asked, began_at = [], player.now
    for _ in range(12):
        (poll,) = player.ticks()
        asked.append(poll.hub)
        player.hears(NothingOffered(2.0))
    assert asked == [*hubs, *hubs]
    assert player.now - began_at < 12 * 2.0 / 4 + 1  # four in the time that each wants to be left alone


def test_a_new_hub_is_asked_next_and_the_others_keep_their_turn():
    player = Player()
    player.hears(HubsKnown((HUB, HUB_2)))
    player.ticks()
    player.hears(NothingOffered(2.0))
    player.hears(HubsKnown((HUB, HUB_2, CARL)))
    asked = []
    for _ in range(3):
        (poll,) = player.ticks()
        asked.append(poll.hub)
        player.hears(NothingOffered(2.0))
    assert asked == [CARL, HUB_2, HUB]


def test_law_8_fetches_that_fail_through_a_peer_do_not_keep_a_worker_from_all_others():
    player = polling()
    for number in range(1, 12):
        player.hears(OfferReceived(lease(number), 15.0))
        player.hears(StepFailed(f"lease {number}", retry=True))
        failed_at = player.now
        player.hears(Drained(f"lease {number}"))
        assert player.ticks() == [PollHub(HUB)]
        assert player.now - failed_at <= 4.0


def test_without_a_hub_there_is_nothing_to_wait_for():
    player = polling()
    player.hears(NothingOffered(2.0))
    player.hears(HubsKnown(()))
    assert player.mind.next_at() is None


def test_a_worker_that_is_full_does_not_poll_until_it_has_room():
    player = at_stage(Stage.SERVING)
    assert player.ticks() == [PollHub(HUB)]
    player.hears(OfferReceived(lease(2), 15.0))
    for _ in range(4):
        for command in player.ticks():
            assert isinstance(command, RenewLeases)
            player.renews(command)
    player.hears(Renewed("lease 1", 0.0))
    player.hears(Drained("lease 1"))
    assert PollHub(HUB) in player.waits_for(PollHub)


@pytest.mark.parametrize(
    ("before", "offer", "answer"),
    [
        ((Paused(),), lease(), [Release(HUB, (lease(),))]),
        ((OfferReceived(lease(2), 15.0), OfferReceived(lease(3), 15.0)), lease(), [Release(HUB, (lease(),))]),
        ((OfferReceived(lease(1, name="a"), 15.0),), lease(1, name="b"), [Release(HUB, (lease(1, name="b"),))]),
        # the same lease once more: giving it back would end the one that is held
        ((OfferReceived(lease(1, name="a"), 15.0),), lease(2, name="a"), []),
        # two hubs that began in the same millisecond give the same names
        (
            (OfferReceived(lease(1, name="a"), 15.0),),
            lease(2, HUB_2, name="a"),
            [Release(HUB_2, (lease(2, HUB_2, name="a"),))],
        ),
    ],
)
def test_an_offer_that_cannot_be_used_is_given_back(before, offer, answer):
    player = polling()
    for event in before:
        player.hears(event)
    stages = player.mind.stages()
    assert player.hears(OfferReceived(offer, 15.0)) == answer
    assert player.mind.stages() == stages


def test_a_worker_whose_fetches_fail_asks_ever_more_rarely_until_a_slice_is_proven():
    player = polling()
    pauses = []
    for number in range(1, 12):
        player.hears(OfferReceived(lease(number), 15.0))
        player.hears(StepFailed(f"lease {number}", retry=False))
        failed_at = player.now
        player.hears(Drained(f"lease {number}"))
        player.hears(DemandSeen(0))
        player.hears(DemandSeen(9))
        assert player.ticks() == [PollHub(HUB)]
        pauses.append(player.now - failed_at)
    assert pauses[:4] == pytest.approx([2.0, 4.0, 8.0, 16.0], abs=0.5)
    assert pauses[-1] == 300.0
    player = at_stage(Stage.SERVING, player)
    player.hears(OfferReceived(lease(2), 15.0))
    player.hears(StepFailed("lease 2", retry=True))
    failed_at = player.now
    player.hears(Drained("lease 2"))
    player.waits_for(PollHub)
    assert player.now == pytest.approx(failed_at + 2.0, abs=0.5)


def test_what_is_held_is_listed_as_busy():
    player = at_stage(Stage.SERVING)
    assert offered(player.mind.stages().values()) == ((MODEL, SliceId(1, 0, 7)),)


# Leases ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [F, L, T])
def test_a_lease_that_expires_is_drained(stage):
    player = at_stage(stage)
    player.now = 100.0
    assert Drain(lease()) in player.hears(Tick())
    assert player.stage() is Stage.DRAINING


def test_a_renewal_that_fails_is_soon_tried_at_another_hub():
    player = at_stage(Stage.SERVING)
    player.hears(HubsKnown((HUB, HUB_2)))
    (renewal,) = [c for c in player.waits_for(RenewLeases) if isinstance(c, RenewLeases)]
    assert renewal.hub == HUB
    player.hears(RenewFailed("lease 1", HUB))
    failed_at = player.now
    (renewal,) = [c for c in player.waits_for(RenewLeases) if isinstance(c, RenewLeases)]
    assert renewal.hub == HUB_2
    assert player.now == failed_at + 1.0
    player.hears(Renewed("lease 1", 15.0))
    assert player.hears(Paused()) == [Drain(lease()), Release(HUB_2, (lease(),))]


def test_one_hub_at_a_time_is_asked_to_renew_a_lease():
    player = at_stage(Stage.TRIAL)
    player.hears(NothingOffered(100.0))
    (renewal,) = [c for c in player.waits_for_renewal() if isinstance(c, RenewLeases)]
    assert player.mind.next_at() == player.now + 12.0  # the end of the lease: it does not answer
    player.now += 3 * LIMITS.renew_interval_s
    assert not any(isinstance(c, RenewLeases) for c in player.hears(Tick()))
    player.hears(RenewFailed("lease 1", renewal.hub))
    assert any(isinstance(c, RenewLeases) for c in player.hears(Tick()))


def test_a_hub_that_failed_to_renew_before_another_took_over_sends_the_lease_nowhere_else():
    player = at_stage(Stage.SERVING)
    player.waits_for_renewal()  # HUB is asked, and dies
    player.hears(HubsKnown(()))
    player.hears(HubsKnown((HUB_2,)))  # renews it from now on
    player.hears(HubsKnown((HUB_2, CARL)))
    player.hears(RenewFailed("lease 1", HUB))
    (renewal,) = [c for c in player.waits_for_renewal() if isinstance(c, RenewLeases)]
    assert renewal.hub == HUB_2


def without_a_hub(player: Player, until: float, *, nor_coordinator: bool = False) -> None:
    """Lets time pass in which no hub answers (and no coordinator either); stops when the lease ends."""
    while player.now < until and player.stage() is not Stage.DRAINING:
        for command in player.ticks():
            if isinstance(command, RenewLeases):
                player.hears(RenewFailed("lease 1", HUB))
            elif isinstance(command, Attach) and nor_coordinator:
                player.hears(StepFailed("lease 1", retry=True))
            elif isinstance(command, PollHub):
                player.hears(PollFailed(HUB))


@pytest.mark.parametrize("stage", [F, L, T])
def test_without_an_answer_a_lease_that_does_not_serve_lasts_until_it_expires_and_no_longer(stage):
    player = at_stage(stage)
    began_at = player.now
    without_a_hub(player, began_at + 600.0)
    assert player.now == began_at + 15.0


def test_law_8_a_hub_that_is_gone_ends_no_service_as_long_as_the_coordinator_counts_on_us():
    player = at_stage(Stage.SERVING)
    without_a_hub(player, player.now + 600.0)
    assert player.stage() is Stage.SERVING
    player.hears(Renewed("lease 1", 15.0))  # a hub is back
    player.now += 100.0  # this machine slept
    assert RenewLeases(HUB, ((lease(), True),)) in player.hears(Tick())
    assert player.hears(Renewed("lease 1", 0.0)) == [Drain(lease())]


def test_law_8_an_outage_of_our_own_line_ends_no_lease_of_a_proven_slice_before_patience_does():
    player = at_stage(Stage.SERVING)
    player.hears(CoordinatorLost("lease 1"))
    lost_at = player.now
    without_a_hub(player, math.inf, nor_coordinator=True)
    assert 60.0 < player.now - lost_at < 60.0 + 10.0 + 1.0


def test_after_an_outage_longer_than_the_lease_a_proven_slice_is_renewed_attached_and_serves_again():
    player = at_stage(Stage.SERVING)
    player.hears(CoordinatorLost("lease 1"))
    without_a_hub(player, player.now + 30.0, nor_coordinator=True)
    player.waits_for(RenewLeases)
    player.hears(Renewed("lease 1", 15.0))
    player.waits_for(Attach)
    player.hears(StepDone("lease 1"))
    player.hears(StandingTold("lease 1", proven=True))
    assert player.stage() is Stage.SERVING


def test_a_hub_that_comes_back_is_reason_to_look_for_the_lost_coordinator_at_once():
    player = at_stage(Stage.SERVING)
    player.hears(CoordinatorLost("lease 1"))
    for _ in range(6):
        player.waits_for(Attach)
        player.hears(StepFailed("lease 1", retry=True))
    player.hears(HubsKnown(()))
    came_at = player.now
    player.hears(HubsKnown((HUB,)))
    player.waits_for(Attach)
    assert player.now - came_at <= 0.25 * 3.0


def test_a_proof_that_the_coordinator_takes_back_no_longer_holds_an_expired_lease():
    player = at_stage(Stage.SERVING)
    player.hears(StandingTold("lease 1", proven=False))
    player.now += 15.0
    assert Drain(lease()) in player.hears(Tick())


def test_when_proof_ends_while_no_hub_answers_the_lease_ends_too():
    player = at_stage(Stage.SERVING)
    without_a_hub(player, player.now + 600.0)
    player.hears(StandingTold("lease 1", proven=False))
    assert Drain(lease()) in player.hears(Tick())


def test_a_lease_whose_hub_is_gone_stays_with_the_one_that_took_it_over():
    player = at_stage(Stage.SERVING)
    player.hears(HubsKnown((HUB, HUB_2, CARL)))
    player.hears(HubsKnown((HUB_2, CARL)))
    asked = set()
    for _ in range(40):  # polls meanwhile go to the hubs in turn
        for command in player.ticks():
            if isinstance(command, RenewLeases):
                asked.add(command.hub)
                player.hears(Renewed("lease 1", 15.0))
            elif isinstance(command, PollHub):
                player.hears(NothingOffered(0.5))
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("before", "after", "after_s"),
    [
        ((), (HUB,), 0.375),  # it was restarted and knows nothing
        ((), (HUB_2,), 0.375),  # it takes the lease over
        ((HUB,), (HUB, HUB_2), 3.0),  # another one is no reason to hurry
    ],
)
def test_a_hub_that_came_hears_soon_of_the_leases_that_it_will_renew(before, after, after_s):
    player = at_stage(Stage.SERVING)
    player.waits_for(RenewLeases)
    renewed_at = player.now
    player.hears(HubsKnown(before))
    player.hears(HubsKnown(after))
    player.waits_for(RenewLeases)
    assert player.now == renewed_at + after_s


def test_a_short_lease_is_renewed_before_it_expires():
    player = polling()
    player.hears(OfferReceived(lease(), 1.5))
    began_at = player.now
    player.waits_for(RenewLeases)
    assert player.now == began_at + 0.5


def with_many(count: int, hubs: tuple[PeerId, ...] = (HUB,), renewals_max: int = 256) -> Player:
    limits = PlacementLimits(slices_max=count, poll_interval_s=2.0, renew_interval_s=3.0, renewals_max=renewals_max)
    player = Player(limits)
    player.hears(HubsKnown(hubs))
    for number in range(count):
        player.waits_for(PollHub)
        player.hears(OfferReceived(lease(number, hubs[number % len(hubs)]), 15.0))
    return player


def renewals_of(player: Player, until: float) -> list[tuple[PeerId, int]]:
    found: list[tuple[PeerId, int]] = []
    while (at := player.mind.next_at()) is not None and at <= until:
        for command in player.ticks():
            if isinstance(command, RenewLeases):
                found.append((command.hub, len(command.leases)))
                player.renews(command)
    return found


def test_64_leases_are_renewed_in_as_many_messages_as_one():
    player = with_many(64)
    began_at = player.now
    # They were taken one after the other, and are in step from the first renewal on.
    assert renewals_of(player, began_at + 30.0) == [(HUB, 64)] * 10


def test_each_hub_renews_its_own_leases_and_a_message_takes_so_many_and_no_more():
    player = with_many(10, (HUB, HUB_2), renewals_max=3)
    found = renewals_of(player, player.now + 3.0)
    assert sorted(found) == sorted([(HUB, 3), (HUB, 2), (HUB_2, 3), (HUB_2, 2)])


def test_leases_that_go_together_are_given_back_together():
    player = with_many(5, (HUB, HUB_2))
    *drains, first, second = player.hears(Paused())
    assert sorted(drain.assignment.lease for drain in drains) == [f"lease {number}" for number in range(5)]
    assert [len(release.assignments) for release in (first, second)] == [3, 2]


@pytest.mark.parametrize(
    ("open_copies", "idle", "middle_s"),
    [
        (3, 1, 0.25),
        (3, 16, 1.0),  # 16 askers in an interval of 2 s
        (3, 1_000, 62.5),
        (100, 1_000, 10 / 3),  # 300 askers for 100 copies
        (100_000, 6_000, 10.0),  # 300 polls a second are what a hub should bear
    ],
)
def test_of_a_crowd_as_many_poll_soon_as_are_needed_and_as_a_hub_can_bear(open_copies, idle, middle_s):
    player = polling()
    player.hears(DemandSeen(0, idle))
    player.hears(NothingOffered(600.0))
    player.hears(DemandSeen(open_copies, idle))
    assert player.mind.next_at() == pytest.approx(player.now + middle_s)


def test_demand_that_is_met_before_our_turn_comes_sends_us_back_to_rest():
    player = polling()
    player.hears(DemandSeen(0, 1_000))
    player.hears(NothingOffered(600.0))
    rest_at = player.mind.next_at()
    player.hears(DemandSeen(100, 1_000))
    assert player.mind.next_at() < rest_at
    player.hears(DemandSeen(0, 1_000))
    assert player.mind.next_at() == rest_at
    player.hears(DemandSeen(100, 1_000))
    assert player.mind.next_at() < rest_at


def test_demand_that_doubles_is_news_again():
    player = polling()
    player.hears(DemandSeen(10, 1_000))
    player.hears(NothingOffered(600.0))
    rest_at = player.mind.next_at()
    player.hears(DemandSeen(20, 1_000))
    assert player.mind.next_at() == rest_at
    player.hears(DemandSeen(21, 1_000))
    assert player.mind.next_at() < rest_at


def test_a_hub_that_is_gone_is_stood_in_for_by_another():
    player = at_stage(Stage.SERVING)
    player.hears(HubsKnown((HUB_2,)))
    commands = player.waits_for(RenewLeases)
    assert RenewLeases(HUB_2, ((lease(), True),)) in commands


# The coordinator is lost ----------------------------------------------------------------------------------------


def test_playbook_of_a_coordinator_that_does_not_come_back():
    player = at_stage(Stage.SERVING)
    player.hears(CoordinatorLost("lease 1"))
    lost_at, pauses = player.now, []
    while True:
        failed_at = player.now
        player.waits_for(Attach)
        pauses.append(player.now - failed_at)
        commands = player.hears(StepFailed("lease 1", retry=True))
        if commands:
            break
    assert commands == [Drain(lease()), Release(HUB, (lease(),))]
    assert pauses[:6] == pytest.approx([0.5, 1.0, 2.0, 4.0, 8.0, 8.0])
    assert 60.0 < player.now - lost_at < 69.0


def test_a_coordinator_that_comes_back_is_served_again_and_its_next_absence_is_a_new_one():
    player = at_stage(Stage.SERVING)
    for _ in range(3):
        player.hears(CoordinatorLost("lease 1"))
        lost_at = player.now
        player.waits_for(Attach)
        assert player.now == pytest.approx(lost_at + 0.5)
        player.hears(StandingTold("lease 1", proven=True))  # it may tell before it answers
        player.hears(StepDone("lease 1"))
        assert player.stage() is Stage.SERVING
        for _ in range(20):
            player.waits_for(RenewLeases)


def test_a_coordinator_lost_twice_while_an_attempt_is_under_way_starts_no_second_one():
    player = at_stage(Stage.SERVING)
    player.hears(CoordinatorLost("lease 1"))
    player.waits_for(Attach)
    player.hears(CoordinatorLost("lease 1"))
    player.now += 20.0
    player.hears(Renewed("lease 1", 15.0))
    assert not any(isinstance(command, Attach) for command in player.hears(Tick()))
    player.hears(StepFailed("lease 1", retry=True))
    assert any(isinstance(command, Attach) for command in player.waits_for(Attach))


def test_a_coordinator_lost_just_as_the_attempt_succeeded_is_attached_to_again():
    player = at_stage(Stage.SERVING)
    player.hears(CoordinatorLost("lease 1"))
    player.waits_for(Attach)
    player.hears(CoordinatorLost("lease 1"))
    player.hears(StepDone("lease 1"))
    assert player.stage() is Stage.TRIAL
    player.waits_for(Attach)


# Pause ----------------------------------------------------------------------------------------------------------


def test_playbook_of_a_pause():
    player = at_stage(Stage.SERVING)
    assert player.hears(Paused()) == [Drain(lease()), Release(HUB, (lease(),))]
    assert player.mind.paused
    assert player.hears(Paused()) == []
    player.hears(Drained("lease 1"))
    player.hears(DemandSeen(5))
    assert player.mind.next_at() is None
    player.hears(Resumed())
    assert player.ticks() == [PollHub(HUB)]


# Any order ------------------------------------------------------------------------------------------------------


class AnyOrder(RuleBasedStateMachine):
    """A driver that carries commands out with any result, in any order and after any delay."""

    def __init__(self) -> None:
        super().__init__()
        self.mind = Placement(LIMITS, random.Random(7))
        self.now = 0.0
        self.counter = 0
        self.polls: list[PeerId] = []
        self.steps: dict[str, object] = {}
        self.renewals: list[tuple[str, PeerId]] = []
        self.drains: set[str] = set()
        self.attached: set[str] = set()
        self.lost_meanwhile: set[str] = set()

    def hear(self, event) -> list:
        commands = self.mind.handle(event, self.now)
        for command in commands:
            match command:
                case PollHub(hub):
                    self.polls.append(hub)
                    assert len(self.polls) == 1, "two polls at once"
                    assert not self.mind.paused
                case Fetch() | LoadSlice() | Attach():
                    name = command.assignment.lease
                    assert name not in self.steps, "two steps of one lease at once"
                    assert not (isinstance(command, Fetch) and self.mind.paused), "a new fetch while paused"
                    self.steps[name] = command
                case RenewLeases(hub, leases):
                    self.renewals += [(assignment.lease, hub) for assignment, _ in leases]
                case Drain(assignment):
                    assert assignment.lease not in self.drains
                    self.drains.add(assignment.lease)
                    self.steps.pop(assignment.lease, None)  # the driver cancels it
        return commands

    @rule(hubs=st.sampled_from([(), (HUB,), (HUB, HUB_2)]))
    def hubs_known(self, hubs):
        self.hear(HubsKnown(hubs))

    @rule(copies=st.integers(0, 3))
    def demand_seen(self, copies):
        self.hear(DemandSeen(copies))

    @rule(event=st.sampled_from([Paused(), Resumed()]))
    def wish(self, event):
        self.hear(event)

    @precondition(lambda self: self.polls)
    @rule(
        answer=st.sampled_from(["offer", "offer", "same slice", "nothing", "failure"]),
        ttl_s=st.sampled_from([0.0, 2.0, 15.0]),
    )
    def poll_ends(self, answer, ttl_s):
        hub = self.polls.pop()
        self.counter += 1
        part = 0 if answer == "same slice" else self.counter
        assignment = lease(part, hub, name=f"lease {self.counter}")
        match answer:
            case "nothing":
                self.hear(NothingOffered(ttl_s))
            case "failure":
                self.hear(PollFailed(hub))
            case _:
                self.hear(OfferReceived(assignment, ttl_s))

    @precondition(lambda self: self.steps)
    @rule(data=st.data(), done=st.booleans(), retry=st.booleans())
    def step_ends(self, data, done, retry):
        name = data.draw(st.sampled_from(sorted(self.steps)))
        if isinstance(self.steps.pop(name), Attach) and done and name not in self.lost_meanwhile:
            self.attached.add(name)
        self.lost_meanwhile.discard(name)
        self.hear(StepDone(name) if done else StepFailed(name, retry=retry))

    @precondition(lambda self: self.renewals)
    @rule(ttl_s=st.sampled_from([None, 0.0, 2.0, 15.0]))
    def renewal_ends(self, ttl_s):
        name, hub = self.renewals.pop(0)
        self.hear(RenewFailed(name, hub) if ttl_s is None else Renewed(name, ttl_s))

    @precondition(lambda self: self.drains)
    @rule(data=st.data())
    def drain_ends(self, data):
        name = data.draw(st.sampled_from(sorted(self.drains)))
        self.drains.remove(name)
        self.hear(Drained(name))

    @precondition(lambda self: self.mind.stages())
    @rule(data=st.data(), event=st.sampled_from(["lost", "proven", "not proven"]))
    def coordinator_says(self, data, event):
        name = data.draw(st.sampled_from(sorted(self.mind.stages())))
        if event == "lost":
            self.attached.discard(name)
            self.lost_meanwhile |= {name} & set(self.steps)
        self.hear(CoordinatorLost(name) if event == "lost" else StandingTold(name, proven=event == "proven"))

    @rule(passed_s=st.sampled_from([0.5, 3.0, 16.0, 70.0]))
    def time_passes(self, passed_s):
        until = self.now + passed_s
        for _ in range(1000):
            at = self.mind.next_at()
            if at is None or at > until:
                break
            self.now = max(self.now, at)
            self.hear(Tick())
            following = self.mind.next_at()
            assert following is None or following > self.now, "a tick that was due left itself due"
        else:
            raise AssertionError("the clock does not advance")
        self.now = until

    @invariant()
    def every_lease_goes_on_or_is_drained(self):
        stages = self.mind.stages()
        assert len(stages) <= LIMITS.slices_max
        for name, (_, stage) in stages.items():
            if stage is Stage.DRAINING:
                assert name in self.drains
            else:
                assert self.mind.next_at() is not None
                will_attach = self.mind._held[name].attach_at is not None
                assert name in self.steps or name in self.attached or will_attach

    def teardown(self):
        self.hear(Paused())
        for name in sorted(self.drains):
            self.hear(Drained(name))
        assert self.mind.stages() == {}
        assert self.mind.next_at() is None


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=120, stateful_step_count=50, deadline=None, derandomize=True)
