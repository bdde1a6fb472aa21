"""Reaching one peer by several addresses: which to try when, and the race between them.

It does not know Noise, Yamux or who is connected already: whoever calls it says how one address is tried.
Ordering after RFC 8305 ("Happy Eyeballs"), section 4: families take turns, the next attempt starts a quarter of a
second after the last one, or at once when one fails.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Generic, TypeVar

import trio
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from kvasir_node.base.errors import KvasirError, Unreachable, UsageError
from kvasir_node.base.ids import PeerId

STAGGER_S = 0.25
DIRECT_HEADSTART_S = 1.0  # direct addresses are tried so long before a relay is asked, unless all of them failed
DISCARD_S = 1.0  # a connection nobody wants may take this long to close
ADDRESSES_MAX = 16  # of one peer; more are not tried ...
RELAYED_MAX = 4  # ... of which so many may go through relays
_HOST_PROTOCOLS = ("ip4", "ip6", "dns", "dns4", "dns6")
_REASONS = {
    errno.ECONNREFUSED: "connection refused",
    errno.ENETUNREACH: "no route",
    errno.EHOSTUNREACH: "no route",
    errno.ETIMEDOUT: "timed out",
    errno.ECONNRESET: "connection reset",
    errno.EADDRNOTAVAIL: "no route",
    errno.EAFNOSUPPORT: "this machine has no such address family",
}

Connected = TypeVar("Connected")


@dataclass(frozen=True, slots=True)
class DialAddress:
    """One address of a peer. `refusal` says why it cannot be dialled; empty when it can."""

    text: str
    host: str = ""
    port: int = 0
    is_ipv6: bool = False
    is_websocket: bool = False
    refusal: str = ""
    relay: PeerId | None = None  # the peer is reached through it, and it by `relay_address`, if that is not empty
    relay_address: str = ""


def parse_addresses(addresses: Sequence[str]) -> tuple[PeerId, list[DialAddress]]:
    """The one peer that all addresses name, and the addresses, each once and in order.

    Raises UsageError for a malformed address, one without /p2p/PEER, or addresses of different peers.
    """
    parsed = [_parse_address(text) for text in dict.fromkeys(addresses)]
    peers = {peer for peer, _ in parsed}
    if len(peers) != 1:
        named = ", ".join(sorted(peers)) or "none"
        raise UsageError(f"the addresses of one connection must name one peer; these name {named}")
    return peers.pop(), [address for _, address in parsed]


def _parse_address(text: str) -> tuple[PeerId, DialAddress]:
    try:
        parts = [(protocol.name, value) for protocol, value in Multiaddr(text).items()]
    except (MultiaddrError, ValueError, TypeError, KeyError) as error:
        raise UsageError(f"not a multiaddr: {text[:200]!r} ({error}); expected /ip4/HOST/tcp/PORT/p2p/PEER") from error
    if not parts or parts[-1][0] != "p2p" or not parts[-1][1]:
        raise UsageError(f"{text[:200]} names no peer; expected it to end with /p2p/PEER")
    peer = PeerId(str(parts[-1][1]))
    names = [name for name, _ in parts[:-1]]
    if names[-1:] == ["p2p-circuit"]:
        return peer, _circuit_address(text)
    if not names:
        return peer, DialAddress(text, refusal="names a peer, but no place to find it")
    if names[0] not in _HOST_PROTOCOLS or names[1:] not in (["tcp"], ["tcp", "ws"]):
        return peer, DialAddress(text, refusal="neither a plain TCP nor a WebSocket address")
    host, port = str(parts[0][1]), int(str(parts[1][1]))
    if names[0] in ("ip4", "ip6") and ipaddress.ip_address(host).is_unspecified:
        return peer, DialAddress(text, refusal="an unspecified address is nobody's")
    is_ipv6, is_websocket = names[0] in ("ip6", "dns6"), names[-1] == "ws"
    return peer, DialAddress(text, host, port, is_ipv6=is_ipv6, is_websocket=is_websocket)


def _circuit_address(text: str) -> DialAddress:
    """RELAY/p2p-circuit/p2p/PEER; the relay's part may be its id alone."""
    relay_text = text.rpartition("/p2p-circuit/")[0]
    relay, address = _parse_address(relay_text)
    if address.relay is not None:
        return DialAddress(text, refusal="goes through two relays")
    return DialAddress(text, relay=relay, relay_address="" if address.refusal else relay_text)


