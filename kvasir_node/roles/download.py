"""One download: carries out what `decide/fetching` decides, over the network and the disk.

Flow: the wanted blocks → a call stream to each provider, opened when it is first asked, again after it broke → each
block that arrives is hashed and stored by a disk thread → a blob's node, once here, adds its blocks to what is wanted
→ done, or GiveUp becomes Unreachable. It does not know models, nor which peers are worth asking.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import trio

from kvasir_node.base.errors import DataError, KvasirError, Misbehaved, PeerError, Unreachable
from kvasir_node.base.ids import Cid, PeerId
from kvasir_node.base.settings import StoreSettings
from kvasir_node.decide.fetching import (
    Ask,
    Blame,
    BlockArrived,
    BlockBad,
    BlockMissing,
    BlockPostponed,
    BlocksWanted,
    Done,
    Fetch,
    FetchCommand,
    FetchEvent,
    FetchLimits,
    GiveUp,
    Leave,
    ProviderJoined,
    RequestFailed,
    Tick,
)
from kvasir_node.roles.throttle import NO_THROTTLE, Throttle
from kvasir_node.store.blocks import BlockStore
from kvasir_node.wire.blobs import BlobNode, BlobRef, decode_blob_node, is_node
from kvasir_node.wire.blocks import CALLS_MAX, Absent, BlocksMethod, decode_answer, encode_want

logger = logging.getLogger(__name__)

ASK_MAX = 2  # blocks of one call: few, so that a slow link loses little to a timeout, and calls still overlap
OPEN_TIMEOUT_S = 10.0  # to open a stream to a peer that is connected
TYPICAL_FIRST_BYTES = 1 << 16  # of a block, for the rate limit, until one has come
_EVENTS_WAITING_MAX = 64

RunBlocking = Callable[..., Awaitable[Any]]
"""(function, *args) -> awaitable of its result: a disk thread, or `run_inline` under a virtual clock."""


class BlockCalls(Protocol):
    """One provider's end of `/kvasir/blocks/1.0.0`; raises PeerError."""

    async def call(self, method: int, *parts: bytes | memoryview, timeout_s: float) -> bytes | memoryview: ...


OpenCalls = Callable[[PeerId], AbstractAsyncContextManager[BlockCalls]]
"""Opens a call stream; raises PeerError. The body of its `async with` is cancelled when the stream ends."""

Progress = Callable[[int, int], None]
"""(bytes of content here, bytes in all)."""


@dataclass(slots=True)
class FetchTally:
    """What downloads cost; counters only grow, one tally may serve many downloads."""

    bytes_fetched: int = 0  # verified and stored
    bytes_reused: int = 0  # were here already
    bytes_wasted: int = 0  # bad blocks, and second copies of late ones
    bad_blocks: dict[PeerId, int] = field(default_factory=dict)


