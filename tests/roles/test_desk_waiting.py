"""Requests that need an expert which is nowhere wait for it or fail; all others go on. No thread, no model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

import pytest
import trio
from test_desk import FakeEngine, FakeText, Room, read

from kvasir_node.base.errors import CapacityError
from kvasir_node.base.generation import GenerationRequest, TextDelta
from kvasir_node.decide.admission import AdmissionLimits
from kvasir_node.model.engine import StepToken
from kvasir_node.model.missing import ExpertsMissing, JobsWait
from kvasir_node.roles.desk import Desk

STEP_S = 0.1


class LackingEngine(FakeEngine):
    """Jobs whose prompt holds a letter of `lacking` cannot go on, as if that letter were an expert."""

    lacking = ""

    def step(self) -> list[StepToken]:
        waiting = [number for number, seat in self.seats.items() if set(map(ord, self.lacking)) & set(seat.job.prompt)]
        if waiting:
            self.steps += 1
            raise JobsWait(ExpertsMissing(3, set(map(ord, self.lacking)), range(len(waiting))), waiting)
        return super().step()


class FakeMissing:
    """Brings an expert when the test says so; remembers what is kept for whom."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, frozenset[int]]] = []
        self.came = trio.Event()
        self.error: CapacityError | None = None
        self.kept: set[str] = set()

    async def bring(self, owner: str, layer: int, experts: Collection[int]) -> None:
        self.asked.append((layer, frozenset(experts)))
        await self.came.wait()
        if self.error is not None:
            raise self.error
        self.kept.add(owner)

    def let_go(self, owner: str) -> None:
        self.kept.discard(owner)


class WaitingRoom(Room):
    engine: LackingEngine
    missing: FakeMissing

    def assert_empty(self) -> None:
        super().assert_empty()
        assert len(self.desk.waiting) == 0
        assert not self.missing.kept


@asynccontextmanager
async def open_room(*, fetches: bool = True) -> AsyncIterator[WaitingRoom]:
    async def run_blocking(function, *args: object):
        await trio.sleep(STEP_S)
        return function(*args)

    engine, missing = LackingEngine(4), FakeMissing()
    desk = Desk(
        engine,
        FakeText(),  # type: ignore[arg-type]
        AdmissionLimits(4, 3, saturated_after_s=0.5, calm_after_s=2.0, calm_busy_ratio=0.75),
        load_changed=lambda: None,
        missing=missing if fetches else None,
        run_blocking=run_blocking,
    )
    room = WaitingRoom(desk, engine)
    room.missing = missing
    async with trio.open_nursery() as nursery:
        nursery.start_soon(desk.run)
        yield room
        room.assert_empty()
        nursery.cancel_scope.cancel()


class Clients:
    """Requests under way: "abc" and "abd" need nothing, "xyz" and "xy" need the expert x."""

    def __init__(self, room: WaitingRoom) -> None:
        self.room = room
        self.texts: dict[str, str] = {}
        self.errors: dict[str, CapacityError] = {}
        self.ended_at: dict[str, float] = {}

    async def ask(self, prompt: str, tokens: int = 12) -> None:
        try:
            async with self.room.desk.generate(GenerationRequest(prompt=prompt, max_tokens=tokens)) as answer:
                self.texts[prompt] = (await read(answer))[0]
        except CapacityError as error:
            self.errors[prompt] = error
        self.ended_at[prompt] = trio.current_time()


