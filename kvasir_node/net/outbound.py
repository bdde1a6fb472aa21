"""TCP connections that leave from the port we listen on, so that a NAT maps both to the same outside port.

It does not know peers or what the connections are for. What others observe of such a connection is then an address at
which, once our router lets them in, they reach our listener. Where the kernel does not allow it (another connection
has the same two ends, or is just over) the connection leaves from any port; and where no answer comes: a router, or the
other end, may still hold one with the same ends that broke without a word.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import trio

from kvasir_node.decide.reach import is_lan

Bound = tuple[str, int]  # (IP, port) of a listener
HEADSTART_S = 1.5  # of the listener's port: a lost SYN is sent again after one second
_SOURCE_ERRORS = (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EINVAL, errno.EACCES, errno.EPERM)


async def connect_tcp(host: str, port: int, listeners: Sequence[Bound]) -> trio.SocketStream:
    """Connects, from a listener's port where that can be and a NAT may be between. A name's addresses are raced.

    In a LAN any port will do: two nodes that dial each other at the same moment from the ports that they dial would get
    one connection, of which both are the dialler.

    Raises OSError. Cancel-safety: a cancelled call leaves nothing open.
    """
    try:
        source = None if is_lan(host) else source_for(host, listeners)
    except ValueError:  # a name
        source = None
    if source is None:
        return await trio.open_tcp_stream(host, port)
    return await _race(partial(connect_from, source, host, port), partial(trio.open_tcp_stream, host, port))


async def _race(
    first: Callable[[], Awaitable[trio.SocketStream]], second: Callable[[], Awaitable[trio.SocketStream]]
) -> trio.SocketStream:
    """The second is tried once the first has failed by its port, or has had its time.

    Raises the OSError of the last. Cancel-safety: a cancelled call leaves nothing open.
    """
    won: list[trio.SocketStream] = []
    failed: list[OSError] = []
    is_over = trio.Event()

    async def attempt(connect: Callable[[], Awaitable[trio.SocketStream]], race: trio.CancelScope) -> None:
        try:
            won.append(await connect())
            race.cancel()
        except OSError as error:
            failed.append(error)
        is_over.set()

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(attempt, first, nursery.cancel_scope)
            with trio.move_on_after(HEADSTART_S):
                await is_over.wait()
            if not failed or _is_about_source(failed[0]):
                nursery.start_soon(attempt, second, nursery.cancel_scope)
        if not won:
            raise failed[-1]
        return won.pop()
    finally:
        for stream in won:
            stream.socket.close()


def source_for(host: str, listeners: Sequence[Bound]) -> Bound | None:
    """The listener from whose port this IP can be dialled: of its family, and both of this machine alone or neither.

    Raises ValueError when `host` is no IP.
    """
    target = ipaddress.ip_address(host)
    for bound in listeners:
        own = ipaddress.ip_address(bound[0])
        if own.version == target.version and (own.is_unspecified or own.is_loopback == target.is_loopback):
            return bound
    return None


async def connect_from(source: Bound, host: str, port: int) -> trio.SocketStream:
    """Connects to an IP from exactly this address and port. Raises OSError, as EADDRNOTAVAIL when that is taken.

    Cancel-safety: a cancelled call leaves nothing open.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = trio.socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "SO_REUSEPORT"):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        await sock.bind(source)
        await sock.connect((host, port))
    except BaseException:
        sock.close()
        raise
    return trio.SocketStream(sock)


def _is_about_source(error: OSError) -> bool:
    return error.errno in _SOURCE_ERRORS


def outward_host() -> str:
    """This machine's IPv4 address on the network through which it reaches others; 127.0.0.1 when there is none.

    Sends nothing: the kernel is asked which address it would use.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))  # RFC 5737: an address that nobody has
        except OSError:
            return "127.0.0.1"
        return str(sock.getsockname()[0])
