"""A meeting place of the swarm in a DHT of its owner's choice (`network.dht`): hubs say there where they are, and nodes
that have no hub look there.

It does not know how a DHT is asked (net/kad). The key is made of the swarm's secret, so that only members know where to
look; whoever keeps the record sees the addresses of hubs, and that they belong together, and no more. What is found is
a hint: it is dialled, and who answers must prove to be of the swarm.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import trio

from kvasir_node.base.errors import KvasirError
from kvasir_node.base.ids import PeerId
from kvasir_node.base.settings import NetworkSettings
from kvasir_node.decide.patience import Patience
from kvasir_node.decide.reach import host_of, is_lan
from kvasir_node.net.kad import open_kad, read_nodes
from kvasir_node.wire.swarm_keys import SwarmKeys

logger = logging.getLogger(__name__)

TURN_S = 1.0
LONELY_S = 3.0  # without a hub, before the DHT is asked
PAUSE_S = 5.0  # between look-ups that led to no hub; doubles ...
PAUSE_MAX_S = 300.0  # ... up to this
ANNOUNCE_S = 1800.0  # nodes of a DHT keep a record for a day or two, and come and go
ANNOUNCE_LEAST_S = 30.0  # between two, though our addresses change
_MULTIHASH_SHA2_256 = bytes((0x12, 0x20))


def meeting_key(keys: SwarmKeys) -> bytes:
    """Where in a DHT the swarm meets: as long as its secret is this one."""
    return _MULTIHASH_SHA2_256 + hmac.digest(keys.entry, b"kvasir-node/dht/1", "sha256")


def told_addresses(addresses: Sequence[str]) -> tuple[str, ...]:
    """Those that strangers may keep for us: outside ones, or where there are none what the local network can use."""
    plain = [each for each in addresses if "/ws" not in each]
    outside = [each for each in plain if host_of(each) and not is_lan(host_of(each))]
    return tuple(outside or plain)


class Rendezvous:
    """See the module. `hubs` are those connected now, maybe with ourselves; `found` hears of a hub."""

    def __init__(
        self,
        settings: NetworkSettings,
        key_path: Path,
        own: PeerId,
        keys: Callable[[], Sequence[SwarmKeys]],
        hubs: Callable[[], Sequence[PeerId]],
        addresses: Callable[[], Sequence[str]],
        found: Callable[[PeerId, Sequence[str]], None],
    ) -> None:
        """Raises UsageError for nodes of the DHT that cannot be read."""
        read_nodes(settings.dht)
        self._settings = settings
        self._key_path = key_path
        self._own = own
        self._keys = keys
        self._hubs = hubs
        self._addresses = addresses
        self._found = found
        self._search = Patience(PAUSE_S)
        self._announcing = Patience(PAUSE_S)
        self._told: tuple[str, ...] = ()
        self._told_at = -ANNOUNCE_S

    async def run(self) -> None:
        """Until cancelled."""
        lonely_since = trio.current_time()
        while True:
            await trio.sleep(TURN_S)
            now, hubs = trio.current_time(), self._hubs()
            if any(hub != self._own for hub in hubs):
                lonely_since = now
                self._search.succeeded(PAUSE_S, now)
            elif now - lonely_since >= LONELY_S and self._search.allows(now):
                await self._look()
            if self._own in hubs and self._announcing.allows(now) and self._is_due(now):
                await self._announce()

    def _is_due(self, now: float) -> bool:
        is_moved = told_addresses(self._addresses()) != self._told
        return now - self._told_at >= (ANNOUNCE_LEAST_S if is_moved else ANNOUNCE_S)

    async def _look(self) -> None:
        try:
            async with open_kad(self._settings, self._key_path, self._settings.dht) as kad:
                for keys in self._keys():
                    for provider in await kad.find(meeting_key(keys)):
                        logger.debug("the DHT names %s as a hub", provider.peer)
                        self._found(provider.peer, provider.addresses)
        except KvasirError as error:
            logger.info("no hub was found in the DHT: %s", error)
        self._search.failed(trio.current_time(), PAUSE_MAX_S)  # until a hub is connected it has led to none

    async def _announce(self) -> None:
        addresses = told_addresses(self._addresses())
        try:
            async with open_kad(self._settings, self._key_path, self._settings.dht) as kad:
                taken = min([await kad.provide(meeting_key(keys), addresses) for keys in self._keys()])
        except KvasirError as error:
            logger.info("the DHT was not told where this hub is: %s", error)
            self._announcing.failed(trio.current_time(), PAUSE_MAX_S)
        else:
            logger.info("%d nodes of the DHT know where this hub is", taken)
            self._told, self._told_at = addresses, trio.current_time()
            self._announcing.succeeded(PAUSE_S, self._told_at)
