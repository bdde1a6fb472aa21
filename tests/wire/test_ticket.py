import base64
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_samples import ADDRESS, STEADY

from kvasir_node.base.errors import UsageError
from kvasir_node.wire.codec import encode
from kvasir_node.wire.readers import ADDRESSES_MAX
from kvasir_node.wire.swarm_keys import lesser_secret, replacing_secret
from kvasir_node.wire.ticket import PREFIX, Ticket, is_ticket, read_ticket, write_ticket

SECRET = bytes(range(32))
TICKET = Ticket(SECRET, (ADDRESS,))
TEXT = (
    "kvasir1ujqwdalxf5uxanbpge4telrqfyzc4mjporrxalzzgq4dcyltlaqaaaicamcakb"
    "qhbaequcymbuha6earcijrifiwc4mbsgq3dqor4h2f5phvi"
)


def spelled(body: bytes) -> str:
    return PREFIX + base64.b32encode(body + hashlib.sha256(body).digest()[:4]).decode().lower().rstrip("=")


def test_golden_vector():
    assert write_ticket(TICKET) == TEXT
    assert read_ticket(TEXT) == TICKET


def test_blanks_around_and_capital_letters_do_not_matter():
    assert read_ticket(f"  {TEXT}\n") == TICKET
    assert read_ticket(PREFIX + TEXT.removeprefix(PREFIX).upper()) == TICKET
    assert read_ticket(TEXT.upper()) == TICKET
    assert is_ticket(TEXT.upper())


def test_each_mistyped_letter_is_noticed():
    for at in range(len(TEXT)):
        for mask in (1 << bit for bit in range(8)):
            letter = chr(ord(TEXT[at]) ^ mask)
            if letter.lower() != TEXT[at] or at < len(PREFIX):
                with pytest.raises(UsageError):
                    read_ticket(TEXT[:at] + letter + TEXT[at + 1 :])


def test_each_cut_and_each_swap_is_noticed():
    for at in range(len(TEXT) - 1):
        with pytest.raises(UsageError):
            read_ticket(TEXT[:at])
        swapped = TEXT[:at] + TEXT[at + 1] + TEXT[at] + TEXT[at + 2 :]
        if swapped != TEXT:
            with pytest.raises(UsageError):
                read_ticket(swapped)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "a ticket starts with kvasir1"),
        ("/ip4/192.0.2.1/tcp/1", "a ticket starts with kvasir1; got '/ip4/192.0.2.1/t'"),
        ("kvasir1", "damaged"),
        (TEXT[:-1], "damaged"),
        (TEXT[:20] + "!" + TEXT[21:], "damaged"),
        (TEXT[:20] + "é" + TEXT[21:], "damaged"),
        (PREFIX + "a" * 100_000, "damaged"),
        (spelled(encode({"s": SECRET})), "of another version"),
        (spelled(encode({"s": SECRET, "a": [], "z": 1})), "of another version"),
        (spelled(encode({"s": SECRET[:31], "a": []})), "of another version"),
        (spelled(encode({"s": SECRET + b"x", "a": []})), "of another version"),
        (spelled(encode({"s": SECRET, "a": ["nowhere"]})), "of another version"),
        (spelled(b"\xff"), "of another version"),
    ],
)
def test_what_is_not_a_ticket_says_why(text, complaint):
    with pytest.raises(UsageError, match=complaint):
        read_ticket(text)


def test_an_error_never_shows_the_secret():
    for secret in (SECRET[:31], SECRET, SECRET + b"x"):
        with pytest.raises(UsageError) as refused:
            read_ticket(spelled(encode({"s": secret, "a": 1 if secret == SECRET else []})))
        assert refused.value.__cause__ is None
        assert repr(SECRET)[2:20] not in str(refused.value)


def test_addresses_beyond_the_bound_are_left_out():
    many = tuple(f"/ip4/192.0.2.{n}/tcp/1" for n in range(40))
    assert read_ticket(write_ticket(Ticket(SECRET, many))).addresses == many[:ADDRESSES_MAX]


def test_tickets_for_some_roles_and_of_a_later_secret_are_read_as_written():
    for secret in (lesser_secret(SECRET, ["worker"]), lesser_secret(SECRET, ["hub"]), replacing_secret(SECRET)):
        ticket = Ticket(secret, (ADDRESS,))
        assert read_ticket(write_ticket(ticket)) == ticket


@STEADY
@given(st.binary(min_size=32, max_size=32), st.lists(st.text("abc./:", max_size=30).map("/".__add__), max_size=5))
def test_round_trip(secret, addresses):
    ticket = Ticket(secret, tuple(addresses))
    assert read_ticket(write_ticket(ticket)) == ticket


@STEADY
@given(st.text(max_size=60))
def test_arbitrary_text_is_refused(text):
    for candidate in (text, PREFIX + text):
        with pytest.raises(UsageError):
            read_ticket(candidate)
