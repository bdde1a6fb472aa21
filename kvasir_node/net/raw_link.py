"""How a session's bytes reach the wire: at once from the caller's own task where the kernel takes them, else waiting.

It does not know encryption or frames. A socket of ours (`TcpStream`) does both; any other raw connection of libp2p
only waits.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from typing import Protocol

import trio
from libp2p.abc import IRawConnection
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.exceptions import ConnectionClosedError

Buffer = bytes | bytearray | memoryview
HANDSHAKE_READ_BYTES = 64 * 1024
UNSENT_BYTES = 64 * 1024  # that the kernel may hold: more cost a wake-up less each MB, and a small call some waiting
PARTS_MAX = 512  # of one send; the kernel takes 1024


def size_of(parts: Sequence[Buffer]) -> int:
    return sum([len(part) for part in parts])


class RawLink(Protocol):
    """Both directions of a raw connection. One task receives; sends never overlap."""

    @property
    def sends_now(self) -> bool:
        """Whether `send_now` can ever send."""
        ...

    def send_now(self, parts: list[Buffer]) -> list[Buffer]:
        """Sends what is taken without waiting; returns the rest. Raises ConnectionClosedError."""
        ...

    async def send_all(self, parts: list[Buffer]) -> None:
        """Cancel-safety: a part may have been sent, nobody knows how much; only closing makes sense then."""
        ...

    async def receive_into(self, buffer: memoryview) -> int:
        """At least one byte into `buffer`; 0 at the end. Cancel-safety: loses nothing."""
        ...


class LinkedStream(ReadWriteCloser):
    """A connection as libp2p's handshake wants it that is a RawLink, too."""

    sends_now: bool

    def send_now(self, parts: list[Buffer]) -> list[Buffer]:
        raise NotImplementedError

    async def send_all(self, parts: list[Buffer]) -> None:
        raise NotImplementedError

    async def receive_into(self, buffer: memoryview) -> int:
        raise NotImplementedError


