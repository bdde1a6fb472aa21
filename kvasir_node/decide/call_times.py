"""How long a call may take, from what calls like it took, and what to do when it takes longer.

It does not know sockets, threads or who deserves load.

A call has two limits. Past the first, `hedge_s`, it is later than its like and is computed in a second way: nobody is
to blame yet, and whatever is right first is used. Past the second, `deadline_s`, its worker has failed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import ClassVar

from kvasir_node.base.ids import PeerId


@dataclass(frozen=True, slots=True)
class DeadlineLimits:
    factor: float
    floor_s: float
    ceiling_s: float
    hedge_floor_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Both from the moment it is sent; hedge_s ≤ deadline_s."""

    hedge_s: float
    deadline_s: float


@dataclass(slots=True)
class _Estimate:
    mean_s: float
    deviation_s: float


@dataclass(slots=True)
class CallTimes:
    """Smoothed call times per peer and size class (powers of two of pairs), and the limits they give.

    Mean and mean deviation are smoothed by 1/8 and 1/4, and a call is late after mean + 4 deviations, as for TCP's
    retransmission timer (RFC 6298), but not before the floor: a moment of a busy machine is no late answer. The
    deadline is that times `factor`, within floor and ceiling.
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

    def limits_of(self, peer: PeerId, pairs: int, more_s: float = 0.0) -> CallLimits:
        """How long a call of that many pairs may take; the ceiling for both while nothing like it was measured.

        `more_s` is added to the ceiling: what is much work for whoever computes it may take longer.
        """
        limits, ceiling_s = self.limits, self.limits.ceiling_s + more_s
        classes = self._estimates.get(peer, {})
        size = pairs.bit_length()
        larger = [estimate for known, estimate in classes.items() if known >= size]
        if not larger:
            return CallLimits(ceiling_s, ceiling_s)
        estimate = classes.get(size) or min(larger, key=lambda e: e.mean_s)
        usual_s = estimate.mean_s + 4 * estimate.deviation_s
        deadline_s = min(ceiling_s, max(limits.floor_s, limits.factor * usual_s))
        return CallLimits(min(deadline_s, max(limits.hedge_floor_s, usual_s)), deadline_s)

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


@dataclass(frozen=True, slots=True)
class Here:
    """Compute it here."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing is better than to wait until the deadline."""


SecondWay = PeerId | Here | Wait


def second_way(own_s: float | None, replicas: Collection[tuple[PeerId, float | None]], left_s: float) -> SecondWay:
    """What to do about a call that is late: the quickest way that is expected to end before its deadline.

    `own_s`: how long we take for it; None when we lack some of its experts. `replicas`: proven peers that have them
    all, with how long a call like it takes them (None = nobody knows: taken for the worst that is of use).
    `left_s`: until the deadline, when it would be computed here anyway.
    """
    best: tuple[float, SecondWay] | None = None if own_s is None else (own_s, Here())
    for peer, expected_s in sorted(replicas, key=lambda each: each[0]):
        took_s = left_s if expected_s is None else expected_s
        if best is None or took_s < best[0]:
            best = (took_s, peer)
    # Without a way here the deadline ends nothing: a replica is worth its time however long it takes.
    if best is None or (best[0] >= left_s and own_s is not None):
        return Wait()
    return best[1]
