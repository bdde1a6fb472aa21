"""How often something is worth a line in the log that anybody can bring about: strangers must not fill it.

It does not know what is logged, nor at which level what is said more often goes.
"""

from __future__ import annotations

import math

INTERVAL_S = 10.0


class Rarely:
    """Says yes at most once in INTERVAL_S."""

    def __init__(self) -> None:
        self._said_at = -math.inf

    def is_time(self, now: float) -> bool:
        if now - self._said_at < INTERVAL_S:
            return False
        self._said_at = now
        return True
