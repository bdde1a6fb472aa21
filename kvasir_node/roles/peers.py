"""Who is in the swarm with us: the members' names, roles and addresses, and the hubs among them.

It does not know what any role does. `Joiner` keeps the connections that the settings ask for.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

import trio

from kvasir_node.base.errors import Misbehaved, PeerError, Unreachable, UsageError
from kvasir_node.base.ids import PeerId
from kvasir_node.net.dialler import parse_addresses
from kvasir_node.net.hello import MemberJoined, Membership
from kvasir_node.net.transport import Transport
from kvasir_node.wire.messages import About
from kvasir_node.wire.swarm_keys import SwarmKeys, has_role

logger = logging.getLogger(__name__)

NAMES_MAX = 4096
ECHO_MAX = 16  # characters of a mistyped ticket that are repeated: the rest may hold the swarm's secret
JOIN_PAUSE_S = 0.5  # after a failed attempt; doubles ...
JOIN_PAUSE_SHORT_S = 4.0  # ... up to this
JOIN_HASTE_S = 120.0  # ... and after so long without success
JOIN_PAUSE_MAX_S = 30.0  # ... up to this
JOIN_PAUSE_LEAST = 0.5  # of a pause, which is cut by chance: nodes that lost one hub do not come back all at once
JOIN_CHECK_S = 1.0  # a connection that was lost is noticed within this

RequireMember = Callable[[PeerId], Awaitable[None]]
"""Returns when the peer has proven its membership; raises PeerError."""


class Peers:
    """Members that are connected now. `hubs_changed` hears the hubs, ourselves first if we are one.

    It is also called when a hub joined anew that was here before: it may have been restarted and know nothing. A role
    that a member's ticket does not let it take is not believed (`keys`: of the secrets that count now).
    """

    def __init__(
        self,
        membership: Membership,
        own: PeerId,
        *,
        is_hub: bool,
        hubs_changed: Callable[[tuple[PeerId, ...]], None],
        keys: Callable[[], Sequence[SwarmKeys]],
    ) -> None:
        self._membership = membership
        self._keys = keys
        self._own = (own,) if is_hub else ()
        self._hubs_changed = hubs_changed
        self._about: dict[PeerId, About | None] = {}  # None: what it says cannot be read
        self._names: dict[PeerId, str] = {}  # also of those that left: a report on a lost worker should name it
        self._events = membership.watch()

    async def run(self) -> None:
        """Follows the membership until cancelled."""
        self._refresh()
        self._hubs_changed(self.hubs())
        async for event in self._events:
            before = self.hubs()
            if isinstance(event, MemberJoined):
                self._about.pop(event.peer, None)
            self._refresh()
            hubs = self.hubs()
            if hubs != before or (isinstance(event, MemberJoined) and event.peer in hubs):
                self._hubs_changed(hubs)

    def _refresh(self) -> None:
        """Reads what new members say, and forgets those that left: also when their events were lost."""
        members = self._membership.members()
        self._about = {peer: about for peer, about in self._about.items() if peer in set(members)}
        for peer in members:
            if peer not in self._about:
                self._about[peer] = self._read(peer)

    def _read(self, peer: PeerId) -> About | None:
        try:
            about = About.from_bytes(self._membership.about(peer))
        except (Unreachable, Misbehaved) as error:
            logger.warning("member %s says nothing readable about itself: %s", peer, error)
            return None
        self._remember(peer, about.name)
        roles = tuple(role for role in about.roles if has_role(self._keys(), peer, role, about.grants))
        if roles != about.roles:
            logger.warning("member %s (%s) claims roles that its ticket does not let it take", peer, about.name)
        return replace(about, roles=roles)

    def _remember(self, peer: PeerId, name: str) -> None:
        self._names.pop(peer, None)
        self._names[peer] = name  # newest last
        if len(self._names) > NAMES_MAX:
            del self._names[next(iter(self._names))]

    def hubs(self) -> tuple[PeerId, ...]:
        others = (peer for peer, about in self._about.items() if about is not None and "hub" in about.roles)
        return (*self._own, *others)

    def has_role(self, peer: PeerId, role: str) -> bool:
        """Whether a member is what it says, by its ticket; also of one whose joining was not looked at yet."""
        about = self.about_of(peer)
        return about is not None and role in about.roles

    def is_guest(self, peer: PeerId) -> bool:
        return self._membership.is_guest(peer)

    def about_of(self, peer: PeerId) -> About | None:
        """What a member says of itself, without roles that its ticket does not let it take; None = nothing readable."""
        return self._about.get(peer) or (self._read(peer) if self._membership.is_member(peer) else None)

    def about(self) -> dict[PeerId, About]:
        return {peer: about for peer, about in self._about.items() if about is not None}

    def name_of(self, peer: PeerId) -> str:
        return self._names.get(peer) or f"…{peer[-8:]}"


@dataclass(frozen=True, slots=True)
class JoinTarget:
    """One peer to be connected to, and where."""

    peer: PeerId
    addresses: tuple[str, ...]


def join_targets(addresses: Sequence[str]) -> tuple[JoinTarget, ...]:
    """Groups multiaddrs by the peer they end in; raises UsageError for one that cannot be read, or names no peer."""
    by_peer: dict[PeerId, list[str]] = {}
    for address in addresses:
        if not address.startswith("/"):
            shown = address if len(address) <= ECHO_MAX else f"{address[:ECHO_MAX]}…"
            raise UsageError(f"--join takes a ticket (kvasir1…) or an address that ends in /p2p/PEER; got {shown!r}")
        peer, _ = parse_addresses([address])
        by_peer.setdefault(peer, []).append(address)
    return tuple(JoinTarget(peer, tuple(found)) for peer, found in by_peer.items())


class Joiner:
    """Keeps connected to the targets, and in one swarm with them, each by itself; tells why one is not.

    Pauses grow, but stay short at first: a hub that is restarted should be found again before leases end.
    """

    def __init__(
        self,
        transport: Transport,
        targets: Sequence[JoinTarget],
        require_member: RequireMember,
        rng: random.Random,
    ) -> None:
        self._transport = transport
        self._targets = [target for target in targets if target.peer != transport.peer_id]
        self._require_member = require_member
        self._rng = rng
        self._problems: dict[PeerId, str] = {}
        self._joined: set[PeerId] = set()

    @property
    def targets(self) -> tuple[PeerId, ...]:
        return tuple(target.peer for target in self._targets)

    def trying(self) -> tuple[PeerId, ...]:
        """The targets that we are not in one swarm with now."""
        return tuple(peer for peer in self.targets if peer not in self._joined)

    def warnings(self) -> tuple[str, ...]:
        return tuple(self._problems.values())

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            for target in self._targets:
                nursery.start_soon(self._keep, target)

    async def _keep(self, target: JoinTarget) -> None:
        pause_s = JOIN_PAUSE_S
        lost_at: float | None = None
        while True:
            problem = await self._problem_of(target)
            if problem is None:
                self._problems.pop(target.peer, None)
                self._joined.add(target.peer)
                pause_s, lost_at = JOIN_PAUSE_S, None
                await trio.sleep(JOIN_CHECK_S)
                continue
            self._joined.discard(target.peer)
            now = trio.current_time()
            lost_at = now if lost_at is None else lost_at
            if self._problems.get(target.peer) != problem:
                logger.warning("%s; trying again", problem)
            self._problems[target.peer] = problem
            await trio.sleep(pause_s * self._rng.uniform(JOIN_PAUSE_LEAST, 1.0))
            pause_s = min(JOIN_PAUSE_MAX_S if now - lost_at > JOIN_HASTE_S else JOIN_PAUSE_SHORT_S, 2 * pause_s)

    async def _problem_of(self, target: JoinTarget) -> str | None:
        """Connects and waits for the mutual proof; why not, in words."""
        try:
            await self._transport.connect(target.addresses)
        except PeerError as error:
            reason = str(error).removeprefix(f"no connection to {target.peer}: ")
            return f"cannot reach {target.peer}: {reason}"
        try:
            await self._require_member(target.peer)
        except PeerError as error:
            return f"cannot join: {error}; a node joins with a ticket of that very swarm (`kvasir-node ticket` there)"
        return None
