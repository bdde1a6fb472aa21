"""How many trials the machines behind one range of addresses may cost within a while.

It does not know peers or what a trial is. Identities cost nothing, addresses cost something, so trials are counted by
the smallest range that one customer of a provider usually gets whole:

- IPv4 by /24: hosters rent addresses by the handful out of one such block; home connections have one each.
- IPv6 by /64: the least that any customer gets (RFC 6177), and one machine may use all 2⁶⁴ addresses of it.
- addresses of a LAN or of this machine (IPv4 only) each by itself: a /24 there is a whole office, and one broken
  machine must not keep the others from being tried.

Only trials under way or failed count, so neighbours who are honest never meet the cap.
"""

from __future__ import annotations

import ipaddress
from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache

IPV4_PREFIX = 24
IPV6_PREFIX = 64
LOCAL = tuple(
    map(
        ipaddress.IPv4Network,
        ("10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16"),
    )
)


@lru_cache(maxsize=65_536)  # reading an address takes longer than all else that a poll is asked
def address_range(address: str) -> str:
    """The range of a multiaddr such as "/ip4/198.51.100.7/tcp/9481"; what names no IP address is a range of its own."""
    protocol, _, rest = address.lstrip("/").partition("/")
    host = rest.partition("/")[0]
    try:
        ip = ipaddress.ip_address(host) if protocol in ("ip4", "ip6") else None
    except ValueError:
        ip = None
    if ip is None:
        return address
    if isinstance(ip, ipaddress.IPv6Address):
        mapped = ip.ipv4_mapped
        if mapped is None:
            return str(ipaddress.IPv6Network((int(ip), IPV6_PREFIX), strict=False))
        ip = mapped
    if any(ip in network for network in LOCAL):
        return str(ip)
    return str(ipaddress.IPv4Network((int(ip), IPV4_PREFIX), strict=False))


@dataclass(slots=True)
class TrialCaps:
    trials_max: int  # of one range, within the window
    window_s: float
    ranges_max: int  # with trials that count; one more gets none
    _begun: dict[str, deque[float]] = field(default_factory=dict[str, deque[float]])

    def allow(self, address: str, now: float) -> bool:
        """Whether one more trial may begin."""
        counted = self._begun.get(address_range(address))
        if counted is None:
            return len(self._begun) < self.ranges_max
        edge = now - self.window_s
        return sum(1 for began_at in counted if began_at > edge) < self.trials_max

    def begin(self, address: str, now: float) -> None:
        self._begun.setdefault(address_range(address), deque()).append(now)

    def refund(self, address: str, began_at: float) -> None:
        """A trial that ended well does not count: the cap is there to bound what liars cost."""
        where = address_range(address)
        counted = self._begun.get(where, deque())
        if began_at in counted:
            counted.remove(began_at)
        if not counted:
            self._begun.pop(where, None)

    def trim(self, now: float) -> None:
        """Forgets what the window has passed, so that the table cannot grow without end."""
        edge = now - self.window_s
        for where, counted in list(self._begun.items()):
            while counted and counted[0] <= edge:
                counted.popleft()
            if not counted:
                del self._begun[where]
