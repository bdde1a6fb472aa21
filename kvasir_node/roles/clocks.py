"""How far this machine's clock is from those of the hubs: they are asked when they are met, and again now and then.

It does not know how (net/clock_probe), nor who is right: with several hubs the middle one counts.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import trio

from kvasir_node.base.errors import KvasirError
from kvasir_node.base.ids import PeerId
from kvasir_node.net.clock_probe import CLOCK_PROTOCOL, ClockReading, Wall, ask_clock, serve_clock
from kvasir_node.net.hello import Membership
from kvasir_node.net.transport import Transport

logger = logging.getLogger(__name__)

LOOK_S = 2.0
AGAIN_S = 600.0
HUBS_MAX = 8


class Clocks:
    """See the module. `hubs` are members and connected now, maybe with ourselves among them; a hub answers, too."""

    def __init__(
        self,
        transport: Transport,
        membership: Membership,
        hubs: Callable[[], Sequence[PeerId]],
        *,
        is_hub: bool,
        wall: Wall = time.time,
    ) -> None:
        self._transport = transport
        self._hubs = hubs
        self._wall = wall
        self._asked_at: dict[PeerId, float] = {}
        self._readings: dict[PeerId, ClockReading] = {}
        if is_hub:
            transport.set_handler(CLOCK_PROTOCOL, membership.guard(partial(serve_clock, wall=wall)))

    @property
    def ahead_s(self) -> float | None:
        """Our clock before the middle one of the hubs' clocks; None while no hub has told."""
        if not self._readings:
            return None
        return round(-statistics.median(each.ahead_s for each in self._readings.values()), 3)

    @property
    def doubt_s(self) -> float:
        """How much of that may be the way there and back."""
        return round(max((each.doubt_s for each in self._readings.values()), default=0.0), 3)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            hubs = [hub for hub in self._hubs() if hub != self._transport.peer_id][:HUBS_MAX]
            self._readings = {hub: each for hub, each in self._readings.items() if hub in hubs}
            self._asked_at = {hub: at for hub, at in self._asked_at.items() if hub in hubs}
            for hub in hubs:
                if trio.current_time() - self._asked_at.get(hub, -AGAIN_S) >= AGAIN_S:
                    self._asked_at[hub] = trio.current_time()
                    await self._ask(hub)
            await trio.sleep(LOOK_S)

    async def _ask(self, hub: PeerId) -> None:
        try:
            self._readings[hub] = await ask_clock(self._transport, hub, self._wall)
        except KvasirError as error:
            logger.debug("hub %s does not tell its time: %s", hub, error)
