"""A node's side of pairing, on an in-memory network and a virtual clock."""

import logging
from contextlib import asynccontextmanager

import pytest
import trio
from fake_page import NAME, ask_for_pass, guest_membership, say_to_pairing

from kvasir_node.base.errors import KvasirError, Unreachable, UsageError
from kvasir_node.decide.pairing import WRONG_MAX, WRONG_WINDOW_S, PairRefusal
from kvasir_node.net.hello import Membership
from kvasir_node.net.memory_net import Link, open_memory_network
from kvasir_node.roles.pairing import PAIR_TIMEOUT_S, PAIRING_MAX, Pairing
from kvasir_node.wire.codec import encode
from kvasir_node.wire.guest_pass import ASK_BYTES_MAX, PAIR_PROTOCOL, GuestPass, PairLink
from kvasir_node.wire.swarm_keys import read_secret

KEYS = read_secret(b"s" * 32)
CODE_S = 600.0


@asynccontextmanager
async def one_node(*, addresses=("/ip4/192.0.2.7/tcp/9481",), refused=()):
    """Yields the network, the node's transport and its pairing."""
    async with open_memory_network(1) as network, trio.open_nursery() as nursery:
        network.set_link(None, None, Link(latency_s=0.01))
        node = network.transport("node")
        told = [f"{address}/p2p/{node.peer_id}" for address in addresses]
        pairing = Pairing(
            node.peer_id,
            lambda: KEYS,
            code_s=CODE_S,
            addresses=lambda: told,
            hubs=lambda: told,
            refusal_of=lambda peer: "listed" if peer in refused else None,
            address_of=lambda peer: f"/ip4/10.0.0.{sum(peer.encode()) % 250}",
            outward_host=lambda: "192.0.2.7",
        )
        node.set_handler(PAIR_PROTOCOL, pairing.serve)
        of_node = Membership(node, KEYS.entry, b"node")
        nursery.start_soon(of_node.run)
        yield network, node, pairing, of_node
        nursery.cancel_scope.cancel()


def code_of(pairing):
    return PairLink.from_text(pairing.invite().link).code


async def connected(network, node, name):
    page = network.transport(name)
    await page.connect(node.addresses())
    return page


async def test_a_code_gives_a_pass_and_the_pass_makes_a_guest(autojump_clock, caplog):
    caplog.set_level(logging.INFO)
    async with one_node() as (network, node, pairing, of_node), trio.open_nursery() as nursery:
        page = await connected(network, node, "page")
        found = await ask_for_pass(page, node.peer_id, code_of(pairing))
        assert isinstance(found, GuestPass)
        assert found.addresses == (f"/ip4/192.0.2.7/tcp/9481/ws/p2p/{node.peer_id}",)
        of_page = guest_membership(page, found)
        nursery.start_soon(of_page.run)
        await of_page.require(node.peer_id, 5)
        assert of_node.is_guest(page.peer_id)
        assert NAME in caplog.text
        nursery.cancel_scope.cancel()


async def test_a_link_says_where_the_page_dials_the_best_way_first(autojump_clock):
    lan, bridge, own = "/ip4/192.0.2.7/tcp/9481", "/ip4/172.17.0.1/tcp/9481", "/ip4/127.0.0.1/tcp/9481"
    addresses = (own, bridge, lan, f"{lan}/ws", "/ip4/198.51.100.1/tcp/1/p2p/relay/p2p-circuit")
    async with one_node(addresses=addresses) as (_, node, pairing, _):
        invite = pairing.invite()
        link = PairLink.from_text(invite.link)
        assert link.addresses == (f"{lan}/ws", f"{bridge}/ws", f"{own}/ws")
        assert (link.peer, invite.host, invite.expires_s) == (node.peer_id, "192.0.2.7", CODE_S)
        assert not invite.is_local


async def test_a_node_that_listens_for_its_own_machine_alone_says_so(autojump_clock):
    async with one_node(addresses=("/ip4/127.0.0.1/tcp/9481",)) as (_, _, pairing, _):
        assert pairing.invite().is_local


async def test_a_node_that_listens_nowhere_invites_nobody(autojump_clock):
    async with one_node(addresses=()) as (_, _, pairing, _):
        with pytest.raises(UsageError, match="listens nowhere"):
            pairing.invite()


@pytest.mark.parametrize("expires_s", [-1.0, 0.0, 1e9, float("nan")])
async def test_a_time_that_makes_no_sense_is_refused(expires_s, autojump_clock):
    async with one_node() as (_, _, pairing, _):
        with pytest.raises(UsageError, match="serves from"):
            pairing.invite(expires_s)


