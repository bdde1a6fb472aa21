"""Fan-out at tiny size: random experts with a checkpoint on disk, a crew without a network, scripted workers."""

from __future__ import annotations

import random
import threading
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
import trio
from safetensors.torch import save_file

from kvasir_node.base.errors import KvasirError, Unreachable
from kvasir_node.base.ids import ExpertId, ModelId, PeerId, SliceId, cid_of
from kvasir_node.base.settings import FanoutSettings
from kvasir_node.decide.call_times import CallLimits
from kvasir_node.decide.dealing import fixed
from kvasir_node.decide.prediction import Routes
from kvasir_node.decide.spot_checks import SpotChecks
from kvasir_node.model.checkpoint import Checkpoint, ExpertMaths
from kvasir_node.model.experts import ExpertShard
from kvasir_node.model.pair_split import DealTable, PairSplitter
from kvasir_node.model.tensor_file import read_header, read_tensor
from kvasir_node.net.express import ExpressChannel
from kvasir_node.net.memory_net import MemoryNetwork, MemoryTransport
from kvasir_node.net.rpc import CallStream
from kvasir_node.roles.content import run_inline
from kvasir_node.roles.crew import Crew
from kvasir_node.roles.dispatch import FanoutDispatch
from kvasir_node.roles.own_experts import OwnExperts
from kvasir_node.roles.remote_call import RemoteCall, Served
from kvasir_node.wire.messages import EXPERTS_PROTOCOL, Attachment, ExpertsMethod, Standing
from kvasir_node.wire.tensors import Encoding, ExpertRequest, answer_parts, read_request

D, INNER, EXPERTS, LAYERS = 16, 8, 8, (0, 1, 2)
MODEL = ModelId(cid_of(b"a model"))
ANN, BOB, CYD = PeerId("ann"), PeerId("bob"), PeerId("cyd")


def make_checkpoint(folder: Path, seed: int = 1, scale: float = 0.3) -> Checkpoint:
    """Random experts in a file, as a checkpoint that has nothing else."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in LAYERS:
        for index in range(EXPERTS):
            for part, shape in (("gate", (INNER, D)), ("up", (INNER, D)), ("down", (D, INNER))):
                tensors[f"{layer}.{index}.{part}"] = torch.randn(shape, generator=generator) * scale
    file = folder / "experts.safetensors"
    save_file(tensors, file)
    ranges = read_header(file)
    experts = {
        ExpertId(layer, index): {part: ranges[f"{layer}.{index}.{part}"] for part in ("gate", "up", "down")}
        for layer in LAYERS
        for index in range(EXPERTS)
    }
    return Checkpoint(folder, {}, "qwen3_moe", ExpertMaths(), LAYERS, EXPERTS, 2, D, INNER, experts, {}, ())


def make_shard(checkpoint: Checkpoint, hold: Callable[[int], bool] = lambda index: True) -> ExpertShard:
    shard = ExpertShard(checkpoint.maths, D, INNER)
    for expert, parts in checkpoint.experts.items():
        if hold(expert.index):
            shard.add(expert, {part: read_tensor(tensor) for part, tensor in parts.items()})
    return shard


def make_own(
    checkpoint: Checkpoint, hold: Callable[[int], bool] = lambda index: True, borrowed_bytes_max: int = 1 << 20
) -> OwnExperts:
    shard = make_shard(checkpoint, hold)
    return OwnExperts(shard, checkpoint, {layer: shard.held(layer) for layer in LAYERS}, borrowed_bytes_max)


def random_rows(seed: int, count: int = 5, each: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """rows [T,D], chosen [T,K] without repeats in a row, weights [T,K]."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.stack([torch.randperm(EXPERTS, generator=generator)[:each] for _ in range(count)])
    return torch.randn(count, D, generator=generator), chosen, torch.rand(count, each, generator=generator)


def honest_body(own: OwnExperts, request: ExpertRequest) -> bytes:
    return b"".join(answer_parts(own.sums(request)))


def changed_body(own: OwnExperts, request: ExpertRequest, change: Callable[[torch.Tensor], torch.Tensor]) -> memoryview:
    return memoryview(bytearray(b"".join(answer_parts(change(own.sums(request))))))


Answer = Callable[[RemoteCall], memoryview | KvasirError | None]


