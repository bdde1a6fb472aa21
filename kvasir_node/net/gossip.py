"""Gossip over libp2p's gossipsub, with the settings under which it loses nothing we measured.

It does not know what messages mean: validators do. Source: libp2p/specs pubsub/gossipsub/gossipsub-v1.1.md.

The defaults of 0.8.1 drop a peer's messages beyond ten a second and beat once in two minutes; here the heart beats
each second, and the rate limits (spam and eclipse protection) are off: our validators and the once-a-second rule
for tables do that work. Its service ends when one message raises, so each message is guarded.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio
from libp2p.abc import ISubscriptionAPI
from libp2p.custom_types import TProtocol
from libp2p.peer.id import ID
from libp2p.pubsub.gossipsub import GossipSub
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.pubsub import Pubsub
from libp2p.pubsub.pubsub_notifee import PubsubNotifee
from libp2p.tools.anyio_service import background_trio_service

from kvasir_node.base.errors import UsageError
from kvasir_node.base.ids import PeerId
from kvasir_node.net.feed import Feed
from kvasir_node.net.libp2p_host import Libp2pTransport
from kvasir_node.net.single_error import single_error_unwrapped
from kvasir_node.net.transport import GossipValidator

GOSSIP_PROTOCOL = "/meshsub/1.1.0"
MESSAGE_BYTES_MAX = 64 * 1024 - 1
QUEUE_MESSAGES = 256  # accepted and not yet read, of one subscription
DEGREE, DEGREE_LOW, DEGREE_HIGH = 6, 4, 12
HEARTBEAT_S = 1
RPC_BYTES_MAX = 256 * 1024
VALIDATORS_MAX = 64
RESTORE_S = 2.0  # how often peers are looked for that gossip has forgotten
RESTORE_TIMEOUT_S = 1.0

_log = logging.getLogger(__name__)


class _GuardedPubsub(Pubsub):
    async def push_msg(self, msg_forwarder: ID, msg: rpc_pb2.Message) -> None:
        try:
            await super().push_msg(msg_forwarder, msg)
        except Exception as error:  # a stranger's key or topic that libp2p cannot parse would end the whole service
            _log.debug("gossip message from %s dropped: %r", msg_forwarder, error)


class Libp2pGossip:
    """Implements Gossip; made by `open_gossip`."""

    def __init__(self, transport: Libp2pTransport, pubsub: Pubsub, nursery: trio.Nursery) -> None:
        self._transport = transport
        self._pubsub = pubsub
        self._nursery = nursery
        self._feeds: dict[str, Feed[tuple[PeerId, bytes]]] = {}

    async def publish(self, topic: str, data: bytes) -> None:
        """Raises UsageError for 64 KiB or more."""
        if len(data) > MESSAGE_BYTES_MAX:
            raise UsageError(f"a gossip message of {len(data)} bytes; at most {MESSAGE_BYTES_MAX}")
        await self._pubsub.publish(topic, data)

    async def subscribe(
        self, topic: str, validator: GossipValidator
    ) -> trio.MemoryReceiveChannel[tuple[PeerId, bytes]]:
        """See Gossip. A topic has one validator: that of its first subscription."""
        if topic not in self._feeds:
            self._feeds[topic] = Feed(QUEUE_MESSAGES)
            self._pubsub.set_topic_validator(topic, self._checked(validator), is_async_validator=False)
            self._nursery.start_soon(self._pump, await self._pubsub.subscribe(topic), self._feeds[topic])
        return self._feeds[topic].subscribe()

    def _checked(self, validator: GossipValidator) -> Any:
        def check(forwarder: ID, message: rpc_pb2.Message) -> bool:
            if len(message.data) > MESSAGE_BYTES_MAX:
                return False
            signer = PeerId(ID(message.from_id).to_base58())
            return signer == self._transport.peer_id or validator(signer, message.data)

        return check

    async def keep_streams(self) -> None:
        """Until cancelled: when one of two connections to a peer ends, libp2p goes on with the dead one or none."""
        while True:
            await trio.sleep(RESTORE_S)
            for connection in self._transport.connections():
                peer = ID.from_base58(str(connection.peer))
                known = self._pubsub.peers.get(peer)
                if known is not None and known.muxed_conn.is_closed:
                    self._pubsub._handle_dead_peer(peer)  # libp2p has no public way to say so
                if peer not in self._pubsub.peers:
                    await self._pubsub.ensure_peer_stream(peer, RESTORE_TIMEOUT_S)

    async def _pump(self, subscription: ISubscriptionAPI, feed: Feed[tuple[PeerId, bytes]]) -> None:
        """Moves messages on at once: libp2p's own queue holds 32 and then drops the newest."""
        while True:
            message = await subscription.get()
            signer = PeerId(ID(message.from_id).to_base58())
            if signer != self._transport.peer_id:
                feed.publish((signer, message.data))


@asynccontextmanager
async def open_gossip(transport: Libp2pTransport) -> AsyncIterator[Libp2pGossip]:
    """Gossip on this transport until the block ends; peers connected before and after take part alike."""
    router = GossipSub(
        [TProtocol(GOSSIP_PROTOCOL)],
        degree=DEGREE,
        degree_low=DEGREE_LOW,
        degree_high=DEGREE_HIGH,
        heartbeat_interval=HEARTBEAT_S,
        spam_protection_enabled=False,
        eclipse_protection_enabled=False,
    )
    pubsub = _GuardedPubsub(
        transport.host,
        router,
        strict_signing=True,
        max_concurrent_validator_count=VALIDATORS_MAX,
        max_inbound_rpc_size=RPC_BYTES_MAX,
    )
    try:
        with single_error_unwrapped():
            async with background_trio_service(router), background_trio_service(pubsub):
                await pubsub.wait_until_ready()
                async with trio.open_nursery() as nursery:
                    for connection in transport.connections():
                        nursery.start_soon(pubsub.ensure_peer_stream, ID.from_base58(str(connection.peer)))
                    gossip = Libp2pGossip(transport, pubsub, nursery)
                    nursery.start_soon(gossip.keep_streams)
                    try:
                        yield gossip
                    finally:
                        nursery.cancel_scope.cancel()
    finally:
        for notifee in [each for each in transport.swarm.notifees if isinstance(each, PubsubNotifee)]:
            transport.swarm.remove_notifee(notifee)
        pubsub.seen_messages.stop()  # else its sweeping thread outlives the node
