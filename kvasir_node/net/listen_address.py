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
    return ip_address(parse_listen_address(text)[0]).is_loopback
