"""How often values of some size were seen, in fixed buckets. It does not know units or names."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """`counts[i]` values were above the bound before and at most `bounds[i]`; the last count is of those above all."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float  # of all values


NOTHING_SEEN = HistogramSnapshot((), (0,), 0.0)


class Histogram:
    """`bounds` ascend. One thread at a time observes; anyone may take a snapshot."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def snapshot(self) -> HistogramSnapshot:
        return HistogramSnapshot(self._bounds, tuple(self._counts), self._total)
