import random
import resource
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import trio
from role_fakes import tiny_checkpoint

from kvasir_node.base.content import FilePiece, split_pieces
from kvasir_node.base.errors import CapacityError, DataError, Misbehaved, RejectReason, Unreachable
from kvasir_node.base.ids import DAG_CBOR_CODEC, Cid, PeerId, SliceId, cid_of
from kvasir_node.base.settings import NetworkSettings, StoreSettings
from kvasir_node.model.checkpoint import open_checkpoint, parse_expert_file
from kvasir_node.model.indexing import index_checkpoint
from kvasir_node.model.tensor_file import read_tensor
from kvasir_node.net.libp2p_host import open_libp2p_transport
from kvasir_node.net.memory_net import Link, MemoryNetwork, MemoryTransport, open_memory_network
from kvasir_node.roles.content import BlockServer, Fetcher, open_block_calls, read_blob, read_block, run_inline
from kvasir_node.roles.download import OPEN_TIMEOUT_S, BlockCalls, FetchTally
from kvasir_node.store.blocks import BlockStore
from kvasir_node.wire.blobs import BlobRef, encode_blob_node
from kvasir_node.wire.blocks import Absent, decode_answer, encode_answer, encode_want
from kvasir_node.wire.messages import BLOCKS_PROTOCOL

BLOCK_BYTES = 4096
SETTINGS = StoreSettings(fetch_timeout_s=5.0)
# 100 blocks of 4 KiB a second, one way 10 ms: a blob of 60 blocks takes well over half a virtual second.
LINK = Link(latency_s=0.01, bandwidth_bytes_s=100 * BLOCK_BYTES)


def add_blob(store: BlockStore, data: bytes, block_bytes: int = BLOCK_BYTES) -> BlobRef:
    cids = []
    for (block,) in split_pieces((data,), block_bytes):
        assert isinstance(block, bytes)
        cids.append(cid_of(block))
        store.map(cids[-1], (block,))
    if len(cids) == 1:
        return BlobRef(cids[0], len(data))
    node = encode_blob_node(len(data), cids)
    cid = cid_of(node, DAG_CBOR_CODEC)
    store.map(cid, (node,))
    return BlobRef(cid, len(data))


def random_bytes(seed: int, blocks: int) -> bytes:
    return random.Random(seed).randbytes(blocks * BLOCK_BYTES - 100)


class Swarm:
    """One node that fetches into a store on disk, and providers that serve the same blobs."""

    def __init__(self, network: MemoryNetwork, folder: Path) -> None:
        self.network = network
        self.folder = folder
        self.own = network.transport("worker")
        network.set_link(None, None, LINK)
        self.source = BlockStore(folder / "source")
        self.restart()

    def restart(self) -> None:
        self.store = BlockStore(self.folder / "own")
        self.tally = FetchTally()
        self.fetcher = Fetcher(open_block_calls(self.own), self.store, SETTINGS, self.tally, run_inline)

    async def provider(self, name: str, server: BlockServer | None = None, link: Link = LINK) -> PeerId:
        transport = self.network.transport(name)
        server = server or BlockServer(self.source, run_blocking=run_inline)
        transport.set_handler(BLOCKS_PROTOCOL, server.serve)
        self.network.set_link(self.own.peer_id, transport.peer_id, link)
        await self.own.connect(transport.addresses())
        return transport.peer_id


@asynccontextmanager
async def open_swarm(folder: Path) -> AsyncIterator[Swarm]:
    async with open_memory_network(seed=1) as network:
        yield Swarm(network, folder)


class CorruptingServer(BlockServer):
    """Flips a byte of some of the blocks it sends; `corrupt` counts down."""

    def __init__(self, store: BlockStore, corrupt: int) -> None:
        super().__init__(store, run_blocking=run_inline)
        self.corrupt = corrupt

    async def handle(self, method: int, body: memoryview) -> Sequence[bytes | memoryview]:
        parts = [bytes(part) for part in await super().handle(method, body)]
        for index, part in enumerate(parts):
            if len(part) > 4 and self.corrupt > 0:
                self.corrupt -= 1
                parts[index] = bytes((part[0] ^ 1,)) + part[1:]
        return parts


