"""A coordinator's workers: who is attached, who is proven, what each is sent, and how trials go.

It does not know requests for text, slots or the market. It lives on the trio loop; the computing thread reaches it
through `send`, `report` and `offer_trial`, which only leave a note for the loop. All judgement is `decide/ledger` and
`decide/fanout`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import trio

from kvasir_node.base.errors import (
    CallTimeout,
    KvasirError,
    Misbehaved,
    Overloaded,
    RejectReason,
    Unreachable,
    UsageError,
)
from kvasir_node.base.ids import ModelId, PeerId, SliceId
from kvasir_node.base.settings import FanoutSettings
from kvasir_node.base.snapshot import WorkerPeerSnapshot
from kvasir_node.decide.fanout import CallTimes, DeadlineLimits
from kvasir_node.decide.ledger import BEST_FIRST, Ledger, LedgerLimits, Standing
from kvasir_node.net.rpc import CallStream
from kvasir_node.net.transport import Stream
from kvasir_node.roles.dispatch import RemoteCall, agrees, pick_pairs, wrong_result
from kvasir_node.wire import messages
from kvasir_node.wire.messages import Attachment, ExpertsMethod
from kvasir_node.wire.tensors import ExpertRequest, read_answer, request_parts

logger = logging.getLogger(__name__)

OwnSums = Callable[[ExpertRequest], torch.Tensor]
"""Computes a request here; runs in a thread."""


@dataclass(slots=True, eq=False)
class _Member:
    """One attached worker."""

    peer: PeerId
    calls: CallStream
    slices: set[SliceId] = field(default_factory=set[SliceId])
    on_trial: bool = False  # one trial at a time, so that a silent worker costs one deadline and not one per slice


@dataclass(slots=True)
class _Counts:
    calls: int = 0
    rows: int = 0
    failures: int = 0
    reason: str = ""


@dataclass(slots=True)
class _Trial:
    """A trial that waits for rows of its layer."""

    member: _Member
    slice: SliceId


class Crew:
    """See the module. `changed` is called on the loop whenever who is proven may have changed."""

    COUNTS_MAX = 4096  # peers whose call counts are remembered

    def __init__(
        self,
        settings: FanoutSettings,
        model: ModelId,
        slices: frozenset[SliceId],
        *,
        own_sums: OwnSums,
        changed: Callable[[], None],
        trial_layers_changed: Callable[[frozenset[int]], None],
        name_of: Callable[[PeerId], str],
        address_of: Callable[[PeerId], str],
        body_bytes_max: int,
    ) -> None:
        self._settings = settings
        self._model = model
        self._slices = slices
        self._own_sums = own_sums
        self._changed = changed
        self._trial_layers_changed = trial_layers_changed
        self._name_of = name_of
        self._address_of = address_of
        self._body_bytes_max = body_bytes_max
        self.ledger = Ledger(
            LedgerLimits(
                cool_off_s=settings.cool_off_s,
                cool_off_max_s=settings.cool_off_max_s,
                ban_after=settings.ban_after,
                proof_ttl_s=settings.proof_ttl_s,
                trials_per_address_max=settings.trials_per_address_max,
                trial_window_s=settings.trial_window_s,
            )
        )
        limits = DeadlineLimits(settings.deadline_factor, settings.deadline_floor_s, settings.deadline_ceiling_s)
        self._times = CallTimes(limits)
        self._times_lock = threading.Lock()
        self._members: dict[PeerId, _Member] = {}
        self._counts: dict[PeerId, _Counts] = {}
        self._trials: dict[int, _Trial] = {}  # by layer; read by the computing thread
        self._token: trio.lowlevel.TrioToken | None = None
        self._nursery: trio.Nursery | None = None
        self._trials_allowed = False
        self.trial_pairs = 0

    async def run(self, *, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        """Carries trials out until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._token = trio.lowlevel.current_trio_token()
            task_status.started()
            await trio.sleep_forever()

    # The computing thread's side ------------------------------------------------------------------------------

    def deadline_s(self, peer: PeerId, pairs: int) -> float:
        """How long a call may take; any thread."""
        with self._times_lock:
            return self._times.deadline_s(peer, pairs)

    def send(self, calls: Sequence[RemoteCall]) -> None:
        self._later(lambda: self._send(calls))

    def report(self, call: RemoteCall, error: KvasirError | None, *, wrong: bool = False) -> None:
        self._later(lambda: self._report(call, error, wrong=wrong))

    def offer_trial(self, layer: int, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> None:
        trial = self._trials.pop(layer, None)
        if trial is None:
            return
        request = trial_request(trial.slice, rows, chosen, weights, self._settings.trial_rows_max)
        self._later(lambda: self._begin_trial(trial, request))

    def _later(self, act: Callable[[], None]) -> None:
        if self._token is not None:
            try:
                self._token.run_sync_soon(act)
            except trio.RunFinishedError:
                logger.debug("the node has ended; a note to the crew is dropped")

    # The trio loop's side -------------------------------------------------------------------------------------

    def _send(self, calls: Sequence[RemoteCall]) -> None:
        for call in calls:
            member = self._members.get(call.peer)
            if call.abandoned:
                continue
            if member is None:
                self._deliver(call, 0.0, Unreachable(f"worker {call.peer} is not attached any more"))
                continue
            started = trio.current_time()

            def deliver(result: memoryview | KvasirError, call: RemoteCall = call, started: float = started) -> None:
                self._deliver(call, trio.current_time() - started, result)

            try:
                member.calls.submit(int(ExpertsMethod.COMPUTE), call.parts, deliver)
            except KvasirError as error:
                self._deliver(call, 0.0, error)

    def _deliver(self, call: RemoteCall, took_s: float, result: memoryview | KvasirError) -> None:
        if isinstance(result, KvasirError):
            call.error = result
        else:
            call.answer, call.took_s = result, took_s
            # A late answer is measured too: that is how the deadline grows for a worker that is merely slower now.
            with self._times_lock:
                self._times.observe(call.peer, call.pairs, took_s)
        call.done.set()

    def _report(self, call: RemoteCall, error: KvasirError | None, *, wrong: bool) -> None:
        counts = self._count(call.peer)
        counts.calls += 1
        parts = self._parts_of(call)
        if call.abandoned:
            error = CallTimeout(f"no answer within {call.deadline_s * 1000:.0f} ms")
        if error is not None:
            self._judge(call.peer, parts, error, wrong=wrong)
            return
        counts.rows += call.request.rows.shape[0]
        for part in parts:
            self.ledger.right(call.peer, part, trio.current_time())

    def _judge(self, peer: PeerId, parts: Sequence[SliceId], error: KvasirError, *, wrong: bool) -> None:
        """Demerits a peer for its own faults only: one that is full, or refuses what we sent, is not to blame."""
        if isinstance(error, (Overloaded, UsageError)) or (isinstance(error, Misbehaved) and not wrong):
            logger.warning("worker %s refused a call: %s", self._name_of(peer), error)
            return
        counts = self._count(peer)
        counts.failures += 1
        counts.reason = str(error)[:200]
        if isinstance(error, (CallTimeout, Unreachable)):
            parts = sorted(self._slices_of(peer))  # silence is the peer's, not one slice's
        for part in parts:
            self.ledger.failed(peer, part, trio.current_time(), counts.reason, wrong=wrong)
            self._tell_standing(peer, part)
        logger.warning("worker %s failed (%s): %s", self._name_of(peer), type(error).__name__, counts.reason)
        self._changed()
        self.plan_trials(allowed=self._trials_allowed)

    def _parts_of(self, call: RemoteCall) -> tuple[SliceId, ...]:
        """The peer's slices that a call's pairs fall into."""
        experts = set(call.request.pair_expert.tolist())
        return tuple(
            part
            for part in self._slices_of(call.peer)
            if part.layer == call.request.layer and any(part.first <= e <= part.last for e in experts)
        )

    def _slices_of(self, peer: PeerId) -> set[SliceId]:
        member = self._members.get(peer)
        if member is not None:
            return member.slices
        return {view.slice for view in self.ledger.pairs() if view.peer == peer}

    def _count(self, peer: PeerId) -> _Counts:
        counts = self._counts.setdefault(peer, _Counts())
        while len(self._counts) > self.COUNTS_MAX:
            del self._counts[next(p for p in self._counts if p != peer)]
        return counts

    # Trials ---------------------------------------------------------------------------------------------------

    def plan_trials(self, *, allowed: bool) -> None:
        """Chooses whose trial each layer's next rows are for; none while `allowed` is false (idle is local)."""
        self._trials_allowed = allowed
        trials: dict[int, _Trial] = {}
        now = trio.current_time()
        for member in [m for m in self._members.values() if allowed and not m.on_trial]:
            for part in sorted(member.slices):
                address = self._address_of(member.peer)
                if part.layer not in trials and self.ledger.may_try(member.peer, part, address, now):
                    trials[part.layer] = _Trial(member, part)
        self._trials = trials
        self._trial_layers_changed(frozenset(trials))

    def _begin_trial(self, trial: _Trial, request: ExpertRequest | None) -> None:
        member, part = trial.member, trial.slice
        address, now = self._address_of(member.peer), trio.current_time()
        ready = self._members.get(member.peer) is member and part in member.slices and not member.on_trial
        if request is not None and ready and self.ledger.may_try(member.peer, part, address, now):
            self.ledger.begin_trial(member.peer, part, address, now)
            member.on_trial = True
            self._tell_standing(member.peer, part)
            assert self._nursery is not None
            self._nursery.start_soon(self._run_trial, member, part, request)
        self.plan_trials(allowed=self._trials_allowed)

    async def _run_trial(self, member: _Member, part: SliceId, request: ExpertRequest) -> None:
        """One bounded call on real rows, compared with our own result. No token waits for it."""
        self.trial_pairs += request.pair_row.shape[0]
        started = trio.current_time()
        peer, wrong = member.peer, False
        try:
            body = await member.calls.call(
                int(ExpertsMethod.COMPUTE), *request_parts(request), timeout_s=self._settings.deadline_ceiling_s
            )
            took_s = trio.current_time() - started
            wrong = True  # from here on a failure is in what it answered
            rows, hidden_size = request.rows.shape
            sums = read_answer(body, rows=rows, hidden_size=hidden_size, dtype=request.rows.dtype)
            own = await trio.to_thread.run_sync(self._own_sums, request)
            if not agrees(sums.to(torch.float32), own, request.rows.dtype):
                raise wrong_result()
        except KvasirError as error:
            member.on_trial = False
            self.ledger.give_up_trial(peer, part)
            self._judge(peer, (part,), error, wrong=wrong)
            return
        member.on_trial = False
        with self._times_lock:
            self._times.observe(member.peer, request.pair_row.shape[0], took_s)
        self.ledger.right(member.peer, part, trio.current_time())
        logger.info("worker %s is proven for slice %s", self._name_of(member.peer), part)
        self._tell_standing(member.peer, part)
        self._changed()
        self.plan_trials(allowed=self._trials_allowed)

    def _tell_standing(self, peer: PeerId, part: SliceId) -> None:
        member = self._members.get(peer)
        if member is not None and self._nursery is not None:
            told = messages.Standing(part, str(self.ledger.standing(peer, part))).to_bytes()
            self._nursery.start_soon(self._notify, member, told)

    @staticmethod
    async def _notify(member: _Member, told: bytes) -> None:
        try:
            await member.calls.notify(int(ExpertsMethod.STANDING), told)
        except KvasirError as error:
            logger.debug("worker %s could not be told its standing: %s", member.peer, error)

    # Workers come and go --------------------------------------------------------------------------------------

    async def serve(self, stream: Stream) -> None:
        """One worker's call stream, from its ATTACH to its end."""
        member: _Member | None = None

        async def handle(method: int, body: memoryview) -> Sequence[bytes | memoryview]:
            assert member is not None
            if method == ExpertsMethod.ATTACH:
                self._attach(member, Attachment.from_bytes(body))
            elif method == ExpertsMethod.DETACH:
                await self._detach(member, Attachment.from_bytes(body))
            else:
                raise Misbehaved(RejectReason.UNKNOWN_METHOD, f"a worker may not call method {method} here")
            return ()

        calls = CallStream(
            stream, handler=handle, in_flight_max=self._settings.in_flight_max, body_bytes_max=self._body_bytes_max
        )
        member = _Member(stream.peer, calls)
        previous = self._members.get(member.peer)
        if previous is not None:  # the worker came back before we noticed that it was gone
            self._lose(previous, "the worker connected again")
        self._members[member.peer] = member
        try:
            await calls.run()
        finally:
            if self._members.get(member.peer) is member:
                self._lose(member, "the connection ended")

    def _attach(self, member: _Member, attachment: Attachment) -> None:
        unknown = [str(part) for part in attachment.slices if part not in self._slices]
        if attachment.model != self._model or unknown:
            shown = ", ".join(unknown[:3]) or str(attachment.model)
            raise Misbehaved(RejectReason.BAD_MESSAGE, f"this coordinator does not serve {shown}")
        for part in attachment.slices:
            member.slices.add(part)
            self.ledger.attach(member.peer, part)
            self._tell_standing(member.peer, part)
        logger.info("worker %s attached with %s", self._name_of(member.peer), ", ".join(map(str, attachment.slices)))
        self._changed()
        self.plan_trials(allowed=self._trials_allowed)

    async def _detach(self, member: _Member, attachment: Attachment) -> None:
        """An orderly leave: routes change first, then the worker may finish what is in flight."""
        for part in attachment.slices:
            member.slices.discard(part)
            self.ledger.detach(member.peer, part)
        self._changed()
        self.plan_trials(allowed=self._trials_allowed)

    def _lose(self, member: _Member, reason: str) -> None:
        """A stream ended. Slices that were not detached first left without a word, which is a fault."""
        del self._members[member.peer]
        left = sorted(member.slices)
        for part in left:
            if self.ledger.standing(member.peer, part) is Standing.PROVEN:
                self._count(member.peer).reason = f"left without draining: {reason}"
                self.ledger.failed(member.peer, part, trio.current_time(), reason, wrong=False)
            self.ledger.detach(member.peer, part)
        with self._times_lock:
            self._times.forget(member.peer)
        if left:
            logger.warning("worker %s left without draining: %s", self._name_of(member.peer), reason)
        self._changed()
        self.plan_trials(allowed=self._trials_allowed)

    def snapshot(self) -> tuple[WorkerPeerSnapshot, ...]:
        """Every worker that is attached or has a history, best standing first."""
        by_peer: dict[PeerId, list[tuple[SliceId, Standing]]] = {}
        for view in self.ledger.pairs():
            by_peer.setdefault(view.peer, []).append((view.slice, view.standing))
        found = []
        for peer, parts in by_peer.items():
            member, counts = self._members.get(peer), self._counts.get(peer, _Counts())
            best = min((standing for _, standing in parts), key=BEST_FIRST.index)
            with self._times_lock:
                expected_s = self._times.expected_s(peer)
            found.append(
                WorkerPeerSnapshot(
                    peer_id=peer,
                    name=self._name_of(peer),
                    slices=tuple(str(part) for part in sorted(member.slices)) if member is not None else (),
                    state=str(best),
                    path="direct",
                    rtt_ms=None if expected_s is None else round(expected_s * 1000, 2),
                    calls=counts.calls,
                    rows=counts.rows,
                    failures=counts.failures,
                    reason=counts.reason,
                )
            )
        return tuple(sorted(found, key=lambda w: (BEST_FIRST.index(Standing(w.state)), w.name)))


def trial_request(
    part: SliceId, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, rows_max: int
) -> ExpertRequest | None:
    """A trial from real rows: the first `rows_max` rows that use the slice, or None when none does.

    Shapes: rows [T,D], chosen [T,K], weights [T,K]. The tensors are copies.
    """
    mask = (chosen >= part.first) & (chosen <= part.last)
    used = mask.any(1).nonzero().reshape(-1)[:rows_max]
    if used.shape[0] == 0:
        return None
    request, _ = pick_pairs(part.layer, rows[used].clone(), chosen[used], weights[used], mask[used])
    return request
