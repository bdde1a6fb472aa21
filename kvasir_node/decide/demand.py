"""What a coordinator asks the market for: how many copies of which slices.

It does not know hubs, leases or who answers. want = what is missing here (the base) + the surge; guests' copies fill
the surge alone (decide/guests).

The surge comes at once and goes slowly, one copy at a time: workers that were fetched by it are why nobody waits any
more, so an empty queue is no reason to let them go. It goes when the load is one that this machine could carry alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvasir_node.base.ids import PeerId, SliceId
from kvasir_node.decide.guests import copies_wanted, kept_slices


@dataclass(frozen=True, slots=True)
class Wanted:
    """How many copies of a slice are wanted in all, and which peers have proven that they hold one."""

    slice: SliceId
    want: int
    proven: tuple[PeerId, ...]


def missing_slices(slices: Iterable[SliceId], held: Mapping[int, frozenset[int]]) -> frozenset[SliceId]:
    """Those with an expert that is not held here."""
    return frozenset(
        part
        for part in slices
        if any(index not in held.get(part.layer, frozenset()) for index in range(part.first, part.last + 1))
    )


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


DECAY_FACTOR_MAX = 16.0  # the surge's decay takes twice as long each time that a copy comes back soon, up to this
SOON = 20.0  # soon = within so many times the decay's time after it had gone
LIGHT_LOAD = 0.75  # light = less than this share of what this machine can do alone; above it the queue would come back
COLD, WARM = 0.4, 0.6  # of the average heat: below a slice becomes cold, above it is warm again


class Demands:
    """The wants of one coordinator over time. `surge` = copies of each slice beyond what is missing.

    A slice with an expert that is not held here wants `base_copies` always. While saturated each slice wants a surge of
    copies in proportion to pressure = (busy + queued) / slots: one from 1 on, one more each time it doubles, up to
    `surge_copies_max`; of a second copy and more a slice that is used little wants one fewer, but a first one is never
    denied: where all slices are alike all of them should leave together. The surge loses a copy each time the load was
    light for `decay_s`.
    """

    def __init__(self, slices: Sequence[SliceId], surge_copies_max: int, decay_s: float, base_copies: int = 1) -> None:
        self._slices = tuple(slices)
        self._surge_copies_max = surge_copies_max
        self._base_copies = base_copies
        self._cold: frozenset[SliceId] = frozenset()
        self._light_since: float | None = None
        self._decay_least_s = self._decay_s = decay_s
        self._fell_at = -math.inf
        self._told: dict[SliceId, Wanted] = {}
        self.surge = 0

    def observe(self, now: float, *, saturated: bool, pressure: float, load: float) -> None:
        """`load` = what is done per second now, as a share of what this machine alone could do per second."""
        if saturated and (copies := surge_copies(pressure, self._surge_copies_max)) > self.surge:
            least_s = self._decay_least_s
            came_back = now - self._fell_at < SOON * least_s + self._decay_s
            self._decay_s = min(DECAY_FACTOR_MAX * least_s, 2 * self._decay_s) if came_back else least_s
            self.surge, self._fell_at = copies, -math.inf
        if saturated or load >= LIGHT_LOAD or not self.surge:
            self._light_since = None
        elif self._light_since is None:
            self._light_since = now
        elif now - self._light_since >= self._decay_s:
            self.surge, self._light_since, self._fell_at = self.surge - 1, now, now

    def next_at(self) -> float | None:
        """When `observe` must come again though nothing happens."""
        return None if self._light_since is None else self._light_since + self._decay_s

    def note_heat(self, heat: Mapping[int, Sequence[float]]) -> None:
        """Which slices are used so little that one copy fewer will do; those between two bounds stay as they were."""
        mean = _mean_heat(self._slices, heat)
        self._cold = frozenset(
            part for part in self._slices if slice_heat(part, heat) < mean * (WARM if part in self._cold else COLD)
        )

    def wants(
        self,
        missing: Collection[SliceId],
        proven: Iterable[tuple[PeerId, SliceId]],
        guests: Collection[PeerId] = (),
    ) -> tuple[Wanted, ...]:
        """Copies wanted of each slice with something to say; `proven` with the most useful peers first. Guests are
        listed last, so that they are the first to go.

        What has not changed since the last call is the same object.
        """
        holders: dict[SliceId, list[PeerId]] = {}
        visitors: dict[SliceId, list[PeerId]] = {}
        for peer, part in proven:
            (visitors if peer in guests else holders).setdefault(part, []).append(peer)
        found: list[Wanted] = []
        for part in self._slices:
            surge = self.surge - (self.surge > 1 and part in self._cold)
            others, guest_peers = holders.get(part, []), visitors.get(part, [])
            always = self._base_copies if part in missing else 0
            want = copies_wanted(always, surge, len(others), len(guest_peers))
            copies = (*others, *guest_peers)
            if not want and not copies:
                continue
            told = self._told.get(part)
            if told is None or told.want != want or told.proven != copies:
                told = self._told[part] = Wanted(part, want, copies)
            found.append(told)
        return tuple(found)

    def kept(
        self, missing: Collection[SliceId], proven: Iterable[tuple[PeerId, SliceId]], guests: Collection[PeerId]
    ) -> frozenset[SliceId]:
        """Slices that must not be left to guests."""
        return kept_slices(missing, self._base_copies, proven, guests)