class TcpStream(LinkedStream):
    """A connected TCP socket, as libp2p's ReadWriteCloser and as a RawLink.

    It takes the socket out of trio's stream: trio's own `send` and `recv` cannot be called without a checkpoint, and
    each checkpoint is a pass of the scheduler.
    """

    sends_now = True

    def __init__(self, stream: trio.SocketStream) -> None:
        self._socket = socket.socket(fileno=stream.socket.detach())
        self._socket.setblocking(False)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # where trio sets 16 KiB
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        self._remote_address = self._peer_name()
        self._unread = b""
        self._is_drained = True  # the last receive got less than it had room for: the next one has to wait

    @property
    def local_port(self) -> int:
        """0 when it is closed."""
        return int(self._socket.getsockname()[1]) if self._socket.fileno() >= 0 else 0

    def _peer_name(self) -> tuple[str, int] | None:
        try:
            host, port, *_ = self._socket.getpeername()
        except OSError:
            return None
        return str(host), int(port)

    def send_now(self, parts: list[Buffer]) -> list[Buffer]:
        while parts:
            batch = parts[:PARTS_MAX]
            try:
                sent = self._socket.sendmsg(batch)
            except BlockingIOError:
                return parts
            except OSError as error:
                raise ConnectionClosedError(f"the connection broke: {error.strerror or error}") from error
            if sent < size_of(batch):
                return without(parts, sent)
            parts = parts[PARTS_MAX:]
        return parts

    async def send_all(self, parts: list[Buffer]) -> None:
        rest = self.send_now(parts)
        while rest:
            try:
                await trio.lowlevel.wait_writable(self._socket.fileno())
            except (trio.ClosedResourceError, OSError) as error:
                raise ConnectionClosedError("the connection was closed by us") from error
            rest = self.send_now(rest)

    async def receive_into(self, buffer: memoryview) -> int:
        if self._socket.fileno() < 0:
            raise ConnectionClosedError("the connection was closed by us")
        if self._unread:
            taken, self._unread = self._unread[: len(buffer)], self._unread[len(buffer) :]
            buffer[: len(taken)] = taken
            return len(taken)
        if not self._is_drained:
            await trio.lowlevel.checkpoint()  # else a fast peer would keep every other task from running
        while True:
            try:
                if self._is_drained:
                    await trio.lowlevel.wait_readable(self._socket.fileno())
                count = self._socket.recv_into(buffer)
            except BlockingIOError:
                self._is_drained = True
                continue
            except trio.ClosedResourceError as error:
                raise ConnectionClosedError("the connection was closed by us") from error
            except OSError as error:
                raise ConnectionClosedError(f"the connection broke: {error.strerror or error}") from error
            self._is_drained = count < len(buffer)
            return count

    # --- the shape that libp2p's handshake expects ---

    def unread(self, data: bytes) -> None:
        """Gives bytes back that the next receive shall see first."""
        self._unread = data + self._unread

    async def read(self, n: int | None = None) -> bytes:
        """1 to n bytes, b"" at the end."""
        buffer = bytearray(HANDSHAKE_READ_BYTES if n is None else min(n, HANDSHAKE_READ_BYTES))
        count = await self.receive_into(memoryview(buffer)) if buffer else 0
        return bytes(buffer[:count])

    async def write(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        await self.send_all([data])

    async def begins_with(self, start: bytes) -> bool:
        """Whether the peer's first bytes are these; what was read is given back. Cancel-safety: close afterwards."""
        first = b""
        while len(first) < len(start) and start.startswith(first):
            chunk = await self.read()
            if not chunk:
                break
            first += chunk
        self.unread(first)
        return first.startswith(start)

    @property
    def unread_bytes(self) -> int:
        """What was given back and not received again."""
        return len(self._unread)

    def detach(self) -> socket.socket:
        """The socket, blocking, for a thread; this object is closed then, and what is unread is lost."""
        trio.lowlevel.notify_closing(self._socket.fileno())
        sock = socket.socket(fileno=self._socket.detach())
        sock.setblocking(True)
        return sock

    def moved(self) -> TcpStream:
        """The same connection, and what was given back to it, as a new object; this one is closed then."""
        moved = TcpStream(trio.SocketStream(trio.socket.from_stdlib_socket(self.detach())))
        moved.unread(self._unread)
        self._unread = b""
        return moved

    async def close(self) -> None:
        self.close_now()
        await trio.lowlevel.checkpoint()

    def abort(self) -> None:
        """Closes with a reset, so that the two ends' ports can be connected again at once."""
        if self._socket.fileno() >= 0:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_now()

    def close_now(self) -> None:
        if self._socket.fileno() >= 0:
            trio.lowlevel.notify_closing(self._socket.fileno())
            self._socket.close()

    def get_remote_address(self) -> tuple[str, int] | None:
        return self._remote_address


def without(parts: list[Buffer], count: int) -> list[Buffer]:
    """The parts after their first `count` bytes."""
    for index, part in enumerate(parts):
        if count < len(part):
            return [memoryview(part)[count:], *parts[index + 1 :]]
        count -= len(part)
    return []


class _WaitingLink:
    """A RawLink over any raw connection, which it asks for no more than libp2p promises."""

    sends_now = False

    def __init__(self, raw: IRawConnection) -> None:
        self._raw = raw
        self._received = memoryview(b"")

    def send_now(self, parts: list[Buffer]) -> list[Buffer]:
        return parts

    async def send_all(self, parts: list[Buffer]) -> None:
        await self._raw.write(b"".join(parts))

    async def receive_into(self, buffer: memoryview) -> int:
        if not self._received:
            self._received = memoryview(await self._raw.read(len(buffer)))
        taken = self._received[: len(buffer)]
        buffer[: len(taken)] = taken
        self._received = self._received[len(taken) :]
        return len(taken)


def link_of(raw: IRawConnection) -> RawLink:
    """The quickest way to a raw connection's bytes."""
    stream = getattr(raw, "stream", None)
    return stream if isinstance(stream, LinkedStream) else _WaitingLink(raw)
