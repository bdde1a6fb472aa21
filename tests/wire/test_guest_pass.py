from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_samples import STEADY

from kvasir_node.base.errors import Misbehaved, UsageError
from kvasir_node.base.ids import PeerId
from kvasir_node.wire.armour import write_line
from kvasir_node.wire.codec import encode
from kvasir_node.wire.guest_pass import (
    ASK_BYTES_MAX,
    LINK_PREFIX,
    PASS_ADDRESSES_MAX,
    GuestPass,
    PairAsk,
    PairLink,
    PairRefusal,
    guest_key,
    make_pass,
    read_pair_answer,
    refusal_bytes,
)
from kvasir_node.wire.swarm_keys import COORDINATOR, HUB, read_secret

KEYS = read_secret(bytes(range(32)))
NODE = PeerId("12D3KooW9uTpywgEEJRhv1avvfwfz459Qgtq5m2xgyzcAi99rFA8")
PAGE = PeerId("12D3KooWBWSvhZU8XUfdZos7F4XKKw5u5oapksA9UK2jX4vc3rnU")
CODE = bytes(range(16, 32))
LINK = PairLink(CODE, NODE, ("/ip4/192.168.1.20/tcp/9481/ws",))
ASK = PairAsk(CODE, "a phone")
PASS = make_pass(KEYS, PAGE, (f"/ip4/192.168.1.20/tcp/9481/ws/p2p/{NODE}",))
SPECIFICATION = (Path(__file__).parents[2] / "docs" / "phone_protocol.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "example",
    [
        NODE,
        PAGE,
        LINK.to_text(),
        ASK.to_bytes().hex(),
        PASS.to_bytes().hex(),
        refusal_bytes(PairRefusal.USED).hex(),
        KEYS.entry.hex(),
        PASS.key.hex(),
        KEYS.grants(NODE)[COORDINATOR].hex(),
    ],
)
def test_the_specification_s_examples_are_what_we_write(example):
    assert f"`{example}`" in SPECIFICATION


def test_what_is_written_is_read_back():
    assert PairLink.from_text(LINK.to_text()) == LINK
    assert PairAsk.from_bytes(ASK.to_bytes()) == ASK
    assert read_pair_answer(PASS.to_bytes()) == PASS
    for refusal in PairRefusal:
        assert read_pair_answer(refusal_bytes(refusal)) is refusal


def test_a_key_serves_one_peer_and_a_pass_holds_nothing_that_makes_another():
    assert guest_key(KEYS.entry, PAGE) != guest_key(KEYS.entry, NODE)
    spelled = PASS.to_bytes()
    assert KEYS.entry not in spelled
    assert not any(seed in spelled for seed in KEYS.private.values())
    assert (PASS.hub, PASS.coordinator) == (KEYS.public[HUB], KEYS.public[COORDINATOR])


def test_too_many_addresses_are_left_out():
    many = tuple(f"/ip4/192.0.2.{n}/tcp/1/ws" for n in range(20))
    assert PairLink.from_text(PairLink(CODE, NODE, many).to_text()).addresses == many[:4]
    found = read_pair_answer(make_pass(KEYS, PAGE, many).to_bytes())
    assert isinstance(found, GuestPass)
    assert found.addresses == many[:PASS_ADDRESSES_MAX]


@pytest.mark.parametrize(
    "text",
    [
        "kvasir1abc",
        LINK.to_text()[:-1],
        LINK.to_text().replace("a", "b", 1),
        LINK_PREFIX,
        LINK_PREFIX + "a" * 100_000,
        write_line(LINK_PREFIX, encode({"c": CODE[:-1], "p": str(NODE), "a": []})),
        write_line(LINK_PREFIX, encode({"c": CODE, "p": str(NODE), "a": [], "x": 1})),
    ],
)
def test_a_link_that_is_none_is_refused_without_showing_the_code(text):
    with pytest.raises(UsageError) as refused:
        PairLink.from_text(text)
    assert CODE.hex() not in str(refused.value)
    assert repr(CODE) not in str(refused.value)


@pytest.mark.parametrize(
    ("read", "body"),
    [
        (PairAsk.from_bytes, encode({"code": CODE[1:], "name": ""})),
        (PairAsk.from_bytes, encode({"code": CODE, "name": "two\nlines"})),
        (PairAsk.from_bytes, b"\0" * (ASK_BYTES_MAX + 1)),
        (read_pair_answer, encode({"refused": "because"})),
        (read_pair_answer, encode({"refused": "used", "key": b""})),
        (read_pair_answer, make_pass(KEYS, PAGE, ()).to_bytes()[:-1]),
    ],
)
def test_messages_that_are_none_are_refused(read, body):
    with pytest.raises(Misbehaved):
        read(body)


@STEADY
@given(st.binary(max_size=200))
def test_arbitrary_bytes_only_ever_misbehave(body):
    for read in (PairAsk.from_bytes, read_pair_answer):
        try:
            read(body)
        except Misbehaved:
            continue


@pytest.mark.parametrize("whole", [ASK.to_bytes(), PASS.to_bytes()])
def test_a_flipped_byte_is_refused_or_read_as_something_else(whole):
    read = PairAsk.from_bytes if whole == ASK.to_bytes() else read_pair_answer
    for at in range(len(whole)):
        flipped = whole[:at] + bytes([whole[at] ^ 0x01]) + whole[at + 1 :]
        try:
            found = read(flipped)
        except Misbehaved:
            continue
        assert found not in (ASK, PASS)
