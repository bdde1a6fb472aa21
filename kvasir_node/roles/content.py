"""Content for the roles: serves blocks to peers, fetches blobs and slices from them, reads what is stored.

It does not know who may ask (membership guards the streams), which peers to ask (the caller says so), nor how a
download chooses between them: that is `decide/fetching`, carried out by `download`.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TypeVar

import trio

from kvasir_node.base.errors import DataError, Misbehaved, PeerError, RejectReason
from kvasir_node.base.ids import Cid, ExpertId, ModelId, PeerId, SliceId
from kvasir_node.base.settings import StoreSettings
from kvasir_node.model.manifest import Manifest, decode_layer_node, decode_manifest
from kvasir_node.net.rpc import CallStream
from kvasir_node.net.transport import Stream, Transport
from kvasir_node.roles.download import ASK_MAX, BlockCalls, Download, FetchTally, OpenCalls, Progress, RunBlocking
from kvasir_node.roles.throttle import NO_THROTTLE, Throttle
from kvasir_node.store.blocks import BlockStore
from kvasir_node.wire.blobs import BlobRef, decode_blob_node, is_node
from kvasir_node.wire.blocks import (
    BLOCK_BYTES_MAX,
    CALLS_MAX,
    LENGTH_BYTES,
    Absent,
    BlocksMethod,
    decode_want,
    encode_answer,
)
from kvasir_node.wire.messages import BLOCKS_PROTOCOL

T = TypeVar("T")
logger = logging.getLogger(__name__)

ANSWER_BYTES_MAX = 4 << 20  # of one answer: bounds what a peer that asks and does not read can pin
RESET_TIMEOUT_S = 1.0
PROVIDERS_MAX = 8  # of one fetch: each that has nothing costs a few small calls
READS_MAX = 4  # disk threads of a server, all its streams together


async def run_inline(function: Callable[..., T], *args: object) -> T:
    """Runs a blocking call on the trio loop: for virtual clocks, which would jump while a thread works."""
    await trio.lowlevel.checkpoint()
    return function(*args)


class BlockServer:
    """Answers want-lists from a store."""

    def __init__(
        self,
        store: BlockStore,
        *,
        answer_bytes_max: int = ANSWER_BYTES_MAX,
        run_blocking: RunBlocking | None = None,
        throttle: Throttle = NO_THROTTLE,
    ) -> None:
        self._store = store
        self._throttle = throttle
        self._answer_bytes_max = answer_bytes_max
        self._run_blocking = run_blocking or partial(trio.to_thread.run_sync, limiter=trio.CapacityLimiter(READS_MAX))
        self.bytes_served = 0

    async def serve(self, stream: Stream) -> None:
        """A StreamHandler for BLOCKS_PROTOCOL; ends with the stream."""
        body_bytes_max = self._answer_bytes_max + BLOCK_BYTES_MAX  # the first block of an answer always fits
        calls = CallStream(
            stream, handler=self.handle, in_flight_max=CALLS_MAX, body_bytes_max=body_bytes_max, gives_way=True
        )
        await calls.run()

    async def handle(self, method: int, body: memoryview) -> Sequence[bytes | memoryview]:
        """One call; changes nothing. Raises Misbehaved for an unknown method or a malformed want-list."""
        if method != BlocksMethod.WANT:
            raise Misbehaved(RejectReason.UNKNOWN_METHOD, f"{BLOCKS_PROTOCOL} has no method {method}, only 1 (WANT)")
        wanted = decode_want(body)
        async with self._throttle.turn():
            blocks = await self._run_blocking(self._read, wanted)
            size = sum(len(block) for block in blocks if not isinstance(block, Absent))
            self._throttle.spend(size)
        self.bytes_served += size
        return encode_answer(blocks)

    def _read(self, cids: Sequence[Cid]) -> list[bytes | Absent]:
        """As many blocks as fit into an answer, always at least one of those that are here."""
        blocks: list[bytes | Absent] = []
        room = self._answer_bytes_max - LENGTH_BYTES * len(cids)
        for cid in cids:
            size = self._store.size(cid)
            if size is None or size > BLOCK_BYTES_MAX:
                blocks.append(Absent.MISSING)
            elif size > room and room < self._answer_bytes_max - LENGTH_BYTES * len(cids):
                blocks.append(Absent.NOT_NOW)
            else:
                blocks.append(self._read_one(cid))
                room -= size
        return blocks

    def _read_one(self, cid: Cid) -> bytes | Absent:
        try:
            data = self._store.get(cid)
        except DataError as error:  # a checkpoint that was edited: ours to say, the asker finds another provider
            logger.warning("%s", error)
            data = None
        return Absent.MISSING if data is None else data


def open_block_calls(transport: Transport) -> OpenCalls:
    """Call streams over a transport, for `fetch_blobs` and its kin."""

    @asynccontextmanager
    async def open_calls(provider: PeerId) -> AsyncIterator[BlockCalls]:
        stream = await transport.open_stream(provider, BLOCKS_PROTOCOL)
        calls = CallStream(
            stream,
            handler=None,
            in_flight_max=CALLS_MAX,
            body_bytes_max=ASK_MAX * (BLOCK_BYTES_MAX + LENGTH_BYTES),
            gives_way=True,
        )

        async def run() -> None:
            try:
                await calls.run()
            except PeerError as error:
                logger.info("the block stream to peer %s ended: %s", provider, error)
            nursery.cancel_scope.cancel()

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(run)
                yield calls
                nursery.cancel_scope.cancel()
        finally:
            with trio.move_on_after(RESET_TIMEOUT_S) as resetting:
                resetting.shield = True
                await stream.reset()

    return open_calls


@dataclass(frozen=True, slots=True)
class Fetcher:
    """Where blocks come from and go to: what every fetch of one role shares."""

    open_calls: OpenCalls
    store: BlockStore
    settings: StoreSettings
    tally: FetchTally
    run_blocking: RunBlocking = trio.to_thread.run_sync
    throttle: Throttle = NO_THROTTLE
    others: Callable[[], Iterable[PeerId]] = tuple
    """Peers that may have a block besides those a caller names; asked too, up to PROVIDERS_MAX in all."""

    async def fetch_blobs(
        self, providers: Iterable[PeerId], blobs: Iterable[BlobRef], progress: Progress | None = None
    ) -> None:
        """Brings blobs into the store; what is there already is not fetched again.

        Raises Unreachable when the providers cannot deliver, DataError when a blob is not of the promised size,
        CapacityError when the disk is full. Cancel-safety: what was stored stays, a later call fetches the rest.
        """
        await self._download(progress).run(self._with_others(providers), blobs)

    async def fetch_block(self, providers: Iterable[PeerId], cid: Cid) -> bytes:
        """One block by its Cid, fetched if it is not here. Raises as `fetch_blobs`."""
        await self.fetch_blocks(providers, (cid,))
        return await self.run_blocking(read_block, self.store, cid)

    async def fetch_blocks(self, providers: Iterable[PeerId], cids: Iterable[Cid]) -> None:
        """Blocks as they are, also those that are nodes. Raises as `fetch_blobs`."""
        await self._download(None).run(self._with_others(providers), (), cids)

    async def fetch_pinned(
        self, owner: str, providers: Sequence[PeerId], blobs: Sequence[BlobRef], progress: Progress | None = None
    ) -> None:
        """`fetch_blobs`, and nothing of them makes room for other blocks until the store's `unpin` of the owner.

        Nodes come first, as only they tell which blocks to pin. Raises as `fetch_blobs`; pins stay then, too.
        """
        nodes = [blob.cid for blob in blobs if is_node(blob.cid)]
        await self.run_blocking(self.store.pin, owner, [blob.cid for blob in blobs])
        if nodes:
            await self.fetch_blocks(providers, nodes)
            await self.run_blocking(_pin_children, self.store, owner, nodes)
        await self.fetch_blobs(providers, blobs, progress)

    async def fetch_slice(
        self,
        providers: Sequence[PeerId],
        model: ModelId,
        wanted: SliceId,
        progress: Progress | None = None,
        *,
        owner: str | None = None,
    ) -> tuple[Manifest, Mapping[ExpertId, BlobRef]]:
        """The manifest of a model, and the experts of one slice, in the store when this returns.

        With an `owner` they are pinned, as by `fetch_pinned`. Raises as `fetch_blobs`; DataError also when the model
        has no such slice.
        """
        manifest = decode_manifest(await self.fetch_block(providers, Cid(model)))
        node = manifest.layer_nodes.get(wanted.layer)
        if node is None or wanted.last >= manifest.experts_per_layer:
            raise DataError(f"model {manifest.name} ({model}) has no slice {wanted}")
        layer = decode_layer_node(await self.fetch_block(providers, node), manifest, wanted.layer)
        experts = {expert: layer.experts[expert.index] for expert in wanted.experts()}
        if owner is None:
            await self.fetch_blobs(providers, experts.values(), progress)
        else:
            await self.fetch_pinned(owner, providers, tuple(experts.values()), progress)
        return manifest, experts

    def _with_others(self, providers: Iterable[PeerId]) -> tuple[PeerId, ...]:
        return tuple(islice(dict.fromkeys((*providers, *self.others())), PROVIDERS_MAX))

    def _download(self, progress: Progress | None) -> Download:
        return Download(
            self.open_calls, self.store, self.settings, self.tally, self.run_blocking, progress, self.throttle
        )


def read_block(store: BlockStore, cid: Cid) -> bytes:
    """A block's bytes; raises DataError when it is not here. Blocks on the disk."""
    data = store.get(cid)
    if data is None:
        raise DataError(f"block {cid} is not in the store, or was damaged and dropped; fetch its blob again")
    return data


def _pin_children(store: BlockStore, owner: str, nodes: Sequence[Cid]) -> None:
    for node in nodes:
        store.pin(owner, decode_blob_node(read_block(store, node)).blocks)


def read_blob(store: BlockStore, blob: BlobRef) -> bytearray:
    """A whole blob in one buffer of its own, every block verified. Blocks on the disk.

    Raises DataError when a block is missing or the blob is not of the promised size.
    """
    buffer = bytearray(blob.size)
    blocks = decode_blob_node(read_block(store, blob.cid)).blocks if is_node(blob.cid) else (blob.cid,)
    at = 0
    for cid in blocks:
        data = read_block(store, cid)
        if at + len(data) > blob.size:
            raise DataError(f"blob {blob.cid} has more than the {blob.size} bytes that were promised")
        buffer[at : at + len(data)] = data
        at += len(data)
    if at != blob.size:
        raise DataError(f"blob {blob.cid} has {at} of the {blob.size} bytes that were promised")
    return buffer
