"""What a swarm that holds a model of 10¹² parameters could compute, by the cost model of decide/prediction.

It does not measure: the costs below are of machines that nobody of us has, so the result is a prediction from them and
from who holds what, and nothing else.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvasir_node.base.ids import PeerId
from kvasir_node.decide.costs import Costs, OwnCosts, WorkerCosts
from kvasir_node.decide.prediction import Prediction, Scene, predict
from kvasir_node.sim.network import Link

if TYPE_CHECKING:
    from kvasir_node.sim.coordinators import CoordinatorNode
    from kvasir_node.sim.world import World

CHOSEN = 8  # experts of a row, as models of this size have
HIDDEN_BYTES = 7168 * 2  # one row in bfloat16
LANES = (1, 2, 4)
MEMORY_BYTES_S = {"phone": 20e9, "home": 300e9, "rack": 1000e9}  # an activated expert is read once
READ_BYTES_S = 2e9  # an expert that nobody holds is read from the coordinator's disk
OWN = OwnCosts(
    trunk_s=20e-3, trunk_row_s=0.5e-3, layer_s=0.1e-3, expert_s=0.2e-3, pair_s=5e-6, call_s=0.1e-3, borrow_s=0.0
)


def predicted(world: World, coordinator: CoordinatorNode) -> Prediction:
    """The best of a few numbers of lanes, with each expert at the quickest worker that is proven for it."""
    model = coordinator.model
    experts = model.slices_per_layer * model.experts_per_slice
    expert_bytes = model.slice_bytes / model.experts_per_slice
    workers: dict[PeerId, WorkerCosts] = {}
    best: dict[tuple[int, int], PeerId] = {}
    for peer, part in coordinator.proven:
        if peer not in workers:
            workers[peer] = _costs_of(world.workers[peer].peer.link, coordinator.peer.link, expert_bytes)
        for index in range(part.first, part.last + 1):
            known = best.get((part.layer, index))
            if known is None or _reach_s(workers[peer]) < _reach_s(workers[known]):
                best[part.layer, index] = peer
    layers = tuple(range(model.layers))
    routes = {layer: tuple(best.get((layer, index)) for index in range(experts)) for layer in layers}
    own = replace(OWN, borrow_s=expert_bytes / READ_BYTES_S)
    scene = Scene(layers, experts, CHOSEN, HIDDEN_BYTES, {}, coordinator.proven, {})
    found = [predict(scene, Costs(own, workers), model.slots, lanes, routes) for lanes in LANES]
    return max(found, key=lambda each: each.tokens_per_s)


def _costs_of(worker: Link, coordinator: Link, expert_bytes: float) -> WorkerCosts:
    expert_s = expert_bytes / MEMORY_BYTES_S[worker.kind]
    rtt_s = 2 * (worker.one_way_s + coordinator.one_way_s)
    return WorkerCosts(rtt_s, 0.2e-3, expert_s, expert_s / 100, 1 / worker.down_bytes_s, 1 / worker.up_bytes_s)


def _reach_s(costs: WorkerCosts) -> float:
    return costs.rtt_s + costs.expert_s + HIDDEN_BYTES * (costs.sent_byte_s + costs.received_byte_s)
