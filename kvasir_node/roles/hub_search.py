"""Finds the hubs of the swarm beside those that the ticket names, so that losing one loses nothing.

Every hub's table travels by gossip and tells where that hub can be reached; a node dials the first few of them. So
nothing must be set, and a hub behind a home router is one, too: it dials the others, and whoever can be dialled is
found. It does not know what hubs say beyond that. All nodes prefer the same hubs, or a worker and a coordinator could
miss each other.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import trio

from kvasir_node.base.errors import PeerError, UsageError
from kvasir_node.base.ids import PeerId
from kvasir_node.net.transport import Transport
from kvasir_node.roles.peers import RequireMember
from kvasir_node.wire.readers import ADDRESSES_MAX

logger = logging.getLogger(__name__)

HUBS_KEPT = 4  # connections to hubs that a node looks for; two are enough to lose one, more cost every hub a connection
HUBS_HEARD_MAX = 64
HINTS_MAX = 16  # of them, those that were only heard of where strangers can speak
LOOK_S = 1.0  # how often the list is looked at
PAUSE_S = 2.0  # after a failed attempt; doubles ...
PAUSE_MAX_S = 120.0  # ... up to this: a hub that cannot be dialled is no fault, and stays in the list
FORGET_S = 600.0  # a hub whose tables do not come any more


@dataclass(slots=True)
class _Heard:
    addresses: tuple[str, ...]
    heard_at: float
    is_hint: bool = False
    retry_at: float = 0.0
    pause_s: float = PAUSE_S
    is_trying: bool = False


class HubSearch:
    """See the module. `hubs` tells which hubs are members and connected now."""

    def __init__(
        self,
        transport: Transport,
        hubs: Callable[[], Sequence[PeerId]],
        require_member: RequireMember,
        rng: random.Random,
    ) -> None:
        self._transport = transport
        self._hubs = hubs
        self._require_member = require_member
        self._rng = rng
        self._heard: dict[PeerId, _Heard] = {}

    def heard(self, hub: PeerId, addresses: Sequence[str], *, is_hint: bool = False) -> None:
        """A hub's table told where it is; only addresses that name the hub itself are believed. `is_hint`: no member
        said so, as on the local network; what a table told of the same hub stays."""
        own = tuple(address for address in addresses if address.endswith(f"/p2p/{hub}"))
        if hub == self._transport.peer_id or not own:
            return
        known = self._heard.get(hub)
        now = trio.current_time()
        if known is not None:
            addresses = (*own, *known.addresses) if is_hint and not known.is_hint else own
            known.addresses = tuple(dict.fromkeys(addresses))[:ADDRESSES_MAX]
            known.heard_at, known.is_hint = now, is_hint and known.is_hint
        elif len(self._heard) < HUBS_HEARD_MAX and not (is_hint and self._hints() >= HINTS_MAX):
            self._heard[hub] = _Heard(own, now, is_hint)

    def _hints(self) -> int:
        return sum(each.is_hint for each in self._heard.values())

    async def run(self) -> None:
        """Looks for hubs until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                for hub, known in self._next():
                    known.is_trying = True
                    nursery.start_soon(self._try, hub, known)
                await trio.sleep(LOOK_S)

    def _next(self) -> list[tuple[PeerId, _Heard]]:
        """Whom to dial now: as many as are lacking, in the same order everywhere, those that failed later."""
        now = trio.current_time()
        self._heard = {hub: known for hub, known in self._heard.items() if now - known.heard_at < FORGET_S}
        connected = {hub for hub in self._hubs() if hub != self._transport.peer_id}
        trying = sum(known.is_trying for known in self._heard.values())
        lacking = HUBS_KEPT - len(connected) - trying
        due = [
            (hub, known)
            for hub, known in sorted(self._heard.items())
            if hub not in connected and not known.is_trying and known.retry_at <= now
        ]
        return due[: max(0, lacking)]

    async def _try(self, hub: PeerId, known: _Heard) -> None:
        try:
            await self._transport.connect(known.addresses)
            await self._require_member(hub)
        except (PeerError, UsageError) as error:
            logger.debug("hub %s that was heard of cannot be joined: %s", hub, error)
            known.retry_at = trio.current_time() + known.pause_s * self._rng.uniform(0.5, 1.0)
            known.pause_s = min(PAUSE_MAX_S, 2 * known.pause_s)
        else:
            logger.info("found hub %s", hub)
            known.pause_s = PAUSE_S
        finally:
            known.is_trying = False
