"""What the swarm needs from a network, as two small Protocols.

Two implementations: `libp2p_host` (real) and `memory_net` (trio's clock; for tests, examples and simulations).
It does not know calls, membership or what the bytes mean.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import trio

from kvasir_node.base.ids import PeerId

if TYPE_CHECKING:
    from kvasir_node.net.express import ExpressChannel  # which loads libp2p; the commands that only ask must not


class Stream(Protocol):
    """A reliable, ordered, two-way byte stream to one authenticated peer.

    Cancel-safety: a cancelled `read` loses no byte; a cancelled `write` may leave a part written, after which
    the only sane thing is `reset`. Neither ever harms other streams.
    """

    @property
    def peer(self) -> PeerId: ...

    @property
    def protocol(self) -> str: ...

    async def read(self, max_bytes: int = 262_144) -> bytes | memoryview:
        """1 to max_bytes bytes, or b"" at the end. Raises Unreachable when the stream was reset or the peer is gone."""
        ...

    async def write(self, *parts: bytes | bytearray | memoryview) -> None:
        """Queues all parts in order; waits only for room. Parts must not change afterwards. Raises Unreachable."""
        ...

    def write_now(self, *parts: bytes | bytearray | memoryview) -> bool:
        """Queues all parts as `write` does, or none of them and returns False when there is no room."""
        ...

    def give_way(self) -> None:
        """From now on what is sent here lets the other streams of the connection go first."""
        ...

    def limit_window(self, window_bytes: int) -> None:
        """From now on the peer's room to send ahead of what is read here grows no further than this."""
        ...

    async def pump(self, deliver: Callable[[bytes | memoryview], None]) -> None:
        """Instead of `read`: gives each chunk to `deliver` as soon as it arrives, until the end of the stream.

        `deliver` may run in another task of the loop; what it raises ends the pump and is raised here. Raises
        Unreachable like `read`. Cancel-safety: what was not delivered yet can still be read.
        """
        ...

    async def close(self) -> None:
        """Ends our direction; the other may go on."""
        ...

    async def reset(self) -> None:
        """Ends both directions at once. Never raises."""
        ...


StreamHandler = Callable[[Stream], Awaitable[None]]
"""Runs in a task of its own; when it returns the stream is closed, when it raises the stream is reset."""


@dataclass(frozen=True, slots=True)
class PeerConnected:
    peer: PeerId


@dataclass(frozen=True, slots=True)
class PeerLost:
    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class Connection:
    """One live connection; `rtt_s` is the last keepalive's round trip, None until the first."""

    peer: PeerId
    address: str  # the remote multiaddr
    inbound: bool
    path: str  # direct | relay
    rtt_s: float | None


class Transport(Protocol):
    """One node's end of the network."""

    @property
    def peer_id(self) -> PeerId: ...

    @property
    def bytes_in(self) -> int: ...

    @property
    def bytes_out(self) -> int: ...

    def addresses(self) -> tuple[str, ...]:
        """Multiaddrs with /p2p/PEER that others can dial, the concrete ones (no 0.0.0.0)."""
        ...

    def connections(self) -> tuple[Connection, ...]: ...

    def sign(self, message: bytes) -> bytes:
        """An ed25519 signature by this peer's identity."""
        ...

    def set_handler(self, protocol: str, handler: StreamHandler) -> None:
        """Serves inbound streams of a protocol id such as /kvasir/market/1.0.0."""
        ...

    async def connect(self, addresses: Sequence[str]) -> PeerId:
        """Connects to the one peer that all addresses name; returns at once if connected already.

        Raises Unreachable that lists every address with its reason; UsageError for a malformed address.
        """
        ...

    async def open_stream(self, peer: PeerId, protocol: str) -> Stream:
        """Raises Unreachable when not connected or the peer does not speak the protocol."""
        ...

    def invite(self, peer: PeerId, arrived: Callable[[ExpressChannel], None]) -> bytes | None:
        """An invitation to an express channel, for this peer, once, for ten seconds; None where there is none to offer.

        It must travel only over a stream to this peer. `arrived` is called on the loop when the peer has come. Whoever
        gets a channel closes it; it outlives the connection over which it was agreed.
        """
        ...

    async def accept_invitation(self, peer: PeerId, invitation: bytes) -> ExpressChannel:
        """Dials the peer where this node has dialled it before, at a TCP address: a relay or WebSocket has no channel.

        Raises Unreachable, within 2 s; Misbehaved for bytes that are no invitation; CapacityError when four channels
        with the peer are open. Cancel-safety: nothing is left open.
        """
        ...

    async def ping(self, peer: PeerId) -> float:
        """Seconds there and back, now, over the connection that new streams would take; waits as long as that lasts.

        Raises Unreachable when not connected, or when the connection ends first. Cancel-safety: nothing is left.
        """
        ...

    async def disconnect(self, peer: PeerId) -> None: ...

    def watch(self) -> trio.MemoryReceiveChannel[PeerConnected | PeerLost]:
        """A bounded feed of changes; a reader that falls behind loses the oldest and can read `connections`."""
        ...


GossipValidator = Callable[[PeerId, bytes], bool]
"""(peer that signed the message, data) -> accept. Pure and quick; a refused message is not forwarded."""


class Gossip(Protocol):
    """Publish and subscribe over the swarm; messages are small (< 64 KiB) and may be lost."""

    async def publish(self, topic: str, data: bytes) -> None: ...

    async def subscribe(
        self, topic: str, validator: GossipValidator
    ) -> trio.MemoryReceiveChannel[tuple[PeerId, bytes]]:
        """Accepted messages of others, with the peer that signed them; bounded, newest wins."""
        ...
