"""Steering on a virtual clock: what it sets, says and plans when the world changes; no model, network or thread."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import pairwise

import pytest
import trio
from steering_fakes import ANN, BOB, EXPERTS, LAYERS, NEAR, SHAPE, SLOTS, Worker, World, all_of, open_world

from kvasir_node.base.ids import PeerId, SliceId
from kvasir_node.base.settings import FanoutSettings
from kvasir_node.roles.steering import REFRESH_S, TICK_MAX_S, TICK_S, Load


async def test_it_turns_on_when_it_pays_and_says_so_once(autojump_clock, caplog):
    caplog.set_level(logging.INFO)
    async with open_world(workers=NEAR) as world:
        world.saturate()
        await trio.sleep(1.1)
        assert (world.steering.on, world.steering.reason) == (False, "off: no proven worker")
        world.prove(ANN)
        await trio.sleep(0.01)
        steering = world.steering
        assert steering.on
        assert steering.reason.startswith("on: queue 9, gain 1.")
        assert steering.reason.endswith("×, 1 worker")
        assert steering.predicted_gain > 1.3
        assert steering.plan is not None
        assert steering.plan.layers_shared == LAYERS
        assert 0.3 < steering.plan.shares[ANN] < 0.5
        assert all(set(row) == {None, ANN} for row in world.decode.values())
        assert set(world.decode) == set(SHAPE.layers)
        assert steering.routes == world.decode
        await trio.sleep(5.0)
        assert [each.message for each in caplog.records] == [f"fan-out {steering.reason}"]


async def test_law_2_when_nobody_waits_any_more_all_is_at_home_before_anything_is_awaited(autojump_clock, caplog):
    caplog.set_level(logging.INFO)
    async with open_world(workers=NEAR) as world:
        world.saturate()
        world.prove(ANN)
        await trio.sleep(1.1)
        assert world.peers() == {None, ANN}
        plans = world.plans
        world.calm()
        assert world.peers() == {None}
        assert (world.steering.on, world.steering.reason, world.plans) == (False, "off: calm", plans)
        assert caplog.records[-1].message == "fan-out off: calm"
        await trio.sleep(30.0)
        assert world.peers() == {None}
        assert world.plans == plans  # and nothing is planned for whoever holds all and is calm


async def test_nothing_is_planned_while_nothing_is_going_on_or_fan_out_is_switched_off(autojump_clock):
    async with open_world(workers=NEAR) as world:
        world.prove(ANN)
        await trio.sleep(20.0)
        assert (world.plans, world.set, world.steering.reason) == (0, [], "off: calm")
    async with open_world(FanoutSettings(enabled=False), workers=NEAR) as world:
        world.load = Load(False, 9, SLOTS, True, "switched off by fanout.enabled")
        await trio.sleep(20.0)
        assert (world.plans, world.set, world.steering.reason) == (0, [], "off: switched off by fanout.enabled")


async def test_law_3_who_loses_proof_gets_nothing_more_before_anything_is_awaited(autojump_clock):
    async with open_world(workers={ANN: Worker(), BOB: Worker()}) as world:
        world.saturate()
        world.prove(ANN, BOB)
        await trio.sleep(1.1)
        assert world.peers() == {None, ANN, BOB}
        before = world.decode
        world.prove(BOB)
        assert world.decode == {
            layer: tuple(None if peer == ANN else peer for peer in row) for layer, row in before.items()
        }
        assert ANN not in world.peers()
        assert world.set[-1][0] == trio.current_time()
        await trio.sleep(0.01)  # planned anew: the other one takes more
        assert world.steering.on
        shares = world.steering.plan.shares
        assert shares.keys() == {BOB}
        assert shares[BOB] > sum(row.count(BOB) for row in before.values()) / (LAYERS * EXPERTS)
        world.prove()
        assert world.peers() == {None}
        await trio.sleep(0.01)
        assert (world.steering.on, world.steering.reason) == (False, "off: no proven worker")
        world.prove(ANN)
        await trio.sleep(0.01)
        assert world.steering.on


async def test_the_loop_goes_on_while_a_plan_is_made_and_there_is_one_at_a_time_of_the_newest_scene(autojump_clock):
    async with open_world(workers={ANN: Worker(), BOB: Worker()}, planning_s=1.0) as world:
        world.saturate()
        await trio.sleep(0.5)
        assert world.planning == 1
        for _ in range(5):
            world.prove(ANN)
            world.prove(ANN, BOB)
            await trio.sleep(0.01)
            world.saturate()
        await trio.sleep(0.46)
        assert world.plans == 1
        await trio.sleep(1.1)
        assert world.plans == 2
        assert world.peers() == {None, ANN, BOB}


async def test_a_plan_with_somebody_who_has_lost_proof_meanwhile_is_dropped_and_made_again(autojump_clock):
    async with open_world(workers={ANN: Worker(), BOB: Worker()}, planning_s=1.0) as world:
        world.proven = all_of(ANN, BOB)
        world.steering.world_changed()
        world.saturate()
        await trio.sleep(0.5)
        world.prove(BOB)
        await trio.sleep(0.6)
        assert (world.plans, world.set) == (1, [])
        await trio.sleep(1.1)
        assert world.plans == 2
        assert world.peers() == {None, BOB}
        assert all(ANN not in row for _, *both in world.set for routes in both for row in routes.values())


def choices(world: World) -> set[PeerId | None]:
    """Who may compute something in a step of decoding, also of what was planned for others."""
    return {
        (None, *dealing.peers)[machine]
        for dealing in world.dealt[0].values()
        for machines in dealing.able
        for machine in machines
    }


async def test_experts_are_dealt_among_the_peers_of_the_plan_and_us_at_the_prices_of_the_newest_one(autojump_clock):
    async with open_world(workers={ANN: Worker(), BOB: Worker()}) as world:
        world.saturate()
        world.prove(ANN, BOB)
        await trio.sleep(1.1)
        assert choices(world) == {None, ANN, BOB}
        assert all(len(machines) == 3 for dealing in world.dealt[0].values() for machines in dealing.able)
        dealing = world.dealt[0][0]
        assert dealing.prices.expert_s[1] > dealing.prices.expert_s[0] > 0  # doubt about a worker adds to its times
        changes = len(world.set)
        world.workers[ANN] = Worker(slower=1.2)
        for _ in range(40):
            world.measure()
            await trio.sleep(0.1)
        assert world.dealt[0][0].prices.expert_s[1] > 1.1 * dealing.prices.expert_s[1]
        assert len(world.set) <= changes + 1, "prices are news without another plan"


async def test_law_3_who_loses_proof_of_what_was_planned_for_others_is_no_choice_any_more(autojump_clock):
    async with open_world(workers={ANN: Worker(), BOB: Worker()}) as world:
        world.saturate()
        world.prove(ANN, BOB)
        await trio.sleep(1.1)
        halves = {
            peer: {layer: {i for i, each in enumerate(row) if each == peer} for layer, row in world.decode.items()}
            for peer in (ANN, BOB)
        }
        own = [(ANN, SliceId(layer, index, index)) for layer in SHAPE.layers for index in halves[ANN][layer]]
        world.proven = (*own, *all_of(BOB))
        before = world.decode
        world.steering.world_changed()
        assert world.decode == before
        for layer, dealing in world.dealt[0].items():
            ann = 1 + dealing.peers.index(ANN)
            assert {i for i, machines in enumerate(dealing.able) if ann in machines} == halves[ANN][layer]


async def test_law_2_there_is_no_choice_once_nobody_waits(autojump_clock):
    async with open_world(workers=NEAR) as world:
        world.saturate()
        world.prove(ANN)
        await trio.sleep(1.1)
        assert choices(world) == {None, ANN}
        world.calm()
        assert choices(world) == set()


@pytest.mark.parametrize("settings", [FanoutSettings(bytes_s=10**9), FanoutSettings(when="forced")])
async def test_where_a_plan_must_be_kept_there_is_no_choice(autojump_clock, settings):
    async with open_world(settings, workers=NEAR) as world:
        world.saturate()
        world.prove(ANN)
        await trio.sleep(1.1)
        assert choices(world) == {None, ANN}
        assert all(len(machines) == 1 for dealing in world.dealt[0].values() for machines in dealing.able)


async def test_planning_takes_a_small_share_of_the_time(autojump_clock):
    async with open_world(workers=NEAR, planning_s=0.03) as world:
        world.saturate()
        await trio.sleep(10.0)
        assert world.plans == pytest.approx(10.0 / (TICK_MAX_S + TICK_S / 2), abs=1)
        world.prove(ANN)
        for planning_s, pause_s in ((0.03, 1.5), (0.001, TICK_S), (0.2, TICK_MAX_S)):
            world.planning_s = planning_s
            await trio.sleep(3.0)
            world.plans = 0
            await trio.sleep(30.0)
            assert 30.0 / (pause_s + TICK_S + planning_s) - 1 <= world.plans <= 30.0 / pause_s + 1


async def test_far_and_quick_workers_bring_lanes_and_now_and_then_a_step_in_one(autojump_clock):
    async with open_world(workers={ANN: Worker(slower=0.02, rtt_s=0.01)}) as world:
        world.saturate()
        world.prove(ANN)
        await trio.sleep(0.1)
        plan = world.steering.plan
        assert plan is not None
        assert plan.lanes > 1
        assert world.engine.lanes == 1  # the step that is under way was begun in one
        lanes, alone = [], []
        for number in range(round(2.5 * REFRESH_S / 0.1)):
            world.step(plan.predicted.tokens_per_s, prompt_rows=16 * (number % 7 == 3))
            lanes.append(world.engine.lanes)
            alone.append(world.costing.in_one_lane)
            await trio.sleep(0.1)
        assert set(lanes) == {1, plan.lanes}
        assert alone == [each == 1 for each in lanes]
        assert 2 <= lanes.count(1) <= 4
        assert lanes[0] == plan.lanes
        world.calm()
        world.step(100.0)
        assert world.engine.lanes == 1
        assert world.costing.in_one_lane


async def test_a_step_in_one_lane_for_the_sake_of_measuring_is_judged_by_nobody(autojump_clock):
    async with open_world(workers={ANN: Worker(slower=0.02, rtt_s=0.01)}) as world:
        world.saturate()
        world.prove(ANN)
        await trio.sleep(0.1)
        plan = world.steering.plan
        assert plan is not None
        for _ in range(round(3 * REFRESH_S / 0.1)):
            slow = world.steering._is_refreshing
            world.step(1.0 if slow else plan.predicted.tokens_per_s)
            await trio.sleep(0.1)
        assert world.steering.on
        assert world.steering.measured_gain == pytest.approx(plan.gain, rel=0.05)


async def test_prompts_are_planned_apart_in_one_lane_and_at_home_while_off(autojump_clock):
    async with open_world(workers={ANN: Worker(bytes_s=2e7)}) as world:
        world.saturate()
        world.prove(ANN)
        await trio.sleep(0.1)
        assert world.steering.on
        decode_share, prompt_share = (
            sum(row.count(ANN) for row in routes.values()) for routes in (world.decode, world.prompt)
        )
        assert 0 < prompt_share < 0.8 * decode_share  # their bytes are many: with little time for each
        world.calm()
        assert all(peer is None for row in world.prompt.values() for peer in row)
        world.saturate()
        await trio.sleep(0.1)
        assert any(ANN in row for row in world.prompt.values())


async def test_what_is_measured_less_than_alone_ends_it_and_it_is_tried_again_later_each_time(autojump_clock):
    async with open_world(workers=NEAR) as world:
        world.saturate()
        world.prove(ANN)
        turned_on: list[float] = []
        was_on = False
        for _ in range(800):
            await trio.sleep(0.05)
            if world.steering.on and not was_on:
                turned_on.append(trio.current_time())
            was_on = world.steering.on
            world.step(0.05 * world.steering._decision.plan.alone.tokens_per_s if was_on else 400.0)
            if not was_on:
                assert world.peers() == {None}
                assert "× alone, tried again in" in world.steering.reason
        gaps = [later - earlier for earlier, later in pairwise(turned_on)]
        assert len(gaps) >= 2
        assert gaps[1] > 1.5 * gaps[0] > 5.0


@pytest.mark.parametrize("when", ["saturated", "always", "forced"])
async def test_only_by_force_is_anything_shared_at_a_loss(autojump_clock, when):
    async with open_world(FanoutSettings(when=when), workers={ANN: Worker(slower=50.0, rtt_s=0.2)}) as world:
        world.saturate()
        world.prove(ANN)
        for _ in range(100):
            await trio.sleep(0.1)
            world.step(1.0)
        assert world.steering.on is (when == "forced")
        assert (ANN in world.peers()) is (when == "forced")
        if when == "forced":
            assert world.steering.predicted_gain < 1.0
            assert world.steering.measured_gain < 1.0
            world.prove()
            assert world.peers() == {None}
            world.prove(ANN)
            await trio.sleep(0.1)
            assert ANN in world.peers()
        else:
            assert world.steering.reason.startswith("off: worker RTT 200 ms × 3 layers > budget")


async def test_more_bytes_than_the_setting_allows_are_not_planned(autojump_clock):
    async with open_world(FanoutSettings(bytes_s=1000), workers=NEAR) as world:
        world.saturate()
        world.prove(ANN)
        await trio.sleep(1.1)
        assert world.steering.reason == "off: rows would need more than 0.001 MB/s"


async def test_the_budget_of_a_token_is_the_settings(autojump_clock):
    for slowdown in (2.0, 50.0):
        async with open_world(FanoutSettings(max_slowdown=slowdown), workers=NEAR) as world:
            world.saturate()
            world.prove(ANN)
            await trio.sleep(0.1)
            plan = world.steering.plan
            assert plan is not None
            assert plan.budget_s == pytest.approx(max(slowdown * plan.idle_s, plan.alone.token_s))
            assert world.steering.near_rtt_s == pytest.approx(plan.budget_s / LAYERS)


async def test_who_is_near_is_not_known_before_the_first_plan(autojump_clock):
    async with open_world(FanoutSettings(), workers=NEAR) as world:
        assert world.steering.near_rtt_s is None


async def test_what_is_not_held_is_elsewhere_while_calm_and_what_comes_to_be_held_stays_at_once(autojump_clock):
    missing = {layer: frozenset(range(4, EXPERTS)) for layer in range(LAYERS)}
    async with open_world(workers={ANN: Worker(rtt_s=0.3)}, held=missing) as world:
        world.calm()
        world.prove(ANN)
        await trio.sleep(0.01)
        for routes in (world.decode, world.prompt):
            assert all(row == (ANN,) * 4 + (None,) * (EXPERTS - 4) for row in routes.values())
        assert (world.steering.on, world.steering.reason) == (False, "off: calm")
        world.held[1] = frozenset(range(EXPERTS))
        world.steering.world_changed()
        for routes in (world.decode, world.prompt):
            assert routes[1] == (None,) * EXPERTS
            assert routes[0] == (ANN,) * 4 + (None,) * (EXPERTS - 4)
        world.held[2] = frozenset(range(5, EXPERTS))
        world.steering.world_changed()
        await trio.sleep(0.01)
        assert world.decode[2] == (ANN,) * 5 + (None,) * (EXPERTS - 5)


async def test_an_old_plan_is_not_taken_up_again_by_the_next_surge(autojump_clock):
    """Between two surges the worker became too slow; what was planned in the first one must not be carried out."""
    async with open_world(workers=dict(NEAR)) as world:
        world.saturate()
        world.prove(ANN)
        await trio.sleep(1.1)
        assert world.steering.on
        world.calm()
        world.workers[ANN] = Worker(slower=100.0)
        await trio.sleep(60.0)
        count = len(world.set)
        world.saturate()
        await trio.sleep(1.1)
        assert not world.steering.on
        assert all(ANN not in row for _, *both in world.set[count:] for routes in both for row in routes.values())


async def test_the_load_that_is_told_is_the_one_that_counts(autojump_clock):
    async with open_world(workers=NEAR) as world:
        world.saturate()
        world.prove(ANN)
        await trio.sleep(1.1)
        world.load = replace(world.load, queued=40)
        await trio.sleep(1.1)
        assert world.steering.reason.startswith("on: queue 40, gain ")
