import errno
import socket

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_node.base.errors import KvasirError, Unreachable, UsageError
from kvasir_node.base.ids import PeerId
from kvasir_node.net.dialler import (
    ADDRESSES_MAX,
    STAGGER_S,
    DialAddress,
    describe_failure,
    dial_first,
    parse_addresses,
    plan_dials,
)
from kvasir_node.net.identity import key_from_seed, peer_id_of

PEER = peer_id_of(key_from_seed(b"\1" * 32))
OTHER = peer_id_of(key_from_seed(b"\2" * 32))
THIRD = peer_id_of(key_from_seed(b"\3" * 32))


def v4(number):
    return DialAddress(f"four{number}", f"192.0.2.{number}", 1)


def v6(number):
    return DialAddress(f"six{number}", f"2001:db8::{number}", 1, is_ipv6=True)


def ws(number):
    return DialAddress(f"ws{number}", f"192.0.2.{number}", 1, is_websocket=True)


REFUSED = DialAddress("quic", refusal="not a plain TCP address")


@pytest.mark.parametrize(
    ("given_order", "expected"),
    [
        ([], []),
        ([v4(1)], [v4(1)]),
        ([v6(1), v4(1)], [v4(1), v6(1)]),
        ([v6(1), v6(2), v4(1), v4(2)], [v4(1), v6(1), v4(2), v6(2)]),
        ([v6(1), v6(2), v6(3), v4(1)], [v4(1), v6(1), v6(2), v6(3)]),
        ([REFUSED, v4(1)], [v4(1)]),
        ([ws(1)], [ws(1)]),
        ([ws(1), v4(1)], [v4(1)]),  # the same socket, by a longer way
        ([ws(2), v4(1), v6(1)], [v4(1), v6(1), ws(2)]),
        ([v4(n) for n in range(40)], [v4(n) for n in range(ADDRESSES_MAX)]),
    ],
)
def test_the_order_of_attempts(given_order, expected):
    assert plan_dials(given_order) == expected


@given(st.lists(st.integers(0, 9), max_size=30), st.lists(st.integers(0, 9), max_size=30))
@settings(deadline=None)
def test_no_address_is_planned_that_was_not_given_and_none_of_the_first_is_lost(fours, sixes):
    addresses = [v4(n) for n in dict.fromkeys(fours)] + [v6(n) for n in dict.fromkeys(sixes)]
    planned = plan_dials(addresses)
    assert len(planned) == min(len(addresses), ADDRESSES_MAX)
    assert set(planned) <= set(addresses)
    assert len(set(planned)) == len(planned)


def test_relay_and_websocket_addresses_are_known():
    relay = f"/ip4/192.0.2.7/tcp/9/p2p/{OTHER}/p2p-circuit/p2p/{PEER}"
    peer, (circuit, websocket, secure) = parse_addresses(
        [relay, f"/ip4/192.0.2.1/tcp/9/ws/p2p/{PEER}", f"/dns4/example.org/tcp/443/wss/p2p/{PEER}"]
    )
    assert peer == PEER
    assert (circuit.relay, circuit.relay_address, circuit.refusal) == (OTHER, f"/ip4/192.0.2.7/tcp/9/p2p/{OTHER}", "")
    twice = f"{relay.removesuffix(f'/p2p/{PEER}')}/p2p/{THIRD}/p2p-circuit/p2p/{PEER}"
    assert "two relays" in parse_addresses([twice])[1][0].refusal
    assert (websocket.host, websocket.port, websocket.is_websocket, websocket.refusal) == ("192.0.2.1", 9, True, "")
    assert "neither a plain TCP nor a WebSocket" in secure.refusal


def test_addresses_are_parsed_once_each_with_the_reason_when_unusable():
    peer, addresses = parse_addresses(
        [
            f"/ip4/192.0.2.1/tcp/9/p2p/{PEER}",
            f"/ip4/192.0.2.1/tcp/9/p2p/{PEER}",
            f"/ip6/2001:db8::1/tcp/9/p2p/{PEER}",
            f"/dns4/example.org/tcp/9/p2p/{PEER}",
            f"/ip4/192.0.2.1/udp/9/quic-v1/p2p/{PEER}",
            f"/ip4/0.0.0.0/tcp/9/p2p/{PEER}",
        ]
    )
    assert peer == PEER
    assert [(a.host, a.port, a.is_ipv6, a.refusal) for a in addresses] == [
        ("192.0.2.1", 9, False, ""),
        ("2001:db8::1", 9, True, ""),
        ("example.org", 9, False, ""),
        ("", 0, False, "neither a plain TCP nor a WebSocket address"),
        ("", 0, False, "an unspecified address is nobody's"),
    ]


def test_a_peer_without_a_place_cannot_be_dialled():
    assert parse_addresses([f"/p2p/{PEER}"])[1][0].refusal == "names a peer, but no place to find it"


