"""Every event has words of its own, and of one from another version at least its type is told."""

from __future__ import annotations

from typing import get_args

import pytest

from kvasir_node.base import events
from kvasir_node.surfaces.event_words import LOST, event_line, said_of

SAMPLES = {
    events.RequestStarted(7, 12, 1, True): ("info", "request 7 waits: 12 prompt tokens"),
    events.RequestStarted(7, 1, 1, False): ("info", "request 7 starts: 1 prompt token"),
    events.RequestEnded(7, "stop", 12, 31, 300, 100, 800, 90, 6): (
        "info",
        "request 7 ended (stop): 31 tokens in 1.2 s, 0.3 s waiting, 6 remote pairs",
    ),
    events.RequestEnded(8, "failed", 1, 0, 0, 0, 0, 0, 0): (
        "warning",
        "request 8 ended (failed): 0 tokens in 0.0 s, 0.0 s waiting",
    ),
    events.LoadChanged("saturated", 4, 9): ("warning", "saturated: 4 busy, 9 waiting"),
    events.LoadChanged("calm", 0, 0): ("info", "calm: 0 busy, 0 waiting"),
    events.FanoutChanged(True, "on: queue 9", 1.7): ("info", "fan-out on: queue 9"),
    events.WorkerChanged("12D3", "cellar", "proven", "trial", 2, ""): (
        "info",
        "worker cellar is proven (was trial), 2 slices",
    ),
    events.WorkerChanged("12D3", "cellar", "proven", "proven", 3, ""): ("info", "worker cellar is proven, 3 slices"),
    events.WorkerChanged("12D3", "\x1b[2J", "banned", "", 1, "wrong sums"): (
        "warning",
        "worker ?[2J is banned, 1 slice: wrong sums",
    ),
    events.DemandChanged("demo", 6, 12, 3): ("info", "wants 6 slices, 12 copies, 3 proven"),
    events.LeasesChanged(1, 3, 2): ("info", "hub: 3 leases, 2 copies still wanted"),
    events.LendingChanged("serving", 2, ""): ("info", "lending: serving"),
    events.LendingChanged("paused", 0, "on battery"): ("info", "lending: paused: on battery"),
    events.WarningsChanged(("one", "two")): ("warning", "one; two"),
    events.WarningsChanged(()): ("info", "no warnings any more"),
}


@pytest.mark.parametrize(("what", "said"), SAMPLES.items(), ids=lambda each: type(each).__name__)
def test_what_an_event_says(what, said):
    document = events.Event(1, 0.0, what).to_json("life")
    assert tuple(said_of(document).values()) == said
    line = event_line(document | said_of(document))
    assert line[8:] == f" {said[0]} {what.type}: {said[1]}"


def test_all_kinds_of_events_have_a_sample():
    assert {type(what) for what in SAMPLES} == set(get_args(events.Happening))


def test_lost_events_are_told():
    assert said_of({"type": LOST, "count": 3}) == {"level": "warning", "words": "3 events before this were lost"}
    assert said_of({"type": LOST, "count": None})["words"] == "some events before this were lost"


def test_an_unknown_event_is_told_by_its_type():
    assert said_of({"type": "new.thing"}) == {"level": "info", "words": "new.thing"}
    assert event_line({"type": "new.thing", "at": 0}).endswith("new.thing: None")
