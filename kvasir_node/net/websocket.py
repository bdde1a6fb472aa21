"""A byte stream inside a WebSocket, for peers that have nothing else: web pages.

It does not know libp2p's handshakes, which run inside it, nor which connections are WebSockets: the listener tells
by their first bytes. Source: RFC 6455, spoken by wsproto; libp2p/specs websockets/README.md.

Nothing is gathered: the payload of a message is handed on as it comes, however long the message says it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import trio
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.exceptions import ConnectionClosedError
from wsproto import ConnectionType, WSConnection
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Event,
    Ping,
    RejectConnection,
    Request,
    TextMessage,
)
from wsproto.utilities import LocalProtocolError, RemoteProtocolError

from kvasir_node.net.raw_link import TcpStream

HEADERS_END = b"\r\n\r\n"
HTTP_START = b"GET "  # no other protocol of ours begins like this
HANDSHAKE_BYTES_MAX = 16 * 1024
MESSAGE_BYTES_MAX = 256 * 1024  # of ours; py-libp2p takes no more than 1 MiB in one


async def begins_as_http(tcp: TcpStream) -> bool:
    """Whether the peer speaks HTTP; what was read for that is given back. Cancel-safety: close afterwards."""
    return await tcp.begins_with(HTTP_START)


async def accept_websocket(tcp: TcpStream) -> WebSocketStream:
    """The server's half of the handshake. Raises ConnectionClosedError for anything that is no WebSocket request.

    Cancel-safety: only closing makes sense afterwards.
    """
    protocol = WSConnection(ConnectionType.SERVER)
    event, received = await _handshake_event(tcp, protocol)
    if not isinstance(event, Request):
        raise ConnectionClosedError(f"expected a WebSocket request, got {event!r:.80}")
    await tcp.write(protocol.send(AcceptConnection()))
    # A client should wait for that (RFC 6455, 4.1). wsproto drops what came with a request, and would take what comes
    # next, from the middle of a frame, for the beginning of one.
    protocol.receive_data(received.partition(HEADERS_END)[2])
    return WebSocketStream(tcp, protocol)


async def connect_websocket(tcp: TcpStream, host: str, port: int) -> WebSocketStream:
    """The client's half. Raises and is cancelled like `accept_websocket`."""
    protocol = WSConnection(ConnectionType.CLIENT)
    name = f"[{host}]" if ":" in host else host
    await tcp.write(protocol.send(Request(host=f"{name}:{port}", target="/")))
    event, _ = await _handshake_event(tcp, protocol)
    if isinstance(event, RejectConnection):
        raise ConnectionClosedError(f"the peer refused a WebSocket with HTTP status {event.status_code}")
    if not isinstance(event, AcceptConnection):
        raise ConnectionClosedError(f"expected a WebSocket's acceptance, got {event!r:.80}")
    return WebSocketStream(tcp, protocol)


async def _handshake_event(tcp: TcpStream, protocol: WSConnection) -> tuple[Event, bytes]:
    """The first event, and all that was received for it."""
    received = bytearray()
    while len(received) <= HANDSHAKE_BYTES_MAX:
        chunk = await tcp.read()
        if not chunk:
            raise ConnectionClosedError("the connection ended inside the WebSocket handshake")
        received += chunk
        for event in _events(protocol, chunk):
            return event, bytes(received)
    raise ConnectionClosedError(f"a WebSocket handshake of more than {HANDSHAKE_BYTES_MAX} bytes")


def _events(protocol: WSConnection, chunk: bytes) -> Iterable[Event]:
    try:
        protocol.receive_data(chunk)
        yield from protocol.events()
    except (RemoteProtocolError, LocalProtocolError, ValueError) as error:  # wsproto leaves bad text to the codecs
        raise ConnectionClosedError(f"not a WebSocket as it should be: {error}") from error


class WebSocketStream(ReadWriteCloser):
    """An established WebSocket, both ends alike. One task reads, one writes.

    Cancel-safety: a cancelled read loses nothing; after a cancelled write only closing makes sense.
    """

    def __init__(self, tcp: TcpStream, protocol: WSConnection) -> None:
        self._tcp = tcp
        self._protocol = protocol
        self._received: deque[memoryview] = deque()
        self._has_ended = False
        self._pong = b""  # the answer to the last ping goes with our next bytes: only the writer sends
        self._arrived(b"")  # what came with the handshake

    async def read(self, n: int | None = None) -> bytes:
        """1 to n bytes, b"" at the end."""
        while not self._received and not self._has_ended:
            chunk = await self._tcp.read()
            if not chunk:
                self._has_ended = True
            else:
                self._arrived(chunk)
        if not self._received:
            await trio.lowlevel.checkpoint()
            return b""
        first = self._received.popleft()
        if n is not None and len(first) > n:
            self._received.appendleft(first[n:])
            first = first[:n]
        return bytes(first)

    def _arrived(self, chunk: bytes) -> None:
        for event in _events(self._protocol, chunk):
            if isinstance(event, BytesMessage):
                if event.data:
                    self._received.append(memoryview(event.data))
            elif isinstance(event, Ping):
                self._pong = self._framed(event.response())
            elif isinstance(event, CloseConnection):
                self._has_ended = True
            elif isinstance(event, TextMessage):
                raise ConnectionClosedError("a WebSocket message of text; libp2p sends bytes alone")

    def _framed(self, event: Event) -> bytes:
        try:
            return self._protocol.send(event)
        except LocalProtocolError as error:
            raise ConnectionClosedError(f"the peer has closed the WebSocket: {error}") from error

    async def write(self, data: bytes) -> None:
        view = memoryview(data)
        for start in range(0, len(view), MESSAGE_BYTES_MAX):
            pong, self._pong = self._pong, b""
            message = self._framed(BytesMessage(data=bytes(view[start : start + MESSAGE_BYTES_MAX])))
            await self._tcp.send_all([pong, message])
        await trio.lowlevel.checkpoint()

    async def close(self) -> None:
        await self._tcp.close()

    def close_now(self) -> None:
        self._tcp.close_now()

    def get_remote_address(self) -> tuple[str, int] | None:
        return self._tcp.get_remote_address()
