"""A worker's link to one coordinator: attach, answer its calls, detach.

One long-lived call stream, opened by the worker, over which the coordinator calls. It does not know leases' times or
how weights came here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import trio

from kvasir_node.base.errors import KvasirError, Misbehaved, Overloaded, RejectReason
from kvasir_node.base.ids import ModelId, PeerId
from kvasir_node.decide.placement import Assignment, StandingTold
from kvasir_node.model.experts import ExpertShard
from kvasir_node.net.rpc import CallStream
from kvasir_node.net.transport import Transport
from kvasir_node.wire.messages import EXPERTS_PROTOCOL, Attachment, ExpertsMethod, Standing
from kvasir_node.wire.tensors import ExpertRequest, answer_parts, read_request

logger = logging.getLogger(__name__)

ATTACH_TIMEOUT_S = 5.0
Compute = Callable[[ExpertShard, ExpertRequest], torch.Tensor]
"""Partial sums [R,D] of a request; runs in a thread."""


def compute_here(shard: ExpertShard, request: ExpertRequest) -> torch.Tensor:
    """The honest Compute."""
    pairs = (request.pair_row.long(), request.pair_expert.long(), request.pair_weight)
    rows = request.rows.to(shard.device)
    return shard.compute(request.layer, rows, *pairs).to("cpu", request.rows.dtype)


class Link:
    """See the module. `computed(rows)` is called after each answered call."""

    def __init__(
        self,
        coordinator: PeerId,
        model: ModelId,
        shard: ExpertShard,
        *,
        body_bytes_max: int,
        in_flight_max: int,
        compute: Compute,
        limiter: trio.CapacityLimiter,
        computed: Callable[[int], None],
        standing_told: Callable[[StandingTold], None],
    ) -> None:
        self.coordinator = coordinator
        self.model = model
        self._shard = shard
        self._body_bytes_max = body_bytes_max
        self._in_flight_max = in_flight_max
        self._compute = compute
        self._limiter = limiter
        self._computed = computed
        self._standing_told = standing_told
        self._assignments: dict[str, Assignment] = {}
        self._in_flight = 0
        self._idle = trio.Event()
        self._scope = trio.move_on_after(math.inf)
        self._calls: CallStream | None = None

    def leases(self) -> tuple[str, ...]:
        return tuple(self._assignments)

    async def run(
        self,
        transport: Transport,
        ended: Callable[[Link], None],
        *,
        task_status: Any = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serves until the stream ends or `close`. Raises Unreachable when the stream cannot be opened."""
        stream = await transport.open_stream(self.coordinator, EXPERTS_PROTOCOL)
        self._calls = CallStream(
            stream,
            handler=self._handle,
            in_flight_max=self._in_flight_max,
            body_bytes_max=self._body_bytes_max,
            on_notice=self._on_notice,
        )
        try:
            task_status.started()
            with self._scope:
                await self._calls.run()
        finally:
            ended(self)
            with trio.CancelScope(shield=True):  # pyright: ignore[reportCallIssue]  (libp2p brings outdated trio stubs)
                await stream.reset()

    def close(self) -> None:
        self._scope.cancel()

    async def attach(self, assignment: Assignment) -> None:
        """Offers a loaded slice. Raises PeerError."""
        body = Attachment(self.model, (assignment.slice,)).to_bytes()
        self._assignments[assignment.lease] = assignment
        try:
            await self._call(ExpertsMethod.ATTACH, body)
        except KvasirError:
            self._assignments.pop(assignment.lease, None)
            raise

    async def detach(self, assignment: Assignment) -> bool:
        """Tells the coordinator to send nothing more for a slice; False when it was not attached or is gone."""
        if self._assignments.pop(assignment.lease, None) is None:
            return False
        try:
            await self._call(ExpertsMethod.DETACH, Attachment(self.model, (assignment.slice,)).to_bytes())
        except KvasirError as error:
            logger.info("coordinator %s was not told that %s is left: %s", self.coordinator, assignment.slice, error)
            return False
        return True

    async def finish_calls(self) -> None:
        """Returns when no call is being answered."""
        if self._in_flight:
            await self._idle.wait()

    async def _call(self, method: ExpertsMethod, body: bytes) -> None:
        assert self._calls is not None
        await self._calls.call(int(method), body, timeout_s=ATTACH_TIMEOUT_S)

    async def _handle(self, method: int, body: memoryview) -> Sequence[bytes | memoryview]:
        if method == ExpertsMethod.COMPUTE:
            return await self._answer(body)
        raise Misbehaved(RejectReason.UNKNOWN_METHOD, f"a coordinator may not call method {method} here")

    async def _answer(self, body: memoryview) -> Sequence[bytes | memoryview]:
        request = read_request(body, hidden_size=self._shard.hidden_size)
        if not set(request.pair_expert.tolist()) <= self._shard.held(request.layer):
            raise Overloaded(f"some experts of layer {request.layer} are not held here (any more)")
        if self._in_flight == 0:
            self._idle = trio.Event()
        self._in_flight += 1
        try:
            sums = await trio.to_thread.run_sync(self._compute, self._shard, request, limiter=self._limiter)
        finally:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._idle.set()
        self._computed(request.rows.shape[0])
        return answer_parts(sums)

    def _on_notice(self, method: int, body: memoryview) -> None:
        if method != ExpertsMethod.STANDING:
            raise Misbehaved(RejectReason.UNKNOWN_METHOD, f"notice {method} is not one of a coordinator's")
        told = Standing.from_bytes(body)
        for lease, assignment in self._assignments.items():
            if assignment.slice == told.slice:
                self._standing_told(StandingTold(lease, proven=told.state == "proven"))
