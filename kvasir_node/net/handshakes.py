"""How many inbound connections are being authenticated at once, and how soon one after the other.

It does not know what a handshake is. Whoever connects costs the loop some 10 ms (measured on two busy cores: public-key
arithmetic, choosing protocols) before anything is known about him. A hundred at once would hold up every member's calls
for as long as all of these take together, so they begin one by one with room for calls in between, and those from one
range of addresses never have all places. One stranger after the other is no better: where many were refused, the next
ones are turned away before anything is computed for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from kvasir_node.base.errors import CapacityError
from kvasir_node.decide.trial_caps import address_range

HANDSHAKES_MAX = 64  # inbound connections that are not authenticated yet ...
PER_RANGE_MAX = 48  # ... of which so many from one range of addresses
GAP_S = 0.03  # between two that begin, in the long run: a third of the loop ...
BURST = 4  # ... and so many may begin at once after a rest
REFUSED_MAX = 16  # peers from one range that were refused, until it is turned away: a household may err so often
FORGIVEN_S = 1.0  # one of them is forgotten each so many seconds
RANGES_MAX = 1024  # of which refusals are remembered; the one refused longest ago makes room


class Handshakes:
    """See the module."""

    def __init__(self) -> None:
        self._ranges: Counter[str] = Counter()
        self._forgiven_at: dict[str, float] = {}  # by range, when all of its refusals are forgotten
        self._free_at = 0.0  # when all that have begun are paid for, at one in GAP_S

    @property
    def under_way(self) -> int:
        return self._ranges.total()

    @contextmanager
    def place(self, host: str) -> Iterator[None]:
        """A place for a connection from this IP until the block ends; raises CapacityError when there is none."""
        where = _range_of(host)
        if self._forgiven_at.get(where, 0.0) - trio.current_time() >= REFUSED_MAX * FORGIVEN_S:
            raise CapacityError(
                f"{REFUSED_MAX} peers from {where} were refused; one more may try each {FORGIVEN_S:g} s"
            )
        if self.under_way >= HANDSHAKES_MAX or self._ranges[where] >= PER_RANGE_MAX:
            raise CapacityError(
                f"{self.under_way} connections are being authenticated, {self._ranges[where]} from {where}"
            )
        self._ranges[where] += 1
        try:
            yield
        finally:
            self._ranges[where] -= 1
            self._ranges += Counter()  # drops those that are zero

    def refused(self, host: str) -> None:
        """A peer from this IP was authenticated and turned out to have no business here."""
        where, now = _range_of(host), trio.current_time()
        until = max(self._forgiven_at.pop(where, 0.0), now) + FORGIVEN_S
        self._forgiven_at[where] = until
        if len(self._forgiven_at) > RANGES_MAX:
            del self._forgiven_at[next(iter(self._forgiven_at))]

    async def turn(self) -> None:
        """Returns when one more may begin, in the order of the calls. Cancel-safety: a cancelled call leaves a gap."""
        now = trio.current_time()
        self._free_at = max(self._free_at, now) + GAP_S
        await trio.sleep(max(0.0, self._free_at - BURST * GAP_S - now))


def _range_of(host: str) -> str:
    return address_range(f"/ip{6 if ':' in host else 4}/{host}")
