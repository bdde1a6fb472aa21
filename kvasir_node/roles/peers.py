"""Who is in the swarm with us: the members' names, roles and addresses, and the hubs among them.

It does not know what any role does. `Joiner` keeps the connections that the settings ask for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import trio

from kvasir_node.base.errors import Misbehaved, Unreachable, UsageError
from kvasir_node.base.ids import PeerId
from kvasir_node.net.hello import Membership
from kvasir_node.net.transport import Transport
from kvasir_node.wire.messages import About

logger = logging.getLogger(__name__)

NAMES_MAX = 4096
JOIN_PAUSE_S = 1.0  # after a failed attempt; doubles ...
JOIN_PAUSE_MAX_S = 30.0  # ... up to this
JOIN_CHECK_S = 1.0  # a connection that was lost is noticed within this


class Peers:
    """Members that are connected now. `hubs_changed` hears the hubs, ourselves first if we are one."""

    def __init__(
        self, membership: Membership, own: PeerId, *, is_hub: bool, hubs_changed: Callable[[tuple[PeerId, ...]], None]
    ) -> None:
        self._membership = membership
        self._own = (own,) if is_hub else ()
        self._hubs_changed = hubs_changed
        self._about: dict[PeerId, About] = {}
        self._names: dict[PeerId, str] = {}  # also of those that left: a report on a lost worker should name it
        self._events = membership.watch()

    async def run(self) -> None:
        """Follows the membership until cancelled."""
        self._refresh()
        async for _ in self._events:
            self._refresh()

    def _refresh(self) -> None:
        before = self.hubs()
        self._about = {}
        for peer in self._membership.members():
            try:
                self._about[peer] = About.from_bytes(self._membership.about(peer))
                self._remember(peer, self._about[peer].name)
            except (Unreachable, Misbehaved) as error:
                logger.warning("member %s says nothing readable about itself: %s", peer, error)
        if self.hubs() != before or not before:
            self._hubs_changed(self.hubs())

    def _remember(self, peer: PeerId, name: str) -> None:
        self._names.pop(peer, None)
        self._names[peer] = name  # newest last
        if len(self._names) > NAMES_MAX:
            del self._names[next(iter(self._names))]

    def hubs(self) -> tuple[PeerId, ...]:
        return (*self._own, *(peer for peer, about in self._about.items() if "hub" in about.roles))

    def about(self) -> dict[PeerId, About]:
        return dict(self._about)

    def name_of(self, peer: PeerId) -> str:
        return self._names.get(peer) or f"…{peer[-8:]}"


@dataclass(frozen=True, slots=True)
class JoinTarget:
    """One peer to be connected to, and where."""

    peer: PeerId
    addresses: tuple[str, ...]


def join_targets(addresses: Sequence[str]) -> tuple[JoinTarget, ...]:
    """Groups multiaddrs by the peer they end in; raises UsageError for one that names no peer."""
    by_peer: dict[PeerId, list[str]] = {}
    for address in addresses:
        _, found, peer = address.rpartition("/p2p/")
        if not found or not address.startswith("/"):
            raise UsageError(
                f"--join takes a ticket (kvasir1…) or an address that ends in /p2p/PEER; got {address[:80]!r}"
            )
        by_peer.setdefault(PeerId(peer), []).append(address)
    return tuple(JoinTarget(peer, tuple(found)) for peer, found in by_peer.items())


class Joiner:
    """Keeps connected to the targets, each by itself, with growing pauses; tells why one is not."""

    def __init__(self, transport: Transport, targets: Sequence[JoinTarget]) -> None:
        self._transport = transport
        self._targets = [target for target in targets if target.peer != transport.peer_id]
        self._problems: dict[PeerId, str] = {}

    def warnings(self) -> tuple[str, ...]:
        return tuple(self._problems.values())

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            for target in self._targets:
                nursery.start_soon(self._keep, target)

    async def _keep(self, target: JoinTarget) -> None:
        pause_s = JOIN_PAUSE_S
        while True:
            try:
                await self._transport.connect(target.addresses)
                self._problems.pop(target.peer, None)
                pause_s = JOIN_PAUSE_S
                await trio.sleep(JOIN_CHECK_S)
            except Unreachable as error:
                self._problems[target.peer] = f"cannot reach {target.peer}: {error}"
                logger.warning("%s; trying again in %.0f s", self._problems[target.peer], pause_s)
                await trio.sleep(pause_s)
                pause_s = min(JOIN_PAUSE_MAX_S, 2 * pause_s)