class Download:
    """Fetches blocks, and the blobs whose nodes are among them. Serves one `run`."""

    def __init__(
        self,
        open_calls: OpenCalls,
        store: BlockStore,
        settings: StoreSettings,
        tally: FetchTally,
        run_blocking: RunBlocking,
        progress: Progress | None = None,
        throttle: Throttle = NO_THROTTLE,
    ) -> None:
        self._open_calls = open_calls
        self._throttle = throttle
        self._store = store
        self._settings = settings
        self._tally = tally
        self._run_blocking = run_blocking
        self._progress = progress
        self._fetch = Fetch(
            FetchLimits(
                in_flight_max=min(settings.fetch_in_flight_max, CALLS_MAX),
                ask_max=ASK_MAX,
                attempts_max=settings.fetch_attempts_max,
            )
        )
        self._send, self._receive = trio.open_memory_channel[FetchEvent | KvasirError](_EVENTS_WAITING_MAX)
        self._links: dict[PeerId, _Link] = {}
        self._sizes: Mapping[Cid, int] = {}  # blobs whose nodes are still to come
        self._unread: set[Cid] = set()  # nodes whose blocks are not wanted yet
        self._content: set[Cid] = set()  # blocks of blobs, without nodes
        self._kept: set[Cid] = set()  # stored by this download
        self._typical_bytes = TYPICAL_FIRST_BYTES
        self._done_bytes = 0
        self._total_bytes = 0

    async def run(self, providers: Iterable[PeerId], blobs: Iterable[BlobRef], blocks: Iterable[Cid] = ()) -> None:
        """Returns when all content is in the store; `blocks` are fetched as they are, even when they are nodes.

        Raises Unreachable when the providers cannot deliver, DataError when a blob's node contradicts its size,
        CapacityError when the disk is full. Cancel-safety: what was stored stays, a later run fetches the rest.
        """
        wanted = await self._want_roots(tuple(blobs), tuple(blocks))
        if wanted:
            await self._fetch_all(tuple(providers), tuple(wanted))
        if self._progress is not None:
            self._progress(self._total_bytes, self._total_bytes)  # blobs that share blocks counted them once

    async def _fetch_all(self, providers: tuple[PeerId, ...], wanted: tuple[Cid, ...]) -> None:
        outcome: GiveUp | KvasirError | None = None
        async with trio.open_nursery() as nursery:
            for provider in providers:
                self._links[provider] = _Link(provider, self._open_calls, nursery)
                self._fetch.handle(ProviderJoined(provider), trio.current_time())
            try:
                outcome = await self._loop(BlocksWanted(wanted), nursery)
            except KvasirError as error:  # raised after the nursery, which would wrap it in a group
                outcome = error
            nursery.cancel_scope.cancel()
        if isinstance(outcome, KvasirError):
            raise outcome
        if outcome is not None:
            raise Unreachable(f"fetching {len(wanted)} blocks from {len(self._links)} providers: {outcome.reason}")

    async def _loop(self, event: FetchEvent, nursery: trio.Nursery) -> GiveUp | None:
        """Feeds events to the machine until it is over. Raises what an `_ask` found on our own side."""
        if not self._links:
            return GiveUp("there is no provider to ask")
        while True:
            commands: list[FetchCommand] = []
            if isinstance(event, BlockArrived) and event.cid in self._unread:
                self._unread.remove(event.cid)
                children = await self._children(event.cid)
                if children is None:
                    raise DataError(f"block {event.cid} was damaged as soon as it was stored; check the disk")
                commands += self._fetch.handle(BlocksWanted(children), trio.current_time())
            commands += self._fetch.handle(event, trio.current_time())
            for command in commands:
                match command:
                    case Done():
                        return None
                    case GiveUp():
                        return command
                    case _:
                        self._carry_out(command, nursery)
            event = await self._next_event()

    async def _next_event(self) -> FetchEvent:
        wake_at = self._fetch.wake_at(trio.current_time())
        event: FetchEvent | KvasirError = Tick()
        with trio.move_on_at(math.inf if wake_at is None else wake_at):
            event = await self._receive.receive()
        if isinstance(event, KvasirError):
            raise event
        return event

    def _carry_out(self, command: FetchCommand, nursery: trio.Nursery) -> None:
        match command:
            case Ask():
                nursery.start_soon(self._ask, command)
            case Blame(provider, cid):
                self._tally.bad_blocks[provider] = self._tally.bad_blocks.get(provider, 0) + 1
                logger.warning("peer %s sent bytes that are not block %s", provider, cid)
            case Leave(provider, reason):
                logger.warning("no more blocks are asked of peer %s: %s", provider, reason)
                self._links[provider].close()
            case _:
                pass

    async def _ask(self, ask: Ask) -> None:
        """One call; always ends in events for each of its blocks."""
        link = self._links[ask.provider]
        expected_bytes, body = self._typical_bytes * len(ask.cids), b""
        async with self._throttle.turn():
            self._throttle.spend(expected_bytes)
        try:
            body = await link.call(encode_want(ask.cids), self._settings.fetch_timeout_s * len(ask.cids))
            answer = decode_answer(body, len(ask.cids))
        except PeerError as error:
            logger.info("asking peer %s for %d blocks: %s", ask.provider, len(ask.cids), error)
            if isinstance(error, Misbehaved):
                link.close()
            await self._send.send(RequestFailed(ask.provider, ask.cids))
            return
        finally:
            self._throttle.spend(len(body) - expected_bytes)
            self._typical_bytes = len(body) // len(ask.cids) or self._typical_bytes
        if all(block is Absent.NOT_NOW for block in answer):
            await self._send.send(RequestFailed(ask.provider, ask.cids))
            return
        for cid, block in zip(ask.cids, answer, strict=True):
            await self._send.send(await self._keep(ask.provider, cid, block))

    async def _keep(self, provider: PeerId, cid: Cid, block: memoryview | Absent) -> FetchEvent | KvasirError:
        if block is Absent.MISSING:
            return BlockMissing(provider, cid)
        if block is Absent.NOT_NOW:
            return BlockPostponed(provider, cid)
        try:
            good = await self._run_blocking(_store_verified, self._store, cid, block)
        except KvasirError as error:
            return error
        if good and cid not in self._kept:
            self._kept.add(cid)
            self._tally.bytes_fetched += len(block)
            self._count_done(cid, len(block))
        else:
            self._tally.bytes_wasted += len(block)
        return BlockArrived(provider, cid) if good else BlockBad(provider, cid)

    def _count_done(self, cid: Cid, size: int) -> None:
        if cid in self._content:
            self._done_bytes += size
            if self._progress is not None:
                self._progress(self._done_bytes, self._total_bytes)

    # What is wanted.

    async def _want_roots(self, blobs: tuple[BlobRef, ...], blocks: tuple[Cid, ...]) -> dict[Cid, None]:
        """The blocks that are missing now, as an ordered set; the children of a missing node come later."""
        self._sizes = {blob.cid: blob.size for blob in blobs if is_node(blob.cid)}
        self._total_bytes = sum({blob.cid: blob.size for blob in blobs}.values())
        self._content.update(blob.cid for blob in blobs if not is_node(blob.cid))
        wanted = dict.fromkeys(await self._absent(dict.fromkeys((*blocks, *(blob.cid for blob in blobs)))))
        for cid in self._sizes:
            children = None if cid in wanted else await self._children(cid)
            if children is None:
                self._unread.add(cid)
                children = (cid,)
            wanted |= dict.fromkeys(children)
        return wanted

    async def _children(self, node_cid: Cid) -> tuple[Cid, ...] | None:
        """The blocks of a blob that are missing; None when its own node is missing, or was damaged on the disk."""
        node = await self._run_blocking(_read_node, self._store, node_cid)
        if node is None:
            return None
        if node.size != self._sizes[node_cid]:
            raise DataError(f"blob {node_cid} has {node.size} bytes; {self._sizes[node_cid]} were promised")
        new = dict.fromkeys(cid for cid in node.blocks if cid not in self._content)
        self._content.update(new)
        return tuple(await self._absent(new))

    async def _absent(self, different: Iterable[Cid]) -> list[Cid]:
        cids = tuple(different)
        sizes = await self._run_blocking(_sizes_of, self._store, cids)
        for cid, size in zip(cids, sizes, strict=True):
            if size is not None:
                self._tally.bytes_reused += size
                self._count_done(cid, size)
        return [cid for cid, size in zip(cids, sizes, strict=True) if size is None]