def plan_dials(addresses: Sequence[DialAddress]) -> list[DialAddress]:
    """The order to start attempts in: IPv4 and IPv6 in turn, IPv4 first, otherwise as given; at most 16.

    A WebSocket is only tried where no plain address has its host and port, and after all plain ones; relays come last.
    """
    relayed = [address for address in addresses if address.relay is not None and not address.refusal]
    usable = [address for address in addresses if not address.refusal and address.relay is None]
    plain = {(address.host, address.port) for address in usable if not address.is_websocket}
    usable = [address for address in usable if not address.is_websocket or (address.host, address.port) not in plain]
    usable.sort(key=lambda address: address.is_websocket)
    turns = zip_longest((a for a in usable if not a.is_ipv6), (a for a in usable if a.is_ipv6))
    direct = [address for address in chain.from_iterable(turns) if address is not None]
    return [*direct[: ADDRESSES_MAX - len(relayed[:RELAYED_MAX])], *relayed[:RELAYED_MAX]]


async def dial_first(
    peer: PeerId,
    addresses: Sequence[DialAddress],
    attempt: Callable[[DialAddress], Awaitable[Connected]],
    discard: Callable[[Connected], Awaitable[None]],
    *,
    timeout_s: float,
) -> Connected:
    """The first connection that succeeds; every other one is cancelled or given to `discard`.

    `attempt` must leave nothing behind when it is cancelled. `timeout_s` holds for each address.
    Raises Unreachable with the reason of every address. Cancel-safety: nothing is left open.
    """
    race = _Race(attempt, discard, timeout_s)
    for address in addresses:
        if address.refusal:
            race.failures[address.text] = address.refusal
    await race.run(plan_dials(addresses))
    if race.winner is not None:
        return race.winner
    reasons = "; ".join(f"{a.text}: {race.failures.get(a.text, 'not tried')}" for a in addresses) or "no addresses"
    raise Unreachable(f"no connection to {peer}: {reasons}")


class _Race(Generic[Connected]):
    def __init__(
        self,
        attempt: Callable[[DialAddress], Awaitable[Connected]],
        discard: Callable[[Connected], Awaitable[None]],
        timeout_s: float,
    ) -> None:
        self.failures: dict[str, str] = {}
        self.winner: Connected | None = None
        self._attempt = attempt
        self._discard = discard
        self._timeout_s = timeout_s

    async def run(self, order: Sequence[DialAddress]) -> None:
        try:
            async with trio.open_nursery() as nursery:
                direct: list[trio.Event] = []
                for address in order:
                    if address.relay is not None:
                        await self._give_headstart(direct)
                        direct.clear()
                    failed = trio.Event()
                    nursery.start_soon(self._try, address, failed, nursery.cancel_scope)
                    direct.append(failed)
                    with trio.move_on_after(STAGGER_S):
                        await failed.wait()
        except BaseException:
            if self.winner is not None:
                await self._discard_shielded(self.winner)
            raise

    async def _give_headstart(self, direct: Sequence[trio.Event]) -> None:
        with trio.move_on_after(DIRECT_HEADSTART_S):
            for failed in direct:
                await failed.wait()

    async def _try(self, address: DialAddress, failed: trio.Event, race: trio.CancelScope) -> None:
        try:
            with trio.move_on_after(self._timeout_s) as waiting:
                connected = await self._attempt(address)
                if self.winner is not None:
                    await self._discard_shielded(connected)
                    return
                self.winner = connected
                race.cancel()
                return
            if waiting.cancelled_caught:
                self.failures[address.text] = f"timed out after {self._timeout_s:g} s"
        except Exception as error:  # libp2p's upgrade raises anything; one address's failure must not end the race
            self.failures[address.text] = describe_failure(error)
        failed.set()

    async def _discard_shielded(self, connected: Connected) -> None:
        with trio.move_on_after(DISCARD_S) as discarding:
            discarding.shield = True
            await self._discard(connected)


def describe_failure(error: BaseException) -> str:
    """A few words for a person, from the innermost cause that has some."""
    if isinstance(error, KvasirError):
        return str(error)
    for cause in _causes(error):
        if isinstance(cause, socket.gaierror):
            return "the name is not known"
        if isinstance(cause, OSError) and cause.errno in _REASONS:
            return _REASONS[cause.errno]
        if type(cause).__name__ == "PeerIDMismatchesPubkey":
            return "another peer answers there"
    return f"{type(error).__name__}: {str(error)[:120]}" if str(error) else type(error).__name__


def _causes(error: BaseException) -> list[BaseException]:
    """The error, its causes and the members of its groups, outermost first."""
    found, waiting = [], [error]
    while waiting and len(found) < 32:
        current = waiting.pop(0)
        found.append(current)
        if isinstance(current, BaseExceptionGroup):
            waiting.extend(current.exceptions)
        waiting.extend(cause for cause in (current.__cause__, current.__context__) if cause is not None)
    return found
