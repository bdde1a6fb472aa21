"""Looks, by steering on a virtual clock: what was believed wrongly of a worker is found out while fan-out is off.

Forwards and calls are told as the dispatch would: of a worker only while something is sent to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import trio
from steering_fakes import (
    ANN,
    BOB,
    CHOSEN,
    EVERYTHING,
    EXPERTS,
    LAYERS,
    OWN_CALL_S,
    SLOTS,
    TRUNK_ROW_S,
    TRUNK_S,
    Worker,
    World,
    activated_of,
    computing_s,
    open_world,
)

from kvasir_node.base.settings import FanoutSettings
from kvasir_node.decide.dealing import Dealing
from kvasir_node.decide.looks import LOOK_LOSS_S, LOOK_RESTS, LookPace
from kvasir_node.roles.steering import Load

SLOW = 5.0  # times: a worker's computing while it loads
DEAR_S = 4e-3  # our own part of a call, when nothing is in the caches
ALONE_S = TRUNK_S + TRUNK_ROW_S * SLOTS + LAYERS * computing_s(activated_of(SLOTS), SLOTS * CHOSEN)


@dataclass
class Serving:
    """Steps of SLOTS rows, one after the other, which tell what they took."""

    world: World
    looks: bool = True
    looks_made: int = 0
    looked_s: float = 0.0  # more than alone, all of them
    longest_s: float = 0.0  # one of them
    on_at: float | None = None
    pace: LookPace = field(default_factory=LookPace)

    async def serve(self, seconds: float) -> None:
        world, pace, number = self.world, self.pace, 0
        until = trio.current_time() + seconds
        while trio.current_time() < until:
            number += 1
            sampled, took_s, own_call_s = number % LAYERS, ALONE_S, None
            looked_s: float | None = None  # what this forward's look cost more; None = it does not look
            for layer in range(LAYERS):
                dealing, look = world.dealt[0].get(layer), world.looks.get(layer)
                if dealing is not None:
                    more_s, calls = self._call(dealing, tells=layer == sampled)
                elif self.looks and look is not None and self._may_look(layer, looked_s):
                    more_s, calls = self._call(look, tells=True)
                    looked_s = (looked_s or 0.0) + more_s
                    pace.took(looked_s, trio.current_time() + took_s + more_s)
                else:
                    continue
                took_s += more_s
                own_call_s = OWN_CALL_S if calls else own_call_s
            if looked_s is not None:
                self.looks_made += 1
                self.looked_s += max(0.0, looked_s)
                self.longest_s = max(self.longest_s, looked_s)
            await trio.sleep(took_s)
            world.measure_forward(SLOTS, own_call_s)
            world.step(SLOTS / took_s)
            if world.steering.on and self.on_at is None:
                self.on_at = trio.current_time()

    def _may_look(self, layer: int, looked_s: float | None) -> bool:
        """As the dispatch would: the first layer decides, and a look that has become dear ends."""
        if looked_s is None:
            return layer == 0 and self.pace.take(trio.current_time())
        return looked_s < LOOK_LOSS_S

    def _call(self, dealing: Dealing, *, tells: bool) -> tuple[float, int]:
        """What a layer takes longer so than alone, and how many calls it makes."""
        planned = dealing.planned()
        own = sum(peer is None for peer in planned)
        here_s = computing_s(activated_of(SLOTS, own), round(SLOTS * CHOSEN * own / EXPERTS)) if own else 0.0
        longest_s, calls = here_s, 0
        for peer in sorted({peer for peer in planned if peer is not None}):
            count = planned.count(peer)
            activated, pairs = activated_of(SLOTS, count), round(SLOTS * CHOSEN * count / EXPERTS)
            worker = self.world.workers[peer]
            took_s = worker.rtt_s + 4096 * SLOTS / worker.bytes_s + worker.slower * computing_s(activated, pairs)
            if tells:
                self.world.measure_call(peer, SLOTS, activated, pairs)
            longest_s, calls = max(longest_s, took_s), calls + 1
        return longest_s + calls * OWN_CALL_S - computing_s(activated_of(SLOTS), SLOTS * CHOSEN), calls


async def believe_slow(world: World, rtt_s: float = 3e-4) -> None:
    """ANN was timed while it loaded, and our own part of a call when it was the first."""
    world.workers[ANN] = Worker(slower=SLOW, rtt_s=rtt_s)
    for _ in range(10):
        for rows in (1, 4, 16):
            world.measure_call(ANN, rows, activated_of(rows), rows * CHOSEN)
            world.measure_forward(rows, DEAR_S)
        await trio.sleep(0.1)
    world.workers[ANN] = Worker()
    world.prove(ANN)


@pytest.mark.parametrize("looks", [True, False])
async def test_a_worker_that_was_timed_while_it_loaded_is_used_after_a_few_looks(autojump_clock, looks):
    async with open_world(measures=False, workers={ANN: Worker()}) as world:
        await believe_slow(world)
        world.saturate()
        serving, began_at = Serving(world, looks), trio.current_time()
        if not looks:
            await serving.serve(15.0)
            assert (serving.on_at, serving.looks_made) == (None, 0)
            assert world.steering.reason.startswith("off: ")
            return
        await serving.serve(4.0)
        assert serving.on_at is not None
        assert 0.2 < serving.on_at - began_at < 3.0
        assert world.steering.on
        assert world.steering.measured_gain > 1.15
        assert world.looks == {}
        looks_made = serving.looks_made
        await serving.serve(5.0)
        assert serving.looks_made == looks_made, "while it is on its calls tell enough"


async def test_nobody_is_looked_at_while_calm_and_a_look_ends_before_anything_is_awaited(autojump_clock):
    async with open_world(measures=False, workers={ANN: Worker()}) as world:
        await believe_slow(world)
        world.calm()
        serving = Serving(world)
        await serving.serve(5.0)
        assert (world.looks, serving.looks_made) == ({}, 0)
        world.workers[ANN] = Worker(slower=SLOW)  # it stays off
        world.saturate()
        await serving.serve(1.0)
        assert world.looks
        assert not world.steering.on
        world.calm()
        assert world.looks == {}
        looks_made = serving.looks_made
        await serving.serve(5.0)
        assert (world.looks, serving.looks_made) == ({}, looks_made)


async def test_a_look_ends_with_the_wish_though_nobody_said_that_the_load_has_changed(autojump_clock):
    async with open_world(measures=False, workers={ANN: Worker(slower=SLOW)}) as world:
        await believe_slow(world)
        world.workers[ANN] = Worker(slower=SLOW)
        world.saturate()
        await Serving(world).serve(1.0)
        assert world.looks
        world.load = Load(False, 0, 1, True)
        await trio.sleep(0.3)
        assert world.looks == {}


async def test_law_3_who_loses_proof_is_not_looked_at_before_anything_is_awaited(autojump_clock):
    async with open_world(measures=False, workers={ANN: Worker(), BOB: Worker()}) as world:
        await believe_slow(world)
        world.workers[ANN] = Worker(slower=SLOW)
        world.saturate()
        await Serving(world).serve(1.0)
        assert {peer for each in world.looks.values() for peer in each.peers} == {ANN}
        world.prove()
        assert world.looks == {}
        await Serving(world).serve(1.0)
        assert world.looks == {}


async def test_law_3_a_look_that_was_planned_with_somebody_who_has_lost_proof_since_is_dropped(autojump_clock):
    async with open_world(measures=False, workers={ANN: Worker()}, planning_s=1.0) as world:
        await believe_slow(world)
        world.saturate()
        await trio.sleep(0.5)
        world.prove()
        await trio.sleep(0.6)
        assert (world.plans, world.looks) == (1, {})


@pytest.mark.parametrize(
    "settings", [FanoutSettings(enabled=False), FanoutSettings(when="forced"), FanoutSettings(bytes_s=1000)]
)
async def test_nobody_is_looked_at_when_that_is_switched_off_forced_or_more_than_may_travel(autojump_clock, settings):
    async with open_world(settings, measures=False, workers={ANN: Worker()}) as world:
        await believe_slow(world)
        world.load = Load(settings.enabled, 9, SLOTS, True)
        world.steering.load_changed()
        serving = Serving(world)
        await serving.serve(3.0)
        assert (world.looks, serving.looks_made) == ({}, 0)


async def test_nobody_is_looked_at_without_an_express_channel(autojump_clock):
    async with open_world(measures=False, workers={ANN: Worker()}, without_channel=frozenset({ANN})) as world:
        await believe_slow(world)
        world.saturate()
        serving = Serving(world)
        await serving.serve(3.0)
        assert (world.looks, serving.looks_made) == ({}, 0)


async def test_several_take_turns(autojump_clock):
    workers = {ANN: Worker(slower=SLOW), BOB: Worker(slower=4 * SLOW)}
    async with open_world(measures=False, workers=dict(workers)) as world:
        await believe_slow(world)
        world.workers.update(workers)
        world.measure_call(BOB, SLOTS, activated_of(SLOTS), SLOTS * CHOSEN)
        world.prove(ANN, BOB)
        world.saturate()
        serving, seen = Serving(world), set()
        for _ in range(20):
            await serving.serve(0.2)
            seen |= {each.peers for each in world.looks.values()}
        assert seen == {(ANN,), (BOB,)}


async def test_looks_at_a_far_worker_take_a_hundredth_of_the_time(autojump_clock):
    """Far enough that it does not pay: at a round trip for each layer, and none shorter than a layer."""
    far = Worker(slower=8.0, rtt_s=0.045)
    async with open_world(measures=False, workers={ANN: far}) as world:
        await believe_slow(world, far.rtt_s)
        world.workers[ANN] = far
        world.saturate()
        serving = Serving(world)
        await serving.serve(60.0)
        assert serving.on_at is None
        assert serving.looks_made >= 5
        assert serving.longest_s < ALONE_S
        assert serving.looked_s <= 60.0 / LOOK_RESTS + serving.longest_s


async def test_nobody_farther_away_than_a_step_is_looked_at(autojump_clock):
    async with open_world(measures=False, workers={ANN: Worker()}) as world:
        await believe_slow(world)
        world.workers[ANN] = Worker(rtt_s=1.5 * ALONE_S)
        for _ in range(20):
            world.measure_call(ANN, SLOTS, activated_of(SLOTS), SLOTS * CHOSEN)
        world.saturate()
        serving = Serving(world)
        await serving.serve(5.0)
        assert (world.looks, serving.looks_made) == ({}, 0)


async def test_what_is_elsewhere_anyhow_needs_no_look(autojump_clock):
    """The routes of what is not held here are all that leaves a layer; see the dispatch."""
    held = {layer: frozenset(range(4, EXPERTS)) if layer == 1 else EVERYTHING[layer] for layer in range(LAYERS)}
    async with open_world(measures=False, workers={ANN: Worker()}, held=held) as world:
        await believe_slow(world)
        world.workers[ANN] = Worker(slower=SLOW)
        world.saturate()
        await Serving(world).serve(1.0)
        assert set(world.dealt[0]) == {1}
        assert world.looks
