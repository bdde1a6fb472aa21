"""One layer's experts shared out among those who can compute them: quickly, for hundreds of experts and layers.

It does not know lanes' interplay, limits or other layers (that is `decide/planner`), nor who deserves load. The
formulas are those of `decide/prediction`. Machines are numbers: 0 = here, n = the n-th worker.

Layers that the same machines hold in the same way are one *kind*: the k-th hottest expert of each is taken for the
k-th hottest of their mean, so a kind is shared out once. Experts that the same machines hold and that are about as hot
move together, as a *cell*. The hottest and the coldest are cells of their own: the first weigh, the last balance. There
are about CELLS_MAX cells over all kinds at most, which bounds the time that a plan takes; a model of few experts has a
kind for each layer and a cell for each expert.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import add

from kvasir_node.base.ids import PeerId
from kvasir_node.decide.costs import Costs, WorkerCosts
from kvasir_node.decide.prediction import CALL_BYTES, PAIR_BYTES, Scene, caution, expected_shares, share_of_rows

CELLS_MAX = 480
CELLS_MIN = 8  # of a kind, however many there are
EXACT_EXPERTS = 256  # of all layers: up to so many, each layer is a kind and each expert a cell


@dataclass(frozen=True, slots=True)
class Cell:
    count: int  # experts in it
    share: float  # of the layer's pairs
    chance: float  # that a row wants a given one of them; of equals that are activated as often as these are
    wanted: float  # experts of it that one row wants
    able: tuple[bool, ...]  # by machine; here when it is in memory, or nowhere else
    held: bool  # in memory here


@dataclass(frozen=True, slots=True)
class Kind:
    """`orders[i]`: the experts of layers[i], cell by cell."""

    layers: tuple[int, ...]
    cells: tuple[Cell, ...]
    orders: tuple[tuple[int, ...], ...]
    workers: tuple[int, ...]  # machines that can compute something of it, without 0


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Who computes each cell, and what one forward's pass through the layer takes."""

    machines: tuple[int, ...]  # by cell
    here_s: float  # our own thread computes and handles calls
    path_s: float  # until the sums are there
    busy_s: tuple[float, ...]  # by machine; 0 of here
    bytes: float  # both ways
    shares: tuple[float, ...]  # of the layer's pairs, by machine


@dataclass(frozen=True, slots=True)
class Table:
    """What each cell costs on each machine for so many rows, infinite where it cannot be."""

    costs: tuple[tuple[float, ...], ...]  # [cell][machine]
    fixed_s: tuple[float, ...]  # by machine: what a call costs without rows; 0: the layer's fixed cost
    row_s: tuple[float, ...]  # by machine: a row there and back
    pair_bytes: float
    row_bytes: float
    rows: float
    chosen: int
    call_s: float

    def travelling(self, share: float) -> float:
        """Rows that a machine with that share of the pairs is sent."""
        return self.rows * share_of_rows(share, self.chosen)

    def call_of_share_s(self, number: int, share: float) -> float:
        """A call with that share of everything; of what a machine cannot compute, nothing."""
        work_s = sum([row[number] for row in self.costs if row[number] < math.inf])
        return self.fixed_s[number] + self.row_s[number] * self.travelling(share) + share * work_s


