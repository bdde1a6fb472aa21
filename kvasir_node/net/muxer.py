"""A Yamux connection: one reader, one writer and one keepalive task over a Noise session.

It does not know addresses, dialling or which protocols its streams speak. Wire-compatible with "/yamux/1.0.0"
(hashicorp/yamux spec.md). What differs from py-libp2p's own muxer, and why it exists:

* Only synchronous code and the writer task touch the session, so a cancelled call on a stream can neither cut a
  message in two nor lose bytes. What the kernel takes at once is sent from the task that said it, without waking
  another; the rest is the writer's, and frames of all streams that have something to say go out in turns.
* What a peer may send is bounded and enforced: a stream's window starts at 256 KiB and grows only while the
  connection's sum stays under its limit; a peer that sends past its window is cut off.
* A reader that pauses is waited for; nothing is ever reset for slowness.
* A peer that falls silent is noticed: a ping each `keepalive_interval_s`, and `keepalive_timeout_s` to be heard.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import trio
from libp2p.abc import IMuxedConn, ISecureConn
from libp2p.connection_types import ConnectionType
from libp2p.exceptions import BaseLibp2pError
from libp2p.peer.id import ID
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable
from libp2p.stream_muxer.muxer_multistream import MuxerMultistream
from multiaddr import Multiaddr

from kvasir_node.base.errors import KvasirError, Misbehaved, Overloaded, RejectReason, Unreachable
from kvasir_node.base.settings import NetworkSettings
from kvasir_node.net.muxer_frames import (
    HEADER_BYTES,
    INITIAL_WINDOW_BYTES,
    Flag,
    Frame,
    FrameReader,
    FrameType,
    GoAway,
    pack,
)
from kvasir_node.net.muxer_stream import YamuxStream
from kvasir_node.net.noise_session import PLAINTEXT_BYTES_MAX, NoiseSession

YAMUX_PROTOCOL = "/yamux/1.0.0"
FRAME_PAYLOAD_BYTES = 2 * PLAINTEXT_BYTES_MAX  # a full frame fills two noise messages exactly, after its header's own
BATCH_BYTES_MIN = 64 * 1024  # sealed and sent together, where the connection is slower than we are ...
BATCH_BYTES_MAX = 256 * 1024  # ... and where it takes all at once: what a small call can be kept waiting by
LEAST_BYTES = 16 * 1024  # of each batch, for streams that others go before
CONTROL_FRAMES_MAX = 4096  # unsent answers to the peer; more means it asks and never reads
CLOSE_FLUSH_S = 0.5  # how long a closing connection tries to send what it still holds
FIRST_PINGS, FIRST_PINGS_INTERVAL_S = 4, 0.05  # a connection's very first round trip measures its set-up
PING_VALUES = 2**31  # of the keepalive; those of other pings are as many, above
OWN_STALL_S = 0.5  # a deadline that is noticed later than this was missed by us
FINISHED_LINGER_S = 30.0  # how long a stream that we finished may wait for the peer to finish it too

_log = logging.getLogger(__name__)
_SYN, _FIN, _RST = int(Flag.SYN), int(Flag.FIN), int(Flag.RST)  # tested for every frame, where an enum is slow
_DATA, _PING, _GO_AWAY = int(FrameType.DATA), int(FrameType.PING), int(FrameType.GO_AWAY)
_CONNECTION_ERRORS = (BaseLibp2pError, KvasirError, OSError, trio.BrokenResourceError, trio.ClosedResourceError)


class YamuxConnection(IMuxedConn):
    """One connection to one peer. `start` runs it; everything else may be called from any task of the loop."""

    def __init__(self, conn: ISecureConn, peer_id: ID, settings: NetworkSettings | None = None) -> None:
        self.peer_id = peer_id
        self.session = cast("NoiseSession", conn)
        self.event_started = trio.Event()
        self.rtt_s: float | None = None
        self.min_rtt_s = math.inf  # the shortest yet: without what was queued on the way
        self.end_reason: str | None = None
        self.is_punched = False  # through NATs from both sides at once: nobody can dial it again
        self.local_port = 0  # of a TCP connection that we dialled
        self.on_ended: Callable[[str], None] | None = None
        self._settings = settings or NetworkSettings()
        self._streams: dict[int, YamuxStream] = {}
        self._next_stream_id = 1 if conn.is_initiator else 2
        self._inbound_count = 0
        self._committed_bytes = 0  # granted to the peer or received and not yet read, over all streams
        self._accepted_in, self._accepted_out = trio.open_memory_channel[YamuxStream](self._settings.streams_max)
        self._control: list[bytes] = []
        self._lanes: tuple[deque[YamuxStream], ...] = (deque(), deque(), deque())  # by Lane: the first goes first
        self._batch_bytes = BATCH_BYTES_MAX
        self._closing = False
        self._is_running = False  # the writer task has begun
        self._is_writing = False  # the writer task waits for the connection to take what is sealed
        self._writer_lot = trio.lowlevel.ParkingLot()
        self._quiet_lot = trio.lowlevel.ParkingLot()
        self._heard = trio.Event()
        self._flushed = trio.Event()
        self._ended = trio.Event()
        self._scope: trio.CancelScope | None = None
        self._ping_value = 0
        self._asked: dict[int, trio.Event] = {}  # pings beside the keepalive, by their value
        self._asks = 0
        self._ping_sent_at = 0.0
        self._finished_at: dict[int, float] = {}

    # --- life ---

    async def start(self) -> None:
        """Runs until the connection ends. Never raises an Exception: in libp2p's nursery that would end the host."""
        try:
            async with trio.open_nursery() as nursery:
                self._scope = nursery.cancel_scope
                for loop in (self._read_loop, self._write_loop, self._keepalive_loop):
                    nursery.start_soon(self._guarded, loop)
                if self.end_reason is not None:
                    nursery.cancel_scope.cancel()
                self.event_started.set()
        finally:
            self._end("the network was shut down")
            await self._close_session()
            self._ended.set()

    async def _guarded(self, loop: Callable[[], Any]) -> None:
        try:
            await loop()
        except Misbehaved as error:
            _log.warning("peer %s misbehaved and is cut off: %s", self.peer_id, error)
            await self._send_goaway(GoAway.PROTOCOL_ERROR)
            self._end(str(error))
        except _CONNECTION_ERRORS as error:
            self._end(str(error) or type(error).__name__)
        except Exception as error:
            # Hostile bytes that find a bug of ours must cost this connection, not every other one on the host.
            _log.exception("bug in a connection to %s, which is closed", self.peer_id)
            self._end(f"internal error: {error!r}")

    async def _send_goaway(self, code: GoAway) -> None:
        """Says goodbye if the socket takes it at once; the writer task may hold it, then it goes unsaid."""
        self._control.append(pack(FrameType.GO_AWAY, Flag.NONE, 0, code))
        self._closing = True
        self._writer_lot.unpark_all()
        with trio.move_on_after(CLOSE_FLUSH_S):
            await self._flushed.wait()

    def _end(self, reason: str) -> None:
        if self.end_reason is not None:
            return
        self.end_reason = reason
        for stream in list(self._streams.values()):
            stream.fail(f"the connection to {self.peer_id} ended: {reason}", keep_received=True)
        self._streams.clear()
        self._quiet_lot.unpark_all()
        for answered in self._asked.values():
            answered.set()
        self._finished_at.clear()
        self._accepted_in.close()
        if self._scope is not None:
            self._scope.cancel()
        self.event_started.set()
        if self.on_ended is not None:
            self.on_ended(reason)

    async def _close_session(self) -> None:
        with trio.move_on_after(CLOSE_FLUSH_S) as closing:
            closing.shield = True
            try:
                await self.session.close()
            except _CONNECTION_ERRORS as error:
                _log.debug("closing the socket to %s: %s", self.peer_id, error)

    async def close(self, reason: str = "closed by us") -> None:
        """Sends what is queued (for CLOSE_FLUSH_S at most), then ends the connection.

        Cancel-safety: a cancelled close has ended the connection as well.
        """
        running = self.event_started.is_set() and self.end_reason is None
        try:
            if running:
                await self._send_goaway(GoAway.NORMAL)
        finally:
            self._end(reason)
        if not running and not self._ended.is_set():
            await self._close_session()
        elif running:
            await self._ended.wait()

    async def wait_ended(self) -> None:
        await self._ended.wait()

    @property
    def is_initiator(self) -> bool:
        return self.session.is_initiator

    @property
    def is_established(self) -> bool:
        return self.event_started.is_set() and self.end_reason is None

    @property
    def is_closed(self) -> bool:
        return self.end_reason is not None

    @property
    def stream_count(self) -> int:
        return len(self._streams)

    @property
    def buffered_bytes(self) -> int:
        """Upper bound of what the peer can make us hold at this moment."""
        return self._committed_bytes

    def get_transport_addresses(self) -> list[Multiaddr]:
        return self.session.get_transport_addresses()

    def get_connection_type(self) -> ConnectionType:
        return self.session.get_connection_type()

    def get_remote_address(self) -> tuple[str, int] | None:
        return self.session.get_remote_address()

    # --- streams ---

    async def open_stream(self) -> YamuxStream:
        """A new stream, usable at once. Raises MuxedConnUnavailable when the connection has ended."""
        try:
            return self.open_stream_now()
        except (Unreachable, Overloaded) as error:
            raise MuxedConnUnavailable(str(error)) from error

    def open_stream_now(self) -> YamuxStream:
        """Raises Unreachable when the connection has ended, Overloaded at `streams_max` of our own."""
        if self.end_reason is not None or self._closing:
            raise Unreachable(f"no stream to {self.peer_id}: the connection ended: {self.end_reason or 'closing'}")
        if len(self._streams) - self._inbound_count >= self._settings.streams_max:
            text = f"no more than {self._settings.streams_max} streams of ours to {self.peer_id} at once"
            raise Overloaded(f"{text}; close some or raise network.streams_max")
        stream = self._add_stream(self._next_stream_id)
        self._next_stream_id += 2
        self.queue_control(pack(FrameType.WINDOW_UPDATE, Flag.SYN, stream.stream_id, 0))
        return stream

    def _add_stream(self, stream_id: int) -> YamuxStream:
        is_inbound = self._is_inbound(stream_id)
        stream = YamuxStream(self, self, stream_id, self._settings.stream_window_bytes, is_inbound=is_inbound)
        self._streams[stream_id] = stream
        self._inbound_count += is_inbound
        return stream

    def _is_inbound(self, stream_id: int) -> bool:
        return stream_id % 2 != self._next_stream_id % 2

    async def accept_stream(self) -> YamuxStream:
        """The next stream that the peer opened. Raises MuxedConnUnavailable at the connection's end."""
        try:
            return await self._accepted_out.receive()
        except trio.EndOfChannel as error:
            raise MuxedConnUnavailable(f"connection closed: {self.end_reason}") from error

    async def wait_without_streams(self) -> None:
        """Until no stream is open, or the connection has ended."""
        while self._streams:
            await self._quiet_lot.park()

    # --- what streams ask for ---

    @property
    def window_spare_bytes(self) -> int:
        """What windows may still grow by. Half of the limit is kept for the first windows of new streams."""
        return self._settings.connection_buffer_bytes // 2 - self._committed_bytes

    def now(self) -> float:
        return trio.current_time()

    def count_committed(self, change_bytes: int) -> None:
        self._committed_bytes += change_bytes

    def queue_control(self, frame: bytes, *, can_wait: bool = False) -> None:
        """Queues a frame that goes before all data; one that can wait goes with the next frame of any kind."""
        if self.end_reason is None:
            self._control.append(frame)
            if not can_wait or len(self._control) > 1:
                self._pump()

    def schedule(self, stream: YamuxStream) -> None:
        self._lanes[stream.lane].append(stream)
        self._pump()

    @property
    def _has_frames(self) -> bool:
        quick, plain, yielding = self._lanes
        return bool(quick or plain or yielding)

    def sent_now(self, frame: list[bytes | memoryview]) -> bool:
        """Sends one data frame at once; False, and nothing is done, when anything else is or waits to be sent."""
        if self._has_frames or self._is_writing or not self._is_running or not self.session.can_write_now:
            return False
        if self._control:
            frame = [*self._control, *frame]
            self._control.clear()
        self._write_now(frame)
        return True

    def _write_now(self, batch: list[bytes | memoryview]) -> None:
        try:
            self.session.write_now(batch)
        except _CONNECTION_ERRORS as error:
            self._end(str(error) or type(error).__name__)
        else:
            if self._has_frames or self.session.has_unsent:
                self._writer_lot.unpark_all()

    def _pump(self) -> None:
        """Sends one batch from the task that calls, if nothing is waiting to be sent; else the writer will."""
        if self._is_writing or not self._is_running or not self.session.can_write_now:
            self._writer_lot.unpark_all()
            return
        batch = self._next_batch()
        if batch:
            self._write_now(batch)

    def forget(self, stream: YamuxStream) -> None:
        if self._streams.pop(stream.stream_id, None) is not None:
            self._inbound_count -= self._is_inbound(stream.stream_id)
            self._finished_at.pop(stream.stream_id, None)
        if not self._streams:
            self._quiet_lot.unpark_all()

    # --- the writer ---

    async def _write_loop(self) -> None:
        self._is_running = True
        while True:
            batch: list[bytes | memoryview] = [] if self.session.has_unsent else self._next_batch()
            if batch:
                self.session.write_now(batch)
            if self.session.has_unsent:
                self._batch_bytes = BATCH_BYTES_MIN
                self._is_writing = True
                await self.session.flush()
                self._is_writing = False
            elif batch:
                self._batch_bytes = min(BATCH_BYTES_MAX, 2 * self._batch_bytes)
                await trio.lowlevel.checkpoint()  # else a connection that takes everything would stop all other tasks
            else:
                if self._closing:
                    self._flushed.set()
                await self._writer_lot.park()

    def _next_batch(self) -> list[bytes | memoryview]:
        """Control frames, then frames of the streams, lane after lane and in turns, until the batch is full."""
        batch: list[bytes | memoryview] = [*self._control]
        self._control.clear()
        left_bytes = self._batch_bytes
        for lane in self._lanes:
            left_bytes = max(left_bytes, LEAST_BYTES)
            while lane and left_bytes > 0:
                stream = lane.popleft()
                frame = stream.next_frame(min(FRAME_PAYLOAD_BYTES, left_bytes))
                left_bytes -= sum([len(part) for part in frame])
                batch += frame
                if stream.scheduled:
                    self._lanes[stream.lane].append(stream)
        return batch

    # --- the reader ---

    async def _read_loop(self) -> None:
        reader = FrameReader()
        target: YamuxStream | None = None
        while True:
            chunks = await self.session.read_chunks()
            self._heard.set()
            for chunk in chunks:
                stream_id = reader.whole_data_frame(chunk)
                if stream_id is not None:
                    self._message_arrived(stream_id, memoryview(chunk)[HEADER_BYTES:])
                    continue
                for frame, payload, complete in reader.feed(chunk):
                    if payload is None:
                        target = self._frame_began(frame)
                    elif target is not None:
                        target.data_arrived(payload)
                    if complete and target is not None:
                        self._apply_end_flags(target, frame.flags)
            if len(self._control) > CONTROL_FRAMES_MAX:
                text = f"{len(self._control)} answers wait for {self.peer_id}, which asks and does not read"
                raise Misbehaved(RejectReason.TOO_MANY, text)

    def _frame_began(self, frame: Frame) -> YamuxStream | None:
        """Handles a header; the stream that its payload and end flags belong to, None when there is none."""
        if frame.type == _PING:
            self._ping_arrived(frame)
            return None
        if frame.type == _GO_AWAY:
            raise Unreachable(f"the peer said goodbye (code {frame.length})")
        if frame.flags & _SYN:
            self._open_arrived(frame.stream_id)
        stream = self._streams.get(frame.stream_id)
        if stream is None:
            return None
        accepted = stream.data_announced(frame.length) if frame.type == _DATA else stream.window_granted(frame.length)
        if not accepted:
            raise _overrun(frame.stream_id, frame.length)
        return stream

    def _message_arrived(self, stream_id: int, payload: memoryview) -> None:
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        if not stream.data_announced(len(payload)):
            raise _overrun(stream_id, len(payload))
        stream.data_arrived(payload)

    def _open_arrived(self, stream_id: int) -> None:
        if stream_id == 0 or not self._is_inbound(stream_id) or stream_id in self._streams:
            text = f"a peer cannot open stream {stream_id}: zero, ours to number, or open already"
            raise Misbehaved(RejectReason.BAD_FRAME, text)
        full = self._inbound_count >= self._settings.streams_max
        if full or self._committed_bytes + INITIAL_WINDOW_BYTES > self._settings.connection_buffer_bytes:
            self.queue_control(pack(FrameType.WINDOW_UPDATE, Flag.RST, stream_id, 0))
            return
        stream = self._add_stream(stream_id)
        try:
            self._accepted_in.send_nowait(stream)
        except trio.WouldBlock:
            stream.reset_now("opened faster than accepted")
            return
        self.queue_control(pack(FrameType.WINDOW_UPDATE, Flag.ACK, stream_id, 0))

    def _apply_end_flags(self, stream: YamuxStream, flags: int) -> None:
        if flags & _RST:
            stream.fail(f"stream {stream.stream_id} was reset by {self.peer_id}", keep_received=False)
            self.forget(stream)
        elif flags & _FIN:
            stream.remote_closed()

    # --- keepalive ---

    def _ping_arrived(self, frame: Frame) -> None:
        if frame.flags & _SYN:
            self.queue_control(pack(FrameType.PING, Flag.ACK, 0, frame.length))
        elif frame.length == self._ping_value:
            self.rtt_s = trio.current_time() - self._ping_sent_at
            self.min_rtt_s = min(self.min_rtt_s, self.rtt_s)
        elif frame.length in self._asked:
            self._asked[frame.length].set()

    async def ping(self) -> float:
        """Seconds there and back, now. Raises Unreachable when the connection ends before it is answered.

        Cancel-safety: a cancelled call leaves nothing.
        """
        self._asks += 1
        value = PING_VALUES + self._asks % PING_VALUES
        answered = self._asked[value] = trio.Event()
        asked_at = trio.current_time()
        try:
            if self.end_reason is None:
                self.queue_control(pack(FrameType.PING, Flag.SYN, 0, value))
                await answered.wait()
        finally:
            del self._asked[value]
        if self.end_reason is not None:
            raise Unreachable(f"the connection to {self.peer_id} ended: {self.end_reason}")
        return trio.current_time() - asked_at

    async def _keepalive_loop(self) -> None:
        """Any byte from the peer counts as life; the longest unnoticed silence is interval + timeout."""
        interval_s = self._settings.keepalive_interval_s
        while True:
            self._ping_value = (self._ping_value + 1) % PING_VALUES
            self._ping_sent_at = trio.current_time()
            self._heard = trio.Event()
            self.queue_control(pack(FrameType.PING, Flag.SYN, 0, self._ping_value))
            with trio.move_on_after(self._settings.keepalive_timeout_s) as waiting:
                await self._heard.wait()
            if waiting.cancelled_caught:
                if trio.current_time() - waiting.deadline >= OWN_STALL_S:
                    continue  # it was this process that slept or was stopped: what came meanwhile is not read yet
                raise Unreachable(f"nothing heard for {self._settings.keepalive_timeout_s:g} s after a ping")
            early = self._ping_value < FIRST_PINGS
            await trio.sleep(min(interval_s, FIRST_PINGS_INTERVAL_S) if early else interval_s)
            self._reset_lingering()

    def _reset_lingering(self) -> None:
        now = trio.current_time()
        for stream_id, stream in list(self._streams.items()):
            if stream.finished and now - self._finished_at.setdefault(stream_id, now) >= FINISHED_LINGER_S:
                stream.reset_now("finished by us long ago, never by the peer")


def _overrun(stream_id: int, length: int) -> Misbehaved:
    text = f"frame of {length} bytes on stream {stream_id} overruns its window"
    return Misbehaved(RejectReason.TOO_LARGE, text)


class YamuxNegotiator(MuxerMultistream):
    """Agrees on "/yamux/1.0.0" and builds our connection for it.

    The one documented place where libp2p's choice of class is replaced: its own `new_conn` builds the stock Yamux
    for this id whatever class was registered. Put in as `swarm.upgrader.muxer_multistream`.
    """

    def __init__(self, settings: NetworkSettings, negotiate_timeout_s: int) -> None:
        super().__init__(cast("Any", {YAMUX_PROTOCOL: YamuxConnection}), negotiate_timeout_s)
        self._settings = settings

    async def new_conn(self, conn: ISecureConn, peer_id: ID) -> IMuxedConn:
        protocol, _ = await self._selector.select(cast("Any", conn), conn.is_initiator, self.negotiate_timeout)
        return self._annotate_connection(YamuxConnection(conn, peer_id, self._settings), conn, protocol)
