"""How two peers come to an express channel: an invitation over a stream they have, then a connection that names it.

It does not know calls, or what the channel is for. The inviter's token and key travel only inside a stream whose ends
are authenticated; whoever says the token on a new connection, sealed with the key, is the peer that was invited.

    opening:  MAGIC, token 16 bytes, an empty message sealed with the guest's key (nonce 0)
    reply:    u32 length 16, an empty message sealed with the inviter's key (nonce 0)
    then frames (express.py), from nonce 1. Keys: HKDF-SHA256 of the invitation's key, salted with the token.

A token serves once: no key ever meets the same nonce twice.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass

import trio
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from libp2p.io.exceptions import ConnectionClosedError

from kvasir_node.base.errors import CapacityError, Misbehaved, RejectReason, Unreachable
from kvasir_node.base.ids import PeerId
from kvasir_node.net.express import LENGTH, TAG_BYTES, DirectionKey, ExpressChannel
from kvasir_node.net.raw_link import TcpStream

MAGIC = b"KVEXPR1\n"  # neither HTTP nor multistream-select begins like this
TOKEN_BYTES = 16
KEY_BYTES = 32
OPENING_BYTES = len(MAGIC) + TOKEN_BYTES + TAG_BYTES
INVITATION_S = 10.0
OPENING_S = 5.0  # a connection that said MAGIC says the rest by then
ENTER_S = 2.0
INVITATIONS_MAX = 256  # that are valid; the oldest goes for one more
PER_PEER_MAX = 4  # invitations of one peer, and its channels

Arrived = Callable[[ExpressChannel], None]


@dataclass(frozen=True, slots=True)
class _Invitation:
    peer: PeerId
    token: bytes
    key: bytes
    expires_at: float
    arrived: Arrived

    def __repr__(self) -> str:
        return f"_Invitation({self.peer})"  # whatever logs it does not log its key


class Invitations:
    """Those that are valid; every method takes the time. At most INVITATIONS_MAX."""

    def __init__(self) -> None:
        self._valid: list[_Invitation] = []  # the oldest first

    def issue(self, peer: PeerId, arrived: Arrived, now: float) -> bytes:
        """Token and key, as they travel."""
        self._forget_expired(now)
        own = [each for each in self._valid if each.peer == peer]
        if len(own) >= PER_PEER_MAX:
            self._valid.remove(own[0])
        elif len(self._valid) >= INVITATIONS_MAX:
            self._valid.pop(0)
        token, key = secrets.token_bytes(TOKEN_BYTES), secrets.token_bytes(KEY_BYTES)
        self._valid.append(_Invitation(peer, token, key, now + INVITATION_S, arrived))
        return token + key

    def redeem(self, opening: bytes, now: float) -> tuple[PeerId, Arrived, DirectionKey, DirectionKey]:
        """The invited peer, and the keys to send and receive with; the invitation is spent.

        Raises Misbehaved when the opening is that of no valid invitation: that spends none.
        """
        self._forget_expired(now)
        token, proof = opening[len(MAGIC) : -TAG_BYTES], opening[-TAG_BYTES:]
        # All of them are compared, each in constant time: how long it takes tells nobody how close a guess was.
        found = [each for each in self._valid if hmac.compare_digest(each.token, token)]
        if not found:
            raise Misbehaved(RejectReason.NOT_A_MEMBER, "an express connection names no invitation that is valid now")
        (invitation,) = found
        guest, inviter = _keys(invitation.token, invitation.key)
        guest.open(proof)
        self._valid.remove(invitation)
        return invitation.peer, invitation.arrived, inviter, guest

    def _forget_expired(self, now: float) -> None:
        self._valid = [each for each in self._valid if each.expires_at > now]


def _keys(token: bytes, key: bytes) -> tuple[DirectionKey, DirectionKey]:
    """The guest's to send with and the inviter's, both before their first message."""
    derived = HKDF(SHA256(), 2 * KEY_BYTES, token, b"kvasir express 1: guest, inviter").derive(key)
    return DirectionKey(derived[:KEY_BYTES]), DirectionKey(derived[KEY_BYTES:])


class ExpressDoor:
    """One node's invitations and channels. All of it on the trio loop."""

    def __init__(self, body_bytes_max: int) -> None:
        self._body_bytes_max = body_bytes_max
        self._invitations = Invitations()
        self._channels: list[ExpressChannel] = []
        self._closed_bytes_in = 0
        self._closed_bytes_out = 0

    @property
    def bytes_in(self) -> int:
        return self._closed_bytes_in + sum(each.bytes_in for each in self._channels)

    @property
    def bytes_out(self) -> int:
        return self._closed_bytes_out + sum(each.bytes_out for each in self._channels)

    def invite(self, peer: PeerId, arrived: Arrived) -> bytes:
        return self._invitations.issue(peer, arrived, trio.current_time())

    async def admit(self, tcp: TcpStream) -> None:
        """Serves an inbound connection that begins with MAGIC: then `arrived` has the channel, and `tcp` is detached.

        Raises Misbehaved, CapacityError, Unreachable. Cancel-safety: close `tcp` afterwards.
        """
        with trio.move_on_after(OPENING_S) as waiting:
            opening = await _read_exactly(tcp, OPENING_BYTES)
        if waiting.cancelled_caught:
            raise Unreachable(f"an express connection did not say its token in {OPENING_S:g} s")
        peer, arrived, sending, receiving = self._invitations.redeem(opening, trio.current_time())
        if tcp.unread_bytes:
            raise Misbehaved(RejectReason.BAD_FRAME, f"{peer} said more than its opening before it was answered")
        self._check_room(peer)
        hello = sending.seal(b"")
        await tcp.write(LENGTH.pack(len(hello)) + hello)
        arrived(self._channel(tcp, peer, sending, receiving))

    async def enter(self, peer: PeerId, host: str, port: int, invitation: bytes) -> ExpressChannel:
        """Dials an inviter. Raises Unreachable within ENTER_S, Misbehaved for what is no invitation, CapacityError.

        Cancel-safety: nothing is left open; the invitation may be spent.
        """
        if len(invitation) != TOKEN_BYTES + KEY_BYTES:
            text = f"an invitation of {len(invitation)} bytes; expected {TOKEN_BYTES + KEY_BYTES}"
            raise Misbehaved(RejectReason.BAD_MESSAGE, text)
        self._check_room(peer)
        token, key = invitation[:TOKEN_BYTES], invitation[TOKEN_BYTES:]
        sending, receiving = _keys(token, key)
        reason = f"timed out after {ENTER_S:g} s"
        try:
            with trio.move_on_after(ENTER_S):
                tcp = TcpStream(await trio.open_tcp_stream(host, port))
                try:
                    await tcp.write(MAGIC + token + sending.seal(b""))
                    hello = await _read_exactly(tcp, LENGTH.size + TAG_BYTES)
                    receiving.open(hello[LENGTH.size :])
                    return self._channel(tcp, peer, sending, receiving)
                finally:
                    tcp.close_now()
        except (OSError, ConnectionClosedError, Misbehaved, Unreachable) as error:
            reason = str(error)
        raise Unreachable(f"no express channel to {peer} at {host} port {port}: {reason}")

    def close(self, reason: str, peer: PeerId | None = None) -> None:
        """Ends all channels, or those with one peer."""
        for channel in self._channels:
            if peer is None or channel.peer == peer:
                channel.close(reason)

    def _check_room(self, peer: PeerId) -> None:
        for channel in [each for each in self._channels if each.is_closed]:
            self._channels.remove(channel)
            self._closed_bytes_in += channel.bytes_in
            self._closed_bytes_out += channel.bytes_out
        if sum(each.peer == peer for each in self._channels) >= PER_PEER_MAX:
            raise CapacityError(f"{PER_PEER_MAX} express channels with {peer} are open; close one first")

    def _channel(self, tcp: TcpStream, peer: PeerId, sending: DirectionKey, receiving: DirectionKey) -> ExpressChannel:
        channel = ExpressChannel(tcp.detach(), peer, sending, receiving, body_bytes_max=self._body_bytes_max)
        self._channels.append(channel)
        return channel


async def _read_exactly(tcp: TcpStream, count: int) -> bytes:
    """Raises Unreachable when the connection ends before."""
    received = b""
    while len(received) < count:
        chunk = await tcp.read(count - len(received))
        if not chunk:
            raise Unreachable(f"the connection ended after {len(received)} of {count} bytes")
        received += chunk
    return received