def kinds_of(scene: Scene, numbers: Mapping[PeerId, int], rows: int) -> list[Kind]:
    """The layers of a scene as kinds; `numbers` are the machines of its workers, from 1 on.

    Cells activate as many experts as theirs would for that many rows, and about as many for others.
    """
    parts: dict[int, list[tuple[int, int, int]]] = {layer: [] for layer in scene.layers}
    for peer, part in scene.proven:
        number = numbers.get(peer)
        if number is not None and part.layer in parts:
            parts[part.layer].append((number, part.first, min(part.last, scene.experts - 1)))
    exact = is_exact(scene)
    alike: dict[object, list[int]] = {}
    for layer in scene.layers:
        key = layer if exact else (frozenset(parts[layer]), scene.held.get(layer, frozenset()))
        alike.setdefault(key, []).append(layer)
    cells = scene.experts if exact else max(CELLS_MIN, CELLS_MAX // len(alike))
    return [
        _kind_of(scene, layers, _groups(scene, layers[0], parts[layers[0]]), cells, 1 + len(numbers), rows)
        for layers in alike.values()
    ]


def is_exact(scene: Scene) -> bool:
    """Whether each layer is shared out by itself, expert by expert."""
    return len(scene.layers) * scene.experts <= EXACT_EXPERTS


def _groups(
    scene: Scene, layer: int, parts: Sequence[tuple[int, int, int]]
) -> Mapping[tuple[int, bool], Sequence[int]]:
    """A layer's experts by who can compute them: (machines as bits, held here)."""
    held = scene.held.get(layer, frozenset())
    bits = [1] * scene.experts
    for number, first, last in parts:
        for index in range(first, last + 1):
            bits[index] |= 1 << number
    for index in set(range(scene.experts)) - held:
        if bits[index] > 1:
            bits[index] &= ~1  # somebody has it in memory, so it is not read here
    groups: dict[tuple[int, bool], list[int]] = {}
    for index, each in enumerate(bits):
        groups.setdefault((each, index in held), []).append(index)
    return groups


def _kind_of(
    scene: Scene,
    layers: Sequence[int],
    groups: Mapping[tuple[int, bool], Sequence[int]],
    cells_max: int,
    machines: int,
    rows: int,
) -> Kind:
    """Its cells, the hottest first, from the mean over its layers of the k-th hottest expert of each group.

    Unequal experts are activated less often than equals with their mean, so chances are those of equals that are
    activated as often.
    """
    shares = [expected_shares(scene.experts, scene.heat.get(layer, ())) for layer in layers]
    chosen, certain = scene.chosen, 1.0 / scene.chosen
    nevers = [[(1.0 - chosen * each) ** rows if each < certain else 0.0 for each in row] for row in shares]
    cells: list[tuple[float, int, Cell]] = []
    orders: list[list[list[int]]] = []  # [group][layer]
    places: list[tuple[int, int]] = []  # of each cell: group, first of its experts
    for group, ((bits, held), members) in enumerate(groups.items()):
        able = tuple(bits >> number & 1 == 1 for number in range(machines))
        ranked = [sorted(members, key=each.__getitem__, reverse=True) for each in shares]
        share_at, never_at = _means(shares, ranked), _means(nevers, ranked)
        orders.append(ranked)
        start = 0
        for end in _cuts(len(members), max(1, round(cells_max * len(members) / scene.experts))):
            count, share = end - start, sum(share_at[start:end])
            chance = 1.0 - (sum(never_at[start:end]) / count) ** (1.0 / rows)
            wanted = count * min(1.0, scene.chosen * share / count)
            cells.append((-chance, len(places), Cell(count, share, chance, wanted, able, held)))
            places.append((group, start))
            start = end
    joined = orders[0]
    if len(groups) > 1:
        cells.sort(key=lambda each: each[:2])
        joined = _joined([(*places[at], cell.count) for _, at, cell in cells], orders)
    workers = tuple(number for number in range(1, machines) if any(cell.able[number] for _, _, cell in cells))
    return Kind(tuple(layers), tuple(cell for _, _, cell in cells), tuple(map(tuple, joined)), workers)


def _joined(parts: Sequence[tuple[int, int, int]], orders: Sequence[Sequence[Sequence[int]]]) -> list[list[int]]:
    """Each layer's experts, of parts that are (group, first, count) of the groups' orders."""
    joined: list[list[int]] = [[] for _ in orders[0]]
    for group, first, count in parts:
        for order, ranked in zip(joined, orders[group], strict=True):
            order += ranked[first : first + count]
    return joined


def _means(values: Sequence[Sequence[float]], orders: Sequence[Sequence[int]]) -> list[float]:
    """The mean over layers of the value at each rank."""
    picked = [[row[index] for index in order] for row, order in zip(values, orders, strict=True)]
    return picked[0] if len(picked) == 1 else [sum(column) / len(picked) for column in zip(*picked, strict=True)]


def _cuts(experts: int, cells: int) -> Sequence[int]:
    """Where cells end: a quarter of them one expert each at either end, the middle in equal parts."""
    if cells >= experts:
        return range(1, experts + 1)
    single = cells // 4
    middle = cells - 2 * single
    width = experts - 2 * single
    ends = [single + round(width * (i + 1) / middle) for i in range(middle)]
    return [*range(1, single + 1), *ends, *range(experts - single + 1, experts + 1)]


def table_of(
    kind: Kind, costs: Costs, workers: Sequence[WorkerCosts | None], rows: float, chosen: int, row_bytes: float
) -> Table:
    """Prices a layer; `workers` by machine, None at 0. A worker's times are raised by their doubt."""
    own = costs.own
    sizes = [(cell.count * (1.0 - (1.0 - cell.chance) ** rows), rows * chosen * cell.share) for cell in kind.cells]
    if rows == 1.0:
        sizes = [(cell.wanted, pairs) for cell, (_, pairs) in zip(kind.cells, sizes, strict=True)]
    columns: list[list[float]] = [
        [
            (own.expert_s + (0.0 if cell.held else own.borrow_s)) * activated + own.pair_s * pairs
            if cell.able[0]
            else math.inf
            for cell, (activated, pairs) in zip(kind.cells, sizes, strict=True)
        ]
    ]
    fixed, each_row = [own.layer_s], [0.0]
    for number, worker in enumerate(workers):
        if worker is None:
            continue
        more, link_more = caution(worker.doubt), caution(worker.link_doubt)
        expert_s = more * worker.expert_s
        pair_s = more * worker.pair_s + link_more * PAIR_BYTES * worker.sent_byte_s
        columns.append(
            [
                expert_s * activated + pair_s * pairs if cell.able[number] else math.inf
                for cell, (activated, pairs) in zip(kind.cells, sizes, strict=True)
            ]
        )
        headers_s = CALL_BYTES / 2 * (worker.sent_byte_s + worker.received_byte_s)
        fixed.append(link_more * (worker.rtt_s + headers_s) + more * worker.call_s)
        each_row.append(link_more * row_bytes * (worker.sent_byte_s + worker.received_byte_s))
    return Table(
        tuple(zip(*columns, strict=True)),
        tuple(fixed),
        tuple(each_row),
        rows * chosen * PAIR_BYTES,
        2.0 * row_bytes,
        rows,
        chosen,
        own.call_s,
    )


def measure(kind: Kind, table: Table, machines: Sequence[int]) -> LayerPlan:
    """What an assignment takes."""
    work = [0.0] * len(table.fixed_s)
    share = [0.0] * len(table.fixed_s)
    for cell, costs, machine in zip(kind.cells, table.costs, machines, strict=True):
        work[machine] += costs[machine]
        share[machine] += cell.share
    here_s = work[0] + table.fixed_s[0] if share[0] > 0.0 else 0.0
    longest_s, calls, carried = here_s, 0, 0.0
    for number in kind.workers:
        if share[number] > 0.0:
            rows = table.travelling(share[number])
            call_s = table.fixed_s[number] + table.row_s[number] * rows + work[number]
            longest_s = max(longest_s, call_s)
            calls += 1
            carried += CALL_BYTES + table.row_bytes * rows + table.pair_bytes * share[number]
    handling_s = calls * table.call_s
    work[0] = 0.0
    return LayerPlan(tuple(machines), here_s + handling_s, longest_s + handling_s, tuple(work), carried, tuple(share))


def at_home(kind: Kind, table: Table) -> LayerPlan:
    """Nothing that is held here leaves; what is not goes where it is done soonest; what nobody has is read here."""
    if all(cell.held for cell in kind.cells):
        return measure(kind, table, [0] * len(kind.cells))
    costs = [
        (row[0], *[math.inf] * (len(row) - 1)) if cell.held else row
        for cell, row in zip(kind.cells, table.costs, strict=True)
    ]
    return _best_of(kind, table, costs, (kind.workers, ()), 1)


def balanced(kind: Kind, table: Table, lanes: int, choices: Sequence[Sequence[int]]) -> LayerPlan:
    """The hottest first, each to who would be done with it first; the best over the sets of workers to choose among.

    With several lanes a round trip passes while others compute: it counts for a lane's part of the time only.
    """
    return _best_of(kind, table, table.costs, choices, lanes)


def away(kind: Kind, table: Table, lanes: int, choices: Sequence[Sequence[int]]) -> LayerPlan:
    """All that others can compute is computed there."""
    costs = [(math.inf, *row[1:]) if min(row[1:], default=math.inf) < math.inf else row for row in table.costs]
    return _best_of(kind, table, costs, choices, lanes)


def _best_of(
    kind: Kind,
    table: Table,
    costs: Sequence[tuple[float, ...]],
    choices: Sequence[Sequence[int]],
    lanes: int,
) -> LayerPlan:
    found: LayerPlan | None = None
    for chosen in choices:
        machines = _deal(table, costs, chosen, lanes)
        if machines is not None:
            plan = measure(kind, table, machines)
            if found is None or _cycle_s(plan, lanes) < _cycle_s(found, lanes):
                found = plan
    assert found is not None  # one of the choices always leaves a machine for each cell
    return found


def _cycle_s(plan: LayerPlan, lanes: int) -> float:
    return max(lanes * plan.here_s, plan.path_s, lanes * max(plan.busy_s))


def _deal(table: Table, costs: Sequence[tuple[float, ...]], workers: Sequence[int], lanes: int) -> list[int] | None:
    """Longest processing time first, on machines that start when their call's fixed part is over."""
    load = [math.inf] * len(table.fixed_s)
    load[0] = table.fixed_s[0]
    rows = table.travelling(1.0 / (1 + len(workers)))
    for number in workers:
        load[number] = (table.fixed_s[number] + table.row_s[number] * rows) / lanes
    machines: list[int] = []
    for row in costs:
        done = list(map(add, load, row))
        soonest = min(done)
        if soonest == math.inf:
            return None
        machine = done.index(soonest)
        load[machine] = soonest
        machines.append(machine)
    return machines
