"""Who belongs to the swarm: a keyed challenge between two connected peers, and the door it opens.

It does not know tickets, roles, or what `about` says. Nothing secret is sent: both sides prove that they hold the
swarm's secret by a MAC over both fresh nonces, both peer ids and the direction. The ids are those that Noise
authenticated on this very connection, so a proof relayed by a third peer names the wrong ids and fails (channel
binding); fresh nonces make a recorded one worthless; the direction keeps a proof from being reflected.

The dialler opens /kvasir/hello/1.0.0, then (lengths u16 little-endian):
1. dialler → listener: nonce (32)
2. listener → dialler: nonce (32), length and `about`, MAC (32)
3. dialler → listener: length and `about`, MAC (32)
4. listener → dialler: one byte, 1 = you are in
"""

from __future__ import annotations

import hmac
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass

import trio

from kvasir_node.base.errors import KvasirError, Misbehaved, RejectReason, Unreachable, UsageError
from kvasir_node.base.ids import PeerId
from kvasir_node.net.feed import Feed
from kvasir_node.net.stream_io import read_exactly
from kvasir_node.net.transport import PeerConnected, PeerLost, Stream, StreamHandler, Transport

HELLO_PROTOCOL = "/kvasir/hello/1.0.0"
SECRET_BYTES = 32
NONCE_BYTES = 32
MAC_BYTES = 32
ABOUT_BYTES_MAX = 4096
HELLO_TIMEOUT_S = 10.0
ATTEMPTS_MAX = 3
RETRY_DELAY_S = 1.0
EVENTS_MAX = 256
REFUSALS_MAX = 1024  # remembered until the peer connects again
_DOMAIN = b"kvasir-node hello 1"
_LISTENER, _DIALLER = b"listener", b"dialler"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MemberJoined:
    """Both sides have proved themselves; streams may be opened either way."""

    peer: PeerId
    about: bytes


@dataclass(frozen=True, slots=True)
class MemberLeft:
    peer: PeerId
    reason: str


