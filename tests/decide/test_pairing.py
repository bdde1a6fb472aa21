from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_node.base.ids import PeerId
from kvasir_node.decide.pairing import (
    CODES_MAX,
    ORIGINS_MAX,
    WRONG_MAX,
    WRONG_WINDOW_S,
    PairingCodes,
    PairRefusal,
)

CODE, OTHER = b"code", b"other"
ANN, BOB, EVE = PeerId("ann"), PeerId("bob"), PeerId("eve")
HOME, ROOM = "/ip4/192.168.1.2/tcp/1", "/ip4/192.168.1.3/tcp/1"


def codes_with(expires_at=600.0):
    codes = PairingCodes()
    codes.issue(CODE, expires_at)
    return codes


def test_a_code_serves_the_first_peer_that_brings_it_and_nobody_else():
    codes = codes_with()
    assert codes.open_count(0) == 1
    assert codes.redeem(CODE, ANN, HOME, 1) is None
    assert codes.open_count(1) == 0
    assert codes.redeem(CODE, BOB, ROOM, 2) is PairRefusal.USED
    assert codes.redeem(CODE, ANN, HOME, 3) is None, "its answer may have been lost"


def test_a_code_expires_also_for_the_peer_that_used_it():
    codes = codes_with(expires_at=10)
    assert codes.redeem(CODE, ANN, HOME, 9.9) is None
    assert codes.redeem(CODE, ANN, HOME, 10) is PairRefusal.EXPIRED
    assert codes_with(expires_at=10).redeem(CODE, ANN, HOME, 10) is PairRefusal.EXPIRED
    assert codes.open_count(10) == 0


def test_an_unknown_code_is_wrong():
    assert PairingCodes().redeem(CODE, ANN, HOME, 0) is PairRefusal.WRONG
    assert codes_with().redeem(OTHER, ANN, HOME, 0) is PairRefusal.WRONG


def test_whoever_brings_too_many_wrong_codes_is_not_listened_to_for_a_while():
    codes = codes_with(expires_at=1e6)
    for _ in range(WRONG_MAX):
        assert codes.redeem(OTHER, EVE, HOME, 0) is PairRefusal.WRONG
    assert codes.redeem(CODE, EVE, ROOM, 1) is PairRefusal.TOO_MANY, "the same peer elsewhere"
    assert codes.redeem(CODE, ANN, HOME, 1) is PairRefusal.TOO_MANY, "another peer from there"
    assert codes.redeem(CODE, BOB, ROOM, 1) is None, "others are not hindered"
    later = codes_with(expires_at=1e6)
    for _ in range(WRONG_MAX):
        later.note_wrong(EVE, HOME, 0)
    assert later.redeem(CODE, EVE, HOME, WRONG_WINDOW_S) is None


def test_addresses_of_one_ipv6_customer_count_together():
    codes = codes_with()
    for number in range(WRONG_MAX):
        codes.redeem(OTHER, PeerId(f"peer {number}"), f"/ip6/2001:db8::{number + 1:x}/tcp/1", 0)
    assert codes.redeem(CODE, ANN, "/ip6/2001:db8::ffff/tcp/1", 0) is PairRefusal.TOO_MANY


def test_a_used_or_expired_code_is_not_counted_as_a_guess():
    codes = codes_with()
    codes.redeem(CODE, ANN, HOME, 0)
    for _ in range(3 * WRONG_MAX):
        assert codes.redeem(CODE, BOB, ROOM, 0) is PairRefusal.USED


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 3000), st.booleans()), max_size=300))
def test_the_tables_are_bounded_and_a_code_has_one_owner(steps):
    codes = PairingCodes()
    owners: dict[bytes, str] = {}
    for now, (number, peer, issues) in enumerate(steps):
        code = number.to_bytes(2, "big")
        if issues:
            codes.issue(code, now + 50.0)
            owners.pop(code, None)
        elif codes.redeem(code, PeerId(str(peer)), f"/ip4/10.0.{peer // 256}.{peer % 256}/tcp/1", float(now)) is None:
            assert owners.setdefault(code, str(peer)) == str(peer)
        assert len(codes._codes) <= CODES_MAX
        assert len(codes._wrong) <= ORIGINS_MAX


def test_many_strangers_leave_a_bounded_trace():
    codes = codes_with()
    for number in range(5000):
        codes.redeem(OTHER, PeerId(f"p{number}"), f"/ip4/10.1.{number // 256}.{number % 256}/tcp/1", 0.0)
    assert len(codes._wrong) == ORIGINS_MAX
    for number in range(1000):
        codes.issue(number.to_bytes(4, "big"), 1.0)
    assert len(codes._codes) == CODES_MAX
