"""One Yamux stream: its two queues, its two windows, its end.

It does not know sockets, other streams or time: the connection (`muxer.py`) feeds it what arrived and asks it for
its next frame.

Every method that changes state is synchronous; the asynchronous ones only wait until such a change is possible,
and then make it without another wait. That is the whole reason why a cancelled call loses nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import IntEnum
from types import TracebackType
from typing import Protocol

import trio
from libp2p.abc import IMuxedConn, IMuxedStream
from libp2p.stream_muxer.exceptions import MuxedStreamEOF, MuxedStreamReset

from kvasir_node.base.errors import Unreachable
from kvasir_node.net.muxer_frames import INITIAL_WINDOW_BYTES, WINDOW_BYTES_MAX, Flag, FrameType, pack, pack_data

SEND_QUEUE_BYTES = 256 * 1024  # a writer waits while its stream holds this much unsent
READ_BYTES = 256 * 1024
FIRST_CLOSE_S = 0.03
_AT_ONCE_BYTES = 60 * 1024  # a message this small goes in one frame, without being queued, if nothing else is
GROWTH_S = 0.25e-3
QUICK_BYTES = 64 * 1024  # a stream with no more to send than this goes before those with more
YIELD_BYTES = 256 * 1024  # a task that sends this much without waiting lets the others run ...
YIELD_COST_BYTES = 4096  # ... and each of its sends counts as so much more
_VIEW_BYTES_MIN = 4096  # smaller payloads are copied together, as are those that would pin much more than themselves
_COALESCED_BYTES_MAX = 64 * 1024

Chunk = bytes | bytearray | memoryview
Deliver = Callable[[memoryview], None]


class Lane(IntEnum):
    """Which streams of a connection send first."""

    QUICK = 0  # little to send: a call
    PLAIN = 1
    YIELDING = 2  # those that asked for it: blocks


class StreamOwner(Protocol):
    """What a stream needs from its connection."""

    @property
    def window_spare_bytes(self) -> int: ...

    @property
    def min_rtt_s(self) -> float: ...

    def now(self) -> float: ...

    def count_committed(self, change_bytes: int) -> None: ...

    def queue_control(self, frame: bytes, *, can_wait: bool = False) -> None: ...

    def sent_now(self, frame: list[bytes | memoryview]) -> bool: ...

    def schedule(self, stream: YamuxStream) -> None: ...

    def forget(self, stream: YamuxStream) -> None: ...


class YamuxStream(IMuxedStream):
    """Both the stream that our code uses (`receive`, `send`, `finish`) and the one libp2p's own protocols use."""

    def __init__(
        self, owner: StreamOwner, muxed_conn: IMuxedConn, stream_id: int, window_bytes_max: int, *, is_inbound: bool
    ) -> None:
        self.muxed_conn = muxed_conn
        self.stream_id = stream_id
        self.finished = False  # by us: nobody will read; what still comes is dropped
        self.scheduled = False  # waits in the connection's round of senders
        self.is_inbound = is_inbound
        self.yields = False  # to all other streams of the connection
        self._owner = owner
        self._failure: str | None = None
        self._received: deque[Chunk] = deque()
        self._received_bytes = 0
        self._receive_window = INITIAL_WINDOW_BYTES  # what the peer may still send
        self._window_target = INITIAL_WINDOW_BYTES
        self._window_max = max(INITIAL_WINDOW_BYTES, window_bytes_max)
        self._opened_at = self._given_back_at = owner.now()
        self._uncredited_bytes = 0  # read, and not yet given back to the peer as window
        self._remote_closed = False
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._sent_without_pause_bytes = 0
        self._send_window = INITIAL_WINDOW_BYTES
        self._local_closed = False
        self._fin_sent = False
        self._deliver: Deliver | None = None
        self._deliver_error: Exception | None = None
        self._readers = trio.lowlevel.ParkingLot()
        self._writers = trio.lowlevel.ParkingLot()
        owner.count_committed(INITIAL_WINDOW_BYTES)

    # --- reading ---

    async def receive(self, max_bytes: int = READ_BYTES) -> Chunk:
        """1 to max_bytes bytes, or b"" at the end. Raises Unreachable once the stream was reset or cut.

        Cancel-safety: a cancelled call loses nothing.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._received:
            if self._failure is not None:
                raise Unreachable(self._failure)
            if self._remote_closed:
                return b""
            await self._readers.park()
        return self._take(max_bytes)

    async def pump(self, deliver: Deliver) -> None:
        """Gives each chunk to `deliver` as it arrives, from the connection's own task, until the end of the stream.

        That saves a wake-up per chunk. What `deliver` raises ends the pump and is raised here, as is Unreachable.
        Cancel-safety: what was not delivered yet can still be received.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        while chunk := await self.receive() if self._received else b"":
            deliver(memoryview(chunk))
        self._deliver = deliver
        try:
            while self._deliver_error is None and self._failure is None and not self._remote_closed:
                await self._readers.park()
        finally:
            self._deliver = None
        if self._deliver_error is not None:
            raise self._deliver_error
        if self._failure is not None:
            raise Unreachable(self._failure)

    def _deliver_now(self, payload: memoryview) -> None:
        assert self._deliver is not None
        self._owner.count_committed(-len(payload))
        self._give_back(len(payload))
        try:
            self._deliver(payload)
        except Exception as error:
            # Raised again in the task that pumps, whose stream it concerns; here it would end the connection.
            self._deliver, self._deliver_error = None, error
            self._readers.unpark_all()

    def _take(self, max_bytes: int) -> Chunk:
        chunk = self._received.popleft()
        if len(chunk) > max_bytes:
            view = memoryview(chunk)
            self._received.appendleft(view[max_bytes:])
            chunk = view[:max_bytes]
        self._received_bytes -= len(chunk)
        self._owner.count_committed(-len(chunk))
        self._give_back(len(chunk))
        return chunk

    def _give_back(self, count: int) -> None:
        """Returns window to the peer in quarters of it, and doubles it where that helps and there is room to spare.

        It helps while a quarter is read in less than half a round trip, that is, up to twice bandwidth × delay, and
        where that is next to nothing, up to what is read in 4 × GROWTH_S. More would only be queued in the sockets, and
        small calls of other streams would wait behind it.
        """
        self._uncredited_bytes += count
        if self._remote_closed or self._failure is not None or self._uncredited_bytes < self._window_target // 4:
            return
        growth = self._window_growth()
        change = self._uncredited_bytes + growth
        self._window_target += growth
        self._receive_window += change
        self._uncredited_bytes = 0
        self._owner.count_committed(change)
        frame = pack(FrameType.WINDOW_UPDATE, Flag.NONE, self.stream_id, change)
        self._owner.queue_control(frame, can_wait=not growth)

    def _window_growth(self) -> int:
        last_at, self._given_back_at = self._given_back_at, self._owner.now()
        if self._given_back_at - last_at > max(self._owner.min_rtt_s / 2, GROWTH_S):
            return 0
        wanted = min(self._window_target * 2, self._window_max) - self._window_target
        return max(0, min(wanted, self._owner.window_spare_bytes))

    def limit_window(self, window_bytes: int) -> None:
        """It grows no further; a stream begins with INITIAL_WINDOW_BYTES, which nothing takes back."""
        self._window_max = max(INITIAL_WINDOW_BYTES, window_bytes)

    # --- writing ---

    async def send(self, *parts: bytes | bytearray | memoryview) -> None:
        """Queues all parts, once there is room. They must not change afterwards. Raises Unreachable.

        Cancel-safety: a cancelled call has queued nothing.
        """
        if self._sent_without_pause_bytes >= YIELD_BYTES:
            self._sent_without_pause_bytes = 0
            await trio.lowlevel.checkpoint()
        else:
            await trio.lowlevel.checkpoint_if_cancelled()
        while not self.send_now(*parts):
            await self._writers.park()

    def send_now(self, *parts: bytes | bytearray | memoryview) -> bool:
        """Queues all parts as `send` does, or none of them and returns False when there is no room."""
        self._check_writable()
        if self._unsent_bytes >= SEND_QUEUE_BYTES:
            return False
        views = [part if type(part) is bytes else memoryview(part).cast("B") for part in parts]
        size = sum([len(view) for view in views])
        self._sent_without_pause_bytes += size + YIELD_COST_BYTES
        if 0 < size <= _AT_ONCE_BYTES and size <= self._send_window and not self._unsent_bytes:
            self._send_window -= size
            if self._owner.sent_now([pack_data(self.stream_id, size, is_last=False), *views]):
                return True
            self._send_window += size
        self._unsent += [memoryview(view) for view in views if len(view)]
        self._unsent_bytes += size
        self._schedule_if_sendable()
        return True

    def _check_writable(self) -> None:
        if self._failure is not None:
            raise Unreachable(self._failure)
        if self._local_closed:
            raise Unreachable(f"stream {self.stream_id} was closed by us and takes no more bytes")

    @property
    def lane(self) -> Lane:
        if self.yields:
            return Lane.YIELDING
        return Lane.QUICK if self._unsent_bytes <= QUICK_BYTES else Lane.PLAIN

    def _schedule_if_sendable(self) -> None:
        if not self.scheduled and self._is_sendable():
            self.scheduled = True
            self._owner.schedule(self)

    def _is_sendable(self) -> bool:
        if self._failure is not None:
            return False
        return self._send_window > 0 if self._unsent else self._local_closed and not self._fin_sent

    def next_frame(self, bytes_max: int) -> list[bytes | memoryview]:
        """The header and payload of this stream's next frame of at most `bytes_max` payload bytes; [] if none.

        Afterwards `scheduled` says whether there is more to send.
        """
        self.scheduled = False
        if self._failure is not None:
            return []
        budget = min(bytes_max, self._send_window)
        payload = self._take_unsent(budget)
        count = sum(len(view) for view in payload)
        last = self._local_closed and not self._fin_sent and not self._unsent
        if not count and not last:
            return []
        self._send_window -= count
        self._unsent_bytes -= count
        if self._unsent_bytes < SEND_QUEUE_BYTES:
            self._writers.unpark_all()
        header = pack_data(self.stream_id, count, is_last=last)
        if last:
            self._fin_sent = True
            self._forget_if_over()
        self.scheduled = self._is_sendable()
        return [header, *payload]

    def _take_unsent(self, budget: int) -> list[memoryview]:
        taken: list[memoryview] = []
        while self._unsent and budget:
            view = self._unsent.popleft()
            if len(view) > budget:
                self._unsent.appendleft(view[budget:])
                view = view[:budget]
            budget -= len(view)
            taken.append(view)
        return taken

    # --- what the connection reports ---

    def data_announced(self, length: int) -> bool:
        """Takes `length` from the peer's window; False when it holds less, which no honest peer announces."""
        if length > self._receive_window:
            return False
        self._receive_window -= length
        return True

    def data_arrived(self, payload: memoryview) -> None:
        if self.finished or self._failure is not None:
            self._owner.count_committed(-len(payload))
            self._give_back(len(payload))
            return
        if self._deliver is not None:
            self._deliver_now(payload)
            return
        self._received_bytes += len(payload)
        last = self._received[-1] if self._received else None
        if _is_worth_keeping(payload):
            self._received.append(payload)
        elif isinstance(last, bytearray) and len(last) + len(payload) <= _COALESCED_BYTES_MAX:
            last += payload
        else:
            self._received.append(bytearray(payload))
        self._readers.unpark_all()

    def window_granted(self, change: int) -> bool:
        """The peer may receive `change` more bytes; False when the sum cannot be meant."""
        if self._send_window + change > WINDOW_BYTES_MAX:
            return False
        self._send_window += change
        self._schedule_if_sendable()
        return True

    def remote_closed(self) -> None:
        """The peer will send no more."""
        self._remote_closed = True
        self._release_window()
        self._readers.unpark_all()
        self._forget_if_over()

    def fail(self, reason: str, *, keep_received: bool) -> None:
        """Ends both directions; with `keep_received` what came before can still be read."""
        if self._failure is not None:
            return
        self._failure = reason
        self._release_window()
        if not keep_received:
            self._owner.count_committed(-self._received_bytes)
            self._received.clear()
            self._received_bytes = 0
        self._unsent.clear()
        self._unsent_bytes = 0
        self._readers.unpark_all()
        self._writers.unpark_all()

    def _release_window(self) -> None:
        self._owner.count_committed(-self._receive_window)
        self._receive_window = 0

    def _forget_if_over(self) -> None:
        if self._remote_closed and self._fin_sent:
            self._owner.forget(self)

    # --- ending ---

    async def close(self) -> None:
        """Ends our direction once everything queued is sent; the other may go on.

        Not sooner than FIRST_CLOSE_S after the peer opened the stream: js-libp2p (3.3.11) fails to read an answer
        whose end arrives with the answer to its protocol choice, as identify's would. Cancel-safety: closes.
        """
        young_until = self._opened_at + FIRST_CLOSE_S
        try:
            if self.is_inbound and self._owner.now() < young_until:
                await trio.sleep_until(young_until)
            else:
                await trio.lowlevel.checkpoint_if_cancelled()
        finally:
            self._close_now()

    def finish(self) -> None:
        """Closes, and drops whatever the peer still sends: nobody reads this stream any more."""
        self.finished = True
        self._owner.count_committed(-self._received_bytes)
        self._give_back(self._received_bytes)
        self._received.clear()
        self._received_bytes = 0
        self._close_now()

    def _close_now(self) -> None:
        self._local_closed = True
        self._schedule_if_sendable()

    async def reset(self) -> None:
        """Ends both directions at once. Never raises, never waits."""
        self.reset_now(f"stream {self.stream_id} was reset by us")

    def reset_now(self, reason: str) -> None:
        if self._failure is None and not (self._remote_closed and self._fin_sent):
            self._owner.queue_control(pack(FrameType.WINDOW_UPDATE, Flag.RST, self.stream_id, 0))
        self.fail(reason, keep_received=False)
        self._owner.forget(self)

    @property
    def is_closed(self) -> bool:
        return self._failure is not None or (self._remote_closed and self._fin_sent)

    # --- the shape that libp2p's own protocols expect ---

    async def read(self, n: int | None = None) -> bytes:
        """1 to n bytes (any number when n is None or negative); raises MuxedStreamEOF at the end."""
        if n == 0:
            return b""
        try:
            chunk = await self.receive(READ_BYTES if n is None or n < 0 else n)
        except Unreachable as error:
            raise MuxedStreamReset(str(error)) from error
        if not chunk:
            raise MuxedStreamEOF(f"stream {self.stream_id} has ended")
        return bytes(chunk)

    async def write(self, data: bytes) -> None:
        try:
            await self.send(data)
        except Unreachable as error:
            raise MuxedStreamReset(str(error)) from error

    def set_deadline(self, ttl: int) -> None:
        raise NotImplementedError("a deadline is a trio cancel scope around the call")

    def get_remote_address(self) -> tuple[str, int] | None:
        session = getattr(self.muxed_conn, "session", None)
        return session.get_remote_address() if session is not None else None

    async def __aenter__(self) -> YamuxStream:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        await self.close()


def _is_worth_keeping(payload: memoryview) -> bool:
    """Whether a view costs about what it shows: it holds on to the whole decrypted message that it lies in."""
    message = payload.obj
    return len(payload) >= _VIEW_BYTES_MIN and isinstance(message, bytes) and 2 * len(payload) >= len(message)
