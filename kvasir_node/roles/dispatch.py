"""The hands of fan-out on the computing thread: split a layer's pairs, send, compute here, wait, add up.

It does not know who deserves load (that is `decide/ledger` and `decide/fanout`, asked by roles/crew.py on the trio
loop) nor how frames travel. One forward after the other calls it, on one thread at a time; a forward beside it has a
fork. The crew changes the routes at any moment, as a whole.

Which tokens come out never depends on it: what is late, lost or wrong is computed here instead. All answers of a layer
are waited for at the same time, and a forward waits for late ones in vain for at most `patience_s` plus one deadline
in all: when its patience is used up, the rest of it is computed here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Protocol

import torch

from kvasir_node.base.errors import CallTimeout, KvasirError, Misbehaved, RejectReason
from kvasir_node.base.ids import PeerId
from kvasir_node.decide.fanout import Route
from kvasir_node.decide.spot_checks import SpotChecks
from kvasir_node.model.missing import ExpertsMissing
from kvasir_node.model.trunk import RowTally
from kvasir_node.net.rpc import CallStream
from kvasir_node.roles.own_experts import OwnExperts
from kvasir_node.wire.tensors import PAIRS_MAX, ROWS_MAX, ExpertRequest, read_answer, request_parts

HEAT_EVERY = 4  # forwards of which one is counted: that is enough to share experts out, and costs a quarter
HEAT_DECAY = 0.96  # of an expert's heat at each forward that is counted
PAUSE_S = 0.25  # nothing is sent to a peer this long after a call to it failed; the loop learns of it meanwhile
PAUSED_MAX = 256  # peers in a pause that are remembered


@dataclass(slots=True, eq=False)
class RemoteCall:
    """One frame on its way: made and awaited by the computing thread, sent and answered on the trio loop."""

    peer: PeerId
    request: ExpertRequest
    rows: torch.Tensor  # [R] int64 on the CPU: which rows of the forward its rows are
    deadline_s: float
    due_at: float  # time.monotonic
    parts: list[bytes | memoryview]
    done: threading.Event = field(default_factory=threading.Event)
    answer: memoryview | None = None
    error: KvasirError | None = None
    abandoned: bool = False  # past its deadline: its answer will not be used any more
    stream: CallStream | None = None  # where it was sent, as what and when on trio's clock: for the loop
    id: int = 0
    sent_at: float = 0.0

    @property
    def pairs(self) -> int:
        return self.request.pair_row.shape[0]


class Crew(Protocol):
    """What the computing thread needs of the trio side; all may be called from any thread and return at once."""

    def deadline_s(self, peer: PeerId, pairs: int, own_s: float) -> float | None:
        """How long a call of so many pairs may take, which we compute in about `own_s`; None = it is not worth one."""
        ...

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
    spot_checks: int = 0  # rows
    mismatches: int = 0  # calls

    def add(self, other: PairCounters) -> None:
        self.local += other.local
        self.remote += other.remote
        self.fallbacks += other.fallbacks
        self.spot_checks += other.spot_checks
        self.mismatches += other.mismatches


@dataclass(slots=True)
class OwnTimes:
    """Smoothed times of what is computed here: one layer's experts while all are, and one pair in a call's company."""

    layer_s: float = 0.0
    pair_s: float = 0.0

    def observe_layer(self, took_s: float) -> None:
        self.layer_s += (took_s - self.layer_s) / 32 if self.layer_s else took_s

    def observe_pairs(self, pairs: int, took_s: float) -> None:
        self.pair_s += (took_s / pairs - self.pair_s) / 8 if self.pair_s else took_s / pairs


@dataclass(frozen=True, slots=True)
class _LayerRoute:
    """A layer's route as tensors: worker number of each expert (0 = here) and who the numbers are."""

    where: torch.Tensor  # [E] int64
    peers: tuple[PeerId, ...]  # number n is peers[n - 1]


@dataclass(slots=True, eq=False)
class _Common:
    """What a dispatch and its forks know together."""

    heat: torch.Tensor  # [L, E], replaced as a whole by any of the threads under the lock
    routes: Mapping[int, _LayerRoute] = field(default_factory=dict[int, _LayerRoute])  # replaced as a whole by the loop
    trial_layers: frozenset[int] = frozenset()
    paused: dict[PeerId, float] = field(default_factory=dict[PeerId, float])  # until when (time.monotonic)
    counted: list[PairCounters] = field(default_factory=list[PairCounters])  # one of each fork, which alone adds to it
    times: OwnTimes = field(default_factory=OwnTimes)
    lock: threading.Lock = field(default_factory=threading.Lock)