class FakeCrew:
    """Answers each call at once as `answers[peer]` says; None = never. Remembers everything.

    A call is late after `hedge_s`, by default with its deadline. `able`: who has which experts, of every layer.
    """

    def __init__(
        self,
        answers: dict[PeerId, Answer],
        deadline_s: float | None = 0.0,
        *,
        hedge_s: float | None = None,
        able: dict[PeerId, set[int]] | None = None,
    ) -> None:
        self.answers = answers
        self.deadline = deadline_s
        self.hedge = deadline_s if hedge_s is None else hedge_s
        self.able = able or {}
        self.channels: dict[PeerId, ExpressChannel] = {}
        self.batches: list[list[RemoteCall]] = []
        self.reports: list[tuple[PeerId, KvasirError | None, bool]] = []
        self.heard: list[Served] = []
        self.timed: list[RemoteCall] = []
        self.untimed: list[ExpressChannel] = []
        self.echoed: list[float] = []
        self.offered: list[int] = []

    @property
    def calls(self) -> list[RemoteCall]:
        return [call for batch in self.batches for call in batch]

    def limits_of(self, peer: PeerId, pairs: int, own_s: float) -> CallLimits | None:
        return None if self.deadline is None or self.hedge is None else CallLimits(self.hedge, self.deadline)

    def channel(self, peer: PeerId) -> ExpressChannel | None:
        return self.channels.get(peer)

    def untimed_channels(self) -> list[ExpressChannel]:
        return self.untimed

    def time_channel(self, channel: ExpressChannel) -> None:
        self.untimed.remove(channel)
        self.echoed.append(channel.echo_s(100, 5.0))

    def replicas(self, layer: int, experts: Collection[int]) -> list[tuple[PeerId, float | None]]:
        return [(peer, 0.0) for peer, its in self.able.items() if its.issuperset(experts)]

    def send(self, calls: Sequence[RemoteCall]) -> None:
        self.batches.append(list(calls))
        for call in calls:
            result = self.answers[call.peer](call)
            if result is not None:
                call.deliver(result)

    def took(self, call: RemoteCall) -> None:
        self.timed.append(call)

    def failed(self, call: RemoteCall, error: KvasirError, *, wrong: bool = False) -> None:
        self.reports.append((call.peer, error, wrong))

    def served(self, served: Served) -> None:
        self.heard.append(served)
        self.reports += [(peer, None, False) for peer, calls in served.calls.items() for _ in range(calls)]

    def offer_trial(self, layer: int, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> None:
        self.offered.append(layer)


def make_dispatch(own: OwnExperts, crew: FakeCrew, *, checks: bool = False, **changes: object) -> FanoutDispatch:
    options = {
        "dtype": torch.float32,
        "spot_checks": SpotChecks(float(checks), random.Random(1)),
        "patience_s": 2.0,
        "body_bytes_max": 1 << 25,
        **changes,
    }
    return FanoutDispatch(own, LAYERS, EXPERTS, crew=crew, **options)  # type: ignore[arg-type]


def route_of(*peers: PeerId | None, layers: Sequence[int] = LAYERS) -> Routes:
    """The same row for each layer: `peers` over and over."""
    return dict.fromkeys(layers, tuple(peers[index % len(peers)] for index in range(EXPERTS)))


def follow(dispatch: FanoutDispatch, routes: Routes) -> None:
    """Forwards of any size go by these routes."""
    dispatch.set_routes(fixed(routes), {}, 1 << 20)


# A crew with a network ------------------------------------------------------------------------------------------

SLICES = tuple(SliceId(layer, first, first + 3) for layer in LAYERS for first in (0, 4))


class Loop:
    """A real Crew on a memory network, and what it told the coordinator around it."""

    def __init__(self, network: MemoryNetwork, own: OwnExperts, settings: FanoutSettings) -> None:
        self.network = network
        self.own = own
        self.transport = network.transport("coordinator")
        self.changed: list[frozenset[int]] = []
        self.trial_layers: frozenset[int] = frozenset()
        self.addresses: dict[PeerId, str] = {}
        self.now_s = 0.0
        self.slept_s = 0.0
        held = {layer: own._held[layer] for layer in LAYERS}
        self.crew = Crew(
            settings,
            MODEL,
            "float32",
            frozenset(SLICES),
            held,
            own_sums=own.sums,
            changed=self.changed.append,
            trial_layers_changed=lambda layers: setattr(self, "trial_layers", layers),
            name_of=str,
            address_of=lambda peer: self.addresses.get(peer, str(peer)),
            body_bytes_max=1 << 20,
            ping=self.transport.ping,
            run_blocking=run_inline,
            clock=lambda: self.now_s,
            wall_clock=lambda: trio.current_time() + self.slept_s,
        )
        self.transport.set_handler(EXPERTS_PROTOCOL, self.crew.serve)

    async def forward(self, seed: int = 0, count: int = 8) -> None:
        """A tick of the coordinator, then what a forward does for trials: it offers rows where one is wanted."""
        self.crew.trials.plan()
        rows, chosen, weights = random_rows(seed, count)
        for layer in sorted(self.trial_layers):
            self.crew.offer_trial(layer, rows, chosen, weights)
        await trio.sleep(0.1)

    def call(self, peer: PeerId, part: SliceId, seed: int = 0, deadline_s: float = 1.0) -> RemoteCall:
        """A call with rows for all experts of a slice, sent."""
        rows, _, weights = random_rows(seed, part.count, 1)
        chosen = torch.arange(part.first, part.last + 1)[:, None]
        table = DealTable(fixed({0: (peer,) * EXPERTS})[0])
        (cut,) = PairSplitter(torch.float32).split(table, (True, True), rows, chosen, weights).parts
        call = RemoteCall(peer, part.layer, cut, D, Encoding.FLOAT32, CallLimits(deadline_s, deadline_s), seed)
        self.crew.send([call])
        return call

    def ended(self, call: RemoteCall, error: KvasirError | None = None, *, wrong: bool = False) -> None:
        """What a computing thread tells of a call."""
        if error is not None:
            self.crew.failed(call, error, wrong=wrong)
            return
        experts = frozenset(call.request.pair_expert.tolist())
        self.crew.served(Served({call.peer: 1}, {call.peer: call.part.rows}, [(call.peer, call.layer, experts)]))

    def standing(self, peer: PeerId, part: SliceId) -> str:
        return str(self.crew.ledger.standing(peer, part))


@asynccontextmanager
async def open_loop(
    network: MemoryNetwork, own: OwnExperts, settings: FanoutSettings | None = None, **changes: object
) -> AsyncIterator[Loop]:
    loop = Loop(network, own, replace(settings or FanoutSettings(), **changes))  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        await nursery.start(loop.crew.run)
        yield loop
        nursery.cancel_scope.cancel()


Compute = Callable[[ExpertRequest], Sequence[bytes | memoryview]]


class Coordinating(Protocol):
    """What a scripted worker needs of whom it works for: `own` gives it the right answers."""

    @property
    def own(self) -> OwnExperts: ...

    @property
    def transport(self) -> MemoryTransport: ...


class ScriptedWorker:
    """A worker's end of one call stream, which does what the test says."""

    def __init__(self, loop: Coordinating, transport: MemoryTransport, compute: Compute | None = None) -> None:
        self.loop = loop
        self.transport = transport
        self.compute = compute or (lambda request: answer_parts(loop.own.sums(request), request.encoding))
        self.silent = False
        self.held_back: trio.Event | None = None  # answers wait for it
        self.requests: list[ExpertRequest] = []
        self.told: list[tuple[SliceId, str]] = []
        self.answering = 0
        self.stopped = trio.Event()
        self.calls: CallStream | None = None

    @property
    def peer(self) -> PeerId:
        return self.transport.peer_id

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        await self.transport.connect(self.loop.transport.addresses())
        stream = await self.transport.open_stream(self.loop.transport.peer_id, EXPERTS_PROTOCOL)
        self.calls = CallStream(
            stream, handler=self._handle, in_flight_max=8, body_bytes_max=1 << 20, on_notice=self._on_notice
        )
        self.stopped = stopped = trio.Event()
        task_status.started()
        try:
            await self.calls.run()
        finally:
            await stream.reset()
            stopped.set()

    async def _handle(self, method: int, body: memoryview) -> Sequence[bytes | memoryview]:
        assert method == ExpertsMethod.COMPUTE
        request = read_request(body, hidden_size=self.loop.own.hidden_size)
        self.requests.append(request)
        self.answering += 1
        try:
            if self.silent:
                await trio.sleep_forever()
            if self.held_back is not None:
                await self.held_back.wait()
            return self.compute(request)
        finally:
            self.answering -= 1

    def _on_notice(self, method: int, body: memoryview) -> None:
        told = Standing.from_bytes(body)
        self.told.append((told.slice, told.state))

    async def say(
        self, method: ExpertsMethod, *slices: SliceId, model: ModelId = MODEL, dtype: str = "float32"
    ) -> None:
        if self.calls is None:
            raise Unreachable("run first")
        await self.calls.call(int(method), Attachment(model, dtype, slices).to_bytes(), timeout_s=5.0)

    async def attach(self, *slices: SliceId) -> None:
        await self.say(ExpertsMethod.ATTACH, *slices)


def in_thread(function: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread
