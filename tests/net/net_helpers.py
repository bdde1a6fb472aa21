"""Pairs of connected sessions and muxers without sockets, and hosts on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from libp2p.abc import IRawConnection
from libp2p.connection_types import ConnectionType
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key
from libp2p.peer.id import ID

from kvasir_node.base.settings import NetworkSettings
from kvasir_node.net.identity import key_from_seed
from kvasir_node.net.libp2p_host import Libp2pTransport, open_libp2p_transport
from kvasir_node.net.muxer import YamuxConnection
from kvasir_node.net.noise_session import BufferedNoise, NoiseSession

LOOPBACK = NetworkSettings(listen=("/ip4/127.0.0.1/tcp/0",))


class RawOverStream(IRawConnection):
    """A raw libp2p connection over any trio stream."""

    def __init__(self, stream: Any, is_initiator: bool, read_max: int | None = None) -> None:
        self.stream = stream
        self.is_initiator = is_initiator
        self.read_max = read_max

    async def read(self, n: int | None = None) -> bytes:
        return await self.stream.receive_some(self.read_max or n)

    async def write(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def close(self) -> None:
        await self.stream.aclose()

    def get_remote_address(self) -> tuple[str, int] | None:
        return ("192.0.2.1", 9481)

    def get_transport_addresses(self) -> list[Any]:
        return []

    def get_connection_type(self) -> ConnectionType:
        return ConnectionType.DIRECT


def noise_of(kind: type, seed: int) -> tuple[Any, ID]:
    key = key_from_seed(bytes([seed]) * 32)
    return kind(key, noise_privkey=create_noise_key().private_key), ID.from_pubkey(key.public_key)


async def handshake(dialler_kind: type, listener_kind: type, left: IRawConnection, right: IRawConnection) -> list[Any]:
    """[dialler's session, listener's session] after a real Noise handshake."""
    dialler, _ = noise_of(dialler_kind, 1)
    listener, listener_id = noise_of(listener_kind, 2)
    sessions: list[Any] = [None, None]

    async def dial() -> None:
        sessions[0] = await dialler.secure_outbound(left, listener_id)

    async def accept() -> None:
        sessions[1] = await listener.secure_inbound(right)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(dial)
        nursery.start_soon(accept)
    return sessions


async def session_pair(*, read_max: int | None = None) -> tuple[NoiseSession, NoiseSession]:
    left, right = trio.testing.memory_stream_pair()
    sessions = await handshake(
        BufferedNoise, BufferedNoise, RawOverStream(left, True, read_max), RawOverStream(right, False, read_max)
    )
    return sessions[0], sessions[1]


async def socket_session_pair() -> tuple[NoiseSession, NoiseSession]:
    """Over a real socket pair, whose buffers fill up."""
    left, right = trio.socket.socketpair()
    sessions = await handshake(
        BufferedNoise,
        BufferedNoise,
        RawOverStream(trio.SocketStream(left), True),
        RawOverStream(trio.SocketStream(right), False),
    )
    return sessions[0], sessions[1]


@asynccontextmanager
async def muxer_pair(
    settings: NetworkSettings = LOOPBACK, *, sockets: bool = False, read_max: int | None = None
) -> AsyncIterator[tuple[YamuxConnection, YamuxConnection]]:
    """Two running muxers; the first one dialled."""
    first, second = await (socket_session_pair() if sockets else session_pair(read_max=read_max))
    left = YamuxConnection(first, first.get_remote_peer(), settings)
    right = YamuxConnection(second, second.get_remote_peer(), settings)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(left.start)
        nursery.start_soon(right.start)
        await left.event_started.wait()
        await right.event_started.wait()
        yield left, right
        await left.close()
        await right.close()


OpenHosts = Callable[..., AbstractAsyncContextManager[list[Libp2pTransport]]]


@pytest.fixture
def open_hosts(tmp_path: Path) -> OpenHosts:
    """`async with open_hosts(3) as hosts`: that many transports on loopback, each with a key of its own."""

    @asynccontextmanager
    async def open_many(count: int, **changes: Any) -> AsyncIterator[list[Libp2pTransport]]:
        settings = replace(LOOPBACK, **changes)
        async with AsyncExitStack() as stack:
            yield [
                await stack.enter_async_context(open_libp2p_transport(settings, tmp_path / f"key{number}"))
                for number in range(count)
            ]

    return open_many
