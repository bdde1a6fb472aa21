"""Trials: how a worker that only claims a slice gets to prove it, on real rows, with nothing depending on it.

It does not know who is proven what for or what a fault costs (decide/ledger), nor how workers come and go
(roles/crew.py). `plan` runs on the trio loop; `offer` on the computing thread; a trial itself on the loop again.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch
import trio

from kvasir_node.base.errors import KvasirError, Misbehaved, UsageError
from kvasir_node.base.ids import PeerId, SliceId
from kvasir_node.base.settings import FanoutSettings
from kvasir_node.decide.ledger import Ledger
from kvasir_node.net.rpc import CallStream
from kvasir_node.roles.comparing import agrees, pick_pairs, wrong_result
from kvasir_node.roles.measured import CallMeasured
from kvasir_node.wire.messages import ExpertsMethod
from kvasir_node.wire.tensors import (
    Encoding,
    ExpertRequest,
    computed_s_of,
    read_answer,
    request_parts,
    through_wire,
)

logger = logging.getLogger(__name__)

OwnSums = Callable[[ExpertRequest], torch.Tensor]
"""Computes a request here, [R,D] float32; blocks."""
RunBlocking = Callable[..., Awaitable[Any]]
"""Runs a blocking call: in a thread, or (under a virtual clock) inline."""


class TrialScope(Enum):
    """Which experts' rows may leave this machine in a trial."""

    NONE = "none"
    MISSING = "missing"  # calm: only those that are not held here, whose rows leave anyway
    ALL = "all"


@dataclass(slots=True, eq=False)
class Member:
    """One attached worker."""

    peer: PeerId
    calls: CallStream
    scope: trio.CancelScope  # of its call stream
    slices: set[SliceId] = field(default_factory=set[SliceId])
    on_trial: bool = False  # one trial at a time, so that a silent worker costs one deadline and not one per slice


@dataclass(frozen=True, slots=True)
class _Trial:
    """A trial that waits for rows of its layer; `experts` [E] bool: which of the slice's may be asked for."""

    member: Member
    slice: SliceId
    experts: torch.Tensor


@dataclass(frozen=True, slots=True)
class TrialResult:
    """After `took_s`; `error` None = right; `wrong` = it was answered, but not with the truth.

    Not `is_checked` = it was answered, but we could not say whether rightly, which is no fault of the worker's.
    """

    member: Member
    slice: SliceId
    pairs: int
    took_s: float
    error: KvasirError | None
    wrong: bool = False
    is_checked: bool = True
    measured: CallMeasured | None = None


class _Unchecked(Exception):
    """We cannot say whether an answer was right."""


