"""Which multiaddrs can be listened on. It does not bind anything, nor load libp2p."""

from __future__ import annotations

from ipaddress import ip_address

from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from kvasir_node.base.errors import UsageError


def parse_listen_address(text: str) -> tuple[str, int]:
    """(IP, port) of /ip4/IP/tcp/PORT or /ip6/IP/tcp/PORT; raises UsageError for anything else."""
    try:
        parts = [(protocol.name, str(value)) for protocol, value in Multiaddr(text).items()]
    except (MultiaddrError, ValueError, TypeError, KeyError) as error:
        raise UsageError(f"not a multiaddr to listen on: {text[:200]!r} ({error})", param="network.listen") from error
    if len(parts) != 2 or parts[0][0] not in ("ip4", "ip6") or parts[1][0] != "tcp":
        text = f"a listen address is /ip4/IP/tcp/PORT or /ip6/IP/tcp/PORT; got {text[:200]}"
        raise UsageError(text, param="network.listen")
    return parts[0][1], int(parts[1][1])


def is_loopback(text: str) -> bool:
    """Whether nobody but this machine can reach a listen address; raises UsageError for what is none."""
    parse_listen_address(text)
    return host_is_loopback(text)


def ws_address(text: str) -> str | None:
    """The multiaddr at which a web page reaches the same listener: each of ours takes WebSockets on its TCP port.

    `text` may end in /p2p/PEER, which stays. None for what no page can dial, such as an address through a relay.
    """
    head, p2p, peer = text.partition("/p2p/")
    parts = head.removesuffix("/ws").split("/")
    if len(parts) != 5 or parts[1] not in ("ip4", "ip6") or parts[3] != "tcp" or "/" in peer:
        return None
    return f"{'/'.join(parts)}/ws{p2p}{peer}"


def host_is_loopback(text: str) -> bool:
    """Whether a multiaddr that begins with an IP is of this machine alone."""
    return ip_address(text.split("/")[2]).is_loopback
