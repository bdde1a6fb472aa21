"""What a node makes of what hubs tell it about how it is reached."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_node.base.ids import PeerId
from kvasir_node.decide.reach import (
    PAUSE_S,
    PROBE_AGAIN_S,
    PUNCH_PAUSE_MAX_S,
    PUNCH_PAUSE_S,
    PUNCHES_MAX,
    GiveBack,
    Nat,
    Probe,
    Punch,
    Reach,
    Reachability,
    Reserve,
    Scene,
    Seen,
    advertised,
    host_of,
    is_lan,
    port_of,
)

HUBS = tuple(PeerId(f"hub{number}") for number in range(4))
ANN, BOB = PeerId("ann"), PeerId("bob")
OUTSIDE = "/ip4/198.51.100.7/tcp/4001"
INSIDE = "/ip4/192.168.1.2/tcp/4001"


def seen(hub, observed=OUTSIDE, *, from_listen_port=True, reached=()):
    return Seen(hub, observed, from_listen_port, tuple(reached))


def told(*facts: Seen):
    reach = Reach(2)
    scene = Scene(tuple(each.hub for each in facts), (), ())
    assert reach.step(scene, 0.0) == [Probe(each.hub) for each in facts]
    for each in facts:
        reach.probed(each.hub, each, 0.0)
    return reach, scene


@pytest.mark.parametrize(
    ("host", "lan"),
    [
        ("192.168.0.1", True),
        ("10.1.2.3", True),
        ("172.31.0.1", True),
        ("172.32.0.1", False),
        ("100.64.0.1", True),
        ("169.254.1.1", True),
        ("127.0.0.1", True),
        ("203.0.113.1", False),
        ("fd00::1", True),
        ("fe80::1", True),
        ("::1", True),
        ("2001:db8::1", False),
    ],
)
def test_which_addresses_mean_something_only_nearby(host, lan):
    assert is_lan(host) is lan


def test_hosts_and_ports_are_read_from_addresses():
    assert (host_of(OUTSIDE), port_of(OUTSIDE)) == ("198.51.100.7", 4001)
    assert (host_of("/p2p/x/p2p-circuit"), port_of("/p2p/x/p2p-circuit")) == ("", 0)
    assert port_of("/ip4/1.2.3.4/udp/7") == 0
    assert host_of("") == ""


def test_the_router_is_asked_to_let_connections_in_where_others_cannot_reach_us():
    unknown = Reach(2)
    assert unknown.wants_mapping(is_hub=True)  # nobody else could try, and it must be reached
    assert not unknown.wants_mapping(is_hub=False)
    for reached, wanted in (((), True), ((INSIDE,), False), ((OUTSIDE,), False)):
        reach, _ = told(seen(HUBS[0], INSIDE if INSIDE in reached else OUTSIDE, reached=reached))
        assert reach.wants_mapping(is_hub=True) is reach.wants_mapping(is_hub=False) is wanted


def test_all_hubs_are_asked_again_at_once_when_something_changed_about_how_we_are_reached():
    reach, scene = told(seen(HUBS[0]), seen(HUBS[1]))
    assert not [each for each in reach.step(scene, 1.0) if isinstance(each, Probe)]
    reach.moved(2.0)
    assert [each for each in reach.step(scene, 2.0) if isinstance(each, Probe)] == [Probe(HUBS[0]), Probe(HUBS[1])]


def test_one_hub_that_cannot_reach_us_makes_us_private():
    reach, _ = told(seen(HUBS[0], INSIDE, reached=(INSIDE,)))
    assert reach.reachability is Reachability.LAN
    reach, _ = told(seen(HUBS[0], reached=(OUTSIDE,)))
    assert reach.reachability is Reachability.PUBLIC
    reach, _ = told(seen(HUBS[0], INSIDE, reached=(INSIDE,)), seen(HUBS[1]))
    assert reach.reachability is Reachability.PRIVATE
    assert Reach(2).reachability is Reachability.UNKNOWN


def test_a_connection_from_another_port_leaves_the_listener_where_it_was_seen_or_would_be():
    kept = "/ip4/198.51.100.7/tcp/9481"
    again = Seen(HUBS[0], OUTSIDE.replace("4001", "55000"), False, (), kept)
    reach, _ = told(again)
    assert reach.observed() == (kept,)
    reach, _ = told(seen(HUBS[0]))
    reach.step(Scene((), (), ()), 1.0)  # the hub is lost ...
    reach.probed(HUBS[0], again, 2.0)  # ... and back over another port
    assert reach.observed() == (OUTSIDE, kept)


def test_who_was_private_takes_a_place_at_a_hub_that_is_back_before_it_knows_anything_again():
    reach, scene = told(seen(HUBS[0]))
    reach.step(Scene((), (), ()), 1.0)
    assert reach.reachability is Reachability.UNKNOWN
    assert Reserve(HUBS[0]) in reach.step(scene, 2.0)
    public, scene = told(seen(HUBS[0], reached=(OUTSIDE,)))
    public.step(Scene((), (), ()), 1.0)
    assert public.step(scene, 2.0) == [Probe(HUBS[0])]


def test_places_at_relays_are_kept_where_hubs_of_our_own_network_alone_reach_us():
    """One of them may be reached from outside, through a forwarded port, and we are not."""
    reach, scene = told(seen(HUBS[0], INSIDE, reached=(INSIDE,)))
    assert [each for each in reach.step(scene, 1.0) if isinstance(each, Reserve)] == [Reserve(HUBS[0])]
    alone = "/ip4/127.0.0.1/tcp/4001"
    reach, scene = told(seen(HUBS[0], alone, reached=(alone,)))
    assert reach.step(scene, 1.0) == []  # a hub of this very machine


def test_the_kind_of_nat_is_told_by_two_hubs():
    own = {"192.168.1.2"}
    other = OUTSIDE.replace("4001", "20001")
    assert told(seen(HUBS[0]), seen(HUBS[1]))[0].nat(own) is Nat.CONE
    assert told(seen(HUBS[0]), seen(HUBS[1], other))[0].nat(own) is Nat.SYMMETRIC
    assert told(seen(HUBS[0]))[0].nat(own) is Nat.UNKNOWN
    assert told(seen(HUBS[0], INSIDE, reached=(INSIDE,)))[0].nat(own) is Nat.NONE
    assert Reach(2).nat(own) is Nat.UNKNOWN
    # A connection from any other port says nothing about the listener's.
    assert told(seen(HUBS[0]), seen(HUBS[1], other, from_listen_port=False))[0].nat(own) is Nat.UNKNOWN


def test_peers_are_told_where_the_listener_appears_and_nothing_else():
    other = OUTSIDE.replace("4001", "20001")
    reach, _ = told(seen(HUBS[0]), seen(HUBS[1]), seen(HUBS[2], other, from_listen_port=False))
    assert reach.observed() == (OUTSIDE,)


def test_places_at_relays_are_taken_only_by_who_cannot_be_reached():
    reach, scene = told(seen(HUBS[0], reached=(OUTSIDE,)))
    assert reach.step(scene, 1.0) == []
    reach, scene = told(*map(seen, HUBS))
    assert reach.step(scene, 1.0) == [Reserve(HUBS[0]), Reserve(HUBS[1])]
    assert reach.step(scene, 2.0) == []


def test_a_relay_that_dies_is_replaced_by_another_at_once():
    reach, scene = told(*map(seen, HUBS))
    reach.step(scene, 1.0)
    held = Scene(HUBS, HUBS[:2], ())
    assert reach.step(held, 2.0) == []
    reach.reservation_ended(HUBS[0], 3.0, was_held=True)
    assert reach.step(Scene(HUBS[1:], HUBS[1:2], ()), 3.0) == [Reserve(HUBS[2])]


def test_a_relay_that_is_full_is_asked_again_later_each_time():
    reach, scene = told(seen(HUBS[0]))
    pause_s, now = PAUSE_S, 1.0
    for _ in range(3):
        assert reach.step(scene, now) == [Reserve(HUBS[0])]
        reach.reservation_ended(HUBS[0], now, was_held=False)
        assert reach.step(scene, now + pause_s - 0.01) == []
        now += pause_s
        pause_s *= 2


def test_places_are_given_back_when_others_reach_us_again():
    reach, _ = told(seen(HUBS[0]))
    held = Scene(HUBS[:1], HUBS[:1], ())
    assert reach.step(held, PROBE_AGAIN_S) == [Probe(HUBS[0])]
    reach.probed(HUBS[0], seen(HUBS[0], reached=(OUTSIDE,)), PROBE_AGAIN_S)
    assert reach.step(held, PROBE_AGAIN_S + 1) == [GiveBack(HUBS[0])]


def test_places_are_kept_while_no_hub_says_anything():
    reach, _ = told(seen(HUBS[0]))
    assert reach.step(Scene((), HUBS[:1], ()), 1.0) == []


def test_a_hub_that_does_not_answer_is_asked_again():
    reach = Reach(2)
    scene = Scene(HUBS[:1], (), ())
    assert reach.step(scene, 0.0) == [Probe(HUBS[0])]
    reach.probed(HUBS[0], None, 0.0)
    assert reach.step(scene, PAUSE_S - 0.1) == []
    assert reach.step(scene, PAUSE_S) == [Probe(HUBS[0])]


def test_holes_are_punched_once_hubs_have_seen_us_and_again_after_longer_pauses():
    assert Reach(2).step(Scene((), (), (ANN,)), 0.0) == []
    reach, _ = told(seen(HUBS[0], reached=(OUTSIDE,)))
    scene = Scene(HUBS[:1], (), (ANN,))
    now, pause_s = 1.0, PUNCH_PAUSE_S
    for _ in range(10):
        assert Punch(ANN) in reach.step(scene, now)
        assert Punch(ANN) not in reach.step(scene, now + 1000)  # one attempt at a time
        reach.punched(ANN, now, is_open=False)
        assert Punch(ANN) not in reach.step(scene, now + pause_s - 0.01)
        now += pause_s
        pause_s = min(PUNCH_PAUSE_MAX_S, 2 * pause_s)
    reach.punched(ANN, now, is_open=True)
    assert Punch(ANN) in reach.step(scene, now)  # it is relayed again: from the beginning


def test_the_most_useful_addresses_are_told_first():
    ipv6, websocket = "/ip6/2001:db8::2/tcp/4001", f"{INSIDE}/ws"
    circuit = "/ip4/203.0.113.1/tcp/9/p2p/hub/p2p-circuit"
    listening = (INSIDE, ipv6, websocket)
    assert advertised(listening, (OUTSIDE,), (circuit,)) == (OUTSIDE, ipv6, circuit, INSIDE, websocket)
    assert advertised(listening, (INSIDE,), ()) == (ipv6, INSIDE, websocket)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3), st.booleans()), max_size=120))
def test_no_more_is_under_way_than_is_allowed_whatever_happens(events):
    """Probes, places and holes: each at most once for a peer, and no more places than are kept."""
    reach, now = Reach(2), 0.0
    under_way: dict[type, list[PeerId]] = {Probe: [], Reserve: [], Punch: []}
    held: list[PeerId] = []
    for kind, number, good in events:
        hub, now = HUBS[number], now + 7.0
        if kind <= 2:
            scene = Scene(HUBS, tuple(held), (*HUBS, ANN, BOB))
            for command in reach.step(scene, now):
                if isinstance(command, GiveBack):
                    assert command.hub in held
                    continue
                peer = command.peer if isinstance(command, Punch) else command.hub
                assert peer not in under_way[type(command)]
                under_way[type(command)].append(peer)
            assert len(under_way[Punch]) <= PUNCHES_MAX
            assert len({*under_way[Reserve], *held}) <= 2 + sum(each not in under_way[Reserve] for each in held)
        elif kind == 3 and hub in under_way[Probe]:
            under_way[Probe].remove(hub)
            reach.probed(hub, seen(hub, reached=(OUTSIDE,) * good), now)
        elif kind == 4 and hub in under_way[Reserve]:
            if hub not in held and good:
                held.append(hub)
            else:
                under_way[Reserve].remove(hub)
                reach.reservation_ended(hub, now, was_held=hub in held)
                held = [each for each in held if each != hub]
        elif kind >= 5 and hub in under_way[Punch]:
            under_way[Punch].remove(hub)
            reach.punched(hub, now, is_open=good)
