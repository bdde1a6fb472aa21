"""Where a peer sees us, and whether it reaches us there: asked over a stream, tested by a connection from a fresh port.

It does not know what follows from the answer (decide/reach.py), nor who may ask: whoever registers `serve` guards it.
The one that is asked dials only the very IP that it sees the other one at, so nobody can be made to dial a third party,
and at most every PAUSE_S for each peer. Whoever answers there proves that it is the one that asked by saying the token.

    PROBE_PROTOCOL:  token 16 bytes, u16 the port that we listen on
      the answer:    u8 length and the observed address; u8 bits: 1 = reached at its port, 2 = at the listener's port
    the connection:  MAGIC, the first half of the token; answered by the other half
"""

from __future__ import annotations

import hmac
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass

import trio
from libp2p.io.exceptions import ConnectionClosedError

from kvasir_node.base.errors import Misbehaved, RejectReason, Unreachable
from kvasir_node.base.ids import PeerId
from kvasir_node.decide.reach import Seen, host_of, port_of
from kvasir_node.net.raw_link import TcpStream
from kvasir_node.net.stream_io import read_exactly
from kvasir_node.net.transport import Stream, Transport

PROBE_PROTOCOL = "/kvasir/reach/1.0.0"
MAGIC = b"KVREACH1"
TOKEN_BYTES = 16
PROBE_S = 2.0  # one connection: a lost SYN is sent again after one second
ANSWER_S = 2 * PROBE_S + 2.0
PAUSE_S = 1.0
PEERS_MAX = 1024  # whose last probe is remembered
TOKENS_MAX = 64  # of ours that are valid
_OBSERVED, _LISTENING = 1, 2

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Own:
    """What we know ourselves about our connection to a peer."""

    listen_port: int
    from_listen_port: bool


class ReachProbe:
    """Both sides. `own` tells our listener's port for a peer's connection; `seen_at` where we see a peer, or ""."""

    def __init__(self, transport: Transport, own: Callable[[PeerId], Own], seen_at: Callable[[PeerId], str]) -> None:
        self._transport = transport
        self._own = own
        self._seen_at = seen_at
        self._tokens: list[bytes] = []
        self._probed_at: dict[PeerId, float] = {}

    async def ask(self, peer: PeerId) -> Seen:
        """Raises Unreachable, Misbehaved. Cancel-safety: nothing is left."""
        own = self._own(peer)
        token = secrets.token_bytes(TOKEN_BYTES)
        stream = await self._transport.open_stream(peer, PROBE_PROTOCOL)
        self._tokens = [*self._tokens[-TOKENS_MAX + 1 :], token]
        try:
            with trio.move_on_after(ANSWER_S):
                await stream.write(token, own.listen_port.to_bytes(2, "big"))
                (length,) = await read_exactly(stream.read, 1)
                observed = await read_exactly(stream.read, length)
                (bits,) = await read_exactly(stream.read, 1)
                return _seen(peer, observed, bits, own)
        finally:
            if token in self._tokens:
                self._tokens.remove(token)
            await stream.reset()
        raise Unreachable(f"{peer} did not say in {ANSWER_S:g} s where it sees us")

    async def is_ourselves(self, host: str, port: int) -> bool:
        """Whether a connection to this address comes back to our own listener."""
        token = secrets.token_bytes(TOKEN_BYTES)
        self._tokens = [*self._tokens[-TOKENS_MAX + 1 :], token]
        try:
            return await _answers(token, host, port)
        finally:
            if token in self._tokens:
                self._tokens.remove(token)

    async def serve(self, stream: Stream) -> None:
        """Answers one question."""
        with trio.move_on_after(PROBE_S) as asking:
            token = await read_exactly(stream.read, TOKEN_BYTES)
            listen_port = int.from_bytes(await read_exactly(stream.read, 2), "big")
        if asking.cancelled_caught:
            raise Unreachable(f"{stream.peer} did not finish its question in {PROBE_S:g} s")
        self._check_rate(stream.peer)
        observed = self._seen_at(stream.peer)
        bits = 0
        if observed:
            bits = await self._bits(token, host_of(observed), port_of(observed), listen_port)
        await stream.write(bytes([len(observed)]), observed.encode(), bytes([bits]))

    def _check_rate(self, peer: PeerId) -> None:
        now = trio.current_time()
        if now - self._probed_at.pop(peer, now - PAUSE_S) < PAUSE_S:
            self._probed_at[peer] = now
            raise Misbehaved(RejectReason.TOO_MANY, f"{peer} asks more than once in {PAUSE_S:g} s where it is seen")
        self._probed_at[peer] = now
        if len(self._probed_at) > PEERS_MAX:
            del self._probed_at[next(iter(self._probed_at))]

    async def _bits(self, token: bytes, host: str, observed_port: int, listen_port: int) -> int:
        reached = 0

        async def test(port: int, bit: int) -> None:
            nonlocal reached
            if port and await _answers(token, host, port):
                reached |= bit

        async with trio.open_nursery() as nursery:
            nursery.start_soon(test, observed_port, _OBSERVED)
            if listen_port != observed_port:
                nursery.start_soon(test, listen_port, _LISTENING)
        return reached

    async def admit(self, tcp: TcpStream) -> None:
        """Answers an inbound connection that begins with MAGIC. Raises Misbehaved for a token that is none of ours."""
        half = await _read(tcp, len(MAGIC) + TOKEN_BYTES // 2)
        found = [each for each in self._tokens if hmac.compare_digest(each[: TOKEN_BYTES // 2], half[len(MAGIC) :])]
        if not found:
            raise Misbehaved(RejectReason.NOT_A_MEMBER, "a probe names no question of ours")
        await tcp.write(found[0][TOKEN_BYTES // 2 :])


def _seen(peer: PeerId, observed: bytes, bits: int, own: Own) -> Seen:
    text = observed.decode("ascii", "replace")
    host, port = host_of(text), port_of(text)
    if observed and (not port or text != f"/ip{6 if ':' in host else 4}/{host}/tcp/{port}"):
        raise Misbehaved(RejectReason.BAD_MESSAGE, f"{peer} sees us at {text[:60]!r}; expected /ip4/IP/tcp/PORT")
    at_listener = f"{text.rpartition('/')[0]}/{own.listen_port}"
    reached = [address for bit, address in ((_OBSERVED, text), (_LISTENING, at_listener)) if bits & bit]
    return Seen(peer, text, own.from_listen_port, tuple(reached), at_listener if observed else "")


async def _answers(token: bytes, host: str, port: int) -> bool:
    """Whether the one that holds the token answers at this address, to a connection from a port of no other use."""
    try:
        with trio.move_on_after(PROBE_S):
            tcp = TcpStream(await trio.open_tcp_stream(host, port))
            try:
                await tcp.write(MAGIC + token[: TOKEN_BYTES // 2])
                return await _read(tcp, TOKEN_BYTES // 2) == token[TOKEN_BYTES // 2 :]
            finally:
                tcp.close_now()
    except (OSError, ConnectionClosedError, Unreachable) as error:
        _log.debug("%s port %d does not answer: %s", host, port, error)
    return False


async def _read(tcp: TcpStream, count: int) -> bytes:
    return await read_exactly(tcp.read, count)
