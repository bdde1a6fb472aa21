"""The hands of fan-out on the computing thread: split a layer's pairs, send, compute here, wait, add up.

It does not know who deserves load (that is `decide/ledger` and `decide/fanout`, asked by roles/crew.py on the trio
loop) nor how frames travel. One forward after the other calls it, on one thread; the crew changes `routes` at any
moment, as a whole.

Which tokens come out never depends on it: what is late, lost or wrong is computed here instead.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from kvasir_node.base.errors import KvasirError, Misbehaved, RejectReason
from kvasir_node.base.ids import ExpertId, PeerId
from kvasir_node.decide.fanout import Route
from kvasir_node.model.experts import ExpertShard
from kvasir_node.model.trunk import RowTally
from kvasir_node.wire.tensors import ExpertRequest, read_answer, request_parts

HEAT_DECAY = 0.99  # of an expert's heat at each forward that touches its layer


@dataclass(slots=True, eq=False)
class RemoteCall:
    """One frame on its way: made and awaited by the computing thread, sent and answered on the trio loop."""

    peer: PeerId
    request: ExpertRequest
    rows: torch.Tensor  # [R] int64: which rows of the forward its rows are
    deadline_s: float
    parts: list[bytes | memoryview]
    done: threading.Event = field(default_factory=threading.Event)
    answer: memoryview | None = None
    error: KvasirError | None = None
    took_s: float = 0.0
    abandoned: bool = False  # past its deadline: whoever sends or receives it need not care any more

    @property
    def pairs(self) -> int:
        return self.request.pair_row.shape[0]


class Crew(Protocol):
    """What the computing thread needs of the trio side; both may be called from any thread and return at once."""

    def send(self, calls: Sequence[RemoteCall]) -> None:
        """Sends the frames; each call's `done` is set when its answer or error is there."""
        ...

    def report(self, call: RemoteCall, error: KvasirError | None, *, wrong: bool = False) -> None:
        """Tells how a call ended: well, or how it failed; `wrong` = it was answered, but not with the truth."""
        ...

    def offer_trial(self, layer: int, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> None:
        """Real rows of a layer that wants a trial; they are copied if they are used."""
        ...


@dataclass(slots=True)
class PairCounters:
    """(row, expert) pairs by where they were computed, since the start."""

    local: int = 0
    remote: int = 0
    fallbacks: int = 0
    spot_checks: int = 0
    mismatches: int = 0


@dataclass(frozen=True, slots=True)
class _LayerRoute:
    """A layer's route as tensors: worker number of each expert (0 = here) and who the numbers are."""

    where: torch.Tensor  # [E] int64
    peers: tuple[PeerId, ...]  # number n is peers[n - 1]


class FanoutDispatch:
    """Implements `model.trunk.ExpertDispatch` over a local shard and a crew of proven workers.

    `load_missing(layer, experts)` puts experts that are not held into `shard` (from the checkpoint), for when nobody
    else can compute them in time. `deadline_s(peer, pairs)` says how long a call may take.
    `spot_check(pairs)` decides whether a call's answer is compared with our own result before it is used.
    """

    def __init__(
        self,
        shard: ExpertShard,
        layers: Sequence[int],
        experts_per_layer: int,
        *,
        crew: Crew,
        load_missing: Callable[[int, Sequence[ExpertId]], None],
        deadline_s: Callable[[PeerId, int], float],
        spot_check: Callable[[], bool],
    ) -> None:
        self._shard = shard
        self._crew = crew
        self._load_missing = load_missing
        self._deadline_s = deadline_s
        self._spot_check = spot_check
        self._routes: dict[int, _LayerRoute] = {}
        self._failed: set[PeerId] = set()  # since the last route: nothing more is sent to them
        self._trial_layers: frozenset[int] = frozenset()
        self.heat = {layer: torch.zeros(experts_per_layer) for layer in layers}
        self.counters = PairCounters()
        self.local_layer_s = 0.0  # smoothed time of one layer's experts when all are computed here
        self.begin(0)

    def set_route(self, route: Route) -> None:
        """Takes a new plan; any thread may call it, the next layer computed follows it."""
        routes = {}
        for layer, row in route.peers.items():
            peers = tuple(sorted({peer for peer in row if peer is not None}))
            if peers:
                number = {peer: index + 1 for index, peer in enumerate(peers)} | {None: 0}
                routes[layer] = _LayerRoute(torch.tensor([number[peer] for peer in row]), peers)
        self._failed = set()
        self._routes = routes

    def set_trial_layers(self, layers: frozenset[int]) -> None:
        """Layers whose next rows should be offered for a trial."""
        self._trial_layers = layers

    def begin(self, rows: int) -> None:
        self._local = torch.zeros(rows, dtype=torch.int64)
        self._remote = torch.zeros(rows, dtype=torch.int64)
        self._fallback = torch.zeros(rows, dtype=torch.int64)

    def tally(self) -> RowTally:
        local, remote, fallback = self._local.tolist(), self._remote.tolist(), self._fallback.tolist()
        return RowTally(local=local, remote=remote, fallback=fallback, hedged=[0] * len(local))

    def __call__(self, layer: int, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Weighted sums of each row's experts: rows [T,D], chosen [T,K] int64, weights [T,K] -> [T,D] float32."""
        self._warm(layer, chosen)
        if layer in self._trial_layers:
            self._crew.offer_trial(layer, rows, chosen, weights)
        route = self._routes.get(layer)
        if route is None:
            started = time.perf_counter()
            total = self._compute_here(layer, rows, *_all_pairs(chosen, weights))
            self.local_layer_s += (time.perf_counter() - started - self.local_layer_s) / 32
            self._local += chosen.shape[1]
            self.counters.local += chosen.numel()
            return total
        return self._split(route, layer, rows, chosen, weights)

    def _split(
        self, route: _LayerRoute, layer: int, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        where = route.where[chosen]  # [T,K]
        calls = []
        for number, peer in enumerate(route.peers, start=1):
            mine = where == number
            if peer in self._failed:
                where[mine] = 0
            elif bool(mine.any()):
                calls.append(self._make_call(peer, layer, rows, chosen, weights, mine))
        if calls:
            self._crew.send(calls)
        here = where == 0
        pair_row, slot = here.nonzero(as_tuple=True)
        total = self._compute_here(layer, rows, pair_row, chosen[pair_row, slot], weights[pair_row, slot])
        self._local += here.sum(1)
        self.counters.local += pair_row.shape[0]
        for call in calls:
            total.index_add_(0, call.rows, self._finish(call))
        return total

    def _make_call(
        self,
        peer: PeerId,
        layer: int,
        rows: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        mine: torch.Tensor,
    ) -> RemoteCall:
        request, used = pick_pairs(layer, rows, chosen, weights, mine)
        pairs = request.pair_row.shape[0]
        return RemoteCall(peer, request, used, self._deadline_s(peer, pairs), request_parts(request))

    def _finish(self, call: RemoteCall) -> torch.Tensor:
        """The call's partial sums [R,D] float32: the worker's when right and in time, else our own."""
        pairs_of_row = torch.bincount(call.request.pair_row, minlength=call.request.rows.shape[0])
        sums = self._await_answer(call)
        if sums is not None:
            self._remote[call.rows] += pairs_of_row
            self.counters.remote += call.pairs
            return sums
        self._failed.add(call.peer)
        self._local[call.rows] += pairs_of_row
        self._fallback[call.rows] += pairs_of_row
        self.counters.local += call.pairs
        self.counters.fallbacks += call.pairs
        return self._own_sums(call.request)

    def _await_answer(self, call: RemoteCall) -> torch.Tensor | None:
        """The worker's sums, or None when they are late, lost or wrong; the crew is told which."""
        if not call.done.wait(call.deadline_s):
            call.abandoned = True
            self._crew.report(call, None)
            return None
        if call.answer is None:
            self._crew.report(call, call.error)
            return None
        rows, hidden_size = call.request.rows.shape
        dtype = call.request.rows.dtype
        try:
            sums = read_answer(call.answer, rows=rows, hidden_size=hidden_size, dtype=dtype).to(torch.float32)
            if self._spot_check():
                self._compare(sums, call.request)
        except Misbehaved as error:
            self._crew.report(call, error, wrong=True)
            return None
        self._crew.report(call, None)
        return sums

    def _compare(self, sums: torch.Tensor, request: ExpertRequest) -> None:
        """Holds an answer against our own result before it is used; raises Misbehaved when they differ."""
        self.counters.spot_checks += 1
        if not agrees(sums, self._own_sums(request), request.rows.dtype):
            self.counters.mismatches += 1
            raise wrong_result()

    def _own_sums(self, request: ExpertRequest) -> torch.Tensor:
        pairs = (request.pair_row.long(), request.pair_expert.long(), request.pair_weight)
        return self._compute_here(request.layer, request.rows, *pairs)

    def _compute_here(
        self,
        layer: int,
        rows: torch.Tensor,
        pair_row: torch.Tensor,
        pair_expert: torch.Tensor,
        pair_weight: torch.Tensor,
    ) -> torch.Tensor:
        return compute_with(self._shard, self._load_missing, layer, rows, pair_row, pair_expert, pair_weight)

    def _warm(self, layer: int, chosen: torch.Tensor) -> None:
        heat = self.heat[layer]
        heat.mul_(HEAT_DECAY).add_(torch.bincount(chosen.reshape(-1), minlength=heat.shape[0]))


def pick_pairs(
    layer: int, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor
) -> tuple[ExpertRequest, torch.Tensor]:
    """The request for the pairs where `mask` [T,K] is true, each row once; and which rows [R] it took."""
    pair_row, slot = mask.nonzero(as_tuple=True)
    used, compact = torch.unique_consecutive(pair_row, return_inverse=True)  # nonzero is in row order
    request = ExpertRequest(
        layer=layer,
        rows=rows[used],
        pair_row=compact.to(torch.int32),
        pair_expert=chosen[pair_row, slot].to(torch.int32),
        pair_weight=weights[pair_row, slot].to(torch.float32),
    )
    return request, used


def compute_with(
    shard: ExpertShard,
    load_missing: Callable[[int, Sequence[ExpertId]], None],
    layer: int,
    rows: torch.Tensor,
    pair_row: torch.Tensor,
    pair_expert: torch.Tensor,
    pair_weight: torch.Tensor,
) -> torch.Tensor:
    """`ExpertShard.compute`, after what is missing was loaded."""
    missing = set(pair_expert.unique().tolist()) - shard.held(layer)
    if missing:
        load_missing(layer, [ExpertId(layer, index) for index in sorted(missing)])
    return shard.compute(layer, rows, pair_row, pair_expert, pair_weight)


TOLERANCES: Mapping[torch.dtype, float] = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Largest difference, as a share of the largest value, that honest machines show: order of addition and rounding."""


def agrees(sums: torch.Tensor, own: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether two results of the same request are the same up to honest rounding. Shapes: [R,D] both."""
    scale = max(float(own.abs().max()), 1e-6)
    return bool(float((sums - own).abs().max()) <= TOLERANCES[dtype] * scale)


def wrong_result() -> Misbehaved:
    return Misbehaved(RejectReason.BAD_RESULT, "an answer differs from our own result")


def _all_pairs(chosen: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    count, each = chosen.shape
    pair_row = torch.arange(count, device=chosen.device).repeat_interleave(each)
    return pair_row, chosen.reshape(-1), weights.reshape(-1)
