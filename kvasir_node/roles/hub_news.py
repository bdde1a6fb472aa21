"""What one hub tells the others that it is connected to: how many leases it has that are not proven, slice by slice.

This is all that a hub ever says unasked, and it says it to hubs alone, so that they do not grant the same slice again.
It goes beside the gossiped tables because it must be quick, while every node of the swarm pays for a table. It does not
know what leases are, nor what the others make of it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

import trio

from kvasir_node.base.errors import KvasirError
from kvasir_node.base.ids import PeerId
from kvasir_node.decide.market_books import Key
from kvasir_node.wire.lists import LeaseCount
from kvasir_node.wire.messages import HubGreeting, HubNews, MarketMethod

logger = logging.getLogger(__name__)

TELL_S = 0.25  # between two looks at what is new
HEARTBEAT_S = 10.0  # other hubs hear at least this often, or they forget us (MarketLimits.told_ttl_s)

AskHub = Callable[[PeerId, MarketMethod, bytes], Awaitable[bytes | memoryview]]
"""One request to a hub; raises PeerError."""


class HubNewsTeller:
    """See the module. `news` gives what has changed since it was last called, `all_news` everything."""

    def __init__(
        self,
        epoch: int,
        *,
        news: Callable[[], Mapping[Key, int]],
        all_news: Callable[[], Mapping[Key, int]],
        hubs: Callable[[], Sequence[PeerId]],
        ask_hub: AskHub,
    ) -> None:
        self._epoch = epoch
        self._news = news
        self._all_news = all_news
        self._hubs = hubs
        self._ask_hub = ask_hub
        self._knowing: dict[PeerId, int] = {}  # hubs that have heard all, and the epoch of each
        self._under_way: set[PeerId] = set()
        self._missed: set[PeerId] = set()  # of these, hubs that must hear all: there were news meanwhile

    async def run(self) -> None:
        """Tells until cancelled. One message to a hub at a time: who does not answer hears all again later."""
        told_at = float("-inf")
        async with trio.open_nursery() as nursery:
            while True:
                news, now = self._news(), trio.current_time()
                is_beat = now - told_at >= HEARTBEAT_S
                told_at = now if is_beat or news else told_at
                for hub, message in self._due(news, is_beat=is_beat):
                    self._under_way.add(hub)
                    nursery.start_soon(self._tell, hub, message)
                await trio.sleep(TELL_S)

    def _due(self, news: Mapping[Key, int], *, is_beat: bool) -> list[tuple[PeerId, HubNews]]:
        hubs = self._hubs()
        self._knowing = {hub: epoch for hub, epoch in self._knowing.items() if hub in hubs}
        found: list[tuple[PeerId, HubNews]] = []
        for hub in hubs:
            if hub in self._under_way:
                if news:
                    self._missed.add(hub)
            elif hub not in self._knowing:
                found.append((hub, HubNews(self._epoch, True, lease_counts(self._all_news()))))
            elif news or is_beat:
                found.append((hub, HubNews(self._epoch, False, lease_counts(news))))
        return found

    async def _tell(self, hub: PeerId, message: HubNews) -> None:
        try:
            answer = await self._ask_hub(hub, MarketMethod.TELL, message.to_bytes())
            epoch = HubGreeting.from_bytes(answer).epoch
            # A delta is worth nothing to a hub that was restarted since it heard all.
            if hub not in self._missed and (message.is_all or self._knowing.get(hub) == epoch):
                self._knowing[hub] = epoch
            else:
                self._knowing.pop(hub, None)
        except KvasirError as error:
            logger.debug("hub %s was not told: %s", hub, error)
            self._knowing.pop(hub, None)
        finally:
            self._under_way.discard(hub)
            self._missed.discard(hub)


def lease_counts(counts: Mapping[Key, int]) -> tuple[LeaseCount, ...]:
    return tuple(sorted((*key, count) for key, count in counts.items()))


def counts_of(leases: Sequence[LeaseCount]) -> dict[Key, int]:
    return {(coordinator, model, part): count for coordinator, model, part, count in leases}
