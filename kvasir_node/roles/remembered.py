"""Remembers the members that a node meets, and finds the swarm again by them when no hub can be had otherwise.

It does not know which are kept, or tried when (decide/remembering), nor their file. A member that is no hub leads to
the hubs, too: their tables come through it by gossip.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import trio

from kvasir_node.base.errors import PeerError, UsageError
from kvasir_node.base.ids import PeerId
from kvasir_node.decide.remembering import KnownMember, Remembering, best_addresses
from kvasir_node.net.hello import MemberJoined, Membership
from kvasir_node.net.transport import Transport
from kvasir_node.roles.download import RunBlocking
from kvasir_node.roles.member_file import MemberFile
from kvasir_node.roles.peers import Peers, RequireMember
from kvasir_node.wire.swarm_keys import HUB

logger = logging.getLogger(__name__)

LOOK_S = 1.0  # how often the list is looked at, and kept if it has changed


class Remembered:
    """See the module. `found_hub` hears of the hubs of an earlier life, once."""

    def __init__(
        self,
        transport: Transport,
        membership: Membership,
        peers: Peers,
        require_member: RequireMember,
        file: MemberFile,
        found_hub: Callable[[PeerId, Sequence[str]], None],
        run_blocking: RunBlocking = trio.to_thread.run_sync,
    ) -> None:
        self._transport = transport
        self._membership = membership
        self._peers = peers
        self._require_member = require_member
        self._file = file
        self._found_hub = found_hub
        self._run_blocking = run_blocking
        self._mind = Remembering()
        self._is_changed = False
        self._events = membership.watch()

    @property
    def count(self) -> int:
        return len(self._mind.members)

    async def run(self) -> None:
        """Until cancelled; what is not kept by then is at most a second old."""
        self._mind.recall(await self._run_blocking(self._file.read))
        for peer, known in self._mind.members.items():
            if known.is_hub:
                self._found_hub(peer, known.addresses)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._follow)
            while True:
                connected, hubs = self._membership.members(), self._peers.hubs()
                # A hub that has anyone is in the swarm, and others find it by him.
                has_hub = any(hub in connected for hub in hubs) or (self._transport.peer_id in hubs and bool(connected))
                for peer in self._mind.due(connected, has_hub=has_hub, now=trio.current_time()):
                    nursery.start_soon(self._try, peer)
                if self._is_changed:
                    self._is_changed = False
                    await self._run_blocking(self._file.write, dict(self._mind.members))
                await trio.sleep(LOOK_S)

    async def _follow(self) -> None:
        for peer in self._membership.members():
            self._met(peer)
        async for event in self._events:
            if isinstance(event, MemberJoined):
                self._met(event.peer)

    def hub_told(self, hub: PeerId, addresses: Sequence[str]) -> None:
        """A hub's table says where it is now; kept of a hub that we have met."""
        known = self._mind.members.get(hub)
        if known is not None and self._membership.is_member(hub):
            self._met(hub, addresses)

    def _met(self, peer: PeerId, told: Sequence[str] | None = None) -> None:
        about = self._peers.about_of(peer)
        way = next((each for each in self._transport.connections() if each.peer == peer), None)
        if about is None or way is None:
            return
        is_dialled = not way.inbound and way.path == "direct"
        dialled, seen_from = (way.address, "") if is_dialled else ("", way.address)
        addresses = best_addresses(peer, dialled, seen_from, about.addresses if told is None else told)
        self._is_changed |= self._mind.met(peer, KnownMember(addresses, HUB in about.roles))

    async def _try(self, peer: PeerId) -> None:
        try:
            await self._transport.connect(self._mind.members[peer].addresses)
            await self._require_member(peer)
            logger.info("found member %s again", peer)
            self._mind.joined(peer)
        except (PeerError, UsageError) as error:
            logger.debug("member %s that was met before cannot be joined: %s", peer, error)
            self._mind.failed(peer, trio.current_time())