class FanoutDispatch:
    """Implements `model.trunk.ExpertDispatch` over our own experts and a crew of proven workers.

    `dtype` is what the model computes in, and what rows travel in. `spot_checks` says which rows of an answer are
    compared with our own result before any of it is used; with `verifies_all` all must be, and a row that cannot be
    compared waits. `body_bytes_max` is the largest frame that may be sent.
    """

    def __init__(
        self,
        own: OwnExperts,
        layers: Sequence[int],
        experts_per_layer: int,
        *,
        dtype: torch.dtype,
        crew: Crew,
        spot_checks: SpotChecks,
        verifies_all: bool = False,
        patience_s: float,
        body_bytes_max: int,
    ) -> None:
        self._own = own
        self._dtype = dtype
        self._layers = tuple(layers)
        self._crew = crew
        self._spot_checks = spot_checks
        self._verifies_all = verifies_all
        self._patience_max_s = patience_s
        self._body_bytes_max = body_bytes_max
        self._common = _Common(torch.zeros(len(self._layers), experts_per_layer))
        self._all_rows = torch.zeros(
            0, dtype=torch.int64
        )  # pair_row of all pairs of a forward, made once for all layers
        self._all_rows_shape = (0, 0)  # T, K
        self._forwards = 0
        self._counted = PairCounters()
        self._common.counted.append(self._counted)
        self.begin(0)

    def fork(self) -> FanoutDispatch:
        """Routes, pauses, heat, times and counters are those of this one too."""
        twin = copy(self)
        twin._forwards = 0
        twin._counted = PairCounters()
        twin._common.counted.append(twin._counted)
        twin.begin(0)
        return twin

    @property
    def counters(self) -> PairCounters:
        """Of this one and all forks, up to now."""
        found = PairCounters()
        for counted in self._common.counted:
            found.add(counted)
        return found

    @property
    def times(self) -> OwnTimes:
        return self._common.times

    # The trio loop's side ------------------------------------------------------------------------------------

    def set_route(self, route: Route) -> None:
        """Takes new plans for the layers it names; the next of them that is computed follows it."""
        routes = dict(self._common.routes)
        for layer, row in route.peers.items():
            routes.pop(layer, None)
            peers = tuple(sorted({peer for peer in row if peer is not None}))
            if peers:
                number: dict[PeerId | None, int] = {peer: index for index, peer in enumerate((None, *peers))}
                where = torch.tensor([number[peer] for peer in row], device=self._own.device)
                routes[layer] = _LayerRoute(where, peers)
        self._common.routes = routes

    def set_trial_layers(self, layers: frozenset[int]) -> None:
        """Layers whose next rows should be offered for a trial."""
        self._common.trial_layers = layers

    def heat(self) -> dict[int, list[float]]:
        """How much each expert of each layer was used lately."""
        return dict(zip(self._layers, self._common.heat.tolist(), strict=True))

    # The computing thread's side ------------------------------------------------------------------------------

    def begin(self, rows: int) -> None:
        self._rows = rows
        self._pairs_per_row = 0
        self._remote: torch.Tensor | None = None  # [T] int64 on the CPU, as the next one; made when needed
        self._fallback: torch.Tensor | None = None
        self._chosen: list[torch.Tensor] = []
        self._chosen_layers: list[int] = []
        self._counts_heat = self._forwards % HEAT_EVERY == 0
        self._forwards += 1
        self._patience_s = self._patience_max_s

    def tally(self) -> RowTally:
        if self._chosen:
            self._warm()
        none = [0] * self._rows
        remote = none if self._remote is None else self._remote.tolist()
        fallback = none if self._fallback is None else self._fallback.tolist()
        return RowTally([self._pairs_per_row - each for each in remote], remote, fallback, none)

    def __call__(self, layer: int, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Weighted sums of each row's experts: rows [T,D], chosen [T,K] int64, weights [T,K] -> [T,D] float32."""
        if self._counts_heat:
            self._chosen.append(chosen)
            self._chosen_layers.append(layer)
        self._pairs_per_row += chosen.shape[1]
        if layer in self._common.trial_layers:
            self._crew.offer_trial(layer, rows.to(self._dtype), chosen, weights)
        route = self._common.routes.get(layer)
        if route is None or self._patience_s <= 0:
            return self._compute_all(layer, rows, chosen, weights)
        return self._split(route, layer, rows, chosen, weights)

    def _compute_all(self, layer: int, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        started = time.perf_counter()
        count, each = chosen.shape
        if self._all_rows_shape != (count, each):
            self._all_rows = torch.arange(count, device=chosen.device).repeat_interleave(each)
            self._all_rows_shape = (count, each)
        total = self._own.compute(layer, rows, self._all_rows, chosen.reshape(-1), weights.reshape(-1))
        self._common.times.observe_layer(time.perf_counter() - started)
        self._counted.local += chosen.numel()
        return total

    def _split(
        self, route: _LayerRoute, layer: int, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        where = route.where[chosen]  # [T,K]
        framed = rows.to(self._dtype)
        calls = []
        counts = torch.bincount(where.reshape(-1), minlength=len(route.peers) + 1).tolist()
        for number, peer in enumerate(route.peers, start=1):
            if counts[number]:
                deadline_s = self._deadline_s(peer, counts[number], framed)
                if deadline_s is None:
                    where[where == number] = 0
                else:
                    calls.append(_make_call(peer, layer, framed, chosen, weights, where == number, deadline_s))
        if calls:
            self._crew.send(calls)
        total = self._compute_share(layer, rows, chosen, weights, where == 0)
        for call in calls:
            total.index_add_(0, call.rows.to(total.device), self._finish(call).to(total.device))
        return total

    def _deadline_s(self, peer: PeerId, pairs: int, rows: torch.Tensor) -> float | None:
        """How long a call may take; None when it should not or cannot be made."""
        if self._common.paused and self._is_paused(peer):
            return None
        most_rows = min(pairs, rows.shape[0])
        most_bytes = most_rows * rows.shape[1] * rows.element_size() + 12 * pairs + 64
        if pairs > PAIRS_MAX or most_rows > ROWS_MAX or most_bytes > self._body_bytes_max:
            return None
        return self._crew.deadline_s(peer, pairs, pairs * self.times.pair_s)

    def _compute_share(
        self, layer: int, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, here: torch.Tensor
    ) -> torch.Tensor:
        """Our own part, where `here` [T,K] is true, while the frames fly."""
        pair_row, slot = here.nonzero(as_tuple=True)
        started = time.perf_counter()
        total = self._own.compute(layer, rows, pair_row, chosen[pair_row, slot], weights[pair_row, slot])
        pairs = pair_row.shape[0]
        if pairs:
            self._common.times.observe_pairs(pairs, time.perf_counter() - started)
        self._counted.local += pairs
        return total

    def _finish(self, call: RemoteCall) -> torch.Tensor:
        """The call's partial sums [R,D] float32: the worker's when right and in time, else our own."""
        pairs_of_row = torch.bincount(call.request.pair_row, minlength=call.request.rows.shape[0])
        right, sums = self._await_answer(call)
        if self._remote is None or self._fallback is None:
            self._remote = torch.zeros(self._rows, dtype=torch.int64)
            self._fallback = torch.zeros(self._rows, dtype=torch.int64)
        if right:
            self._remote[call.rows] += pairs_of_row
            self._counted.remote += call.pairs
        else:
            self._pause(call.peer)
            self._fallback[call.rows] += pairs_of_row
            self._counted.local += call.pairs
            self._counted.fallbacks += call.pairs
        return sums

    def _await_answer(self, call: RemoteCall) -> tuple[bool, torch.Tensor]:
        """(True, the worker's sums), or (False, our own) when they are late, lost or wrong; the crew is told which."""
        started = time.monotonic()
        if not call.done.wait(max(0.0, call.due_at - started)):
            call.abandoned = True
            self._patience_s -= time.monotonic() - started
            self._crew.report(call, CallTimeout(f"no answer within {call.deadline_s * 1000:.0f} ms"))
            return False, self._sums_here(call)
        if call.answer is None:
            self._crew.report(call, call.error)
            return False, self._sums_here(call)
        return self._check(call, call.answer)

    def _check(self, call: RemoteCall, answer: memoryview) -> tuple[bool, torch.Tensor]:
        """Holds an answer to what was asked, and some rows of it against our own result, before it is used."""
        rows, hidden_size = call.request.rows.shape
        dtype = call.request.rows.dtype
        try:
            sums = read_answer(answer, rows=rows, hidden_size=hidden_size, dtype=dtype).to(torch.float32)
        except Misbehaved as error:
            own = self._sums_here(call)
            self._blame(call, error, own)
            return False, own
        drawn, own = self._draw(call)
        if own is not None and not agrees(sums[drawn], own, dtype):
            self._counted.mismatches += 1
            self._blame(call, wrong_result(), own)
            return False, self._sums_here(call)
        if own is None and self._verifies_all:
            return False, self._sums_here(call)
        self._crew.report(call, None)
        # Where we know all of the truth it is used: a lie within the tolerance gains nothing.
        return True, sums if own is None or own.shape[0] < rows else own

    def _blame(self, call: RemoteCall, error: Misbehaved, own: torch.Tensor) -> None:
        if bool(torch.isfinite(own).all()):  # else the model itself overflows there, and nobody is to blame
            with self._common.lock:
                self._spot_checks.watch(call.peer)
            self._crew.report(call, error, wrong=True)

    def _draw(self, call: RemoteCall) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The rows that are compared, and our own sums for them; None when there are none to compare.

        That is also when they take experts which are not on this machine: these are fetched, and a later answer is
        compared, because no token should wait to be checked.
        """
        request = call.request

        def experts_of(row: int) -> list[int]:
            return request.pair_expert[request.pair_row == row].tolist()

        with self._common.lock:
            drawn = self._spot_checks.pick(call.peer, request.layer, request.rows.shape[0], experts_of)
        rows = torch.tensor(drawn, dtype=torch.int64)
        if not drawn:
            return rows, None
        try:
            own = self._own.sums(request if len(drawn) == request.rows.shape[0] else rows_of(request, rows))
        except ExpertsMissing as missing:
            self._own.want(missing.layer, missing.experts)
            return rows, None
        self._counted.spot_checks += len(drawn)
        return rows, own

    def _sums_here(self, call: RemoteCall) -> torch.Tensor:
        """Our own sums. Raises ExpertsMissing with the rows of the forward, not of the call."""
        try:
            return self._own.sums(call.request)
        except ExpertsMissing as missing:
            rows = call.rows[list(missing.rows)].tolist()
            raise ExpertsMissing(missing.layer, missing.experts, rows) from missing

    def _pause(self, peer: PeerId) -> None:
        now = time.monotonic()
        with self._common.lock:
            paused = self._common.paused
            paused[peer] = now + PAUSE_S
            if len(paused) > PAUSED_MAX:
                self._common.paused = {each: until for each, until in paused.items() if until > now}

    def _is_paused(self, peer: PeerId) -> bool:
        with self._common.lock:
            until = self._common.paused.get(peer)
            if until is not None and until <= time.monotonic():
                del self._common.paused[peer]
                return False
        return until is not None

    def _warm(self) -> None:
        """Counts the experts that this forward used: all layers in one go, because each by itself would cost more."""
        chosen = torch.stack(self._chosen).flatten(1).cpu()  # [L, T × K]
        self._chosen.clear()
        used = torch.zeros(chosen.shape[0], self._common.heat.shape[1])
        used.scatter_add_(1, chosen, torch.ones((), dtype=used.dtype).expand(chosen.shape))
        if tuple(self._chosen_layers) != self._layers:
            each = torch.zeros_like(self._common.heat)
            each[[self._layers.index(layer) for layer in self._chosen_layers]] = used
            used = each
        with self._common.lock:
            self._common.heat = self._common.heat * HEAT_DECAY + used


def _make_call(
    peer: PeerId,
    layer: int,
    rows: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    mine: torch.Tensor,
    deadline_s: float,
) -> RemoteCall:
    request, used = pick_pairs(layer, rows, chosen, weights, mine)
    return RemoteCall(peer, request, used, deadline_s, time.monotonic() + deadline_s, request_parts(request))


def pick_pairs(
    layer: int, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor
) -> tuple[ExpertRequest, torch.Tensor]:
    """The request for the pairs where `mask` [T,K] is true, each row once; and which rows [R] it took.

    All of it copies on the CPU, wherever the arguments are.
    """
    pair_row, slot = mask.nonzero(as_tuple=True)
    used, compact = torch.unique_consecutive(pair_row, return_inverse=True)  # nonzero is in row order
    request = ExpertRequest(
        layer=layer,
        rows=rows[used].cpu(),
        pair_row=compact.to("cpu", torch.int32),
        pair_expert=chosen[pair_row, slot].to("cpu", torch.int32),
        pair_weight=weights[pair_row, slot].to("cpu", torch.float32),
    )
    return request, used.cpu()


def rows_of(request: ExpertRequest, rows: torch.Tensor) -> ExpertRequest:
    """The request for some of a request's rows [N] int64, in ascending order."""
    mine = torch.isin(request.pair_row, rows)
    return ExpertRequest(
        layer=request.layer,
        rows=request.rows[rows],
        pair_row=torch.searchsorted(rows, request.pair_row[mine].long()).to(torch.int32),
        pair_expert=request.pair_expert[mine],
        pair_weight=request.pair_weight[mine],
    )


TOLERANCES: Mapping[torch.dtype, float] = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Largest difference, as a share of a row's largest value, that honest machines show: order of sums and rounding."""


def agrees(sums: torch.Tensor, own: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether two results [R,D] of the same request are the same up to honest rounding, in every row by itself."""
    scale = own.abs().amax(1).clamp_min(1e-6)
    return bool(((sums - own).abs().amax(1) <= TOLERANCES[dtype] * scale).all())


def wrong_result() -> Misbehaved:
    return Misbehaved(RejectReason.BAD_RESULT, "an answer differs from our own result")
