"""One forward of an engine: whose tokens it computes, who gets a token from it, and whom to blame.

It does not know how jobs come to share a forward, nor what follows from it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from kvasir_node.model.cache import Lane
from kvasir_node.model.jobs import AnswerTally, Job
from kvasir_node.model.missing import ExpertsMissing, JobsWait
from kvasir_node.model.trunk import RowTally, Trunk


@dataclass(slots=True, eq=False)
class Seat:
    """A job and its slot, which is the job's own once it `is_filled`. `fed`: tokens whose keys and values it has."""

    job: Job
    slot: int
    seed: int
    is_plain: bool
    fed: list[int] = field(default_factory=list[int])
    is_filled: bool = False
    is_poisoned: bool = False
    answer: list[int] = field(default_factory=list[int])
    counts: Counter[int] = field(default_factory=Counter[int])  # of the answer's tokens
    tally: AnswerTally = field(default_factory=AnswerTally)


@dataclass(slots=True)
class Forward:
    """`tokens` of `seats`, side by side if it `is_packed`, else as many of each: [B][Q].

    `answering` get a token each, by the row of the logits that stands beside them in `logit_rows`: those whose last
    known token is computed here, and their `twins`, which have the prompt of another seat (beside them) and get their
    part of the cache from it. Others only have a part of their prompt computed.

    Set by `run`: `logits` [B, V] after each seat's last token, and the tally of all tokens, seat by seat.
    """

    lane: Lane
    seats: Sequence[Seat]
    tokens: list[list[int]]
    is_packed: bool
    answering: Sequence[Seat]
    logit_rows: Sequence[int]
    twins: Sequence[tuple[Seat, Seat]] = ()
    logits: torch.Tensor = field(init=False)
    rows: RowTally = field(init=False)

    @property
    def answers_all(self) -> bool:
        """Row by row, the logits are those of `answering`."""
        return not self.twins and len(self.answering) == len(self.seats)

    def run(self, trunk: Trunk) -> None:
        """Raises JobsWait for tokens that cannot be computed, and what else the trunk raises."""
        given = [token for each in self.tokens for token in each] if self.is_packed else self.tokens
        try:
            self.logits, self.rows = trunk.forward(torch.tensor(given, device=trunk.device), self.lane)
        except ExpertsMissing as missing:
            ends = list(accumulate(map(len, self.tokens)))
            waiting = {self.seats[bisect_right(ends, row)].job.id for row in missing.rows}
            raise JobsWait(missing, sorted(waiting)) from missing

    def take_tokens(self) -> None:
        """The forward happened: its tokens are in the cache, and their pairs were computed for their jobs."""
        first = 0
        for seat, tokens in zip(self.seats, self.tokens, strict=True):
            seat.fed += tokens
            seat.tally = _add(seat.tally, self.rows, first, first + len(tokens))
            first += len(tokens)


def _add(tally: AnswerTally, rows: RowTally, first: int, end: int) -> AnswerTally:
    if end == first + 1:  # 1 µs less, for each token of each job
        return AnswerTally(
            tally.local_pairs + rows.local[first],
            tally.remote_pairs + rows.remote[first],
            tally.fallbacks + rows.fallback[first],
            tally.hedges + rows.hedged[first],
            tally.reused_tokens,
        )
    return AnswerTally(
        tally.local_pairs + sum(rows.local[first:end]),
        tally.remote_pairs + sum(rows.remote[first:end]),
        tally.fallbacks + sum(rows.fallback[first:end]),
        tally.hedges + sum(rows.hedged[first:end]),
        tally.reused_tokens,
    )
