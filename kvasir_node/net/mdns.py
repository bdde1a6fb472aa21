"""Finds hubs of the swarm on the local network, and lets itself be found: DNS-SD over multicast (RFC 6762, 6763).

It does not know who is dialled. A hub announces its peer id, its port and the swarm's public name, which is a hash and
opens nothing: who is in the swarm is proved when connected. What is heard is only a hint, as anyone on the network can
say anything: only addresses on a network that this machine is on are told, and of so many peers at most.

IPv6 serves where the machine has no IPv4 in a local network; link-local addresses are no use to a multiaddr.
The interfaces are named to the library one by one, as the system's own choice is often a virtual one, and are looked at
again and again, as a laptop changes networks. The library (zeroconf) lives in threads of its own.
"""

from __future__ import annotations

import ipaddress
import logging
import math
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import psutil
import trio
from zeroconf import BadTypeInNameException, IPVersion, ServiceBrowser, ServiceInfo, ServiceStateChange, Zeroconf
from zeroconf import Error as ZeroconfError

from kvasir_node.base.ids import PeerId

SERVICE = "_kvasir-node._tcp.local."
PEERS_MAX = 16  # heard of on the local network at once
INTERFACES_MAX = 8
LOOK_S = 10.0  # how often interfaces are looked at, and what is known is told again
RETRY_S = 60.0  # after an attempt that failed altogether, such as a port that another program keeps for itself
ASK_MS = 2000  # for one announcement to be complete

_log = logging.getLogger(__name__)

Found = Callable[[PeerId, Sequence[str]], None]


@dataclass(frozen=True, slots=True)
class LanInterface:
    """An address of this machine on a network that it shares with others."""

    address: str
    network: ipaddress.IPv4Network | ipaddress.IPv6Network


