"""A network inside one process, on trio's clock: for tests, examples and simulations.

It does not know libp2p. Peers have real ids and sign with real keys, made from their name and the network's seed,
so the same seed gives the same run. Streams are reliable and ordered whatever the link does: a lost piece arrives
late, never not at all. A link has latency, bandwidth and loss; it can be cut and healed, and a peer can be killed.
"""

from __future__ import annotations

import hashlib
import logging
import math
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import trio
from libp2p.crypto.keys import KeyPair

from kvasir_node.base.errors import KvasirError, Unreachable, UsageError
from kvasir_node.base.ids import PeerId
from kvasir_node.net.dialler import parse_addresses
from kvasir_node.net.express import ExpressChannel
from kvasir_node.net.feed import Feed
from kvasir_node.net.identity import key_from_seed, peer_id_of, sign_with
from kvasir_node.net.single_error import single_error_unwrapped
from kvasir_node.net.transport import (
    Connection,
    PeerConnected,
    PeerLost,
    StreamHandler,
)

WINDOW_BYTES = 1024 * 1024  # a writer waits while this much is unread at the other end
CONNECT_TIMEOUT_S = 4.0
SILENCE_S = 5.0  # a partition or a silent death is noticed after this long, as by the real keepalive
RETRY_S = 0.2  # what a lost piece costs, on top of another round trip
RETRIES_MAX = 10
EVENTS_MAX = 256

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two peers is as good as the other."""

    latency_s: float = 0.0  # one way
    bandwidth_bytes_s: float = math.inf  # shared by all streams of a direction
    loss_ratio: float = 0.0
    is_cut: bool = False


class _Pipe:
    """One direction of one stream."""

    def __init__(self) -> None:
        self.failure: str | None = None
        self.closed = False
        self.unwanted = False  # nobody reads: what is written is dropped
        self.unread_bytes = 0
        self.last_arrival_at = -math.inf
        self.items: deque[tuple[float, memoryview]] = deque()  # (arrives at, bytes); b"" is the end
        self.changed = trio.lowlevel.ParkingLot()

    def fail(self, reason: str) -> None:
        self.failure = self.failure or reason
        self.changed.unpark_all()


class MemoryStream:
    """Implements Stream. Cancel-safety: a cancelled read loses nothing, a cancelled write has written nothing."""

    def __init__(
        self, own: MemoryTransport, other: MemoryTransport, protocol: str, incoming: _Pipe, outgoing: _Pipe
    ) -> None:
        self._own = own
        self._other = other
        self._protocol = protocol
        self._incoming = incoming
        self._outgoing = outgoing

    @property
    def peer(self) -> PeerId:
        return self._other.peer_id

    @property
    def protocol(self) -> str:
        return self._protocol

    async def read(self, max_bytes: int = 262_144) -> bytes | memoryview:
        await trio.lowlevel.checkpoint_if_cancelled()
        pipe = self._incoming
        while True:
            if pipe.failure is not None:
                raise Unreachable(pipe.failure)
            if not pipe.items or self._own.network.link(self._own.peer_id, self.peer).is_cut:
                await pipe.changed.park()
                continue
            arrives_at, data = pipe.items[0]
            if arrives_at <= trio.current_time():
                return self._take(pipe, data, max_bytes)
            with trio.move_on_at(arrives_at):
                await pipe.changed.park()

    def _take(self, pipe: _Pipe, data: memoryview, max_bytes: int) -> memoryview:
        if not data:
            return data  # the end stays: every later read sees it, too
        arrives_at, _ = pipe.items.popleft()
        if len(data) > max_bytes:
            pipe.items.appendleft((arrives_at, data[max_bytes:]))
            data = data[:max_bytes]
        pipe.unread_bytes -= len(data)
        self._own.bytes_in += len(data)
        pipe.changed.unpark_all()
        return data

    def give_way(self) -> None:
        """Nothing here: streams of this network do not wait for each other's bytes, only for the link's."""

    def limit_window(self, window_bytes: int) -> None:
        """Nothing here: windows of this network do not grow."""

    async def pump(self, deliver: Callable[[bytes | memoryview], None]) -> None:
        while chunk := await self.read():
            deliver(chunk)

    async def write(self, *parts: bytes | bytearray | memoryview) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self.write_now(*parts):
            await self._outgoing.changed.park()

    def write_now(self, *parts: bytes | bytearray | memoryview) -> bool:
        pipe = self._outgoing
        if pipe.failure is not None:
            raise Unreachable(pipe.failure)
        if pipe.closed:
            raise Unreachable(f"the stream to {self.peer} was closed by us and takes no more bytes")
        if pipe.unread_bytes >= WINDOW_BYTES:
            return False
        data = memoryview(b"".join(parts))
        if data:
            self._own.bytes_out += len(data)
            self._put(data)
        return True

    def _put(self, data: memoryview) -> None:
        pipe = self._outgoing
        if pipe.unwanted:
            return
        arrival_at = self._own.network.arrival_at(self._own.peer_id, self.peer, len(data))
        pipe.last_arrival_at = max(pipe.last_arrival_at, arrival_at)
        pipe.items.append((pipe.last_arrival_at, data))
        pipe.unread_bytes += len(data)
        pipe.changed.unpark_all()

    async def close(self) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        self._close_now()

    def _close_now(self) -> None:
        if not self._outgoing.closed and self._outgoing.failure is None:
            self._outgoing.closed = True
            self._put(memoryview(b""))
            self._forget_if_over()

    def finish(self) -> None:
        """Closes, and drops whatever the peer still sends."""
        self._incoming.unwanted = True
        self._incoming.items.clear()
        self._incoming.unread_bytes = 0
        self._incoming.changed.unpark_all()
        self._close_now()

    def _forget_if_over(self) -> None:
        if self._incoming.closed:
            self._own.streams.discard(self)
            self._other.forget_twin(self)

    def wake(self) -> None:
        self._incoming.changed.unpark_all()

    async def reset(self) -> None:
        self.cut(f"the stream was reset by {self._own.peer_id}")

    def cut(self, reason: str) -> None:
        self._incoming.fail(reason)
        self._outgoing.fail(reason)
        self._own.streams.discard(self)
        self._other.forget_twin(self)

    def is_twin_of(self, other: MemoryStream) -> bool:
        return self._incoming is other._outgoing


class MemoryTransport:
    """Implements Transport; made by `MemoryNetwork.transport`."""

    def __init__(self, network: MemoryNetwork, name: str, key: KeyPair, number: int) -> None:
        self.network = network
        self.name = name
        self.is_alive = True
        self.bytes_in = 0
        self.bytes_out = 0
        self.streams: set[MemoryStream] = set()
        self.handler_scopes: set[trio.CancelScope] = set()
        self.gossip_arrived: Callable[..., Awaitable[object]] | None = None  # set by MemoryGossip
        self._key = key
        self._peer_id = peer_id_of(key)
        self._address = f"/ip4/10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}/tcp/9481/p2p/{self._peer_id}"
        self._handlers: dict[str, StreamHandler] = {}
        self._connections: dict[PeerId, Connection] = {}
        self._events: Feed[PeerConnected | PeerLost] = Feed(EVENTS_MAX)

    @property
    def peer_id(self) -> PeerId:
        return self._peer_id

    def addresses(self) -> tuple[str, ...]:
        return (self._address,)

    def connections(self) -> tuple[Connection, ...]:
        rtts = {peer: 2 * self.network.link(self._peer_id, peer).latency_s for peer in self._connections}
        return tuple(replace(each, rtt_s=rtts[peer]) for peer, each in self._connections.items())

    def sign(self, message: bytes) -> bytes:
        return sign_with(self._key, message)

    def set_handler(self, protocol: str, handler: StreamHandler) -> None:
        self._handlers[protocol] = handler

    def handler(self, protocol: str) -> StreamHandler | None:
        return self._handlers.get(protocol)

    async def connect(self, addresses: Sequence[str]) -> PeerId:
        """See Transport. Takes one and a half round trips, as TCP and Noise do; a cut link takes 4 s to fail."""
        peer, dials = parse_addresses(addresses)
        if peer == self._peer_id:
            raise UsageError(f"{peer} is this node itself")
        if peer in self._connections:
            return peer
        other = self.network.find(peer)
        link = self.network.link(self._peer_id, peer)
        known = [dial.text for dial in dials if other is not None and dial.text in other.addresses()]
        if link.is_cut:
            await trio.sleep(CONNECT_TIMEOUT_S)
            raise Unreachable(f"no connection to {peer}: {dials[0].text}: timed out after {CONNECT_TIMEOUT_S:g} s")
        await trio.sleep(3 * link.latency_s)
        if other is None or not other.is_alive or not known or not self.is_alive:
            reasons = "; ".join(f"{dial.text}: {dial.refusal or 'connection refused'}" for dial in dials)
            raise Unreachable(f"no connection to {peer}: {reasons}")
        if peer not in self._connections:
            self._joined(other, known[0], inbound=False)
            other._joined(self, self._address, inbound=True)
        return peer

    def _joined(self, other: MemoryTransport, address: str, *, inbound: bool) -> None:
        self._connections[other.peer_id] = Connection(other.peer_id, address, inbound, "direct", None)
        self._events.publish(PeerConnected(other.peer_id))

    def set_path(self, peer: PeerId, path: str) -> None:
        """Says that the connection to a peer is direct, or through a relay; nothing else changes."""
        self._connections[peer] = replace(self._connections[peer], path=path)

    def is_connected(self, peer: PeerId) -> bool:
        return peer in self._connections

    async def open_stream(self, peer: PeerId, protocol: str) -> MemoryStream:
        """See Transport. Takes one round trip; waits while the link is cut, until the loss is noticed."""
        await trio.sleep(2 * self.network.link(self._peer_id, peer).latency_s)
        while peer in self._connections and self.network.link(self._peer_id, peer).is_cut:
            await self.network.links_changed.park()
        other = self.network.find(peer)
        if other is None or peer not in self._connections:
            raise Unreachable(f"cannot open {protocol}: not connected to {peer}")
        handler = other.handler(protocol)
        if handler is None:
            raise Unreachable(f"{peer} does not speak {protocol}")
        there, back = _Pipe(), _Pipe()
        ours = MemoryStream(self, other, protocol, incoming=back, outgoing=there)
        theirs = MemoryStream(other, self, protocol, incoming=there, outgoing=back)
        self.streams.add(ours)
        other.streams.add(theirs)
        self.network.start_handler(other, handler, theirs)
        return ours

    def invite(self, peer: PeerId, arrived: Callable[[ExpressChannel], None]) -> None:
        """See Transport. There are no sockets here, and no threads."""

    async def accept_invitation(self, peer: PeerId, invitation: bytes) -> ExpressChannel:
        await trio.lowlevel.checkpoint()
        raise Unreachable(f"no express channel to {peer}: there are none in memory")

    async def ping(self, peer: PeerId) -> float:
        asked_at = trio.current_time()
        await trio.sleep(2 * self.network.link(self._peer_id, peer).latency_s)
        while peer in self._connections and self.network.link(self._peer_id, peer).is_cut:
            await self.network.links_changed.park()
        if peer not in self._connections:
            raise Unreachable(f"the connection to {peer} ended")
        return trio.current_time() - asked_at

    async def disconnect(self, peer: PeerId) -> None:
        await trio.lowlevel.checkpoint()
        other = self.network.find(peer)
        if other is not None and peer in self._connections:
            self.lost(other, "disconnected by us")
            other.lost(self, "disconnected by the peer")

    def lost(self, other: MemoryTransport, reason: str) -> None:
        if self._connections.pop(other.peer_id, None) is None:
            return
        self.network.links_changed.unpark_all()
        for stream in [each for each in self.streams if each.peer == other.peer_id]:
            stream.cut(f"the connection to {other.peer_id} ended: {reason}")
        self._events.publish(PeerLost(other.peer_id, reason))

    def forget_twin(self, stream: MemoryStream) -> None:
        self.streams = {each for each in self.streams if not each.is_twin_of(stream)}

    def watch(self) -> trio.MemoryReceiveChannel[PeerConnected | PeerLost]:
        return self._events.subscribe()


class MemoryNetwork:
    """Made by `open_memory_network`. Everything random comes from its seed."""

    def __init__(self, seed: int, nursery: trio.Nursery) -> None:
        self.links_changed = trio.lowlevel.ParkingLot()
        self._seed = seed
        self._rng = random.Random(seed)
        self._nursery = nursery
        self._transports: dict[PeerId, MemoryTransport] = {}
        self._default_link = Link()
        self._links: dict[frozenset[PeerId], Link] = {}
        self._busy_until: dict[tuple[PeerId, PeerId], float] = {}

    def transport(self, name: str) -> MemoryTransport:
        """A new peer; the same name and seed always give the same id."""
        key = key_from_seed(hashlib.sha256(f"{self._seed}:{name}".encode()).digest())
        transport = MemoryTransport(self, name, key, len(self._transports) + 1)
        self._transports[transport.peer_id] = transport
        return transport

    def set_link(self, first: PeerId | None, second: PeerId | None, link: Link) -> None:
        """Between two peers, or with None and None for all that have no link of their own."""
        if first is None or second is None:
            self._default_link = link
        else:
            self._links[frozenset((first, second))] = link
        self._wake_all()

    def link(self, first: PeerId, second: PeerId) -> Link:
        return self._links.get(frozenset((first, second)), self._default_link)

    def partition(self, first: PeerId, second: PeerId) -> None:
        """Nothing passes any more; both sides notice after SILENCE_S, unless it is healed before."""
        self.set_link(first, second, replace(self.link(first, second), is_cut=True))
        self._nursery.start_soon(self._notice_silence, first, second)

    def heal(self, first: PeerId, second: PeerId) -> None:
        """What was under way arrives; a connection that was lost has to be made again."""
        self.set_link(first, second, replace(self.link(first, second), is_cut=False))

    async def _notice_silence(self, first: PeerId, second: PeerId) -> None:
        await trio.sleep(SILENCE_S)
        if self.link(first, second).is_cut:
            one, other = self._transports[first], self._transports[second]
            one.lost(other, f"nothing heard for {SILENCE_S:g} s")
            other.lost(one, f"nothing heard for {SILENCE_S:g} s")

    def kill(self, peer: PeerId, *, silently: bool = False) -> None:
        """Ends a peer and its handlers. Others see its connections end at once, or after SILENCE_S if silently."""
        victim = self._transports[peer]
        victim.is_alive = False
        for scope in victim.handler_scopes:
            scope.cancel()
        for other in self._transports.values():
            if not other.is_connected(peer):
                continue
            if silently:
                self.partition(peer, other.peer_id)
            else:
                victim.lost(other, "this peer was killed")
                other.lost(victim, "the peer closed the connection")

    def find(self, peer: PeerId) -> MemoryTransport | None:
        return self._transports.get(peer)

    def start_handler(self, own: MemoryTransport, handler: StreamHandler, stream: MemoryStream) -> None:
        self._nursery.start_soon(self._serve, own, handler, stream)

    async def _serve(self, own: MemoryTransport, handler: StreamHandler, stream: MemoryStream) -> None:
        if not own.is_alive:
            return
        with trio.move_on_after(math.inf) as scope:
            own.handler_scopes.add(scope)
            try:
                await handler(stream)
                stream.finish()
            except KvasirError as error:
                _log.debug("stream %s of %s ended: %s", stream.protocol, stream.peer, error)
                await stream.reset()
            except Exception:  # the door for inbound streams: a handler's bug must not end the network
                _log.warning("handler of %s failed; stream reset", stream.protocol, exc_info=True)
                await stream.reset()
            finally:
                own.handler_scopes.discard(scope)

    def arrival_at(self, sender: PeerId, receiver: PeerId, size_bytes: int) -> float:
        """When bytes sent now arrive: behind all others of this direction, late by each loss."""
        link = self.link(sender, receiver)
        starts_at = max(trio.current_time(), self._busy_until.get((sender, receiver), -math.inf))
        sent_at = starts_at + size_bytes / link.bandwidth_bytes_s
        self._busy_until[sender, receiver] = sent_at
        losses = 0
        while losses < RETRIES_MAX and self._rng.random() < link.loss_ratio:
            losses += 1
        return sent_at + link.latency_s + losses * (2 * link.latency_s + RETRY_S)

    def is_lost(self, sender: PeerId, receiver: PeerId) -> bool:
        """Chance and partitions, for messages that nobody repeats."""
        link = self.link(sender, receiver)
        return link.is_cut or self._rng.random() < link.loss_ratio

    def start_soon(self, task: Callable[..., Awaitable[object]], *args: object) -> None:
        """Runs a task for as long as the network lives."""
        self._nursery.start_soon(task, *args)

    def _wake_all(self) -> None:
        self.links_changed.unpark_all()
        for transport in self._transports.values():
            for stream in transport.streams:
                stream.wake()


@asynccontextmanager
async def open_memory_network(seed: int = 0) -> AsyncIterator[MemoryNetwork]:
    """A network whose handlers run until the block ends. An error raised inside comes out as it is."""
    with single_error_unwrapped():
        async with trio.open_nursery() as nursery:
            try:
                yield MemoryNetwork(seed, nursery)
            finally:
                nursery.cancel_scope.cancel()
