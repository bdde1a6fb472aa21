"""Gossip on the in-memory network, by flooding along its connections.

It does not know gossipsub. Messages may be lost on the way, as the contract of Gossip allows; they arrive once.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import trio

from kvasir_node.base.ids import PeerId
from kvasir_node.net.feed import Feed
from kvasir_node.net.memory_net import MemoryTransport
from kvasir_node.net.transport import GossipValidator

QUEUE_MESSAGES = 256
SEEN_MAX = 4096  # messages that each peer remembers having seen


@dataclass(frozen=True, slots=True)
class GossipMessage:
    topic: str
    signer: PeerId
    number: int
    data: bytes


class MemoryGossip:
    """Implements Gossip by flooding along connections; a refused message goes no further. May lose messages."""

    def __init__(self, transport: MemoryTransport) -> None:
        self._network = transport.network
        self._transport = transport
        transport.gossip_arrived = self.arrive
        self._numbers = count()
        self._seen: dict[tuple[PeerId, int], None] = {}
        self._validators: dict[str, GossipValidator] = {}
        self._feeds: dict[str, Feed[tuple[PeerId, bytes]]] = {}

    async def publish(self, topic: str, data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        message = GossipMessage(topic, self._transport.peer_id, next(self._numbers), data)
        self._remember(message)
        self._forward(message)

    async def subscribe(
        self, topic: str, validator: GossipValidator
    ) -> trio.MemoryReceiveChannel[tuple[PeerId, bytes]]:
        await trio.lowlevel.checkpoint()
        self._validators.setdefault(topic, validator)
        return self._feeds.setdefault(topic, Feed(QUEUE_MESSAGES)).subscribe()

    def _remember(self, message: GossipMessage) -> None:
        self._seen[message.signer, message.number] = None
        if len(self._seen) > SEEN_MAX:
            del self._seen[next(iter(self._seen))]

    def _forward(self, message: GossipMessage) -> None:
        own = self._transport.peer_id
        for connection in self._transport.connections():
            other = self._network.find(connection.peer)
            if other is None or other.gossip_arrived is None or self._network.is_lost(own, connection.peer):
                continue
            self._network.start_soon(other.gossip_arrived, own, message)

    async def arrive(self, sender: PeerId, message: GossipMessage) -> None:
        own = self._transport.peer_id
        await trio.sleep(self._network.link(sender, own).latency_s)
        if not self._transport.is_alive or (message.signer, message.number) in self._seen:
            return
        self._remember(message)
        validator = self._validators.get(message.topic)
        if validator is None or not validator(message.signer, message.data):
            return
        self._feeds[message.topic].publish((message.signer, message.data))
        self._forward(message)
