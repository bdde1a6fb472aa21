"""What the page does, in Python: it pairs by a link, and is a member by its pass. docs/phone_protocol.md."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from kvasir_node.base.ids import PeerId
from kvasir_node.base.settings import NetworkSettings
from kvasir_node.decide.pairing import PairRefusal
from kvasir_node.net.hello import Membership
from kvasir_node.net.libp2p_host import Libp2pTransport, open_libp2p_transport
from kvasir_node.net.stream_io import read_exactly
from kvasir_node.net.transport import Transport
from kvasir_node.wire.guest_pass import PAIR_PROTOCOL, GuestPass, PairAsk, PairLink, read_pair_answer
from kvasir_node.wire.messages import About

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
