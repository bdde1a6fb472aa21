"""An express channel: a TCP connection of its own between two peers, written and read by the thread that computes.

It does not know trio, streams, how two peers agree on it (express_door.py) or what its frames mean. A call over a
stream wakes the loop twice at each end; here a thread makes one system call to send a frame, and one to receive it, or
two if it has to wait.

Layout of a frame, little-endian: u32 length, then as many bytes sealed with AES-256-GCM: u64 call id, body. Each
direction has a key of its own, and its n-th frame the nonce n, so nothing can be left out, repeated or put elsewhere.
AES-256-GCM, not the ChaCha20-Poly1305 of Noise: 32 KiB took 3.7 µs to seal and 3.4 µs to open against 11.2 and 10.1
(2026-11-29, one core of an x86-64 with AES instructions, cryptography 50).
"""

from __future__ import annotations

import math
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvasir_node.base.errors import CallTimeout, KvasirError, Misbehaved, RejectReason, Unreachable, UsageError
from kvasir_node.base.ids import PeerId
from kvasir_node.decide.spinning import Spinning
from kvasir_node.net.arrival_stamps import STAMP_ROOM, ask_for_stamps, stamp_age_s
from kvasir_node.net.raw_link import Buffer, size_of, without
from kvasir_node.net.rpc_frames import decode_error, encode_error

KEPT_BYTES = 256 * 1024  # of the buffer that is received into; it grows for a larger frame, and shrinks after it
SEND_BUFFER_BYTES = 1024 * 1024  # asked of the kernel, so that a large frame is sent without waiting
KEEPALIVE_S = 5  # a connection on which nothing was heard for so long is probed, each second ...
KEEPALIVE_PROBES = 5  # ... this often
ECHO = 0  # the call id of a frame whose body comes back as it is
UNACKNOWLEDGED_S = 10  # a peer that does not take what was sent for so long is gone
LENGTH = struct.Struct("<I")
TAG_BYTES = 16
_CALL_ID = struct.Struct("<Q")
_NONCE = struct.Struct("<4xQ")
_OVERHEAD_BYTES = _CALL_ID.size + TAG_BYTES
_ANSWER = bytes(4)  # four, so that the arrays of an answer stay aligned


