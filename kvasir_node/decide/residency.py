"""Which experts stay in this machine's memory when not all of them fit.

It does not know files, tensors, threads or who else computes what. All functions are pure; `heat` is, by layer, how
much each expert was used lately, in (row, expert) pairs (see `FanoutDispatch.heat`).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvasir_node.base.ids import ExpertId

BORROWED_RATIO = 0.125  # of the room, for those that are read when they are needed, when not all can stay
HOTTER_RATIO = 1.5  # an expert takes another one's place only when it is this much hotter ...
HOTTER_PAIRS = 1.0  # ... and by this many pairs, so that nothing moves for what was hardly used
Heat = Mapping[int, Sequence[float]]


@dataclass(frozen=True, slots=True)
class Swap:
    """`given_up` leaves its place in memory to `taken`."""

    given_up: ExpertId
    taken: ExpertId


def places(room: int, wanted: int, *, borrows: bool = True) -> int:
    """How many of `wanted` experts may stay in memory that has room for `room`: all, or what borrowing leaves."""
    if wanted <= room or not borrows:
        return min(wanted, room)
    return room - max(1, int(room * BORROWED_RATIO))


def spread_over_layers(wanted: Iterable[ExpertId], count: int) -> list[ExpertId]:
    """The first `count` experts to hold while nothing is known of their use: as many of each layer as can be."""
    rank: dict[int, int] = {}
    ranked: list[tuple[int, ExpertId]] = []
    for expert in sorted(wanted):
        place = rank[expert.layer] = rank.get(expert.layer, -1) + 1
        ranked.append((place, expert))
    return sorted(expert for _, expert in sorted(ranked)[:count])


def plan_swaps(
    *, wanted: Iterable[ExpertId], held: Mapping[int, frozenset[int]], heat: Heat, swaps_max: int
) -> list[Swap]:
    """The swaps that warm memory most, hottest newcomer first: the coldest held experts go.

    Nothing swaps back and forth: a newcomer must be hotter than who leaves by HOTTER_RATIO and HOTTER_PAIRS both.
    """

    def warmth(expert: ExpertId) -> tuple[float, int, int]:
        row = heat.get(expert.layer, ())
        return (row[expert.index] if expert.index < len(row) else 0.0, expert.layer, expert.index)

    outside = (e for e in wanted if e.index not in held.get(e.layer, frozenset()))
    inside = (ExpertId(layer, index) for layer, indices in held.items() for index in indices)
    hottest = heapq.nlargest(swaps_max, outside, key=warmth)
    coldest = heapq.nsmallest(swaps_max, inside, key=warmth)
    return [
        Swap(cold, hot)
        for cold, hot in zip(coldest, hottest, strict=False)
        if warmth(hot)[0] >= HOTTER_RATIO * warmth(cold)[0] + HOTTER_PAIRS
    ]