async def test_blobs_come_from_several_providers_and_are_whole(autojump_clock, tmp_path):
    async with open_swarm(tmp_path) as swarm:
        data = [random_bytes(n, blocks) for n, blocks in enumerate((1, 40, 23))]
        blobs = [add_blob(swarm.source, each) for each in data]
        servers = [BlockServer(swarm.source, run_blocking=run_inline) for _ in range(2)]
        providers = [await swarm.provider(f"p{n}", server) for n, server in enumerate(servers)]
        seen: list[tuple[int, int]] = []
        await swarm.fetcher.fetch_blobs(providers, blobs, lambda done, total: seen.append((done, total)))
        assert [bytes(read_blob(swarm.store, blob)) for blob in blobs] == data
        total = sum(map(len, data))
        assert seen == sorted(seen)
        assert seen[-1] == (total, total)
        nodes = sum(len(read_block(swarm.store, blob.cid)) for blob in blobs[1:])
        assert swarm.tally == FetchTally(bytes_fetched=total + nodes)
        assert all(server.bytes_served > total / 4 for server in servers)


async def test_nothing_is_asked_when_all_is_here(autojump_clock, tmp_path):
    async with open_swarm(tmp_path) as swarm:
        blob = add_blob(swarm.store, random_bytes(1, 5))
        await swarm.fetcher.fetch_blobs([], [blob])
        assert swarm.tally.bytes_fetched == 0
        assert swarm.tally.bytes_reused > blob.size


async def test_a_corrupted_block_is_refetched_elsewhere_and_never_stored(autojump_clock, tmp_path):
    async with open_swarm(tmp_path) as swarm:
        data = random_bytes(1, 30)
        blob = add_blob(swarm.source, data)
        liar = await swarm.provider("liar", CorruptingServer(swarm.source, corrupt=1))
        honest = await swarm.provider("honest")
        await swarm.fetcher.fetch_blobs([liar, honest], [blob])
        assert read_blob(swarm.store, blob) == data
        assert swarm.tally.bad_blocks == {liar: 1}
        assert swarm.tally.bytes_wasted > 0
        stored = [path for path in (tmp_path / "own" / "blocks").rglob("*") if path.is_file()]
        assert len(stored) == 31
        assert all(swarm.store.get(Cid(path.name)) is not None for path in stored)


async def test_a_sole_provider_that_corrupts_one_block_is_asked_again(autojump_clock, tmp_path):
    async with open_swarm(tmp_path) as swarm:
        data = random_bytes(1, 10)
        blob = add_blob(swarm.source, data)
        provider = await swarm.provider("p", CorruptingServer(swarm.source, corrupt=1))
        await swarm.fetcher.fetch_blobs([provider], [blob])
        assert read_blob(swarm.store, blob) == data
        assert swarm.tally.bad_blocks == {provider: 1}


async def test_a_provider_of_nothing_but_bad_blocks_is_given_up(autojump_clock, tmp_path):
    async with open_swarm(tmp_path) as swarm:
        blob = add_blob(swarm.source, random_bytes(1, 10))
        provider = await swarm.provider("p", CorruptingServer(swarm.source, corrupt=10_000))
        with pytest.raises(Unreachable, match="no provider is left"):
            await swarm.fetcher.fetch_blobs([provider], [blob])
        assert not [path for path in (tmp_path / "own").rglob("*") if path.is_file()]


async def test_a_provider_killed_half_way_costs_nothing_but_time(autojump_clock, tmp_path):
    async with open_swarm(tmp_path) as swarm:
        data = random_bytes(1, 60)
        blob = add_blob(swarm.source, data)
        providers = [await swarm.provider(name) for name in ("one", "two")]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(swarm.fetcher.fetch_blobs, providers, [blob])
            await trio.sleep(0.2)
            assert 0 < swarm.tally.bytes_fetched < blob.size / 2
            swarm.network.kill(providers[0])
        assert read_blob(swarm.store, blob) == data


async def test_a_download_that_was_killed_fetches_only_the_rest(autojump_clock, tmp_path):
    async with open_swarm(tmp_path) as swarm:
        data = random_bytes(1, 60)
        blob = add_blob(swarm.source, data)
        provider = await swarm.provider("p")
        with trio.move_on_after(0.4) as killed:
            await swarm.fetcher.fetch_blobs([provider], [blob])
        assert killed.cancelled_caught
        first = swarm.tally.bytes_fetched
        assert blob.size / 4 < first < blob.size
        swarm.restart()
        await swarm.fetcher.fetch_blobs([provider], [blob])
        assert read_blob(swarm.store, blob) == data
        assert swarm.tally.bytes_reused == first
        node_bytes = len(read_block(swarm.store, blob.cid))
        assert swarm.tally.bytes_fetched == blob.size + node_bytes - first