class DirectionKey:
    """Seals, or opens, the messages of one direction, each under the next nonce."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)
        self._count = 0

    def seal(self, plaintext: Buffer) -> bytes:
        self._count += 1
        return self._cipher.encrypt(_NONCE.pack(self._count - 1), plaintext, None)

    def open(self, sealed: Buffer) -> bytearray:
        """Raises Misbehaved for anything but the next message of this direction, as it was sealed."""
        plaintext = bytearray(len(sealed) - TAG_BYTES)
        try:
            self._cipher.decrypt_into(_NONCE.pack(self._count), sealed, None, plaintext)
        except InvalidTag as error:
            text = f"message {self._count} of {len(sealed)} bytes is not what was sealed"
            raise Misbehaved(RejectReason.BAD_FRAME, text) from error
        self._count += 1
        return plaintext


class ExpressChannel:
    """See the module. One thread at a time sends or receives; a second one waits for it. `close` never waits.

    However it ends, it ends for good: every later call raises Unreachable with `end_reason`.
    """

    def __init__(
        self,
        sock: socket.socket,
        peer: PeerId,
        sending: DirectionKey,
        receiving: DirectionKey,
        *,
        body_bytes_max: int,
        clock: Callable[[], float] = time.monotonic,
        spinning: Spinning | None = None,
    ) -> None:
        """Takes a connected TCP socket over."""
        _prepare(sock)
        self.peer = peer
        self.end_reason: str | None = None
        self.bytes_in = 0
        self.bytes_out = 0
        self.arrived_at: float | None = None  # by `clock`: the newest bytes received; None = nobody says
        self._socket = sock
        self._sending = sending
        self._receiving = receiving
        self._body_bytes_max = body_bytes_max
        self._clock = clock
        self._buffer = memoryview(bytearray(KEPT_BYTES))
        self._start = self._end = 0  # of what was received and not opened
        self._is_drained = True  # the last receive left nothing behind, so the next one has to wait, as a rule
        self._using = threading.Lock()  # held by the thread that sends or receives
        self._ending = threading.Lock()  # held while the descriptor is shut down or closed
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._polled = select.POLLIN  # what it looks for
        self._spinning = spinning or Spinning(allowed=not _gives_way())

    @property
    def is_closed(self) -> bool:
        return self.end_reason is not None

    def close(self, reason: str = "closed by us") -> None:
        """Ends the channel, from any thread; one that waits in `receive` or `send` wakes up and gets Unreachable."""
        with self._ending:
            if self.end_reason is None:
                self.end_reason = reason
                with suppress(OSError):  # the peer was quicker
                    self._socket.shutdown(socket.SHUT_RDWR)
        self._free_descriptor()

    def _free_descriptor(self) -> None:
        """Unless a thread uses it, which does this when it has done: the number could be another file's by then."""
        if self._using.acquire(blocking=False):
            with self._ending:
                self._socket.close()
            self._using.release()

    def _leave(self) -> None:
        self._using.release()
        if self.end_reason is not None:
            self._free_descriptor()

    # --- sending ---

    def send(self, call_id: int, parts: Sequence[Buffer], timeout_s: float) -> None:
        """Sends one frame; the parts may change afterwards.

        Raises CallTimeout when the kernel does not take all of it in time: the channel is closed then, as it ends
        inside a frame. Raises Unreachable; Misbehaved for what the peer sent meanwhile; UsageError for a body too
        large, which costs nothing else.
        """
        size = size_of(parts)
        if size > self._body_bytes_max:
            raise UsageError(f"a body of {size} bytes; at most {self._body_bytes_max} may be sent in one frame")
        self._using.acquire()
        try:
            self._check_open()
            sealed = self._sending.seal(b"".join((_CALL_ID.pack(call_id), *parts)))
            self._send_all([LENGTH.pack(len(sealed)), sealed], timeout_s)
        finally:
            self._leave()

    def _send_all(self, unsent: list[Buffer], timeout_s: float) -> None:
        until: float | None = None
        while unsent := self._sent(unsent):
            now = self._clock()
            until = now + timeout_s if until is None else until
            if now >= until:
                self.close(f"a frame was not taken in {timeout_s:.3g} s")
                raise CallTimeout(f"{self.peer} did not take {size_of(unsent)} bytes of a frame in {timeout_s:.3g} s")
            # Two peers that both send more than the kernel holds would wait for each other for ever.
            events = select.POLLOUT | (select.POLLIN if self._make_room() else 0)
            if self._ready(events, until - now) & select.POLLIN:
                self._receive_some()

    def _sent(self, unsent: list[Buffer]) -> list[Buffer]:
        """What is left of it after one system call."""
        try:
            count = self._socket.sendmsg(unsent, (), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return unsent
        except OSError as error:
            raise self._broken(error) from error
        self.bytes_out += count
        return without(unsent, count)

    # --- receiving ---

    def receive(self, timeout_s: float) -> tuple[int, memoryview] | None:
        """The call id and body of the next frame; None when none is complete within the time, and nothing is lost.

        It costs two system calls, to wait and to receive, and none when the frame came with the last one; where frames
        usually come within a moment, it spins and does not sleep. The body is writable and the caller's own;
        it begins at a multiple of eight. `math.inf` waits for ever.
        Raises Unreachable at the end, and Misbehaved, closed, for anything the peer did not seal as the next frame.
        """
        self._using.acquire()
        try:
            self._check_open()
            return self._receive(timeout_s)
        finally:
            self._leave()

    def _receive(self, timeout_s: float) -> tuple[int, memoryview] | None:
        began_at = self._clock()
        until = began_at + timeout_s
        while (frame := self._next_frame()) is None:
            if timeout_s > 0 and self._is_drained:  # to ask first takes 1 µs, to find nothing 3
                left_s = until - self._clock()
                is_there = left_s > 0 and (self._spin(left_s) or self._sleep(until - self._clock()))
                self._spinning.waited(self._clock() - began_at if is_there else timeout_s, came=is_there)
                if not is_there:
                    return None
            self._make_room()
            if not self._receive_some() and timeout_s <= 0:
                return None
        return frame

    def receive_now(self) -> tuple[int, memoryview] | None:
        """As `receive`, without waiting, so one system call: for a frame that is probably there."""
        return self.receive(0.0)

    def _next_frame(self) -> tuple[int, memoryview] | None:
        length = self._next_length()
        end = self._start + LENGTH.size + length
        if not length or self._end < end:
            return None
        try:
            plaintext = self._receiving.open(self._buffer[self._start + LENGTH.size : end])
        except Misbehaved as error:
            self.close(str(error))
            raise
        self._start = end
        (call_id,) = _CALL_ID.unpack_from(plaintext)
        return call_id, memoryview(plaintext)[_CALL_ID.size :]

    def _next_length(self) -> int:
        """Of the frame that begins what was received; 0 while it is not known. Raises Misbehaved, closed."""
        if self._end - self._start < LENGTH.size:
            return 0
        (length,) = LENGTH.unpack_from(self._buffer, self._start)
        if _OVERHEAD_BYTES <= length <= _OVERHEAD_BYTES + self._body_bytes_max:
            return length
        text = f"a frame of {length} bytes; at most {_OVERHEAD_BYTES + self._body_bytes_max} are taken"
        self.close(text)
        raise Misbehaved(RejectReason.TOO_LARGE if length > _OVERHEAD_BYTES else RejectReason.BAD_FRAME, text)

    def _make_room(self) -> bool:
        """Whether more can be received: always, but while a frame is complete and fills the buffer."""
        held, size = self._end - self._start, len(self._buffer)
        if held and self._end < size:
            return True
        if not held:
            size = KEPT_BYTES
        elif not self._start:
            needed = LENGTH.size + self._next_length()
            if needed <= size:
                return False
            size = min(2 * size, needed)  # it grows with what really came: a length that is only claimed takes nothing
        if held or size != len(self._buffer):
            buffer = memoryview(bytearray(size))
            buffer[:held] = self._buffer[self._start : self._end]
            self._buffer = buffer
        self._start, self._end = 0, held
        return True

    def _receive_some(self) -> bool:
        """Whether anything was there."""
        room = self._buffer[self._end :]
        try:
            count, ancillary, _, _ = self._socket.recvmsg_into([room], STAMP_ROOM, socket.MSG_DONTWAIT)
        except BlockingIOError:
            self._is_drained = True
            return False
        except OSError as error:
            raise self._broken(error) from error
        if not count:
            self.close("the peer closed the connection")
            self._check_open()
        age_s = stamp_age_s(ancillary)
        self.arrived_at = None if age_s is None else self._clock() - age_s
        self._is_drained = count < len(room)
        self.bytes_in += count
        self._end += count
        return True

    # --- both ---

    def echo_s(self, size: int, timeout_s: float) -> float:
        """How long a frame of so many bytes takes to the other end and back, where nothing is computed for it.

        Nobody else may wait for an answer. Raises CallTimeout after timeout_s, closed, as an answer may be under way;
        Unreachable and Misbehaved as above.
        """
        began_at = self._clock()
        self.send(ECHO, (bytes(size),), timeout_s)
        until = began_at + timeout_s
        while (left_s := until - self._clock()) > 0:
            frame = self.receive(left_s)
            if frame is not None and frame[0] == ECHO:
                return self._clock() - began_at
        self.close(f"{size} bytes did not come back in {timeout_s:.3g} s")
        raise CallTimeout(f"{self.peer} did not send {size} bytes back in {timeout_s:.3g} s")

    def _spin(self, left_s: float) -> bool:
        """Whether something came, or the end, while it was looked for without sleeping; perhaps for no time at all."""
        began_at = self._clock()
        spin_s = min(left_s, self._spinning.spin_s(began_at))
        if spin_s <= 0:
            return False
        began_s, until = time.thread_time(), began_at + spin_s
        while not (found := self._ready(select.POLLIN, 0.0)) and self._clock() < until:
            pass
        ended_at = self._clock()
        self._spinning.spun(ended_at - began_at, time.thread_time() - began_s, ended_at)
        return bool(found)

    def _sleep(self, left_s: float) -> bool:
        """Whether something came, or the end, within what a spin has left of the time: perhaps nothing."""
        return left_s > 0 and self._ready(select.POLLIN, left_s) != 0

    def _ready(self, events: int, timeout_s: float) -> int:
        """Which of the events, or the end, came within the time; 0 for none."""
        if events != self._polled:
            self._poll.modify(self._socket, events)
            self._polled = events
        ready = self._poll.poll(None if timeout_s == math.inf else timeout_s * 1000)
        return ready[0][1] if ready else 0

    def _check_open(self) -> None:
        if self.end_reason is not None:
            raise Unreachable(f"the express channel to {self.peer} has ended: {self.end_reason}")

    def _broken(self, error: OSError) -> Unreachable:
        self.close(f"the connection broke: {error.strerror or error}")
        return Unreachable(f"the express channel to {self.peer} has ended: {self.end_reason}")


def _gives_way() -> bool:
    """Whether this process was told to give way to others of this machine, as `worker.niceness` does."""
    return hasattr(os, "getpriority") and os.getpriority(os.PRIO_PROCESS, 0) > 0


def _prepare(sock: socket.socket) -> None:
    sock.setblocking(True)
    ask_for_stamps(sock)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {  # where they are known
        "TCP_KEEPIDLE": KEEPALIVE_S,
        "TCP_KEEPINTVL": 1,
        "TCP_KEEPCNT": KEEPALIVE_PROBES,
        "TCP_USER_TIMEOUT": UNACKNOWLEDGED_S * 1000,
        "TCP_NOTSENT_LOWAT": SEND_BUFFER_BYTES,  # trio sets 16 KiB, and no more would be taken at once
    }
    for name, value in options.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


# What an answer's body is --------------------------------------------------------------------------------------


def answer_body(result: Sequence[Buffer] | KvasirError) -> list[Buffer]:
    """The parts of the frame that answers a call: four zero bytes and the result, or an error as in an ERROR frame."""
    return [encode_error(result)] if isinstance(result, KvasirError) else [_ANSWER, *result]


def result_of(body: memoryview) -> memoryview | KvasirError:
    """What `answer_body` was made of. Raises Misbehaved when it is neither."""
    return body[len(_ANSWER) :] if body[: len(_ANSWER)] == _ANSWER else decode_error(body)
