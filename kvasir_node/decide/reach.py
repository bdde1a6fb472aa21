"""How others can reach this node: what it finds out, what it advertises, when it takes a relay or punches a hole.

It does not know sockets, protocols or time: `step` is told what is so, and says what is to be done now. Facts come from
hubs. Each that is connected is asked once, and again every few minutes, from where it sees us and whether a connection
from a fresh port of its own reaches us there. One hub that cannot reach us is enough to need relays: others may lie in
our own network.

Holes are punched by one side, the one that dialled through the relay, so that two attempts never cross.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kvasir_node.base.ids import PeerId
from kvasir_node.decide.patience import Patience

PROBE_AGAIN_S = 300.0
PAUSE_S = 2.0  # after a probe or a reservation that failed; doubles ...
PAUSE_MAX_S = 120.0  # ... up to this
PUNCH_PAUSE_S = 1.0  # after a hole that was not punched; doubles ...
PUNCH_PAUSE_MAX_S = 600.0  # ... up to this: a router may be exchanged, or restarted
PUNCHES_MAX = 4  # under way at once
HUBS_PROBED_MAX = 8
MAPPED_MAX = 8  # outside IPs of ours for which it is remembered where our listener appeared
PEERS_MAX = 1024  # whose failed punches are remembered
_LAN = tuple(
    ipaddress.ip_network(text)
    for text in (
        *("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16", "100.64.0.0/10", "127.0.0.0/8"),
        *("fc00::/7", "fe80::/10", "::1/128"),
    )
)


def is_lan(host: str) -> bool:
    """Whether an IP means something only near where it is said: private, shared, link-local or loopback."""
    address = ipaddress.ip_address(host)
    return any(address.version == network.version and address in network for network in _LAN)


def is_loopback_ip(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback


def host_of(address: str) -> str:
    """The IP or name of a multiaddr; empty when it begins otherwise."""
    parts = address.split("/")
    return parts[2] if len(parts) > 2 and parts[1] in ("ip4", "ip6", "dns", "dns4", "dns6") else ""


def port_of(address: str) -> int:
    parts = address.split("/")
    return int(parts[4]) if len(parts) > 4 and parts[3] == "tcp" and parts[4].isdecimal() else 0


class Reachability(StrEnum):
    UNKNOWN = "unknown"
    LAN = "lan"  # hubs of our own network reach us
    PUBLIC = "public"
    PRIVATE = "private"  # only from inside, through a relay, or through a hole


class Nat(StrEnum):
    UNKNOWN = "unknown"
    NONE = "none"
    CONE = "cone"  # one outside port for all: holes can be punched
    SYMMETRIC = "symmetric"  # another outside port for each peer: they cannot


@dataclass(frozen=True, slots=True)
class Seen:
    """What a hub told. `observed` is /ip…/tcp/PORT; `from_listen_port`: our end of it is the listener's."""

    hub: PeerId
    observed: str
    from_listen_port: bool
    reached: tuple[str, ...]  # of the addresses that it tried, those where we answered
    listener: str = ""  # where our listener appears if what stands between keeps ports


@dataclass(frozen=True, slots=True)
class Scene:
    """What is so now. `hubs`: connected directly, not ourselves; `relayed`: peers that we dialled through a relay."""

    hubs: tuple[PeerId, ...]
    relays: tuple[PeerId, ...]  # where we hold a reservation
    relayed: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Probe:
    hub: PeerId


@dataclass(frozen=True, slots=True)
class Reserve:
    hub: PeerId


@dataclass(frozen=True, slots=True)
class GiveBack:
    """The reservation at this hub is not needed any more."""

    hub: PeerId


@dataclass(frozen=True, slots=True)
class Punch:
    peer: PeerId


Command = Probe | Reserve | GiveBack | Punch


