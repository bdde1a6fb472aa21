"""Where each expert of each layer is computed, and how long an answer may take.

It does not know sockets, tensors or threads. `plan_route` is a pure function of what is held, proven and used;
`CallTimes` turns measured times into deadlines.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from kvasir_node.base.ids import PeerId, SliceId


@dataclass(frozen=True, slots=True)
class Route:
    """For each layer the peer of each expert, None = here. `on` = at least one expert that is held here is remote."""

    on: bool
    reason: str
    peers: Mapping[int, tuple[PeerId | None, ...]]  # layer -> by expert index


def plan_route(
    *,
    layers: Sequence[int],
    experts_per_layer: int,
    held: Mapping[int, frozenset[int]],
    proven: Sequence[tuple[PeerId, SliceId]],
    heat: Mapping[int, Sequence[float]],
    spread: bool,
    reason: str,
) -> Route:
    """Shares each layer's experts over those who can compute them, evenly by heat.

    An expert that is held here leaves only when `spread` is true; one that is not held goes to a proven peer
    whenever there is one (else it is computed here from the checkpoint). Within a layer the hottest expert is
    placed first, on the least loaded candidate, ourselves first among equals: for equal machines this is the
    longest-processing-time rule, at most 4/3 of the best balance (R. L. Graham, 1969).
    """
    able: dict[int, dict[int, list[PeerId]]] = {layer: {} for layer in layers}
    for peer, part in sorted(proven):
        by_expert = able.get(part.layer)
        if by_expert is None:
            continue
        for index in range(part.first, min(part.last + 1, experts_per_layer)):
            by_expert.setdefault(index, []).append(peer)
    peers = {
        layer: _share_layer(experts_per_layer, held.get(layer, frozenset()), able[layer], heat.get(layer, ()), spread)
        for layer in layers
    }
    moved = any(is_remote(row, held.get(layer, frozenset())) for layer, row in peers.items())
    return Route(moved, reason, peers)


def is_remote(row: Sequence[PeerId | None], held: Collection[int]) -> bool:
    """Whether a layer's row of a route sends away what is held here."""
    return any(peer is not None and index in held for index, peer in enumerate(row))


def _share_layer(
    experts: int,
    held: frozenset[int],
    able: Mapping[int, Sequence[PeerId]],
    heat: Sequence[float],
    spread: bool,
) -> tuple[PeerId | None, ...]:
    def warmth(index: int) -> float:
        return heat[index] if index < len(heat) else 0.0

    base = sum(heat) / (100 * experts) or 1.0  # an expert nobody used yet still weighs a little
    load: dict[PeerId | None, float] = {None: 0.0}
    row: list[PeerId | None] = [None] * experts
    for index in sorted(range(experts), key=lambda i: (-warmth(i), i)):
        candidates: list[PeerId | None] = list(able.get(index, ()))
        if index in held:
            candidates = [None, *candidates] if spread else [None]
        if not candidates:
            candidates = [None]
        chosen = min(candidates, key=lambda peer: load.get(peer, 0.0))
        load[chosen] = load.get(chosen, 0.0) + warmth(index) + base
        row[index] = chosen
    return tuple(row)


def predicted_gain(trunk_s: float, experts_s: float, workers: int) -> float:
    """Throughput with `workers` equal helpers and a free network, as a multiple of alone (Amdahl's law).

    `trunk_s` and `experts_s` are the measured times of one step computed here.
    """
    if trunk_s + experts_s <= 0:
        return 1.0
    return (trunk_s + experts_s) / (trunk_s + experts_s / (1 + workers))


@dataclass(frozen=True, slots=True)
class DeadlineLimits:
    factor: float
    floor_s: float
    ceiling_s: float


@dataclass(slots=True)
class _Estimate:
    mean_s: float
    deviation_s: float


@dataclass(slots=True)
class CallTimes:
    """Smoothed call times per peer and size class (powers of two of pairs), and the deadline they give.

    Mean and mean deviation are smoothed by 1/8 and 1/4, and a deadline allows mean + 4 deviations, as for TCP's
    retransmission timer (RFC 6298), times `factor`, within floor and ceiling.
    """

    PEERS_MAX: ClassVar[int] = 4096  # an answer may come after its peer was forgotten: the eldest makes room

    limits: DeadlineLimits
    _estimates: dict[PeerId, dict[int, _Estimate]] = field(default_factory=dict[PeerId, dict[int, _Estimate]])

    def observe(self, peer: PeerId, pairs: int, took_s: float) -> None:
        classes = self._estimates.setdefault(peer, {})
        if len(self._estimates) > self.PEERS_MAX:
            del self._estimates[next(iter(self._estimates))]
        size = pairs.bit_length()
        estimate = classes.get(size)
        if estimate is None:
            classes[size] = _Estimate(took_s, took_s / 2)
            return
        estimate.deviation_s += (abs(took_s - estimate.mean_s) - estimate.deviation_s) / 4
        estimate.mean_s += (took_s - estimate.mean_s) / 8

    def deadline_s(self, peer: PeerId, pairs: int, more_s: float = 0.0) -> float:
        """How long a call of that many pairs may take; the ceiling while nothing like it was measured.

        `more_s` is added to the ceiling: what is much work for whoever computes it may take longer.
        """
        ceiling_s = self.limits.ceiling_s + more_s
        classes = self._estimates.get(peer, {})
        size = pairs.bit_length()
        larger = [estimate for known, estimate in classes.items() if known >= size]
        if not larger:
            return ceiling_s
        estimate = classes.get(size) or min(larger, key=lambda e: e.mean_s)
        wanted = self.limits.factor * (estimate.mean_s + 4 * estimate.deviation_s)
        return min(ceiling_s, max(self.limits.floor_s, wanted))

    def expected_call_s(self, peer: PeerId, pairs: int) -> float | None:
        """How long a call of that many pairs should take; None while nothing is known.

        A size that was not measured takes what the next larger one does, or else what the largest one does, in
        proportion to the pairs.
        """
        classes = self._estimates.get(peer)
        if not classes:
            return None
        size = pairs.bit_length()
        larger = min((known for known in classes if known >= size), default=None)
        if larger is not None:
            return classes[larger].mean_s
        largest = max(classes)
        return classes[largest].mean_s * 2.0 ** (size - largest)

    def forget_size(self, peer: PeerId, pairs: int) -> None:
        """Drops what is known of calls of that size, and of larger ones."""
        classes = self._estimates.get(peer, {})
        for size in [known for known in classes if known >= pairs.bit_length()]:
            del classes[size]

    def expected_s(self, peer: PeerId) -> float | None:
        """The mean of the smallest size class seen: nearest to the bare round trip."""
        classes = self._estimates.get(peer)
        return classes[min(classes)].mean_s if classes else None

    def forget(self, peer: PeerId) -> None:
        self._estimates.pop(peer, None)
