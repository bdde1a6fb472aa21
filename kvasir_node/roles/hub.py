"""The hub: answers what coordinators want and what workers ask, and gossips the demand table.

It starts nothing anywhere: every message it sends is an answer, gossip, or what hubs tell each other (roles/hub_news).
All judgement is `decide/market`; it does not know models, experts or blocks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import trio

from kvasir_node.base.errors import Misbehaved, RejectReason, Unreachable
from kvasir_node.base.events import LeasesChanged, Tell, tell_nobody
from kvasir_node.base.ids import PeerId
from kvasir_node.base.rejections import Rejections
from kvasir_node.base.settings import MarketSettings
from kvasir_node.base.snapshot import DemandSnapshot, HubSnapshot
from kvasir_node.decide.gossip_pace import GossipPace
from kvasir_node.decide.market import Demand, Key, LeaseOffer, LeaseReport, Market, MarketLimits
from kvasir_node.decide.told_leases import ToldLeases
from kvasir_node.net.rpc import CallStream
from kvasir_node.net.transport import Gossip, Stream
from kvasir_node.roles.demand_tables import HUBS_MAX, TABLE_KIND, skew_words
from kvasir_node.roles.hub_news import HEARTBEAT_S, AskHub, HubNewsTeller, counts_of, lease_counts
from kvasir_node.wire.envelope import SignFunction, open_record, seal
from kvasir_node.wire.lists import NEWS_SLICES_MAX, SLICES_MAX, TABLE_MODELS_MAX, LeaseCount, TableRow
from kvasir_node.wire.messages import (
    MESSAGE_BYTES_MAX,
    DemandRecord,
    DemandTable,
    HubGreeting,
    HubNews,
    LeaseVerdict,
    MarketMethod,
    NoOffer,
    Offer,
    Poll,
    Renewals,
    Verdicts,
)
from kvasir_node.wire.swarm_keys import COORDINATOR, HUB

logger = logging.getLogger(__name__)

DEMAND_KIND = "demand"
IN_FLIGHT_MAX = 16  # calls of one peer
MODELS_MAX = 4096  # whose names are remembered
TABLE_OVERHEAD_BYTES = 495  # gossipsub's envelope 190, our signature and proof that this is a hub 265, transport 40
MESH_COPIES = 3.0  # of a table that a node sees: half of a mesh's degree of 6, as each link carries it once
BUDGET_HUBS_MAX = 8  # hubs that share the budget of tables at most: made-up ones must not silence this one
REST_FACTOR = 5.0  # PlacementLimits.idle_poll_factor: how much rarer nodes poll while nothing is wanted


async def _ask_nobody(hub: PeerId, method: MarketMethod, body: bytes) -> bytes | memoryview:
    raise Unreachable(f"hub {hub} cannot be asked: this one knows no other")


@dataclass(slots=True)
class _OtherHub:
    epoch: int
    heard_at: float
    told_at: float = float("-inf")  # when it last told us of its leases itself


class Hub:
    """See the module. `table_changed` hears every table this hub publishes, for the worker of the same node;
    `prove` puts before a table what shows that a hub of this swarm sent it; `may` tells whether a peer may be what
    some messages come from: a coordinator, another hub."""

    def __init__(
        self,
        settings: MarketSettings,
        peer_id: PeerId,
        sign: SignFunction,
        gossip: Gossip,
        topic: str,
        *,
        prove: Callable[[bytes], bytes],
        may: Callable[[PeerId, str], bool],
        addresses: Callable[[], Sequence[str]],
        table_changed: Callable[[DemandTable], None],
        address_of: Callable[[PeerId], str] = lambda _: "",
        is_guest: Callable[[PeerId], bool] = lambda _: False,
        other_hubs: Callable[[], Sequence[PeerId]] = lambda: (),
        ask_hub: AskHub = _ask_nobody,
        tell: Tell = tell_nobody,
        rejections: Rejections | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._peer_id = peer_id
        self._sign = sign
        self._gossip = gossip
        self._topic = topic
        self._prove = prove
        self._may = may
        self._addresses = addresses
        self._table_changed = table_changed
        self._address_of = address_of
        self._is_guest = is_guest
        self._wall = wall
        self._tell = tell
        self._rejections = rejections or Rejections()
        self._told_leases: LeasesChanged | None = None
        self._epoch = int(wall() * 1000)
        self._sequence = 0
        self._changed = trio.Event()
        self._others: dict[PeerId, _OtherHub] = {}  # heard last, last
        self._must_greet = False  # one of them has not heard us yet
        self._told = ToldLeases(2 * settings.progress_timeout_s, settings.lease_ttl_s, NEWS_SLICES_MAX)
        self._names: dict[str, str] = {}  # of models that were lately wanted
        self._market_limits = MarketLimits(
            lease_ttl_s=settings.lease_ttl_s,
            progress_timeout_s=settings.progress_timeout_s,
            tenure_min_s=settings.tenure_min_s,
            surplus_grace_s=settings.surplus_grace_s,
            leases_max=settings.leases_max,
            issuers_max=settings.issuers_max,
            clock_skew_max_s=settings.clock_skew_max_s,
            poll_interval_s=settings.poll_interval_s,
            guest_layers_max=settings.guest_layers_max,
        )
        self._market = Market(
            self._market_limits, name=_lease_prefix(peer_id, self._epoch), started_at=trio.current_time()
        )
        self._teller = HubNewsTeller(
            self._epoch,
            news=self._market.news,
            all_news=self._market.all_news,
            hubs=other_hubs,
            ask_hub=ask_hub,
        )

    async def serve(self, stream: Stream) -> None:
        """A StreamHandler for MARKET_PROTOCOL."""

        async def handle(method: int, body: memoryview) -> Sequence[bytes | memoryview]:
            try:
                return await self.handle(stream.peer, method, body)
            except Misbehaved as error:
                self._rejections.note(error)
                raise

        calls = CallStream(stream, handler=handle, in_flight_max=IN_FLIGHT_MAX, body_bytes_max=MESSAGE_BYTES_MAX)
        await calls.run()

    async def handle(self, peer: PeerId, method: int, body: bytes | memoryview) -> Sequence[bytes]:
        """One request of one peer; raises Misbehaved for what no honest peer sends. Never waits."""
        await trio.lowlevel.checkpoint()
        match method:
            case MarketMethod.REPORT:
                self._require(peer, COORDINATOR)
                self._on_report(peer, body)
                answer = b""
            case MarketMethod.POLL:
                answer = self._on_poll(peer, Poll.from_bytes(body))
            case MarketMethod.RENEW:
                answer = self._on_renew(peer, Renewals.from_bytes(body))
            case MarketMethod.RELEASE:
                for given_back in Renewals.from_bytes(body).leases:
                    self._market.release(peer, given_back.lease, trio.current_time())
                answer = b""
            case MarketMethod.TELL:
                self._require(peer, HUB)
                answer = self._on_tell(peer, HubNews.from_bytes(body))
            case _:
                raise Misbehaved(RejectReason.UNKNOWN_METHOD, f"a hub has no method {method}")
        self._changed.set()
        return (answer,)

    def _require(self, peer: PeerId, role: str) -> None:
        if not self._may(peer, role):
            raise Misbehaved(RejectReason.NOT_A_MEMBER, f"the ticket of {peer} does not let it be a {role}")

    async def run(self) -> None:
        """Gossips the table, and tells other hubs, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._teller.run)
            await self._gossip_on()

    async def _gossip_on(self) -> None:
        """At once what idle nodes act on, the rest as the budget allows (decide/gossip_pace)."""
        settings = self._settings
        told: tuple[tuple[TableRow, ...], tuple[LeaseCount, ...]] | None = None
        pace = GossipPace(settings.gossip_interval_min_s, settings.gossip_refresh_s, settings.gossip_bytes_s)
        while True:
            with trio.move_on_after(1.0):
                await self._changed.wait()
            self._changed = trio.Event()
            now = trio.current_time()
            self._market.tick(now)
            self._disbelieve(now)
            self._tell_leases()
            pace.bytes_s = settings.gossip_bytes_s / min(1 + len(self._others), BUDGET_HUBS_MAX)
            content, open_copies = (self._rows(), self._leases()), self._market.open_copies
            changed = content != told or self._must_greet
            if pace.is_due(now, open_copies=open_copies, polls_anyway=self._polls_anyway(now), changed=changed):
                told, self._must_greet = content, False
                sent_bytes = MESH_COPIES * (TABLE_OVERHEAD_BYTES + await self._publish(*content))
                pace.told(now, sent_bytes, open_copies)
            await trio.sleep(settings.gossip_interval_min_s)

    def _tell_leases(self) -> None:
        market = self._market
        leases = LeasesChanged(market.coordinator_count, market.lease_count, market.open_copies)
        if leases != self._told_leases:
            self._told_leases = leases
            self._tell(leases)

    def _polls_anyway(self, now: float) -> float:
        """Polls that come here in an interval without a word."""
        interval_s = self._settings.poll_interval_s
        return self._market.idle_count(now) * interval_s / max(self._market.retry_s, REST_FACTOR * interval_s)

    def hear(self, peer: PeerId, table: DemandTable) -> None:
        """Another hub's table: its leases count here too, unless it tells us of them itself. One that we have not
        heard since it began is told ours at once, as it knows nothing yet."""
        now, other = trio.current_time(), self._other(peer, table.epoch)
        if now - other.told_at > 2 * HEARTBEAT_S:
            self._hear_leases(peer, table.epoch, counts_of(table.leases), now, is_all=True)

    def _on_tell(self, peer: PeerId, news: HubNews) -> bytes:
        now = trio.current_time()
        self._other(peer, news.epoch).told_at = now
        self._hear_leases(peer, news.epoch, counts_of(news.leases), now, is_all=news.is_all)
        return HubGreeting(self._epoch).to_bytes()

    def _other(self, peer: PeerId, epoch: int) -> _OtherHub:
        now, other = trio.current_time(), self._others.pop(peer, None)
        if other is None or other.epoch != epoch:
            self._told.forget(peer, now)
            other = _OtherHub(epoch, now)
            self._must_greet = True
            self._changed.set()
        other.heard_at = now
        self._others[peer] = other
        if len(self._others) > HUBS_MAX:
            self._forget(next(iter(self._others)), now)
        return other

    def _forget(self, peer: PeerId, now: float) -> None:
        del self._others[peer]
        self._told.forget(peer, now)

    def _hear_leases(self, peer: PeerId, epoch: int, counts: Mapping[Key, int], now: float, *, is_all: bool) -> None:
        believed = self._told.take(peer, counts, now, is_all=is_all)
        self._market.hear(peer, _lease_prefix(peer, epoch), believed, now, is_all=is_all)

    def _disbelieve(self, now: float) -> None:
        """Slices that others have been said to fill for too long are open again; hubs that are silent say nothing."""
        ttl_s = self._market_limits.told_ttl_s
        for peer in [peer for peer, other in self._others.items() if now - other.heard_at >= ttl_s]:
            self._forget(peer, now)
        for peer, counts in self._told.overdue(now).items():
            self._market.hear(peer, _lease_prefix(peer, self._others[peer].epoch), counts, now, is_all=False)

    def _on_report(self, peer: PeerId, body: bytes | memoryview) -> None:
        record = open_record(DEMAND_KIND, body, body_bytes_max=MESSAGE_BYTES_MAX)
        if record.issuer != peer:
            raise Misbehaved(RejectReason.BAD_SIGNATURE, f"{peer} reported the demand of {record.issuer}")
        said = DemandRecord.from_bytes(record.body)
        demand = Demand(
            issuer=peer,
            epoch=said.epoch,
            sequence=said.sequence,
            issued_at=said.issued_at,
            ttl_s=min(said.ttl_s, self._settings.demand_ttl_s),
            model=said.model,
            dtype=said.dtype,
            slice_bytes=said.slice_bytes,
            addresses=said.addresses,
            wants=said.wants,
            near_rtt_s=said.near_rtt_s,
            refused=said.refused,
            kept=frozenset(said.kept),
        )
        refused = self._market.report(demand, trio.current_time(), self._wall())
        if refused is not None:
            raise Misbehaved(refused, self._refusal(refused, said))
        self._names.pop(said.model, None)
        self._names[said.model] = said.model_name  # newest last
        if len(self._names) > MODELS_MAX:
            del self._names[next(iter(self._names))]

    def _refusal(self, reason: RejectReason, said: DemandRecord) -> str:
        skew_s = said.issued_at - self._wall()
        if abs(skew_s) > self._settings.clock_skew_max_s:
            return f"clock skew: {skew_words(skew_s)}; set the clocks right"
        if reason is RejectReason.STALE:
            return (
                f"demand of epoch {said.epoch}, sequence {said.sequence} was here already, or newer; a coordinator "
                "that was restarted with an earlier clock is heard again when its clock is past the last report"
            )
        return f"demand is refused: {reason}; this hub serves {self._settings.issuers_max} coordinators at most"

    def _on_poll(self, peer: PeerId, poll: Poll) -> bytes:
        self._market.end_unlisted(peer, poll.busy, trio.current_time())
        answer = self._market.poll(
            peer,
            memory_bytes=poll.memory_bytes,
            have=poll.have,
            busy=poll.busy,
            round_trips=poll.round_trips,
            address=self._address_of(peer),
            is_guest=self._is_guest(peer),
            now=trio.current_time(),
        )
        if not isinstance(answer, LeaseOffer):
            return NoOffer(answer).to_bytes()
        logger.info("leased slice %s to %s", answer.slice, peer)
        offer = Offer(
            answer.lease,
            answer.model,
            answer.dtype,
            answer.slice,
            answer.coordinator,
            answer.addresses,
            answer.ttl_s,
        )
        return offer.to_bytes()

    def _on_renew(self, peer: PeerId, renewals: Renewals) -> bytes:
        reports = [
            LeaseReport(each.lease, (each.coordinator, each.model, each.slice), each.progress)
            for each in renewals.leases
        ]
        verdicts = self._market.renew_all(peer, reports, trio.current_time())
        for renewal, (_, reason) in zip(renewals.leases, verdicts, strict=True):
            if reason:
                logger.info("the lease of %s on slice %s ends: %s", peer, renewal.slice, reason)
        return Verdicts(tuple(LeaseVerdict(ttl_s, reason) for ttl_s, reason in verdicts)).to_bytes()

    def _rows(self) -> tuple[TableRow, ...]:
        """The table, the most wanted rows first when it must be cut."""
        rows = [TableRow(e.model, e.slice, e.want, e.proven, e.leased) for e in self._market.table()]
        if len(rows) > SLICES_MAX or len({row.model for row in rows}) > TABLE_MODELS_MAX:
            rows = sorted(rows, key=lambda row: -row.open)[:SLICES_MAX]
        return tuple(rows)

    def _leases(self) -> tuple[LeaseCount, ...]:
        return lease_counts(self._market.all_news())

    async def _publish(self, rows: tuple[TableRow, ...], leases: tuple[LeaseCount, ...]) -> int:
        """Returns how many bytes the table takes."""
        self._sequence += 1
        table = DemandTable(
            epoch=self._epoch,
            sequence=self._sequence,
            issued_at=self._wall(),
            ttl_s=self._settings.demand_ttl_s,
            addresses=tuple(self._addresses()),
            rows=rows,
            slice_bytes=self._market.slice_bytes(),
            idle=self._market.idle_count(trio.current_time()),
            leases=leases,
        )
        self._table_changed(table)
        body = table.to_bytes()
        sealed = seal(TABLE_KIND, body, self._peer_id, self._sign)
        await self._gossip.publish(self._topic, self._prove(sealed))
        return len(body)

    def snapshot(self) -> HubSnapshot:
        return HubSnapshot(
            coordinators=self._market.coordinator_count,
            idle_nodes=self._market.idle_count(trio.current_time()),
            leases=self._market.lease_count,
            demand=tuple(
                DemandSnapshot(self._names.get(e.model, e.model), str(e.slice), e.want, e.proven, e.leased)
                for e in self._market.table()
            ),
        )


def _lease_prefix(hub: PeerId, epoch: int) -> str:
    """What the ids of a hub's leases begin with, since its last start."""
    return f"{epoch:x}-{hub[-8:]}"