@pytest.mark.parametrize(
    "addresses",
    [
        [],
        ["nonsense"],
        ["/ip4/192.0.2.1/tcp/9"],
        [f"/ip4/192.0.2.300/tcp/9/p2p/{PEER}"],
        [f"/ip4/192.0.2.1/tcp/99999/p2p/{PEER}"],
        ["/ip4/192.0.2.1/tcp/9/p2p/xyz"],
        [f"/ip4/192.0.2.1/tcp/9/p2p/{PEER}", f"/ip4/192.0.2.1/tcp/9/p2p/{OTHER}"],
    ],
)
def test_a_malformed_address_is_the_callers_fault(addresses):
    with pytest.raises(UsageError):
        parse_addresses(addresses)


@given(st.text(max_size=60))
def test_no_text_at_all_raises_anything_but_a_usage_error(text):
    with pytest.raises(UsageError):
        parse_addresses([text])


class Fake:
    """Attempts with a fixed delay and outcome each; records when they start."""

    def __init__(self, outcomes) -> None:
        self.outcomes = outcomes
        self.started = {}
        self.discarded = []
        self.cancelled = []

    async def attempt(self, address):
        self.started[address.text] = trio.current_time()
        delay_s, outcome = self.outcomes[address.text]
        try:
            await trio.sleep(delay_s)
        except trio.Cancelled:
            self.cancelled.append(address.text)
            raise
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def discard(self, connected):
        self.discarded.append(connected)

    async def dial(self, addresses):
        return await dial_first(PEER, addresses, self.attempt, self.discard, timeout_s=4)


REFUSAL = ConnectionRefusedError(errno.ECONNREFUSED, "refused")


async def test_a_dead_address_first_costs_a_quarter_second(autojump_clock):
    fake = Fake({"four1": (1e9, None), "four2": (0.1, "second")})
    assert await fake.dial([v4(1), v4(2)]) == "second"
    assert trio.current_time() == pytest.approx(STAGGER_S + 0.1)
    assert fake.cancelled == ["four1"]


async def test_a_refused_address_costs_nothing(autojump_clock):
    fake = Fake({"four1": (0, REFUSAL), "four2": (0, REFUSAL), "four3": (0.1, "third")})
    assert await fake.dial([v4(1), v4(2), v4(3)]) == "third"
    assert trio.current_time() == pytest.approx(0.1)


async def test_a_slow_first_address_wins_when_it_is_first_to_finish(autojump_clock):
    fake = Fake({"four1": (0.3, "first"), "four2": (5, "second")})
    assert await fake.dial([v4(1), v4(2)]) == "first"
    assert fake.cancelled == ["four2"]


async def test_of_two_that_finish_together_one_is_discarded(autojump_clock):
    fake = Fake({"four1": (STAGGER_S + 0.1, "first"), "four2": (0.1, "second")})
    winner = await fake.dial([v4(1), v4(2)])
    assert winner in ("first", "second")
    assert fake.discarded in ([], [({"first", "second"} - {winner}).pop()])


async def test_the_failure_names_every_address_and_why(autojump_clock):
    fake = Fake({"four1": (0, REFUSAL), "six1": (1e9, None), "four2": (0, OSError(errno.EHOSTUNREACH, "x"))})
    with pytest.raises(Unreachable) as caught:
        await fake.dial([REFUSED, v6(1), v4(1), v4(2)])
    assert str(caught.value) == (
        f"no connection to {PEER}: quic: not a plain TCP address; six1: timed out after 4 s; "
        "four1: connection refused; four2: no route"
    )


async def test_without_a_usable_address_nothing_is_tried():
    with pytest.raises(Unreachable, match="not a plain TCP address"):
        await Fake({}).dial([REFUSED])


async def test_a_cancelled_dial_leaves_nothing_open(autojump_clock):
    fake = Fake({"four1": (1e9, None), "four2": (1e9, None)})
    with trio.move_on_after(1):
        await fake.dial([v4(1), v4(2)])
    assert fake.cancelled == ["four1", "four2"] or fake.cancelled == ["four2", "four1"]


class PeerIDMismatchesPubkey(Exception):
    """Of the same name as libp2p's."""


def caused(by):
    try:
        raise RuntimeError("failed to upgrade") from by
    except RuntimeError as error:
        return error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (REFUSAL, "connection refused"),
        (caused(REFUSAL), "connection refused"),
        (OSError("all failed", ExceptionGroup("x", [REFUSAL])), "OSError: "),
        (caused(ExceptionGroup("x", [OSError(errno.ENETUNREACH, "x")])), "no route"),
        (caused(PeerIDMismatchesPubkey()), "another peer answers there"),
        (socket.gaierror(-2, "x"), "the name is not known"),
        (KvasirError("our own words"), "our own words"),
        (ValueError(), "ValueError"),
    ],
)
def test_failures_are_told_in_words(error, words):
    assert describe_failure(error).startswith(words)


def test_peer_ids_are_plain_text():
    assert PeerId(str(PEER)) == PEER