async def test_when_every_provider_is_gone_the_error_says_so_in_bounded_time(autojump_clock, tmp_path):
    async with open_swarm(tmp_path) as swarm:
        blob = add_blob(swarm.source, random_bytes(1, 60))
        providers = [await swarm.provider(name) for name in ("one", "two")]
        for provider in providers:
            swarm.network.kill(provider)
        started_at = trio.current_time()
        with pytest.raises(Unreachable, match=f"fetching 1 blocks from 2 providers: block {blob.cid} failed 8 times"):
            await swarm.fetcher.fetch_blobs(providers, [blob])
        assert trio.current_time() - started_at < 15
        with pytest.raises(Unreachable, match="no provider to ask"):
            await swarm.fetcher.fetch_blobs([], [blob])


async def test_a_slow_provider_does_not_hold_back_the_end(autojump_clock, tmp_path):
    async def seconds(names: dict[str, Link], folder: Path) -> float:
        async with open_swarm(folder) as swarm:
            blob = add_blob(swarm.source, random_bytes(1, 120))
            providers = [await swarm.provider(name, link=link) for name, link in names.items()]
            started_at = trio.current_time()
            await swarm.fetcher.fetch_blobs(providers, [blob])
            return trio.current_time() - started_at

    slow = replace(LINK, bandwidth_bytes_s=LINK.bandwidth_bytes_s / 50)
    healthy_s = await seconds({"a": LINK, "b": LINK}, tmp_path / "1")
    with_slow_s = await seconds({"a": LINK, "slow": slow, "b": LINK}, tmp_path / "2")
    assert with_slow_s < 1.2 * healthy_s + 1.0  # 1 s: the slow one may be the first that is asked for the node


class SilentServer(BlockServer):
    async def handle(self, method: int, body: memoryview) -> Sequence[bytes | memoryview]:
        await trio.sleep_forever()
        return ()


async def test_a_silent_provider_is_left_behind(autojump_clock, tmp_path):
    async with open_swarm(tmp_path) as swarm:
        data = random_bytes(1, 30)
        blob = add_blob(swarm.source, data)
        silent = await swarm.provider("silent", SilentServer(swarm.source))
        honest = await swarm.provider("honest")
        started_at = trio.current_time()
        await swarm.fetcher.fetch_blobs([silent, honest], [blob])
        assert read_blob(swarm.store, blob) == data
        assert trio.current_time() - started_at < 6.5  # the node is late after 4 s, then one honest provider


class LateServer(BlockServer):
    """Gives its first answer when it was long given up."""

    late_s = 4.3

    async def handle(self, method: int, body: memoryview) -> Sequence[bytes | memoryview]:
        answer = await super().handle(method, body)
        late_s, self.late_s = self.late_s, 0.0
        await trio.sleep(late_s)
        return answer


async def test_a_second_copy_of_a_late_block_counts_as_wasted_alone(autojump_clock, tmp_path):
    async with open_swarm(tmp_path) as swarm:
        blob = add_blob(swarm.source, random_bytes(1, 150))
        late = await swarm.provider("late", LateServer(swarm.source, run_blocking=run_inline))
        quick = await swarm.provider("quick")
        await swarm.fetcher.fetch_blobs([late, quick], [blob])
        node_bytes = len(read_block(swarm.store, blob.cid))
        assert swarm.tally == FetchTally(bytes_fetched=blob.size + node_bytes, bytes_wasted=node_bytes)


async def test_a_stream_that_never_opens_ends_in_bounded_time(autojump_clock, tmp_path):
    @asynccontextmanager
    async def never_open(provider: PeerId) -> AsyncIterator[BlockCalls]:
        await trio.sleep_forever()
        raise AssertionError
        yield

    blobs = [add_blob(BlockStore(tmp_path / "source"), bytes((n,)) * 100) for n in range(8)]
    fetcher = Fetcher(never_open, BlockStore(tmp_path / "own"), SETTINGS, FetchTally(), run_inline)
    with pytest.raises(Unreachable, match="no provider is left"):
        await fetcher.fetch_blobs([PeerId("p")], blobs)
    assert trio.current_time() < 5 * OPEN_TIMEOUT_S + 10  # five openings, and the pauses between


class ResettingServer(BlockServer):
    """Each stream lives for a moment, enough for about 15 blocks, and is cut with answers under way."""

    async def serve(self, stream) -> None:
        with trio.move_on_after(0.2):
            await super().serve(stream)
        await stream.reset()


async def test_a_stream_that_breaks_is_opened_again(autojump_clock, tmp_path):
    async with open_swarm(tmp_path) as swarm:
        data = random_bytes(1, 80)
        blob = add_blob(swarm.source, data)
        provider = await swarm.provider("p", ResettingServer(swarm.source, run_blocking=run_inline))
        await swarm.fetcher.fetch_blobs([provider], [blob])
        assert read_blob(swarm.store, blob) == data
        assert swarm.tally.bytes_fetched == blob.size + len(read_block(swarm.store, blob.cid))


