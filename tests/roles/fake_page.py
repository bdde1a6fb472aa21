"""What the page does, in Python: it pairs by a link, and is a member by its pass. docs/phone_protocol.md."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import trio
from swarm import QUICK

from kvasir_node.base.ids import PeerId
from kvasir_node.base.settings import NetworkSettings, Settings, load_settings
from kvasir_node.decide.pairing import PairRefusal
from kvasir_node.decide.placement import DemandSeen, HubsKnown
from kvasir_node.net.circuit import Circuits
from kvasir_node.net.hello import Membership
from kvasir_node.net.libp2p_host import Libp2pTransport, open_libp2p_transport
from kvasir_node.net.rpc import one_call
from kvasir_node.net.stream_io import read_exactly
from kvasir_node.net.transport import Stream, Transport
from kvasir_node.roles.content import Fetcher, open_block_calls
from kvasir_node.roles.download import FetchTally
from kvasir_node.roles.link import Compute, compute_here
from kvasir_node.roles.worker import Worker
from kvasir_node.store.blocks import BlockStore
from kvasir_node.wire.guest_pass import PAIR_PROTOCOL, GuestPass, PairAsk, PairLink, read_pair_answer
from kvasir_node.wire.messages import MARKET_PROTOCOL, About, MarketMethod

NAME = "a phone in a test"


async def ask_for_pass(transport: Transport, node: PeerId, code: bytes) -> GuestPass | PairRefusal:
    """Raises Unreachable when the node resets the stream instead of answering."""
    return read_pair_answer(await say_to_pairing(transport, node, PairAsk(code, NAME).to_bytes()))


async def say_to_pairing(transport: Transport, node: PeerId, body: bytes) -> bytes:
    stream = await transport.open_stream(node, PAIR_PROTOCOL)
    try:
        await stream.write(len(body).to_bytes(2, "little"), body)
        length = int.from_bytes(await read_exactly(stream.read, 2), "little")
        return await read_exactly(stream.read, length)
    finally:
        await stream.reset()


@asynccontextmanager
async def page_transport(folder: Path) -> AsyncIterator[Libp2pTransport]:
    """A peer that listens on nothing; its key lives in the folder, as a page's in its origin's database."""
    async with open_libp2p_transport(replace(NetworkSettings(), listen=()), folder / "page.key") as transport:
        yield transport


async def pair(transport: Transport, text: str) -> tuple[PeerId, GuestPass | PairRefusal]:
    """Follows a link over its first address that answers; returns the node and its answer."""
    link = PairLink.from_text(text)
    node = await transport.connect([f"{address}/p2p/{link.peer}" for address in link.addresses])
    return node, await ask_for_pass(transport, node, link.code)


def guest_membership(transport: Transport, found: GuestPass, roles: Sequence[str] = ("worker",)) -> Membership:
    """Its `run` says hello to whomever the page is connected to, or dials."""
    return Membership(transport, found.key, About(NAME, "1.0.0", tuple(roles), (), ()).to_bytes())


class FakePage:
    """A page at work: the swarm's own Worker, on a transport that dials WebSockets, as a member by a pass."""

    def __init__(
        self,
        transport: Libp2pTransport,
        folder: Path,
        settings: Settings,
        compute: Compute,
        found: GuestPass | None = None,
    ) -> None:
        self.transport = transport
        self._folder = folder
        self._settings = settings
        self._compute = compute
        self.tally = FetchTally()
        self.found = found

    @property
    def peer_id(self) -> PeerId:
        return self.transport.peer_id

    async def pair(self, link: str) -> None:
        _, found = await pair(self.transport, link)
        assert isinstance(found, GuestPass), found
        self.found = found

    async def run(self, *, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        """Works until cancelled, at the hubs of its pass."""
        assert self.found is not None, "pair first"
        membership = guest_membership(self.transport, self.found)

        async def require(peer: PeerId) -> None:
            await membership.require(peer, 8)

        async def take_nothing(stream: Stream, _: PeerId) -> None:
            await stream.reset()

        self.transport.use_circuits(Circuits(self.transport, require, take_nothing).dial)
        store = BlockStore(self._folder / "blocks", quota_bytes=1 << 30)
        fetcher = Fetcher(open_block_calls(self.transport), store, self._settings.store, self.tally)
        self.worker = Worker(
            self._settings,
            self.transport,
            fetcher,
            ask_hub=self._ask_hub,
            require_member=require,
            compute=self._compute,
            seed=1,
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(membership.run)
            hub = await self.transport.connect(self.found.addresses)
            await require(hub)
            nursery.start_soon(self.worker.run)
            self.worker.tell(HubsKnown((hub,)))
            self.worker.tell(DemandSeen(1, 0))
            task_status.started()

    async def _ask_hub(self, hub: PeerId, method: MarketMethod, body: bytes) -> bytes | memoryview:
        return await one_call(self.transport, hub, MARKET_PROTOCOL, int(method), body, timeout_s=4.0)


@asynccontextmanager
async def open_page(folder: Path, by: str | GuestPass, *, compute: Compute = compute_here) -> AsyncIterator[FakePage]:
    """A page that works, by a link or by its pass, until this is left, which is as if its tab was closed."""
    settings = load_settings(flags={**QUICK, "node.data_dir": str(folder)})
    async with page_transport(folder) as transport, trio.open_nursery() as nursery:
        page = FakePage(transport, folder, settings, compute, None if isinstance(by, str) else by)
        if isinstance(by, str):
            await page.pair(by)
        await nursery.start(page.run)  # pyright: ignore[reportArgumentType]
        yield page
        nursery.cancel_scope.cancel()
