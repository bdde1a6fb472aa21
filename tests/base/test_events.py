"""The log of events: bounded, numbered, and fair to readers of any speed."""

from __future__ import annotations

import dataclasses
import typing

import trio

from kvasir_node.base.events import Event, EventLog, Happening, LoadChanged


def log_of(count: int, kept_max: int = 4) -> EventLog:
    log = EventLog(wall=lambda: 1700.5, kept_max=kept_max)
    for number in range(1, count + 1):
        log.add(LoadChanged("calm", number, 0))
    return log


def test_the_latest_are_kept_and_what_a_reader_missed_is_counted():
    log = log_of(10)
    assert log.last == 10
    assert (log.lost_after(0), log.lost_after(5), log.lost_after(6), log.lost_after(10)) == (6, 1, 0, 0)
    assert [event.number for event in log.after(0, 99)] == [7, 8, 9, 10]
    assert [event.number for event in log.after(8, 99)] == [9, 10]
    assert [event.number for event in log.after(7, 2)] == [8, 9]
    assert not log.after(10, 99)


def test_an_empty_log_has_nothing_and_lost_nothing():
    log = log_of(0)
    assert (log.last, log.lost_after(0), log.after(0, 9)) == (0, 0, ())


def test_an_event_as_a_document():
    (event,) = log_of(1).after(0, 1)
    assert event == Event(1, 1700.5, LoadChanged("calm", 1, 0))
    assert event.to_json("19f") == {
        "schema": "kvasir.event/1",
        "id": "19f-1",
        "at": 1700.5,
        "type": "load.changed",
        "state": "calm",
        "busy": 1,
        "queued": 0,
    }


def test_two_lives_of_a_node_have_two_names():
    assert EventLog(wall=lambda: 1.0).life != EventLog(wall=lambda: 2.0).life


def test_each_type_has_a_name_of_its_own_and_no_field_hides_the_heads():
    types = typing.get_args(Happening)
    assert len({each.type for each in types}) == len(types)
    for each in types:
        assert not {"schema", "id", "at", "type"} & {field.name for field in dataclasses.fields(each)}, each


async def test_readers_wait_for_what_comes_after_their_place(autojump_clock):
    log, woken = log_of(2), []

    async def read(after: int) -> None:
        await log.wait_after(after)
        woken.append((after, trio.current_time()))

    started = trio.current_time()
    async with trio.open_nursery() as nursery:
        for after in (0, 2, 3):
            nursery.start_soon(read, after)
        for _ in range(2):
            await trio.sleep(1)
            log.add(LoadChanged("calm", 0, 0))
    assert [(after, round(at - started)) for after, at in woken] == [(0, 0), (2, 1), (3, 2)]
