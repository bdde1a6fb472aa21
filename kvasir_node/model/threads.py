"""Threads that compute parts of one thing at the same time, for kernels that run without the GIL.

It does not know what is computed. One call after the other: callers that overlap share the same threads and wait.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise


class Threads:
    """`count` threads, the caller's among them; with 1 everything happens in the caller's own."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool = ThreadPoolExecutor(count - 1, "kernel") if count > 1 else None

    def each_part(self, size: int, step: int, least: int, compute: Callable[[int, int], None]) -> None:
        """Calls compute(first, end) for parts that together are 0 : size, and returns when all have ended.

        Each part but the last is a multiple of `step` and at least `least` long.
        """
        parts = min(self.count, max(1, size // least))
        if self._pool is None or parts == 1:
            compute(0, size)
            return
        ends = [size * part // parts // step * step for part in range(1, parts)] + [size]
        others = [self._pool.submit(compute, *part) for part in pairwise(ends)]
        compute(0, ends[0])
        for other in others:
            other.result()


ONE_THREAD = Threads(1)
