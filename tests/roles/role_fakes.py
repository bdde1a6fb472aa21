"""A hub, a coordinator that is scripted, and real workers on an in-memory network, all on a virtual clock."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import trio
from safetensors.torch import save_file

from kvasir_node.base.errors import KvasirError, Misbehaved
from kvasir_node.base.ids import PeerId, SliceId
from kvasir_node.base.settings import MIB, Settings, load_settings
from kvasir_node.decide.demand import Wanted
from kvasir_node.decide.market import MEET_S
from kvasir_node.decide.placement import HubsKnown, Stage
from kvasir_node.model.checkpoint import open_checkpoint
from kvasir_node.model.experts import load_from_checkpoint
from kvasir_node.model.indexing import index_checkpoint
from kvasir_node.net.memory_gossip import MemoryGossip
from kvasir_node.net.memory_net import Link, MemoryNetwork, MemoryTransport, open_memory_network
from kvasir_node.net.rpc import CallStream, one_call
from kvasir_node.net.transport import Stream
from kvasir_node.roles.content import BlockServer, Fetcher, open_block_calls, run_inline
from kvasir_node.roles.demand_tables import DemandTables
from kvasir_node.roles.download import FetchTally
from kvasir_node.roles.hub import DEMAND_KIND, Hub
from kvasir_node.roles.link import Compute, compute_here
from kvasir_node.roles.worker import Worker
from kvasir_node.store.blocks import BlockStore
from kvasir_node.wire.envelope import seal
from kvasir_node.wire.hub_proof import HubProofs, with_hub_proof
from kvasir_node.wire.messages import (
    BLOCKS_PROTOCOL,
    EXPERTS_PROTOCOL,
    MARKET_PROTOCOL,
    About,
    Attachment,
    DemandRecord,
    ExpertsMethod,
    MarketMethod,
    Standing,
)
from kvasir_node.wire.swarm_keys import read_secret
from kvasir_node.wire.tensors import ExpertRequest, read_answer, request_parts

SECRET = b"s" * 32
KEYS = read_secret(SECRET)
HIDDEN, INNER, EXPERTS, LAYERS = 8, 16, 8, 2
EXPERT_BYTES = 3 * HIDDEN * INNER * 4
SLICES = tuple(SliceId(layer, first, first + 1) for layer in range(LAYERS) for first in range(0, EXPERTS, 2))
WALL = 1_800_000_000.0  # the wall clock when trio's shows 0


def wall() -> float:
    return WALL + trio.current_time()


def settings_with(**flags: object) -> Settings:
    return load_settings(flags={key.replace("__", "."): value for key, value in flags.items()})


def tiny_checkpoint(folder: Path, experts: int = EXPERTS) -> Path:
    generator = torch.Generator().manual_seed(3)
    tensors = {"model.embed_tokens.weight": torch.randn(32, HIDDEN, generator=generator)}
    for layer in range(LAYERS):
        for expert in range(experts):
            for part, shape in (("gate", (INNER, HIDDEN)), ("up", (INNER, HIDDEN)), ("down", (HIDDEN, INNER))):
                key = f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
                tensors[key] = torch.randn(shape, generator=generator)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {
        "model_type": "qwen3_moe",
        "hidden_size": HIDDEN,
        "moe_intermediate_size": INNER,
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "head_dim": 4,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def request_for(part: SliceId, rows: int = 2) -> ExpertRequest:
    """Every row to every expert of the slice."""
    count = part.count
    return ExpertRequest(
        part.layer,
        torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(5)),
        torch.arange(rows, dtype=torch.int32).repeat_interleave(count),
        torch.arange(part.first, part.last + 1, dtype=torch.int32).repeat(rows),
        torch.full((rows * count,), 0.5),
    )


class FakeCoordinator:
    """Has the tiny model; proves a worker by one right answer, and tells its hub what it wants and who is proven."""

    def __init__(self, transport: MemoryTransport, folder: Path) -> None:
        checkpoint = open_checkpoint(folder)
        indexed = index_checkpoint(checkpoint, block_bytes=500)
        self.transport = transport
        self.model = indexed.model
        self.store = BlockStore(folder / "store")
        for cid, block in indexed.blocks.items():
            self.store.map(cid, block)
        self.shard = load_from_checkpoint(checkpoint, checkpoint.experts, torch.float32)
        self.blocks = BlockServer(self.store, run_blocking=run_inline)
        self.wants: dict[SliceId, int] = {}
        self.streams: dict[PeerId, CallStream] = {}
        self.attached: set[tuple[PeerId, SliceId]] = set()
        self.proven: set[tuple[PeerId, SliceId]] = set()
        self.log: list[tuple[str, str]] = []  # (attach | detach, slice)
        self.proves = True
        self.refusal: KvasirError | None = None  # what ATTACH is answered with
        self.is_frozen = False  # ATTACH and DETACH are never answered
        self.sequence = 0
        self.epoch = 1
        self.issued_ahead_s = 0.0
        self.refused: tuple[PeerId, ...] = ()
        transport.set_handler(BLOCKS_PROTOCOL, self.blocks.serve)
        transport.set_handler(EXPERTS_PROTOCOL, self.serve)

    async def serve(self, stream: Stream) -> None:
        async def handle(method: int, body: memoryview) -> Sequence[bytes]:
            if self.is_frozen:
                await trio.sleep_forever()
            (part,) = Attachment.from_bytes(body).slices
            self.log.append((ExpertsMethod(method).name.lower(), str(part)))
            if method == ExpertsMethod.ATTACH:
                if self.refusal is not None:
                    raise self.refusal
                self.attached.add((stream.peer, part))
                if self.proves:
                    nursery.start_soon(self.prove, stream.peer, part)
            else:
                self.attached.discard((stream.peer, part))
                self.proven.discard((stream.peer, part))
            return ()

        calls = self.streams[stream.peer] = CallStream(stream, handler=handle, in_flight_max=8, body_bytes_max=MIB)
        try:
            async with trio.open_nursery() as nursery:
                await calls.run()
                nursery.cancel_scope.cancel()
        finally:
            if self.streams.get(stream.peer) is calls:
                del self.streams[stream.peer]
                self.attached = {pair for pair in self.attached if pair[0] != stream.peer}
                self.proven = {pair for pair in self.proven if pair[0] != stream.peer}

    async def prove(self, peer: PeerId, part: SliceId) -> None:
        request = request_for(part)
        sums = await self.compute(peer, request)
        assert torch.allclose(sums, compute_here(self.shard, request), atol=1e-5)
        self.proven.add((peer, part))
        await self.tell(peer, part, "proven")

    async def compute(self, peer: PeerId, request: ExpertRequest) -> torch.Tensor:
        calls = self.streams[peer]
        body = await calls.call(int(ExpertsMethod.COMPUTE), *request_parts(request), timeout_s=5)
        rows = request.rows.shape[0]
        return read_answer(body, rows=rows, hidden_size=HIDDEN, dtype=torch.float32)

    async def tell(self, peer: PeerId, part: SliceId, state: str) -> None:
        await self.streams[peer].notify(int(ExpertsMethod.STANDING), Standing(part, state).to_bytes())

    def record(self) -> bytes:
        """A sealed demand record, the next one."""
        self.sequence += 1
        proven: dict[SliceId, list[PeerId]] = {}
        for peer, part in self.proven:
            proven.setdefault(part, []).append(peer)
        wants = [Wanted(p, self.wants.get(p, 0), tuple(sorted(proven.get(p, ())))) for p in {*self.wants, *proven}]
        record = DemandRecord(
            epoch=self.epoch,
            sequence=self.sequence,
            issued_at=wall() + self.issued_ahead_s,
            ttl_s=30.0,
            model=self.model,
            model_name="tiny",
            dtype="float32",
            slice_bytes=2 * EXPERT_BYTES,
            addresses=self.transport.addresses(),
            slots=1,
            busy=1,
            queued=1,
            wants=tuple(sorted(wants, key=lambda wanted: wanted.slice)),
            refused=self.refused,
        )
        return seal(DEMAND_KIND, record.to_bytes(), self.transport.peer_id, self.transport.sign)

    async def report(self, hub: Hub) -> None:
        await hub.handle(self.transport.peer_id, MarketMethod.REPORT, self.record())


def hub_on(
    transport: MemoryTransport,
    tables: list[Any] | None = None,
    *,
    other_hubs: Callable[[], Sequence[PeerId]] = lambda: (),
    **settings: object,
) -> Hub:
    async def ask_hub(hub: PeerId, method: MarketMethod, body: bytes) -> bytes | memoryview:
        return await one_call(transport, hub, MARKET_PROTOCOL, int(method), body, timeout_s=4)

    hub = Hub(
        settings_with(**settings).market,
        transport.peer_id,
        transport.sign,
        MemoryGossip(transport),
        "topic",
        prove=lambda record: with_hub_proof((KEYS,), transport.peer_id, record),
        may=lambda peer, role: True,
        addresses=transport.addresses,
        table_changed=lambda table: tables.append(table) if tables is not None else None,
        other_hubs=other_hubs,
        ask_hub=ask_hub,
        wall=wall,
    )
    transport.set_handler(MARKET_PROTOCOL, hub.serve)
    return hub


def tables_of(secret: bytes = SECRET, met: Sequence[PeerId] = (), interval_min_s: float = 1.0) -> DemandTables:
    return DemandTables(
        HubProofs(lambda: (read_secret(secret),)),
        clock_skew_max_s=600.0,
        interval_min_s=interval_min_s,
        is_met=lambda peer: peer in met,
        wall=wall,
    )


class WorkerPeer:
    """A real worker, with its transport and its store; `disk` = whose folders it has, if not its own."""

    def __init__(self, world: World, name: str, compute: Compute, disk: str = "", **settings: object) -> None:
        self.transport = world.network.transport(name)
        self.store = BlockStore(world.folder / (disk or name))
        config = settings_with(**settings)
        fetcher = Fetcher(open_block_calls(self.transport), self.store, config.store, FetchTally(), run_inline)
        self.worker = Worker(
            config,
            self.transport,
            fetcher,
            ask_hub=self.ask_hub,
            require_member=self.require_member,
            compute=compute,
            run_blocking=run_inline,
            seed=1,
            notes_path=world.folder / f"{disk or name}.slices",
        )

    @property
    def peer_id(self) -> PeerId:
        return self.transport.peer_id

    async def ask_hub(self, hub: PeerId, method: MarketMethod, body: bytes) -> bytes | memoryview:
        return await one_call(self.transport, hub, MARKET_PROTOCOL, int(method), body, timeout_s=4)

    async def require_member(self, peer: PeerId) -> None:
        await trio.lowlevel.checkpoint()

    def stages(self) -> list[Stage]:
        return [stage for _, stage in self.worker._mind.stages().values()]

    async def assert_empty(self) -> None:
        """Nothing is kept of leases that are over, a moment later."""
        await trio.sleep(0.05)
        worker = self.worker
        assert worker._holdings.reserved_bytes == 0
        assert worker._holdings._models == {}
        for table in (worker._fetched, worker._steps, worker._progress, worker._links, worker._linking):
            assert table == {}
        assert not [s for s in self.transport.streams if s.protocol == EXPERTS_PROTOCOL]


class World:
    """One hub, one coordinator; workers are added."""

    def __init__(self, network: MemoryNetwork, nursery: trio.Nursery, folder: Path, **settings: object) -> None:
        self.network, self.nursery, self.folder, self.settings = network, nursery, folder, settings
        network.set_link(None, None, Link(latency_s=0.001))
        self.hub_transport = network.transport("hub")
        self.hub = hub_on(self.hub_transport, **settings)
        self.coordinator = self.add_coordinator("carl")

    def add_coordinator(self, name: str) -> FakeCoordinator:
        """Several coordinators of the same tiny model may serve at once."""
        folder = self.folder / name
        return FakeCoordinator(self.network.transport(name), tiny_checkpoint(folder))

    async def add_worker(self, name: str = "ann", compute: Compute = compute_here, **settings: object) -> WorkerPeer:
        peer = WorkerPeer(self, name, compute, **{**self.settings, **settings})
        await peer.transport.connect(self.hub_transport.addresses())
        self.nursery.start_soon(peer.worker.run)
        peer.worker.tell(HubsKnown((self.hub_transport.peer_id,)))
        return peer

    async def keep_reporting(self, coordinator: FakeCoordinator | None = None) -> None:
        """As a coordinator does: each second, for ever; a hub that is being restarted is told later."""
        while True:
            await (coordinator or self.coordinator).report(self.hub)
            await trio.sleep(1)

    async def until(self, seen: Any, timeout_s: float = 60.0) -> None:
        """Polls often enough that a test sees each stage; virtual time costs nothing."""
        with trio.fail_after(timeout_s):
            while not seen():  # noqa: ASYNC110  (what is waited for tells nobody)
                await trio.sleep(0.01)


@asynccontextmanager
async def open_world(folder: Path, **settings: object) -> AsyncIterator[World]:
    async with open_memory_network(seed=1) as network, trio.open_nursery() as nursery:
        world = World(network, nursery, folder, **settings)
        await trio.sleep(MEET_S)  # of the hub
        yield world
        nursery.cancel_scope.cancel()


def with_slices(part: Sequence[SliceId] = SLICES, want: int = 1) -> dict[SliceId, int]:
    return dict.fromkeys(part, want)


def granted(says: bytes, peer: PeerId, secret: bytes = SECRET) -> bytes:
    """What a member says of itself, with the grants of its secret; what cannot be read stays as it is."""
    try:
        about = About.from_bytes(says)
    except Misbehaved:
        return says
    return replace(about, grants=tuple(read_secret(secret).grants(peer).items())).to_bytes()
