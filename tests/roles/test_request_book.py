"""What a desk tells of its requests: events, a list, counts and times."""

from __future__ import annotations

import pytest
import trio
from test_desk import open_room

from kvasir_node.base.errors import QueueFull
from kvasir_node.base.events import RequestEnded, RequestStarted
from kvasir_node.base.generation import GenerationRequest


def told(room) -> list:
    """What the desk has told since the last look."""
    events, room.told = room.told, []
    return events


async def test_a_request_is_told_when_it_starts_and_when_it_ends(autojump_clock):
    async with open_room(slots=1) as room, trio.open_nursery() as nursery:
        nursery.start_soon(room.ask, "abc", 5)
        await trio.sleep(0.01)
        nursery.start_soon(room.ask, "ab.", 9)
        await trio.sleep(0.01)
        first, second = told(room)
        assert first == RequestStarted(first.request, prompt_tokens=3, choices=1, queued=False)
        assert second == RequestStarted(second.request, prompt_tokens=3, choices=1, queued=True)
        listed = room.desk.book.snapshot(trio.current_time())
        assert [(each.request, each.state) for each in listed.running] == [
            (first.request, "prefill"),
            (second.request, "queued"),
        ]
        await trio.sleep(0.25)
        (running, _) = room.desk.book.snapshot(trio.current_time()).running
        assert (running.state, running.answer_tokens, running.age_s) == ("decode", 2, pytest.approx(0.27))
        await trio.sleep(10)
        ends = told(room)
        assert [(end.request, end.outcome, end.answer_tokens) for end in ends] == [
            (first.request, "length", 5),
            (second.request, "stop", 3),
        ]
        assert ends[1].queue_ms > 400
        listed = room.desk.book.snapshot(trio.current_time())
        assert (listed.running, listed.recent) == ((), (ends[1], ends[0]))


async def test_a_client_that_leaves_is_told_as_cancelled_and_a_refusal_is_counted(autojump_clock):
    async with open_room(slots=1, queue=0) as room:
        async with room.desk.generate(GenerationRequest(prompt="abc", max_tokens=50)):
            await trio.sleep(0.35)
            with pytest.raises(QueueFull):
                await room.ask("abc")
        started, ended = told(room)
        assert isinstance(started, RequestStarted)
        assert isinstance(ended, RequestEnded)
        assert (ended.outcome, ended.answer_tokens) == ("cancelled", 3)
        assert {how: count for how, count in room.desk.book.outcomes.items() if count} == {"cancelled": 1, "refused": 1}
        await trio.sleep(1)
        room.assert_empty()
        assert not room.desk.book.snapshot(trio.current_time()).running


async def test_times_are_from_arrival_to_the_first_token_and_between_tokens(autojump_clock):
    async with open_room(slots=1) as room, trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(room.ask, "abc", 5)
    first, between = (
        histogram.snapshot() for histogram in (room.desk.book.first_token_s, room.desk.book.between_tokens_s)
    )
    assert (sum(first.counts), sum(between.counts)) == (2, 8)
    assert first.total == pytest.approx(0.1 + 0.6, abs=0.15)  # the second waited for the first
    assert between.total == pytest.approx(0.8)


async def test_the_list_of_ended_requests_is_bounded(autojump_clock):
    async with open_room() as room:
        for _ in range(70):
            await room.ask("abc", 1)
        assert len(room.desk.book.snapshot(trio.current_time()).recent) == 64
        assert room.desk.book.outcomes["length"] == 70
