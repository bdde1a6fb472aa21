"""What is known of one forward while the dispatch computes its experts: whose pairs were computed where, and how long.

It does not know how anything is computed. One thread has it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import torch

from kvasir_node.decide.dealing import Dealings
from kvasir_node.decide.looks import LOOK_LOSS_S, LookPace
from kvasir_node.model.pair_split import DealTable
from kvasir_node.model.trunk import RowTally
from kvasir_node.roles.measured import CallMeasured, ForwardMeasured, LayerMeasured
from kvasir_node.roles.remote_call import RemoteCall, Served
from kvasir_node.wire.tensors import REQUEST_BYTES, computed_s_of


@dataclass(slots=True)
class PairCounters:
    """(row, expert) pairs by where they were computed, since the start."""

    local: int = 0
    remote: int = 0
    fallbacks: int = 0  # computed here after a call had failed
    hedges: int = 0  # calls that were computed a second way because they were late
    late: int = 0  # answers that came after that, and were dropped
    spot_checks: int = 0  # rows
    mismatches: int = 0  # calls

    def add(self, other: PairCounters) -> None:
        for each in fields(other):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


@dataclass(frozen=True, slots=True)
class RoutesInForce:
    """By layer; replaced as a whole. A forward of more than `decode_rows_max` rows has a prompt in it. `looks`: how
    layers that decoding has no route for may be split now and then (`decide/looks`)."""

    decode: Mapping[int, DealTable] = field(default_factory=dict[int, DealTable])
    prompt: Mapping[int, DealTable] = field(default_factory=dict[int, DealTable])
    decode_rows_max: int = 0
    looks: Mapping[int, DealTable] = field(default_factory=dict[int, DealTable])


def laid_out(dealings: Dealings, like: Mapping[int, DealTable]) -> Mapping[int, DealTable]:
    """`like`: those in force before."""
    return {layer: DealTable(dealing, like.get(layer)) for layer, dealing in dealings.items()}


@dataclass(slots=True)
class Forward:
    """`sampled`: the layer of which times are taken. The tensors are int64 [T] on the CPU."""

    rows: int
    patience_s: float
    sampled: int
    began_at: float = field(default_factory=time.perf_counter)
    inside_s: float = 0.0  # spent in the dispatch: all but the trunk
    calls: int = 0
    calls_s: float = 0.0  # our own time for them
    layer: LayerMeasured | None = None
    pairs_per_row: int = 0
    remote: torch.Tensor | None = None  # made when needed, as are the next two
    fallback: torch.Tensor | None = None
    hedged: torch.Tensor | None = None
    chosen: list[torch.Tensor] = field(default_factory=list[torch.Tensor])  # of the layers that are counted for heat
    chosen_layers: list[int] = field(default_factory=list[int])
    served: Served = field(default_factory=Served)
    look_more_s: float | None = None  # what its look took longer than alone; None = not decided, infinite = it has none

    def may_look(self, pace: LookPace, now: float) -> bool:
        """Whether this forward looks, which the first of its layers decides, and has not become too dear."""
        if self.look_more_s is None:
            self.look_more_s = 0.0 if pace.take(now) else math.inf
        return self.look_more_s < LOOK_LOSS_S

    @property
    def looks(self) -> bool:
        return self.look_more_s is not None and self.look_more_s < math.inf

    def remote_counts(self) -> torch.Tensor:
        if self.remote is None:
            self.remote = torch.zeros(self.rows, dtype=torch.int64)
        return self.remote

    def count_own(self, call: RemoteCall, *, is_hedge: bool) -> None:
        """A call's pairs were computed here after all."""
        counts = self.hedged if is_hedge else self.fallback
        if counts is None:
            counts = torch.zeros(self.rows, dtype=torch.int64)
        counts[call.part.used] += call.part.row_pairs
        if is_hedge:
            self.hedged = counts
        else:
            self.fallback = counts

    def note(self, call: RemoteCall, answer: memoryview | None) -> None:
        """A call went well; its `answer` tells times, if it came by an express channel."""
        served = self.served
        served.calls[call.peer] = served.calls.get(call.peer, 0) + 1
        served.rows[call.peer] = served.rows.get(call.peer, 0) + call.part.rows
        if not call.is_sample:
            return
        served.experts.append((call.peer, call.layer, frozenset(call.request.pair_expert.tolist())))
        if call.channel is not None and answer is not None:
            computed_s = computed_s_of(answer)
            served.measured.append(
                CallMeasured(
                    peer=call.peer,
                    activated=call.part.activated,
                    pairs=call.pairs,
                    sent_bytes=REQUEST_BYTES + len(call.part.body),
                    received_bytes=len(answer),
                    took_s=call.took_s if call.is_timed else computed_s,  # or it says nothing of the way
                    computed_s=computed_s or None,
                )
            )

    def measured(self) -> ForwardMeasured:
        """At its end."""
        trunk_s = time.perf_counter() - self.began_at - self.inside_s
        return ForwardMeasured(self.rows, trunk_s, self.layer, self.calls_s / self.calls if self.calls else None)

    def tally(self) -> RowTally:
        remote, fallback, hedged = map(self._listed, (self.remote, self.fallback, self.hedged))
        return RowTally([self.pairs_per_row - each for each in remote], remote, fallback, hedged)

    def _listed(self, counts: torch.Tensor | None) -> Sequence[int]:
        return [0] * self.rows if counts is None else counts.tolist()
