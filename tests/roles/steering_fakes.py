"""A world for steering on a virtual clock: true costs, a load and a crew that the test sets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio

from kvasir_node.base.ids import PeerId, SliceId
from kvasir_node.base.settings import FanoutSettings
from kvasir_node.decide.dealing import Dealings
from kvasir_node.roles.costing import Costing
from kvasir_node.roles.measured import CallMeasured, ForwardMeasured, LayerMeasured, StepMeasured
from kvasir_node.roles.steering import Load, Shape, Steering

ANN, BOB = PeerId("ann"), PeerId("bob")
LAYERS, EXPERTS, CHOSEN, SLOTS = 3, 48, 4, 16
SHAPE = Shape(tuple(range(LAYERS)), EXPERTS, CHOSEN, 2048, SLOTS, 256)
EVERYTHING = {layer: frozenset(range(EXPERTS)) for layer in range(LAYERS)}
TRUNK_S, TRUNK_ROW_S, EXPERT_S, PAIR_S, OWN_CALL_S = 4e-3, 2e-4, 5e-4, 3e-5, 3e-4


def all_of(*peers: PeerId) -> tuple[tuple[PeerId, SliceId], ...]:
    return tuple((peer, SliceId(layer, 0, EXPERTS - 1)) for peer in peers for layer in range(LAYERS))


def activated_of(rows: int, experts: int = EXPERTS) -> int:
    """How many of so many experts that many rows want."""
    return round(experts * (1 - (1 - CHOSEN / EXPERTS) ** rows))


def computing_s(activated: int, pairs: int) -> float:
    """Here, of one layer."""
    return EXPERT_S * activated + PAIR_S * pairs


@dataclass
class Worker:
    slower: float = 1.0
    rtt_s: float = 3e-4
    bytes_s: float = 1e9


@dataclass
class Lanes:
    lanes: int = 1


@dataclass
class World:
    """What steering sees, and what it did."""

    workers: dict[PeerId, Worker] = field(default_factory=dict)
    proven: tuple[tuple[PeerId, SliceId], ...] = ()
    held: dict[int, frozenset[int]] = field(default_factory=lambda: dict(EVERYTHING))
    load: Load = field(default_factory=lambda: Load(False, 0, 1, False))
    planning_s: float = 0.0
    used_s: float = 0.0
    plans: int = 0
    planning: int = 0
    set: list[tuple[float, dict, dict]] = field(default_factory=list)  # at, planned for decode, for prompts: changes
    dealt: tuple[Dealings, Dealings] = ({}, {})
    looks: Dealings = field(default_factory=dict)
    without_channel: frozenset[PeerId] = frozenset()
    engine: Lanes = field(default_factory=Lanes)
    steering: Steering = None  # type: ignore[assignment]
    costing: Costing = None  # type: ignore[assignment]

    async def run_blocking(self, work: Callable[..., object], *args: object) -> object:
        assert self.planning == 0, "two plans at a time"
        self.planning += 1
        await trio.sleep(self.planning_s)
        self.planning -= 1
        self.plans += 1
        return work(*args)

    def used(self) -> float:
        """Processor time, asked for before and after a plan."""
        self.used_s += self.planning_s
        return self.used_s

    def saturate(self, queued: int = 9) -> None:
        self.load = Load(True, queued, SLOTS, True)
        self.steering.load_changed()

    def calm(self) -> None:
        self.load = Load(False, 0, 1, True)
        self.steering.load_changed()

    def prove(self, *peers: PeerId) -> None:
        self.proven = all_of(*peers)
        self.steering.world_changed()

    def measure(self) -> None:
        """What forwards and calls of all sizes take, told once."""
        for rows in (1, 4, 16, 256):
            self.measure_forward(rows, OWN_CALL_S)
            for peer in self.workers:
                self.measure_call(peer, rows, activated_of(rows), rows * CHOSEN)

    def measure_forward(self, rows: int, own_call_s: float | None) -> None:
        layer = LayerMeasured(activated_of(rows), rows * CHOSEN, computing_s(activated_of(rows), rows * CHOSEN))
        self.costing.forward_measured(ForwardMeasured(rows, TRUNK_S + TRUNK_ROW_S * rows, layer, own_call_s))

    def measure_call(self, peer: PeerId, rows: int, activated: int, pairs: int) -> float:
        """Returns what it took, in seconds."""
        worker = self.workers[peer]
        computed_s = worker.slower * computing_s(activated, pairs)
        took_s = worker.rtt_s + 4096 * rows / worker.bytes_s + computed_s
        self.costing.call_measured(CallMeasured(peer, activated, pairs, 2048 * rows, 2048 * rows, took_s, computed_s))
        return took_s

    def step(self, tokens_per_s: float, *, prompt_rows: int = 0) -> None:
        rows = SLOTS + prompt_rows
        self.steering.stepped(StepMeasured((1,), rows, rows / tokens_per_s, prompt_rows > 0))

    def dealings_set(self, decode: Dealings, prompt: Dealings, looks: Dealings) -> None:
        self.dealt, self.looks = (decode, prompt), looks
        home = dict.fromkeys(SHAPE.layers, (None,) * EXPERTS)
        rows = tuple(home | {layer: each.planned() for layer, each in dealings.items()} for dealings in self.dealt)
        if not self.set or self.set[-1][1:] != rows:
            self.set.append((trio.current_time(), *rows))

    @property
    def decode(self) -> dict:
        return self.set[-1][1]

    @property
    def prompt(self) -> dict:
        return self.set[-1][2]

    def peers(self) -> set[PeerId | None]:
        """Who computes something."""
        return {peer for routes in self.set[-1][1:] for row in routes.values() for peer in row}


@asynccontextmanager
async def open_world(
    settings: FanoutSettings | None = None, *, measures: bool = True, **changes: object
) -> AsyncIterator[World]:
    """`measures`: what all forwards and calls take is told all the time, whatever is in force."""
    world = World(**changes)  # type: ignore[arg-type]
    world.costing = Costing(decode_rows_max=SLOTS, chosen=CHOSEN, borrow_s=0.05, clock=trio.current_time)
    world.steering = Steering(
        settings or FanoutSettings(),
        SHAPE,
        world.held,
        world.costing,
        world.engine,
        proven=lambda: world.proven,
        heat=dict,
        load=lambda: world.load,
        round_trips=lambda: {peer: worker.rtt_s for peer, worker in world.workers.items()},
        has_channel=lambda peer: peer not in world.without_channel,
        set_routes=lambda *dealt: world.dealings_set(*dealt),
        run_blocking=world.run_blocking,
        clock=trio.current_time,
        used=world.used,
    )

    async def keep_measuring() -> None:
        while measures:
            world.measure()
            await trio.sleep(0.1)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_measuring)
        nursery.start_soon(world.steering.run)
        yield world
        nursery.cancel_scope.cancel()


NEAR = {ANN: Worker()}
