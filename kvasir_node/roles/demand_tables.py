"""What a node believes of the demand tables that hubs gossip: the newest of each hub, and what they say together.

It does not know who listens to it, nor leases: it is the validator of a topic to which every member of the swarm, and
at the port even a stranger, can write. A table is taken, and passed on, only when

- a member sent it that may be a hub (wire/hub_proof) and its signature is that of the hub that published it;
- that hub did not send more than its share lately, which is looked at before anything dear is done;
- its clock is within bounds, and it is newer than what its hub said before;
- there is room: of hubs that we have not met ourselves only so many are believed, as a member may make up names.

So what strangers say, replays and floods change nothing.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import trio

from kvasir_node.base.errors import Misbehaved
from kvasir_node.base.ids import PeerId
from kvasir_node.base.rejections import Rejections
from kvasir_node.decide.rate import TokenBucket
from kvasir_node.wire.envelope import open_record
from kvasir_node.wire.hub_proof import HubProofs
from kvasir_node.wire.messages import TABLE_BYTES_MAX, DemandTable

logger = logging.getLogger(__name__)

TABLE_KIND = "table"
HUBS_MAX = 64
HUBS_UNMET_MAX = 16  # of them, hubs that we are not connected to
RATE_FACTOR = 2.0  # tables of one hub per interval in which it may send one: gossip delays some and not others


@dataclass(slots=True)
class _Hub:
    bucket: TokenBucket
    table: DemandTable | None = None
    good_until: float = -math.inf


class DemandTables:
    """See the module. `is_met` tells whether we are in one swarm with a peer, connected now."""

    def __init__(
        self,
        proofs: HubProofs,
        *,
        clock_skew_max_s: float,
        interval_min_s: float,
        is_met: Callable[[PeerId], bool],
        rejections: Rejections | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._proofs = proofs
        self._clock_skew_max_s = clock_skew_max_s
        self._tables_s = RATE_FACTOR / interval_min_s
        self._is_met = is_met
        self._rejections = rejections or Rejections()
        self._wall = wall
        self._hubs: dict[PeerId, _Hub] = {}
        self._skews: dict[PeerId, tuple[float, float]] = {}  # hub -> skew in s, told until

    def take(self, publisher: PeerId, data: bytes) -> bool:
        """A GossipValidator: keeps the table; False when it changes nothing."""
        try:
            sealed = self._proofs.open(publisher, data)
            hub = self._room_for(publisher)
            if hub is None or hub.bucket.wait_s(trio.current_time()) > 0:
                return False
            hub.bucket.spend(1, trio.current_time())
            record = open_record(TABLE_KIND, sealed, body_bytes_max=TABLE_BYTES_MAX)
            return record.issuer == publisher and self.keep(publisher, DemandTable.from_bytes(record.body))
        except Misbehaved as error:
            self._rejections.note(error)
            logger.debug("a table of %s was refused: %s", publisher, error)
            return False

    def keep(self, publisher: PeerId, table: DemandTable) -> bool:
        """Takes a table that is known to be its publisher's own."""
        hub = self._room_for(publisher)
        if hub is None:
            return False
        if hub.table is not None and (table.epoch, table.sequence) <= (hub.table.epoch, hub.table.sequence):
            return False
        skew_s = table.issued_at - self._wall()
        if abs(skew_s) > self._clock_skew_max_s:
            self._note_skew(publisher, skew_s, table.ttl_s)
            return False
        self._skews.pop(publisher, None)
        hub.table, hub.good_until = table, trio.current_time() + table.ttl_s
        return True

    def _room_for(self, publisher: PeerId) -> _Hub | None:
        known = self._hubs.get(publisher)
        if known is not None:
            return known
        self._forget_old()
        if not self._is_met(publisher):
            unmet = sum(1 for peer in self._hubs if not self._is_met(peer))
            if unmet >= HUBS_UNMET_MAX or len(self._hubs) >= HUBS_MAX:
                return None
        elif len(self._hubs) >= HUBS_MAX:
            unmet_hub = next((peer for peer in self._hubs if not self._is_met(peer)), None)
            if unmet_hub is None:
                return None
            del self._hubs[unmet_hub]
        hub = self._hubs[publisher] = _Hub(TokenBucket(self._tables_s))
        return hub

    def _forget_old(self) -> None:
        """An expired table says nothing, but its sequence is remembered for as long as a replay could pass as fresh."""
        remembered = trio.current_time() - 2 * self._clock_skew_max_s
        self._hubs = {
            peer: hub for peer, hub in self._hubs.items() if hub.table is not None and hub.good_until > remembered
        }

    def _note_skew(self, hub: PeerId, skew_s: float, ttl_s: float) -> None:
        self._skews.pop(hub, None)
        self._skews[hub] = (skew_s, trio.current_time() + ttl_s)
        if len(self._skews) > HUBS_MAX:
            del self._skews[next(iter(self._skews))]

    def skews(self) -> dict[PeerId, float]:
        """Hubs whose tables were lately refused for their clock: seconds that it is ahead of ours."""
        now = trio.current_time()
        return {hub: skew_s for hub, (skew_s, until) in self._skews.items() if until > now}

    def table_of(self, hub: PeerId) -> DemandTable | None:
        known = self._hubs.get(hub)
        return None if known is None else known.table

    def open_copies(self, memory_bytes: float = math.inf) -> int:
        """Copies, of slices that fit into this memory, which the fresh tables say are open; hubs of one swarm tell of
        the same demand, so the most counts."""
        return max((_open_in(table, memory_bytes) for table in self._fresh()), default=0)

    def idle(self) -> int:
        """Nodes that poll the hub with the longest queue of them."""
        return max((table.idle for table in self._fresh()), default=0)

    def _fresh(self) -> list[DemandTable]:
        now = trio.current_time()
        return [hub.table for hub in self._hubs.values() if hub.table is not None and hub.good_until > now]


def skew_words(skew_s: float) -> str:
    """How far a clock that is read elsewhere is from the one here."""
    return f"the sender's clock is {abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} the reader's"


def _open_in(table: DemandTable, memory_bytes: float) -> int:
    return sum(row.open for row in table.rows if table.slice_bytes.get(row.model, 0) <= memory_bytes)
