"""Pictures of nodes in the states that a person meets, for tests of the screen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvasir_node.base.snapshot import (
    ExpertLayerSnapshot,
    FanoutSnapshot,
    HubSnapshot,
    NetSnapshot,
    RequestSnapshot,
    ThroughputSnapshot,
    WorkerSnapshot,
)
from kvasir_node.surfaces.fake_node import busy_snapshot, fake_snapshot
from kvasir_node.surfaces.picture import Picture

API = "http://127.0.0.1:9480"
LOG = (
    "12:00:03 info surfaces.app: serving demo at http://127.0.0.1:9480",
    "12:00:41 info roles.crew: worker cellar is proven for 0:0-7",
    "12:01:02 info roles.coordinator: saturated: 4 busy, 9 waiting",
    "12:01:04 info roles.coordinator: fan-out on: queue 9, gain 1.7x, 2 workers",
    "12:01:07 warning roles.hub: hub attic did not take our demand: timed out after 4 s",
)
SPEEDS = tuple(float(speed) for speed in (0, 0, 0, 3, 12, 20, 24, 26, 25, 31, 44, 52, 58, 60, 62, 61))
PRESSURES = tuple(load / 4 for load in (0, 0, 0, 1, 2, 4, 5, 7, 9, 11, 12, 13, 13, 14, 13, 13))


def experts(layers: int = 6, count: int = 16, places: str = "hhhhhhhhhhhhhhww") -> tuple[ExpertLayerSnapshot, ...]:
    """Every layer's use falls by rank, and begins at another expert."""
    rows = []
    for layer in range(layers):
        use = tuple(100 // (1 + (index + 5 * layer) % count) for index in range(count))
        where = "".join(places[(index + layer) % len(places)] for index in range(count))
        rows.append(ExpertLayerSnapshot(layer, use, where, (0,) * count))
    return tuple(rows)


def busy(**changes: Any) -> Picture:
    """Saturated, with workers in several states and a warning."""
    snapshot = busy_snapshot()
    shares = {snapshot.workers[0].peer_id: 0.26}
    running = tuple(
        RequestSnapshot(
            200 + number, ("decode", "prefill", "queued")[min(number // 3, 2)], 21, 31 - 7 * number, 1, age_s
        )
        for number, age_s in enumerate((4.2, 3.9, 3.1, 2.0, 1.2))
    )
    picture = Picture(
        replace(snapshot, fanout=replace(snapshot.fanout, shares=shares)),
        API,
        LOG,
        experts=experts(),
        requests=tuple(replace(each, answer_tokens=max(each.answer_tokens, 0)) for each in running),
        speeds=SPEEDS,
        pressures=PRESSURES,
        ticket="kvasir1" + "q3x7" * 40,
    )
    return replace(picture, **changes)


def calm(**changes: Any) -> Picture:
    """Serving, nobody asks and nobody helps."""
    snapshot = fake_snapshot(
        throughput=ThroughputSnapshot(0.0, 1520, 31),
        fanout=FanoutSnapshot(reason="off: calm", local_pairs=145_920),
        net=NetSnapshot(1, 1, 0, 20_000, 31_000, "lan"),
        hub=HubSnapshot(1, 1),
    )
    return replace(Picture(snapshot, API, LOG[:1], experts=experts(places="h"), speeds=SPEEDS[:9]), **changes)


def lending(**changes: Any) -> Picture:
    """A machine that does nothing but lend."""
    snapshot = fake_snapshot(
        roles=("worker",),
        model=None,
        hub=None,
        worker=WorkerSnapshot(
            "serving", ("demo 0:0-7", "demo 3:8-15"), ("0:0-7", "3:8-15"), 812, 9031, 5_000_000, 1024
        ),
        net=NetSnapshot(2, 1, 1, 9_300_000, 8_100_000, "private"),
    )
    return replace(Picture(snapshot, API, LOG[1:2]), **changes)
