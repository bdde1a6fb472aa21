"""Who computes each expert of a layer this time: dealt out by how many rows want it now, among those who may.

It does not know rows, frames or who deserves load. A plan (`decide/planner`) shares out what is expected, so that those
it chose are done at about the same time on average. But of a step's few rows some machine always gets more than its
part, and the layer waits for it. Where several machines have an expert, which one computes it is settled anew each
time. The kernel of `model/pair_split` does this while it cuts a layer's pairs; `deal` is what it is held to.

For an expert that c rows want, machine m takes expert_s[m] + pair_s[m]·c more. Those that only one may compute are
dealt first, then those wanted most, each to who would be done with it first (longest processing time first, Graham
1969).

Prices are as `decide/prediction` has times, but for two things. A worker begins while we are still sending to the
others, and to it. And what is in doubt about workers is no reason to give them less: of equals that are all done at the
same time in the mean, a layer waits for each as often, and what one gives to the others costs what it saves. With half
of the doubt, or all of it, added to workers' times, simulated layers took up to 1 % longer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from kvasir_node.base.ids import PeerId, SliceId
from kvasir_node.decide.costs import Costs
from kvasir_node.decide.prediction import CALL_BYTES, PAIR_BYTES, Routes, share_of_rows

ABLE_MAX = 4  # machines among which an expert is dealt; more would hardly balance better


SENDING_SHARE = 0.25  # of our own time of a call: in it the worker has its frame, or will have, and we do not compute

Price = Callable[[PeerId | None, float, int], tuple[float, float, float]]
"""A machine's three prices, None = here, for one that should get about such a share of a layer's pairs, in a layer that
so many workers share."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Seconds, by machine: before its first expert, for each expert, and for each pair."""

    fixed_s: tuple[float, ...]
    expert_s: tuple[float, ...]
    pair_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Dealing:
    """One layer. Machine n is peers[n - 1], 0 is here. `able`: by expert the machines that may compute it, the one that
    the plan gave it to first; never empty. `prices` only matter where there is a choice."""

    peers: tuple[PeerId, ...]
    able: tuple[tuple[int, ...], ...]
    prices: Prices

    def priced(self, price: Price) -> Dealing:
        """The same with other prices."""
        planned = Counter(machines[0] for machines in self.able)
        who: tuple[PeerId | None, ...] = (None, *self.peers)
        columns = zip(
            *(price(peer, planned[each] / len(self.able), len(self.peers)) for each, peer in enumerate(who)),
            strict=True,
        )
        return replace(self, prices=Prices(*map(tuple, columns)))

    @property
    def has_choice(self) -> bool:
        return any(len(machines) > 1 for machines in self.able)

    def planned(self) -> tuple[PeerId | None, ...]:
        """The route that it was made of."""
        who: tuple[PeerId | None, ...] = (None, *self.peers)
        return tuple(who[machines[0]] for machines in self.able)


Dealings = Mapping[int, Dealing]
"""By layer; one that has none is computed here."""


def fixed(routes: Routes) -> Dealings:
    """No choice: each expert is computed where its route says."""
    return {layer: _dealing(row, {}, frozenset()) for layer, row in routes.items() if any(row)}


def dealings(
    routes: Routes, proven: Collection[tuple[PeerId, SliceId]], held: Mapping[int, Collection[int]]
) -> Dealings:
    """Each expert among the peers of its layer's route that are proven for it, and us where a peer may compute what is
    held here. Only for routes that let it: while fan-out is off, what is held here has no choice (law 2)."""
    parts: dict[int, list[tuple[PeerId, SliceId]]] = {}
    for peer, part in proven:
        parts.setdefault(part.layer, []).append((peer, part))
    found: dict[int, Dealing] = {}
    for layer, row in routes.items():
        if any(row):
            others: dict[PeerId, list[SliceId]] = {}
            for peer, part in parts.get(layer, ()):
                others.setdefault(peer, []).append(part)
            found[layer] = _dealing(row, others, frozenset(held.get(layer, ())))
    return found


def _dealing(row: Sequence[PeerId | None], parts: Mapping[PeerId, Sequence[SliceId]], held: frozenset[int]) -> Dealing:
    peers = tuple(sorted({peer for peer in row if peer is not None}))
    number: dict[PeerId | None, int] = {peer: index for index, peer in enumerate((None, *peers))}
    also: list[list[int]] = [[0] if index in held else [] for index in range(len(row))]
    for peer in peers:
        for part in parts.get(peer, ()):
            for index in range(part.first, min(part.last + 1, len(row))):
                also[index].append(number[peer])
    able: list[tuple[int, ...]] = []
    for index, peer in enumerate(row):
        first = number[peer]
        if peer is None and index not in held:
            able.append((0,))  # nobody has it: it is read here
            continue
        # Beginning with who comes after the planned one, so that not all experts have the same few to choose among.
        rest = sorted(set(also[index]) - {first}, key=lambda machine: (machine != 0, (machine - first) % len(number)))
        able.append((first, *rest[: ABLE_MAX - 1]))
    nothing = (0.0,) * len(number)
    return Dealing(peers, tuple(able), Prices(nothing, nothing, nothing))


def pricing(costs: Costs, chosen: int, row_bytes: float) -> Price:
    """A machine's prices, as `decide/prediction` has them, but that a pair brings the part of a row that it does on
    average with such a share: which rows travel anyhow is not known before all is dealt. `row_bytes`: one way."""

    def price(peer: PeerId | None, share: float, workers: int) -> tuple[float, float, float]:
        worker = None if peer is None else costs.workers.get(peer)
        if worker is None:
            own = costs.own
            return own.layer_s + SENDING_SHARE * own.call_s * workers, own.expert_s, own.pair_s
        both_ways_s = worker.sent_byte_s + worker.received_byte_s
        rows_of_pair = share_of_rows(share, chosen) / (chosen * share) if share > 0.0 else 1.0
        return (
            worker.call_s + worker.rtt_s + CALL_BYTES / 2 * both_ways_s,
            worker.expert_s,
            worker.pair_s + PAIR_BYTES * worker.sent_byte_s + rows_of_pair * row_bytes * both_ways_s,
        )

    return price


def deal(dealing: Dealing, pairs: Sequence[int], allowed: Sequence[bool]) -> list[int]:
    """The machine of each expert, for so many pairs of each. Machines that are not allowed get none; what no other may
    compute is then ours."""
    prices = dealing.prices
    load = list(prices.fixed_s)
    where = [0] * len(pairs)

    def done_s(expert: int, machine: int) -> float:
        return load[machine] + prices.expert_s[machine] + prices.pair_s[machine] * pairs[expert]

    choices = {
        expert: [machine for machine in dealing.able[expert] if allowed[machine]] or [0]
        for expert, count in enumerate(pairs)
        if count
    }
    for expert in sorted(choices, key=lambda each: (len(choices[each]) > 1, -pairs[each], each)):
        where[expert] = machine = min(choices[expert], key=lambda each: done_s(expert, each))
        load[machine] = done_s(expert, machine)
    return where
