"""A node's side of pairing: codes for its owner, passes for pages that bring one (docs/phone_protocol.md).

It does not know HTTP, nor how links are shown. Which codes are good is `decide/pairing`; this draws them, answers
streams of strangers within fixed bounds, and tells where hubs are. A code is kept as a digest only, in memory.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import trio

from kvasir_node.base.errors import Misbehaved, RejectReason, Unreachable, UsageError
from kvasir_node.base.ids import PeerId
from kvasir_node.decide.pairing import PairingCodes, PairRefusal
from kvasir_node.decide.rarely import Rarely
from kvasir_node.net.listen_address import host_is_loopback, ws_address
from kvasir_node.net.stream_io import read_exactly
from kvasir_node.net.transport import Stream
from kvasir_node.wire.guest_pass import (
    ASK_BYTES_MAX,
    CODE_BYTES,
    GuestPass,
    PairAsk,
    PairLink,
    make_pass,
    refusal_bytes,
)
from kvasir_node.wire.swarm_keys import SwarmKeys

PAIR_TIMEOUT_S = 10.0
PAIRING_MAX = 8  # strangers that pair at once
EXPIRES_MIN_S, EXPIRES_MAX_S = 10.0, 24 * 3600.0
_LENGTH_BYTES = 2

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PhoneInvite:
    """`link` stands behind # in the page's URL; `host` is where this machine is reached on its network; `is_local` =
    the node listens for this machine alone."""

    link: str
    host: str
    expires_s: float
    is_local: bool


class Pairing:
    """See the module. `serve` is the handler of PAIR_PROTOCOL, for strangers too; `hubs` tells addresses with /p2p."""

    def __init__(
        self,
        peer_id: PeerId,
        keys: Callable[[], SwarmKeys],
        *,
        code_s: float,
        addresses: Callable[[], Sequence[str]],
        hubs: Callable[[], Sequence[str]],
        refusal_of: Callable[[PeerId], str | None],
        address_of: Callable[[PeerId], str],
        outward_host: Callable[[], str],
    ) -> None:
        self._peer_id = peer_id
        self._keys = keys
        self._code_s = code_s
        self._addresses = addresses
        self._hubs = hubs
        self._refusal_of = refusal_of
        self._address_of = address_of
        self._outward_host = outward_host
        self._codes = PairingCodes()
        self._pairing = 0
        self._refusal_lines = Rarely()

    def invite(self, expires_s: float | None = None) -> PhoneInvite:
        """A fresh code. Raises UsageError for a time that makes no sense, or where no page could reach this node."""
        expires_s = self._code_s if expires_s is None else expires_s
        if not EXPIRES_MIN_S <= expires_s <= EXPIRES_MAX_S:
            asked = f"a code serves from {EXPIRES_MIN_S:g} s to {EXPIRES_MAX_S / 3600:g} h; got {expires_s:g} s"
            raise UsageError(asked, param="expires_s")
        host = self._outward_host()
        own = [address.partition("/p2p/")[0] for address in _for_pages(self._addresses(), host)]
        if not own:
            raise UsageError("this node listens nowhere (network.listen), so no page can reach it; ask one that does")
        code = secrets.token_bytes(CODE_BYTES)
        self._codes.issue(_digest(code), trio.current_time() + expires_s)
        logger.info("a code for one page was made; it serves for %.0f s", expires_s)
        link = PairLink(code, self._peer_id, tuple(own)).to_text()
        return PhoneInvite(link, host, expires_s, is_local=host_is_loopback(own[0]))

    async def serve(self, stream: Stream) -> None:
        """One page's ask. Cancel-safety: the stream must be reset; a code that was used stays used by that peer."""
        if self._pairing >= PAIRING_MAX:
            raise Misbehaved(RejectReason.TOO_MANY, f"{PAIRING_MAX} peers are pairing already")
        self._pairing += 1
        try:
            with trio.fail_after(PAIR_TIMEOUT_S):
                answer = self._answer(stream.peer, await self._ask_of(stream))
                body = refusal_bytes(answer) if isinstance(answer, PairRefusal) else answer.to_bytes()
                await stream.write(len(body).to_bytes(_LENGTH_BYTES, "little"), body)
        except trio.TooSlowError as error:
            raise Unreachable(f"{stream.peer} did not finish pairing in {PAIR_TIMEOUT_S:g} s") from error
        finally:
            self._pairing -= 1

    async def _ask_of(self, stream: Stream) -> PairAsk:
        """What is no ask counts as a wrong code; raises Misbehaved for it."""
        try:
            length = int.from_bytes(await read_exactly(stream.read, _LENGTH_BYTES), "little")
            if length > ASK_BYTES_MAX:
                text = f"{stream.peer} asks for a pass in {length} bytes; at most {ASK_BYTES_MAX} are read"
                raise Misbehaved(RejectReason.TOO_LARGE, text)
            return PairAsk.from_bytes(await read_exactly(stream.read, length))
        except Misbehaved as error:
            self._codes.note_wrong(stream.peer, self._address_of(stream.peer), trio.current_time())
            self._log_refusal(stream.peer, str(error))
            raise

    def _answer(self, peer: PeerId, ask: PairAsk) -> GuestPass | PairRefusal:
        refusal = self._judge(peer, ask)
        if refusal is not None:
            self._log_refusal(peer, f"its code is refused ({refusal})")
            return refusal
        logger.info("a page that calls itself %r is a guest from now on, as peer %s", ask.name, peer)
        return make_pass(self._keys(), peer, tuple(_for_pages(self._hubs(), self._outward_host())))

    def _judge(self, peer: PeerId, ask: PairAsk) -> PairRefusal | None:
        if self._refusal_of(peer) is not None:
            return PairRefusal.UNWANTED
        return self._codes.redeem(_digest(ask.code), peer, self._address_of(peer), trio.current_time())

    def _log_refusal(self, peer: PeerId, why: str) -> None:
        level = logging.WARNING if self._refusal_lines.is_time(trio.current_time()) else logging.DEBUG
        logger.log(level, "no pass for peer %s at %s: %s", peer, self._address_of(peer) or "an unknown address", why)


def _digest(code: bytes) -> bytes:
    return hashlib.sha256(code).digest()


def _for_pages(addresses: Sequence[str], host: str) -> list[str]:
    """Those that a page can dial, in the order in which it should: at `host` first, this machine's loopback last."""
    found = dict.fromkeys(text for each in addresses if (text := ws_address(each)) is not None)
    return sorted(found, key=lambda text: (host_is_loopback(text), text.split("/")[2] != host))
