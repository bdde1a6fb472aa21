"""How a node stays reachable: carries out what decide/reach.py commands, and serves the same to others.

It does not know how a relay, a probe or a hole works (net/relay, net/circuit, net/reach_probe, net/punch): here they
are made, wired to membership, and started when the machine says so. Strangers get nothing of it.
"""

from __future__ import annotations

import logging
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
)
from kvasir_node.net import punch, reach_probe
from kvasir_node.net.circuit import RELAY_PROTOCOL, Circuits
from kvasir_node.net.hello import MemberJoined, Membership
from kvasir_node.net.libp2p_host import Libp2pTransport
from kvasir_node.net.reach_probe import Own, ReachProbe
from kvasir_node.net.relay import Relay

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

    # --- driving ---

    async def run(self) -> None:
        """Until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._wake_on_changes)
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
        if self._mind.reachability is not before:
            self._moved()
            logger.info("others see this node as %s; NAT: %s", self._mind.reachability, self.nat)

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
        address, _, from_listen_port = self._transport.way_to(peer) or ("", False, False)
        is_ipv6 = address.startswith("/ip6/")
        ports = [port for host, port in self._transport.bound() if (":" in host) == is_ipv6]
        return Own(ports[0] if ports else 0, from_listen_port)

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
        return advertised(listening, self._mind.reached(), circuits)

    def _address_of(self, relay: PeerId) -> str:
        """Where we dialled it; empty when it dialled us, for then its address is not one to dial."""
        way = self._transport.way_to(relay)
        return "" if way is None or way[1] else way[0]
