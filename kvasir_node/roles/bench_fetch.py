"""Measures fetching by content against a plain HTTP/1.1 download of the same bytes from the same processes.

It does not know how figures are shown. Each provider is a process of its own that serves one file both ways; every way
takes turns in rounds and its figure is the median, so only ratios within one run mean anything. Both ways end with the
bytes verified by sha2-256 and synced to the disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import trio

from kvasir_node.base.content import FilePiece, split_pieces
from kvasir_node.base.errors import DataError, Unreachable
from kvasir_node.base.ids import DAG_CBOR_CODEC, Cid, PeerId, cid_of
from kvasir_node.base.settings import NetworkSettings, StoreSettings
from kvasir_node.net.hello import Membership
from kvasir_node.net.libp2p_host import open_libp2p_transport
from kvasir_node.net.transport import Transport
from kvasir_node.roles.content import BlockServer, Fetcher, open_block_calls
from kvasir_node.roles.download import FetchTally
from kvasir_node.store.blocks import BlockStore
from kvasir_node.wire.blobs import BlobRef, encode_blob_node
from kvasir_node.wire.blocks import BLOCK_BYTES_MAX
from kvasir_node.wire.messages import BLOCKS_PROTOCOL

MIB = 1 << 20
SECRET = b"kvasir bench fetch, not a secret"
START_TIMEOUT_S = 60.0
KILL_TIMEOUT_S = 5.0
MEMBER_TIMEOUT_S = 20.0
HEAD_BYTES_MAX = 64 * 1024
READ_BYTES = 256 * 1024
PROVIDERS = 2
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class FetchFigures:
    """Megabytes (10^6 bytes) per second, the median of the rounds, and all rounds."""

    mb_s: dict[str, float]
    rounds_mb_s: dict[str, list[float]]
    megabytes: int


async def measure(megabytes: int, rounds: int, say: Say) -> FetchFigures:
    """Runs providers and downloads on this machine; needs room for twice the bytes in the temporary directory."""
    with tempfile.TemporaryDirectory(prefix="kvasir-bench-") as name:
        folder = Path(name)
        file = folder / "content"
        await trio.to_thread.run_sync(_write_random, file, megabytes)
        async with AsyncExitStack() as opened:
            providers = [await opened.enter_async_context(_provider(file, n)) for n in range(PROVIDERS)]
            bench = await opened.enter_async_context(_open_bench(folder, file, providers))
            found: dict[str, list[float]] = {}
            for number in range(rounds):
                say(f"round {number + 1} of {rounds}")
                for way, seconds in (await bench.round()).items():
                    found.setdefault(way, []).append(megabytes * MIB / 1e6 / seconds)
    medians = {way: round(statistics.median(rates), 1) for way, rates in found.items()}
    return FetchFigures(medians, {way: [round(rate, 1) for rate in rates] for way, rates in found.items()}, megabytes)


def _write_random(file: Path, megabytes: int) -> None:
    with file.open("wb") as stream:
        for _ in range(megabytes):
            stream.write(os.urandom(MIB))


# The measuring side.


@dataclass(frozen=True, slots=True)
class _Provider:
    addresses: tuple[str, ...]
    http_port: int


@dataclass(slots=True)
class _Bench:
    folder: Path
    transport: Transport
    peers: tuple[PeerId, ...]
    http_port: int
    blob: BlobRef
    digest: str
    runs: int = 0

    async def round(self) -> dict[str, float]:
        return {
            "http": await self._http(),
            "kvasir": await self._kvasir(self.peers[:1]),
            "kvasir_2_providers": await self._kvasir(self.peers),
        }

    async def _kvasir(self, providers: tuple[PeerId, ...]) -> float:
        self.runs += 1
        folder = self.folder / f"store-{self.runs}"
        store = BlockStore(folder)
        fetcher = Fetcher(open_block_calls(self.transport), store, StoreSettings(), FetchTally())
        began = perf_counter()
        await fetcher.fetch_blobs(providers, [self.blob])
        took_s = perf_counter() - began
        await trio.to_thread.run_sync(_remove, folder)
        return took_s

    async def _http(self) -> float:
        target = self.folder / "download"
        began = perf_counter()
        digest = await _download(self.http_port, target)
        took_s = perf_counter() - began
        if digest != self.digest:
            raise DataError("the plain download came with other bytes; the figures of this run mean nothing")
        target.unlink()
        return took_s


def _remove(folder: Path) -> None:
    for file in sorted(folder.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    folder.rmdir()


async def _download(port: int, target: Path) -> str:
    """GET / into a file; returns the sha2-256 of the body."""
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    async with stream:
        await stream.send_all(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        head = bytearray()
        while (end := head.find(b"\r\n\r\n")) < 0:
            if len(head) > HEAD_BYTES_MAX or not (part := await stream.receive_some(READ_BYTES)):
                raise Unreachable("the plain HTTP server of the bench ended before its headers did")
            head += part
        return await _save(stream, bytes(head[end + 4 :]), target)


async def _save(stream: trio.SocketStream, first: bytes, target: Path) -> str:
    """In one thread per megabyte or so, as a downloader that is not naive would."""
    digest = hashlib.sha256()
    with target.open("wb") as file:
        pending = bytearray(first)

        def flush() -> None:
            digest.update(pending)
            file.write(pending)
            pending.clear()

        while part := await stream.receive_some(READ_BYTES):
            pending += part
            if len(pending) >= MIB:
                await trio.to_thread.run_sync(flush)
        flush()
        file.flush()
        await trio.to_thread.run_sync(os.fsync, file.fileno())
    return digest.hexdigest()


@asynccontextmanager
async def _open_bench(folder: Path, file: Path, providers: list[_Provider]) -> AsyncIterator[_Bench]:
    blob, _ = await trio.to_thread.run_sync(_index, file)
    digest = await trio.to_thread.run_sync(_digest_of, file)
    async with _member(folder / "own.key") as (transport, membership):
        peers = tuple([await transport.connect(provider.addresses) for provider in providers])
        for peer in peers:
            await membership.require(peer, MEMBER_TIMEOUT_S)
        yield _Bench(folder, transport, peers, providers[0].http_port, blob, digest)


def _digest_of(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _index(file: Path) -> tuple[BlobRef, dict[Cid, tuple[FilePiece | bytes, ...]]]:
    """The blob that the file is, and where its blocks are."""
    size = file.stat().st_size
    blocks: dict[Cid, tuple[FilePiece | bytes, ...]] = {}
    with file.open("rb") as stream:
        for source in split_pieces((FilePiece(file, 0, size),), BLOCK_BYTES_MAX):
            blocks[cid_of(stream.read(BLOCK_BYTES_MAX))] = source
    node = encode_blob_node(size, list(blocks))
    cid = cid_of(node, DAG_CBOR_CODEC)
    return BlobRef(cid, size), {**blocks, cid: (node,)}


@asynccontextmanager
async def _member(key: Path) -> AsyncIterator[tuple[Transport, Membership]]:
    settings = replace(NetworkSettings(), listen=("/ip4/127.0.0.1/tcp/0",))
    async with open_libp2p_transport(settings, key) as transport:
        membership = Membership(transport, SECRET, b"")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(membership.run)
            yield transport, membership
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def _provider(file: Path, number: int) -> AsyncIterator[_Provider]:
    command = [sys.executable, "-P", "-m", __name__, str(file), str(file.with_name(f"provider-{number}.key"))]
    process = await trio.lowlevel.open_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = b""
        with trio.fail_after(START_TIMEOUT_S):
            while not line.endswith(b"\n"):
                if not (part := await process.stdout.receive_some(HEAD_BYTES_MAX)):
                    raise Unreachable(f"a provider of the bench ended with code {process.poll()} before it was ready")
                line += part
        ready = json.loads(line)
        yield _Provider(tuple(ready["addresses"]), ready["http_port"])
    finally:
        process.kill()  # all that it wrote lies beside the file
        with trio.move_on_after(KILL_TIMEOUT_S) as ending:
            ending.shield = True
            await process.wait()
            await process.stdin.aclose()
            await process.stdout.aclose()


# The providing side, a process of its own.


async def provide(file: Path, key: Path) -> None:
    """Serves the file as blocks to members and over HTTP to this machine, until killed."""
    store = BlockStore(key.with_suffix(".store"))
    for cid, source in (await trio.to_thread.run_sync(_index, file))[1].items():
        store.map(cid, source)
    async with _member(key) as (transport, membership), trio.open_nursery() as nursery:
        transport.set_handler(BLOCKS_PROTOCOL, membership.guard(BlockServer(store).serve))
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, lambda stream: _serve_http(stream, file), listeners)
        port = listeners[0].socket.getsockname()[1]
        print(json.dumps({"addresses": transport.addresses(), "http_port": port}), flush=True)
        async with trio.lowlevel.FdStream(os.dup(sys.stdin.fileno())) as parent:
            await parent.receive_some(1)  # the end, when whoever measures was killed
        nursery.cancel_scope.cancel()


async def _serve_http(stream: trio.SocketStream, file: Path) -> None:
    """Any request is answered with the file."""
    async with stream:
        with trio.move_on_after(MEMBER_TIMEOUT_S):
            await stream.receive_some(HEAD_BYTES_MAX)
        try:
            size = (await trio.Path(file).stat()).st_size
            head = f"HTTP/1.1 200 OK\r\nContent-Length: {size}\r\nConnection: close\r\n\r\n"
            await stream.send_all(head.encode())
            with file.open("rb") as source:
                while part := await trio.to_thread.run_sync(source.read, MIB):
                    await stream.send_all(part)
        except trio.BrokenResourceError:
            pass  # the asker left


if __name__ == "__main__":
    trio.run(provide, Path(sys.argv[1]), Path(sys.argv[2]))
