"""Which swarms are simulated, what is asked of them, and what goes wrong.

It does not know how a swarm reacts. Sizes go with the number of nodes, so that a small run shows what a large one does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from kvasir_node.base.errors import UsageError
from kvasir_node.sim.network import Link
from kvasir_node.sim.workers import HONEST, Manner
from kvasir_node.sim.workload import SimModel

MIB = 1 << 20
HOUR_S = 3600.0
MINUTE_S = 60.0
SLICE_BYTES = 16 * MIB

PHONE = Link("phone", 0.025, 0.5e6, 2e6)
HOME = Link("home", 0.012, 2.5e6, 12e6)
RACK = Link("rack", 0.0005, 125e6, 125e6)
SERVER = Link("server", 0.001, 250e6, 250e6)
DATA_CENTRE = Link("data centre", 0.001, 3e9, 3e9)  # 10¹² bytes leave it in six minutes

SILENT = Manner("takes leases and is silent", fetches=False, claims_progress=False, answers=False, answers_right=False)
CLAIMER = Manner("claims progress and coverage", fetches=False, answers=False, answers_right=False)
WRONG = Manner("answers wrong", answers_right=False)
MUTE = Manner("attaches and never computes", answers=False, answers_right=False)
MINTED = Manner("one machine, many names", answers_right=False)
LIARS = (SILENT, CLAIMER, WRONG, MUTE, MINTED)


@dataclass(frozen=True, slots=True)
class Crowd:
    """A share of the nodes: their links and how many slices they have memory for, at least and at most."""

    share: float
    link: Link
    slices: tuple[int, int]


CROWD = (Crowd(0.3, PHONE, (1, 2)), Crowd(0.6, HOME, (1, 8)), Crowd(0.1, RACK, (8, 32)))


@dataclass(frozen=True, slots=True)
class Asked:
    """One coordinator: its model and requests per second over time."""

    model: SimModel
    rate: Callable[[float], float]
    rate_max: float
    link: Link = SERVER


@dataclass(frozen=True, slots=True)
class Scenario:
    """`events` = (seconds, what, argument); `peaks` = (from, to) in which much is asked."""

    name: str
    nodes: int
    hours: float
    asked: tuple[Asked, ...]
    peaks: tuple[tuple[float, float], ...]
    hubs: int = 2
    crowd: tuple[Crowd, ...] = CROWD
    liars: float = 0.0
    session_s: float = math.inf  # a node is up for so long on average, and then down for a quarter of it
    events: tuple[tuple[float, str, int], ...] = ()
    loss_ratio: float = 0.005
    skew_s: float = 300.0  # clocks of hubs and coordinators differ by up to twice this


def _model(name: str, slices: int) -> SimModel:
    """About so many slices, in 20 layers or fewer."""
    layers = max(1, min(20, slices // 5))
    return SimModel(name, layers, max(1, round(slices / layers)), 4, SLICE_BYTES, alone_tokens_s=400.0)


def _alone_rate(model: SimModel) -> float:
    """Requests per second that its coordinator can serve alone at best."""
    return model.alone_tokens_s / model.request_tokens


def _bursts(model: SimModel, peaks: tuple[tuple[float, float], ...], low: float, high: float) -> Asked:
    each = _alone_rate(model)

    def rate(now: float) -> float:
        return each * (high if any(begin <= now < end for begin, end in peaks) else low)

    return Asked(model, rate, each * high)


def _crowded(name: str, nodes: int, hours: float, peaks: tuple[tuple[float, float], ...]) -> Scenario:
    """Three coordinators whose load together wants about 4 copies for each 10 nodes."""
    models = (_model("large", nodes // 10), _model("middle", nodes * 6 // 100), _model("small", nodes * 4 // 100))
    return Scenario(name, nodes, hours, tuple(_bursts(model, peaks, 0.3, 1.7) for model in models), peaks)


def _flash_crowd(nodes: int, hours: float) -> Scenario:
    length_s = hours * HOUR_S
    return _crowded("flash-crowd", nodes, hours, ((length_s / 4, length_s / 2),))


def _churn(nodes: int, hours: float) -> Scenario:
    length_s = hours * HOUR_S
    crowded = _crowded("churn", nodes, hours, ((length_s / 6, length_s * 5 / 6),))
    return replace(crowded, session_s=20 * MINUTE_S)


def _hub_death(nodes: int, hours: float) -> Scenario:
    """One of three hubs dies in the middle of the burst; later all of them are gone for ten minutes."""
    length_s = hours * HOUR_S
    begin, end = length_s / 6, length_s * 5 / 6
    out_at = begin + (end - begin) * 0.6
    out_s = min(10 * MINUTE_S, (end - begin) * 0.3)
    events = (
        (begin + 10.0, "hub dies", 0),
        (begin + (end - begin) * 0.4, "hub starts", 0),
        *((out_at, "hub dies", hub) for hub in range(3)),
        *((out_at + out_s + 5.0 * hub, "hub starts", hub) for hub in range(3)),
    )
    return replace(_crowded("hub-death", nodes, hours, ((begin, end),)), hubs=3, events=events)


def _partition(nodes: int, hours: float) -> Scenario:
    """A quarter of the nodes, with a hub and no coordinator, is cut off for five minutes."""
    length_s = hours * HOUR_S
    begin, end = length_s / 6, length_s * 5 / 6
    cut_at = begin + (end - begin) * 0.3
    events = ((cut_at, "cut", 4), (cut_at + min(5 * MINUTE_S, (end - begin) * 0.3), "heal", 0))
    return replace(_crowded("partition", nodes, hours, ((begin, end),)), events=events)


def _liars(nodes: int, hours: float) -> Scenario:
    length_s = hours * HOUR_S
    peaks = tuple((length_s * at, length_s * (at + 0.15)) for at in (0.1, 0.4, 0.7))
    return replace(_crowded("liars", nodes, hours, peaks), liars=0.3)


def _day(nodes: int, hours: float) -> Scenario:
    """Load that rises and falls once in the whole time, each model at its own hours."""
    length_s = hours * HOUR_S
    asked: list[Asked] = []
    for number, share in enumerate((10, 6, 4)):
        model = _model(f"model {number}", nodes * share // 100)
        each = _alone_rate(model)

        def rate(now: float, each: float = each, number: int = number) -> float:
            return each * (0.9 - 0.75 * math.cos(2 * math.pi * (now / length_s - number / 12)))

        asked.append(Asked(model, rate, each * 1.65))
    return Scenario("day", nodes, hours, tuple(asked), (), session_s=4 * HOUR_S)


def _trillion(nodes: int, hours: float) -> Scenario:
    """A model of 10¹² parameters in 4,000 slices that no machine holds: phones, home GPUs and racks."""
    layers, each = 50, max(1, round(80 * nodes / 20_000))
    model = SimModel(
        "trillion", layers, each, 4, 256 * MIB, alone_tokens_s=200.0, slots=16, request_tokens=300.0, is_held=False
    )
    length_s = hours * HOUR_S
    peaks = ((length_s / 3, length_s * 2 / 3),)
    crowd = (Crowd(0.5, PHONE, (1, 1)), Crowd(0.4, HOME, (8, 32)), Crowd(0.1, RACK, (32, 64)))
    asked = replace(_bursts(model, peaks, 0.2, 1.5), link=DATA_CENTRE)
    return Scenario("trillion", nodes, hours, (asked,), peaks, crowd=crowd)


@dataclass(frozen=True, slots=True)
class _Kind:
    build: Callable[[int, float], Scenario]
    nodes: int
    hours: float
    words: str


SCENARIOS: Mapping[str, _Kind] = {
    "flash-crowd": _Kind(_flash_crowd, 10_000, 1.0, "demand appears at once, and goes"),
    "day": _Kind(_day, 1_000, 24.0, "24 hours of load that rises and falls, three models"),
    "churn": _Kind(_churn, 2_000, 1.0, "nodes that come and go all the time"),
    "hub-death": _Kind(_hub_death, 1_000, 1.0, "a hub dies in the burst; later all are gone for ten minutes"),
    "partition": _Kind(_partition, 1_000, 1.0, "a quarter of the nodes is cut off with a hub, and comes back"),
    "liars": _Kind(_liars, 1_000, 1.0, "three of ten nodes cheat in one of five ways"),
    "trillion": _Kind(_trillion, 20_000, 1.0, "a model of 4,000 slices that no machine holds"),
}
NODES_MIN, NODES_MAX, HOURS_MAX = 50, 100_000, 24 * 31.0


def scenario(name: str, nodes: int | None = None, hours: float | None = None) -> Scenario:
    """A scenario by its name, in its usual size unless told otherwise; raises UsageError."""
    kind = SCENARIOS.get(name)
    if kind is None:
        raise UsageError(f"no scenario is called {name[:40]!r}; there are {', '.join(SCENARIOS)}")
    nodes, hours = kind.nodes if nodes is None else nodes, kind.hours if hours is None else hours
    if not NODES_MIN <= nodes <= NODES_MAX or not 0 < hours <= HOURS_MAX:
        raise UsageError(
            f"a swarm has {NODES_MIN} to {NODES_MAX} nodes and is watched for up to {HOURS_MAX:g} hours; "
            f"got {nodes} nodes and {hours:g} hours"
        )
    return kind.build(nodes, hours)


def manner_of(number: int, liars: float) -> Manner:
    """Of each hundred nodes the first so many cheat, in each of the ways in turn."""
    return LIARS[number % len(LIARS)] if number % 100 < round(100 * liars) else HONEST
