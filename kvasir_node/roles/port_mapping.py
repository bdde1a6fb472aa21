"""Keeps a port of the home router open for this node, while others cannot reach it otherwise, and closes it at the end.

It does not know how a router is asked (net/upnp), nor whether the mapping works: hubs try it, as they try every address
(decide/reach), and only what they reached is told to others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import trio

from kvasir_node.base.errors import KvasirError, Unreachable
from kvasir_node.decide.patience import Patience
from kvasir_node.decide.reach import is_lan
from kvasir_node.net.upnp import SSDP_GROUP, Gateway, PortTaken, add_mapping, delete_mapping, external_ip, find_gateway

logger = logging.getLogger(__name__)

LOOK_S = 1.0
START_S = 5.0  # hubs are heard first: who can be reached needs no mapping
LEASE_S = 1200
RENEW_S = 300.0  # a router that was restarted has forgotten it
PAUSE_S = 60.0  # after a failure; doubles ...
PAUSE_MAX_S = 1800.0  # ... up to this
TRIES_MAX = 4  # ports that others may have already
END_S = 2.0  # to close the port at the end


@dataclass(frozen=True, slots=True)
class Mapping:
    """Connections to `host`:`port` outside come to us."""

    host: str
    port: int


class PortMapping:
    """See the module. `wanted` tells whether others cannot reach us; `changed` hears of a mapping made or lost."""

    def __init__(
        self,
        port: int,
        own_hosts: Callable[[], Sequence[str]],
        wanted: Callable[[], bool],
        changed: Callable[[], None],
        rng: Random,
        group: tuple[str, int] = SSDP_GROUP,
    ) -> None:
        self._port = port
        self._own_hosts = own_hosts
        self._wanted = wanted
        self._changed = changed
        self._rng = rng
        self._group = group
        self._gateway: Gateway | None = None
        self._patience = Patience(PAUSE_S)
        self.mapping: Mapping | None = None
        self.problem = ""  # why there is none, after the last attempt

    async def run(self, start_s: float = START_S) -> None:
        """Until cancelled; then a mapping is taken back."""
        await trio.sleep(start_s)
        try:
            while True:
                now = trio.current_time()
                if self._patience.allows(now) and (self.mapping is not None or self._wanted()):
                    await self._keep(now)
                await trio.sleep(LOOK_S)
        finally:
            with trio.move_on_after(END_S) as ending:
                ending.shield = True
                await self._close()

    async def _keep(self, now: float) -> None:
        """Makes the mapping, or renews it."""
        try:
            mapping = await self._make()
        except KvasirError as error:
            self._become(None, str(error))
            self._patience.failed(now, PAUSE_MAX_S)
        else:
            self._become(mapping, "")
            self._patience.succeeded(PAUSE_S, now + RENEW_S)

    async def _make(self) -> Mapping:
        if self._gateway is None or self.mapping is None:
            self._gateway = await find_gateway(self._own_hosts(), self._group)
        host = await external_ip(self._gateway)
        if is_lan(host):
            await self._close()
            raise Unreachable(
                f"the router's own outside address {host} is not public: there is another router before it"
            )
        known = [self.mapping.port] if self.mapping is not None else []
        others = [self._rng.randrange(20_000, 60_000) for _ in range(TRIES_MAX - 1)]
        for port in dict.fromkeys([*known, self._port, *others]):
            try:
                await add_mapping(self._gateway, port, self._port, LEASE_S)
            except PortTaken as error:
                logger.debug("%s", error)
            else:
                return Mapping(host, port)
        raise Unreachable(f"the router has {TRIES_MAX} ports that were tried for other machines")

    def _become(self, mapping: Mapping | None, problem: str) -> None:
        if problem != self.problem and problem:
            logger.info("no port of the router is open for this node: %s", problem)
        if mapping != self.mapping and mapping is not None:
            logger.info("the router lets connections to %s port %d in to this node", mapping.host, mapping.port)
        is_news = mapping != self.mapping
        self.mapping, self.problem = mapping, problem
        if is_news:
            self._changed()

    async def _close(self) -> None:
        """Takes the mapping back, if the router can still be asked."""
        mapping, gateway, self.mapping = self.mapping, self._gateway, None
        if mapping is None or gateway is None:
            return
        try:
            await delete_mapping(gateway, mapping.port)
        except KvasirError as error:
            logger.info("port %d of the router stays open for up to %d min: %s", mapping.port, LEASE_S // 60, error)
