"""A coordinator and hub that does nothing of its own accord: it offers the slices it is told to, serves their blocks,
and calls a worker when a test says so. For figures that a whole node's business would blur."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import trio

from kvasir_node.base.ids import DAG_CBOR_CODEC, Cid, ModelId, PeerId, SliceId, cid_of
from kvasir_node.base.settings import NetworkSettings
from kvasir_node.model.expert_parts import in_order
from kvasir_node.model.manifest import LayerNode, Manifest, encode_layer_node, encode_manifest
from kvasir_node.model.maths import ExpertMaths
from kvasir_node.model.tensor_file import TensorSpec, expert_file
from kvasir_node.net.hello import Membership
from kvasir_node.net.libp2p_host import Libp2pTransport, open_libp2p_transport
from kvasir_node.net.rpc import CallStream, call_handler
from kvasir_node.net.transport import Stream
from kvasir_node.roles.content import BlockServer
from kvasir_node.roles.pairing import Pairing
from kvasir_node.wire.blobs import BlobRef, encode_blob_node
from kvasir_node.wire.guest_pass import PAIR_PROTOCOL
from kvasir_node.wire.messages import (
    BLOCKS_PROTOCOL,
    EXPERTS_PROTOCOL,
    MARKET_PROTOCOL,
    About,
    Attachment,
    ExpertsMethod,
    LeaseVerdict,
    MarketMethod,
    NoOffer,
    Offer,
    Poll,
    Renewals,
    Standing,
    Verdicts,
)
from kvasir_node.wire.swarm_keys import read_secret
from kvasir_node.wire.tensors import ExpertRequest, request_parts
from kvasir_node.wire.ticket import Ticket, write_ticket

SECRET = bytes(range(32))
BLOCK_BYTES = 1 << 20
TTL_S = 600.0
BODY_BYTES_MAX = 32 << 20


class MadeModel:
    """Experts of bfloat16 noise, each another one, as blocks in memory."""

    def __init__(self, layers: int, experts: int, width: int, inner: int) -> None:
        self.blocks: dict[Cid, bytes] = {}
        shapes = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
        parts: dict[str, TensorSpec] = {n: ("BF16", shapes[n], 2 * width * inner) for n in in_order(shapes)}
        header = expert_file(parts)
        noise = (torch.randn(3 * width * inner) * 0.02).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
        nodes = {}
        for layer in range(layers):
            refs = []
            for index in range(experts):
                cut = 2 * (layer * experts + index + 1)
                refs.append(self._blob(header + noise[cut:] + noise[:cut]))
            nodes[layer] = self._keep(encode_layer_node(LayerNode(layer, tuple(refs))), DAG_CBOR_CODEC)
        blob = BlobRef(cid_of(b""), 0)
        manifest = Manifest(
            name="made", family="made", config=blob, maths=ExpertMaths().to_dict(), layer_nodes=nodes,
            experts_per_layer=experts, chosen_per_row=2, hidden_size=width, expert_hidden_size=inner,
            layer_parts=dict.fromkeys(range(layers), parts), files={}, trunk=blob,
        )  # fmt: skip
        self.id = ModelId(self._keep(encode_manifest(manifest), DAG_CBOR_CODEC))
        self.width = width
        self.slices = [SliceId(layer, 0, experts - 1) for layer in range(layers)]
        self.expert_bytes = layers * experts * len(header + noise)

    def _keep(self, data: bytes, codec: int) -> Cid:
        cid = cid_of(data, codec)
        self.blocks[cid] = data
        return cid

    def _blob(self, data: bytes) -> BlobRef:
        cids = [self._keep(data[at : at + BLOCK_BYTES], 0x55) for at in range(0, len(data), BLOCK_BYTES)]
        if len(cids) == 1:
            return BlobRef(cids[0], len(data))
        return BlobRef(self._keep(encode_blob_node(len(data), cids), DAG_CBOR_CODEC), len(data))

    # As much of a BlockStore as a BlockServer uses.

    def size(self, cid: Cid) -> int | None:
        block = self.blocks.get(cid)
        return None if block is None else len(block)

    def get(self, cid: Cid) -> bytes | None:
        return self.blocks.get(cid)


@dataclass(eq=False)
class LoneCoordinator:
    model: MadeModel
    transport: Libp2pTransport
    offers: list[SliceId]  # what pollers are still offered, to each peer all of them
    names: dict[PeerId, str] = field(default_factory=dict)
    calls: dict[PeerId, CallStream] = field(default_factory=dict)
    attached: dict[PeerId, dict[SliceId, float]] = field(default_factory=dict)  # and when
    first_want_at: float | None = None
    server: BlockServer | None = None
    pairing: Pairing | None = None

    def ticket(self) -> str:
        """For a worker in Python, which then comes over a WebSocket as a page does."""
        addresses = tuple(each for each in self.transport.addresses() if "/ws/" in each)
        return write_ticket(Ticket(SECRET, addresses))

    def link(self) -> str:
        assert self.pairing is not None
        return self.pairing.invite().link

    def market(self, peer: PeerId) -> Any:
        async def handle(method: int, body: memoryview) -> Sequence[bytes]:
            if method == MarketMethod.POLL:
                return (self._offer(peer, Poll.from_bytes(body)),)
            if method == MarketMethod.RENEW:
                renewals = Renewals.from_bytes(body).leases
                return (Verdicts(tuple(LeaseVerdict(TTL_S, "") for _ in renewals)).to_bytes(),)
            return (b"",)

        return handle

    def _offer(self, peer: PeerId, poll: Poll) -> bytes:
        busy = {part for _, part in poll.busy}
        part = next((each for each in self.offers if each not in busy), None)
        if part is None:
            return NoOffer(1.0).to_bytes()
        own = self.transport.peer_id
        lease, addresses = f"{part}/{peer[-6:]}", tuple(self.transport.addresses())
        return Offer(lease, self.model.id, "float32", part, own, addresses, TTL_S).to_bytes()

    async def experts(self, stream: Stream) -> None:
        peer = stream.peer

        async def handle(method: int, body: memoryview) -> Sequence[bytes]:
            if method == ExpertsMethod.ATTACH:
                for part in Attachment.from_bytes(body).slices:
                    self.attached.setdefault(peer, {})[part] = time.perf_counter()
                    standing = Standing(part, "proven").to_bytes()
                    await self.calls[peer].notify(int(ExpertsMethod.STANDING), standing)
            elif method == ExpertsMethod.DETACH:
                for part in Attachment.from_bytes(body).slices:
                    self.attached.get(peer, {}).pop(part, None)
            return (b"",)

        self.calls[peer] = CallStream(stream, handler=handle, in_flight_max=8, body_bytes_max=BODY_BYTES_MAX)
        await self.calls[peer].run()

    async def blocks(self, stream: Stream) -> None:
        if self.first_want_at is None:
            self.first_want_at = time.perf_counter()
        assert self.server is not None
        await self.server.serve(stream)

    def request(self, layer: int, rows: int, chosen: int, generator: torch.Generator) -> list[bytes | memoryview]:
        experts = self.model.slices[layer].count
        each = [torch.randperm(experts, generator=generator)[:chosen] for _ in range(rows)]
        request = ExpertRequest(
            layer,
            torch.randn(rows, self.model.width, generator=generator),
            torch.arange(rows, dtype=torch.int32).repeat_interleave(chosen),
            torch.cat(each).to(torch.int32),
            torch.rand(rows * chosen, generator=generator),
        )
        return request_parts(request)

    async def call(self, peer: PeerId, parts: Sequence[bytes | memoryview]) -> float:
        """Seconds that one call takes, there and back."""
        began_at = time.perf_counter()
        await self.calls[peer].call(int(ExpertsMethod.COMPUTE), *parts, timeout_s=30)
        return time.perf_counter() - began_at


@asynccontextmanager
async def open_lone_coordinator(model: MadeModel, folder: Path) -> AsyncIterator[LoneCoordinator]:
    keys = read_secret(SECRET)
    settings = replace(NetworkSettings(), listen=("/ip4/127.0.0.1/tcp/0",))
    async with open_libp2p_transport(settings, folder / "lone.key") as transport:
        roles, grants = ("hub", "coordinator"), tuple(keys.grants(transport.peer_id).items())
        about = About("lone", "1.0.0", roles, tuple(transport.addresses()), grants)
        membership = Membership(transport, keys.entry, about.to_bytes())
        lone = LoneCoordinator(model, transport, [])
        lone.server = BlockServer(model)  # type: ignore[arg-type]
        lone.pairing = Pairing(
            transport.peer_id, lambda: keys, code_s=600, addresses=transport.addresses, hubs=transport.addresses,
            refusal_of=lambda _: None, address_of=lambda _: "", outward_host=lambda: "127.0.0.1",
        )  # fmt: skip
        market = call_handler(lone.market, in_flight_max=16, body_bytes_max=1 << 20)
        transport.set_handler(PAIR_PROTOCOL, lone.pairing.serve)
        transport.set_handler(MARKET_PROTOCOL, membership.guard(market))
        transport.set_handler(EXPERTS_PROTOCOL, membership.guard(lone.experts))
        transport.set_handler(BLOCKS_PROTOCOL, membership.guard(lone.blocks))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(membership.run)
            yield lone
            nursery.cancel_scope.cancel()
