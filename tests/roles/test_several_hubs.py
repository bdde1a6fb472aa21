"""Several hubs of one swarm: they share leases by gossip, each may die, and one that restarts is soon right."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import trio
from role_fakes import KEYS, SLICES, WorkerPeer, World, granted, hub_on, open_world, tables_of, with_slices

from kvasir_node.base.ids import PeerId, SliceId
from kvasir_node.decide.placement import HubsKnown, Stage
from kvasir_node.net.hello import Membership
from kvasir_node.net.memory_net import MemoryTransport, open_memory_network
from kvasir_node.roles.hub_search import HINTS_MAX, HUBS_HEARD_MAX, HUBS_KEPT, HubSearch
from kvasir_node.roles.link import compute_here
from kvasir_node.roles.peers import Peers
from kvasir_node.wire.messages import About, HubNews, MarketMethod


class HubPeer:
    """A hub that hears the tables of others, as a node wires it."""

    def __init__(self, world: World, name: str, known: set[PeerId], *, tells: bool = True) -> None:
        self.world, self.known = world, known
        self.transport = world.network.transport(name)
        self.hub = hub_on(self.transport, other_hubs=self.other_hubs if tells else lambda: ())
        self.known.add(self.transport.peer_id)
        self.tables = tables_of()
        self.scope = trio.CancelScope()

    @property
    def peer_id(self) -> PeerId:
        return self.transport.peer_id

    def other_hubs(self) -> list[PeerId]:
        """Those that are connected, as a node knows them by what they say of themselves."""
        connected = [connection.peer for connection in self.transport.connections()]
        return [peer for peer in connected if peer in self.known]

    async def run(self) -> None:
        received = await self.hub._gossip.subscribe("topic", self.tables.take)
        with self.scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.hub.run)
                async for hub, _ in received:
                    table = self.tables.table_of(hub)
                    assert table is not None
                    self.hub.hear(hub, table)

    def kill(self) -> None:
        self.world.network.kill(self.peer_id)
        self.scope.cancel()


class Swarm:
    """Two hubs, one coordinator that reports to both, and workers that know both; copies are counted all the time."""

    def __init__(self, world: World, *, tells: bool = True) -> None:
        self.world = world
        self.known: set[PeerId] = set()
        self.hubs = [HubPeer(world, name, self.known, tells=tells) for name in ("hub a", "hub b")]
        self.workers: list[WorkerPeer] = []
        self.doubled_s: Counter[SliceId] = Counter()  # how long now
        self.doubled_max_s = 0.0

    async def start(self, workers: int) -> None:
        for hub in self.hubs:
            self.world.nursery.start_soon(hub.run)
        await self.hubs[0].transport.connect(self.hubs[1].transport.addresses())
        self.world.nursery.start_soon(self._report)
        for number in range(workers):
            worker = WorkerPeer(self.world, f"worker {number}", compute_here, worker__slices_max=1)
            self.workers.append(worker)
            self.world.nursery.start_soon(worker.worker.run)
        await self.connect()
        self.world.nursery.start_soon(self._count)

    async def connect(self) -> None:
        """Each worker comes to know the hubs that are there, half of them in another order."""
        for number, worker in enumerate(self.workers):
            for hub in self.hubs:
                await worker.transport.connect(hub.transport.addresses())
            hubs = [hub.peer_id for hub in self.hubs]
            worker.worker.tell(HubsKnown(tuple(hubs if number % 2 else reversed(hubs))))

    def lose(self, hub: HubPeer) -> None:
        hub.kill()
        self.hubs.remove(hub)
        for worker in self.workers:
            worker.worker.tell(HubsKnown(tuple(hub.peer_id for hub in self.hubs)))

    async def _report(self) -> None:
        while True:
            for hub in list(self.hubs):
                await self.world.coordinator.report(hub.hub)
            await trio.sleep(1)

    def copies(self, *stages: Stage) -> Counter[SliceId]:
        held = [pair for worker in self.workers for pair in worker.worker._mind.stages().values()]
        return Counter(assignment.slice for assignment, stage in held if stage in stages)

    async def _count(self) -> None:
        while True:
            copies = self.copies(Stage.FETCHING, Stage.LOADING, Stage.TRIAL, Stage.SERVING)
            for part in SLICES:
                surplus = copies[part] > self.world.coordinator.wants.get(part, 0)
                self.doubled_s[part] = self.doubled_s[part] + 1 if surplus else 0
            self.doubled_max_s = max(self.doubled_max_s, *self.doubled_s.values())
            await trio.sleep(1)

    def all_serve(self) -> bool:
        return self.copies(Stage.SERVING) == Counter(self.world.coordinator.wants)


@pytest.mark.parametrize("dies_after_s", [0.3, 1.0, 4.0])
async def test_a_hub_that_dies_in_the_middle_of_a_burst_costs_no_recruitment_and_doubles_no_lease(
    autojump_clock, tmp_path, dies_after_s
):
    async with open_world(tmp_path) as world:
        swarm = Swarm(world)
        await swarm.start(workers=20)
        world.coordinator.wants = with_slices(want=2)
        await trio.sleep(dies_after_s)
        swarm.lose(swarm.hubs[0])
        await world.until(swarm.all_serve, 60)
        died_at = trio.current_time()
        await trio.sleep(60)
        assert swarm.all_serve()
        assert swarm.hubs[0].hub.snapshot().leases == 16
        assert swarm.doubled_max_s <= 60
        world.coordinator.wants = {}
        await world.until(lambda: not swarm.copies(*Stage), 120)
        assert trio.current_time() - died_at < 180


@pytest.mark.parametrize("tells", [True, False], ids=["tell each other", "by gossip alone"])
async def test_two_hubs_share_out_what_is_wanted_and_lease_nothing_twice_though_nothing_is_proven_yet(
    autojump_clock, tmp_path, tells
):
    async with open_world(tmp_path) as world:
        swarm, carl = Swarm(world, tells=tells), world.coordinator
        await swarm.start(workers=40)
        await trio.sleep(5)
        carl.wants, carl.proves = with_slices(want=2), False
        await trio.sleep(20)
        first, second = (hub.hub.snapshot().leases for hub in swarm.hubs)
        assert 16 <= first + second <= 17
        assert min(first, second) >= 3
        for peer, part in carl.attached:
            world.nursery.start_soon(carl.prove, peer, part)
        await world.until(swarm.all_serve, 60)
        assert swarm.doubled_max_s <= 20
        await trio.sleep(10)
        for hub in swarm.hubs:
            assert [(row.want, row.proven, row.leased) for row in hub.hub.snapshot().demand] == [(2, 2, 0)] * 8


async def test_a_hub_that_tells_of_leases_that_are_not_there_keeps_nobody_from_work_for_long(autojump_clock, tmp_path):
    async with open_world(tmp_path) as world:
        swarm, carl = Swarm(world), world.coordinator
        await swarm.start(workers=10)
        hub = swarm.hubs[0].hub
        swarm.lose(swarm.hubs[1])
        carl.wants = {}
        leases = tuple((carl.transport.peer_id, carl.model, part, 1) for part in SLICES)
        lies = HubNews(1, True, leases).to_bytes()

        async def lie() -> None:
            while True:
                for number in range(3):
                    await hub.handle(PeerId(f"liar {number}"), MarketMethod.TELL, lies)
                await trio.sleep(5)

        world.nursery.start_soon(lie)
        await trio.sleep(5)
        carl.wants = with_slices()
        await trio.sleep(100)
        assert not swarm.copies(*Stage)
        await world.until(swarm.all_serve, 60)


async def test_a_hub_that_restarts_is_right_within_ten_seconds(autojump_clock, tmp_path):
    async with open_world(tmp_path) as world:
        swarm = Swarm(world)
        await swarm.start(workers=20)
        world.coordinator.wants = with_slices(want=2)
        await trio.sleep(2.5)
        lost = swarm.hubs[0]
        swarm.lose(lost)
        await trio.sleep(1)
        again = HubPeer(world, "hub a", swarm.known)
        swarm.hubs.append(again)
        world.nursery.start_soon(again.run)
        await again.transport.connect(swarm.hubs[0].transport.addresses())
        await swarm.connect()
        await trio.sleep(10)
        told = [{row.slice: (row.want, row.proven) for row in hub.hub.snapshot().demand} for hub in swarm.hubs]
        assert told[0] == told[1]
        assert len(told[0]) == 8
        await world.until(swarm.all_serve, 60)
        assert swarm.doubled_max_s <= 60


# Finding them -----------------------------------------------------------------------------------------------------


class Seeker:
    """A node's membership, peers and search for hubs on the memory network."""

    def __init__(self, network, name: str, *, is_hub: bool) -> None:
        self.transport: MemoryTransport = network.transport(name)
        says = About(name, "1", ("hub",) if is_hub else (), ()).to_bytes()
        peer = self.transport.peer_id
        self.membership = Membership(self.transport, KEYS.entry, granted(says, peer))
        self.peers = Peers(self.membership, peer, is_hub=is_hub, hubs_changed=lambda _: None, keys=lambda: (KEYS,))
        self.search = HubSearch(
            self.transport,
            self.peers.hubs,
            lambda peer: self.membership.require(peer, 8.0),
            random.Random(1),
        )

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            for part in (self.membership, self.peers, self.search):
                nursery.start_soon(part.run)


