"""Finding hubs on the local network: real multicast, on loopback, where nobody else hears it."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from zeroconf import ServiceInfo

from kvasir_node.base.ids import PeerId
from kvasir_node.net.identity import key_from_seed, peer_id_of
from kvasir_node.net.mdns import PEERS_MAX, SERVICE, LanInterface, LanSearch, lan_interfaces

ANN, BOB, EVE = (peer_id_of(key_from_seed(name * 32)) for name in (b"a", b"b", b"e"))
LOOPBACK = LanInterface("127.0.0.1", ipaddress.IPv4Network("127.0.0.0/8"))
HOME = LanInterface("192.168.1.2", ipaddress.IPv4Network("192.168.1.0/24"))


class Heard:
    def __init__(self) -> None:
        self.peers: dict[PeerId, Sequence[str]] = {}
        self.changed = trio.Event()

    def __call__(self, peer: PeerId, addresses: Sequence[str]) -> None:
        self.peers[peer] = addresses
        self.changed.set()


@asynccontextmanager
async def searching(*searches: LanSearch):
    async with trio.open_nursery() as nursery:
        for search in searches:
            nursery.start_soon(search.run)
        yield
        nursery.cancel_scope.cancel()


def loopback() -> Sequence[LanInterface]:
    return (LOOPBACK,)


async def test_a_hub_of_the_swarm_is_found_in_seconds_and_no_other_and_not_who_announces_nothing():
    heard = {name: Heard() for name in ("ann", "bob", "worker", "stranger")}
    searches = (
        LanSearch("swarm", ANN, heard["ann"], lambda: (f"/ip4/127.0.0.1/tcp/4001/p2p/{ANN}",), loopback),
        LanSearch("swarm", BOB, heard["bob"], lambda: ("/ip4/203.0.113.9/tcp/7", "/ip4/127.0.0.1/tcp/4002"), loopback),
        LanSearch("swarm", PeerId("worker"), heard["worker"], interfaces=loopback),
        LanSearch("other", EVE, heard["stranger"], lambda: ("/ip4/127.0.0.1/tcp/4003",), loopback),
    )
    async with searching(*searches):
        with trio.fail_after(5):
            while len(heard["worker"].peers) < 2:
                heard["worker"].changed = trio.Event()
                await heard["worker"].changed.wait()
            await heard["ann"].changed.wait()
        assert heard["worker"].peers == {
            ANN: (f"/ip4/127.0.0.1/tcp/4001/p2p/{ANN}",),
            BOB: (f"/ip4/127.0.0.1/tcp/4002/p2p/{BOB}",),
        }
        assert heard["ann"].peers.keys() == {BOB}
        assert heard["stranger"].peers == {}


def info(peer: str = BOB, swarm: str = "swarm", address: str = "192.168.1.7", port: int = 9481, **more: Any) -> Any:
    said = {b"peer": peer.encode(), b"swarm": swarm.encode(), **more}
    return SimpleNamespace(properties=said, parsed_addresses=lambda _: [address, "192.168.1.9"], port=port)


@pytest.mark.parametrize(
    "said",
    [
        info(swarm="other"),
        info(peer=ANN),
        info(peer=""),
        info(peer="/p2p/x"),
        info(peer="é"),
        info(port=0),
        SimpleNamespace(properties={b"peer": None}, parsed_addresses=lambda _: [], port=1),
    ],
)
def test_what_does_not_concern_us_or_cannot_be_read_is_not_told(said):
    told: list[PeerId] = []
    search = LanSearch("swarm", ANN, lambda peer, _: told.append(peer), interfaces=lambda: (HOME,))
    search._hear("name", said, (HOME,))
    assert told == []


async def test_only_addresses_of_this_machines_own_networks_are_told():
    heard = Heard()
    search = LanSearch("swarm", ANN, heard)
    search._hear("far", info(address="198.51.100.1"), (HOME,))
    assert heard.peers == {BOB: (f"/ip4/192.168.1.9/tcp/9481/p2p/{BOB}",)}
    search._hear("far", info(address="198.51.100.1"), (LOOPBACK,))
    assert search._known == {}


async def test_what_is_remembered_of_a_noisy_network_is_bounded():
    search = LanSearch("swarm", ANN, Heard())
    for number in range(3 * PEERS_MAX):
        search._hear(f"name {number}", info(peer=f"peer{number}"), (HOME,))
    assert len(search._known) == PEERS_MAX
    search._hear("name 0", None, (HOME,))
    assert len(search._known) == PEERS_MAX - 1


async def test_a_machine_without_a_network_waits_for_one(autojump_clock):
    interfaces: list[LanInterface] = []
    search = LanSearch("swarm", ANN, Heard(), interfaces=lambda: interfaces)
    with trio.move_on_after(60):
        await search.run()
    assert search._known == {}


def test_what_is_announced_says_no_more_than_it_must():
    search = LanSearch("swarm", ANN, lambda *_: None, lambda: ("/ip6/::1/tcp/1", "/ip4/192.168.1.2/tcp/9481/ws"))
    assert search._info((HOME,)) is None
    search = LanSearch("swarm", ANN, lambda *_: None, lambda: ("/ip4/203.0.113.9/tcp/7", "/ip4/192.168.1.2/tcp/9481"))
    said = search._info((HOME, LOOPBACK))
    assert isinstance(said, ServiceInfo)
    assert (said.type, said.port, said.addresses) == (SERVICE, 9481, [socket.inet_aton("192.168.1.2")])
    assert dict(said.properties) == {b"swarm": b"swarm", b"peer": ANN.encode()}


def test_loopback_is_no_local_network():
    assert all(not each.network.is_loopback for each in lan_interfaces())
