"""Who belongs to the swarm: a keyed challenge between two connected peers, and the door it opens.

It does not know tickets, roles, or what `about` says. Nothing secret is sent: both sides prove that they hold a
secret of the swarm by a MAC over both fresh nonces, both peer ids and the direction. The ids are those that Noise
authenticated on this very connection, so a proof relayed by a third peer names the wrong ids and fails (channel
binding); fresh nonces make a recorded one worthless; the direction keeps a proof from being reflected.

The dialler opens /kvasir/hello/2.0.0, then (lengths u16 little-endian):
1. dialler → listener: nonce (32), how many secrets it holds (1), a hint (16) for each
2. listener → dialler: number of the secret that both hold, from 1 (1), nonce (32), length and `about`, MAC (32);
   or one byte, 0 = none: a stranger is told nothing, and costs no more than this; or 255 = the listener's settings
   refuse this peer
3. dialler → listener: length and `about`, MAC (32)
4. listener → dialler: one byte, 1 = you are in

A hint is a MAC over the dialler's nonce and both ids: it tells nothing to who does not hold the secret. There are
two secrets only while one replaces another.

A guest (wire/guest_pass) holds a key of its own in a secret's place. It always dials; the listener, which knows the
swarm's secrets, makes that key from them and the guest's peer id.
"""

from __future__ import annotations

import hmac
import logging
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import trio

from kvasir_node.base.errors import KvasirError, Misbehaved, RejectReason, Unreachable, UsageError
from kvasir_node.base.ids import PeerId
from kvasir_node.base.rejections import Rejections
from kvasir_node.decide.rarely import Rarely
from kvasir_node.net.feed import Feed
from kvasir_node.net.stream_io import read_exactly
from kvasir_node.net.transport import PeerConnected, PeerLost, Stream, StreamHandler, Transport
from kvasir_node.wire.guest_pass import guest_key

HELLO_PROTOCOL = "/kvasir/hello/2.0.0"
SECRET_BYTES = 32
NONCE_BYTES = 32
MAC_BYTES = 32
HINT_BYTES = 16
SECRETS_MAX = 2
ABOUT_BYTES_MAX = 4096
HELLO_TIMEOUT_S = 10.0
VERDICT_S = 1.0
ATTEMPTS_MAX = 3
RETRY_DELAY_S = 1.0
EVENTS_MAX = 256
REFUSALS_MAX = 1024  # remembered until the peer connects again
EXPIRY_CHECK_S = 30.0  # who is here by a secret that counts no more leaves within this
_DOMAIN = b"kvasir-node hello 2"
_LISTENER, _DIALLER, _HINT = b"listener", b"dialler", b"hint"
_NO_SECRET, _UNWANTED = 0, 255

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


@dataclass(frozen=True, slots=True)
class _Proof:
    """`key` is what the MACs were made with: `secret` itself, or a guest's key made from it."""

    secret: bytes
    key: bytes

    @property
    def is_guest(self) -> bool:
        return self.key != self.secret


