"""Calls over a stream: long-lived, the same from both ends, many at once.

It does not know methods, messages, who may call, or which transport carries the stream.

The sending side decides nothing about time for `submit`; `call` has a deadline. Everything is bounded: calls of
ours (what the peer granted and `in_flight_max`; more wait, `rpc_credits.WAITING_MAX` of them), calls of the peer
(what we granted; a peer that sends more is cut off), bodies (`body_bytes_max`), and frames that wait for a peer that
does not read. Expert calls and blocks have streams of their own, so no call waits for a block's credit; where both
have theirs, the muxer lets the calls go first (`gives_way`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import outcome
import trio

from kvasir_node.base.errors import (
    CallTimeout,
    KvasirError,
    Misbehaved,
    RejectReason,
    Unreachable,
    UsageError,
)
from kvasir_node.base.ids import PeerId
from kvasir_node.net.rpc_credits import CallStatistics, Credits, Grant, Priority, body_beyond_grant
from kvasir_node.net.rpc_frames import (
    CallFrame,
    FrameAssembler,
    Kind,
    decode_error,
    decode_grant,
    pack_header,
)
from kvasir_node.net.rpc_server import CallHandler, CallServer, Part, bytes_of
from kvasir_node.net.transport import Stream, StreamHandler, Transport

CANCELLED_IDS_MAX = 1024  # calls of ours that were cancelled, remembered because their result may be under way
OUTBOX_SPARE_FRAMES = 64
BODIES_GRANTED = 2  # of the largest size: what the bodies of a peer's calls may hold together

NoticeHandler = Callable[[int, memoryview], None]
Deliver = Callable[[memoryview | KvasirError], None]


class _UnsentCall(NamedTuple):
    method: int
    parts: Sequence[Part]
    size_bytes: int


class _Deadline(NamedTuple):
    at: float
    method: int
    timeout_s: float


class CallStream:
    """One stream's calls, in both directions. `run` serves it; everything else needs `run` to be under way."""

    def __init__(
        self,
        stream: Stream,
        *,
        handler: CallHandler | None,
        in_flight_max: int,
        body_bytes_max: int,
        on_notice: NoticeHandler | None = None,
        gives_way: bool = False,
    ) -> None:
        """`gives_way`: bulk, such as blocks; all other calls and streams to the same peer go before it.

        `in_flight_max` bounds both directions: the calls that we have sent, and those that we grant.
        """
        if gives_way:
            stream.give_way()
        self.stream = stream
        self.end_reason: str | None = None
        self._on_notice = on_notice
        self._in_flight_max = in_flight_max
        self._body_bytes_max = body_bytes_max
        self._priority = Priority.BULK if gives_way else Priority.PLAIN
        self._credits = Credits(in_flight_max)
        grant = Grant(in_flight_max, BODIES_GRANTED * body_bytes_max)
        self._server = CallServer(handler, grant, body_bytes_max, self._queue, self._close_when_served)
        self._assembler = FrameAssembler(body_bytes_max)
        self._next_id = 1
        self._pending: dict[int, Deliver] = {}
        self._unsent: dict[int, _UnsentCall] = {}  # those pending calls that wait for credit
        self._deadlines: dict[int, _Deadline] = {}  # of those pending calls that have one
        self._deadline_check_at = math.inf
        self._cancelled: dict[int, None] = {}
        self._forgotten_below = 0  # cancelled ids under this are not remembered one by one
        self._outbox: deque[Sequence[Part]] = deque()
        self._outbox_max = 4 * in_flight_max + OUTBOX_SPARE_FRAMES
        self._misbehaviour: Misbehaved | None = None
        self._closing = False
        self._is_writing = False
        self._writer_lot = trio.lowlevel.ParkingLot()
        self._room_lot = trio.lowlevel.ParkingLot()
        self._deadline_lot = trio.lowlevel.ParkingLot()

    @property
    def peer(self) -> PeerId:
        return self.stream.peer

    @property
    def in_flight(self) -> int:
        """Calls of ours that wait for their result."""
        return len(self._pending)

    @property
    def serving(self) -> int:
        """Calls of the peer that are being computed here, or wait for it."""
        return self._server.serving

    def statistics(self) -> CallStatistics:
        return self._credits.statistics(self._server.account)

    # --- life ---

    async def run(self) -> None:
        """Serves until the stream ends; then every pending call of ours has failed with Unreachable (or Misbehaved).

        A peer that closes its direction still gets the results of the calls it made. Raises Misbehaved (the stream
        is reset) when the peer sends what no honest peer sends.
        """
        reason = "the call stream was stopped here"
        try:
            async with trio.open_nursery() as nursery:
                self._server.begin(nursery)
                nursery.start_soon(self._write_until_broken, nursery.cancel_scope)
                nursery.start_soon(self._keep_deadlines)
                try:
                    reason = await self._read_loop()
                except Misbehaved as error:
                    self._misbehaviour, reason = error, str(error)
                    nursery.cancel_scope.cancel()
                except Unreachable as error:
                    reason = str(error)
                    nursery.cancel_scope.cancel()
                self._fail_pending(reason)
                self._close_when_served()
        finally:
            self._fail_pending(reason)
        if self._misbehaviour is not None:
            await self.stream.reset()
            raise self._misbehaviour

    async def _write_until_broken(self, run_scope: trio.CancelScope) -> None:
        try:
            await self._write_loop()
        except Unreachable as error:
            self._fail_pending(str(error))
            run_scope.cancel()

    async def _write_loop(self) -> None:
        while self._outbox or not self._closing:
            if not self._outbox:
                await self._writer_lot.park()
                continue
            parts = [part for frame in self._outbox for part in frame]
            self._outbox.clear()
            self._room_lot.unpark_all()
            self._send_waiting()
            self._is_writing = True
            await self.stream.write(*parts)
            self._is_writing = False
        await self.stream.close()

    def _close_when_served(self) -> None:
        if self.end_reason is not None and self._server.is_done:
            self.close()

    def close(self) -> None:
        """Takes no new calls; what is queued goes out, then our direction is closed. Results still come in."""
        self._closing = True
        self._writer_lot.unpark_all()

    def _fail_pending(self, reason: str) -> None:
        if self.end_reason is None:
            self.end_reason = reason
        pending, self._pending = self._pending, {}
        for call_id in pending:
            self._forget_call(call_id)
        self._deadlines.clear()
        self._deadline_lot.unpark_all()
        self._server.end()
        for deliver in pending.values():
            deliver(self._cut_off(reason))

    def _cut_off(self, reason: str) -> KvasirError:
        if self._misbehaviour is not None:
            return Misbehaved(self._misbehaviour.reason, f"{self.peer} broke the call stream: {reason}")
        return Unreachable(f"the call to {self.peer} was cut off: {reason}")

    # --- our calls ---

    def submit(
        self,
        method: int,
        parts: Sequence[Part],
        deliver: Deliver,
        *,
        priority: Priority | None = None,
        into: memoryview | None = None,
    ) -> int:
        """Queues a call without waiting; `deliver` gets its result or error, once, on the trio loop.

        It is never called when `cancel` came first. Parts must not change until then. A call without credit waits
        for it, before those of a lesser `priority` (PLAIN, BULK on a stream that gives way). `into`: a writable buffer
        of bytes that the result is put into, and is then a view of: nothing is allocated for it. A result that is too
        large for it is dropped, and the call fails with Misbehaved (too_large); other calls do not notice. Once the
        call is over, however it ended, the buffer is the caller's alone.
        Raises Overloaded when too many wait, Unreachable after the stream's end, UsageError for a body too large.
        """
        size = self._checked_size(parts)
        call_id = self._next_id
        if len(self._outbox) >= self._outbox_max or not self._credits.take(call_id, size):
            self._credits.wait(call_id, size, self._priority if priority is None else priority)
            self._unsent[call_id] = _UnsentCall(method, parts, size)
        self._next_id += 1
        self._pending[call_id] = deliver
        if into is not None:
            self._assembler.place(call_id, into)
        if call_id not in self._unsent:
            self._queue(Kind.CALL, method, call_id, parts, size)
        return call_id

    def _send_waiting(self) -> None:
        if not self._unsent or self.end_reason is not None or len(self._outbox) >= self._outbox_max:
            return
        for call_id in self._credits.next_calls():
            call = self._unsent.pop(call_id)
            self._queue(Kind.CALL, call.method, call_id, call.parts, call.size_bytes)
            if len(self._outbox) >= self._outbox_max:
                return

    def _checked_size(self, parts: Sequence[Part]) -> int:
        if self.end_reason is not None or self._closing:
            raise Unreachable(f"no call to {self.peer}: the stream ended: {self.end_reason or 'closed by us'}")
        size = bytes_of(parts)
        if size > self._body_bytes_max:
            raise UsageError(f"a body of {size} bytes; at most {self._body_bytes_max} may be sent in one call")
        return size

    def _forget_call(self, call_id: int) -> bool:
        """Of a call that is no longer pending; whether it had been sent."""
        self._deadlines.pop(call_id, None)
        if self._unsent:
            self._unsent.pop(call_id, None)
        self._assembler.displace(call_id)
        return self._credits.give_back(call_id)

    def cancel(self, call_id: int) -> bool:
        """Gives a call up and tells the peer, if it knows of it; False when it was over already."""
        if self._pending.pop(call_id, None) is None:
            return False
        if not self._forget_call(call_id):
            return True
        self._cancelled[call_id] = None
        if len(self._cancelled) > CANCELLED_IDS_MAX:
            oldest = next(iter(self._cancelled))
            del self._cancelled[oldest]
            self._forgotten_below = max(self._forgotten_below, oldest + 1)
        self._queue(Kind.CANCEL, 0, call_id, (), 0)
        self._send_waiting()
        return True

    async def call(
        self,
        method: int,
        *parts: Part,
        timeout_s: float,
        priority: Priority | None = None,
        into: memoryview | None = None,
    ) -> memoryview:
        """The result's body; `priority` and `into` as for `submit`. Waiting for credit counts as waiting.

        Raises CallTimeout after timeout_s (the peer is told), Overloaded, Unreachable, Misbehaved, or the error that
        the peer answered with.

        Cancel-safety: a cancelled call is cancelled at the peer, too.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        task = trio.lowlevel.current_task()

        def deliver(result: memoryview | KvasirError) -> None:
            failed = isinstance(result, KvasirError)
            trio.lowlevel.reschedule(task, outcome.Error(result) if failed else outcome.Value(result))

        call_id = self.submit(method, parts, deliver, priority=priority, into=into)
        self._set_deadline(call_id, _Deadline(trio.current_time() + timeout_s, method, timeout_s))

        def abort(raise_cancel: object) -> trio.lowlevel.Abort:
            self.cancel(call_id)
            return trio.lowlevel.Abort.SUCCEEDED

        return await trio.lowlevel.wait_task_rescheduled(abort)

    def _set_deadline(self, call_id: int, deadline: _Deadline) -> None:
        """One task keeps all deadlines: a cancel scope for each call would cost more than its frame."""
        self._deadlines[call_id] = deadline
        if deadline.at < self._deadline_check_at:
            self._deadline_lot.unpark_all()

    async def _keep_deadlines(self) -> None:
        while self.end_reason is None:
            # Calls that are over leave this time as it is: it is looked at once per timeout, not once per call.
            self._deadline_check_at = min((each.at for each in self._deadlines.values()), default=math.inf)
            with trio.move_on_at(self._deadline_check_at):
                await self._deadline_lot.park()
            now = trio.current_time()
            for call_id, due in [item for item in self._deadlines.items() if item[1].at <= now]:
                deliver = self._pending[call_id]
                self.cancel(call_id)
                deliver(CallTimeout(f"{self.peer} did not answer method {due.method} within {due.timeout_s:.3g} s"))

    async def notify(self, method: int, *parts: Part) -> None:
        """Sends a message that has no answer; waits only for room. Raises Unreachable after the stream's end.

        Cancel-safety: a cancelled notice was not sent.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        while len(self._outbox) >= self._outbox_max // 2 and self.end_reason is None:
            await self._room_lot.park()
        size = self._checked_size(parts)
        self._queue(Kind.NOTICE, method, 0, parts, size)

    def _queue(self, kind: Kind, method: int, call_id: int, parts: Sequence[Part], size_bytes: int) -> None:
        frame = (pack_header(kind, method, call_id, size_bytes), *parts)
        # With other calls under way a frame waits for theirs, and all go together; alone it goes at once.
        alone = len(self._pending) <= 1 and not self.serving and not self._outbox and not self._is_writing
        if alone and self._written_now(frame):
            return
        self._outbox.append(frame)
        self._writer_lot.unpark_all()

    def _written_now(self, frame: Sequence[Part]) -> bool:
        try:
            return self.stream.write_now(*frame)
        except Unreachable:
            return False  # the writer meets the same and fails every call with it

    # --- what arrives ---

    async def _read_loop(self) -> str:
        def arrived(chunk: bytes | memoryview) -> None:
            for frame in self._assembler.feed(chunk):
                self._arrived(frame)
            if len(self._outbox) > self._outbox_max:
                text = f"{len(self._outbox)} frames wait for {self.peer}, which asks and does not read"
                raise Misbehaved(RejectReason.TOO_MANY, text)

        await self.stream.pump(arrived)
        ended = "in the middle of a frame" if self._assembler.is_mid_frame else "between frames"
        return f"the peer closed the stream {ended}"

    def _arrived(self, frame: CallFrame) -> None:
        if frame.kind is Kind.CALL:
            self._server.call_arrived(frame)
        elif frame.kind is Kind.CANCEL:
            self._server.cancel_arrived(frame.id)
        elif frame.kind is Kind.NOTICE:
            if self._on_notice is not None:
                self._on_notice(frame.method, frame.body)
        elif frame.kind is Kind.GRANT:
            self._grant_arrived(decode_grant(frame.body))
        else:
            self._result_arrived(frame)

    def _grant_arrived(self, grant: Grant) -> None:
        for call_id in self._credits.granted(grant):
            size = self._unsent.pop(call_id).size_bytes
            deliver = self._pending.pop(call_id)
            self._forget_call(call_id)
            deliver(body_beyond_grant(size, grant))
        self._send_waiting()

    def _result_arrived(self, frame: CallFrame) -> None:
        # Before the call is over: when the body is not an error's, the call fails with the stream, like all others.
        result = frame.body if frame.kind is Kind.RESULT else decode_error(frame.body)
        deliver = None if frame.id in self._unsent else self._pending.pop(frame.id, None)
        if deliver is not None:
            self._forget_call(frame.id)
            if frame.dropped_bytes:
                text = f"{self.peer} answered with {frame.dropped_bytes} bytes, for which the caller has no room"
                result = Misbehaved(RejectReason.TOO_LARGE, text)
            deliver(result)
            if self._unsent:
                self._send_waiting()
        elif frame.id in self._cancelled:
            del self._cancelled[frame.id]
        elif frame.id >= self._forgotten_below:
            text = f"{self.peer} answered call {frame.id}, which does not wait for an answer"
            raise Misbehaved(RejectReason.BAD_FRAME, text)


