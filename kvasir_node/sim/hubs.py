"""A simulated hub: `decide/market` behind simulated messages.

It does what roles/hub.py does, without streams and signatures: it answers, tells other hubs what it has leased, and
gossips its table, whose bytes are those of the real message. Judgement is all in decide/.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvasir_node.base.errors import RejectReason
from kvasir_node.base.ids import ModelId, PeerId, SliceId
from kvasir_node.decide.gossip_pace import GossipPace
from kvasir_node.decide.market import Demand, Key, LeaseOffer, LeaseReport, Market, MarketLimits
from kvasir_node.sim.message_sizes import NO_OFFER_BYTES, OFFER_BYTES, POLL, RENEWALS, VERDICTS
from kvasir_node.sim.network import GOSSIP_OVERHEAD_BYTES, MESH_COPIES, Peer
from kvasir_node.sim.world import Seen, World
from kvasir_node.wire.lists import TableRow
from kvasir_node.wire.messages import DemandTable

TICK_S = 1.0
SHARE_S = 0.25  # what changed is told to other hubs within this
HEARTBEAT_S = 10.0  # other hubs hear at least this often
GOSSIP_BYTES_S = 60.0  # of the tables of all hubs together, by each node
GOSSIP_REFRESH_S = 30.0
WAVES = 8  # in which gossip arrives at the nodes ...
WAVE_S = 0.06  # ... so long after each other
IDLE_POLL_FACTOR = 5.0  # decide/placement: polls are so much rarer while nothing is wanted


class HubNode:
    def __init__(self, world: World, peer: Peer) -> None:
        self.peer = peer
        self._world = world
        self.refused: dict[RejectReason, int] = {}
        self.start()

    def start(self) -> None:
        """Begins, or begins anew, knowing nothing."""
        world, peer = self._world, self.peer
        peer.life += 1
        peer.is_up = True
        market = world.market
        limits = MarketLimits(
            lease_ttl_s=market.lease_ttl_s,
            progress_timeout_s=market.progress_timeout_s,
            tenure_min_s=market.tenure_min_s,
            surplus_grace_s=market.surplus_grace_s,
            leases_max=market.leases_max,
            issuers_max=market.issuers_max,
            clock_skew_max_s=market.clock_skew_max_s,
            poll_interval_s=market.poll_interval_s,
            unproven_per_address_max=world.fanout.trials_per_address_max,
        )
        self._name = f"{peer.id}-{peer.life}"
        self.market = Market(limits, self._name, world.now)
        self._pace = GossipPace(market.gossip_interval_min_s, GOSSIP_REFRESH_S, GOSSIP_BYTES_S / world.hub_count)
        self._greeted: dict[PeerId, int] = {}  # other hubs that know all, and which life of theirs
        self._told_hubs_at = float("-inf")
        self._shares = False  # what changed is about to be told
        self._told = (-1, -1)
        self._sequence = 0
        self.seen: tuple[float, tuple[tuple[int, int], ...], int] | None = None  # the table that is known of it
        world.heap.after(world.chance.uniform(0.0, TICK_S), self._tick, peer.life)

    def stop(self) -> None:
        self.peer.is_up = False
        self.seen = None

    # Answers --------------------------------------------------------------------------------------------------

    def report(self, sender: PeerId, demand: Demand) -> None:
        """A record that its sender did not sign, or that was here before, changes nothing."""
        self._count(1)
        if demand.issuer != sender:
            refused: RejectReason | None = RejectReason.BAD_SIGNATURE
        else:
            refused = self.market.report(demand, self._world.now, self._world.network.wall(self.peer))
        if refused is not None:
            self.refused[refused] = self.refused.get(refused, 0) + 1

    def poll(
        self,
        worker: Peer,
        memory_bytes: int,
        have: Sequence[tuple[ModelId, SliceId]],
        busy: Sequence[tuple[ModelId, SliceId]],
        round_trips: Sequence[tuple[PeerId, float]],
    ) -> LeaseOffer | float:
        now = self._world.now
        self.market.end_unlisted(worker.id, busy, now)
        answer = self.market.poll(
            worker.id,
            memory_bytes=memory_bytes,
            have=have,
            busy=busy,
            round_trips=round_trips,
            address=worker.address,
            now=now,
        )
        self._count(2)
        self._touched()
        answer_bytes = OFFER_BYTES if isinstance(answer, LeaseOffer) else NO_OFFER_BYTES
        self._world.network.traffic.call_bytes += POLL.of(len(busy)) + answer_bytes
        return answer

    def renew(self, worker: PeerId, reports: Sequence[LeaseReport]) -> list[tuple[float, str]]:
        self._count(2)
        self._world.network.traffic.call_bytes += RENEWALS.of(len(reports)) + VERDICTS.of(len(reports))
        return self.market.renew_all(worker, reports, self._world.now)

    def release(self, worker: PeerId, leases: Sequence[str]) -> None:
        self._count(2)
        self._touched()
        self._world.network.traffic.call_bytes += RENEWALS.of(len(leases)) + VERDICTS.of(0)
        for lease in leases:
            self.market.release(worker, lease, self._world.now)

    def _touched(self) -> None:
        """Leases may have changed: the other hubs hear soon."""
        if not self._shares and self._world.hub_count > 1:
            self._shares = True
            self._world.heap.after(SHARE_S, self._share, self.peer.life)

    def _share(self, life: int) -> None:
        if life == self.peer.life and self.peer.is_up:
            self._shares = False
            self._tell_hubs(self._world.now)

    def _count(self, messages: int) -> None:
        self._world.network.traffic.count_hub(self.peer.id, self._world.now, messages)

    # Other hubs and gossip ------------------------------------------------------------------------------------

    def _tick(self, life: int) -> None:
        if life != self.peer.life or not self.peer.is_up:
            return
        now = self._world.now
        self.market.tick(now)
        self._tell_hubs(now)
        market = self.market
        pause_s = max(market.retry_s, IDLE_POLL_FACTOR * self._world.market.poll_interval_s)
        anyway = market.idle_count(now) * self._world.market.poll_interval_s / pause_s
        changed = (market.open_copies, market.lease_count) != self._told
        if self._pace.is_due(now, open_copies=market.open_copies, polls_anyway=anyway, changed=changed):
            self._publish(now)
        self._world.heap.after(TICK_S, self._tick, life)

    def _tell_hubs(self, now: float) -> None:
        news = self.market.news()
        beat = now - self._told_hubs_at >= HEARTBEAT_S
        for other in self._world.hubs.values():
            if other is self:
                continue
            if not self._world.network.reach(self.peer, other.peer):
                self._greeted.pop(other.peer.id, None)
                continue
            knows = self._greeted.get(other.peer.id) == other.peer.life
            if news or beat or not knows:
                counts = news if knows else self.market.all_news()
                self._world.network.send(self.peer, other.peer, other.hear, self.peer.id, self._name, counts, not knows)
                self._greeted[other.peer.id] = other.peer.life
                self._count(1)
        if news or beat:
            self._told_hubs_at = now

    def hear(self, peer: PeerId, name: str, counts: dict[Key, int], is_all: bool) -> None:
        self._count(1)
        self.market.hear(peer, name, counts, self._world.now, is_all=is_all)

    def _publish(self, now: float) -> None:
        market, network = self.market, self._world.network
        self._told = market.open_copies, market.lease_count
        self._sequence += 1
        sizes = market.slice_bytes()
        rows = tuple(TableRow(e.model, e.slice, e.want, e.proven, e.leased) for e in market.table())
        idle = market.idle_count(now)
        table = DemandTable(
            epoch=self.peer.life,
            sequence=self._sequence,
            issued_at=network.wall(self.peer),
            ttl_s=self._world.market.demand_ttl_s,
            addresses=(self.peer.address,),
            rows=rows,
            slice_bytes=sizes,
            idle=idle,
        )
        heard_bytes = MESH_COPIES * (GOSSIP_OVERHEAD_BYTES + len(table.to_bytes()))
        self._pace.told(now, heard_bytes, market.open_copies)
        self._world.tally.gossiped(heard_bytes)
        self._count(6)
        open_by_size: dict[int, int] = {}
        for row in rows:
            if row.open:
                size = sizes.get(row.model, 0)
                open_by_size[size] = open_by_size.get(size, 0) + row.open
        self.seen = now, tuple(sorted(open_by_size.items())), idle
        self._world.board.told(self.peer.side)


class Board:
    """What the tables that are known on each side of a partition say together.

    A node is told at once only of what it would act on: demand that appeared, grew to more than double, or is met. All
    else it learns when it next wakes, which comes to the same.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._number = 0
        self._seen: dict[int, Seen] = {}
        self._acted_on: dict[int, int] = {}  # by side

    def seen(self, side: int) -> Seen | None:
        return self._seen.get(side)

    def told(self, side: int) -> None:
        """A hub of this side has published."""
        now, ttl_s = self._world.now, self._world.market.demand_ttl_s
        hubs = [hub for hub in self._world.hubs.values() if hub.peer.is_up and hub.peer.side == side]
        fresh = [hub.seen for hub in hubs if hub.seen is not None and now - hub.seen[0] < max(ttl_s, GOSSIP_REFRESH_S)]
        most = max(fresh, key=lambda told: sum(copies for _, copies in told[1]))
        self._number += 1
        seen = Seen(self._number, now, most[1], max(told[2] for told in fresh))
        self._seen[side] = seen
        level = self._acted_on.get(side, 0)
        if (seen.copies > 2 * level) or (level and not seen.copies):
            self._acted_on[side] = seen.copies
            for wave in range(WAVES):
                self._world.heap.after((wave + 1) * WAVE_S, self._arrive, wave, side, seen)

    def _arrive(self, wave: int, side: int, seen: Seen) -> None:
        for worker in self._world.worker_list[wave::WAVES]:
            if worker.peer.side == side:
                worker.hear(seen)
