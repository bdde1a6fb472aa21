"""When something that failed may be tried again: pauses that double with each failure in a row.

It does not know what is tried, nor chance: whoever must not come back together with others cuts the pause himself.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Patience:
    """`pause_s` is the next pause, `at` when the next attempt may begin."""

    pause_s: float
    at: float = 0.0
    is_under_way: bool = False

    def allows(self, now: float) -> bool:
        return not self.is_under_way and now >= self.at

    def failed(self, now: float, max_s: float) -> None:
        self.is_under_way = False
        self.at = now + self.pause_s
        self.pause_s = min(max_s, 2 * self.pause_s)

    def succeeded(self, first_s: float, at: float) -> None:
        self.is_under_way, self.pause_s, self.at = False, first_s, at
