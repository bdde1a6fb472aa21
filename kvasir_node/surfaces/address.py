"""HOST:PORT texts and which hosts are this machine. It does not bind, connect or resolve anything."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from kvasir_node.base.errors import UsageError


@dataclass(frozen=True, slots=True)
class Address:
    """Where something is served; `host` may be a name, an IPv6 address stands without brackets."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        return is_loopback_host(self.host)

    @property
    def url(self) -> str:
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"


def parse_address(text: str, key: str = "api.listen") -> Address:
    """Reads HOST:PORT or [IPV6]:PORT; raises UsageError that names the setting and its flag."""
    host, _, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    is_port = port.isascii() and port.isdigit() and int(port) <= 65535
    if not host or not is_port or (":" in host) != bracketed or set(host) & set("/@[] "):
        flag = f"--{key.partition('.')[0]} ({key})"
        raise UsageError(f"{flag} is HOST:PORT such as 127.0.0.1:9480 or [::1]:9480; got {text!r}", param=key)
    return Address(host, int(port))


def is_loopback_host(host: str) -> bool:
    """True for localhost, *.localhost (RFC 6761 section 6.3) and loopback addresses; never asks a resolver."""
    if host.lower().rstrip(".").split(".")[-1] == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_wildcard_host(host: str) -> bool:
    """Whether it stands for all addresses of this machine."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def check_key_policy(listen: str, key: str) -> None:
    """Raises UsageError for what is no address, and when others could reach the API and no key protects it."""
    if not parse_address(listen).is_loopback and not key:
        raise UsageError(
            f"--api {listen} can be reached by others, so it needs a key: set KVASIR_API__KEY, or listen on 127.0.0.1"
        )
