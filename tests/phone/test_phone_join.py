"""How the page joins, held to the examples of docs/phone_protocol.md and to Python's own bytes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from phone_parts import PartError

PROTOCOL = (Path(__file__).parents[2] / "docs" / "phone_protocol.md").read_text()
EXAMPLES = dict(re.findall(r"^\| ([^|]+?) \| `([^`]+)` \|$", PROTOCOL, re.MULTILINE))
NODE, PAGE = EXAMPLES["node"], EXAMPLES["page"]
PASS = EXAMPLES["answer (one address)"]
LINK = next(value for name, value in EXAMPLES.items() if name.startswith("LINK"))
CODE = bytes(range(0x10, 0x20)).hex()


def sized(data):
    raw = bytes.fromhex(data)
    return (len(raw).to_bytes(2, "little") + raw).hex()


def example(start):
    return next(value for name, value in EXAMPLES.items() if name.startswith(start))


def test_a_link_is_read(parts):
    link = parts("readLink", LINK)
    assert link == {"code": CODE, "peer": NODE, "addresses": ["/ip4/192.168.1.20/tcp/9481/ws"]}


@pytest.mark.parametrize(
    "wrong", ["", "kvasirp1", LINK[:-1], LINK[:40] + "q" + LINK[41:], "kvasir1" + LINK[8:], LINK * 40]
)
def test_a_damaged_link_says_so(parts, wrong):
    with pytest.raises(PartError, match="damaged") as caught:
        parts("readLink", wrong)
    assert caught.value.name == "UsageError"


def test_the_ask_and_the_pass_are_those_of_the_protocol(parts):
    asked, given = parts("pair", CODE, "a phone", sized(PASS))
    assert asked == sized(example("ask"))
    assert given["key"] == example("guest's key")
    assert given["addresses"] == [f"/ip4/192.168.1.20/tcp/9481/ws/p2p/{NODE}"]


def test_a_refusal_says_what_to_do(parts):
    with pytest.raises(PartError, match="Another device has used this code") as caught:
        parts("pair", CODE, "a phone", sized(example('answer "used"')))
    assert caught.value.name == "PairingRefused"
    with pytest.raises(PartError) as caught:
        parts("pair", CODE, "a phone", "ffff")
    assert caught.value.reason == "too_large"


def test_membership_is_proved_with_the_guests_key(parts):
    about, theirs = example("about of the page"), example("about of the node")
    nonce, other = (b"\1" * 32).hex(), (b"\2" * 32).hex()
    answer = "01" + other + sized(theirs) + example("mac of the node")
    written, told = parts("hello", PAGE, NODE, example("guest's key"), about, nonce, [answer, "01"])
    assert written == [nonce + "01" + example("hint"), sized(about) + example("mac of the page")]
    assert told == theirs
    with pytest.raises(PartError, match="does not hold") as caught:
        parts("hello", PAGE, NODE, example("guest's key"), about, nonce, [answer[:-2] + "00", "01"])
    assert caught.value.reason == "not_a_member"
    for verdict, words in (("00", "pair again"), ("ff", "refuses this device")):
        with pytest.raises(PartError, match=words):
            parts("hello", PAGE, NODE, example("guest's key"), about, nonce, [verdict])


def test_only_a_grant_of_the_swarm_makes_a_coordinator(parts):
    grant = example("grant: the node is a coordinator")
    assert parts("mayTake", PASS, NODE, "coordinator", [["coordinator", grant]])
    assert not parts("mayTake", PASS, PAGE, "coordinator", [["coordinator", grant]])
    assert not parts("mayTake", PASS, NODE, "hub", [["hub", grant]])
    assert not parts("mayTake", PASS, NODE, "coordinator", [["coordinator", "00" * 64], ["coordinator", "00"]])


@pytest.mark.parametrize(
    ("address", "dialled"),
    [
        ("/ip4/10.0.0.7/tcp/9481", f"/ip4/10.0.0.7/tcp/9481/ws/p2p/{NODE}"),
        (f"/ip4/10.0.0.7/tcp/9481/p2p/{NODE}", f"/ip4/10.0.0.7/tcp/9481/ws/p2p/{NODE}"),
        (f"/ip4/10.0.0.7/tcp/9481/ws/p2p/{NODE}", f"/ip4/10.0.0.7/tcp/9481/ws/p2p/{NODE}"),
        (f"/ip6/fd00::1/tcp/9481/ws/p2p/{NODE}", f"/ip6/fd00::1/tcp/9481/ws/p2p/{NODE}"),
        (
            f"/ip4/10.0.0.7/tcp/9481/p2p/{PAGE}/p2p-circuit/p2p/{NODE}",
            f"/ip4/10.0.0.7/tcp/9481/ws/p2p/{PAGE}/p2p-circuit/p2p/{NODE}",
        ),
        (f"/ip4/10.0.0.7/tcp/9481/p2p/{PAGE}", None),
        ("/ip4/10.0.0.7/udp/9481/quic-v1", None),
        ("/p2p-circuit", None),
    ],
)
def test_what_is_dialled_for_an_address(parts, address, dialled):
    assert parts("dialAddress", address, NODE) == ([] if dialled is None else [dialled])