class Membership:
    """The members among the connected peers. `run` drives it and must be under way.

    `older` tells the secrets that count beside `secret` now (one that it replaced, for a while); `refusal_of` says why
    a peer is not let in whatever it proves, None = it may.
    """

    def __init__(
        self,
        transport: Transport,
        secret: bytes,
        about: bytes,
        *,
        older: Callable[[], Sequence[bytes]] = tuple,
        refusal_of: Callable[[PeerId], str | None] = lambda _: None,
        nonce: Callable[[], bytes] = lambda: secrets.token_bytes(NONCE_BYTES),
    ) -> None:
        if len(secret) != SECRET_BYTES:
            raise UsageError(f"a swarm secret has {SECRET_BYTES} bytes; got {len(secret)}")
        if len(about) > ABOUT_BYTES_MAX:
            raise UsageError(f"what a node says about itself takes at most {ABOUT_BYTES_MAX} bytes; got {len(about)}")
        self._transport = transport
        self._secret = secret
        self._about = about
        self._older = older
        self._refusal_of = refusal_of
        self._nonce = nonce
        self.rejections = Rejections()  # at the doors that `guard` keeps
        self._proven: dict[PeerId, bytes] = {}  # they proved themselves to us
        self._by: dict[PeerId, _Proof] = {}  # ... and how
        self._settled: set[PeerId] = set()  # and we to them
        self._challenging: set[PeerId] = set()
        self._answering: set[PeerId] = set()
        self._refusals: dict[PeerId, str] = {}
        self._refusal_lines = Rarely()
        self._changed = trio.lowlevel.ParkingLot()
        self._events: Feed[MemberJoined | MemberLeft] = Feed(EVENTS_MAX)
        self._connections = transport.watch()
        transport.set_handler(HELLO_PROTOCOL, self._answer)

    # --- for others ---

    def is_member(self, peer: PeerId) -> bool:
        return peer in self._proven

    def is_guest(self, peer: PeerId) -> bool:
        """Whether the member proved itself by a pass, and not by a ticket."""
        return peer in self._by and self._by[peer].is_guest

    def refusal(self, peer: PeerId) -> str | None:
        """Why a peer is not let in whatever it proves; None = it may be."""
        return self._refusal_of(peer)

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
        """The same handler, for members only; a stranger's stream is reset. What is refused there is counted."""

        async def guarded(stream: Stream) -> None:
            if stream.peer not in self._proven:
                raise Misbehaved(RejectReason.NOT_A_MEMBER, f"{stream.peer} asks for {stream.protocol} as a stranger")
            await handler(stream)

        async def counted(stream: Stream) -> None:
            try:
                await guarded(stream)
            except Misbehaved as error:
                self.rejections.note(error)
                raise

        return counted

    # --- driving ---

    async def run(self) -> None:
        """Challenges every peer we dialled, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._drop_outdated)
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
        self._by.pop(event.peer, None)
        if event.peer in self._settled:
            self._settled.discard(event.peer)
            self._events.publish(MemberLeft(event.peer, event.reason))

    def _drop_disconnected(self) -> None:
        """The feed of connections drops its oldest events under pressure; this is what they would have said."""
        connected = {each.peer for each in self._transport.connections()}
        for peer in set(self._proven) - connected:
            self._lost(PeerLost(peer, "disconnected"))

    async def _drop_outdated(self) -> None:
        """Ends what an old secret opened when it counts no more; who holds the new one too comes back by it."""
        while True:
            await trio.sleep(EXPIRY_CHECK_S)
            valid = self._secrets()
            for peer in [peer for peer, proof in self._by.items() if proof.secret not in valid]:
                _log.info("peer %s is here by a secret that counts no more", peer)
                await self._transport.disconnect(peer)

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
        self._check_wanted(stream.peer)
        ours, held = self._nonce(), self._secrets()
        ids = (str(self._transport.peer_id).encode(), str(stream.peer).encode())
        await stream.write(ours, bytes([len(held)]), *(_hint(secret, ours, ids) for secret in held))
        number = (await read_exactly(stream.read, 1))[0]
        if number == _UNWANTED:
            raise Misbehaved(
                RejectReason.NOT_A_MEMBER,
                "it refuses this peer: ask its owner (network.refuse, allow) or the swarm's (kvasir-node revoke)",
            )
        if not 1 <= number <= len(held):
            raise _stranger()
        secret = held[number - 1]
        theirs = await read_exactly(stream.read, NONCE_BYTES)
        about = await _read_about(stream)
        mac = await read_exactly(stream.read, MAC_BYTES)
        transcript = (ours, theirs, *ids)
        _check(secret, mac, _LISTENER, transcript, about)
        # From here on they are in for us: they may open streams as soon as they have checked our proof.
        self._prove(stream.peer, about, _Proof(secret, secret))
        await stream.write(_packed(self._about), _mac(secret, _DIALLER, transcript, self._about))
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
        if self._refusal_of(stream.peer) is not None:
            await _tell(stream, _UNWANTED)
        self._check_wanted(stream.peer)
        theirs = await read_exactly(stream.read, NONCE_BYTES)
        count = (await read_exactly(stream.read, 1))[0]
        if not 1 <= count <= SECRETS_MAX:
            raise Misbehaved(RejectReason.BAD_MESSAGE, f"{count} secrets; a peer holds 1 to {SECRETS_MAX}")
        hints = [await read_exactly(stream.read, HINT_BYTES) for _ in range(count)]
        ids = (str(stream.peer).encode(), str(self._transport.peer_id).encode())
        number, found = self._common(hints, theirs, ids, stream.peer)
        if found is None:
            await _tell(stream, _NO_SECRET)
            raise _stranger()
        ours = self._nonce()
        transcript = (theirs, ours, *ids)
        mac = _mac(found.key, _LISTENER, transcript, self._about)
        await stream.write(bytes([number]), ours, _packed(self._about), mac)
        about = await _read_about(stream)
        _check(found.key, await read_exactly(stream.read, MAC_BYTES), _DIALLER, transcript, about)
        self._prove(stream.peer, about, found)
        await stream.write(b"\x01")
        self._settle(stream.peer)

    # --- both ---

    def _secrets(self) -> list[bytes]:
        return [self._secret, *self._older()][:SECRETS_MAX]

    def _common(
        self, hints: Sequence[bytes], nonce: bytes, ids: tuple[bytes, bytes], dialler: PeerId
    ) -> tuple[int, _Proof | None]:
        """The first of the dialler's secrets, or keys, that we know too, and its number; (0, None) = none."""
        for secret in self._secrets():
            for key in (secret, guest_key(secret, dialler)):
                expected = _hint(key, nonce, ids)
                for number, hint in enumerate(hints, 1):
                    if hmac.compare_digest(hint, expected):
                        return number, _Proof(secret, key)
        return 0, None

    def _check_wanted(self, peer: PeerId) -> None:
        if (reason := self._refusal_of(peer)) is not None:
            raise Misbehaved(RejectReason.NOT_A_MEMBER, reason)

    def _prove(self, peer: PeerId, about: bytes, proof: _Proof) -> None:
        self._proven[peer], self._by[peer] = about, proof

    def _settle(self, peer: PeerId) -> None:
        self._settled.add(peer)
        self._events.publish(MemberJoined(peer, self._proven[peer]))
        self._changed.unpark_all()

    async def _refuse(self, peer: PeerId, reason: str) -> None:
        level = logging.WARNING if self._refusal_lines.is_time(trio.current_time()) else logging.DEBUG
        _log.log(level, "peer %s is refused: %s", peer, reason)
        self._proven.pop(peer, None)
        self._by.pop(peer, None)
        self._refusals[peer] = reason
        if len(self._refusals) > REFUSALS_MAX:
            del self._refusals[next(iter(self._refusals))]
        try:
            await self._transport.disconnect(peer)
        finally:
            self._changed.unpark_all()


