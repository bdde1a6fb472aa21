"""hypercorn's HTTP connections on trio, with the bounds that its own accept loop lacks.

It does not know the application. Five things differ from `hypercorn.trio.serve` 0.18: sends are not shielded
from cancellation (a client that stops reading would keep the process alive for ever), connections are counted,
one whose client has gone ends at once (and not after the idle timeout), one whose handling fails ends alone, and
an application gets paths where a request's target was a whole URL.
"""

from __future__ import annotations

import errno
import logging
import socket
from typing import Any, cast
from urllib.parse import unquote

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ASGIFramework, ConnectionState

from kvasir_node.base.errors import UsageError
from kvasir_node.decide.rarely import Rarely
from kvasir_node.surfaces.address import Address

CONNECTIONS_MAX = 1024
BACKLOG = 128
IDLE_TIMEOUT_S = 30.0  # a kept-alive connection without a request

logger = logging.getLogger(__name__)


async def open_listeners(address: Address, flag: str = "--api") -> list[trio.SocketListener]:
    """Binds, for what the flag is about; a name with several addresses gets one listener each, unless any port will do.

    Raises UsageError that says why the address cannot be had.
    """
    try:
        listeners = list(await trio.open_tcp_listeners(address.port, host=address.host, backlog=BACKLOG))
    except (OSError, socket.gaierror) as error:
        in_use = error.errno == errno.EADDRINUSE
        another = f"choose another {flag}"
        remedy = f"is another node running? {another} HOST:PORT" if in_use else another
        reason = "the port is in use" if in_use else error.strerror or str(error)
        what = "the API" if flag == "--api" else f"the page of {flag}"
        raise UsageError(f"{what} cannot listen on {address.host}:{address.port}: {reason}; {remedy}") from error
    if address.port == 0:
        for surplus in listeners[1:]:
            await surplus.aclose()
        del listeners[1:]
    return listeners


def bound_address(listeners: list[trio.SocketListener]) -> Address:
    """The IP and the real port of the first one."""
    host, port = listeners[0].socket.getsockname()[:2]
    return Address(host, port)


def url_of(listeners: list[trio.SocketListener]) -> str:
    """A URL that works on this machine: the real port, and loopback where all interfaces are served."""
    bound = bound_address(listeners)
    return Address({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bound.host, bound.host), bound.port).url


async def serve_connections(
    app: ASGIFramework,
    listeners: list[trio.SocketListener],
    *,
    stop: trio.Event,
    grace_s: float,
    connections_max: int = CONNECTIONS_MAX,
) -> None:
    """Serves until `stop` is set; then accepts nothing more, and cuts what still runs after `grace_s`.

    Cancel-safety: cancelling cuts every connection at once. The listeners are closed in any case.
    """
    context = WorkerContext(None)
    hosted = _Hosted(app, context, connections_max)
    async with trio.open_nursery() as connections:
        async with trio.open_nursery() as accepting:
            for listener in listeners:
                accepting.start_soon(hosted.accept_on, listener, connections)
            await stop.wait()
            accepting.cancel_scope.cancel()
        await context.terminated.set()
        connections.cancel_scope.deadline = trio.current_time() + grace_s


class _Hosted:
    """What all connections share."""

    def __init__(self, app: ASGIFramework, context: WorkerContext, connections_max: int) -> None:
        self.app = ASGIWrapper(_taking_whole_urls(app))
        self.context = context
        self.config = Config()
        self.config.errorlog = logger
        self.config.keep_alive_timeout = IDLE_TIMEOUT_S
        self.config.include_server_header = False
        self.connections_max = connections_max
        self._refusal_lines = Rarely()
        self.connection_count = 0

    async def accept_on(self, listener: trio.SocketListener, connections: trio.Nursery) -> None:
        async with listener:
            await trio.serve_listeners(self.handle, [listener], handler_nursery=connections)

    async def handle(self, stream: trio.SocketStream) -> None:
        if self.connection_count >= self.connections_max:
            if self._refusal_lines.is_time(trio.current_time()):
                logger.warning("connections are refused: %d are open", self.connection_count)
            return
        self.connection_count += 1
        try:
            state = ConnectionState({})
            await _Connection(self.app, self.config, self.context, state, cast("Any", stream)).run()
        except Exception as error:  # one client's odd bytes must not end the server: hypercorn lets some through
            logger.warning("a connection ended with %s", type(error).__name__, exc_info=error)
        finally:
            self.connection_count -= 1


class _Connection(TCPServer):
    """hypercorn's connection with sends that can be cancelled; a cut send leaves half a frame, so it closes."""

    async def _read_data(self) -> None:
        """Its end leaves the idle timeout alone, so who connected and left at once held a place until then."""
        await super()._read_data()
        await self.idle_task.stop()

    async def protocol_send(self, event: Event) -> None:
        if not isinstance(event, RawData):
            await super().protocol_send(event)
            return
        try:
            async with self.send_lock:
                await self.stream.send_all(event.data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            await self.protocol.handle(Closed())
        except BaseException:
            await trio.aclose_forcefully(self.stream)
            raise


def _taking_whole_urls(app: ASGIFramework) -> ASGIFramework:
    async def call(scope: Any, receive: Any, send: Any) -> None:
        await app(_in_origin_form(scope), receive, send)

    return call


def _in_origin_form(scope: Any) -> Any:
    """A target may be a whole URL, as for a proxy; its authority counts then, whatever Host says (RFC 9112, 3.2.2)."""
    scheme, mark, rest = scope.get("raw_path", b"").partition(b"://")
    if not mark or scheme.lower() not in (b"http", b"https"):
        return scope
    authority, _, path = rest.partition(b"/")
    headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
    raw_path = b"/" + path
    new = {
        "raw_path": raw_path,
        "path": unquote(raw_path.decode("latin-1")),
        "headers": [*headers, (b"host", authority)],
    }
    return {**scope, **new}
