"""What a step takes when each expert of each layer is computed where a route says: the formulas, expert by expert.

It does not choose anything: that is `decide/planner`, which computes the same in bulk and is held to this module by
tests. Nor does it know how costs were measured.

T rows choose K of E experts each, in w lanes of t = T/w rows. With s_e = the expected share of all pairs of a layer
that want expert e, a row wants it with chance p_e = min(1, K·s_e), so for a set of experts

    activated experts    A = Σ_e 1 − (1 − p_e)^t        (their weights are read once each)
    pairs                P = t · K · σ,  σ = Σ_e s_e
    rows that travel     R = t · (1 − (1 − σ)^K)        (each once, as K draws)

    a call to worker v   call_v = (call + expert·A + pair·P) · caution_v
                                + (rtt + R·row_bytes each way + P·pair_bytes) · κ_v
    here                 here  = layer + expert·A + pair·P + borrow·(activated experts that are not in memory)
    our own part         calls · own_call + here
    the layer            calls · own_call + max(here, the longest call)

summed over the layers, and the trunk added,

    C = trunk + Σ our own part     what a lane needs of our own thread
    L = trunk + Σ layer            how long a lane takes when nobody is in its way
    B_v = Σ (expert·A + pair·P)    what it needs of worker v (pairs with their bytes)
    cycle = L                      for one lane
          = (Σ x^4)^¼ over w·C, L, w·max_v B_v     for more: nothing overlaps perfectly, a lane that becomes ready
                                                   finds another computing

    tokens/s = T / cycle, and a token takes a cycle. caution_v = 1 + CAUTION · doubt_v of its computing, and κ_v
the same of its link: what is in doubt about a short way says nothing about the computing at its end.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from kvasir_node.base.ids import PeerId, SliceId
from kvasir_node.decide.costs import Costs, WorkerCosts

PAIR_BYTES = 12  # row and expert as int32, weight as float32
CALL_BYTES = 128  # headers of a call and of its answer, about
CAUTION = 0.5  # of a worker's doubt that is added to its times: a layer waits for the slowest answer

Routes = Mapping[int, tuple[PeerId | None, ...]]
"""Layer -> for each expert its peer, None = here."""


@dataclass(frozen=True, slots=True)
class Scene:
    """What is to be computed, and who could. `chosen` = K; `row_bytes` = one row on the wire, one way."""

    layers: tuple[int, ...]
    experts: int
    chosen: int
    row_bytes: int
    held: Mapping[int, frozenset[int]]  # layer -> experts in memory here
    proven: Collection[tuple[PeerId, SliceId]]
    heat: Mapping[int, Sequence[float]]  # layer -> how much each expert was used lately, in any unit


@dataclass(frozen=True, slots=True)
class Prediction:
    tokens_per_s: float
    token_s: float  # from one token of a request to its next
    bytes_s: float  # of all calls, both ways


def caution(doubt: float) -> float:
    return 1.0 + CAUTION * doubt


def share_of_rows(share: float, chosen: int) -> float:
    """What part of all rows travels to a machine with such a share of a layer's pairs: each row once, as K draws."""
    return 1.0 - max(0.0, 1.0 - share) ** chosen


def expected_shares(experts: int, heat: Sequence[float]) -> list[float]:
    """Each expert's share of a layer's pairs. One that nobody used yet still weighs a little."""
    total = sum(heat)
    if total <= 0.0 or len(heat) != experts:
        return [1.0 / experts] * experts
    floor = total / (100 * experts)
    whole = total + floor * experts
    return [(each + floor) / whole for each in heat]


def cycle_s(lanes: int, here_s: float, path_s: float, busiest_s: float) -> float:
    """How long until each lane has made one step, of C, L and max_v B_v of one lane."""
    if lanes == 1:
        return path_s
    parts = (lanes * here_s, path_s, lanes * busiest_s)
    longest_s = max(parts)
    return longest_s * sum([(part / longest_s) ** 4 for part in parts]) ** 0.25


