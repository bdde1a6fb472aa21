"""Builds a swarm from a scenario and a seed, lets it live, and lets happen to it what the scenario says.

It does not count: that is sim/tally.py.
"""

from __future__ import annotations

import random
from dataclasses import replace

from kvasir_node.base.ids import PeerId
from kvasir_node.base.settings import load_settings
from kvasir_node.decide.prediction import Prediction
from kvasir_node.sim.coordinators import CoordinatorNode
from kvasir_node.sim.forecast import predicted
from kvasir_node.sim.heap import Heap
from kvasir_node.sim.hubs import Board, HubNode
from kvasir_node.sim.network import CALL_TIMEOUT_S, Network, Peer
from kvasir_node.sim.scenarios import MINTED, SERVER, Crowd, Scenario, manner_of
from kvasir_node.sim.tally import Tally
from kvasir_node.sim.workers import WorkerNode
from kvasir_node.sim.world import World

SAMPLE_S = 5.0
FORGE_S = 30.0  # how often a liar sends a coordinator's demand as its own, and one that was heard before once more
START_S = 120.0  # nodes of a swarm did not all start in the same second


class Swarm:
    """One run. The same scenario and seed give the same run, event by event."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario = scenario
        settings = load_settings(flags={"node.profile": "wan"})
        chance = random.Random(f"{scenario.name} {seed}")
        heap = Heap()
        network = Network(heap, random.Random(chance.getrandbits(64)), scenario.loss_ratio)
        self.tally = Tally()
        self.world = World(heap, network, settings.market, settings.fanout, chance, self.tally, scenario.hubs)
        self.world.board = Board(self.world)
        self.tally.begin(self.world)
        self._add_hubs()
        self._add_coordinators()
        self._add_workers()
        for at, what, argument in scenario.events:
            heap.at(at, self._happen, what, argument)
        if scenario.liars:
            heap.after(FORGE_S, self._forge)
        heap.at(0.0, self.tally.sample, SAMPLE_S)
        self.forecast: Prediction | None = None  # of the first coordinator that holds nothing, late in a peak
        for coordinator in self.world.coordinators.values():
            for _, end in scenario.peaks:
                heap.at(end - SAMPLE_S, self.tally.note_shapes, coordinator)
                if not coordinator.model.is_held:
                    heap.at(end - SAMPLE_S, self._forecast, coordinator)

    def run(self, until_s: float) -> None:
        """Goes on to so many seconds after its beginning."""
        self.world.heap.run(until_s)

    def _add_hubs(self) -> None:
        world, skew_s = self.world, self.scenario.skew_s
        peers = [
            Peer(
                PeerId(f"hub{n}"), SERVER, f"/ip4/203.0.113.{n}/tcp/9481", skew_s=world.chance.uniform(-skew_s, skew_s)
            )
            for n in range(self.scenario.hubs)
        ]
        for peer in peers:
            world.hubs[peer.id] = HubNode(world, peer)

    def _add_coordinators(self) -> None:
        world, skew_s = self.world, self.scenario.skew_s
        for number, asked in enumerate(self.scenario.asked):
            skew = world.chance.uniform(-skew_s, skew_s)
            peer = Peer(PeerId(f"coordinator{number}"), asked.link, f"/ip4/192.0.2.{number}/tcp/9481", skew_s=skew)
            world.models[asked.model.id] = asked.model
            world.coordinators[peer.id] = CoordinatorNode(world, peer, asked.model, asked.rate, asked.rate_max)

    def _add_workers(self) -> None:
        scenario, world = self.scenario, self.world
        slice_bytes = max(asked.model.slice_bytes for asked in scenario.asked)
        shares = [crowd.share for crowd in scenario.crowd]
        for number in range(scenario.nodes):
            crowd: Crowd = world.chance.choices(scenario.crowd, shares)[0]
            memory_bytes = world.chance.randint(*crowd.slices) * slice_bytes
            manner = manner_of(number, scenario.liars)
            # A machine with many names has one range of addresses for all of them.
            range_ = (99, 99) if manner is MINTED else divmod(number, 256)
            address = f"/ip4/{20 + range_[0] // 256}.{range_[0] % 256}.{range_[1]}.{number % 250 + 1}/tcp/9481"
            peer = Peer(PeerId(f"worker{number}"), crowd.link, address, is_up=False)
            worker = WorkerNode(world, peer, memory_bytes, world.chance.getrandbits(64), manner)
            world.workers[peer.id] = worker
            world.worker_list.append(worker)
            world.heap.after(world.chance.uniform(0.0, START_S), self._come, worker)

    def _forge(self) -> None:
        """Neither may change anything: hubs take demand only from whom it is of, and each record once."""
        world = self.world
        liar = next(worker for worker in world.worker_list if not worker.manner.answers_right)
        for coordinator in world.coordinators.values():
            demand = coordinator.demand()
            greedy = replace(demand, sequence=demand.sequence + 10**6, wants=())
            for hub in world.hubs.values():
                world.network.send(liar.peer, hub.peer, hub.report, liar.peer.id, greedy)
                world.network.send(
                    liar.peer, hub.peer, hub.report, demand.issuer, replace(demand, sequence=0, wants=())
                )
        world.heap.after(FORGE_S, self._forge)

    def _forecast(self, coordinator: CoordinatorNode) -> None:
        self.forecast = predicted(self.world, coordinator)

    # What happens ---------------------------------------------------------------------------------------------

    def _come(self, worker: WorkerNode) -> None:
        worker.start()
        if self.scenario.session_s < float("inf"):
            self.world.heap.after(self.world.chance.expovariate(1 / self.scenario.session_s), self._go, worker)

    def _go(self, worker: WorkerNode) -> None:
        worker.stop()
        self.world.heap.after(self.world.chance.expovariate(4 / self.scenario.session_s), self._come, worker)

    def _happen(self, what: str, argument: int) -> None:
        world = self.world
        if what in ("hub dies", "hub starts"):
            hub = list(world.hubs.values())[argument]
            self._hub_dies(hub) if what == "hub dies" else self._hub_starts(hub)
        elif what == "cut":
            list(world.hubs.values())[-1].peer.side = 1
            self._move(1, [worker for number, worker in enumerate(world.worker_list) if number % argument == 0])
        else:
            for hub in world.hubs.values():
                hub.peer.side = 0
            self._move(0, [worker for worker in world.worker_list if worker.peer.side == 1])
            self.tally.healed()
            for coordinator in world.coordinators.values():
                for hub in world.hubs:
                    coordinator.hub_came(hub)

    def _hub_dies(self, hub: HubNode) -> None:
        hub.stop()
        for worker in self.world.worker_list:
            if worker.peer.is_up:
                self.world.heap.after(CALL_TIMEOUT_S * self.world.chance.random(), worker.hubs_changed)

    def _hub_starts(self, hub: HubNode) -> None:
        hub.start()
        for coordinator in self.world.coordinators.values():
            coordinator.hub_came(hub.peer.id)
        for worker in self.world.worker_list:
            if worker.peer.is_up:
                worker.hub_came()

    def _move(self, side: int, workers: list[WorkerNode]) -> None:
        for worker in workers:
            worker.peer.side = side
        for worker in self.world.worker_list:
            if worker.peer.is_up:
                worker.cut_off() if side else worker.hub_came()
