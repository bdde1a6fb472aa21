"""Virtual time: what happens when, in order.

It does not know what happens. Events of the same moment happen in the order in which they were asked for, so a run
depends on nothing but its seed.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

_Entry = tuple[float, int, Callable[..., None], tuple[Any, ...]]


class Heap:
    def __init__(self) -> None:
        self.now = 0.0
        self.count = 0  # events so far
        self._queue: list[_Entry] = []
        self._asked = 0

    def at(self, when: float, act: Callable[..., None], *arguments: Any) -> None:
        """Has something happen at a moment; one that is over counts as now."""
        self._asked += 1
        heapq.heappush(self._queue, (max(when, self.now), self._asked, act, arguments))

    def after(self, delay_s: float, act: Callable[..., None], *arguments: Any) -> None:
        self.at(self.now + delay_s, act, *arguments)

    def run(self, until: float) -> None:
        """Lets everything happen up to a moment, and time go on to it."""
        queue, pop = self._queue, heapq.heappop
        while queue and queue[0][0] <= until:
            self.now, _, act, arguments = pop(queue)
            self.count += 1
            act(*arguments)
        self.now = until