async def test_a_node_finds_as_many_of_the_hubs_that_it_hears_of_as_it_keeps_the_same_as_others(
    autojump_clock, nursery
):
    async with open_memory_network() as network:
        hubs = [Seeker(network, f"hub {number}", is_hub=True) for number in range(7)]
        seekers = [Seeker(network, name, is_hub=False) for name in ("ann", "bob")]
        for each in (*hubs, *seekers):
            nursery.start_soon(each.run)
        for seeker in seekers:
            for hub in random.Random(seeker.transport.peer_id).sample(hubs, 7):
                seeker.search.heard(hub.transport.peer_id, hub.transport.addresses())
        await trio.sleep(5)
        first = sorted(hub.transport.peer_id for hub in hubs)[:HUBS_KEPT]
        assert [sorted(seeker.peers.hubs()) for seeker in seekers] == [first] * 2
        network.kill(first[0])
        await trio.sleep(5)
        assert all(len(seeker.peers.hubs()) == HUBS_KEPT for seeker in seekers)


async def test_hints_of_the_local_network_crowd_out_no_hub_and_replace_nothing(autojump_clock):
    async with open_memory_network() as network:
        ann = Seeker(network, "ann", is_hub=False)
        table = ["/ip4/192.0.2.1/tcp/1/p2p/hub"]
        ann.search.heard(PeerId("hub"), table)
        ann.search.heard(PeerId("hub"), ["/ip4/192.168.1.9/tcp/1/p2p/hub"], is_hint=True)
        assert ann.search._heard[PeerId("hub")].addresses == ("/ip4/192.168.1.9/tcp/1/p2p/hub", *table)
        for number in range(2 * HUBS_HEARD_MAX):
            ann.search.heard(PeerId(f"fake {number}"), [f"/ip4/192.0.2.9/tcp/1/p2p/fake {number}"], is_hint=True)
        assert len(ann.search._heard) == 1 + HINTS_MAX
        ann.search.heard(PeerId("fake 0"), ["/ip4/192.0.2.2/tcp/1/p2p/fake 0"])  # a table: no hint any more
        assert ann.search._hints() == HINTS_MAX - 1


