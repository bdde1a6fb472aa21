"""What a coordinator asks the market for: how many copies of which slices.

It does not know hubs, leases or who answers. want = what is missing here (the base) + the surge while saturated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvasir_node.base.ids import PeerId, SliceId


@dataclass(frozen=True, slots=True)
class Wanted:
    """How many copies of a slice are wanted in all, and which peers have proven that they hold one."""

    slice: SliceId
    want: int
    proven: tuple[PeerId, ...]


def demand_for(
    *,
    slices: Sequence[SliceId],
    held: Mapping[int, frozenset[int]],
    proven: Sequence[tuple[PeerId, SliceId]],
    heat: Mapping[int, Sequence[float]],
    saturated: bool,
    pressure: float,
    surge_copies_max: int,
    base_copies: int = 1,
) -> tuple[Wanted, ...]:
    """Copies wanted of each slice, only those with something to say (want or proven above zero).

    A slice with an expert that is not held here wants `base_copies` always. While saturated each slice wants a surge
    of copies in proportion to pressure = (busy + queued) / slots: one from 1 on, one more each time it doubles,
    up to `surge_copies_max`; a slice used less than half as much as the average one wants one copy fewer, but a
    first copy is never denied: where all slices are alike all of them should leave together.
    """
    mean = _mean_heat(slices, heat)
    holders: dict[SliceId, list[PeerId]] = {}
    for peer, part in proven:
        holders.setdefault(part, []).append(peer)
    found: list[Wanted] = []
    for part in slices:
        missing = any(index not in held.get(part.layer, frozenset()) for index in range(part.first, part.last + 1))
        want = base_copies if missing else 0
        if saturated:
            surge = surge_copies(pressure, surge_copies_max)
            if surge > 1 and slice_heat(part, heat) < mean / 2:
                surge -= 1
            want += surge
        copies = tuple(sorted(holders.get(part, ())))
        if want or copies:
            found.append(Wanted(part, want, copies))
    return tuple(found)


def surge_copies(pressure: float, most: int) -> int:
    """0 below pressure 1; then 1, 2 from pressure 2 on, 3 from 4 on, … at most `most`."""
    copies, step = 0, 1.0
    while copies < most and pressure >= step:
        copies += 1
        step *= 2
    return copies


def slice_heat(part: SliceId, heat: Mapping[int, Sequence[float]]) -> float:
    """Pairs lately computed by the experts of a slice."""
    row = heat.get(part.layer, ())
    return sum(row[part.first : part.last + 1])


def _mean_heat(slices: Sequence[SliceId], heat: Mapping[int, Sequence[float]]) -> float:
    return sum(slice_heat(part, heat) for part in slices) / len(slices) if slices else 0.0
