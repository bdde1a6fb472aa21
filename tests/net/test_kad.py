"""Our client of a DHT, against py-libp2p's own nodes and against nodes that answer what they like. Real sockets."""

from __future__ import annotations

import base58
import pytest
from dht_nodes import open_dht
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from multiaddr import Multiaddr
from net_helpers import LOOPBACK

from kvasir_node.base.errors import Unreachable, UsageError
from kvasir_node.base.ids import PeerId
from kvasir_node.net.identity import key_from_seed, peer_id_of
from kvasir_node.net.kad import (
    ADDRESSES_MAX,
    KAD_PROTOCOL,
    MESSAGE_BYTES_MAX,
    PROVIDERS_MAX,
    PROVIDERS_TOLD_MAX,
    Kad,
    Provider,
    _varint,
    open_kad,
    read_nodes,
)
from kvasir_node.net.libp2p_host import open_libp2p_transport

KEY = bytes((0x12, 0x20)) + b"k" * 32
HUB_ADDRESS = "/ip4/198.51.100.7/tcp/9481"


async def test_a_hub_that_told_one_node_is_found_through_another(tmp_path):
    async with open_dht(3) as nodes:
        async with open_kad(LOOPBACK, tmp_path / "hub", nodes[:1]) as kad:
            hub = kad._transport.peer_id
            assert await kad.provide(KEY, [f"{HUB_ADDRESS}/p2p/{hub}"]) >= 1
        async with open_kad(LOOPBACK, tmp_path / "ann", nodes[-1:]) as kad:
            assert await kad.find(KEY) == [Provider(hub, (f"{HUB_ADDRESS}/p2p/{hub}",))]
            assert await kad.find(KEY[:-1] + b"x") == []


async def test_without_a_node_that_answers_it_says_so(tmp_path):
    dead = f"/ip4/127.0.0.1/tcp/1/p2p/{peer_id_of(key_from_seed(bytes(32)))}"
    async with open_kad(LOOPBACK, tmp_path / "ann", [dead]) as kad:
        for attempt in (kad.find(KEY), kad.provide(KEY, [HUB_ADDRESS])):
            with pytest.raises(Unreachable, match=r"none of 1 nodes of the DHT .* answers"):
                await attempt
    with pytest.raises(UsageError):
        read_nodes(["/ip4/127.0.0.1/tcp/1"])


def framed(message: Message) -> bytes:
    body = message.SerializeToString()
    return _varint(len(body)) + body


def peer(number: int, *addresses: str) -> Message.Peer:
    name = peer_id_of(key_from_seed(number.to_bytes(32, "big")))
    return Message.Peer(id=base58.b58decode(str(name)), addrs=[Multiaddr(each).to_bytes() for each in addresses])


MANY = Message(
    type=Message.MessageType.GET_PROVIDERS,
    providerPeers=[peer(number, *[HUB_ADDRESS] * 20) for number in range(50)],
    closerPeers=[peer(number, "/ip4/127.0.0.1/tcp/1") for number in range(300, 400)],
)
ODD = Message(
    type=Message.MessageType.GET_PROVIDERS,
    providerPeers=[
        Message.Peer(id=b"", addrs=[Multiaddr(HUB_ADDRESS).to_bytes()]),
        Message.Peer(id=b"x" * 65, addrs=[Multiaddr(HUB_ADDRESS).to_bytes()]),
        Message.Peer(id=peer(1).id, addrs=[b"\xff\xff\xff", b"", Multiaddr("/dns4/example.org/tcp/1").to_bytes()]),
        peer(2),
    ],
)
ANSWERS = {
    "nothing": b"",
    "half a length": b"\xff",
    "a huge length": _varint(MESSAGE_BYTES_MAX + 1),
    "an endless length": b"\xff" * 64,
    "less than was said": _varint(100) + b"x" * 50,
    "no message": _varint(64) + b"\xff" * 64,
    "odd peers": framed(ODD),
}


@pytest.mark.parametrize("answer", [*ANSWERS.values(), framed(MANY)], ids=[*ANSWERS, "many peers"])
async def test_whatever_a_node_answers_is_bounded_and_no_more_than_a_hint(tmp_path, answer):
    async with open_libp2p_transport(LOOPBACK, tmp_path / "liar") as liar:

        async def lie(stream):
            await stream.write(answer)
            await stream.close()

        liar.set_handler(KAD_PROTOCOL, lie)
        async with open_kad(LOOPBACK, tmp_path / "ann", liar.addresses()[:1]) as kad:
            try:
                found = await kad.find(KEY)
            except Unreachable:
                found = []
    assert len(found) <= min(PROVIDERS_MAX, PROVIDERS_TOLD_MAX)
    assert all(len(each.addresses) <= ADDRESSES_MAX for each in found)
    assert bool(found) is (answer == framed(MANY))


def test_no_address_of_a_local_network_is_taken_from_a_public_dht():
    class NoTransport:
        peer_id = PeerId("own")

    name = peer_id_of(key_from_seed(bytes(32)))
    near, far = peer(1, "/ip4/192.168.1.1/tcp/80"), peer(2, "/ip4/198.51.100.1/tcp/80")
    public = Kad(NoTransport(), [f"/ip4/203.0.113.7/tcp/1/p2p/{name}"])  # type: ignore[arg-type]
    assert [public._provider_of(each) is not None for each in (near, far)] == [False, True]
    local = Kad(NoTransport(), [f"/ip4/192.168.1.7/tcp/1/p2p/{name}"])  # type: ignore[arg-type]
    assert [local._provider_of(each) is not None for each in (near, far)] == [True, True]
    named = Kad(NoTransport(), [f"/dns4/dht.example.org/tcp/1/p2p/{name}"])  # type: ignore[arg-type]
    assert named._provider_of(near) is None
