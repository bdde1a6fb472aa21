"""Members that were met are remembered over a restart, and lead back to the swarm when no hub does."""

from __future__ import annotations

import random

import pytest
import trio
from role_fakes import KEYS, granted
from swarm import until
from test_node import config, nodes, start

from kvasir_node.base.ids import PeerId
from kvasir_node.decide.remembering import ADDRESSES_MAX, MEMBERS_MAX, KnownMember
from kvasir_node.net.hello import Membership
from kvasir_node.net.memory_net import MemoryNetwork, MemoryTransport, open_memory_network
from kvasir_node.roles.content import run_inline
from kvasir_node.roles.member_file import MemberFile
from kvasir_node.roles.peers import Joiner, JoinTarget, Peers
from kvasir_node.roles.remembered import Remembered
from kvasir_node.wire.messages import About


class Node:
    """A member with a memory; `told` = the hubs that its memory told it of when it began."""

    def __init__(self, network: MemoryNetwork, name: str, role: str, file: MemberFile, *join: MemoryTransport) -> None:
        transport = self.transport = network.transport(name)
        says = granted(About(name, "1", (role,), transport.addresses()).to_bytes(), transport.peer_id)
        self.membership = Membership(transport, KEYS.entry, says)
        self.peers = Peers(
            self.membership,
            transport.peer_id,
            is_hub=role == "hub",
            hubs_changed=lambda _: None,
            keys=lambda: (KEYS,),
        )
        targets = [JoinTarget(each.peer_id, each.addresses()) for each in join]
        self.joiner = Joiner(transport, targets, self.require, random.Random(name))
        self.told: list[PeerId] = []
        self.remembered = Remembered(
            transport, self.membership, self.peers, self.require, file, lambda hub, _: self.told.append(hub), run_inline
        )

    async def require(self, peer: PeerId) -> None:
        await self.membership.require(peer, 8.0)

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            for part in (self.membership, self.peers, self.joiner, self.remembered):
                nursery.start_soon(part.run)


async def test_a_node_finds_any_member_again_when_the_tickets_hub_is_gone(autojump_clock, nursery, tmp_path):
    """Bob, whom ann met because he dialled her, is no hub, and ann's ticket names only the hub."""
    files = {name: MemberFile(tmp_path / name, "swarm") for name in ("hub", "ann", "bob")}
    async with open_memory_network() as network:
        hub = Node(network, "hub", "hub", files["hub"])
        ann = Node(network, "ann", "worker", files["ann"], hub.transport)
        bob = Node(network, "bob", "worker", files["bob"], ann.transport)
        for each in (hub, ann, bob):
            nursery.start_soon(each.run)
        await trio.sleep(5)
        network.kill(ann.transport.peer_id)
        network.kill(hub.transport.peer_id)
        again = Node(network, "ann", "worker", files["ann"], hub.transport)
        nursery.start_soon(again.run)
        await trio.sleep(5)
        assert again.told == [hub.transport.peer_id]
        assert again.membership.members() == (bob.transport.peer_id,)


async def test_a_hub_remembers_its_workers_too_and_asks_nobody_while_another_hub_is_there(
    autojump_clock, nursery, tmp_path
):
    files = {name: MemberFile(tmp_path / name, "swarm") for name in ("first", "other", "ann", "bob")}
    async with open_memory_network() as network:
        first = Node(network, "first", "hub", files["first"])
        ann = Node(network, "ann", "worker", files["ann"], first.transport)
        for each in (first, ann):
            nursery.start_soon(each.run)
        await trio.sleep(5)
        network.kill(first.transport.peer_id)
        other = Node(network, "other", "hub", files["other"])
        again = Node(network, "first", "hub", files["first"], other.transport)
        for each in (other, again):
            nursery.start_soon(each.run)
        await trio.sleep(30)
        assert again.membership.members() == (other.transport.peer_id,)
        network.kill(other.transport.peer_id)
        await trio.sleep(10)
        assert again.membership.members() == (ann.transport.peer_id,)
        bob = Node(network, "bob", "worker", files["bob"], again.transport)
        nursery.start_soon(bob.run)
        await trio.sleep(5)
        network.kill(ann.transport.peer_id)
        dialled: list[str] = []
        connect = again.transport.connect

        async def noted(addresses):
            dialled.extend(addresses)
            return await connect(addresses)

        again.transport.connect = noted
        await trio.sleep(300)
        assert again.membership.members() == (bob.transport.peer_id,)
        assert not [
            each for each in dialled if ann.transport.peer_id in each
        ]  # it is not alone, so it looks for nobody


def test_the_file_of_members_is_for_one_swarm_bounded_and_not_believed_blindly(tmp_path):
    path = tmp_path / "members.cbor"
    file = MemberFile(path, "swarm")
    assert file.read() == {}
    addresses = tuple(f"/ip4/192.0.2.{number}/tcp/1/p2p/x" for number in range(20))
    members = {PeerId(f"peer {number}"): KnownMember(addresses, number % 2 == 0) for number in range(100)}
    file.write(members)
    kept = dict(list(members.items())[-MEMBERS_MAX:])
    assert file.read() == {peer: KnownMember(addresses[:ADDRESSES_MAX], known.is_hub) for peer, known in kept.items()}
    assert MemberFile(path, "another swarm").read() == {}
    good = path.read_bytes()
    for index in range(0, len(good), 97):
        path.write_bytes(good[:index] + bytes((good[index] ^ 0x15,)) + good[index + 1 :])
        assert len(file.read()) <= MEMBERS_MAX  # and no exception
    path.write_bytes(good[: len(good) // 2])
    assert file.read() == {}
    MemberFile(tmp_path / "no such folder" / "members.cbor", "swarm").write(members)


@pytest.mark.soak
async def test_a_whole_node_is_back_at_a_new_hub_though_its_ticket_names_only_one_that_is_gone(tmp_path):
    """Real sockets: hub, ann and bob; then the hub is gone for good, and bob knows another one."""
    async with nodes() as nursery:
        hub = await start(nursery, config(tmp_path, "hub", "hub"))
        ticket = hub.node.ticket()
        ann = await start(nursery, config(tmp_path, "ann", "worker", network__join=ticket))
        await until(ann.node, lambda s: len(s.members) == 1, "joined", 10)
        bob = (await start(nursery, config(tmp_path, "bob", "worker", network__join=ann.node.ticket()))).node
        await until(ann.node, lambda s: len(s.members) == 2, "met", 10)
        await trio.sleep(1.5)  # what is met is kept within a second
        for running in (ann, hub):
            await running.kill()
        quick = {"market__gossip_refresh_s": 0.5, "network__join": bob.ticket()}
        await start(nursery, config(tmp_path, "new", "hub", **quick))
        await until(bob, lambda s: [m.name for m in s.members] == ["new"], "the new hub", 10)
        again = (await start(nursery, config(tmp_path, "ann", "worker", network__join=ticket))).node
        await until(again, lambda s: {m.name for m in s.members} == {"bob", "new"}, "found again", 20)
