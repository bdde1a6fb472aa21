"""The peer's calls on one call stream: the tasks that serve them, and the answers.

It does not know the stream, our own calls, or what methods mean. At most as many calls as were granted are here at
once; a call that the peer cancels is over for the peer, and its task goes on until its handler has noticed. Such tasks
are bounded too: a call that finds no task waits for one.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

import trio

from kvasir_node.base.errors import BugError, KvasirError, Misbehaved, RejectReason
from kvasir_node.net.rpc_credits import Grant, Served
from kvasir_node.net.rpc_frames import CallFrame, Kind, encode_error, encode_grant

TASKS_PER_CALL = 2  # of those granted: half of them may belong to calls that were cancelled

Part = bytes | bytearray | memoryview
CallHandler = Callable[[int, memoryview], Awaitable[Sequence[Part]]]
"""(method, body) -> parts of the result. Raises a KvasirError to answer with an error. Cancelled when the caller is
no longer interested. The body is the handler's to keep and to change."""
SendFrame = Callable[[Kind, int, int, Sequence[Part], int], None]
"""(kind, method, id, parts, their bytes); never waits."""

_log = logging.getLogger(__name__)


def bytes_of(parts: Sequence[Part]) -> int:
    return sum([part.nbytes if isinstance(part, memoryview) else len(part) for part in parts])


class _ServedCall:
    """A call of the peer; cancelled by the peer, who then wants no answer."""

    def __init__(self, frame: CallFrame) -> None:
        self.frame = frame
        self.scope: trio.CancelScope | None = None  # of the task that computes it
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True
        if self.scope is not None:
            self.scope.cancel()


class CallServer:
    """`begin` before anything arrives, `end` when nothing more will; `done` is called once all is answered then."""

    def __init__(
        self,
        handler: CallHandler | None,
        grant: Grant,
        body_bytes_max: int,
        send: SendFrame,
        done: Callable[[], None],
    ) -> None:
        """Without a handler nothing is granted, and what comes nevertheless is answered with UNKNOWN_METHOD."""
        self.account = Served(grant)
        self._handler = handler
        self._body_bytes_max = body_bytes_max
        self._send = send
        self._done = done
        self._nursery: trio.Nursery | None = None
        self._serving: dict[int, _ServedCall] = {}
        self._unserved: deque[_ServedCall] = deque()
        self._tasks = 0
        self._idle: list[trio.lowlevel.Task] = []  # wait for the next call: waking one costs less than starting one
        self._has_ended = False

    @property
    def serving(self) -> int:
        return len(self._serving)

    @property
    def is_done(self) -> bool:
        return self._has_ended and not self._tasks

    def begin(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        if self._handler is not None:
            body = encode_grant(self.account.grant)
            self._send(Kind.GRANT, 0, 0, (body,), len(body))

    def end(self) -> None:
        self._has_ended = True
        while self._idle:
            trio.lowlevel.reschedule(self._idle.pop())

    def call_arrived(self, frame: CallFrame) -> None:
        """Raises Misbehaved for a call beyond the grant, or an id that is in use."""
        if self._handler is None:
            self._send_error(frame.id, Misbehaved(RejectReason.UNKNOWN_METHOD, "this end takes no calls"))
            return
        self.account.arrived(frame.id, len(frame.body))
        served = self._serving[frame.id] = _ServedCall(frame)
        self._unserved.append(served)
        if self._idle:
            trio.lowlevel.reschedule(self._idle.pop())
        else:
            self._start_task(self._handler)

    def cancel_arrived(self, call_id: int) -> None:
        served = self._serving.pop(call_id, None)
        if served is None:
            return
        self.account.over(call_id)
        if served.scope is None:
            self._unserved.remove(served)
        served.cancel()

    def _start_task(self, handler: CallHandler) -> None:
        assert self._nursery is not None, "a server begins before calls arrive"
        if self._tasks < TASKS_PER_CALL * self.account.grant.calls:
            self._tasks += 1
            self._nursery.start_soon(self._serve_calls, handler)

    async def _serve_calls(self, handler: CallHandler) -> None:
        """Serves one call after another; ends with the first that the peer cancels, or when no more can come."""
        with trio.move_on_after(math.inf) as scope:
            while not scope.cancel_called:
                if self._unserved:
                    served = self._unserved.popleft()
                    served.scope = scope
                    await self._answer(handler, served)
                elif self._has_ended:
                    break
                else:
                    await self._wait_for_call()
        self._tasks -= 1
        if self._unserved:
            self._start_task(handler)
        self._done()

    async def _wait_for_call(self) -> None:
        task = trio.lowlevel.current_task()
        self._idle.append(task)

        def abort(raise_cancel: object) -> trio.lowlevel.Abort:
            self._idle.remove(task)
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    async def _answer(self, handler: CallHandler, served: _ServedCall) -> None:
        frame, size = served.frame, 0
        answer: Sequence[Part] | KvasirError
        try:
            answer = await handler(frame.method, frame.body)
            size = bytes_of(answer)
            if size > self._body_bytes_max:
                raise BugError(f"a result of {size} bytes; at most {self._body_bytes_max} may be sent")
        except KvasirError as error:
            answer = error
        except Exception as error:
            # The one door for calls: a bug in a handler must cost its call, not every call on the stream.
            _log.exception("the handler of method %d failed", frame.method)
            answer = BugError(f"the handler failed: {type(error).__name__}")
        if served.is_cancelled:
            return
        del self._serving[frame.id]
        self.account.over(frame.id)
        if isinstance(answer, KvasirError):
            self._send_error(frame.id, answer)
        else:
            self._send(Kind.RESULT, frame.method, frame.id, answer, size)

    def _send_error(self, call_id: int, error: KvasirError) -> None:
        body = encode_error(error)
        self._send(Kind.ERROR, 0, call_id, (body,), len(body))