def call_handler(
    handler_of: Callable[[PeerId], CallHandler], *, in_flight_max: int, body_bytes_max: int
) -> StreamHandler:
    """A StreamHandler that serves calls; `handler_of` makes each stream's handler from the peer that opened it."""

    async def serve(stream: Stream) -> None:
        handler = handler_of(stream.peer)
        await CallStream(stream, handler=handler, in_flight_max=in_flight_max, body_bytes_max=body_bytes_max).run()

    return serve


async def one_call(
    transport: Transport,
    peer: PeerId,
    protocol: str,
    method: int,
    *parts: Part,
    timeout_s: float,
    body_bytes_max: int = 4 * 1024 * 1024,
) -> memoryview:
    """Opens a stream, makes one call, closes it. Raises like `CallStream.call`; timeout_s covers all of it.

    Cancel-safety: nothing is left open.
    """
    with trio.move_on_after(timeout_s):
        stream = await transport.open_stream(peer, protocol)
        try:
            return await _call_on(stream, method, parts, timeout_s, body_bytes_max)
        finally:
            await stream.reset()
    raise CallTimeout(f"{peer} did not answer {protocol} method {method} within {timeout_s:g} s")


async def _call_on(
    stream: Stream, method: int, parts: Sequence[Part], timeout_s: float, body_bytes_max: int
) -> memoryview:
    calls = CallStream(stream, handler=None, in_flight_max=1, body_bytes_max=body_bytes_max)
    failure: KvasirError | None = None
    result = memoryview(b"")

    async def run() -> None:
        with suppress(Misbehaved):  # the call has failed with it
            await calls.run()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        try:
            result = await calls.call(method, *parts, timeout_s=timeout_s)
        except KvasirError as error:
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return result