def predict(scene: Scene, costs: Costs, rows: int, lanes: int, routes: Routes) -> Prediction:
    """What a route gives with these costs. An expert whose peer is not proven for it is computed here."""
    proven = _proven(scene, costs)
    here_s = path_s = costs.own.trunk(rows / lanes)
    busy: dict[PeerId, float] = {}
    carried = 0.0
    for layer in scene.layers:
        row = routes.get(layer, (None,) * scene.experts)
        able = {peer: proven.get((peer, layer), ()) for peer in set(row) if peer is not None}
        checked = [peer if peer is not None and index in able[peer] else None for index, peer in enumerate(row)]
        part = _Layer(scene, costs, rows / lanes, layer, checked)
        here_s += part.own_s
        path_s += part.path_s
        carried += part.bytes
        for peer, taken_s in part.busy.items():
            busy[peer] = busy.get(peer, 0.0) + taken_s
    taken_s = cycle_s(lanes, here_s, path_s, max(busy.values(), default=0.0))
    return Prediction(rows / taken_s, taken_s, lanes * carried / taken_s)


def _proven(scene: Scene, costs: Costs) -> Mapping[tuple[PeerId, int], Collection[int]]:
    """The experts of each layer that each peer whose costs are known may compute."""
    found: dict[tuple[PeerId, int], Collection[int]] = {}
    for peer, part in scene.proven:
        if peer in costs.workers:
            more, key = range(part.first, part.last + 1), (peer, part.layer)
            found[key] = {*found[key], *more} if key in found else more
    return found


class _Layer:
    """One pass of one lane through a layer."""

    def __init__(self, scene: Scene, costs: Costs, rows: float, layer: int, row: Sequence[PeerId | None]) -> None:
        shares = expected_shares(scene.experts, scene.heat.get(layer, ()))
        held = scene.held.get(layer, frozenset())
        sets: dict[PeerId | None, list[int]] = {}
        for index, peer in enumerate(row):
            sets.setdefault(peer, []).append(index)
        self.busy: dict[PeerId, float] = {}
        self.bytes = 0.0
        here_s, longest_s = 0.0, 0.0
        for peer, experts in sets.items():
            share = sum([shares[index] for index in experts])
            wanted = {index: 1.0 - (1.0 - min(1.0, scene.chosen * shares[index])) ** rows for index in experts}
            activated, pairs = sum(wanted.values()), rows * scene.chosen * share
            if peer is None:
                own = costs.own
                missing = sum([each for index, each in wanted.items() if index not in held])
                here_s = own.layer_s + own.expert_s * activated + own.pair_s * pairs + own.borrow_s * missing
            else:
                travelling = rows * share_of_rows(share, scene.chosen)
                longest_s = max(longest_s, self._call_s(scene, costs.workers[peer], peer, activated, pairs, travelling))
        handling_s = costs.own.call_s * len(self.busy)
        self.own_s = here_s + handling_s
        self.path_s = max(here_s, longest_s) + handling_s

    def _call_s(
        self, scene: Scene, worker: WorkerCosts, peer: PeerId, activated: float, pairs: float, travelling: float
    ) -> float:
        computing_s = worker.expert_s * activated + worker.pair_s * pairs
        sent = CALL_BYTES / 2 + travelling * scene.row_bytes + pairs * PAIR_BYTES
        received = CALL_BYTES / 2 + travelling * scene.row_bytes
        self.bytes += sent + received
        more, link_more = caution(worker.doubt), caution(worker.link_doubt)
        self.busy[peer] = more * computing_s + link_more * pairs * PAIR_BYTES * worker.sent_byte_s
        travel_s = worker.rtt_s + sent * worker.sent_byte_s + received * worker.received_byte_s
        return link_more * travel_s + more * (worker.call_s + computing_s)
