"""A node's end of relayed connections: places kept at relays, and connections made or taken through one.

It does not know who should be reached so, nor how a relay serves (relay.py). A circuit is a stream to the relay that
continues as a stream from the relay to the other peer; inside it runs the same Noise session and the same muxer as over
TCP, so a relay reads nothing and a peer is authenticated as always.

Why a protocol of our own and not libp2p's circuit v2: there a reservation ends by the clock and belongs to anybody,
incoming circuits carry no relay, the swarm refuses to dial them, and the relay's copying is unbounded. Here the
reservation is the open stream itself, and only members get one.

    RELAY_PROTOCOL, to a relay:       u8 ask (1 reserve, 2 connect); for connect u8 length and the other peer's id
                       its answer:    u8 (0 ok, 1 full, 2 that peer has no reservation here, 3 it did not take it)
        a reservation lasts until either side ends the stream; a connection's bytes follow the answer
    CIRCUIT_PROTOCOL, from a relay:   u8 length and the id of the peer that connects
                       the answer:    u8 0; then the connection's bytes
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from enum import IntEnum

import trio
from libp2p.network.connection.raw_connection import RawConnection
from multiaddr import Multiaddr

from kvasir_node.base.errors import CapacityError, Misbehaved, RejectReason, Unreachable
from kvasir_node.base.ids import PeerId
from kvasir_node.net.raw_link import Buffer, LinkedStream
from kvasir_node.net.stream_io import read_exactly
from kvasir_node.net.transport import Stream, Transport

RELAY_PROTOCOL = "/kvasir/relay/1.0.0"
CIRCUIT_PROTOCOL = "/kvasir/circuit/1.0.0"
ANSWER_TIMEOUT_S = 4.0
PEER_ID_BYTES_MAX = 64
CIRCUITS_MAX = 64  # that others have made to us and that are not authenticated yet, or live

_log = logging.getLogger(__name__)


class Ask(IntEnum):
    RESERVE = 1
    CONNECT = 2


class Answer(IntEnum):
    OK = 0
    FULL = 1
    NOT_RESERVED = 2
    NOT_TAKEN = 3


_WORDS = {
    Answer.FULL: "the relay is full",
    Answer.NOT_RESERVED: "the relay has no reservation of that peer",
    Answer.NOT_TAKEN: "that peer did not take the connection",
}


def pack_peer(peer: PeerId) -> bytes:
    text = str(peer).encode()
    return bytes([len(text)]) + text


async def read_peer(stream: Stream) -> PeerId:
    """Raises Misbehaved for what is no peer id, Unreachable at the end."""
    (length,) = await read_exactly(stream.read, 1)
    text = await read_exactly(stream.read, length)
    if not 0 < length <= PEER_ID_BYTES_MAX or not (text.isascii() and text.isalnum()):
        raise Misbehaved(RejectReason.BAD_MESSAGE, f"{stream.peer} names a peer by {bytes(text[:20])!r}")
    return PeerId(text.decode())


class CircuitStream(LinkedStream):
    """One end of a circuit, as the raw connection under a Noise session.

    `end` is called when the session closes it: the stream then sends what it holds and drops what still comes.
    """

    def __init__(self, stream: Stream, end: Callable[[], None]) -> None:
        self._stream = stream
        self._end = end
        self._received = memoryview(b"")

    sends_now = True

    def send_now(self, parts: list[Buffer]) -> list[Buffer]:
        return [] if not parts or self._stream.write_now(*parts) else parts

    async def send_all(self, parts: list[Buffer]) -> None:
        if parts:
            await self._stream.write(*parts)

    async def receive_into(self, buffer: memoryview) -> int:
        if not self._received:
            self._received = memoryview(await self._stream.read(len(buffer)))
        taken = self._received[: len(buffer)]
        buffer[: len(taken)] = taken
        self._received = self._received[len(taken) :]
        return len(taken)

    async def read(self, n: int | None = None) -> bytes:
        return bytes(await self._stream.read() if n is None else await self._stream.read(n))

    async def write(self, data: bytes) -> None:
        await self._stream.write(data)

    async def close(self) -> None:
        self._end()
        await trio.lowlevel.checkpoint()

    def get_remote_address(self) -> tuple[str, int] | None:
        return None


def circuit_connection(circuit: CircuitStream, relay: PeerId, *, is_initiator: bool) -> RawConnection:
    return RawConnection(circuit, is_initiator, addresses=[Multiaddr(f"/p2p/{relay}/p2p-circuit")])


class Circuits:
    """One node's reservations, and its circuits. `take` authenticates one that others made and serves it to its end."""

    def __init__(
        self,
        transport: Transport,
        require_member: Callable[[PeerId], Awaitable[None]],
        take: Callable[[Stream, PeerId], Awaitable[None]],
    ) -> None:
        self._transport = transport
        self._require_member = require_member
        self._take = take
        self._reserved: dict[PeerId, object] = {}
        self._taken = 0
        transport.set_handler(CIRCUIT_PROTOCOL, self._serve)

    @property
    def relays(self) -> tuple[PeerId, ...]:
        """Where we have a reservation, the oldest first."""
        return tuple(self._reserved)

    async def reserve(self, relay: PeerId, reserved: Callable[[], None]) -> None:
        """Holds a reservation, from the call of `reserved`, until it ends: then raises Unreachable, as when refused.

        Raises CapacityError when the relay is full. Cancel-safety: a cancelled call has given it back.
        """
        stream = await self._transport.open_stream(relay, RELAY_PROTOCOL)
        mark = object()
        try:
            await stream.write(bytes([Ask.RESERVE]))
            await _expect_ok(stream, f"no reservation at {relay}")
            self._reserved[relay] = mark
            reserved()
            await stream.read(1)
        finally:
            if self._reserved.get(relay) is mark:
                del self._reserved[relay]
            await stream.reset()
        raise Unreachable(f"the reservation at {relay} ended")

    async def dial(self, relay: PeerId, peer: PeerId) -> Stream:
        """A circuit to a peer through a relay that we are connected to; whoever gets it resets it.

        Raises Unreachable, CapacityError. Cancel-safety: nothing is left open.
        """
        await self._require_member(relay)
        stream = await self._transport.open_stream(relay, RELAY_PROTOCOL)
        try:
            await stream.write(bytes([Ask.CONNECT]), pack_peer(peer))
            await _expect_ok(stream, f"no circuit to {peer} through {relay}")
        except BaseException:
            await stream.reset()
            raise
        return stream

    async def _serve(self, stream: Stream) -> None:
        if stream.peer not in self._reserved:
            text = f"{stream.peer} brings a connection, but we have no reservation there"
            raise Misbehaved(RejectReason.NOT_A_MEMBER, text)
        if self._taken >= CIRCUITS_MAX:
            raise CapacityError(f"{CIRCUITS_MAX} connections through relays are open")
        self._taken += 1
        try:
            source = await read_peer(stream)
            await stream.write(bytes([Answer.OK]))
            _log.debug("%s connects through %s", source, stream.peer)
            await self._take(stream, stream.peer)
        finally:
            self._taken -= 1


async def _expect_ok(stream: Stream, what: str) -> None:
    with trio.move_on_after(ANSWER_TIMEOUT_S) as waiting:
        (answer,) = await read_exactly(stream.read, 1)
        if answer == Answer.FULL:
            raise CapacityError(f"{what}: {_WORDS[Answer.FULL]}")
        if answer != Answer.OK:
            words = _WORDS[Answer(answer)] if answer in _WORDS else f"answer {answer}, which is none of ours"
            raise Unreachable(f"{what}: {words}")
    if waiting.cancelled_caught:
        raise Unreachable(f"{what}: no answer in {ANSWER_TIMEOUT_S:g} s")
