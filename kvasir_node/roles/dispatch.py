"""The hands of fan-out on the computing thread: split a layer's pairs, send, compute here, wait, add up.

It does not know who deserves load (that is `decide/ledger` and the governor, on the trio loop) nor how frames travel.
One forward after the other calls it, on one thread at a time; a forward beside it has a fork. The routes are changed at
any moment, as a whole.

Which tokens come out never depends on it: what is late, lost or wrong is computed another way instead. All answers of a
layer are waited for at the same time. A call that is later than its like is computed here, or by another worker that
has the experts, and the first right result is used; its worker gets nothing more until it has answered, and has failed
if it does not before the deadline. A forward waits for deadlines in vain for at most `patience_s` plus one of them in
all: when its patience is used up, the rest of it is computed here.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import count

import torch

from kvasir_node.base.errors import CallTimeout, KvasirError, Misbehaved, RejectReason
from kvasir_node.base.ids import PeerId
from kvasir_node.decide.call_times import CallLimits, Here, Wait, second_way
from kvasir_node.decide.dealing import Dealings
from kvasir_node.decide.looks import LookPace
from kvasir_node.decide.spot_checks import SpotChecks
from kvasir_node.model.missing import ExpertsMissing
from kvasir_node.model.pair_split import DealTable, PairSplitter, Part, Split
from kvasir_node.model.trunk import RowTally
from kvasir_node.roles.availability import Availability
from kvasir_node.roles.checks import AnswerChecks
from kvasir_node.roles.comparing import wrong_result
from kvasir_node.roles.forward import Forward, PairCounters, RoutesInForce, laid_out
from kvasir_node.roles.heat import HEAT_EVERY, Heat
from kvasir_node.roles.measured import LayerMeasured, Observer
from kvasir_node.roles.own_experts import OwnExperts
from kvasir_node.roles.remote_call import Crew, RemoteCall, Result, Served
from kvasir_node.wire.tensors import PAIRS_MAX, REQUEST_BYTES, ROWS_MAX, Encoding, answer_values, read_answer

TIMING_RESTS = 50.0  # times as long as finding out how far a peer is took, nobody else's way is looked at
LONG_FORWARD_S = 0.1  # after one that took longer every call is measured, not only those of one layer
RACE_LOOK_S = 0.002  # while two peers compute the same call, how often both are looked at


@dataclass(slots=True)
class OwnTimes:
    """Smoothed time of one pair that is computed here."""

    pair_s: float = 0.0

    def observe(self, pairs: int, took_s: float) -> None:
        self.pair_s += (took_s / pairs - self.pair_s) / 8 if self.pair_s else took_s / pairs


@dataclass(slots=True, eq=False)
class _Common:
    """What a dispatch and its forks know together."""

    heat: Heat
    routes: RoutesInForce = field(default_factory=RoutesInForce)
    trial_layers: frozenset[int] = frozenset()
    availability: Availability = field(default_factory=Availability)
    counted: list[PairCounters] = field(default_factory=list[PairCounters])  # one of each fork, which alone adds to it
    times: OwnTimes = field(default_factory=OwnTimes)
    numbers: count[int] = field(default_factory=lambda: count(1))
    timing_rests_until: float = 0.0
    look_pace: LookPace = field(default_factory=LookPace)


class FanoutDispatch:
    """Implements `model.trunk.ExpertDispatch` over our own experts and a crew of proven workers.

    `dtype` is what the model computes in, and what rows travel in unless `set_encoding` says otherwise. `spot_checks`
    says which rows of an answer are compared with our own result before any of it is used; with `verifies_all` every
    row must be known twice. `body_bytes_max` is the largest frame that may be sent. `draw` chooses who computes a row
    the second time; nobody should be able to foretell it. Looks take their time from `clock`.
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
        observer: Observer | None = None,
        draw: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._own = own
        self._dtype = dtype
        self._encoding = Encoding.of(dtype)
        self._layers = tuple(layers)
        self._crew = crew
        self._checks = AnswerChecks(own, spot_checks, verifies_all=verifies_all)
        self._patience_max_s = patience_s
        self._body_bytes_max = body_bytes_max
        self._observer = observer
        self._draw = draw or random.SystemRandom()
        self._clock = clock
        self._common = _Common(Heat(layers, experts_per_layer))
        self._rows_of_all = torch.zeros(0, dtype=torch.int64)  # pair_row of all pairs of a forward, for all its layers
        self._shape_of_all: tuple[int, ...] = (0, 0)  # T, K
        self._begin_apart()

    def _begin_apart(self) -> None:
        """What each fork has for itself."""
        self._splitter = _splitter_for(self._encoding)
        self._counted = PairCounters()
        self._common.counted.append(self._counted)
        self._forwards = 0
        self._is_long = False
        self._forward = self._new_forward(0)

    def _new_forward(self, rows: int) -> Forward:
        return Forward(rows, self._patience_max_s, self._layers[self._forwards % len(self._layers)])

    def fork(self) -> FanoutDispatch:
        """Routes, pauses, heat, times and counters are those of this one too."""
        twin = copy(self)
        twin._begin_apart()
        return twin

    @property
    def counters(self) -> PairCounters:
        """Of this one and all forks, up to now."""
        found = PairCounters()
        for counted in self._common.counted:
            found.add(counted)
        return found

    # The trio loop's side ------------------------------------------------------------------------------------

    def set_routes(
        self, decode: Dealings, prompt: Dealings, decode_rows_max: int, looks: Dealings | None = None
    ) -> None:
        """What forwards of up to so many rows follow from their next layer on, and what larger ones do. `looks`: how
        layers of decoding that have no route may be split now and then, to see what that takes."""
        old = self._common.routes
        self._common.routes = RoutesInForce(
            laid_out(decode, old.decode),
            laid_out(prompt, old.prompt),
            decode_rows_max,
            laid_out(looks or {}, old.looks),
        )

    def set_encoding(self, encoding: Encoding) -> None:
        """What rows travel in; before the first forward, and before there are forks."""
        self._encoding = encoding
        self._splitter = _splitter_for(encoding)

    def set_trial_layers(self, layers: frozenset[int]) -> None:
        """Layers whose next rows should be offered for a trial."""
        self._common.trial_layers = layers

    def heat(self) -> dict[int, list[float]]:
        """How much each expert of each layer was used lately."""
        return self._common.heat.by_layer()

    # The computing thread's side ------------------------------------------------------------------------------

    def begin(self, rows: int) -> None:
        self._tell_served()  # of a forward that raised
        self._time_channels()
        self._forwards += 1
        self._forward = self._new_forward(rows)

    def _time_channels(self) -> None:
        """Finds out how far those peers are to whom nothing was sent for a while, from the thread that will send.

        Many that are far would hold up every step, and all the more while nothing is sent to anybody: so this has a
        small part of the time.
        """
        common = self._common
        for channel in self._crew.untimed_channels():
            began = time.monotonic()
            if began < common.timing_rests_until:
                return
            if common.availability.take_channel(channel.peer, channel):
                self._crew.time_channel(channel)
                common.availability.leave_channel(channel.peer, channel)
                ended = time.monotonic()
                common.timing_rests_until = ended + TIMING_RESTS * (ended - began)

    def tally(self) -> RowTally:
        forward = self._forward
        self._is_long = time.perf_counter() - forward.began_at > LONG_FORWARD_S
        if forward.chosen:
            self._common.heat.count(forward.chosen_layers, forward.chosen)
            forward.chosen.clear()
        self._tell_served()
        if self._observer is not None:
            self._observer.forward_measured(forward.measured())
        return forward.tally()

    def _tell_served(self) -> None:
        served = self._forward.served
        if served.calls:
            self._forward.served = Served()
            self._crew.served(served)

    def __call__(self, layer: int, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Weighted sums of each row's experts: rows [T,D], chosen [T,K] int64, weights [T,K] -> [T,D] float32."""
        began, forward = time.perf_counter(), self._forward
        if self._forwards % HEAT_EVERY == 1:
            forward.chosen.append(chosen.clone())  # the fused path has one tensor for all layers
            forward.chosen_layers.append(layer)
        forward.pairs_per_row += chosen.shape[1]
        if layer in self._common.trial_layers:
            self._crew.offer_trial(layer, rows.to(self._dtype), chosen, weights)
        routes = self._common.routes
        is_decode = forward.rows <= routes.decode_rows_max
        route = (routes.decode if is_decode else routes.prompt).get(layer)
        look = routes.looks.get(layer) if is_decode and route is None else None
        if look is not None and forward.patience_s > 0 and forward.may_look(self._common.look_pace, self._clock()):
            total = self._look(look, layer, rows, chosen, weights)
        elif route is None or forward.patience_s <= 0:
            total = self._compute_all(layer, rows, chosen, weights)
        else:
            total = self._split(route, layer, rows, chosen, weights)
        forward.inside_s += time.perf_counter() - began
        return total

    def _compute_all(self, layer: int, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        shape = chosen.shape
        if self._shape_of_all != shape:
            self._rows_of_all = torch.arange(shape[0], device=chosen.device).repeat_interleave(shape[1])
            self._shape_of_all = tuple(shape)
        return self._compute_here(layer, rows, self._rows_of_all, chosen.reshape(-1), weights.reshape(-1), None)

    def _compute_here(
        self,
        layer: int,
        rows: torch.Tensor,
        pair_row: torch.Tensor,
        pair_expert: torch.Tensor,
        pair_weight: torch.Tensor,
        activated: int | None,
    ) -> torch.Tensor:
        """`activated` = different experts; None = to be counted if need be."""
        began = time.perf_counter()
        total = self._own.compute(layer, rows, pair_row, pair_expert, pair_weight)
        took_s = time.perf_counter() - began
        pairs = pair_row.shape[0]
        self._counted.local += pairs
        if pairs and layer == self._forward.sampled:
            self._common.times.observe(pairs, took_s)
            distinct = len(set(pair_expert.tolist())) if activated is None else activated  # `unique` takes 12 µs
            self._forward.layer = LayerMeasured(distinct, pairs, took_s)
        return total

    def _split(
        self,
        route: DealTable,
        layer: int,
        rows: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        began_s = time.thread_time()  # by processor time: whoever has the core meanwhile is no cost of a call
        split, limits = self._cut(route, rows, chosen, weights)
        calls = [
            self._new_call(route.dealing.peers[part.machine - 1], layer, rows.shape[1], part, limits[part.machine])
            for part in split.parts
        ]
        twins = [self._twin_of(call) for call in calls] if self._checks.verifies_all else [None] * len(calls)
        under_way = [call for call in (*calls, *twins) if call is not None]
        try:
            self._send(under_way)
            sent_s = time.thread_time()
            total = self._compute_here(
                layer, rows, split.own_rows, split.own_experts, split.own_weights, split.activated
            )
            self._prepare_checks(calls, twins)
            computed_s = time.thread_time()
            for call, twin in zip(calls, twins, strict=True):
                self._finish(call, twin, total)
        except KvasirError:  # some experts are nowhere: the forward ends, and what is under way is passed over
            for call in under_way:
                self._drop(call)
            raise
        self._forward.calls += len(calls)
        self._forward.calls_s += sent_s - began_s + time.thread_time() - computed_s
        return total

    def _look(
        self, look: DealTable, layer: int, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """A split like any other, at a loss perhaps: after it nobody is looked at for so long that it hardly counts."""
        forward, began, alone_s = self._forward, self._clock(), chosen.numel() * self._common.times.pair_s
        try:
            return self._split(look, layer, rows, chosen, weights)
        finally:
            ended = self._clock()
            forward.look_more_s = (forward.look_more_s or 0.0) + ended - began - alone_s
            self._common.look_pace.took(forward.look_more_s, ended)

    def _prepare_checks(self, calls: Sequence[RemoteCall], twins: Sequence[RemoteCall | None]) -> None:
        """What is compared is computed while the answers are under way.

        With a twin there is something to compare only if the two differ.
        """
        for call, twin in zip(calls, twins, strict=True):
            if twin is None:
                self._checks.prepare(call)

    def _cut(
        self, route: DealTable, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> tuple[Split, dict[int, CallLimits]]:
        """The parts for which a call should be made, with their limits, by machine; what is left is ours."""
        peers = route.dealing.peers
        allowed = [True, *map(self._is_available, peers)]
        while True:
            split = self._splitter.split(route, allowed, rows, chosen, weights)
            limits = {part.machine: self._limits_of(peers[part.machine - 1], part) for part in split.parts}
            refused = [machine for machine, each in limits.items() if each is None]
            if not refused:
                return split, {machine: each for machine, each in limits.items() if each is not None}
            for machine in refused:
                allowed[machine] = False

    def _limits_of(self, peer: PeerId, part: Part) -> CallLimits | None:
        """How long a call to an available peer may take; None when it should not or cannot be made."""
        if part.pairs > PAIRS_MAX or part.rows > ROWS_MAX or len(part.body) + REQUEST_BYTES > self._body_bytes_max:
            return None
        return self._crew.limits_of(peer, part.pairs, part.pairs * self._common.times.pair_s)

    def _new_call(self, peer: PeerId, layer: int, hidden_size: int, part: Part, limits: CallLimits) -> RemoteCall:
        forward = self._forward
        is_sample = self._is_long or layer == forward.sampled or forward.looks
        return RemoteCall(peer, layer, part, hidden_size, self._encoding, limits, next(self._common.numbers), is_sample)

    def _twin_of(self, call: RemoteCall) -> RemoteCall | None:
        """The same call to another peer that can compute it; None when there is none."""
        others = [peer for peer, _ in self._replicas(call)]
        if not others:
            return None
        return self._same_call(call, self._draw.choice(others))

    def _same_call(self, call: RemoteCall, peer: PeerId) -> RemoteCall | None:
        """To another peer, which is available; None when it should not or cannot be made."""
        limits = self._limits_of(peer, call.part)
        if limits is None:
            return None
        return self._new_call(peer, call.layer, call.hidden_size, call.part, limits)

    def _replicas(self, call: RemoteCall) -> list[tuple[PeerId, float | None]]:
        experts = frozenset(call.request.pair_expert.tolist())
        return [
            (peer, expected_s)
            for peer, expected_s in self._crew.replicas(call.layer, experts)
            if peer != call.peer and self._is_available(peer)
        ]

    # Sending --------------------------------------------------------------------------------------------------

    def _send(self, calls: Sequence[RemoteCall]) -> None:
        """By express channels where they are free, all others together by the loop."""
        by_loop = [call for call in calls if not self._express(call)]
        if by_loop:
            self._crew.send(by_loop)

    def _express(self, call: RemoteCall) -> bool:
        channel = self._crew.channel(call.peer)
        if channel is None or not self._common.availability.take_channel(call.peer, call):
            return False
        call.channel = channel
        try:
            channel.send(call.number, call.frame(), call.limits.hedge_s)
        except KvasirError as error:
            call.deliver(error)
        return True

    # Answers --------------------------------------------------------------------------------------------------

    def _finish(self, call: RemoteCall, twin: RemoteCall | None, totals: torch.Tensor) -> None:
        """Adds a call's sums to those of the layer, whoever computed them."""
        began = time.monotonic()
        result = call.wait(call.hedge_at)
        if result is None:
            self._hedge(call, twin, totals, began)
            return
        self._common.availability.leave_channel(call.peer, call)
        self._take(call, result, twin, totals)

    def _hedge(self, call: RemoteCall, twin: RemoteCall | None, totals: torch.Tensor, began: float) -> None:
        """A call that is later than its like, and was waited for since `began`, is computed a second way."""
        left_s = call.due_at - time.monotonic()
        way = second_way(self._own_s(call), self._replicas(call), left_s) if left_s > 0 else Wait()
        if isinstance(way, Here):
            self._forward.patience_s -= time.monotonic() - began
            self._common.availability.owes(call)
            self._drop(twin)
            self._add_own(call, totals, is_hedge=True)
            return
        other = None if isinstance(way, Wait) else self._ask_other(call, way)
        winner = self._race(call, other)
        if winner is call and call.result is not None:
            self._common.availability.leave_channel(call.peer, call)
            self._drop(other)
            self._take(call, call.result, twin, totals)
            return
        self._forward.patience_s -= time.monotonic() - began
        self._drop(twin)
        if winner is not None and winner.result is not None:
            self._common.availability.owes(call)
            self._take(winner, winner.result, None, totals)
        else:
            self._drop(other)
            self._time_out(call)
            self._add_own(call, totals)

    def _own_s(self, call: RemoteCall) -> float | None:
        """About how long we take for a call; None when some of its experts are not in memory here."""
        held = self._own.held(call.layer)
        has_all = held.issuperset(call.request.pair_expert.tolist())
        return call.pairs * self._common.times.pair_s if has_all else None

    def _ask_other(self, call: RemoteCall, peer: PeerId) -> RemoteCall | None:
        other = self._same_call(call, peer)
        if other is not None:
            self._counted.hedges += 1
            self._crew.send([other])
        return other

    def _race(self, call: RemoteCall, other: RemoteCall | None) -> RemoteCall | None:
        """Which of two calls is answered first, before their deadlines; None when neither is."""
        if other is None:
            return call if call.wait(call.due_at) is not None else None
        until = max(call.due_at, other.due_at)
        while time.monotonic() < until:
            for each in (call, other):
                result = each.wait(min(until, time.monotonic() + RACE_LOOK_S / 2))
                if result is not None and not (isinstance(result, KvasirError) and each is other):
                    return each
        return None

    def _take(self, call: RemoteCall, result: Result, twin: RemoteCall | None, totals: torch.Tensor) -> None:
        """Adds the sums of an answer if they are right, else our own; tells the crew which."""
        if isinstance(result, KvasirError):
            self._crew.failed(call, result)
            self._fall_back(call, twin, totals)
            return
        if call.channel is not None:
            self._crew.took(call)
        try:
            if not self._checks.compares(call) and self._take_unread(call, result, totals):
                return
            sums = self._read(call, result)
        except Misbehaved as error:
            self._drop(twin)
            self._reject(call, error, totals)
            return
        twin_sums = None if twin is None else self._sums_of_twin(twin)
        verdict = self._checks.judge(call, sums, twin_sums)
        self._counted.spot_checks += verdict.compared
        if twin is not None and twin_sums is not None and verdict.compared:
            self._judge_twin(twin, twin_sums)
        if verdict.fault is not None:
            self._counted.mismatches += 1
            self._reject(call, verdict.fault, totals)
        elif verdict.sums is None:
            self._add_own(call, totals)
        elif self._join(verdict.sums, call, totals):
            self._forward.note(call, result)
            if twin is not None and twin_sums is not None and not verdict.compared:
                self._forward.note(twin, None)
        else:
            self._reject(call, Misbehaved(RejectReason.BAD_RESULT, "an answer holds NaN or infinity"), totals)

    def _take_unread(self, call: RemoteCall, result: memoryview, totals: torch.Tensor) -> bool:
        """Adds the sums of an answer of which nothing is compared, out of its frame. Whether it could: not what came as
        int8, nor what cannot be added up. Raises Misbehaved."""
        if call.encoding is Encoding.INT8 or result.readonly:
            return False
        values = answer_values(result, rows=call.part.rows, hidden_size=call.hidden_size, encoding=call.encoding)
        dtype = torch.bfloat16 if call.encoding is Encoding.BFLOAT16 else torch.float32
        if not self._splitter.join_values(values, dtype, call.part, totals, self._forward.remote_counts()):
            return False
        self._counted.remote += call.pairs
        self._forward.note(call, result)
        return True

    def _read(self, call: RemoteCall, answer: memoryview) -> torch.Tensor:
        """Whether its values are finite is seen when they are compared, or added up."""
        return read_answer(
            answer, rows=call.part.rows, hidden_size=call.hidden_size, dtype=call.encoding, looks_at_values=False
        )

    def _join(self, sums: torch.Tensor, call: RemoteCall, totals: torch.Tensor) -> bool:
        joined = self._splitter.join(sums, call.part, totals, self._forward.remote_counts())
        self._counted.remote += call.pairs if joined else 0
        return joined

    # What goes wrong --------------------------------------------------------------------------------------------

    def _reject(self, call: RemoteCall, error: Misbehaved, totals: torch.Tensor) -> None:
        """A wrong answer: our own sums are used, and it is blamed unless the model itself overflows there."""
        if bool(torch.isfinite(self._add_own(call, totals)).all()):
            self._checks.watch(call)
            self._crew.failed(call, error, wrong=True)

    def _fall_back(self, call: RemoteCall, twin: RemoteCall | None, totals: torch.Tensor) -> None:
        self._common.availability.pause(call.peer)
        self._drop(twin)
        self._add_own(call, totals)

    def _time_out(self, call: RemoteCall) -> None:
        call.abandoned = True
        self._common.availability.leave_channel(call.peer, call)
        self._common.availability.pause(call.peer)
        self._crew.failed(call, CallTimeout(f"no answer within {call.limits.deadline_s * 1000:.0f} ms"))

    def _add_own(self, call: RemoteCall, totals: torch.Tensor, *, is_hedge: bool = False) -> torch.Tensor:
        """Our own sums [R, D] for a call. Raises ExpertsMissing with the rows of the forward, not of the call."""
        try:
            sums = self._own.sums(call.request)
        except ExpertsMissing as missing:
            rows = call.part.used[list(missing.rows)].tolist()
            raise ExpertsMissing(missing.layer, missing.experts, rows) from missing
        totals.index_add_(0, call.part.used.to(totals.device), sums.to(totals.device))
        self._forward.count_own(call, is_hedge=is_hedge)
        self._counted.local += call.pairs
        if is_hedge:
            self._counted.hedges += 1
        else:
            self._counted.fallbacks += call.pairs
        return sums

    def _sums_of_twin(self, twin: RemoteCall) -> torch.Tensor | None:
        """What the second peer says; None when that is nothing, and the crew is told why."""
        result = twin.wait(twin.due_at)
        if result is None:
            self._time_out(twin)
            return None
        self._common.availability.leave_channel(twin.peer, twin)
        if isinstance(result, KvasirError):
            self._common.availability.pause(twin.peer)
            self._crew.failed(twin, result)
            return None
        if twin.channel is not None:
            self._crew.took(twin)
        try:
            return self._read(twin, result)
        except Misbehaved as error:
            self._crew.failed(twin, error, wrong=True)
            return None

    def _judge_twin(self, twin: RemoteCall, sums: torch.Tensor) -> None:
        """The two differed: our own result says whether this one was right."""
        if self._checks.is_right(twin, sums):
            self._forward.note(twin, None)
        else:
            self._checks.watch(twin)
            self._crew.failed(twin, wrong_result(), wrong=True)

    def _drop(self, call: RemoteCall | None) -> None:
        """Its answer is not needed any more; if it is under way it is passed over later."""
        if call is not None:
            if call.done.is_set or call.abandoned:
                self._common.availability.leave_channel(call.peer, call)
            else:
                self._common.availability.owes(call)

    def _is_available(self, peer: PeerId) -> bool:
        """Whether a peer may be sent anything now. A late answer that is there by now is taken note of."""
        availability = self._common.availability
        if availability.is_paused(peer):
            return False
        if not availability.is_late(peer):
            return True
        call = availability.settled(peer)
        if call is None:
            return False
        if call.result is None:
            self._time_out(call)
            return False
        self._counted.late += 1
        if isinstance(call.result, KvasirError):
            self._crew.failed(call, call.result)
        elif call.channel is not None:
            self._crew.took(call)
        return True


def _splitter_for(encoding: Encoding) -> PairSplitter:
    """int8 rows are kept as they were until they are sent."""
    return PairSplitter(torch.bfloat16 if encoding is Encoding.BFLOAT16 else torch.float32)
