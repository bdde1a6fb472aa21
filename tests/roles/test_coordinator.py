"""A coordinator with the demo model and its computing thread, scripted workers on a memory network, real time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import torch
import trio
from fanout_fakes import ScriptedWorker

from kvasir_node.base.generation import Finished, GenerationRequest, SamplingOptions, TextDelta
from kvasir_node.base.settings import load_settings
from kvasir_node.model.checkpoint import open_checkpoint
from kvasir_node.model.indexing import index_checkpoint
from kvasir_node.net.memory_net import MemoryNetwork, MemoryTransport, open_memory_network
from kvasir_node.roles.coordinator import NEAR_RTT_MAX_S, Coordinator
from kvasir_node.roles.library import demo_folder
from kvasir_node.roles.loading import load_model
from kvasir_node.roles.own_experts import OwnExperts
from kvasir_node.roles.slowdown import Pace
from kvasir_node.wire.messages import EXPERTS_PROTOCOL, NEAR_RTT_S, DemandRecord, ExpertsMethod
from kvasir_node.wire.tensors import answer_parts

QUICK = {
    "coordinator.slots": 1,
    "coordinator.saturated_after_s": 0.05,
    "coordinator.calm_after_s": 0.2,
    "market.report_interval_s": 0.01,
    "market.surge_decay_s": 0.2,
    "market.slice_bytes": 1 << 20,  # several slices of each layer
    "node.device": "cpu",
    # Worker and coordinator share one loop here, on a machine that may be busy: nobody is late by chance.
    "fanout.hedge_floor_s": 10.0,
    "fanout.deadline_floor_s": 10.0,
    "fanout.deadline_ceiling_s": 10.0,
}
PROMPT = "She was not in the room"


@pytest.fixture(scope="module")
def manifest():
    torch.set_num_threads(1)
    return index_checkpoint(open_checkpoint(demo_folder())).manifest


@pytest.fixture(scope="module")
def whole(manifest):
    """Every expert of the model, for workers."""
    model = load_model(demo_folder(), manifest, load_settings(flags=QUICK))
    return OwnExperts(model.shard, model.checkpoint, model.held, 1 << 30)


@dataclass
class Room:
    coordinator: Coordinator
    network: MemoryNetwork
    transport: MemoryTransport
    own: OwnExperts
    nursery: trio.Nursery
    records: list[DemandRecord] = field(default_factory=list)

    async def worker(self, name: str = "worker") -> ScriptedWorker:
        worker = ScriptedWorker(self, self.network.transport(name))
        await self.nursery.start(worker.run)
        await worker.say(ExpertsMethod.ATTACH, *self.coordinator.slices, model=self.coordinator.manifest.model)
        return worker

    async def ask(self, tokens: int = 12) -> tuple[str, Finished]:
        text = ""
        request = GenerationRequest(prompt=PROMPT, max_tokens=tokens, sampling=SamplingOptions(temperature=0.0))
        async with self.coordinator.generate(request) as answer:
            async for event in answer:
                if isinstance(event, Finished):
                    return text, event
                assert isinstance(event, TextDelta)
                text += event.text
        raise AssertionError("the answer ended without an end")

    async def until(self, seen, what: str) -> None:
        deadline = trio.current_time() + 20
        while not seen():
            assert trio.current_time() < deadline, f"not seen: {what}; {self.coordinator.fanout_snapshot()}"
            await trio.sleep(0.01)

    async def until_proven(self, slices: int) -> None:
        """Asks until so many slices had the rows that their trials need."""
        with trio.fail_after(20):
            while len(self.coordinator.crew.ledger.proven()) < slices:
                await self.ask(4)

    @asynccontextmanager
    async def load(self, clients: int = 3) -> AsyncIterator[list[str]]:
        """Keeps requests going until the block ends; yields the texts of those that were answered."""
        texts: list[str] = []

        async def client() -> None:
            while True:
                texts.append((await self.ask())[0])

        async with trio.open_nursery() as nursery:
            for _ in range(clients):
                nursery.start_soon(client)
            yield texts
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def open_room(manifest, whole, **flags: object) -> AsyncIterator[Room]:
    settings = load_settings(flags={**QUICK, **{key.replace("__", "."): value for key, value in flags.items()}})
    model = load_model(demo_folder(), manifest, settings)
    async with open_memory_network() as network, trio.open_nursery() as nursery:
        transport = network.transport("coordinator")
        pace = Pace(settings.compute.slowdown) if settings.compute.slowdown > 1 else None
        coordinator = Coordinator(settings, model, name_of=str, address_of=str, rtt_of=lambda peer: 5e-4, pace=pace)
        transport.set_handler(EXPERTS_PROTOCOL, coordinator.crew.serve)
        room = Room(coordinator, network, transport, whole, nursery)

        async def send(record: DemandRecord) -> None:
            room.records.append(record)

        await nursery.start(coordinator.run, send, transport.addresses)
        yield room
        nursery.cancel_scope.cancel()


@pytest.fixture(scope="module")
def expected(manifest, whole):
    """What one machine alone answers."""

    async def alone() -> str:
        async with open_room(manifest, whole) as room:
            return (await room.ask())[0]

    return trio.run(alone)


async def test_law_2_idle_is_local_and_a_burst_is_shared_and_afterwards_nothing_leaves_any_more(
    manifest, whole, expected
):
    """The coordinator is emulated to be slow, so that sharing pays: this model is too small for it otherwise."""
    async with open_room(manifest, whole, compute__slowdown=30) as room:
        worker, coordinator = await room.worker(), room.coordinator
        for _ in range(3):
            assert (await room.ask())[0] == expected
        assert worker.requests == []
        assert coordinator.fanout_snapshot().reason == "off: calm"
        async with room.load() as texts:
            await room.until(lambda: coordinator.fanout_snapshot().remote_pairs > 200, "remote pairs")
            seen = coordinator.fanout_snapshot()
            assert seen.on
            assert seen.reason.startswith("on: queue ")
            assert seen.trial_pairs > 0
            assert coordinator.demand()
        await room.until(lambda: not coordinator.desk.saturated, "calm")
        after = (len(worker.requests), coordinator.fanout_snapshot().remote_pairs)
        for _ in range(2):
            text, end = await room.ask()
            assert text == expected
            assert end.facts.remote_pairs == 0
        assert (len(worker.requests), coordinator.fanout_snapshot().remote_pairs) == after
        assert coordinator.fanout_snapshot().fallbacks == 0
        assert set(texts) == {expected}
        await room.until(lambda: all(wanted.want == 0 for wanted in coordinator.demand()), "the end of demand")


async def test_law_2_while_calm_only_rows_of_experts_that_are_not_held_leave_for_work_or_trial(
    manifest, whole, expected
):
    async with open_room(manifest, whole, coordinator__hold="half") as room:
        worker, coordinator = await room.worker(), room.coordinator
        await room.until_proven(8)
        text, end = await room.ask()
        assert text == expected
        facts = end.facts
        assert facts.remote_pairs > 0
        per_token = len(manifest.layers) * 2
        assert facts.local_pairs + facts.remote_pairs == per_token * (end.prompt_tokens + end.completion_tokens - 1)
        assert {index % 2 for request in worker.requests for index in request.pair_expert.tolist()} == {1}
        assert not coordinator.fanout_snapshot().on
        demand = coordinator.demand()
        assert {wanted.slice for wanted in demand} == set(coordinator.slices)
        assert {wanted.want for wanted in demand} == {1}
        assert sum(len(wanted.proven) for wanted in demand) >= 8


async def test_law_7_a_model_larger_than_the_memory_setting_serves_alone_the_hottest_stay_and_workers_are_asked_for(
    manifest, whole, expected
):
    room_for = 16 * whole._shard.expert_bytes
    async with open_room(manifest, whole, coordinator__memory_bytes=room_for) as room:
        coordinator = room.coordinator
        shard = coordinator._model.shard
        before = coordinator.model_snapshot()
        assert before.experts_held == 16
        assert (await room.ask())[0] == expected
        seen = coordinator.model_snapshot()
        assert seen.experts_mapped > 0
        assert (seen.experts_borrowed, seen.experts_read) == (0, 0)
        assert {wanted.slice for wanted in coordinator.demand()} == set(coordinator.slices)
        assert {wanted.want for wanted in coordinator.demand()} == {1}
        async with room.load(1) as texts:
            await room.until(lambda: coordinator.model_snapshot().expert_swaps >= 2, "hotter experts")
            assert shard.nbytes <= room_for
            await room.worker()
            await room.until(lambda: coordinator.fanout_snapshot().remote_pairs > 100, "remote pairs")
            await room.until(lambda: len(texts) > 3, "answers")
        assert set(texts) == {expected}
        after = coordinator.model_snapshot()
        assert shard.nbytes <= room_for
        assert after.experts_held == 16
        heat = coordinator.dispatch.heat()
        held = coordinator._model.held
        inside = [heat[layer][index] for layer in held for index in held[layer]]
        outside = [h for layer in held for index, h in enumerate(heat[layer]) if index not in held[layer]]
        assert sum(inside) / len(inside) > sum(outside) / len(outside)


async def test_law_7_experts_that_cannot_be_mapped_are_borrowed_within_the_memory_setting(manifest, whole):
    async with open_room(manifest, whole, coordinator__experts="int8") as room:
        text = (await room.ask())[0]
        room_for = 16 * room.coordinator._model.shard.expert_bytes
    async with open_room(
        manifest, whole, coordinator__experts="int8", coordinator__memory_bytes=room_for, fanout__enabled=False
    ) as room:
        coordinator = room.coordinator
        assert (await room.ask())[0] == text
        seen = coordinator.model_snapshot()
        assert (seen.experts_held, seen.experts_borrowed, seen.experts_mapped) == (14, 2, 0)
        async with room.load(1) as texts:
            await room.until(lambda: coordinator.model_snapshot().expert_swaps >= 2, "hotter experts")
            await room.until(lambda: len(texts) > 3, "answers")
        assert set(texts) == {text}
        assert coordinator._model.shard.nbytes <= room_for


async def test_law_5_a_worker_that_falls_silent_costs_a_moment_and_no_token(manifest, whole, expected):
    async with open_room(
        manifest, whole, coordinator__hold="none", fanout__deadline_ceiling_s=1.0, fanout__deadline_floor_s=1.0
    ) as room:
        worker, coordinator = await room.worker(), room.coordinator
        await room.until_proven(8)
        before = coordinator.fanout_snapshot()
        assert (before.fallbacks, before.remote_pairs > 0) == (0, True)
        worker.silent = True
        with trio.fail_after(8):
            text, end = await room.ask()
        assert text == expected
        assert end.facts.fallbacks > 0
        assert end.facts.fallbacks <= end.facts.local_pairs
        (seen,) = coordinator.crew.snapshot()
        assert seen.state == "suspect"
        assert coordinator.crew.ledger.proven() == ()
        assert (await room.ask())[1].facts.remote_pairs == 0


async def test_demand_is_told_at_once_when_it_changes_and_again_to_a_hub_that_comes(manifest, whole):
    async with open_room(manifest, whole) as room:
        await room.until(lambda: len(room.records) == 1, "the first record")
        assert room.records[0].wants == ()
        await room.ask(4)
        await trio.sleep(0.2)
        assert len(room.records) == 1  # a request in a calm coordinator changes nothing
        room.coordinator.hubs_changed()
        await room.until(lambda: len(room.records) == 2, "the record for the new hub")
        async with room.load():
            await room.until(lambda: any(record.wants for record in room.records), "demand")
        await room.until(lambda: room.records[-1].wants == (), "the end of demand")
        assert [record.sequence for record in room.records] == list(range(1, len(room.records) + 1))
        assert len({record.epoch for record in room.records}) == 1
        slices = {wanted.slice for record in room.records for wanted in record.wants}
        assert slices == set(room.coordinator.slices)


async def test_switched_off_fan_out_lets_nothing_leave_and_asks_for_nobody(manifest, whole, expected):
    async with open_room(manifest, whole, fanout__enabled=False) as room:
        worker = await room.worker()
        async with room.load() as texts:
            await room.until(lambda: room.coordinator.desk.saturated and len(texts) > 2, "saturation")
            assert room.coordinator.fanout_snapshot().reason == "off: switched off by fanout.enabled"
        assert worker.requests == []
        assert all(record.wants == () for record in room.records)
        assert set(texts) == {expected}


async def test_a_coordinator_can_be_stopped_in_the_middle_of_a_step_with_calls_in_flight(manifest, whole):
    with trio.fail_after(15):
        async with open_room(manifest, whole, coordinator__hold="none") as room:
            worker = await room.worker()
            await room.until_proven(8)
            worker.silent = True
            room.nursery.start_soon(room.ask, 50)
            await room.until(lambda: worker.answering > 0, "a call in flight")


@pytest.mark.parametrize("on", [True, False])
async def test_a_prompt_that_comes_again_is_copied_unless_that_is_switched_off(manifest, whole, on):
    async with open_room(manifest, whole, coordinator__prefix_cache=on, coordinator__slots=2) as room:
        request = GenerationRequest(
            prompt=PROMPT * 8, max_tokens=4, choices=2, sampling=SamplingOptions(temperature=0.0)
        )
        texts, cached, prompt_tokens = [], [], 0
        for _ in range(2):
            async with room.coordinator.generate(request) as answer:
                events = [event async for event in answer]
            texts.append("".join(event.text for event in events if isinstance(event, TextDelta) and event.choice == 0))
            assert isinstance(events[-1], Finished)
            prompt_tokens = events[-1].prompt_tokens
            cached.append(events[-1].cached_tokens)
        assert texts[0] == texts[1]
        assert cached == [0, prompt_tokens - 1 if on else 0]  # the second choice, a twin, does not count
        seen = room.coordinator.desk.throughput()
        assert seen.prompt_tokens_total == 4 * prompt_tokens
        assert seen.prompt_tokens_reused == 2 * prompt_tokens + sum(cached)
        assert room.coordinator.fanout_snapshot().lanes == 1


async def test_law_1_what_a_liar_may_have_computed_is_not_copied_into_other_prompts_once_it_is_caught(
    manifest, whole, caplog
):
    flags = {"fanout__when": "forced", "fanout__spot_check_ratio": 1.0, "coordinator__slots": 2}
    async with open_room(manifest, whole, **flags) as room:
        worker = await room.worker()
        await room.until_proven(1)
        _, touched = await room.ask(2)
        while not touched.facts.remote_pairs:  # the first plan is made beside the first steps
            _, touched = await room.ask(2)
        request = GenerationRequest(prompt=PROMPT * 8, max_tokens=1, sampling=SamplingOptions(temperature=0.0))

        async def reused() -> int:
            before = room.coordinator.desk.throughput().prompt_tokens_reused
            async with room.coordinator.generate(request) as answer:
                assert [event async for event in answer]
            return room.coordinator.desk.throughput().prompt_tokens_reused - before

        await reused()
        assert await reused() > 0
        worker.compute = lambda body: answer_parts(room.own.sums(body) * 2)
        while not room.coordinator.dispatch.counters.mismatches:
            await room.ask(2)
        await room.until(lambda: room.coordinator._mismatches > 0, "that the coordinator noticed")
        assert await reused() == 0
        (said,) = [record.getMessage() for record in caplog.records if "was caught" in record.getMessage()][:1]
        assert str(touched.facts.request) in said.partition("before: ")[2].split(", ")


async def test_law_1_lanes_over_a_worker_change_no_answer(manifest, whole, expected):
    async with open_room(manifest, whole, fanout__when="forced", coordinator__slots=4) as room:
        worker = await room.worker()
        await room.until_proven(8)
        room.coordinator.steering.stepped = lambda step: None  # lanes do not pay here, and would be taken back
        room.coordinator._engine.lanes = 2
        asked, before = len(worker.requests), room.coordinator.dispatch.counters.remote
        texts: list[str] = []

        async def ask() -> None:
            texts.append((await room.ask())[0])

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(ask)
        assert texts == [expected] * 4
        assert len(worker.requests) > asked
        assert room.coordinator.dispatch.counters.remote > before
        assert room.coordinator.fanout_snapshot().lanes == 2


async def test_law_8_a_hub_that_dies_demerits_nobody(manifest, whole):
    async with open_room(manifest, whole, fanout__when="forced") as room:
        worker = await room.worker()
        await room.until_proven(8)
        proven = room.coordinator.crew.ledger.proven()
        room.coordinator.hubs_changed()  # all that a coordinator hears of it
        before = len(worker.requests)
        await room.ask(4)
        assert len(worker.requests) > before
        assert set(proven) <= set(room.coordinator.crew.ledger.proven())
        assert all(view.failures == 0 for view in room.coordinator.crew.ledger.pairs())


async def test_demand_tells_how_near_a_worker_must_be_for_a_share_of_every_layer(manifest, whole):
    # forced = at any loss, so without a budget: then the bound holds, and the record can be read
    async with open_room(manifest, whole, fanout__when="forced") as room:
        steering = room.coordinator.steering
        assert room.coordinator._record((), ()).near_rtt_s == NEAR_RTT_S
        await room.worker()
        async with room.load():
            await room.until(lambda: steering.near_rtt_s is not None, "a plan")
            told = DemandRecord.from_bytes(room.coordinator._record((), ()).to_bytes())
        assert told.near_rtt_s == NEAR_RTT_MAX_S
