"""Guests: members by a pass, which only their own peer id can use."""

from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from kvasir_node.base.errors import Unreachable
from kvasir_node.net import hello
from kvasir_node.net.hello import EXPIRY_CHECK_S, Membership
from kvasir_node.net.memory_net import Link, open_memory_network
from kvasir_node.wire.guest_pass import guest_key

SECRET, OLD = b"s" * 32, b"o" * 32
SPECIFICATION = (Path(__file__).parents[2] / "docs" / "phone_protocol.md").read_text(encoding="utf-8")


@asynccontextmanager
async def node_and_guest(key=None, *, guest_name="guest", older=tuple, refusal_of=lambda _: None):
    """A member, and a peer that holds nothing but a key (its own by default); yields both, not connected."""
    async with open_memory_network(1) as network, trio.open_nursery() as nursery:
        network.set_link(None, None, Link(latency_s=0.01))
        node, guest = network.transport("node"), network.transport(guest_name)
        of_node = Membership(node, SECRET, b"node", older=older, refusal_of=refusal_of)
        of_guest = Membership(guest, guest_key(SECRET, guest.peer_id) if key is None else key, b"guest")
        nursery.start_soon(of_node.run)
        nursery.start_soon(of_guest.run)
        yield node, guest, of_node, of_guest
        nursery.cancel_scope.cancel()


async def test_a_pass_makes_a_member_that_is_known_as_a_guest(autojump_clock):
    async with node_and_guest() as (node, guest, of_node, of_guest):
        await guest.connect(node.addresses())
        await of_guest.require(node.peer_id, 5)
        await of_node.require(guest.peer_id, 5)
        assert of_node.is_guest(guest.peer_id)
        assert of_node.about(guest.peer_id) == b"guest"
        assert not of_guest.is_guest(node.peer_id)
        await guest.disconnect(node.peer_id)
        await trio.sleep(1)
        assert not of_node.is_guest(guest.peer_id)


async def test_a_member_by_the_secret_is_no_guest(autojump_clock):
    async with node_and_guest(SECRET) as (node, guest, of_node, _):
        await guest.connect(node.addresses())
        await of_node.require(guest.peer_id, 5)
        assert not of_node.is_guest(guest.peer_id)


async def peer_id_of(name):
    async with open_memory_network(1) as network:
        return network.transport(name).peer_id


async def test_another_peer_s_pass_is_worth_nothing(autojump_clock):
    stolen = guest_key(SECRET, await peer_id_of("guest"))
    async with node_and_guest(stolen, guest_name="thief") as (node, thief, of_node, of_thief):
        await thief.connect(node.addresses())
        with pytest.raises(Unreachable, match="does not hold this swarm's secret"):
            await of_thief.require(node.peer_id, 5)
        assert not of_node.is_member(thief.peer_id)


async def test_a_guest_cannot_pose_as_a_node_to_another_guest(autojump_clock):
    """The one knows only a key of its own, which is no secret of the swarm."""
    async with open_memory_network(1) as network, trio.open_nursery() as nursery:
        one, other = network.transport("one"), network.transport("other")
        of_one = Membership(one, guest_key(SECRET, one.peer_id), b"one")
        of_other = Membership(other, guest_key(SECRET, other.peer_id), b"other")
        nursery.start_soon(of_one.run)
        nursery.start_soon(of_other.run)
        await one.connect(other.addresses())
        with pytest.raises(Unreachable, match="not a member"):
            await of_one.require(other.peer_id, 5)
        assert not of_other.is_member(one.peer_id)
        nursery.cancel_scope.cancel()


async def test_a_guest_that_is_listed_is_refused(autojump_clock):
    refused = await peer_id_of("guest")

    def refusal_of(peer):
        return "listed in network.refuse" if peer == refused else None

    async with node_and_guest(refusal_of=refusal_of) as (node, guest, of_node, of_guest):
        await guest.connect(node.addresses())
        with pytest.raises(Unreachable, match="refuses this peer"):
            await of_guest.require(node.peer_id, 5)
        assert not of_node.is_member(guest.peer_id)


async def test_passes_end_with_the_secret_that_they_were_made_from(autojump_clock):
    valid = [OLD]
    pass_of_old = guest_key(OLD, await peer_id_of("guest"))
    async with node_and_guest(pass_of_old, older=lambda: list(valid)) as (node, guest, of_node, of_guest):
        await guest.connect(node.addresses())
        await of_guest.require(node.peer_id, 5)
        await trio.sleep(2 * EXPIRY_CHECK_S)
        assert of_node.is_guest(guest.peer_id)
        valid.clear()
        await trio.sleep(2 * EXPIRY_CHECK_S)
        assert not of_node.is_member(guest.peer_id)
        assert node.connections() == ()


def test_the_specification_s_examples_of_a_hello_are_ours():
    node = b"12D3KooW9uTpywgEEJRhv1avvfwfz459Qgtq5m2xgyzcAi99rFA8"
    page = b"12D3KooWBWSvhZU8XUfdZos7F4XKKw5u5oapksA9UK2jX4vc3rnU"
    examples = dict(
        tuple(cell.strip().strip("`") for cell in line.split("|")[1:3])
        for line in SPECIFICATION.splitlines()
        if line.startswith("| ")
    )
    key = bytes.fromhex(examples["guest's key"])
    nonces = (b"\x01" * 32, b"\x02" * 32)
    page_about = bytes.fromhex(examples['about of the page ("a phone", "1.0.0")'])
    node_about = bytes.fromhex(examples['about of the node ("node", a hub)'])
    transcript = (*nonces, page, node)
    assert hello._hint(key, nonces[0], (page, node)).hex() == examples["hint, page to node"]
    assert hello._mac(key, b"listener", transcript, node_about).hex() == examples["mac of the node (listener)"]
    assert hello._mac(key, b"dialler", transcript, page_about).hex() == examples["mac of the page (dialler)"]
