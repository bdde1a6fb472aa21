"""What a stranger gets from a whole node, at every door there is: nothing. Real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import trio
from test_node import config, nodes
from test_node_membership import start

from kvasir_node.base.errors import KvasirError, Unreachable
from kvasir_node.base.ids import PeerId
from kvasir_node.base.settings import NetworkSettings
from kvasir_node.net import express_door, punch, reach_probe
from kvasir_node.net.circuit import CIRCUIT_PROTOCOL, RELAY_PROTOCOL, Ask, pack_peer
from kvasir_node.net.clock_probe import CLOCK_PROTOCOL
from kvasir_node.net.hello import HELLO_PROTOCOL, Membership
from kvasir_node.net.libp2p_host import Libp2pTransport, open_libp2p_transport
from kvasir_node.net.punch import PUNCH_PROTOCOL
from kvasir_node.net.reach_probe import PROBE_PROTOCOL
from kvasir_node.roles.node import Node
from kvasir_node.roles.revoking import REVOCATIONS_PROTOCOL
from kvasir_node.roles.swarm_key import FILE_NAME as SECRET_FILE_NAME
from kvasir_node.roles.swarm_key import Renewal
from kvasir_node.wire.messages import BLOCKS_PROTOCOL, EXPERTS_PROTOCOL, MARKET_PROTOCOL
from kvasir_node.wire.swarm_keys import new_secret, read_secret
from kvasir_node.wire.ticket import read_ticket

LOOPBACK = NetworkSettings(listen=("/ip4/127.0.0.1/tcp/0",))
SAID_S = 3.0  # by then whatever a door says to a stranger was said
PEER = PeerId("12D3KooWLShEmUMRzomUQ2kA4V8Gxc42syLYf6L18Jqy6uoVkgCd")
# What a member could open each door with.
OPENINGS: dict[str, tuple[str, bytes]] = {
    "the market": (MARKET_PROTOCOL, b"\0\0\0\0\1\2" + bytes(8)),
    "blocks": (BLOCKS_PROTOCOL, b"\0\0\0\0\1\1" + bytes(8)),
    "experts": (EXPERTS_PROTOCOL, b"\0\0\0\0\1\1" + bytes(8)),
    "a place at the relay": (RELAY_PROTOCOL, bytes([Ask.RESERVE])),
    "a circuit through the relay": (RELAY_PROTOCOL, bytes([Ask.CONNECT]) + pack_peer(PEER)),
    "a circuit to the node itself": (CIRCUIT_PROTOCOL, pack_peer(PEER)),
    "a hole": (PUNCH_PROTOCOL, bytes(16) + b"\1\x1a/ip4/198.51.100.1/tcp/4001"),
    "the time": (CLOCK_PROTOCOL, b"?"),
    "the list of who is shut out": (REVOCATIONS_PROTOCOL, b"\0\0\0\1\x80"),
    "a dial-back": (PROBE_PROTOCOL, bytes(16) + (4001).to_bytes(2, "big")),
}
# What is silent to members, too: nobody brings a circuit where the node holds no place; and that list has no answer.
SILENT = {"a circuit to the node itself", "the list of who is shut out"}
# Connections that begin otherwise than libp2p's.
FIRST_BYTES = {
    "an express channel": express_door.MAGIC + bytes(express_door.OPENING_BYTES - len(express_door.MAGIC)),
    "a punched connection": punch.MAGIC + bytes(punch.TOKEN_BYTES),
    "an answer to a dial-back": reach_probe.MAGIC + bytes(reach_probe.TOKEN_BYTES // 2),
}


async def first_said(stream: Any) -> bytes:
    """What is said first, if anything is before the stream ends."""
    with trio.move_on_after(SAID_S), suppress(Unreachable):
        return bytes(await stream.read())
    return b""


async def said_at_every_door(stranger: Libp2pTransport, address: str) -> dict[str, bytes]:
    """All doors at once, each over a connection that is there or made again: who is refused is disconnected."""
    said: dict[str, bytes] = {}

    async def knock(door: str, protocol: str, opening: bytes) -> None:
        try:
            node = await stranger.connect([address])
            stream = await stranger.open_stream(node, protocol)
            await stream.write(opening)
            said[door] = await first_said(stream)
        except KvasirError:
            said[door] = b""

    async def call(door: str, first: bytes) -> None:
        port = int(address.split("/")[4])
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        async with stream:
            said[door] = b""
            with trio.move_on_after(2 * SAID_S) as waiting, suppress(trio.BrokenResourceError):
                await stream.send_all(first)
                while chunk := await stream.receive_some():
                    said[door] += chunk
            assert not waiting.cancelled_caught, f"{door} stays open to a stranger"

    async with trio.open_nursery() as nursery:
        for door, (protocol, opening) in OPENINGS.items():
            nursery.start_soon(knock, door, protocol, opening)
        for door, first in FIRST_BYTES.items():
            nursery.start_soon(call, door, first)
    return said


@asynccontextmanager
async def stranger_of(folder: Path, name: str) -> AsyncIterator[Libp2pTransport]:
    async with open_libp2p_transport(LOOPBACK, folder / name) as stranger:
        yield stranger


async def hello_with(stranger: Libp2pTransport, address: str, entry: bytes) -> str:
    """Says hello with a secret; how it was refused, or empty."""
    membership = Membership(stranger, entry, b"")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(membership.run)
        try:
            node = await stranger.connect([address])
            await membership.require(node, 5)
            return ""
        except Unreachable as error:
            return str(error)
        finally:
            nursery.cancel_scope.cancel()


class Recording:
    """A stream that keeps what was written."""

    def __init__(self, stream: Any) -> None:
        self._stream, self.peer, self.protocol = stream, stream.peer, stream.protocol
        self.read, self.reset = stream.read, stream.reset
        self.written: list[bytes] = []

    async def write(self, *parts: bytes) -> None:
        self.written.append(b"".join(parts))
        await self._stream.write(*parts)


async def recorded_hello(folder: Path, address: str, entry: bytes) -> list[bytes]:
    """What a member says to the node when it joins, message by message."""
    async with stranger_of(folder, "member") as member:
        node = await member.connect([address])
        stream = Recording(await member.open_stream(node, HELLO_PROTOCOL))
        await Membership(member, entry, b"")._prove_as_dialler(stream)  # type: ignore[arg-type]
        return stream.written


async def replayed(stranger: Libp2pTransport, address: str, messages: list[bytes]) -> bytes:
    node = await stranger.connect([address])
    stream = await stranger.open_stream(node, HELLO_PROTOCOL)
    with suppress(Unreachable):
        for message in messages:
            await stream.write(message)
    return await first_said(stream)


async def test_no_stranger_gets_anything_at_any_door_of_a_node(tmp_path):
    """A node with all roles, which has just replaced its secret and lets the old one count no more."""
    nothing = dict.fromkeys((*OPENINGS, *FIRST_BYTES), b"")
    async with nodes() as nursery:
        old = new_secret()
        (tmp_path / "main").mkdir()
        (tmp_path / "main" / SECRET_FILE_NAME).write_bytes(old)
        settings = config(tmp_path, "main", "coordinator,hub,worker", network__old_secret_s="0")
        node: Node = (await start(nursery, settings, Renewal.SECRET)).node
        entry = read_secret(read_ticket(node.ticket()).secret).entry
        address = node.ready_info()["listen"][0]
        async with stranger_of(tmp_path, "silent") as silent:
            assert await said_at_every_door(silent, address) == nothing
        async with stranger_of(tmp_path, "with the old secret") as stranger:
            refusal = await hello_with(stranger, address, read_secret(old).entry)
            assert "does not hold this swarm's secret" in refusal
            assert await said_at_every_door(stranger, address) == nothing
        messages = await recorded_hello(tmp_path, address, entry)
        async with stranger_of(tmp_path, "replaying") as stranger:
            assert await replayed(stranger, address, messages) == b"\0"
            assert await said_at_every_door(stranger, address) == nothing
        assert node.snapshot().members == ()
        assert await doors_open_to_a_member(tmp_path, address, entry) == OPENINGS.keys() - SILENT


async def doors_open_to_a_member(folder: Path, address: str, entry: bytes) -> set[str]:
    """Else what strangers are not told would prove nothing: the doors are there, and the knocking is a member's.

    Not the connections that name a token: one that is not ours opens nothing to anybody.
    """
    async with stranger_of(folder, "open") as member, trio.open_nursery() as nursery:
        membership = Membership(member, entry, b"")
        nursery.start_soon(membership.run)
        await membership.require(await member.connect([address]), 5)
        said = await said_at_every_door(member, address)
        nursery.cancel_scope.cancel()
    return {door for door, answer in said.items() if answer}