class Trials:
    """See the module. `held` by layer = experts that are held here; `ended` hears each result, on the loop."""

    def __init__(
        self,
        settings: FanoutSettings,
        ledger: Ledger,
        held: Mapping[int, frozenset[int]],
        *,
        members: Callable[[], Collection[Member]],
        own_sums: OwnSums,
        address_of: Callable[[PeerId], str],
        layers_changed: Callable[[frozenset[int]], None],
        begun: Callable[[Member, SliceId], None],
        ended: Callable[[TrialResult], None],
        run_blocking: RunBlocking,
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._held = held
        self._members = members
        self._own_sums = own_sums
        self._address_of = address_of
        self._layers_changed = layers_changed
        self._begun = begun
        self._ended = ended
        self._run_blocking = run_blocking
        self._encoding: Encoding | None = None  # of rows that leave; None = in the dtype they are computed in
        self._scope = TrialScope.NONE
        self._masks: dict[tuple[SliceId, TrialScope], torch.Tensor] = {}  # one per slice of the model and scope
        # By layer, one for each slice that wants one; replaced as a whole by the loop, read by the computing thread.
        self._waiting: Mapping[int, tuple[_Trial, ...]] = {}
        self.pairs = 0

    @property
    def scope(self) -> TrialScope:
        return self._scope

    def set_encoding(self, encoding: Encoding) -> None:
        """What rows travel in from now on."""
        self._encoding = encoding

    def set_scope(self, scope: TrialScope) -> None:
        """What may be tried from now on. A smaller scope holds at once, also for rows that were offered before."""
        self._scope = scope
        self.plan()

    def held_changed(self) -> None:
        """Other experts are held here now."""
        self._masks.clear()
        self.plan()

    def plan(self) -> None:
        """Chooses whose trial each layer's next rows may be for."""
        waiting: dict[int, dict[SliceId, _Trial]] = {}
        if self._scope is not TrialScope.NONE:
            now = trio.current_time()
            for member in self._members():
                if not member.on_trial:
                    self._plan_for(member, waiting, now)
        self._waiting = {layer: tuple(trials.values()) for layer, trials in waiting.items()}
        self._layers_changed(frozenset(waiting))

    def _plan_for(self, member: Member, waiting: dict[int, dict[SliceId, _Trial]], now: float) -> None:
        address = self._address_of(member.peer)
        for part in sorted(member.slices):
            trials = waiting.setdefault(part.layer, {})
            if part not in trials and self._ledger.may_try(member.peer, part, address, now):
                experts = self._allowed(part)
                if bool(experts.any()):
                    trials[part] = _Trial(member, part, experts)
            if not trials:
                del waiting[part.layer]

    def _allowed(self, part: SliceId) -> torch.Tensor:
        """[E'] bool for the experts up to the slice's last one: those of it that may be asked for now."""
        mask = self._masks.get((part, self._scope))
        if mask is None:
            own = self._held.get(part.layer, frozenset()) if self._scope is TrialScope.MISSING else frozenset()
            mask = torch.tensor([part.first <= index and index not in own for index in range(part.last + 1)])
            self._masks[part, self._scope] = mask
        return mask

    def offer(
        self, layer: int, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> tuple[_Trial, ExpertRequest] | None:
        """The trial that these rows serve, and its request; None when they serve none. For the computing thread.

        The same trial may be offered twice before `begin` has seen the first; `begin` takes one of them.
        """
        for trial in self._waiting.get(layer, ()):
            request = trial_request(layer, trial.experts, rows, chosen, weights, rows_max=self._settings.trial_rows_max)
            if request is not None:
                return trial, request
        return None

    def begin(self, offered: tuple[_Trial, ExpertRequest], nursery: trio.Nursery) -> None:
        """Starts an offered trial if it is still wanted and allowed."""
        trial, request = offered
        member, part = trial.member, trial.slice
        address, now = self._address_of(member.peer), trio.current_time()
        ready = member in self._members() and part in member.slices and not member.on_trial
        if ready and self._may_leave(part, request) and self._ledger.may_try(member.peer, part, address, now):
            self._ledger.begin_trial(member.peer, part, address, now)
            member.on_trial = True
            self.pairs += request.pair_row.shape[0]
            self._begun(member, part)
            nursery.start_soon(self._run, member, part, request)
        self.plan()

    def _may_leave(self, part: SliceId, request: ExpertRequest) -> bool:
        """The scope may have become smaller since the rows were offered."""
        return self._scope is not TrialScope.NONE and bool(self._allowed(part)[request.pair_expert.long()].all())

    async def _run(self, member: Member, part: SliceId, request: ExpertRequest) -> None:
        """One bounded call on real rows, compared with our own result. No token waits for it."""
        started = trio.current_time()
        pairs = request.pair_row.shape[0]
        encoding = self._encoding or Encoding.of(request.rows.dtype)
        request = replace(request, rows=through_wire(request.rows, encoding), encoding=encoding)
        parts = request_parts(request, encoding)
        try:
            body = await member.calls.call(
                int(ExpertsMethod.COMPUTE), *parts, timeout_s=self._settings.deadline_ceiling_s
            )
            took_s = trio.current_time() - started
            fault = await self._wrong_with(body, request)
            measured = None if fault is not None else _measured(member, request, parts, body, took_s)
            result = TrialResult(member, part, pairs, took_s, fault, wrong=True, measured=measured)
        except KvasirError as error:
            result = TrialResult(member, part, pairs, trio.current_time() - started, error)
        except _Unchecked as unchecked:
            result = TrialResult(member, part, pairs, 0.0, UsageError(str(unchecked)), is_checked=False)
        finally:
            member.on_trial = False
        self._ended(result)

    async def _wrong_with(self, body: memoryview, request: ExpertRequest) -> Misbehaved | None:
        """What is wrong with an answer. Raises _Unchecked when that cannot be said."""
        try:
            own = await self._run_blocking(self._own_sums, request)
        except KvasirError as error:
            raise _Unchecked(f"a trial could not be checked, because it cannot be computed here: {error}") from error
        if not bool(torch.isfinite(own).all()):
            raise _Unchecked("a trial could not be checked: the model gives values that are not finite on its rows")
        rows, hidden_size = request.rows.shape
        try:
            assert request.encoding is not None, "it was sent"
            sums = read_answer(body, rows=rows, hidden_size=hidden_size, dtype=request.encoding)
            if not agrees(sums.to(torch.float32), own, request.encoding):
                raise wrong_result()
        except Misbehaved as error:
            return error
        return None


def _measured(
    member: Member, request: ExpertRequest, parts: Sequence[bytes | memoryview], answer: memoryview, took_s: float
) -> CallMeasured:
    return CallMeasured(
        peer=member.peer,
        activated=int(request.pair_expert.unique().shape[0]),
        pairs=request.pair_row.shape[0],
        sent_bytes=sum(map(len, parts)),
        received_bytes=len(answer),
        took_s=took_s,
        computed_s=computed_s_of(answer) or None,
    )


def trial_request(
    layer: int,
    experts: torch.Tensor,
    rows: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    *,
    rows_max: int,
) -> ExpertRequest | None:
    """A trial from real rows: the first `rows_max` rows that use one of the experts, or None when none does.

    Shapes: experts [E'] bool (those beyond it are not meant), rows [T,D], chosen [T,K], weights [T,K]. The request's
    tensors are copies on the CPU.
    """
    index = chosen.cpu()
    mask = experts[index.clamp_max(experts.shape[0] - 1)] & (index < experts.shape[0])
    used = mask.any(1).nonzero().reshape(-1)[:rows_max]
    if used.shape[0] == 0:
        return None
    there = used.to(rows.device)
    request, _ = pick_pairs(layer, rows[there].cpu(), index[used], weights[there].cpu(), mask[used])
    return request