@dataclass(slots=True)
class Reach:
    """See the module. `relays_kept` reservations are held while others cannot reach us."""

    relays_kept: int
    _seen: dict[PeerId, Seen] = field(default_factory=dict[PeerId, Seen])
    _mapped: dict[str, str] = field(default_factory=dict[str, str])  # by outside IP, where our listener appeared last
    _was_private: bool = False  # when anything was known last
    _probes: dict[PeerId, Patience] = field(default_factory=dict[PeerId, Patience])
    _reserves: dict[PeerId, Patience] = field(default_factory=dict[PeerId, Patience])
    _punches: dict[PeerId, Patience] = field(default_factory=dict[PeerId, Patience])

    # --- what was found out ---

    @property
    def reachability(self) -> Reachability:
        if not self._seen:
            return Reachability.UNKNOWN
        if any(not seen.reached for seen in self._seen.values()):
            return Reachability.PRIVATE
        hosts = [host_of(address) for seen in self._seen.values() for address in seen.reached]
        return Reachability.LAN if all(is_lan(host) for host in hosts) else Reachability.PUBLIC

    @property
    def _needs_relays(self) -> bool:
        """Also where all hubs are of our own network: one of them may be reached from outside, and we are not; and
        where a hub is back of which we know nothing yet, if nobody could reach us before."""
        if self.reachability is Reachability.UNKNOWN:
            return self._was_private
        if self.reachability is Reachability.LAN:
            hosts = [host_of(address) for seen in self._seen.values() for address in seen.reached]
            return not all(ipaddress.ip_address(host).is_loopback for host in hosts)
        return self.reachability is Reachability.PRIVATE

    def nat(self, own_hosts: Iterable[str]) -> Nat:
        """What stands between us and the hubs, of the IPs that are this machine's own."""
        outside = [seen for seen in self._seen.values() if seen.observed and host_of(seen.observed) not in own_hosts]
        if not outside:
            return Nat.NONE if self._seen else Nat.UNKNOWN
        told = [seen for seen in outside if seen.from_listen_port]
        by_host: dict[str, set[str]] = {}
        for seen in told:
            by_host.setdefault(host_of(seen.observed), set()).add(seen.observed)
        if any(len(observed) > 1 for observed in by_host.values()):
            return Nat.SYMMETRIC
        return Nat.CONE if len(told) > 1 else Nat.UNKNOWN

    def observed(self) -> tuple[str, ...]:
        """Where our listener's port appears outside, each once: what a peer must aim at to punch a hole.

        A connection from another port, as after one that broke, does not tell; then it is where it was seen last, or
        where it would be behind a router that keeps ports.
        """
        found = [seen.observed for seen in self._seen.values() if seen.from_listen_port]
        for seen in self._seen.values():
            if not seen.from_listen_port:
                found += [self._mapped.get(host_of(seen.observed), ""), seen.listener]
        return tuple(address for address in dict.fromkeys(found) if address)

    def reached(self) -> tuple[str, ...]:
        """Where hubs have reached us that had no connection there."""
        return tuple(dict.fromkeys(address for seen in self._seen.values() for address in seen.reached))

    def wants_mapping(self, *, is_hub: bool) -> bool:
        """Whether the router should be asked to let connections in: others cannot reach us, or, for a hub that must be
        reached, nobody could try yet."""
        reachability = self.reachability
        return reachability is Reachability.PRIVATE or (is_hub and reachability is Reachability.UNKNOWN)

    # --- what to do ---

    def step(self, scene: Scene, now: float) -> list[Command]:
        """Call it whenever something changed, and once a second. What it commands counts as under way."""
        self._forget_lost(scene)
        return [*self._probes_due(scene, now), *self._relays_due(scene, now), *self._punches_due(scene, now)]

    def _forget_lost(self, scene: Scene) -> None:
        self._seen = {hub: seen for hub, seen in self._seen.items() if hub in scene.hubs}
        for table in (self._probes, self._reserves):
            for hub in [hub for hub, patience in table.items() if hub not in scene.hubs and not patience.is_under_way]:
                del table[hub]
        idle = [peer for peer, patience in self._punches.items() if not patience.is_under_way]
        for peer in idle[: max(0, len(self._punches) - PEERS_MAX)]:
            del self._punches[peer]

    def _probes_due(self, scene: Scene, now: float) -> list[Command]:
        due: list[Command] = []
        for hub in scene.hubs[:HUBS_PROBED_MAX]:
            patience = self._probes.setdefault(hub, Patience(PAUSE_S))
            if patience.allows(now):
                patience.is_under_way = True
                due.append(Probe(hub))
        return due

    def _relays_due(self, scene: Scene, now: float) -> list[Command]:
        if not self._needs_relays:
            # Not while we know nothing: the hub that told us otherwise may be back at once.
            return [GiveBack(hub) for hub in scene.relays] if self.reachability is not Reachability.UNKNOWN else []
        under_way = sum(each.is_under_way for hub, each in self._reserves.items() if hub not in scene.relays)
        lacking = self.relays_kept - len(scene.relays) - under_way
        due: list[Command] = []
        for hub in scene.hubs:
            patience = self._reserves.setdefault(hub, Patience(PAUSE_S))
            if len(due) < lacking and hub not in scene.relays and patience.allows(now):
                patience.is_under_way = True
                due.append(Reserve(hub))
        return due

    def _punches_due(self, scene: Scene, now: float) -> list[Command]:
        if not self._seen:
            return []  # nobody could aim at us yet
        room = PUNCHES_MAX - sum(each.is_under_way for each in self._punches.values())
        due: list[Command] = []
        for peer in scene.relayed:
            patience = self._punches.setdefault(peer, Patience(PUNCH_PAUSE_S))
            if len(due) < room and patience.allows(now):
                patience.is_under_way = True
                due.append(Punch(peer))
        return due

    # --- how it went ---

    def moved(self, now: float) -> None:
        """Something changed about how we are reached: all hubs are asked again."""
        for patience in self._probes.values():
            patience.at = min(patience.at, now)

    def probed(self, hub: PeerId, seen: Seen | None, now: float) -> None:
        """None: the hub did not answer."""
        patience = self._probes.setdefault(hub, Patience(PAUSE_S))
        if seen is None:
            patience.failed(now, PAUSE_MAX_S)
            return
        self._seen[hub] = seen
        self._was_private = self.reachability is Reachability.PRIVATE
        if seen.from_listen_port and seen.observed:
            self._mapped.pop(host_of(seen.observed), None)
            self._mapped[host_of(seen.observed)] = seen.observed
            if len(self._mapped) > MAPPED_MAX:
                del self._mapped[next(iter(self._mapped))]
        patience.succeeded(PAUSE_S, now + PROBE_AGAIN_S)

    def reservation_ended(self, hub: PeerId, now: float, *, was_held: bool) -> None:
        patience = self._reserves.setdefault(hub, Patience(PAUSE_S))
        if was_held:
            patience.succeeded(PAUSE_S, now)
        else:
            patience.failed(now, PAUSE_MAX_S)

    def punched(self, peer: PeerId, now: float, *, is_open: bool) -> None:
        if is_open:
            self._punches.pop(peer, None)
        else:
            self._punches.setdefault(peer, Patience(PUNCH_PAUSE_S)).failed(now, PUNCH_PAUSE_MAX_S)


def advertised(listening: Sequence[str], reached: Sequence[str], circuits: Sequence[str]) -> tuple[str, ...]:
    """Where to tell others that we are, the most useful first; all without our own id, circuits with their relay's.

    `listening`: the concrete addresses of our listeners. One that a hub has reached goes first, then what goes through
    relays, then the rest, which holds inside our own network; WebSockets are last.
    """
    plain = [each for each in listening if not each.endswith("/ws")]
    rest = [each for each in listening if each.endswith("/ws")]
    outside = [each for each in plain if not is_lan(host_of(each))]
    inside = [each for each in plain if is_lan(host_of(each))]
    first = [each for each in reached if each not in plain]
    return tuple(dict.fromkeys([*first, *outside, *circuits, *inside, *rest]))
