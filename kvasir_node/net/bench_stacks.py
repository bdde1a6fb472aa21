"""Four ways to carry bytes between two processes, behind one shape, for `kvasir-node bench net`.

Plain trio TCP, trio's TLS, a stock py-libp2p host (TCP, Noise, Yamux), and ours. It does not know what is measured.
Every stack is measured with the same client and the same server code; only the pipe between them differs.
"""

from __future__ import annotations

import datetime
import os
import ssl
import struct
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import trio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from libp2p import new_host
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key
from libp2p.custom_types import TProtocol
from libp2p.host.basic_host import BasicHost
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_PROTOCOL
from libp2p.security.noise.transport import Transport as StockNoise
from multiaddr import Multiaddr

from kvasir_node.base.errors import Unreachable
from kvasir_node.base.settings import NetworkSettings
from kvasir_node.net.identity import key_from_seed
from kvasir_node.net.libp2p_host import Libp2pTransport, open_libp2p_transport
from kvasir_node.net.transport import Stream

PIPE_PROTOCOL = "/kvasir/bench-pipe/1.0.0"
CALLS_PROTOCOL = "/kvasir/bench-calls/1.0.0"
LOOPBACK = NetworkSettings(listen=("/ip4/127.0.0.1/tcp/0",))
READ_BYTES = 256 * 1024  # of one read, on every stack
FRAME_LENGTH = struct.Struct("<I")
COMMAND = struct.Struct("<cQ")  # what to do with the bytes that follow, and how many there are (E: per frame)
ECHO, SINK = b"E", b"S"
DONE = b"!"


class Pipe(Protocol):
    """A byte stream, however it is carried."""

    async def send(self, data: bytes | bytearray | memoryview) -> None: ...

    async def receive(self) -> bytes | memoryview:
        """Some bytes; b"" at the end."""
        ...


class TrioPipe:
    """Over any trio stream (plain or TLS)."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def send(self, data: bytes | bytearray | memoryview) -> None:
        await self._stream.send_all(data)

    async def receive(self) -> bytes:
        return bytes(await self._stream.receive_some(READ_BYTES))


class StockPipe:
    """A stream of a stock libp2p host; its read raises at the end, whatever the error is called."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def send(self, data: bytes | bytearray | memoryview) -> None:
        await self._stream.write(bytes(data))

    async def receive(self) -> bytes:
        return await self._stream.read(READ_BYTES)


class KvasirPipe:
    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    async def send(self, data: bytes | bytearray | memoryview) -> None:
        await self._stream.write(data)

    async def receive(self) -> bytes | memoryview:
        return await self._stream.read(READ_BYTES)


async def read_exactly(pipe: Pipe, count: int) -> bytearray:
    """Exactly `count` bytes, which must be all that is under way. Raises Unreachable at the end of the pipe."""
    received = bytearray()
    while len(received) < count:
        chunk = await pipe.receive()
        if not chunk:
            raise Unreachable(f"the pipe ended after {len(received)} of {count} bytes")
        received += chunk
    return received


async def serve_pipe(pipe: Pipe) -> None:
    """One command: echo frames until the end, or swallow a number of bytes and say so."""
    command, count = COMMAND.unpack(await read_exactly(pipe, COMMAND.size))
    await pipe.send(DONE)
    if command == SINK:
        while True:
            left = count
            while left > 0:
                chunk = await pipe.receive()
                if not chunk:
                    return
                left -= len(chunk)
            await pipe.send(DONE)
    while True:
        await pipe.send(await read_exactly(pipe, count))


async def begin(pipe: Pipe, command: bytes, count: int) -> None:
    await pipe.send(COMMAND.pack(command, count))
    await read_exactly(pipe, len(DONE))


# --- TLS ---


def tls_contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """(server, client) with a certificate made on the spot, which the client does not check."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "bench")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    encoding, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.TemporaryDirectory() as folder:
        pem = Path(folder) / "bench.pem"
        pem.write_bytes(
            key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, plain) + certificate.public_bytes(encoding)
        )
        server.load_cert_chain(pem)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    return server, client


# --- the stock host ---


@asynccontextmanager
async def open_stock_host() -> AsyncIterator[BasicHost]:
    """py-libp2p as it comes, but for plaintext, which it would otherwise accept."""
    key, address = key_from_seed(os.urandom(32)), Multiaddr("/ip4/127.0.0.1/tcp/0")
    noise = StockNoise(key, noise_privkey=create_noise_key().private_key)
    host: Any = new_host(key_pair=key, sec_opt={NOISE_PROTOCOL: noise}, listen_addrs=[address])
    async with host.run(listen_addrs=[address]):
        yield host


# --- opening pipes, as the near end ---


@asynccontextmanager
async def open_plain(port: int) -> AsyncIterator[TrioPipe]:
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        yield TrioPipe(stream)


@asynccontextmanager
async def open_tls(port: int) -> AsyncIterator[TrioPipe]:
    _, client = tls_contexts()
    tcp = await trio.open_tcp_stream("127.0.0.1", port)
    async with trio.SSLStream(tcp, client, https_compatible=True) as stream:
        yield TrioPipe(stream)


@asynccontextmanager
async def open_stock(addresses: Sequence[str]) -> AsyncIterator[StockPipe]:
    async with open_stock_host() as host:
        peer = info_from_p2p_addr(Multiaddr(addresses[0]))
        await host.connect(peer)
        stream = await host.new_stream(peer.peer_id, [TProtocol(PIPE_PROTOCOL)])
        yield StockPipe(stream)
        await stream.reset()
        await host.disconnect(peer.peer_id)  # or its socket stays open


@asynccontextmanager
async def open_kvasir(transport: Libp2pTransport, addresses: Sequence[str]) -> AsyncIterator[KvasirPipe]:
    stream = await transport.open_stream(await transport.connect(addresses), PIPE_PROTOCOL)
    try:
        yield KvasirPipe(stream)
    finally:
        await stream.reset()


@asynccontextmanager
async def open_bench_transport() -> AsyncIterator[Libp2pTransport]:
    """One of our transports on loopback, with a key of its own."""
    with tempfile.TemporaryDirectory() as folder:
        async with open_libp2p_transport(LOOPBACK, Path(folder) / "key") as transport:
            yield transport