def lan_interfaces() -> tuple[LanInterface, ...]:
    """The IPv4 interfaces that are up, without loopback; where there is none, the IPv6 ones. Blocks for about 1 ms."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    addresses = [each for name, found in psutil.net_if_addrs().items() if name in up for each in found if each.netmask]
    for family in (socket.AF_INET, socket.AF_INET6):
        found = [_interface(each.address, str(each.netmask)) for each in addresses if each.family == family]
        usable = [each for each in found if not (each.network.is_loopback or _is_link_local_ipv6(each.network))]
        if usable:
            return tuple(usable[:INTERFACES_MAX])
    return ()


def _interface(address: str, netmask: str) -> LanInterface:
    plain = address.split("%")[0]
    prefix = int(ipaddress.ip_address(netmask)).bit_count()
    return LanInterface(plain, ipaddress.ip_network(f"{plain}/{prefix}", strict=False))


def _is_link_local_ipv6(network: ipaddress.IPv4Network | ipaddress.IPv6Network) -> bool:
    return network.version == 6 and network.is_link_local


class LanSearch:
    """See the module. `found` hears hubs of this swarm, and again every few seconds while they are there. `announced`
    tells the multiaddrs of this node, if it is a hub; those of them that are on a local network are announced."""

    def __init__(
        self,
        swarm: str,
        own: PeerId,
        found: Found,
        announced: Callable[[], Sequence[str]] = tuple,
        interfaces: Callable[[], Sequence[LanInterface]] = lan_interfaces,
    ) -> None:
        self._swarm = swarm
        self._own = own
        self._found = found
        self._announced = announced
        self._interfaces = interfaces
        self._known: dict[str, tuple[PeerId, tuple[str, ...]]] = {}  # by the name of the service

    async def run(self) -> None:
        """Announces and listens until cancelled; a network that does not let it is a warning, once."""
        is_warned = False
        while True:
            interfaces = tuple(self._interfaces())
            if not interfaces:
                await trio.sleep(LOOK_S)
                continue
            try:
                await self._run_on(interfaces)
            except (OSError, ZeroconfError) as error:
                level = logging.DEBUG if is_warned else logging.WARNING
                _log.log(level, "no search on the local network: %s", error or type(error).__name__)
                is_warned = True
                await trio.sleep(RETRY_S)

    async def _run_on(self, interfaces: tuple[LanInterface, ...]) -> None:
        """Until the interfaces are others."""
        token = trio.lowlevel.current_trio_token()
        service = await trio.to_thread.run_sync(self._open, interfaces, token)
        try:
            if (info := self._info(interfaces)) is not None:
                await trio.to_thread.run_sync(partial(service.register_service, info, allow_name_change=True))
            while tuple(self._interfaces()) == interfaces:
                for peer, addresses in list(self._known.values()):
                    self._found(peer, addresses)
                await trio.sleep(LOOK_S)
        finally:
            self._known.clear()
            with trio.move_on_after(math.inf) as scope:
                scope.shield = True
                await trio.to_thread.run_sync(service.close)

    def _open(self, interfaces: Sequence[LanInterface], token: trio.lowlevel.TrioToken) -> Zeroconf:
        hosts = [each.address for each in interfaces]
        service = Zeroconf(hosts, ip_version=IPVersion.V6Only if ":" in hosts[0] else IPVersion.V4Only)

        def changed(zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
            """In a thread of the library, one call at a time."""
            info = None
            if state_change is not ServiceStateChange.Removed:
                with suppress(BadTypeInNameException):
                    info = zeroconf.get_service_info(service_type, name, ASK_MS)
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(self._hear, name, info, interfaces)

        ServiceBrowser(service, SERVICE, handlers=[changed])
        return service

    def _info(self, interfaces: Sequence[LanInterface]) -> ServiceInfo | None:
        """One port for all interfaces, which is what an announcement can say: the first."""
        near = {each.address for each in interfaces}
        own = [(address, port) for address, port in map(_plain_tcp, self._announced()) if address in near]
        if not own:
            return None
        port = own[0][1]
        return ServiceInfo(
            SERVICE,
            f"{self._own}.{SERVICE}",
            port=port,
            addresses=[ipaddress.ip_address(address).packed for address, each in own if each == port],
            properties={"swarm": self._swarm, "peer": str(self._own)},
            server=f"kvasir-{self._own[-16:].lower()}.local.",
        )

    def _hear(self, name: str, info: ServiceInfo | None, interfaces: Sequence[LanInterface]) -> None:
        self._known.pop(name, None)
        read = None if info is None else self._read(info, interfaces)
        if read is None or len(self._known) >= PEERS_MAX:
            return
        self._known[name] = read
        self._found(*read)

    def _read(self, info: ServiceInfo, interfaces: Sequence[LanInterface]) -> tuple[PeerId, tuple[str, ...]] | None:
        """The peer and its addresses on networks of ours; None for other swarms, ourselves, and what cannot be read."""
        said = {key: value for key, value in info.properties.items() if value is not None}
        peer = PeerId(said.get(b"peer", b"").decode("ascii", errors="replace"))
        if said.get(b"swarm") != self._swarm.encode("ascii") or peer == self._own or not peer.isalnum():
            return None
        near = [
            address
            for address in info.parsed_addresses(IPVersion.All)
            if "%" not in address and any(ipaddress.ip_address(address) in each.network for each in interfaces)
        ]
        if not near or not info.port:
            return None
        places = [f"/ip{6 if ':' in address else 4}/{address}" for address in near[:INTERFACES_MAX]]
        return peer, tuple(f"{place}/tcp/{info.port}/p2p/{peer}" for place in places)


def _plain_tcp(address: str) -> tuple[str, int]:
    """(IP, port) of /ip4/IP/tcp/PORT or /ip6/… and what may follow; ("", 0) for what is not like that."""
    parts = address.split("/")
    if len(parts) >= 5 and parts[1] in ("ip4", "ip6") and parts[3] == "tcp" and "ws" not in parts:
        return parts[2], int(parts[4])
    return "", 0
