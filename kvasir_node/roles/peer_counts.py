"""What a coordinator remembers of each worker by name: calls, faults, warnings, and whose requests it computed for.

It does not know standing (the ledger) or calls. Of the loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import trio

from kvasir_node.base.ids import PeerId

logger = logging.getLogger(__name__)

COUNTS_MAX = 4096  # peers whose call counts are remembered
WARN_INTERVAL_S = 10.0  # at most one warning per peer, whatever it does at the rate of tokens
TOUCHED_MAX = 256  # requests remembered of each peer that it computed for


@dataclass(slots=True)
class Counts:
    calls: int = 0
    rows: int = 0
    failures: int = 0
    refusals: int = 0  # in a row
    reason: str = ""
    warned_at: float = -WARN_INTERVAL_S
    requests: dict[int, None] = field(default_factory=dict[int, None])  # it computed for, the latest last


class PeerCounts:
    def __init__(self, name_of: Callable[[PeerId], str]) -> None:
        self._name_of = name_of
        self._counts: dict[PeerId, Counts] = {}

    def of(self, peer: PeerId) -> Counts:
        counts = self._counts.setdefault(peer, Counts())
        if len(self._counts) > COUNTS_MAX:
            del self._counts[next(each for each in self._counts if each != peer)]
        return counts

    def seen(self, peer: PeerId) -> Counts:
        """Without remembering a peer that is not known."""
        return self._counts.get(peer, Counts())

    def warn(self, peer: PeerId, text: str, *values: object) -> None:
        counts, now = self.of(peer), trio.current_time()
        is_due = now - counts.warned_at >= WARN_INTERVAL_S
        logger.log(logging.WARNING if is_due else logging.DEBUG, f"worker %s {text}", self._name_of(peer), *values)
        counts.warned_at = now if is_due else counts.warned_at

    def fault(self, peer: PeerId, reason: str) -> Counts:
        counts = self.of(peer)
        counts.failures += 1
        counts.reason = reason[:200]
        return counts

    def excuse(self, peer: PeerId, reason: str) -> None:
        """Something that happened to a peer and was no fault of its."""
        self.of(peer).reason = reason[:200]
        self.warn(peer, "%s", reason)

    def touched(self, peer: PeerId, requests: Collection[int]) -> None:
        """A peer computed for these requests."""
        known = self.of(peer).requests
        for request in requests:
            known.pop(request, None)
            known[request] = None
        while len(known) > TOUCHED_MAX:
            del known[next(iter(known))]
