"""When a hub tells its demand table to everybody.

It does not know what is in the table. Every node of a swarm pays for every table, so tables have a budget, which saves
itself up while little is said. What idle nodes act on goes out at once: more copies open than those who poll anyway
would find, or none open any more. The rest, which only people look at, goes out as the budget allows.
"""

from __future__ import annotations

from dataclasses import dataclass

SAVED_S = 600.0  # a budget saves up this long
FINDERS_PER_COPY = 3.0  # polls that find an open copy: some nodes have no room for it, or have it


@dataclass(slots=True)
class GossipPace:
    """`bytes_s` = of all tables of this hub, by each node that hears them, copies of the mesh included."""

    interval_min_s: float
    refresh_s: float
    bytes_s: float
    _told_at: float = float("-inf")
    _told_open: int = 0
    _saved_bytes: float | None = None
    _counted_at: float = 0.0

    def is_due(self, now: float, *, open_copies: int, polls_anyway: float, changed: bool) -> bool:
        """`polls_anyway` = polls that come in a poll interval without a word."""
        waited_s = now - self._told_at
        if waited_s < self.interval_min_s:
            return False
        saved, burst = self._saved(now), self.bytes_s * SAVED_S
        if self._is_urgent(open_copies, polls_anyway):
            return saved > -burst
        return (changed and saved > burst / 2) or (waited_s >= self.refresh_s and saved > 0)

    def _is_urgent(self, open_copies: int, polls_anyway: float) -> bool:
        if not open_copies:
            return self._told_open > 0
        return open_copies > 2 * self._told_open and FINDERS_PER_COPY * open_copies > polls_anyway

    def told(self, now: float, sent_bytes: float, open_copies: int) -> None:
        self._saved_bytes = self._saved(now) - sent_bytes
        self._told_at, self._counted_at, self._told_open = now, now, open_copies

    def _saved(self, now: float) -> float:
        burst = self.bytes_s * SAVED_S
        if self._saved_bytes is None:
            return burst
        return min(burst, self._saved_bytes + (now - self._counted_at) * self.bytes_s)
