"""The outbox between a producer that never waits and a reader that may."""

from __future__ import annotations

import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_node.base.errors import CapacityError
from kvasir_node.base.generation import (
    AnswerFacts,
    ChoiceEnded,
    Finished,
    FinishReason,
    TextDelta,
    TokenLogprob,
    ToolCall,
)
from kvasir_node.surfaces.sse import Outbox, sse_data

END = Finished(FinishReason.STOP, 1, 2, AnswerFacts())


async def test_what_was_not_taken_is_joined_and_the_end_stays():
    outbox = Outbox()
    for text in ("a", "b", "c"):
        outbox.put(TextDelta(text))
    outbox.put(END)
    assert [await outbox.take(1) for _ in range(3)] == [TextDelta("abc"), END, END]


async def test_choices_are_joined_each_for_itself_and_keep_their_own_order():
    outbox = Outbox()
    call = ToolCall("id", "f", "{}", 0, 1)
    scores = [TokenLogprob(b"x", -1.0, (), at) for at in range(2)]
    for event in (
        TextDelta("a", 0, (scores[0],)),
        TextDelta("b", 1),
        TextDelta("c", 0, (scores[1],)),
        call,
        TextDelta("d", 1),
        ChoiceEnded(FinishReason.STOP, 1),
        TextDelta("e", 0),
        END,
    ):
        outbox.put(event)
    assert [await outbox.take(1) for _ in range(6)] == [
        TextDelta("ace", 0, tuple(scores)),
        TextDelta("b", 1),
        call,
        TextDelta("d", 1),
        ChoiceEnded(FinishReason.STOP, 1),
        END,
    ]


async def test_what_was_taken_is_not_joined_to(autojump_clock):
    outbox = Outbox()
    outbox.put(TextDelta("a"))
    assert await outbox.take(1) == TextDelta("a")
    outbox.put(TextDelta("b"))
    assert await outbox.take(1) == TextDelta("b")
    assert await outbox.take(1) is None


async def test_a_failure_comes_after_the_text_before_it():
    outbox, failure = Outbox(), CapacityError("gone")
    outbox.put(TextDelta("a"))
    outbox.fail(failure)
    assert [await outbox.take(1), await outbox.take(1)] == [TextDelta("a"), failure]


async def test_take_waits_and_gives_up(autojump_clock):
    outbox = Outbox()
    assert await outbox.take(5) is None
    assert trio.current_time() == 5

    async with trio.open_nursery() as nursery:

        async def produce() -> None:
            await trio.sleep(2)
            outbox.put(TextDelta("late"))

        nursery.start_soon(produce)
        assert await outbox.take(5) == TextDelta("late")
    assert trio.current_time() == 7


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.text())
def test_one_document_is_one_event(text):
    data = sse_data({"text": text.encode("utf-8", "replace").decode()})
    assert data.startswith(b"data: ")
    assert data.endswith(b"\n\n")
    assert data.count(b"\n") == 2
    assert b"\r" not in data