async def test_a_replayed_code_is_refused_but_the_same_page_may_ask_again(autojump_clock, caplog):
    async with one_node() as (network, node, pairing, _):
        page, thief = await connected(network, node, "page"), await connected(network, node, "thief")
        code = code_of(pairing)
        first = await ask_for_pass(page, node.peer_id, code)
        assert await ask_for_pass(thief, node.peer_id, code) is PairRefusal.USED
        assert thief.peer_id in caplog.text
        assert await ask_for_pass(page, node.peer_id, code) == first


async def test_an_expired_code_is_refused(autojump_clock):
    async with one_node() as (network, node, pairing, _):
        page = await connected(network, node, "page")
        code = code_of(pairing)
        await trio.sleep(CODE_S)
        assert await ask_for_pass(page, node.peer_id, code) is PairRefusal.EXPIRED


async def test_a_stranger_that_guesses_is_soon_not_listened_to(autojump_clock, caplog):
    async with one_node() as (network, node, pairing, of_node):
        stranger = await connected(network, node, "stranger")
        code = code_of(pairing)
        for guess in range(WRONG_MAX):
            assert await ask_for_pass(stranger, node.peer_id, bytes([guess] * 16)) is PairRefusal.WRONG
        assert await ask_for_pass(stranger, node.peer_id, code) is PairRefusal.TOO_MANY
        warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert len(warnings) == 1, "strangers do not fill the log"
        await trio.sleep(WRONG_WINDOW_S)
        assert isinstance(await ask_for_pass(stranger, node.peer_id, code), GuestPass)
        assert not of_node.is_member(stranger.peer_id), "a pass alone is no membership"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xa0",
        b"\0" * (ASK_BYTES_MAX + 1),
        b"\xff" * 0xFFFF,
        encode({"code": b"\0" * 15, "name": ""}),
        encode({"code": b"\0" * 16, "name": "x" * 129}),
        encode({"code": b"\0" * 16, "name": "x", "roles": ["hub"]}),
    ],
    ids=["empty", "no_fields", "too_long", "as_long_as_can_be", "short_code", "long_name", "unknown_field"],
)
async def test_what_is_no_ask_resets_the_stream_and_counts_as_a_guess(body, autojump_clock):
    async with one_node() as (network, node, pairing, _):
        stranger = await connected(network, node, "stranger")
        for _ in range(WRONG_MAX):
            with pytest.raises(Unreachable):
                await say_to_pairing(stranger, node.peer_id, body)
        assert await ask_for_pass(stranger, node.peer_id, code_of(pairing)) is PairRefusal.TOO_MANY


async def test_a_peer_that_the_owner_refuses_gets_no_pass_and_uses_no_code_up(autojump_clock):
    async with open_memory_network(1) as network:
        refused = network.transport("page").peer_id
    async with one_node(refused=(refused,)) as (network, node, pairing, _):
        page, other = await connected(network, node, "page"), await connected(network, node, "other")
        code = code_of(pairing)
        assert await ask_for_pass(page, node.peer_id, code) is PairRefusal.UNWANTED
        assert isinstance(await ask_for_pass(other, node.peer_id, code), GuestPass)


async def test_strangers_that_say_nothing_are_few_and_soon_gone(autojump_clock):
    async with one_node() as (network, node, pairing, _):
        silent = await connected(network, node, "silent")
        streams = [await silent.open_stream(node.peer_id, PAIR_PROTOCOL) for _ in range(PAIRING_MAX)]
        await trio.sleep(1)
        page = await connected(network, node, "page")
        code = code_of(pairing)
        with pytest.raises(Unreachable):
            await ask_for_pass(page, node.peer_id, code)
        await trio.sleep(PAIR_TIMEOUT_S)
        for stream in streams:
            with pytest.raises(KvasirError):
                await stream.read()
        assert isinstance(await ask_for_pass(page, node.peer_id, code), GuestPass)


async def test_a_page_whose_answer_was_lost_loses_nothing(autojump_clock):
    async with one_node() as (network, node, pairing, _):
        page = await connected(network, node, "page")
        code = code_of(pairing)
        with trio.move_on_after(0.012):  # asked, not answered
            await ask_for_pass(page, node.peer_id, code)
        await page.disconnect(node.peer_id)
        await page.connect(node.addresses())
        assert isinstance(await ask_for_pass(page, node.peer_id, code), GuestPass)
