"""Listening sockets: binding, accepting, and the addresses others can dial.

It does not know what a connection is for: each accepted socket goes to a callable.

libp2p's own TCP listener sets SO_REUSEPORT, so two nodes of one user would share a port and each get half of the
connections; ours refuses the second one. It sets it only once it listens: then our own dials may leave from the same
port (outbound.py), and another listener still may not have it.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence

import psutil
import trio
from libp2p.abc import IListener
from multiaddr import Multiaddr

from kvasir_node.base.errors import UsageError
from kvasir_node.net.listen_address import parse_listen_address

BACKLOG = 128


class TcpListener(IListener):
    """One bound address. It tells libp2p (identify) only concrete addresses."""

    def __init__(self, sock: trio.socket.SocketType) -> None:
        self._listener = trio.SocketListener(sock)
        self._bound = sock.getsockname()[:2]
        self._accepting: trio.CancelScope | None = None
        self._is_closed = False

    @property
    def bound(self) -> tuple[str, int]:
        """(IP, port)."""
        return self._bound

    def addresses(self) -> tuple[str, ...]:
        """Multiaddrs without a peer: 0.0.0.0 and :: become the addresses of all interfaces.

        Each is there twice, the second time for WebSockets, which come to the same port.
        """
        host, port = self._bound
        hosts = expand_host(host, _interface_hosts())
        plain = [f"/ip{6 if ':' in each else 4}/{each}/tcp/{port}" for each in hosts]
        return (*plain, *(f"{each}/ws" for each in plain))

    def get_addrs(self) -> tuple[Multiaddr, ...]:
        return tuple(Multiaddr(text) for text in self.addresses())

    async def listen(self, maddr: Multiaddr) -> None:
        raise NotImplementedError("this listener is bound already; serve it with `serve`")

    async def serve(self, handle: Callable[[trio.SocketStream], Awaitable[None]], handlers: trio.Nursery) -> None:
        """Accepts until the listener is closed; each connection is handled in a task of `handlers`.

        A process without a free descriptor waits for one.
        """
        try:
            async with trio.open_nursery() as accepting:
                self._accepting = accepting.cancel_scope
                await trio.serve_listeners(handle, [self._listener], handler_nursery=handlers)
        except* trio.ClosedResourceError:
            if not self._is_closed:
                raise

    async def close(self) -> None:
        self._is_closed = True
        if self._accepting is not None:
            self._accepting.cancel()
        await self._listener.aclose()


def expand_host(host: str, interfaces: Iterable[str]) -> list[str]:
    """A concrete host stands for itself; a wildcard for every usable interface address of its family."""
    address = ipaddress.ip_address(host)
    if not address.is_unspecified:
        return [host]
    same_family = {each for each in interfaces if ipaddress.ip_address(each).version == address.version}
    # Link-local IPv6 needs a zone that a multiaddr of ours does not carry.
    usable = [each for each in same_family if not (address.version == 6 and ipaddress.ip_address(each).is_link_local)]
    return sorted(usable, key=lambda each: (ipaddress.ip_address(each).is_loopback, each))


def _interface_hosts() -> list[str]:
    families = (socket.AF_INET, socket.AF_INET6)
    return [
        address.address.split("%")[0]
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family in families
    ]


async def bind_all(multiaddrs: Sequence[str]) -> list[TcpListener]:
    """Binds every address, or none of them. Raises UsageError naming the address and the remedy."""
    listeners: list[TcpListener] = []
    try:
        for text in multiaddrs:
            listeners.append(await _bind(text))  # noqa: PERF401  (those bound before a failure are closed below)
    except BaseException:
        for listener in listeners:
            await listener.close()
        raise
    return listeners


async def _bind(text: str) -> TcpListener:
    host, port = parse_listen_address(text)
    sock = trio.socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if ":" in host:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        await sock.bind((host, port))
        sock.listen(BACKLOG)
        if hasattr(socket, "SO_REUSEPORT"):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except OSError as error:
        sock.close()
        raise UsageError(_bind_failure(text, error), param="network.listen") from error
    except BaseException:  # cancelled while binding
        sock.close()
        raise
    return TcpListener(sock)


def _bind_failure(text: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"cannot listen on {text}: the port is in use; stop the other program or choose another with --listen"
    return f"cannot listen on {text}: {error.strerror}; choose an address of this machine with --listen"