async def test_law_1_half_the_requests_lose_an_expert_mid_answer_and_go_on_where_they_were_once_it_is_there(
    autojump_clock,
):
    async with open_room() as room, trio.open_nursery() as nursery:
        clients = Clients(room)
        for prompt in ("abc", "abd", "xyz", "xy"):
            nursery.start_soon(clients.ask, prompt)
        await trio.sleep(5.5 * STEP_S)
        room.engine.lacking = "x"
        await trio.sleep(9 * STEP_S)
        assert clients.texts == {"abc": "abc" * 4, "abd": "abd" * 4}  # at their own speed, but for one step in vain
        assert max(clients.ended_at.values()) <= 14 * STEP_S
        assert len(room.desk.waiting) == 2
        assert room.missing.asked == [(3, {ord("x")})] * 2
        await trio.sleep(3)
        room.engine.lacking = ""
        room.missing.came.set()
        nursery.start_soon(clients.ask, "late")
        await trio.sleep(15 * STEP_S)
        assert clients.texts["xyz"] == "xyz" * 4
        assert clients.texts["xy"] == "xy" * 6
        assert clients.texts["late"] == "late" * 3


async def test_an_expert_that_cannot_be_had_fails_only_those_who_need_it(autojump_clock):
    async with open_room() as room, trio.open_nursery() as nursery:
        clients = Clients(room)
        for prompt in ("abc", "xyz"):
            nursery.start_soon(clients.ask, prompt)
        await trio.sleep(2.5 * STEP_S)
        room.engine.lacking = "x"
        await trio.sleep(2 * STEP_S)
        room.missing.error = CapacityError("nobody has it; start a worker")
        room.missing.came.set()
        await trio.sleep(STEP_S)
        assert clients.errors == {"xyz": room.missing.error}
        assert room.missing.error.http_status == 503
        await trio.sleep(10 * STEP_S)
        assert clients.texts == {"abc": "abc" * 4}


async def test_without_a_way_to_fetch_they_fail_at_once_with_what_to_do(autojump_clock):
    async with open_room(fetches=False) as room:
        room.engine.lacking = "x"
        with pytest.raises(CapacityError, match=r"expert 120 of layer 3 not on this machine.*start a worker"):
            await room.ask("xyz")
        assert await room.ask("abc", 3)


async def test_a_worker_that_computes_it_ends_the_wait_before_the_fetch_does(autojump_clock):
    async with open_room() as room, trio.open_nursery() as nursery:
        clients = Clients(room)
        room.engine.lacking = "x"
        nursery.start_soon(clients.ask, "xy")
        await trio.sleep(3 * STEP_S)
        room.desk.waiting.covered(2, {ord("x")})
        room.desk.waiting.covered(3, {ord("y")})
        await trio.sleep(3 * STEP_S)
        assert len(room.missing.asked) == 1
        room.desk.waiting.covered(3, {ord("x"), 7})  # it tries again, and waits again while it is not true
        await trio.sleep(3 * STEP_S)
        assert len(room.missing.asked) == 2
        room.engine.lacking = ""
        room.desk.waiting.covered(3, {ord("x")})
        await trio.sleep(14 * STEP_S)
        assert clients.texts == {"xy": "xy" * 6}


async def test_a_client_that_leaves_while_it_waits_frees_its_place_and_what_was_kept_for_it(autojump_clock):
    async with open_room() as room:
        room.engine.lacking = "x"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Clients(room).ask, "xyz")
            await trio.sleep(3 * STEP_S)
            assert (room.desk.admission.busy, len(room.desk.waiting)) == (1, 1)
            nursery.cancel_scope.cancel()
        await trio.sleep(2 * STEP_S)
        room.assert_empty()
        room.engine.lacking = ""
        assert (await room.ask("xy", 4))[0] == "xyxy"


async def test_what_came_is_kept_until_a_token_shows_that_it_was_enough(autojump_clock):
    async with open_room() as room, trio.open_nursery() as nursery:
        room.missing.came.set()
        room.engine.lacking = "x"
        request = GenerationRequest(prompt="xy", max_tokens=8)
        async with room.desk.generate(request) as answer:
            nursery.start_soon(trio.sleep, 0)
            await trio.sleep(2.5 * STEP_S)
            assert room.missing.kept == {"job 1"}
            room.engine.lacking = ""
            async for event in answer:
                assert isinstance(event, TextDelta)
                break
            assert not room.missing.kept
        await trio.sleep(2 * STEP_S)