class _Link:
    """The call stream to one provider: opened by the first call, again by the first call after it ended."""

    def __init__(self, provider: PeerId, open_calls: OpenCalls, nursery: trio.Nursery) -> None:
        self._provider = provider
        self._open_calls = open_calls
        self._nursery = nursery
        self._opening = trio.Lock()
        self._calls: BlockCalls | None = None
        self._scope: trio.CancelScope | None = None

    async def call(self, want: bytes, timeout_s: float) -> bytes | memoryview:
        """Raises PeerError."""
        async with self._opening:
            if self._calls is None:
                await self._open()
            calls = self._calls
        if calls is None:
            raise Unreachable(f"the stream to {self._provider} ended as soon as it was opened")
        return await calls.call(BlocksMethod.WANT, want, timeout_s=timeout_s)

    def close(self) -> None:
        if self._scope is not None:
            self._scope.cancel()

    async def _open(self) -> None:
        with trio.move_on_after(OPEN_TIMEOUT_S) as opening:
            await self._nursery.start(self._hold)
        if opening.cancelled_caught:
            raise Unreachable(f"peer {self._provider} opened no block stream within {OPEN_TIMEOUT_S:g} s")

    async def _hold(self, task_status: Any) -> None:
        started = False
        try:
            with trio.move_on_after(math.inf) as self._scope:
                async with self._open_calls(self._provider) as self._calls:
                    started = True
                    task_status.started()
                    await trio.sleep_forever()
        except PeerError as error:
            if not started:
                raise
            logger.info("the block stream to peer %s ended: %s", self._provider, error)
        finally:
            self._calls = None


def _store_verified(store: BlockStore, cid: Cid, block: memoryview) -> bool:
    """False when the bytes are not what the Cid promises."""
    try:
        store.put(cid, block)
    except DataError:
        return False
    return True


def _read_node(store: BlockStore, cid: Cid) -> BlobNode | None:
    # Decoded in the disk thread, too: a node of 25,000 blocks takes 0.5 s (2 busy cores), too long for the trio loop.
    data = store.get(cid)
    return None if data is None else decode_blob_node(data)


def _sizes_of(store: BlockStore, cids: tuple[Cid, ...]) -> list[int | None]:
    return [store.size(cid) for cid in cids]
