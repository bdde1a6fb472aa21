from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvasir_node.base.ids import PeerId
from kvasir_node.decide.remembering import (
    ADDRESSES_MAX,
    GUIDES_MAX,
    HEADSTART_S,
    HUBS_MAX,
    MEMBERS_MAX,
    PAUSE_MAX_S,
    PAUSE_S,
    TRIES_MAX,
    KnownMember,
    Remembering,
    best_addresses,
)

ANN, BOB, HUB = PeerId("ann"), PeerId("bob"), PeerId("hub")


def at(host: str, *, is_hub: bool = False) -> KnownMember:
    return KnownMember((f"/ip4/{host}/tcp/1/p2p/x",), is_hub)


def alone(mind: Remembering, now: float = 0.0) -> None:
    """From `now` on it has no hub."""
    assert mind.due((), has_hub=False, now=now) == []


def test_nobody_is_tried_while_there_is_a_hub_nor_before_the_ticket_had_its_chance():
    mind = Remembering()
    mind.met(ANN, at("192.0.2.1"))
    assert mind.due((HUB,), has_hub=True, now=100.0) == []
    alone(mind, 100.0)
    assert mind.due((), has_hub=False, now=100.0 + HEADSTART_S - 0.1) == []
    assert mind.due((), has_hub=False, now=100.0 + HEADSTART_S) == [ANN]
    assert mind.due((HUB,), has_hub=True, now=200.0) == []
    assert mind.due((), has_hub=False, now=201.0) == []  # the wait begins anew


def test_hubs_come_first_then_whom_we_met_last_and_no_more_than_lead_anywhere():
    mind = Remembering()
    mind.met(HUB, at("192.0.2.9", is_hub=True))
    members = [PeerId(f"member {number}") for number in range(8)]
    for number, peer in enumerate(members):
        mind.met(peer, at(f"192.0.2.{number}"))
    alone(mind)
    assert mind.due((), has_hub=False, now=9.0) == [HUB, *members[:-TRIES_MAX:-1]]
    assert mind.due((), has_hub=False, now=9.0) == []  # all under way
    for peer in (HUB, *members[5:]):
        mind.failed(peer, 10.0)
    assert mind.due(members[:GUIDES_MAX], has_hub=False, now=11.0) == []
    assert mind.due(members[: GUIDES_MAX - 1], has_hub=False, now=11.0) == [members[4]]


def test_who_cannot_be_reached_is_tried_ever_more_rarely_and_for_good():
    mind = Remembering()
    mind.met(ANN, at("192.0.2.1"))
    alone(mind)
    now, pauses = HEADSTART_S, []
    for _ in range(12):
        began = now
        while not mind.due((), has_hub=False, now=now):
            now += 1.0
        pauses.append(now - began)
        mind.failed(ANN, now)
    assert pauses[:4] == [0.0, PAUSE_S, 2 * PAUSE_S, 4 * PAUSE_S]
    assert pauses[-1] == PAUSE_MAX_S


def test_who_joined_again_and_left_is_tried_at_once():
    mind = Remembering()
    mind.met(ANN, at("192.0.2.1"))
    alone(mind)
    assert mind.due((), has_hub=False, now=9.0) == [ANN]
    mind.joined(ANN)
    assert mind.due((ANN,), has_hub=False, now=10.0) == []
    assert mind.due((), has_hub=False, now=11.0) == [ANN]


def test_one_machine_with_many_identities_pushes_nobody_else_out():
    mind = Remembering()
    for number in range(40):
        mind.met(PeerId(f"honest {number}"), at(f"198.{number}.1.1"))
    for number in range(1000):
        mind.met(PeerId(f"flood {number}"), at(f"203.0.113.{number % 250}"))
    honest = [peer for peer in mind.members if peer.startswith("honest")]
    assert len(honest) == 40
    assert len(mind.members) == MEMBERS_MAX


def test_hubs_keep_their_places_against_others_up_to_half_of_them():
    mind = Remembering()
    for number in range(MEMBERS_MAX):
        mind.met(PeerId(f"hub {number}"), at(f"198.{number}.1.1", is_hub=True))
    for number in range(MEMBERS_MAX):
        mind.met(PeerId(f"worker {number}"), at(f"199.{number}.1.1"))
    hubs = [peer for peer, known in mind.members.items() if known.is_hub]
    assert hubs == [f"hub {number}" for number in range(HUBS_MAX, MEMBERS_MAX)]


def test_only_news_is_told_to_be_kept():
    mind = Remembering()
    assert mind.met(ANN, at("192.0.2.1"))
    assert not mind.met(ANN, at("192.0.2.1"))
    assert mind.met(ANN, at("192.0.2.2"))
    assert not mind.met(BOB, KnownMember((), False))
    assert list(mind.members) == [ANN]


def test_what_an_earlier_life_knew_is_older_than_what_was_met_in_this_one():
    mind = Remembering()
    mind.met(ANN, at("192.0.2.1"))
    mind.recall({ANN: at("192.0.2.7"), BOB: at("192.0.2.8")})
    assert mind.members == {BOB: at("192.0.2.8"), ANN: at("192.0.2.1")}
    assert list(mind.members) == [BOB, ANN]


def test_the_address_that_held_comes_first_and_only_addresses_of_the_member_itself_are_kept():
    told = ("/ip4/10.0.0.2/tcp/9/p2p/ann", "/ip4/198.51.100.7/tcp/9/p2p/ann", "/ip4/1.2.3.4/tcp/9/p2p/bob")
    assert best_addresses(ANN, "/ip4/192.0.2.1/tcp/7", "", told) == ("/ip4/192.0.2.1/tcp/7/p2p/ann", *told[:2])
    assert best_addresses(ANN, "", "/ip4/198.51.100.7/tcp/50123", told) == (told[1], told[0])
    assert best_addresses(ANN, "/p2p/relay/p2p-circuit", "", told) == told[:2]
    many = [f"/ip4/192.0.2.{number}/tcp/9/p2p/ann" for number in range(40)]
    assert len(best_addresses(ANN, "", "", many)) == ADDRESSES_MAX


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255), st.booleans())))
def test_it_is_bounded_whatever_is_met(met):
    mind = Remembering()
    for number, host, is_hub in met:
        mind.met(PeerId(f"{number}"), at(f"198.51.{host}.1", is_hub=is_hub))
        assert len(mind.members) <= MEMBERS_MAX
    alone(mind)
    assert len(mind.due((), has_hub=False, now=99.0)) <= TRIES_MAX
