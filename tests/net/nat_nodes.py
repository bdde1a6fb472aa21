"""Nodes inside a NAT lab, without roles: a transport, a membership and what finds ways through NATs, each in a thread.

A thread's sockets are of one namespace, so a test holds all ends in one process and needs no programs.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trio
from natlab import FORWARDED_PORT, Lab, inside

from kvasir_node.base.ids import PeerId
from kvasir_node.base.settings import NetworkSettings
from kvasir_node.net.hello import Membership
from kvasir_node.net.libp2p_host import Libp2pTransport, open_libp2p_transport
from kvasir_node.roles.reaching import Reaching

ECHO = "/test/echo/1"
SECRET = b"s" * 32
SETTINGS = NetworkSettings(listen=tuple(f"/{each}/tcp/{FORWARDED_PORT}" for each in ("ip4/0.0.0.0", "ip6/::")))
START_S = 20.0


class LabNode:
    """One node; `run` carries an async function out in its loop and returns what it returns."""

    def __init__(self, hubs: list[PeerId], *, is_hub: bool) -> None:
        self._hubs = hubs
        self._is_hub = is_hub
        self.transport: Libp2pTransport
        self.reaching: Reaching
        self.membership: Membership
        self._token: trio.lowlevel.TrioToken
        self._stop: trio.Event

    def run(self, act: Callable[..., Awaitable[Any]], *args: object) -> Any:
        return trio.from_thread.run(act, *args, trio_token=self._token)

    def connect(self, addresses: tuple[str, ...]) -> PeerId:
        async def connect_as_member() -> PeerId:
            peer = await self.transport.connect(addresses)
            await self.membership.require(peer, 10)
            return peer

        return self.run(connect_as_member)

    def wait_until(self, condition: Callable[[], object], timeout_s: float = 12.0) -> None:
        async def wait() -> None:
            with trio.fail_after(timeout_s):
                while not condition():  # noqa: ASYNC110  (what is waited for has no event)
                    await trio.sleep(0.05)

        self.run(wait)

    def path_to(self, peer: PeerId) -> str:
        return next((each.path for each in self.transport.connections() if each.peer == peer), "")

    def addresses(self) -> tuple[str, ...]:
        """The plain ones that mean something elsewhere than on this machine."""
        own = ("/ip4/127.", "/ip6/::1/")

        async def in_its_namespace() -> tuple[str, ...]:
            return self.transport.addresses()

        return tuple(each for each in self.run(in_its_namespace) if "/ws/" not in each and not each.startswith(own))

    async def serve(self, folder: Path, place: str, ready: Callable[[LabNode | None], None]) -> None:
        async with open_libp2p_transport(SETTINGS, folder / f"{place}.key") as self.transport:
            self._token, self._stop = trio.lowlevel.current_trio_token(), trio.Event()
            if self._is_hub:
                self._hubs.append(self.transport.peer_id)
            self.membership = Membership(self.transport, SECRET, b"")
            self.reaching = Reaching(self.transport, self.membership, SETTINGS, self._known_hubs, is_hub=self._is_hub)
            self.transport.set_handler(ECHO, self.membership.guard(_echo))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.membership.run)
                nursery.start_soon(self.reaching.run)
                ready(self)
                await self._stop.wait()
                nursery.cancel_scope.cancel()

    def _known_hubs(self) -> list[PeerId]:
        return [hub for hub in self._hubs if hub != self.transport.peer_id and self.membership.is_member(hub)]

    def stop(self) -> None:
        self._token.run_sync_soon(self._stop.set)


async def _echo(stream: Any) -> None:
    while chunk := await stream.read():
        await stream.write(bytes(chunk))


@contextmanager
def lab_node(lab: Lab, place: str, folder: Path, hubs: list[PeerId], *, is_hub: bool = False) -> Iterator[LabNode]:
    """A node in a namespace of the lab, until the block ends. `hubs` is shared by all nodes of a test."""
    node = LabNode(hubs, is_hub=is_hub)
    started: queue.Queue[LabNode | None] = queue.Queue()

    def live() -> None:
        try:
            inside(lab.namespace(place), lambda: trio.run(node.serve, folder, place, started.put))
        finally:
            started.put(None)

    thread = threading.Thread(target=live, name=place)
    thread.start()
    try:
        if started.get(timeout=START_S) is None:
            raise RuntimeError(f"the node in {place} did not start")
        try:
            yield node
        finally:
            node.stop()
    finally:
        thread.join(START_S)
