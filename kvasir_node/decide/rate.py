"""How long to wait so that a rate in bytes per second is kept: a token bucket.

It does not know what the bytes are nor who waits. What was spent may exceed what was there (the size of an answer is
known only afterwards); then the next one waits until the debt is paid, so the rate holds over any longer time.
"""

from __future__ import annotations

BURST_S = 1.0  # a pause of this long saves up one burst, no more


class TokenBucket:
    """`bytes_s` 0 = no limit: nobody ever waits."""

    def __init__(self, bytes_s: float) -> None:
        self._bytes_s = bytes_s
        self._saved = bytes_s * BURST_S  # negative = a debt
        self._counted_at = float("-inf")

    def wait_s(self, now: float) -> float:
        """How long until something may be sent; 0 = now."""
        if self._bytes_s <= 0:
            return 0.0
        self._save(now)
        # Less than a byte is a rounding error, and a wait for it could be too short to move the clock.
        return 0.0 if self._saved > -1.0 else -self._saved / self._bytes_s

    def spend(self, spent_bytes: int, now: float) -> None:
        if self._bytes_s > 0:
            self._save(now)
            self._saved -= spent_bytes

    def _save(self, now: float) -> None:
        """A clock that steps back saves nothing and costs nothing."""
        passed_s = now - self._counted_at
        if passed_s > 0:
            burst = self._bytes_s * BURST_S
            self._saved = min(burst, self._saved + passed_s * self._bytes_s)
            self._counted_at = now
