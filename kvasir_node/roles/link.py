"""A worker's link to one coordinator: attach, answer its calls, detach.

One long-lived call stream, opened by the worker, over which the coordinator calls; and, where the coordinator offers
it, an express channel for the same calls, which a thread answers (express_calls.py). A link that goes through a relay
ends, in order, once there is a direct way, and whoever opened it opens another. It does not know leases' times or how
weights came here. Whatever the coordinator sends ends at most this link, never the worker; a channel that ends is
asked for again after a while, and meanwhile the calls come over the stream.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence

import torch
import trio

from kvasir_node.base.errors import (
    CallTimeout,
    CapacityError,
    KvasirError,
    Misbehaved,
    Overloaded,
    RejectReason,
    Unreachable,
)
from kvasir_node.base.ids import ModelId, PeerId
from kvasir_node.decide.placement import Assignment, StandingTold
from kvasir_node.model.experts import ExpertShard
from kvasir_node.model.worker_frames import WholeAnswers, WorkerFrames
from kvasir_node.net.rpc import CallStream
from kvasir_node.net.transport import Transport
from kvasir_node.roles.download import RunBlocking
from kvasir_node.roles.express_calls import Answer, ExpressCalls
from kvasir_node.wire.messages import EXPERTS_PROTOCOL, Attachment, ExpertsMethod, Standing
from kvasir_node.wire.tensors import ExpertRequest

logger = logging.getLogger(__name__)

ATTACH_TIMEOUT_S = 5.0
EXPRESS_RETRY_S = 30.0  # after an express channel ended, or could not be reached
PATH_LOOK_S = 0.5  # how often a link through a relay looks for a direct way
MOVE_GRACE_S = 1.0  # the last answers leave within this
DIRECT, RELAYED = "direct", "relay"  # paths of a connection, see net/transport
Compute = Callable[[ExpertShard, ExpertRequest], torch.Tensor]
"""Partial sums [R,D] of a request; runs in a thread."""


def compute_here(shard: ExpertShard, request: ExpertRequest) -> torch.Tensor:
    """The honest Compute."""
    pairs = (request.pair_row.long(), request.pair_expert.long(), request.pair_weight)
    on_device = [tensor.to(shard.device) for tensor in (request.rows, *pairs)]
    return shard.compute(request.layer, *on_device).to("cpu", request.rows.dtype)


class Link:
    """See the module. `open`, then `run` in a task. `computed(rows)` is called after each answered call."""

    def __init__(
        self,
        coordinator: PeerId,
        model: ModelId,
        dtype: str,
        shard: ExpertShard,
        *,
        body_bytes_max: int,
        in_flight_max: int,
        compute: Compute,
        run_blocking: RunBlocking,
        computed: Callable[[int], None],
        standing_told: Callable[[StandingTold], None],
        answer_delay_s: float = 0.0,
        express: bool = False,
    ) -> None:
        """`express`: the coordinator is asked for an express channel once a slice is attached."""
        self.coordinator = coordinator
        self.model = model
        self.dtype = dtype
        self._shard = shard
        self._frames = WorkerFrames(shard.hidden_size, by_kernel=shard.has_kernel)
        self._body_bytes_max = body_bytes_max
        self._in_flight_max = in_flight_max
        self._compute = compute
        self._run_blocking = run_blocking
        self._computed = computed
        self._standing_told = standing_told
        self._answer_delay_s = answer_delay_s
        self._assignments: dict[str, Assignment] = {}
        self._in_flight = 0
        self._idle = trio.Event()
        self._scope = trio.move_on_after(math.inf)
        self._calls: CallStream | None = None
        self._transport: Transport | None = None
        self._attached = trio.Event()
        self._asks_express = express
        self._express: ExpressCalls | None = None

    def leases(self) -> tuple[str, ...]:
        """Those whose slice the coordinator has been offered, or may have been."""
        return tuple(self._assignments)

    async def open(self, transport: Transport) -> None:
        """Raises Unreachable. Cancel-safety: nothing is left open."""
        stream = await transport.open_stream(self.coordinator, EXPERTS_PROTOCOL)
        self._transport = transport
        self._calls = CallStream(
            stream,
            handler=self._handle,
            in_flight_max=self._in_flight_max,
            body_bytes_max=self._body_bytes_max,
            on_notice=self._on_notice,
        )

    async def run(self, ended: Callable[[Link], None]) -> None:
        """Serves until the stream ends or `close`; then calls `ended`, once. Raises nothing."""
        calls = self._opened()
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    if self._path() == RELAYED:
                        nursery.start_soon(self._leave_relay)
                    if self._asks_express:
                        nursery.start_soon(self._keep_express)
                    try:
                        await self._run_calls(calls)
                    finally:
                        ended(self)
                        nursery.cancel_scope.cancel()
        finally:
            await calls.stream.reset()

    async def _run_calls(self, calls: CallStream) -> None:
        try:
            await calls.run()
        except KvasirError as error:
            logger.warning("the link to coordinator %s ended: %s", self.coordinator, error)
        except Exception:  # the one door of a link: a bug here must not end the worker, or its other links
            logger.exception("the link to coordinator %s ended by a bug of ours", self.coordinator)

    def close(self) -> None:
        self._scope.cancel()

    def _path(self) -> str:
        assert self._transport is not None, "a link is opened before it is run"
        return next((each.path for each in self._transport.connections() if each.peer == self.coordinator), "")

    async def _leave_relay(self) -> None:
        """Once there is a direct way: takes back every slice, answers what still comes, and ends the link.

        The coordinator sends nothing for a slice that was taken back, and what it sent before comes before its word
        that it has heard so: no call is lost.
        """
        while self._path() != DIRECT:  # noqa: ASYNC110  (no event tells of a second connection to a peer)
            await trio.sleep(PATH_LOOK_S)
        logger.info("coordinator %s is reached directly now: its calls move there", self.coordinator)
        assignments = tuple(self._assignments.values())
        for assignment in assignments:
            await self.detach(assignment)
        await self.finish_calls()
        await trio.sleep(MOVE_GRACE_S)
        self._assignments.update({each.lease: each for each in assignments})
        self.close()

    async def attach(self, assignment: Assignment) -> None:
        """Offers a loaded slice. Raises PeerError, or what the coordinator answered.

        After a timeout or a cancel the coordinator may have heard the offer, so the slice is still ours to `detach`.
        """
        self._assignments[assignment.lease] = assignment
        try:
            await self._call(ExpertsMethod.ATTACH, assignment)
        except CallTimeout:
            raise
        except KvasirError:
            self._assignments.pop(assignment.lease, None)
            raise
        self._attached.set()

    async def detach(self, assignment: Assignment) -> bool:
        """Tells the coordinator to send nothing more for a slice; False when it was not attached or is gone."""
        if self._assignments.pop(assignment.lease, None) is None:
            return False
        try:
            await self._call(ExpertsMethod.DETACH, assignment)
        except KvasirError as error:
            logger.info("coordinator %s was not told that %s is left: %s", self.coordinator, assignment.slice, error)
            return False
        return True

    async def finish_calls(self) -> None:
        """Returns when no call is being answered."""
        if self._in_flight:
            await self._idle.wait()
        if self._express is not None:
            await self._express.finish()

    def _opened(self) -> CallStream:
        assert self._calls is not None, "a link is opened before it is used"
        return self._calls

    async def _call(self, method: ExpertsMethod, assignment: Assignment) -> None:
        body = Attachment(self.model, self.dtype, (assignment.slice,)).to_bytes()
        await self._opened().call(int(method), body, timeout_s=ATTACH_TIMEOUT_S)

    async def _handle(self, method: int, body: memoryview) -> Sequence[bytes | memoryview]:
        if method == ExpertsMethod.COMPUTE:
            return await self._answer(body)
        raise Misbehaved(RejectReason.UNKNOWN_METHOD, f"a coordinator may not call method {method} here")

    async def _answer(self, body: memoryview) -> Sequence[bytes | memoryview]:
        request = self._read(body)
        if self._in_flight == 0:
            self._idle = trio.Event()
        self._in_flight += 1
        try:
            sums, computed_s = await self._run_blocking(self._timed, request)
            if self._answer_delay_s:  # a distance: calls that overlap are all as late, and none waits for another
                await trio.sleep(self._answer_delay_s)
        finally:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._idle.set()
        self._computed(request.rows.shape[0])
        return self._frames.answer(sums, request.encoding, computed_s)

    def _timed(self, request: ExpertRequest) -> tuple[torch.Tensor, float]:
        """In the thread that computes, so that no wait for a turn is counted."""
        began_at = time.perf_counter()
        return self._compute(self._shard, request), time.perf_counter() - began_at

    def _read(self, body: memoryview) -> ExpertRequest:
        request = self._frames.read(body)
        self._check(request)
        return request

    def _check(self, request: ExpertRequest) -> None:
        held = self._shard.held(request.layer)
        if not set(request.pair_expert.tolist()) <= held:
            raise Overloaded(f"some experts of layer {request.layer} are not held here (any more)")
        rows, pairs = request.rows.shape[0], request.pair_row.shape[0]
        if pairs > rows * len(held):  # a pair costs 12 bytes on the wire and a whole row in memory
            raise Misbehaved(
                RejectReason.TOO_MANY, f"{pairs} pairs for {rows} rows and {len(held)} experts repeat some"
            )

    def _on_notice(self, method: int, body: memoryview) -> None:
        if method != ExpertsMethod.STANDING:
            raise Misbehaved(RejectReason.UNKNOWN_METHOD, f"notice {method} is not one of a coordinator's")
        told = Standing.from_bytes(body)
        for lease, assignment in self._assignments.items():
            if assignment.slice == told.slice:
                self._standing_told(StandingTold(lease, proven=told.state == "proven"))

    # The express channel --------------------------------------------------------------------------------------

    async def _keep_express(self) -> None:
        """Asks for a channel, once something is attached, and serves it; until there is none to be had."""
        await self._attached.wait()
        while True:
            if not await self._ask_express():
                return
            await trio.sleep(EXPRESS_RETRY_S)

    async def _ask_express(self) -> bool:
        """Serves a channel to its end, if there is one; False when the coordinator offers none."""
        assert self._transport is not None, "a link is opened before it is run"
        try:
            invitation = await self._opened().call(int(ExpertsMethod.EXPRESS), timeout_s=ATTACH_TIMEOUT_S)
            if not invitation:
                return False
            channel = await self._transport.accept_invitation(self.coordinator, bytes(invitation))
        except (CallTimeout, Unreachable, CapacityError) as error:
            logger.info("coordinator %s is served without an express channel: %s", self.coordinator, error)
            return True
        except KvasirError as error:
            logger.info("coordinator %s offers no express channel: %s", self.coordinator, error)
            return False
        logger.info("coordinator %s is served over an express channel", self.coordinator)
        self._express = ExpressCalls(channel, self._express_answer(), self._answer_delay_s)
        try:
            await self._express.run(self._computed)
        finally:
            self._express = None
        return True

    def _express_answer(self) -> Answer:
        """For a channel's thread: which of a worker's coordinators is computed for first is the system's to say."""
        kernel = self._shard.answer_kernel() if self._compute is compute_here else None
        if kernel is None:
            return self._answer_in_parts
        whole = WholeAnswers(self._shard, kernel)
        return lambda body: whole.answer(body) or self._answer_in_parts(body)

    def _answer_in_parts(self, body: memoryview) -> tuple[int, Sequence[bytes | memoryview]]:
        request = self._read(body)
        sums, computed_s = self._timed(request)
        return request.rows.shape[0], self._frames.answer(sums, request.encoding, computed_s)
