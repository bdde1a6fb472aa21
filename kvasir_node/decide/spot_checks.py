"""Which rows of a worker's answer are computed here too, before the answer is used.

It does not know tensors, tolerances, sockets, or what a wrong answer costs (that is `decide/ledger`). Whoever asks it
does so from one thread at a time.

Rows are drawn independently, each with the same chance `ratio`, whatever peer they went to: a liar on a share q of its
rows survives n of them with chance (1 − q × ratio)ⁿ, and has no way to know which rows those are. Among the rows of
one call the draw then prefers experts that were checked less: of two rows drawn evenly it takes the one with the expert
that was checked least. That costs no further check, and one bad expert that is seldom used does not hide behind hot
ones (the two choices of M. Mitzenmacher, 2001). A peer that was caught is watched: for a while, all its rows are
checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Protocol

from kvasir_node.base.ids import PeerId

WATCHED_ROWS = 2000  # checked after a wrong answer; a liar on 1 % of its rows gets past so many once in 5 × 10⁸
PEERS_MAX = 1024  # peers of which it is remembered what was checked, or that are watched


class Chance(Protocol):
    """A source of chance, such as random.Random; for a real coordinator one that nobody can foretell."""

    def random(self) -> float: ...

    def randrange(self, stop: int, /) -> int: ...


class SpotChecks:
    """`ratio` (0 … 1) is the share of remote rows that are checked."""

    def __init__(self, ratio: float, rng: Chance) -> None:
        self._ratio = ratio
        self._rng = rng
        self._checked: dict[PeerId, dict[tuple[int, int], int]] = {}  # times, by (layer, expert)
        self._watched: dict[PeerId, int] = {}  # rows that are still to be checked
        self._left = self._gap()  # rows up to and with the next one that is checked

    def watch(self, peer: PeerId) -> None:
        """From now on all rows of a peer are checked, for WATCHED_ROWS."""
        self._watched[peer] = WATCHED_ROWS
        _trim(self._watched)

    def pick(
        self, peer: PeerId, layer: int, rows: int, experts_of: Callable[[int], Collection[int]]
    ) -> tuple[int, ...]:
        """Which of a call's rows (0 … rows − 1) are checked, in order.

        `experts_of` tells the experts of one of them that the peer computed.
        """
        watched = self._watched.get(peer)
        if watched is not None:
            self._watched[peer] = watched - rows
            if watched <= rows:
                del self._watched[peer]
            return tuple(range(rows))
        count = self._draws(rows)
        if not count or count == rows:
            return tuple(range(count))
        checked = self._checked.setdefault(peer, {})
        _trim(self._checked)
        picked: list[int] = []
        open_rows = list(range(rows))
        for _ in range(count):
            row = self._choose(open_rows, layer, experts_of, checked)
            open_rows.remove(row)
            picked.append(row)
            for index in experts_of(row):
                checked[layer, index] = checked.get((layer, index), 0) + 1
        return tuple(sorted(picked))

    def _draws(self, rows: int) -> int:
        """How many of the next `rows` rows are drawn: one chance for each, taken as gaps to spare the dice."""
        count = 0
        self._left -= rows
        while self._left <= 0:
            count += 1
            self._left += self._gap()
        return count

    def _gap(self) -> float:
        """Rows from one that is drawn to the next: 1 + ⌊ln(1 − u) / ln(1 − ratio)⌋ is geometric."""
        if self._ratio <= 0:
            return math.inf
        if self._ratio >= 1:
            return 1.0
        return 1.0 + math.floor(math.log1p(-self._rng.random()) / math.log1p(-self._ratio))

    def _choose(
        self,
        open_rows: list[int],
        layer: int,
        experts_of: Callable[[int], Collection[int]],
        checked: dict[tuple[int, int], int],
    ) -> int:
        def least(row: int) -> int:
            return min((checked.get((layer, index), 0) for index in experts_of(row)), default=0)

        first, second = (open_rows[self._rng.randrange(len(open_rows))] for _ in range(2))
        return min(first, second, key=least)


def _trim(table: dict[PeerId, dict[tuple[int, int], int]] | dict[PeerId, int]) -> None:
    """The eldest makes room."""
    if len(table) > PEERS_MAX:
        del table[next(iter(table))]
