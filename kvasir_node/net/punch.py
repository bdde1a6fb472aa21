"""A hole through two NATs: both ends connect to each other at the same moment, each from the port it listens on.

It does not know when that is worth a try (decide/reach.py), or what becomes of the connection. The two agree over a
stream that goes through a relay, which is left as it is, whatever comes of the attempt.

    PUNCH_PROTOCOL, from the one that drives: token 16 bytes, addresses: u8 count, each u8 length and text
                    the answer:               addresses
                    from the one that drives: u8 1 = now; it starts itself half a round trip later
    each connection, from both of its ends:   MAGIC, token

The first SYN of one side opens its own NAT and is dropped at the other's; the second side's then comes through. Both
sockets may find themselves connecting (TCP simultaneous open, RFC 9293 section 3.5), or one side's listener takes the
other's connection; the token makes that one and the same. The side that drives dials in Noise, and it alone chooses
among connections that came about at several addresses. Source: RFC 5128 section 3.4; libp2p/specs relay/DCUtR.md.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import math
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import trio
from libp2p.io.exceptions import ConnectionClosedError

from kvasir_node.base.errors import KvasirError, Misbehaved, RejectReason, Unreachable
from kvasir_node.base.ids import PeerId
from kvasir_node.decide.reach import host_of, port_of
from kvasir_node.net.outbound import Bound, connect_from, source_for
from kvasir_node.net.raw_link import TcpStream
from kvasir_node.net.stream_io import read_exactly
from kvasir_node.net.transport import Stream, Transport

PUNCH_PROTOCOL = "/kvasir/punch/1.0.0"
MAGIC = b"KVPUNCH1"
TOKEN_BYTES = 16
ADDRESSES_MAX = 8
AGREE_S = 4.0
ATTEMPT_S = 3.0  # all connections of one attempt; a lost SYN is sent again after one second
RETRY_S = 0.1  # after a connection that failed at once
CHOICE_S = 1.0  # how long the driver may take to choose another connection than the first
SESSIONS_MAX = 16

Upgrade = Callable[[TcpStream, PeerId, bool], Awaitable[None]]
"""(connected, the peer, whether we are Noise's initiator): returns once it is a connection to that peer; or raises."""

_log = logging.getLogger(__name__)


class _Session:
    """One attempt. `arrived` holds connections that the other side made to our listener."""

    def __init__(self, peer: PeerId, token: bytes, *, drives: bool) -> None:
        self.peer = peer
        self.token = token
        self.drives = drives
        self.is_open = trio.Event()
        self.scope = trio.move_on_after(math.inf)
        self.arrived, self._arrived = trio.open_memory_channel[TcpStream](ADDRESSES_MAX)

    async def next_arrived(self) -> TcpStream:
        return await self._arrived.receive()

    def close(self) -> None:
        with suppress(trio.WouldBlock):
            while True:
                self._arrived.receive_nowait().abort()


class Puncher:
    """See the module. `candidates` are our addresses for a peer to aim at; `listeners` where our connections start."""

    def __init__(
        self,
        transport: Transport,
        listeners: Sequence[Bound],
        candidates: Callable[[], Sequence[str]],
        upgrade: Upgrade,
    ) -> None:
        self._transport = transport
        self._listeners = listeners
        self._candidates = candidates
        self._upgrade = upgrade
        self._sessions: list[_Session] = []

    async def punch(self, peer: PeerId) -> None:
        """Returns when there is a direct connection. Raises Unreachable. Cancel-safety: nothing half-made is left."""
        stream = await self._transport.open_stream(peer, PUNCH_PROTOCOL)
        session = _Session(peer, secrets.token_bytes(TOKEN_BYTES), drives=True)
        try:
            with self._registered(session):
                with trio.move_on_after(AGREE_S) as agreeing:
                    asked_at = trio.current_time()
                    await stream.write(session.token, _pack(self._candidates()))
                    addresses = await _read_addresses(stream)
                    round_trip_s = trio.current_time() - asked_at
                    await stream.write(b"\x01")
                if agreeing.cancelled_caught:
                    raise Unreachable(f"{peer} did not agree to a direct connection in {AGREE_S:g} s")
                await trio.sleep(round_trip_s / 2)
                await self._attempt(session, addresses)
        finally:
            await stream.reset()

    async def serve(self, stream: Stream) -> None:
        """The side that is asked."""
        with trio.move_on_after(AGREE_S) as agreeing:
            token = await read_exactly(stream.read, TOKEN_BYTES)
            addresses = await _read_addresses(stream)
            with self._registered(_Session(stream.peer, token, drives=False)) as session:
                await stream.write(_pack(self._candidates()))
                await read_exactly(stream.read, 1)
                agreeing.deadline = math.inf
                await self._attempt(session, addresses)
        if agreeing.cancelled_caught:
            raise Unreachable(f"{stream.peer} did not agree to a direct connection in {AGREE_S:g} s")

    @contextmanager
    def _registered(self, session: _Session) -> Iterator[_Session]:
        """Connections of the other side are taken from here on: it may be quicker, or have a way in already.

        One that came too soon and was closed would leave its two ports unusable for a minute.
        """
        if len(self._sessions) >= SESSIONS_MAX:
            raise Unreachable(f"{SESSIONS_MAX} attempts at direct connections are under way already")
        self._sessions.append(session)
        try:
            yield session
        finally:
            self._sessions.remove(session)
            session.close()

    async def _attempt(self, session: _Session, addresses: Sequence[str]) -> None:
        session.scope.deadline = trio.current_time() + ATTEMPT_S
        with session.scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._take_arrived, session)
                for each in addresses:
                    nursery.start_soon(self._connect, session, host_of(each), port_of(each))
        if not session.is_open.is_set():
            tried = ", ".join(addresses) or "no address"
            raise Unreachable(f"no direct connection to {session.peer} came about in {ATTEMPT_S:g} s at {tried}")

    async def _connect(self, session: _Session, host: str, port: int) -> None:
        """Tries one address until the attempt is over."""
        source = source_for(host, self._listeners)
        if source is None:
            return
        while not session.is_open.is_set():
            try:
                tcp = TcpStream(await connect_from(source, host, port))
            except OSError as error:
                _log.debug("punching to %s port %d: %s", host, port, error)
            else:
                await self._use(session, tcp, is_greeted=False)
            await trio.sleep(RETRY_S)

    async def _take_arrived(self, session: _Session) -> None:
        while True:
            await self._use(session, await session.next_arrived(), is_greeted=True)

    async def _use(self, session: _Session, tcp: TcpStream, *, is_greeted: bool) -> None:
        """Makes it the connection, if the other end is the one that we agreed with."""
        kept = False
        try:
            await tcp.write(MAGIC + session.token)
            if not is_greeted:
                greeting = await read_exactly(tcp.read, len(MAGIC) + TOKEN_BYTES)
                if not hmac.compare_digest(greeting, MAGIC + session.token):
                    raise Misbehaved(RejectReason.NOT_A_MEMBER, "somebody else answers there")
            await self._upgrade(tcp, session.peer, session.drives)
            kept = True
            session.is_open.set()
            # Only the driver chooses: what the other side ended here might be the one that was chosen there.
            session.scope.deadline = trio.current_time() + (0 if session.drives else CHOICE_S)
        except (KvasirError, ConnectionClosedError) as error:
            _log.debug("a punched connection to %s came to nothing: %s", session.peer, error)
        finally:
            if not kept:
                tcp.abort()

    async def admit(self, tcp: TcpStream) -> None:
        """Takes an inbound connection that begins with MAGIC into its attempt; `tcp` is detached then.

        Raises Misbehaved when it names no attempt. Cancel-safety: close `tcp` afterwards.
        """
        greeting = await read_exactly(tcp.read, len(MAGIC) + TOKEN_BYTES)
        token = greeting[len(MAGIC) :]
        found = [each for each in self._sessions if hmac.compare_digest(each.token, token)]
        if not found:
            tcp.abort()
            raise Misbehaved(RejectReason.NOT_A_MEMBER, "a punched connection names no attempt of ours")
        moved = tcp.moved()
        try:
            found[0].arrived.send_nowait(moved)
        except trio.WouldBlock:
            moved.abort()


def _pack(addresses: Sequence[str]) -> bytes:
    texts = [each.encode() for each in addresses[:ADDRESSES_MAX]]
    return bytes([len(texts)]) + b"".join(bytes([len(text)]) + text for text in texts)


async def _read_addresses(stream: Stream) -> tuple[str, ...]:
    """Raises Misbehaved for anything but IPs with TCP ports."""
    (count,) = await read_exactly(stream.read, 1)
    if count > ADDRESSES_MAX:
        raise Misbehaved(RejectReason.TOO_MANY, f"{stream.peer} names {count} addresses; at most {ADDRESSES_MAX}")
    found = []
    for _ in range(count):
        (length,) = await read_exactly(stream.read, 1)
        text = (await read_exactly(stream.read, length)).decode("ascii", "replace")
        if not _is_target(text):
            raise Misbehaved(RejectReason.BAD_MESSAGE, f"{stream.peer} wants a connection to {text[:60]!r}")
        found.append(text)
    return tuple(found)


def _is_target(text: str) -> bool:
    try:
        address = ipaddress.ip_address(host_of(text))
    except ValueError:
        return False
    return 0 < port_of(text) < 65536 and not (address.is_loopback or address.is_multicast or address.is_unspecified)
