"""A client of a libp2p Kademlia DHT: says that a peer is to be found under a key, and finds those that said so.

It does not know what a key stands for, nor when to ask. py-libp2p's own DHT (0.8.1) is not used, only its messages: it
dials through the swarm, which here never dials, takes messages of 4 MiB from anyone, and keeps tables and tasks that
only whoever serves a DHT needs. Whom we ask are strangers, so each look-up has connections of its own, which end with
it; an answer is at most 64 KiB, nothing in it is more than a hint, and no address of a local network or name in it is
dialled, unless the DHT that the owner named is on one.

    /ipfs/kad/1.0.0: varint length, Message (protobuf), both ways; ADD_PROVIDER may be answered or not
Source: libp2p/specs kad-dht/README.md.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import base58
import trio
from google.protobuf.message import DecodeError
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from kvasir_node.base.errors import KvasirError, Misbehaved, RejectReason, Unreachable
from kvasir_node.base.ids import PeerId
from kvasir_node.base.settings import NetworkSettings
from kvasir_node.decide.lookup import DhtNode, Lookup
from kvasir_node.decide.reach import host_of, is_lan
from kvasir_node.net.dialler import parse_addresses
from kvasir_node.net.libp2p_host import open_libp2p_transport
from kvasir_node.net.stream_io import read_exactly
from kvasir_node.net.transport import Stream, Transport

KAD_PROTOCOL = "/ipfs/kad/1.0.0"
MESSAGE_BYTES_MAX = 64 * 1024
ASK_S = 6.0  # one node: to connect and to answer
LOOKUP_S = 60.0
PEER_ID_BYTES_MAX = 64
ADDRESSES_MAX = 8  # of one peer in an answer
PROVIDERS_MAX = 16  # found in one look-up
PROVIDERS_TOLD_MAX = 4  # that one node is believed: it may have made them up


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Provider:
    peer: PeerId
    addresses: tuple[str, ...]  # each with /p2p/PEER


class Kad:
    """See the module. Made by `open_kad`."""

    def __init__(self, transport: Transport, nodes: Sequence[str]) -> None:
        self._transport = transport
        self._nodes = read_nodes(nodes)
        self._knows_lan = any(
            is_lan(host) for node in self._nodes if (host := host_of(node.addresses[0])) and _is_ip(host)
        )

    async def provide(self, key: bytes, addresses: Sequence[str]) -> int:
        """Tells those closest to the key that we are to be found there; returns how many took it.

        Raises Unreachable when no node answers at all.
        """
        request = Message(type=Message.MessageType.FIND_NODE, key=key)
        lookup = await self._look_up(key, request, lambda _: False)
        peer = _peer_message(self._transport.peer_id, addresses)
        told = Message(type=Message.MessageType.ADD_PROVIDER, key=key, providerPeers=[peer])
        taken = 0

        async def tell(node: DhtNode) -> None:
            nonlocal taken
            with suppress(KvasirError):
                await self._ask(node, told, is_answered=False)
                taken += 1

        async with trio.open_nursery() as nursery:
            for node in lookup.found():
                nursery.start_soon(tell, node)
        return taken

    async def find(self, key: bytes) -> list[Provider]:
        """Who said to be found under the key, as far as the nodes asked know. Raises Unreachable when none answers."""
        found: dict[PeerId, Provider] = {}

        def take(answer: Message) -> bool:
            for each in list(answer.providerPeers)[:PROVIDERS_TOLD_MAX]:
                provider = self._provider_of(each)
                if provider is not None and provider.peer != self._transport.peer_id:
                    found.setdefault(provider.peer, provider)
            return len(found) >= PROVIDERS_MAX

        await self._look_up(key, Message(type=Message.MessageType.GET_PROVIDERS, key=key), take)
        return list(found.values())[:PROVIDERS_MAX]

    async def _look_up(self, key: bytes, request: Message, is_enough: Callable[[Message], bool]) -> Lookup:
        """Asks on the way to the key, in bounded time; ends early when an answer is enough."""
        lookup = Lookup(key)
        lookup.begin(self._nodes)
        changed = trio.Event()

        async def ask(node: DhtNode) -> None:
            nonlocal changed
            try:
                answer = await self._ask(node, request)
            except KvasirError as error:
                _log.debug("a node of the DHT is of no use: %s", error)
                lookup.failed(node)
            else:
                lookup.answered(node, self._nodes_of(answer.closerPeers))
                if is_enough(answer):
                    nursery.cancel_scope.cancel()
            changed.set()

        with trio.move_on_after(LOOKUP_S):
            async with trio.open_nursery() as nursery:
                while not lookup.is_done:
                    changed = trio.Event()
                    for node in lookup.next():
                        nursery.start_soon(ask, node)
                    await changed.wait()
        if not lookup.found():
            raise Unreachable(f"none of {len(self._nodes)} nodes of the DHT (network.dht) answers")
        return lookup

    async def _ask(self, node: DhtNode, request: Message, *, is_answered: bool = True) -> Message:
        """Raises Unreachable, Misbehaved, UsageError for addresses that are none."""
        with trio.move_on_after(ASK_S):
            peer = await self._transport.connect(node.addresses)
            stream = await self._transport.open_stream(peer, KAD_PROTOCOL)
            try:
                body = request.SerializeToString()
                await stream.write(_varint(len(body)), body)
                if is_answered:
                    return await _read_message(stream)
                with suppress(Unreachable):  # some answer, some only close; either way it was read
                    await stream.close()
                    await stream.read()
                return request
            finally:
                await stream.reset()
        raise Unreachable(f"{node.addresses[0]} did not answer in {ASK_S:g} s")

    # --- what strangers say ---

    def _nodes_of(self, peers: Iterable[Message.Peer]) -> list[DhtNode]:
        read = ((each, self._provider_of(each)) for each in peers)
        return [DhtNode(each.id, provider.addresses) for each, provider in read if provider is not None]

    def _provider_of(self, peer: Message.Peer) -> Provider | None:
        """None for what is no peer id, or has no address that is to be tried."""
        if not 0 < len(peer.id) <= PEER_ID_BYTES_MAX:
            return None
        named = PeerId(base58.b58encode(peer.id).decode("ascii"))
        read = (self._address_of(raw, named) for raw in list(peer.addrs)[:ADDRESSES_MAX])
        addresses = tuple(address for address in read if address)
        return Provider(named, addresses) if addresses else None

    def _address_of(self, raw: bytes, peer: PeerId) -> str:
        """Empty for what cannot be read, and what is not to be tried."""
        try:
            text = str(Multiaddr(raw)).removesuffix(f"/p2p/{peer}") + f"/p2p/{peer}"
            parse_addresses([text])
            is_near = is_lan(host_of(text))  # raises ValueError for a name
        except (KvasirError, MultiaddrError, ValueError, TypeError, KeyError, IndexError):
            return ""
        return "" if is_near and not self._knows_lan else text


@asynccontextmanager
async def open_kad(settings: NetworkSettings, key_path: Path, nodes: Sequence[str]) -> AsyncIterator[Kad]:
    """A client with connections of its own, under this peer's id, until the block ends; it listens nowhere.

    Raises UsageError for addresses that cannot be read.
    """
    async with open_libp2p_transport(replace(settings, listen=()), key_path) as transport:
        yield Kad(transport, nodes)


def read_nodes(addresses: Sequence[str]) -> list[DhtNode]:
    """Raises UsageError for what is no address with /p2p/PEER."""
    return [DhtNode(base58.b58decode(str(parse_addresses([each])[0])), (each,)) for each in addresses]


def _peer_message(peer: PeerId, addresses: Sequence[str]) -> Message.Peer:
    texts = [address.removesuffix(f"/p2p/{peer}") for address in addresses[:ADDRESSES_MAX]]
    return Message.Peer(id=base58.b58decode(str(peer)), addrs=[Multiaddr(text).to_bytes() for text in texts])


def _is_ip(host: str) -> bool:
    return ":" in host or host.replace(".", "").isdecimal()


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


async def _read_message(stream: Stream) -> Message:
    length = shift = 0
    while True:
        (byte,) = await read_exactly(stream.read, 1)
        length |= (byte & 0x7F) << shift
        shift += 7
        if length > MESSAGE_BYTES_MAX or shift > 21:
            text = f"{stream.peer} answers with a message of more than {MESSAGE_BYTES_MAX} bytes"
            raise Misbehaved(RejectReason.TOO_LARGE, text)
        if byte < 0x80:
            break
    message = Message()
    try:
        message.ParseFromString(await read_exactly(stream.read, length))
    except DecodeError as error:
        raise Misbehaved(RejectReason.BAD_MESSAGE, f"{stream.peer} answers with no DHT message: {error}") from error
    return message