class Membership:
    """The members among the connected peers. `run` drives it and must be under way."""

    def __init__(
        self,
        transport: Transport,
        secret: bytes,
        about: bytes,
        *,
        nonce: Callable[[], bytes] = lambda: secrets.token_bytes(NONCE_BYTES),
    ) -> None:
        if len(secret) != SECRET_BYTES:
            raise UsageError(f"a swarm secret has {SECRET_BYTES} bytes; got {len(secret)}")
        if len(about) > ABOUT_BYTES_MAX:
            raise UsageError(f"what a node says about itself takes at most {ABOUT_BYTES_MAX} bytes; got {len(about)}")
        self._transport = transport
        self._secret = secret
        self._about = about
        self._nonce = nonce
        self._proven: dict[PeerId, bytes] = {}  # they proved themselves to us
        self._settled: set[PeerId] = set()  # and we to them
        self._challenging: set[PeerId] = set()
        self._answering: set[PeerId] = set()
        self._refusals: dict[PeerId, str] = {}
        self._changed = trio.lowlevel.ParkingLot()
        self._events: Feed[MemberJoined | MemberLeft] = Feed(EVENTS_MAX)
        self._connections = transport.watch()
        transport.set_handler(HELLO_PROTOCOL, self._answer)

    # --- for others ---

    def is_member(self, peer: PeerId) -> bool:
        return peer in self._proven

    def members(self) -> tuple[PeerId, ...]:
        return tuple(self._settled)

    def about(self, peer: PeerId) -> bytes:
        """What the member said about itself, under the MAC. Raises Unreachable for a peer that is no member."""
        if peer not in self._proven:
            raise Unreachable(f"{peer} is not a member of this swarm")
        return self._proven[peer]

    def watch(self) -> trio.MemoryReceiveChannel[MemberJoined | MemberLeft]:
        """A bounded feed; a reader that falls behind loses the oldest and can read `members`."""
        return self._events.subscribe()

    async def require(self, peer: PeerId, timeout_s: float) -> None:
        """Waits until both sides have proved themselves. Raises Unreachable when that does not happen in time."""
        with trio.move_on_after(timeout_s):
            while peer not in self._settled:
                if peer in self._refusals and not self._is_connected(peer):
                    break  # who is connected was not refused since: refusing disconnects
                await self._changed.park()
            else:
                return
        reason = self._refusals.get(peer, f"no proof within {timeout_s:g} s")
        raise Unreachable(f"{peer} is not a member of this swarm: {reason}")

    def _is_connected(self, peer: PeerId) -> bool:
        return any(each.peer == peer for each in self._transport.connections())

    def guard(self, handler: StreamHandler) -> StreamHandler:
        """The same handler, for members only; a stranger's stream is reset."""

        async def guarded(stream: Stream) -> None:
            if stream.peer not in self._proven:
                raise Misbehaved(RejectReason.NOT_A_MEMBER, f"{stream.peer} asks for {stream.protocol} as a stranger")
            await handler(stream)

        return guarded

    # --- driving ---

    async def run(self) -> None:
        """Challenges every peer we dialled, until cancelled."""
        async with trio.open_nursery() as nursery:
            for connection in self._transport.connections():
                self._connected(connection.peer, nursery)
            async for event in self._connections:
                if isinstance(event, PeerConnected):
                    self._connected(event.peer, nursery)
                else:
                    self._lost(event)
                self._drop_disconnected()

    def _connected(self, peer: PeerId, nursery: trio.Nursery) -> None:
        self._refusals.pop(peer, None)
        dialled = any(each.peer == peer and not each.inbound for each in self._transport.connections())
        if dialled and peer not in self._settled and peer not in self._challenging:
            self._challenging.add(peer)
            nursery.start_soon(self._challenge, peer)

    def _lost(self, event: PeerLost) -> None:
        self._proven.pop(event.peer, None)
        if event.peer in self._settled:
            self._settled.discard(event.peer)
            self._events.publish(MemberLeft(event.peer, event.reason))

    def _drop_disconnected(self) -> None:
        """The feed of connections drops its oldest events under pressure; this is what they would have said."""
        connected = {each.peer for each in self._transport.connections()}
        for peer in set(self._proven) - connected:
            self._lost(PeerLost(peer, "disconnected"))

    # --- the dialler's side ---

    async def _challenge(self, peer: PeerId) -> None:
        try:
            for attempt in range(ATTEMPTS_MAX):
                if attempt:
                    await trio.sleep(RETRY_DELAY_S)
                if await self._challenge_once(peer):
                    return
        finally:
            self._challenging.discard(peer)

    async def _challenge_once(self, peer: PeerId) -> bool:
        """False when another attempt may help."""
        try:
            with trio.fail_after(HELLO_TIMEOUT_S):
                stream = await self._transport.open_stream(peer, HELLO_PROTOCOL)
                try:
                    await self._prove_as_dialler(stream)
                finally:
                    await stream.reset()
        except Misbehaved as error:
            await self._refuse(peer, str(error))
            return True
        except (KvasirError, trio.TooSlowError) as error:
            _log.debug("hello to %s: %s", peer, str(error) or "timed out")
            return not self._is_connected(peer)
        return True

    async def _prove_as_dialler(self, stream: Stream) -> None:
        ours = self._nonce()
        await stream.write(ours)
        theirs = await read_exactly(stream.read, NONCE_BYTES)
        about = await _read_about(stream)
        mac = await read_exactly(stream.read, MAC_BYTES)
        transcript = (ours, theirs, str(self._transport.peer_id).encode(), str(stream.peer).encode())
        self._check(mac, _LISTENER, transcript, about)
        # From here on they are in for us: they may open streams as soon as they have checked our proof.
        self._proven[stream.peer] = about
        await stream.write(_packed(self._about), self._mac(_DIALLER, transcript, self._about))
        if await read_exactly(stream.read, 1) != b"\x01":
            raise Misbehaved(RejectReason.BAD_MESSAGE, "our proof was not accepted")
        self._settle(stream.peer)

    # --- the listener's side ---

    async def _answer(self, stream: Stream) -> None:
        peer = stream.peer
        if peer in self._answering:
            raise Misbehaved(RejectReason.TOO_MANY, f"{peer} says hello twice at once")
        self._answering.add(peer)
        try:
            with trio.fail_after(HELLO_TIMEOUT_S):
                await self._prove_as_listener(stream)
        except Misbehaved as error:
            await self._refuse(peer, str(error))
            raise
        except trio.TooSlowError as error:
            raise Unreachable(f"{peer} did not finish its hello in {HELLO_TIMEOUT_S:g} s") from error
        finally:
            self._answering.discard(peer)

    async def _prove_as_listener(self, stream: Stream) -> None:
        theirs = await read_exactly(stream.read, NONCE_BYTES)
        ours = self._nonce()
        transcript = (theirs, ours, str(stream.peer).encode(), str(self._transport.peer_id).encode())
        await stream.write(ours, _packed(self._about), self._mac(_LISTENER, transcript, self._about))
        about = await _read_about(stream)
        self._check(await read_exactly(stream.read, MAC_BYTES), _DIALLER, transcript, about)
        self._proven[stream.peer] = about
        await stream.write(b"\x01")
        self._settle(stream.peer)

    # --- both ---

    def _mac(self, direction: bytes, transcript: tuple[bytes, ...], about: bytes) -> bytes:
        """Every field with its length before it, so that no two transcripts give the same bytes."""
        fields = (_DOMAIN, direction, *transcript, about)
        message = b"".join(len(field).to_bytes(4, "little") + field for field in fields)
        return hmac.digest(self._secret, message, "sha256")

    def _check(self, mac: bytes, direction: bytes, transcript: tuple[bytes, ...], about: bytes) -> None:
        if not hmac.compare_digest(mac, self._mac(direction, transcript, about)):
            raise Misbehaved(RejectReason.NOT_A_MEMBER, "it does not hold this swarm's secret")

    def _settle(self, peer: PeerId) -> None:
        self._settled.add(peer)
        self._events.publish(MemberJoined(peer, self._proven[peer]))
        self._changed.unpark_all()

    async def _refuse(self, peer: PeerId, reason: str) -> None:
        _log.warning("peer %s is refused: %s", peer, reason)
        self._proven.pop(peer, None)
        self._refusals[peer] = reason
        if len(self._refusals) > REFUSALS_MAX:
            del self._refusals[next(iter(self._refusals))]
        try:
            await self._transport.disconnect(peer)
        finally:
            self._changed.unpark_all()


def _packed(about: bytes) -> bytes:
    return len(about).to_bytes(2, "little") + about


async def _read_about(stream: Stream) -> bytes:
    length = int.from_bytes(await read_exactly(stream.read, 2), "little")
    if length > ABOUT_BYTES_MAX:
        raise Misbehaved(RejectReason.TOO_LARGE, f"{length} bytes about itself; at most {ABOUT_BYTES_MAX}")
    return await read_exactly(stream.read, length)
