"""How fast this machine reads memory: the roof above any computation that must read all its weights.

It does not know models. The figure is soft: a dot product of two long arrays is the quickest read that torch has, and a
kernel that fetches ahead may do a little better.
"""

from __future__ import annotations

from time import perf_counter

import torch

READ_BYTES = 512 << 20  # many times any cache
REPEATS = 4


class ReadBench:
    """Holds `nbytes` of memory until it is forgotten."""

    def __init__(self, nbytes: int = READ_BYTES) -> None:
        self._halves = torch.ones(2, nbytes // 8)  # float32, written so that they are real pages

    def gb_s(self) -> float:
        """10^9 bytes per second with torch's current threads, the best of a few reads: others only make it slower."""
        left, right = self._halves
        took_s: list[float] = []
        for _ in range(REPEATS):
            began_at = perf_counter()
            torch.dot(left, right)
            took_s.append(perf_counter() - began_at)
        return self._halves.nbytes / min(took_s) / 1e9
