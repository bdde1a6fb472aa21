"""Calls over a stream: long-lived, the same from both ends, many at once.

It does not know methods, messages, who may call, or which transport carries the stream.

The sending side decides nothing about time for `submit`; `call` has a deadline. Everything is bounded: calls of
ours (`in_flight_max`, one more raises Overloaded), calls of the peer (one more is answered with OVERLOADED), bodies
(`body_bytes_max`), and frames that wait for a peer that does not read.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import trio

from kvasir_node.base.errors import (
    BugError,
    CallTimeout,
    KvasirError,
    Misbehaved,
    Overloaded,
    RejectReason,
    Unreachable,
    UsageError,
)
from kvasir_node.base.ids import PeerId
from kvasir_node.net.rpc_frames import CallFrame, FrameAssembler, Kind, decode_error, encode_error, pack_header
from kvasir_node.net.transport import Stream, StreamHandler, Transport

CANCELLED_IDS_MAX = 1024  # calls of ours that were cancelled, remembered because their result may be under way
OUTBOX_SPARE_FRAMES = 64

Part = bytes | bytearray | memoryview
CallHandler = Callable[[int, memoryview], Awaitable[Sequence[Part]]]
"""(method, body) -> parts of the result. Raises a KvasirError to answer with an error. Cancelled when the caller is
no longer interested. The body is the handler's to keep and to change."""
NoticeHandler = Callable[[int, memoryview], None]
Deliver = Callable[[memoryview | KvasirError], None]

_log = logging.getLogger(__name__)


