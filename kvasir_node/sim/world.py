"""What all parts of a simulated swarm share: time, network, settings, chance, and where what happens is told.

It does not know any of the parts beyond their ids.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvasir_node.base.ids import ModelId, PeerId
from kvasir_node.base.settings import FanoutSettings, MarketSettings
from kvasir_node.sim.heap import Heap
from kvasir_node.sim.network import Network, Peer
from kvasir_node.sim.workload import SimModel

if TYPE_CHECKING:
    from kvasir_node.sim.coordinators import CoordinatorNode
    from kvasir_node.sim.hubs import Board, HubNode
    from kvasir_node.sim.tally import Tally
    from kvasir_node.sim.workers import WorkerNode


@dataclass(frozen=True, slots=True)
class Seen:
    """What a node knows of the fresh tables: one object for all that know the same. `open` = (slice bytes, copies)."""

    number: int
    at: float
    open: tuple[tuple[int, int], ...]
    idle: int

    @property
    def copies(self) -> int:
        return sum(copies for _, copies in self.open)


class World:
    def __init__(
        self,
        heap: Heap,
        network: Network,
        market: MarketSettings,
        fanout: FanoutSettings,
        chance: random.Random,
        tally: Tally,
        hub_count: int,
    ) -> None:
        self.heap = heap
        self.network = network
        self.market = market
        self.fanout = fanout
        self.chance = chance
        self.tally = tally
        self.hub_count = hub_count
        self.models: dict[ModelId, SimModel] = {}
        self.hubs: dict[PeerId, HubNode] = {}
        self.coordinators: dict[PeerId, CoordinatorNode] = {}
        self.workers: dict[PeerId, WorkerNode] = {}
        self.worker_list: list[WorkerNode] = []
        self.board: Board

    @property
    def now(self) -> float:
        return self.heap.now

    def hubs_of(self, peer: Peer) -> tuple[PeerId, ...]:
        """The hubs that a peer can reach now."""
        return tuple(hub for hub, node in self.hubs.items() if self.network.reach(peer, node.peer))
