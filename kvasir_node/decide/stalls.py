"""When this machine itself was away: asleep, or too busy to look at anything.

It does not know who is judged for what. A laptop that slept finds every connection dead and every deadline past, and
none of that is any worker's fault; nor is an answer that came in time and lay unread. Whoever judges asks here first.

A clock that goes on in sleep shows one kind of absence, a look that comes late the other; so it takes both clocks. A
wall clock that was put forward looks like sleep: then nobody is blamed for a while, which does no harm.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

LOOK_INTERVAL_S = 0.25  # whoever owns this calls `look` so often
LEAST_S = 0.1  # a shorter delay of a look is the ordinary business of a loop
SLEEP_LEAST_S = 5.0  # the wall clock must be ahead by this much: it is corrected now and then
REMEMBERED_MAX = 64


@dataclass(slots=True)
class OwnStalls:
    _looked_at: float | None = None
    _wall_at: float = 0.0
    _stalls: deque[tuple[float, float]] = field(  # when each ended, how long it was
        default_factory=lambda: deque[tuple[float, float]](maxlen=REMEMBERED_MAX)
    )

    def look(self, now: float, wall: float) -> None:
        """`now` of the clock that deadlines use, `wall` of the one that goes on while the machine sleeps."""
        if self._looked_at is not None:
            passed_s = now - self._looked_at
            late_s = passed_s - LOOK_INTERVAL_S
            asleep_s = wall - self._wall_at - passed_s
            if asleep_s >= SLEEP_LEAST_S:
                late_s = max(late_s, asleep_s)
            if late_s >= LEAST_S:
                self._stalls.append((now, late_s))
        self._looked_at, self._wall_at = now, wall

    def longest_s(self, since: float) -> float:
        """The longest absence that ended at or after `since`; 0.0 when there was none."""
        return max((length_s for ended_at, length_s in self._stalls if ended_at >= since), default=0.0)