class _ServedCall:
    """A call of the peer that is being computed; cancelled by the peer, who then wants no answer."""

    def __init__(self) -> None:
        self.scope: trio.CancelScope | None = None
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True
        if self.scope is not None:
            self.scope.cancel()


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
        clock: Callable[[], float] = trio.current_time,
    ) -> None:
        self.stream = stream
        self.end_reason: str | None = None
        self._handler = handler
        self._on_notice = on_notice
        self._in_flight_max = in_flight_max
        self._body_bytes_max = body_bytes_max
        self._clock = clock
        self._next_id = 1
        self._pending: dict[int, Deliver] = {}
        self._cancelled: dict[int, None] = {}
        self._forgotten_below = 0  # cancelled ids under this are not remembered one by one
        self._serving: dict[int, _ServedCall] = {}
        self._tasks = 0  # serving, or cancelled and not over yet
        self._outbox: deque[Sequence[Part]] = deque()
        self._outbox_max = 4 * in_flight_max + OUTBOX_SPARE_FRAMES
        self._misbehaviour: Misbehaved | None = None
        self._closing = False
        self._writer_lot = trio.lowlevel.ParkingLot()
        self._room_lot = trio.lowlevel.ParkingLot()

    @property
    def peer(self) -> PeerId:
        return self.stream.peer

    @property
    def in_flight(self) -> int:
        """Calls of ours that wait for their result."""
        return len(self._pending)

    @property
    def serving(self) -> int:
        """Calls of the peer that are being computed here."""
        return len(self._serving)

    # --- life ---

    async def run(self) -> None:
        """Serves until the stream ends; then every pending call of ours has failed with Unreachable (or Misbehaved).

        A peer that closes its direction still gets the results of the calls it made. Raises Misbehaved (the stream
        is reset) when the peer sends what no honest peer sends.
        """
        reason = "the call stream was stopped here"
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write_until_broken, nursery.cancel_scope)
                try:
                    reason = await self._read_loop(nursery)
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
            await self.stream.write(*parts)
        await self.stream.close()

    def _close_when_served(self) -> None:
        if self.end_reason is not None and not self._tasks:
            self.close()

    def close(self) -> None:
        """Takes no new calls; what is queued goes out, then our direction is closed. Results still come in."""
        self._closing = True
        self._writer_lot.unpark_all()

    def _fail_pending(self, reason: str) -> None:
        if self.end_reason is None:
            self.end_reason = reason
        pending, self._pending = self._pending, {}
        for deliver in pending.values():
            deliver(self._cut_off(reason))

    def _cut_off(self, reason: str) -> KvasirError:
        if self._misbehaviour is not None:
            return Misbehaved(self._misbehaviour.reason, f"{self.peer} broke the call stream: {reason}")
        return Unreachable(f"the call to {self.peer} was cut off: {reason}")

    # --- our calls ---

    def submit(self, method: int, parts: Sequence[Part], deliver: Deliver) -> int:
        """Queues a call without waiting; `deliver` gets its result or error, once, on the trio loop.

        It is never called when `cancel` came first. Parts must not change until then.
        Raises Overloaded at in_flight_max, Unreachable after the stream's end, UsageError for a body too large.
        """
        self._check_open(parts)
        if len(self._pending) >= self._in_flight_max or len(self._outbox) >= self._outbox_max:
            raise Overloaded(f"{self._in_flight_max} calls to {self.peer} are under way; wait for one or use another")
        call_id = self._next_id
        self._next_id += 1
        self._pending[call_id] = deliver
        self._queue(Kind.CALL, method, call_id, parts)
        return call_id

    def _check_open(self, parts: Sequence[Part]) -> None:
        if self.end_reason is not None or self._closing:
            raise Unreachable(f"no call to {self.peer}: the stream ended: {self.end_reason or 'closed by us'}")
        size = _bytes_of(parts)
        if size > self._body_bytes_max:
            raise UsageError(f"a body of {size} bytes; at most {self._body_bytes_max} may be sent in one call")

    def cancel(self, call_id: int) -> bool:
        """Gives a call up and tells the peer; False when it was over already."""
        if self._pending.pop(call_id, None) is None:
            return False
        self._cancelled[call_id] = None
        if len(self._cancelled) > CANCELLED_IDS_MAX:
            oldest = next(iter(self._cancelled))
            del self._cancelled[oldest]
            self._forgotten_below = max(self._forgotten_below, oldest + 1)
        self._queue(Kind.CANCEL, 0, call_id, ())
        return True

    async def call(self, method: int, *parts: Part, timeout_s: float) -> memoryview:
        """The result's body. Raises CallTimeout after timeout_s (the peer is told), Overloaded, Unreachable,
        Misbehaved, or the error that the peer answered with.

        Cancel-safety: a cancelled call is cancelled at the peer, too.
        """
        answered = trio.Event()
        answer: list[memoryview | KvasirError] = []
        started_at = self._clock()

        def deliver(result: memoryview | KvasirError) -> None:
            answer.append(result)
            answered.set()

        call_id = self.submit(method, parts, deliver)
        try:
            with trio.move_on_after(timeout_s):
                await answered.wait()
        finally:
            self.cancel(call_id)
        if not answer:
            waited_s = self._clock() - started_at
            raise CallTimeout(f"{self.peer} did not answer method {method} within {waited_s:.3g} s")
        result = answer[0]
        if isinstance(result, KvasirError):
            raise result
        return result

    async def notify(self, method: int, *parts: Part) -> None:
        """Sends a message that has no answer; waits only for room. Raises Unreachable after the stream's end.

        Cancel-safety: a cancelled notice was not sent.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        while len(self._outbox) >= self._outbox_max // 2 and self.end_reason is None:
            await self._room_lot.park()
        self._check_open(parts)
        self._queue(Kind.NOTICE, method, 0, parts)

    def _queue(self, kind: Kind, method: int, call_id: int, parts: Sequence[Part]) -> None:
        self._outbox.append((pack_header(kind, method, call_id, _bytes_of(parts)), *parts))
        self._writer_lot.unpark_all()

    # --- what arrives ---

    async def _read_loop(self, nursery: trio.Nursery) -> str:
        assembler = FrameAssembler(self._body_bytes_max)
        while True:
            chunk = await self.stream.read()
            if not chunk:
                ended = "in the middle of a frame" if assembler.is_mid_frame else "between frames"
                return f"the peer closed the stream {ended}"
            for frame in assembler.feed(chunk):
                self._arrived(frame, nursery)
            if len(self._outbox) > self._outbox_max:
                text = f"{len(self._outbox)} frames wait for {self.peer}, which asks and does not read"
                raise Misbehaved(RejectReason.TOO_MANY, text)

    def _arrived(self, frame: CallFrame, nursery: trio.Nursery) -> None:
        if frame.kind is Kind.CALL:
            self._call_arrived(frame, nursery)
        elif frame.kind is Kind.CANCEL:
            served = self._serving.pop(frame.id, None)
            if served is not None:
                served.cancel()
        elif frame.kind is Kind.NOTICE:
            if self._on_notice is not None:
                self._on_notice(frame.method, frame.body)
        else:
            self._result_arrived(frame)

    def _result_arrived(self, frame: CallFrame) -> None:
        deliver = self._pending.pop(frame.id, None)
        if deliver is not None:
            deliver(frame.body if frame.kind is Kind.RESULT else decode_error(frame.body))
        elif frame.id in self._cancelled:
            del self._cancelled[frame.id]
        elif frame.id >= self._forgotten_below:
            text = f"{self.peer} answered call {frame.id}, which does not wait for an answer"
            raise Misbehaved(RejectReason.BAD_FRAME, text)

    def _call_arrived(self, frame: CallFrame, nursery: trio.Nursery) -> None:
        if frame.id in self._serving:
            raise Misbehaved(RejectReason.BAD_FRAME, f"{self.peer} used call id {frame.id} twice at once")
        if self._handler is None:
            self._answer_error(frame.id, Misbehaved(RejectReason.UNKNOWN_METHOD, "this end takes no calls"))
        elif len(self._serving) >= self._in_flight_max or self._tasks >= 2 * self._in_flight_max:
            self._answer_error(frame.id, Overloaded(f"{self._in_flight_max} calls are under way here"))
        else:
            served = self._serving[frame.id] = _ServedCall()
            self._tasks += 1
            nursery.start_soon(self._serve, self._handler, frame, served)

    async def _serve(self, handler: CallHandler, frame: CallFrame, served: _ServedCall) -> None:
        try:
            with trio.move_on_after(math.inf) as served.scope:
                if not served.is_cancelled:
                    await self._serve_in_scope(handler, frame, served)
        finally:
            self._tasks -= 1
        self._close_when_served()

    async def _serve_in_scope(self, handler: CallHandler, frame: CallFrame, served: _ServedCall) -> None:
        answer: Sequence[Part] | KvasirError
        try:
            answer = await handler(frame.method, frame.body)
            if _bytes_of(answer) > self._body_bytes_max:
                raise BugError(f"a result of {_bytes_of(answer)} bytes; at most {self._body_bytes_max} may be sent")
        except KvasirError as error:
            answer = error
        except Exception as error:
            # The one door for calls: a bug in a handler must cost its call, not every call on the stream.
            _log.exception("the handler of method %d failed", frame.method)
            answer = BugError(f"the handler failed: {type(error).__name__}")
        if served.is_cancelled:
            return
        del self._serving[frame.id]
        if isinstance(answer, KvasirError):
            self._answer_error(frame.id, answer)
        else:
            self._queue(Kind.RESULT, frame.method, frame.id, answer)

    def _answer_error(self, call_id: int, error: KvasirError) -> None:
        self._queue(Kind.ERROR, 0, call_id, (encode_error(error),))


def _bytes_of(parts: Sequence[Part]) -> int:
    return sum(part.nbytes if isinstance(part, memoryview) else len(part) for part in parts)


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