class GarbageServer(BlockServer):
    def __init__(self, store: BlockStore, garbage: bytes) -> None:
        super().__init__(store, run_blocking=run_inline)
        self.garbage = garbage

    async def handle(self, method: int, body: memoryview) -> Sequence[bytes | memoryview]:
        return (self.garbage,)


@pytest.mark.parametrize(
    "garbage",
    [b"", b"\x00", b"\xff" * 3, b"\xfd\xff\xff\xff", b"\x01\x00\x00\x00", bytes(4096), b"\xfe\xff\xff\xff"],
)
async def test_garbage_for_an_answer_ends_in_unreachable(autojump_clock, tmp_path, garbage):
    async with open_swarm(tmp_path) as swarm:
        blob = add_blob(swarm.source, random_bytes(1, 3))
        provider = await swarm.provider("p", GarbageServer(swarm.source, garbage))
        with pytest.raises(Unreachable):
            await swarm.fetcher.fetch_blobs([provider], [blob])


async def test_a_block_that_nobody_has_is_named(autojump_clock, tmp_path):
    async with open_swarm(tmp_path) as swarm:
        blob = add_blob(swarm.source, random_bytes(1, 3))
        missing = cid_of(random_bytes(1, 3)[BLOCK_BYTES : 2 * BLOCK_BYTES])
        swarm.source.unmap(missing)
        providers = [await swarm.provider(name) for name in ("one", "two")]
        with pytest.raises(Unreachable, match=f"none of 2 providers has block {missing}"):
            await swarm.fetcher.fetch_blobs(providers, [blob])


@pytest.mark.parametrize("wrong_bytes", [1, -1])
async def test_a_blob_of_another_size_than_promised_is_refused(autojump_clock, tmp_path, wrong_bytes):
    async with open_swarm(tmp_path) as swarm:
        blob = add_blob(swarm.source, random_bytes(1, 3))
        wrong = BlobRef(blob.cid, blob.size + wrong_bytes)
        provider = await swarm.provider("p")
        with pytest.raises(DataError, match="were promised"):
            await swarm.fetcher.fetch_blobs([provider], [wrong])
        await swarm.fetcher.fetch_blobs([provider], [blob])
        with pytest.raises(DataError, match="promised"):
            read_blob(swarm.store, wrong)


async def test_a_full_disk_ends_the_download_with_a_capacity_error(autojump_clock, tmp_path):
    async with open_swarm(tmp_path) as swarm:
        blob = add_blob(swarm.source, random_bytes(1, 3))
        provider = await swarm.provider("p")
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        try:
            with pytest.raises(CapacityError, match="free some disk space"):
                await swarm.fetcher.fetch_blobs([provider], [blob])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_node_that_was_damaged_on_the_disk_is_fetched_again(autojump_clock, tmp_path):
    async with open_swarm(tmp_path) as swarm:
        data = random_bytes(1, 6)
        blob = add_blob(swarm.source, data)
        provider = await swarm.provider("p")
        await swarm.fetcher.fetch_blobs([provider], [blob])
        (file,) = (tmp_path / "own").rglob(blob.cid)
        file.write_bytes(b"damaged")
        swarm.restart()
        await swarm.fetcher.fetch_blobs([provider], [blob])
        assert read_blob(swarm.store, blob) == data
        assert swarm.tally.bytes_fetched < BLOCK_BYTES


def test_reading_a_blob_that_is_not_here_says_so(tmp_path):
    store = BlockStore(tmp_path)
    with pytest.raises(DataError, match="fetch its blob again"):
        read_blob(store, BlobRef(cid_of(b"x"), 1))


# The server alone.


async def test_an_answer_holds_what_fits_and_always_something(autojump_clock, tmp_path):
    store = BlockStore(tmp_path)
    blocks = [bytes((n,)) * 1000 for n in range(4)]
    for block in blocks:
        store.map(cid_of(block), (block,))
    wanted = [cid_of(b"missing"), *map(cid_of, blocks)]
    for answer_bytes_max, expected in ((1 << 20, 4), (2100, 2), (10, 1)):
        server = BlockServer(store, answer_bytes_max=answer_bytes_max, run_blocking=run_inline)
        answer = decode_answer(b"".join(await server.handle(1, memoryview(encode_want(wanted)))), len(wanted))
        assert list(answer) == [Absent.MISSING, *blocks[:expected], *[Absent.NOT_NOW] * (4 - expected)]


