"""Waits so that a rate in bytes per second is kept; one for all transfers of a direction.

It does not know how long to wait: that is `decide/rate`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from kvasir_node.decide.rate import TokenBucket


class Throttle:
    """`bytes_s` 0 = no limit, and then no wait at all."""

    def __init__(self, bytes_s: float) -> None:
        self._bucket = TokenBucket(bytes_s)
        self._has_limit = bytes_s > 0
        self._queue = trio.Lock()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Entered by one at a time, first come first served, once nothing is owed; inside, `spend` what it will cost.

        So a rate is exceeded by one transfer at most, however many wait. Cancel-safe.
        """
        if not self._has_limit:
            yield
            return
        async with self._queue:
            await trio.sleep(self._bucket.wait_s(trio.current_time()))
            yield

    def spend(self, spent_bytes: int) -> None:
        """Negative bytes give back what was spent in advance and did not come."""
        if self._has_limit:
            self._bucket.spend(spent_bytes, trio.current_time())


NO_THROTTLE = Throttle(0)
