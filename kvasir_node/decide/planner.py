"""Which experts of which layers go to which workers, and in how many lanes, for the most tokens per second.

It does not know whether fan-out is wanted now (that is `decide/governor`), who deserves load (the ledger: only proven
pairs come in), nor how costs were measured. The formulas are those of `decide/prediction`; how one layer is shared out
is `decide/shares`.

Three ways are known for each layer: all at home, balanced (near workers end when we do), all away (far workers: one
round trip pays for the whole layer). A plan takes one way for the first x layers and another for the rest, the layers
that save most first, and the best x. More lanes are tried while they are better: more of them shorten a lane's path
and lengthen what all need of our thread, so once they are worse they stay so. Small models are then improved expert
by expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations

from kvasir_node.base.ids import PeerId
from kvasir_node.decide.costs import Costs, WorkerCosts
from kvasir_node.decide.prediction import Prediction, Routes, Scene, cycle_s
from kvasir_node.decide.shares import (
    Kind,
    LayerPlan,
    Table,
    at_home,
    away,
    balanced,
    is_exact,
    kinds_of,
    measure,
    table_of,
)

LANES_MAX = 4
SMALL_EXPERTS = 32  # of all layers: up to so many, a plan is improved expert by expert
SMALL_WORKERS = 3  # workers up to which every set of them is tried, in a small model
FEW_KINDS = 4  # of layers: up to so many, several sets of workers are tried for each, in a model of many experts
TRIALS_MAX = 500  # single changes that are tried to improve a plan of a small model, about 20 µs each


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """`max_slowdown`: a token should take at most this many times one that is computed alone and at home. For given
    rows the plan with the most tokens per second is the one with the shortest token, so no plan is refused for it: it
    is the budget that each token of a plan in force is held against (`decide/governor`), and that round trips are
    compared with in words.
    `bytes_s`: of all calls, both ways; 0 = no limit. What is not held here leaves whatever the limit says.
    `must_share`: something that is held here leaves even if that costs more than it saves, for tests of the way."""

    max_slowdown: float
    bytes_s: float = 0.0
    lanes_max: int = LANES_MAX
    must_share: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """`obstacle` says in words why nothing that is held here leaves; empty when something does."""

    routes: Routes
    home: Routes  # the same with nothing away that is held here
    lanes: int
    rows: int
    predicted: Prediction
    alone: Prediction
    idle_s: float  # a token of one row, at home
    wide_s: float  # a step of twice the rows, at home
    budget_s: float  # what a token may take: max_slowdown × idle, or as long as at home if that is longer
    shares: Mapping[PeerId, float]  # of all pairs, by worker
    layers_shared: int  # layers of which a worker computes what is held here
    obstacle: str

    @property
    def gain(self) -> float:
        """Predicted tokens per second, as a multiple of alone."""
        return self.predicted.tokens_per_s / self.alone.tokens_per_s


def plan(scene: Scene, costs: Costs, rows: int, limits: PlanLimits) -> Plan:
    """The plan with the most predicted tokens per second for steps of so many rows; at worst all stays at home.

    Deterministic. Workers that `costs` does not know carry nothing.
    """
    return _Planning(scene, costs, rows, limits).best()


def shared_anyway(scene: Scene, costs: Costs, rows: int) -> Plan:
    """Each layer balanced among all who can compute something of it, in one lane, whatever that costs; all away that
    can be, where no balance gives anybody anything. Nothing else is tried, so it takes a part of the time of a plan."""
    return _Planning(scene, costs, rows, PlanLimits(math.inf, lanes_max=1)).forced()


@dataclass(frozen=True, slots=True)
class _Step:
    """A whole forward: one LayerPlan for each layer, and how long a cycle of all lanes takes."""

    layers: list[LayerPlan]
    lanes: int
    taken_s: float
    bytes: float  # of a cycle, both ways, all lanes


class _Planning:
    """One call of `plan`: the layers as kinds, priced for each number of lanes."""

    def __init__(self, scene: Scene, costs: Costs, rows: int, limits: PlanLimits) -> None:
        self._scene, self._costs, self._rows, self._limits = scene, costs, rows, limits
        self._peers = sorted({peer for peer, _ in scene.proven if peer in costs.workers})
        self._workers: list[WorkerCosts | None] = [None, *(costs.workers[peer] for peer in self._peers)]
        self._kinds = kinds_of(scene, {peer: number for number, peer in enumerate(self._peers, 1)}, rows)
        self._kind_at = [number for number, kind in enumerate(self._kinds) for _ in kind.layers]  # by layer
        self._is_exact = is_exact(scene)
        self._is_small = len(scene.layers) * scene.experts <= SMALL_EXPERTS
        self._bytes_refused = False
        self._trials = 0
        self._idle_s, self._wide_s = self._alone(1.0).taken_s, self._alone(2.0 * rows).taken_s
        self._home = self._alone(rows)
        self._budget_s = max(self._home.taken_s, limits.max_slowdown * self._idle_s)

    def best(self) -> Plan:
        best = self._home
        for lanes in range(1, min(self._limits.lanes_max, self._rows, LANES_MAX) + 1):
            tables = self._tables(self._rows / lanes)
            if lanes > 1 and self._bound_s(lanes, tables) >= best.taken_s:
                break
            found = self._search(lanes, tables)
            if found is not None and found.taken_s < best.taken_s:
                best = found
            elif lanes > 1:
                break
        if self._limits.must_share and not self._shares_held(best):
            best = self._forced()
        return self._plan_of(best)

    def forced(self) -> Plan:
        return self._plan_of(self._forced())

    def _forced(self) -> _Step:
        """Each layer balanced; all away that can be, if that leaves everything here as well."""
        tables = self._tables(self._rows)
        for way in (balanced, away):
            layers = self._each(lambda kind, table, way=way: way(kind, table, 1, [kind.workers]), tables)
            found = self._step(layers, 1, self._rows)
            if self._shares_held(found):
                break
        return found

    def _shares_held(self, step: _Step) -> bool:
        return any(
            machine and cell.held
            for number, chosen in zip(self._kind_at, step.layers, strict=True)
            for cell, machine in zip(self._kinds[number].cells, chosen.machines, strict=True)
        )

    # Pricing --------------------------------------------------------------------------------------------------

    def _tables(self, rows: float) -> list[Table]:
        return [
            table_of(kind, self._costs, self._workers, rows, self._scene.chosen, self._scene.row_bytes)
            for kind in self._kinds
        ]

    def _each(self, way: Callable[[Kind, Table], LayerPlan], tables: Sequence[Table]) -> list[LayerPlan]:
        """One way for all layers, worked out once for each kind."""
        found = [way(kind, table) for kind, table in zip(self._kinds, tables, strict=True)]
        return [found[number] for number in self._kind_at]

    def _alone(self, rows: float) -> _Step:
        """Nothing that is held here leaves, in one lane."""
        return self._step(self._each(at_home, self._tables(rows)), 1, rows)

    def _step(self, layers: list[LayerPlan], lanes: int, rows: float) -> _Step:
        trunk_s = self._costs.own.trunk(rows / lanes)
        here_s = trunk_s + sum([each.here_s for each in layers])
        path_s = trunk_s + sum([each.path_s for each in layers])
        busiest_s = max(map(sum, zip(*[each.busy_s for each in layers], strict=True)))
        carried = lanes * sum([each.bytes for each in layers])
        return _Step(layers, lanes, cycle_s(lanes, here_s, path_s, busiest_s), carried)

    def _fits(self, found: _Step) -> bool:
        """Whether a step keeps the limit of bytes; see `PlanLimits` for the other one."""
        if self._excess(found) <= 1.0:
            return True
        self._bytes_refused = True
        return False

    def _excess(self, found: _Step) -> float:
        """Bytes per second, as a multiple of the limit; what cannot stay here does not count as too much."""
        limit = max(self._limits.bytes_s, self._home.bytes / self._home.taken_s)
        return found.bytes / found.taken_s / limit if self._limits.bytes_s else 0.0

    def _bound_s(self, lanes: int, tables: Sequence[Table]) -> float:
        """No cycle of so many lanes is shorter: all work shared without loss, or our own part of it."""
        trunk_s = lanes * self._costs.own.trunk(self._rows / lanes)
        work_s = [sum([row[0] for row in table.costs if row[0] < math.inf]) for table in tables]
        quicker = 1.0 + sum(_relative_speed(self._costs, worker) for worker in self._workers if worker is not None)
        return max(trunk_s, (trunk_s + lanes * sum([work_s[number] for number in self._kind_at])) / quicker)

    # Searching ------------------------------------------------------------------------------------------------

    def _search(self, lanes: int, tables: Sequence[Table]) -> _Step | None:
        """The best step with so many lanes that keeps the limits; None when there is none."""
        ways = [
            self._each(at_home, tables),
            self._each(lambda kind, table: balanced(kind, table, lanes, self._choices(kind, table)), tables),
        ]
        if lanes > 1 or self._is_small:
            ways.append(self._each(lambda kind, table: away(kind, table, lanes, self._choices(kind, table)), tables))
        found = [self._mixed(lanes, first, rest) for rest, first in combinations(ways, 2)]
        steps = [each for each in found if each is not None]
        if self._is_small:
            starts = [*steps, *(self._step(way, lanes, self._rows) for way in ways)]
            steps += [each for each in (self._improved(start, tables) for start in starts) if each is not None]
        return min(steps, key=lambda each: each.taken_s, default=None)

    def _choices(self, kind: Kind, table: Table) -> Sequence[Sequence[int]]:
        """The sets of workers to try, all of them first; in a small model every one, else the best 1, 2, 4 …"""
        workers = kind.workers
        if self._is_small and len(workers) <= SMALL_WORKERS:
            sizes = range(len(workers), -1, -1)
            return [subset for size in sizes for subset in combinations(workers, size)]
        if (len(self._kinds) > FEW_KINDS and not self._is_exact) or len(workers) < 2:
            return (workers,)
        ranked = sorted(workers, key=lambda number: (table.call_of_share_s(number, 1 / (1 + len(workers))), number))
        sizes = [1 << power for power in range(len(workers).bit_length()) if 1 << power < len(workers)]
        return [workers, *[ranked[:size] for size in sizes]]

    def _mixed(self, lanes: int, first: Sequence[LayerPlan], rest: Sequence[LayerPlan]) -> _Step | None:
        """`first` for the x layers where that saves most, `rest` for the others: the best x."""
        pairs = list(zip(first, rest, strict=True))
        saved = [lanes * (b.here_s - a.here_s) + b.path_s - a.path_s for a, b in pairs]
        order = sorted(range(len(pairs)), key=lambda index: -saved[index])
        pairs = [pairs[index] for index in order]
        trunk_s = self._costs.own.trunk(self._rows / lanes)
        here = _sums([(a.here_s, b.here_s) for a, b in pairs], trunk_s)
        path = _sums([(a.path_s, b.path_s) for a, b in pairs], trunk_s)
        carried = _sums([(lanes * a.bytes, lanes * b.bytes) for a, b in pairs], 0.0)
        busy = [_sums([(a.busy_s[v], b.busy_s[v]) for a, b in pairs], 0.0) for v in range(len(self._workers))]
        taken = [cycle_s(lanes, *each) for each in zip(here, path, map(max, *busy, [0.0] * len(here)), strict=True)]
        for x in sorted(range(len(taken)), key=taken.__getitem__):
            found = _Step(list(rest), lanes, taken[x], carried[x])
            if self._fits(found):
                for index in order[:x]:
                    found.layers[index] = first[index]
                return found
        return None

    def _improved(self, found: _Step, tables: Sequence[Table]) -> _Step | None:
        """Moves one cell, or swaps two of a layer, while that helps and TRIALS_MAX allow; the best within the limits.

        On the way a step may need too many bytes, at a price: the best one within the limit is often behind such.
        """
        place = 0
        still = 0  # layers in a row that could not be improved
        score = self._score(found)
        best: _Step | None = None
        while still < len(self._kinds) and self._trials < TRIALS_MAX:
            still += 1
            for machines in _neighbours(self._kinds[place], found.layers[place].machines):
                self._trials += 1
                layers = list(found.layers)
                layers[place] = measure(self._kinds[place], tables[place], machines)
                changed = self._step(layers, found.lanes, self._rows)
                if (best is None or changed.taken_s < best.taken_s) and self._fits(changed):
                    best = changed
                if self._score(changed) < score * (1 - 1e-9):
                    found, score, still = changed, self._score(changed), 0
                    break
            place = place if still == 0 else (place + 1) % len(self._kinds)
        return best

    def _score(self, found: _Step) -> float:
        return found.taken_s * max(1.0, self._excess(found))

    # The answer -----------------------------------------------------------------------------------------------

    def _plan_of(self, best: _Step) -> Plan:
        shares = [sum(column) / len(best.layers) for column in zip(*[each.shares for each in best.layers], strict=True)]
        routes, shared = self._routes_of(best)
        return Plan(
            routes=routes,
            home=routes if shared == 0 else self._routes_of(self._home)[0],
            lanes=best.lanes,
            rows=self._rows,
            predicted=self._prediction(best),
            alone=self._prediction(self._home),
            idle_s=self._idle_s,
            wide_s=self._wide_s,
            budget_s=self._budget_s,
            shares={peer: share for peer, share in zip(self._peers, shares[1:], strict=True) if share > 0.0},
            layers_shared=shared,
            obstacle="" if shared else self._obstacle(),
        )

    def _routes_of(self, step: _Step) -> tuple[Routes, int]:
        """For each layer the peers of its experts; and in how many of them one has what is held here."""
        routes: dict[int, tuple[PeerId | None, ...]] = {}
        shared = 0
        places = [(kind, place) for kind in self._kinds for place in range(len(kind.layers))]
        ranked: dict[int, tuple[list[PeerId | None], bool]] = {}  # of each LayerPlan: many layers have one in common
        for (kind, place), chosen in zip(places, step.layers, strict=True):
            if id(chosen) not in ranked:
                ranked[id(chosen)] = self._ranked(kind, chosen)
            peers, shares_held = ranked[id(chosen)]
            row = list(peers)
            if not all(peer is None for peer in peers):
                for index, peer in zip(kind.orders[place], peers, strict=True):
                    row[index] = peer
            routes[kind.layers[place]] = tuple(row)
            shared += shares_held
        return routes, shared

    def _ranked(self, kind: Kind, chosen: LayerPlan) -> tuple[list[PeerId | None], bool]:
        """The peer of each expert in a kind's order, and whether one has what is held here."""
        who: list[PeerId | None] = [None, *self._peers]
        pairs = list(zip(kind.cells, chosen.machines, strict=True))
        peers = [who[machine] for cell, machine in pairs for _ in range(cell.count)]
        return peers, any(machine and cell.held for cell, machine in pairs)

    def _prediction(self, found: _Step) -> Prediction:
        return Prediction(self._rows / found.taken_s, found.taken_s, found.bytes / found.taken_s)

    def _obstacle(self) -> str:
        workers = [worker for worker in self._workers if worker is not None]
        if not workers:
            return "no proven worker"
        if self._bytes_refused:
            return f"rows would need more than {self._limits.bytes_s / 1e6:.3g} MB/s"
        nearest_s, layers = min(worker.rtt_s for worker in workers), len(self._kind_at)
        if nearest_s * layers > self._budget_s:
            return f"worker RTT {nearest_s * 1000:.0f} ms × {layers} layers > budget {self._budget_s * 1000:.0f} ms"
        quickest = max(_relative_speed(self._costs, worker) for worker in workers)
        if quickest < 0.5:
            return f"the quickest worker is {1 / max(quickest, 1e-3):.0f}× slower than this machine"
        return "calls would cost more than they save"


def _relative_speed(costs: Costs, worker: WorkerCosts) -> float:
    """How much a worker computes in the time in which we compute 1: the more favourable of its two rates."""
    own = costs.own
    return max(own.expert_s / max(1e-12, worker.expert_s), own.pair_s / max(1e-12, worker.pair_s))


def _sums(values: Sequence[tuple[float, float]], start: float) -> list[float]:
    """[x]: the first numbers of x pairs, the second of the others, and `start`."""
    total = start + sum([rest for _, rest in values])
    return list(accumulate([first - rest for first, rest in values], initial=total))


def _neighbours(kind: Kind, machines: tuple[int, ...]) -> Iterator[list[int]]:
    """Assignments that differ by one cell's machine, or by two cells that changed places."""
    for place, cell in enumerate(kind.cells):
        for machine in (0, *kind.workers):
            if machine != machines[place] and cell.able[machine]:
                yield [*machines[:place], machine, *machines[place + 1 :]]
    for one, two in combinations(range(len(machines)), 2):
        a, b = machines[one], machines[two]
        if a != b and kind.cells[one].able[b] and kind.cells[two].able[a]:
            swapped = list(machines)
            swapped[one], swapped[two] = b, a
            yield swapped