async def test_a_block_of_an_edited_checkpoint_counts_as_missing(autojump_clock, tmp_path):
    store, file = BlockStore(tmp_path), tmp_path / "shard"
    file.write_bytes(b"weights")
    store.map(cid_of(b"weights"), (FilePiece(file, 0, 7),))
    file.write_bytes(b"edited!")
    server = BlockServer(store, run_blocking=run_inline)
    answer = await server.handle(1, memoryview(encode_want([cid_of(b"weights")])))
    assert list(answer) == encode_answer([Absent.MISSING])


@pytest.mark.parametrize(
    ("method", "body", "reason"),
    [
        (2, encode_want([cid_of(b"x")]), RejectReason.UNKNOWN_METHOD),
        (1, b"", RejectReason.BAD_MESSAGE),
        (1, b"\x80", RejectReason.TOO_MANY),
        (1, bytes(10_000), RejectReason.TOO_LARGE),
    ],
)
async def test_a_hostile_call_is_refused_by_reason(autojump_clock, tmp_path, method, body, reason):
    server = BlockServer(BlockStore(tmp_path), run_blocking=run_inline)
    with pytest.raises(Misbehaved) as caught:
        await server.handle(method, memoryview(body))
    assert caught.value.reason is reason


# A slice of a real checkpoint, with disk threads and the real clock.


async def test_a_slice_is_fetched_by_the_models_id_alone(tmp_path):
    checkpoint = open_checkpoint(tiny_checkpoint(tmp_path / "tiny", experts=4))
    indexed = index_checkpoint(checkpoint, block_bytes=500)
    with trio.fail_after(20):
        async with open_memory_network() as network:
            coordinator, worker = network.transport("coordinator"), network.transport("worker")
            source = BlockStore(tmp_path / "source")
            for cid, block in indexed.blocks.items():
                source.map(cid, block)
            coordinator.set_handler(BLOCKS_PROTOCOL, BlockServer(source).serve)
            await worker.connect(coordinator.addresses())
            store = BlockStore(tmp_path / "own")
            fetcher = Fetcher(open_block_calls(worker), store, SETTINGS, FetchTally())
            manifest, experts = await fetcher.fetch_slice([coordinator.peer_id], indexed.model, SliceId(1, 1, 2))
            assert manifest == indexed.manifest
            assert [str(expert.index) for expert in experts] == ["1", "2"]
            for expert, blob in experts.items():
                tensors = parse_expert_file(read_blob(store, blob), manifest.expert_parts(expert.layer))
                for part, tensor in tensors.items():
                    assert torch.equal(tensor, read_tensor(checkpoint.experts[expert][part]))
            for wrong in (SliceId(2, 0, 1), SliceId(1, 0, 4)):
                with pytest.raises(DataError, match="has no slice"):
                    await fetcher.fetch_slice([coordinator.peer_id], indexed.model, wrong)


async def test_over_real_sockets_a_liar_is_blamed_and_the_blob_is_whole(tmp_path):
    settings = replace(NetworkSettings(), listen=("/ip4/127.0.0.1/tcp/0",))
    source = BlockStore(tmp_path / "source")
    data = random.Random(5).randbytes(3 << 20)
    blob = add_blob(source, data, 1 << 18)
    with trio.fail_after(30):
        async with (
            open_libp2p_transport(settings, tmp_path / "key1") as liar,
            open_libp2p_transport(settings, tmp_path / "key2") as honest,
            open_libp2p_transport(settings, tmp_path / "key3") as own,
        ):
            liar.set_handler(BLOCKS_PROTOCOL, CorruptingServer(source, corrupt=1).serve)
            honest.set_handler(BLOCKS_PROTOCOL, BlockServer(source).serve)
            providers = [await own.connect(transport.addresses()) for transport in (liar, honest)]
            tally, store = FetchTally(), BlockStore(tmp_path / "own")
            await Fetcher(open_block_calls(own), store, SETTINGS, tally).fetch_blobs(providers, [blob])
            assert read_blob(store, blob) == data
            assert tally.bad_blocks == {liar.peer_id: 1}


async def test_a_transport_without_the_peer_is_unreachable(autojump_clock, tmp_path):
    async with open_swarm(tmp_path) as swarm:
        other: MemoryTransport = swarm.network.transport("stranger")
        blob = add_blob(swarm.source, random_bytes(1, 3))
        with pytest.raises(Unreachable):
            await swarm.fetcher.fetch_blobs([other.peer_id], [blob])
