"""All ways in which a node finds its swarm, wired in one place: the ticket's addresses, remembered members, hubs that
tables tell of, the local network, and a DHT.

Clocks are compared with the hubs that were found. It does not know any of them from within, nor what a found hub is
good for.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from kvasir_node.base.ids import PeerId
from kvasir_node.base.settings import Settings, data_dir_of
from kvasir_node.net.hello import Membership
from kvasir_node.net.identity import KEY_FILE_NAME
from kvasir_node.net.listen_address import is_loopback
from kvasir_node.net.mdns import LanSearch
from kvasir_node.net.transport import Transport
from kvasir_node.roles.clocks import Clocks
from kvasir_node.roles.hub_search import HubSearch
from kvasir_node.roles.member_file import FILE_NAME as MEMBER_FILE_NAME
from kvasir_node.roles.member_file import MemberFile
from kvasir_node.roles.peers import Joiner, Peers, RequireMember, join_targets
from kvasir_node.roles.remembered import Remembered
from kvasir_node.roles.rendezvous import Rendezvous
from kvasir_node.roles.swarm_key import SwarmKey
from kvasir_node.wire.swarm_keys import HUB, swarm_id

Part = tuple[str, Callable[[], Awaitable[None]]]
"""What it is, for a report of its end, and what runs it until cancelled."""


class Finding:
    """See the module. `peers` knows the hubs that are members and connected now."""

    def __init__(
        self,
        settings: Settings,
        transport: Transport,
        membership: Membership,
        peers: Peers,
        require_member: RequireMember,
        swarm: SwarmKey,
    ) -> None:
        self._settings = settings
        self._transport = transport
        self._peers = peers
        self._swarm = swarm_id(swarm.secret)
        rng = random.Random(transport.peer_id)  # another for each node, which is all that matters
        self.joiner = Joiner(transport, join_targets(swarm.join), require_member, rng)
        self._search = HubSearch(transport, peers.hubs, require_member, rng)
        file = MemberFile(data_dir_of(settings) / MEMBER_FILE_NAME, self._swarm)
        self._rendezvous = Rendezvous(
            settings.network,
            data_dir_of(settings) / KEY_FILE_NAME,
            transport.peer_id,
            swarm.valid_keys,
            peers.hubs,
            transport.addresses,
            partial(self._search.heard, is_hint=True),
        )
        self.clocks = Clocks(transport, membership, peers.hubs, is_hub=HUB in settings.node.roles)
        self._remembered = Remembered(transport, membership, peers, require_member, file, self._search.heard)

    def parts(self) -> list[Part]:
        """All that must run."""
        parts: list[Part] = [
            ("joining", self.joiner.run),
            ("the search for hubs", self._search.run),
            ("the memory of members", self._remembered.run),
            ("the comparison of clocks", self.clocks.run),
        ]
        network = self._settings.network
        if network.dht:
            parts.append(("the meeting place in the DHT", self._rendezvous.run))
        if network.mdns and not all(map(is_loopback, network.listen)):
            parts.append(("the search on the local network", self._lan_search().run))
        return parts

    def _lan_search(self) -> LanSearch:
        announced = self._transport.addresses if HUB in self._settings.node.roles else tuple
        return LanSearch(self._swarm, self._transport.peer_id, partial(self._search.heard, is_hint=True), announced)

    def hub_told(self, hub: PeerId, addresses: Sequence[str]) -> None:
        """A hub's table says where it is."""
        self._search.heard(hub, addresses)
        self._remembered.hub_told(hub, addresses)

    def way_to_hubs(self) -> str:
        """What is being done about having no hub, or what can be done, in words."""
        if trying := self.joiner.trying():
            return f"trying {', '.join(self._peers.name_of(peer) for peer in trying)}"
        if self.joiner.targets:
            return "no peer that was joined is a hub, so it waits for one"
        return "join a swarm with --join TICKET"
