"""Whether a thread that waits for a frame spins, looking for it all the while, or sleeps until the system wakes it.

It does not know threads, sockets or frames. A sleeping thread is woken 60 to 100 µs after its frame has come, and who
sends it pays 20 more to have it woken (two cores of a virtual machine, 2026-12-01); so where the next frame usually
comes within a moment, spinning pays. Who is called seldom sleeps: a node that serves nobody must cost nothing. And
where others want the core, who spins is in their way.
"""

from __future__ import annotations

from dataclasses import dataclass

SPIN_S = 0.004  # nobody spins for longer, nor where it usually takes longer
CROWDED = 0.25  # of the time of spins: others had the core
REST_S = 2.0  # ... and then nobody spins for so long
LEAST_S = 50e-6  # a shorter spin says nothing about others


@dataclass(slots=True)
class Spinning:
    """Of one thread that waits, again and again, for what comes next. `allowed`: whether it may spin at all."""

    allowed: bool = True
    _usual_s: float = 2 * SPIN_S  # smoothed; what takes very long counts as this
    _taken: float = 0.0  # smoothed: what part of the spins' time others had
    _rests_until: float = 0.0

    def spin_s(self, now: float) -> float:
        """How long to spin before sleeping; 0 = not at all."""
        return SPIN_S if self.allowed and self._usual_s <= SPIN_S and now >= self._rests_until else 0.0

    def waited(self, took_s: float, *, came: bool) -> None:
        """From when it was waited for until it came, or until it was given up: soon, perhaps, which tells nothing."""
        if came or took_s > SPIN_S:
            self._usual_s += (min(took_s, 2 * SPIN_S) - self._usual_s) / 4

    def spun(self, took_s: float, used_s: float, now: float) -> None:
        """`used_s`: processor time of this thread in it."""
        if took_s < LEAST_S:
            return
        self._taken += (max(0.0, 1.0 - used_s / took_s) - self._taken) / 8
        if self._taken > CROWDED:
            self._rests_until, self._taken = now + REST_S, 0.0