def _mac(secret: bytes, direction: bytes, transcript: tuple[bytes, ...], about: bytes) -> bytes:
    """Every field with its length before it, so that no two transcripts give the same bytes."""
    fields = (_DOMAIN, direction, *transcript, about)
    message = b"".join(len(field).to_bytes(4, "little") + field for field in fields)
    return hmac.digest(secret, message, "sha256")


def _check(secret: bytes, mac: bytes, direction: bytes, transcript: tuple[bytes, ...], about: bytes) -> None:
    if not hmac.compare_digest(mac, _mac(secret, direction, transcript, about)):
        raise _stranger()


def _hint(secret: bytes, nonce: bytes, ids: tuple[bytes, bytes]) -> bytes:
    return _mac(secret, _HINT, (nonce, *ids), b"")[:HINT_BYTES]


def _stranger() -> Misbehaved:
    return Misbehaved(RejectReason.NOT_A_MEMBER, "it does not hold this swarm's secret")


async def _tell(stream: Stream, verdict: int) -> None:
    """Says why not, and leaves the other side a moment to read it before it is disconnected."""
    with trio.move_on_after(VERDICT_S), suppress(Unreachable):
        await stream.write(bytes([verdict]))
        while await stream.read():
            pass


def _packed(about: bytes) -> bytes:
    return len(about).to_bytes(2, "little") + about


async def _read_about(stream: Stream) -> bytes:
    length = int.from_bytes(await read_exactly(stream.read, 2), "little")
    if length > ABOUT_BYTES_MAX:
        raise Misbehaved(RejectReason.TOO_LARGE, f"{length} bytes about itself; at most {ABOUT_BYTES_MAX}")
    return await read_exactly(stream.read, length)
