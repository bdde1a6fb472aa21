"""Models that do not exist and computing that is not done: sizes, and how fast requests are served.

It does not know the market. A coordinator's slots share its throughput equally, which grows less than their number;
workers take their part of the experts off it (Amdahl: the trunk stays).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from functools import lru_cache

from kvasir_node.base.ids import DAG_CBOR_CODEC, ModelId, SliceId, cid_of

TRUNK_SHARE = 0.2  # of a step's time that no worker can take over
BATCH_POWER = 0.6  # tokens/s grow with the slots in use to this power: weights are read once for all of them
REMOTE_LEAST = 0.02  # of the speed with all experts, when none of them is held anywhere: they are read from disk


@dataclass(frozen=True, slots=True)
class SimModel:
    """`alone_tokens_s` = of all slots of a coordinator that computes everything itself."""

    name: str
    layers: int
    slices_per_layer: int
    experts_per_slice: int
    slice_bytes: int
    alone_tokens_s: float
    slots: int = 16
    queue: int = 64
    request_tokens: float = 200.0  # on average
    is_held: bool = True  # by its coordinators; else all slices are missing there

    @property
    def id(self) -> ModelId:
        return _id_of(self.name)

    def near_rtt_s(self, max_slowdown: float) -> float:
        """What a coordinator's governor tells: what a token may take (`decide/planner`), divided by the layers."""
        idle_s = self.slots**BATCH_POWER / self.alone_tokens_s
        return max(self.slots / self.alone_tokens_s, max_slowdown * idle_s) / self.layers

    def slices(self) -> tuple[SliceId, ...]:
        each = self.experts_per_slice
        return tuple(
            SliceId(layer, first * each, first * each + each - 1)
            for layer in range(self.layers)
            for first in range(self.slices_per_layer)
        )


@lru_cache
def _id_of(name: str) -> ModelId:
    return ModelId(cid_of(name.encode(), DAG_CBOR_CODEC))


def gain(copies: float, *, is_held: bool) -> float:
    """Throughput with so many proven copies of each slice on average; 1 = a coordinator with all experts, alone."""
    if is_held:
        return 1 / (TRUNK_SHARE + (1 - TRUNK_SHARE) / (1 + copies))
    return max(REMOTE_LEAST, min(1.0, copies) ** 2 * gain(max(0.0, copies - 1), is_held=True))


@dataclass(slots=True)
class SharedEngine:
    """Requests that share a throughput: the one with the fewest tokens left is done first.

    `done` counts the tokens that each of them got since the beginning, so a request ends at a fixed value of it.
    """

    alone_tokens_s: float
    slots: int
    gain: float = 1.0
    _done: float = 0.0
    _counted_at: float = 0.0
    _running: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])  # ends at, request

    @property
    def busy(self) -> int:
        return len(self._running)

    @property
    def tokens_s(self) -> float:
        """Of all requests together."""
        return self.gain * self.alone_tokens_s * (self.busy / self.slots) ** BATCH_POWER

    @property
    def load(self) -> float:
        """Tokens per second as a share of what the coordinator alone could give at best."""
        return self.tokens_s / self.alone_tokens_s

    def advance(self, now: float) -> None:
        """Must come before anything about the engine is changed."""
        if self._running:
            self._done += (now - self._counted_at) * self.tokens_s / self.busy
        self._counted_at = now

    def start(self, request: int, tokens: float) -> None:
        heapq.heappush(self._running, (self._done + tokens, request))

    def next_end_at(self) -> float | None:
        if not self._running:
            return None
        return self._counted_at + (self._running[0][0] - self._done) * self.busy / self.tokens_s

    def finish(self) -> int:
        """Takes out the request that is done first."""
        return heapq.heappop(self._running)[1]