async def test_a_hub_that_cannot_be_dialled_is_tried_ever_more_rarely_and_told_as_no_fault(autojump_clock, nursery):
    async with open_memory_network() as network:
        ann = Seeker(network, "ann", is_hub=False)
        gone = network.transport("gone")
        network.kill(gone.peer_id)
        nursery.start_soon(ann.run)
        ann.search.heard(gone.peer_id, gone.addresses())
        tried: list[float] = []
        connect = ann.transport.connect

        async def counted(addresses):
            tried.append(trio.current_time())
            return await connect(addresses)

        ann.transport.connect = counted
        await trio.sleep(500)
        assert 5 <= len(tried) <= 14
        ann.search.heard(gone.peer_id, gone.addresses())
        await trio.sleep(601)
        assert ann.search._heard == {}


async def test_law_7_what_tables_tell_of_hubs_is_bounded_and_names_only_themselves(autojump_clock):
    async with open_memory_network() as network:
        ann = Seeker(network, "ann", is_hub=False)
        for number in range(500):
            peer = PeerId(f"hub {number}")
            ann.search.heard(peer, ["/ip4/192.0.2.1/tcp/1/p2p/another"])
            assert peer not in ann.search._heard
            ann.search.heard(peer, [f"/ip4/192.0.2.1/tcp/1/p2p/{peer}"])
        assert len(ann.search._heard) == HUBS_HEARD_MAX
        ann.search.heard(ann.transport.peer_id, ann.transport.addresses())
        assert ann.transport.peer_id not in ann.search._heard
