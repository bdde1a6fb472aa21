"""How a node stays reachable: carries out what decide/reach.py commands, and serves the same to others.

It does not know how a relay, a probe or a hole works (net/relay, net/circuit, net/reach_probe, net/punch): here they
are made, wired to membership, and started when the machine says so. Strangers get nothing of it.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence

import trio

from kvasir_node.base.errors import KvasirError
from kvasir_node.base.ids import PeerId
from kvasir_node.base.settings import NetworkSettings
from kvasir_node.decide.reach import (
    GiveBack,
    Nat,
    Probe,
    Punch,
    Reach,
    Reachability,
    Reserve,
    Scene,
    advertised,
    host_of,
    is_lan,
    is_loopback_ip,
    port_of,
)
from kvasir_node.net import punch, reach_probe
from kvasir_node.net.circuit import RELAY_PROTOCOL, Circuits
from kvasir_node.net.hello import MemberJoined, Membership
from kvasir_node.net.libp2p_host import Libp2pTransport
from kvasir_node.net.reach_probe import Own, ReachProbe
from kvasir_node.net.relay import Relay
from kvasir_node.roles.port_mapping import Mapping, PortMapping

logger = logging.getLogger(__name__)

LOOK_S = 1.0
MEMBER_TIMEOUT_S = 4.0


class Reaching:
    """See the module. `hubs` tells which hubs are members and connected now, maybe with ourselves among them."""

    def __init__(
        self,
        transport: Libp2pTransport,
        membership: Membership,
        settings: NetworkSettings,
        hubs: Callable[[], Sequence[PeerId]],
        *,
        is_hub: bool,
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        """`moved` is called when others should be told new addresses of ours."""
        self._transport = transport
        self._hubs = hubs
        self._moved = moved
        self._mind = Reach(settings.relay_hubs_max)
        self._membership = membership
        self._circuits = Circuits(transport, self._require_member, transport.take_circuit)
        self._probe = ReachProbe(transport, self._own, self._seen_at)
        self._puncher = punch.Puncher(transport, transport.bound(), self._candidates, transport.adopt)
        self._holding: dict[PeerId, trio.CancelScope] = {}
        self._changed = trio.Event()
        transport.use_circuits(self._circuits.dial)
        transport.use_advertised(self._advertised)
        transport.add_door(reach_probe.MAGIC, self._probe.admit)
        transport.add_door(punch.MAGIC, self._puncher.admit)
        transport.set_handler(punch.PUNCH_PROTOCOL, membership.guard(self._puncher.serve))
        if is_hub:
            transport.set_handler(reach_probe.PROBE_PROTOCOL, membership.guard(self._probe.serve))
        self.relay = Relay(transport, settings) if is_hub and settings.relay else None
        if self.relay is not None:
            transport.set_handler(RELAY_PROTOCOL, membership.guard(self.relay.serve))
        self._is_hub = is_hub
        self.hairpin = "unknown"  # as NetSnapshot has it
        self._hairpin_at = ""
        self._router = self._port_mapping() if settings.upnp == "auto" else None

    def _port_mapping(self) -> PortMapping | None:
        """None where no port is open to other machines over IPv4, so that there is none to be mapped."""
        bound = [(host, port) for host, port in self._transport.bound() if ":" not in host and not is_loopback_ip(host)]
        if not bound:
            return None
        port, rng = bound[0][1], random.Random(self._transport.peer_id)
        return PortMapping(port, self._lan_hosts, self._wants_mapping, self._mapping_changed, rng)

    def _lan_hosts(self) -> list[str]:
        hosts = {host_of(each) for each in self._transport.listening()}
        return sorted(host for host in hosts if ":" not in host and is_lan(host) and not is_loopback_ip(host))

    def _wants_mapping(self) -> bool:
        return self._mind.wants_mapping(is_hub=self._is_hub) and bool(self._lan_hosts())

    def _mapping_changed(self) -> None:
        self._mind.moved(trio.current_time())
        self._changed.set()
        self._moved()

    # --- for the status ---

    @property
    def reachability(self) -> Reachability:
        return self._mind.reachability

    @property
    def nat(self) -> Nat:
        return self._mind.nat({host_of(each) for each in self._transport.listening()})

    @property
    def relays(self) -> tuple[PeerId, ...]:
        return self._circuits.relays

    @property
    def carried(self) -> int:
        return self.relay.circuits if self.relay is not None else 0

    @property
    def reached(self) -> tuple[str, ...]:
        """Where hubs have reached us."""
        return self._mind.reached()

    @property
    def upnp(self) -> tuple[str, str]:
        """NetSnapshot's `upnp` and `upnp_says`."""
        if self._router is None:
            return "off", ""
        if (mapping := self._router.mapping) is not None:
            return "mapped", f"{mapping.host} port {mapping.port}"
        return ("failed" if self._router.problem else "unused"), self._router.problem

    # --- driving ---

    async def run(self) -> None:
        """Until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._wake_on_changes)
            if self._router is not None:
                nursery.start_soon(self._router.run)
            while True:
                self._changed = trio.Event()
                for command in self._mind.step(self._scene(), trio.current_time()):
                    match command:
                        case Probe(hub):
                            nursery.start_soon(self._do_probe, hub)
                        case Reserve(hub):
                            nursery.start_soon(self._do_reserve, hub)
                        case GiveBack(hub):
                            self._give_back(hub)
                        case Punch(peer):
                            nursery.start_soon(self._do_punch, peer)
                with trio.move_on_after(LOOK_S):
                    await self._changed.wait()

    async def _wake_on_changes(self) -> None:
        async for event in self._membership.watch():
            if isinstance(event, MemberJoined):
                self._changed.set()

    def _scene(self) -> Scene:
        ways = {each.peer: each for each in self._transport.connections()}
        direct = tuple(hub for hub in self._hubs() if hub in ways and ways[hub].path == "direct")
        members = [peer for peer in ways if self._membership.is_member(peer)]
        relayed = tuple(peer for peer in members if ways[peer].path == "relay" and not ways[peer].inbound)
        return Scene(direct, self._circuits.relays, relayed)

    async def _do_probe(self, hub: PeerId) -> None:
        before = self._mind.reachability
        try:
            seen = await self._probe.ask(hub)
        except KvasirError as error:
            logger.debug("hub %s does not say where it sees us: %s", hub, error)
            self._mind.probed(hub, None, trio.current_time())
            return
        self._mind.probed(hub, seen, trio.current_time())
        self._changed.set()
        await self._test_hairpin()
        if self._mind.reachability is not before:
            self._moved()
            logger.info("others see this node as %s; NAT: %s", self._mind.reachability, self.nat)

    async def _test_hairpin(self) -> None:
        """Once for each outside address: hubs' dial-backs say that it leads to us, if we may try it from inside."""
        own = {host_of(each) for each in self._transport.listening()}
        outside = [each for each in self._mind.reached() if host_of(each) not in own and not is_lan(host_of(each))]
        if not outside or outside[0] == self._hairpin_at:
            return
        self._hairpin_at = outside[0]
        comes_back = await self._probe.is_ourselves(host_of(outside[0]), port_of(outside[0]))
        self.hairpin = "yes" if comes_back else "no"

    async def _do_reserve(self, hub: PeerId) -> None:
        was_held = False

        def held() -> None:
            nonlocal was_held
            was_held = True
            logger.info("reachable through relay %s", hub)
            self._moved()

        scope = self._holding[hub] = trio.move_on_after(float("inf"))
        try:
            with scope:
                await self._circuits.reserve(hub, held)
        except KvasirError as error:
            logger.info("%s", error)
        finally:
            del self._holding[hub]
            self._mind.reservation_ended(hub, trio.current_time(), was_held=was_held)
            self._changed.set()
            if was_held:
                self._moved()

    def _give_back(self, hub: PeerId) -> None:
        if hub in self._holding:
            self._holding[hub].cancel()

    async def _do_punch(self, peer: PeerId) -> None:
        try:
            await self._puncher.punch(peer)
        except KvasirError as error:
            logger.info("%s is reached through a relay only: %s", peer, error)
            self._mind.punched(peer, trio.current_time(), is_open=False)
        else:
            logger.info("%s is reached directly now", peer)
            self._mind.punched(peer, trio.current_time(), is_open=True)

    # --- what the parts ask ---

    async def _require_member(self, peer: PeerId) -> None:
        await self._membership.require(peer, MEMBER_TIMEOUT_S)

    def _own(self, peer: PeerId) -> Own:
        """To a hub outside our network the port that the router lets in, if there is one, is the listener's."""
        address, _, from_listen_port = self._transport.way_to(peer) or ("", False, False)
        is_ipv6 = address.startswith("/ip6/")
        mapping = self._mapping()
        if mapping is not None and not is_ipv6 and address and not is_lan(host_of(address)):
            return Own(mapping.port, from_listen_port)
        ports = [port for host, port in self._transport.bound() if (":" in host) == is_ipv6]
        return Own(ports[0] if ports else 0, from_listen_port)

    def _mapping(self) -> Mapping | None:
        return None if self._router is None else self._router.mapping

    def _seen_at(self, peer: PeerId) -> str:
        way = self._transport.way_to(peer)
        return "" if way is None else way[0]

    def _candidates(self) -> tuple[str, ...]:
        """For a hole: where hubs see our listener, and addresses of ours that are valid everywhere."""
        plain = [each for each in self._transport.listening() if not each.endswith("/ws")]
        own = [each for each in plain if not is_lan(host_of(each))]
        return tuple(dict.fromkeys([*self._mind.reached(), *self._mind.observed(), *own]))

    def _advertised(self, listening: Sequence[str]) -> tuple[str, ...]:
        circuits = [f"{self._address_of(relay)}/p2p/{relay}/p2p-circuit" for relay in self._circuits.relays]
        told = advertised(listening, self._mind.reached(), circuits)
        mapping = self._mapping()
        if mapping is None or self._mind.reachability is not Reachability.UNKNOWN:
            return told
        # A hub that no other one can try: without this its ticket would be worth nothing outside.
        return (*told, f"/ip4/{mapping.host}/tcp/{mapping.port}")

    def _address_of(self, relay: PeerId) -> str:
        """Where we dialled it; empty when it dialled us, for then its address is not one to dial."""
        way = self._transport.way_to(relay)
        return "" if way is None or way[1] else way[0]
