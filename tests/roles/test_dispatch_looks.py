"""Looks, as the dispatch makes them: a decode forward now and then, of which no token depends."""

from __future__ import annotations

import time

import pytest
import torch
from fanout_fakes import (
    ANN,
    BOB,
    LAYERS,
    FakeCrew,
    changed_body,
    honest_body,
    make_checkpoint,
    make_dispatch,
    make_own,
    make_shard,
    random_rows,
    route_of,
)

from kvasir_node.base.errors import Unreachable
from kvasir_node.decide.dealing import Dealings, fixed
from kvasir_node.decide.looks import LOOK_LOSS_S, LOOK_RESTS, LookPace
from kvasir_node.model.trunk import LocalDispatch
from kvasir_node.roles.dispatch import FanoutDispatch
from kvasir_node.roles.measured import CallMeasured, ForwardMeasured, LinkMeasured

SLOTS = 5
LOOKS = fixed(route_of(ANN, None))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def truth(checkpoint):
    return LocalDispatch(make_shard(checkpoint))


@pytest.fixture(scope="module")
def own(checkpoint):
    return make_own(checkpoint)


class Heard:
    def __init__(self) -> None:
        self.forwards: list[ForwardMeasured] = []

    def forward_measured(self, measured: ForwardMeasured) -> None:
        self.forwards.append(measured)

    def call_measured(self, measured: CallMeasured) -> None:
        raise AssertionError("the crew tells of calls")

    def link_measured(self, measured: LinkMeasured) -> None:
        raise AssertionError("nobody times links here")


def honest(own) -> FakeCrew:
    return FakeCrew(dict.fromkeys((ANN, BOB), lambda call: memoryview(bytearray(honest_body(own, call.request)))))


def unhurried(own, crew: FakeCrew, observer: Heard | None = None) -> FanoutDispatch:
    """No look costs anything, however busy this machine is."""
    return make_dispatch(own, crew, clock=lambda: 0.0, observer=observer)


def look_with(dispatch: FanoutDispatch, looks: Dealings | None, decode: Dealings | None = None) -> None:
    dispatch.set_routes(decode or {}, {}, SLOTS, looks)


def rest(dispatch: FanoutDispatch) -> None:
    """So long that the next look may be."""
    dispatch._common.look_pace = LookPace()


def forward(dispatch: FanoutDispatch, seed: int = 0, count: int = SLOTS) -> list[torch.Tensor]:
    dispatch.begin(count)
    sums = [dispatch(layer, *random_rows(seed + layer, count)) for layer in LAYERS]
    dispatch.tally()
    return sums


def test_all_layers_of_a_forward_are_looked_at_and_what_each_took_is_told(own):
    crew, heard = honest(own), Heard()
    dispatch = unhurried(own, crew, observer=heard)
    look_with(dispatch, LOOKS)
    for seed in range(3):
        rest(dispatch)
        forward(dispatch, seed)
    assert [call.layer for call in crew.calls] == [0, 1, 2] * 3
    assert all(call.is_sample for call in crew.calls)
    assert [len(served.experts) for served in crew.heard] == [3] * 3
    for number, told in enumerate(heard.forwards):
        assert told.own_call_s is not None
        assert told.layer is not None
        sampled = crew.calls[3 * number + (1 + number) % 3]
        assert told.layer.pairs == 2 * SLOTS - sampled.pairs


def test_a_look_that_has_become_dear_ends_and_the_layers_after_it_are_computed_here(own):
    crew = FakeCrew({ANN: lambda call: None}, deadline_s=2 * LOOK_LOSS_S)
    dispatch = make_dispatch(own, crew)
    look_with(dispatch, LOOKS)
    forward(dispatch)
    assert [call.layer for call in crew.calls] == [0]


def test_between_two_looks_all_is_computed_here(own):
    crew, times = honest(own), [0.0]
    dispatch = make_dispatch(own, crew, clock=lambda: times[0])
    look_with(dispatch, LOOKS)
    forward(dispatch)
    dispatch._common.look_pace.took(10.0, 0.0)
    for now in (1.0, 10.0, 10.0 * LOOK_RESTS - 1.0):
        times[0] = now
        forward(dispatch)
    assert len(crew.calls) == 3
    times[0] = 10.0 * LOOK_RESTS
    forward(dispatch)
    assert len(crew.calls) == 6
    assert dispatch.counters.remote == sum(call.pairs for call in crew.calls)


def test_in_a_forward_that_may_not_look_only_the_sampled_layer_of_what_is_elsewhere_anyhow_is_timed(own):
    crew = honest(own)
    dispatch = unhurried(own, crew)
    look_with(dispatch, LOOKS, fixed(route_of(BOB, None, layers=LAYERS[1:])))
    dispatch._common.look_pace.took(10.0, 0.0)
    for _ in LAYERS:
        forward(dispatch)
    assert [call.layer for call in crew.calls if call.is_sample] == [1, 2]


def test_what_a_look_took_longer_than_alone_is_what_it_rests_for(own, truth):
    crew = FakeCrew({ANN: lambda call: None}, deadline_s=0.02)
    dispatch = make_dispatch(own, crew)
    look_with(dispatch, LOOKS)
    began = time.monotonic()
    sums = forward(dispatch)
    ended = time.monotonic()
    for layer, each in enumerate(sums):
        torch.testing.assert_close(each, truth(layer, *random_rows(layer)), atol=1e-5, rtol=1e-5)
    pace = dispatch._common.look_pace
    assert not pace.take(began + 0.02 * (1 + LOOK_RESTS) - 0.1)
    assert pace.take(ended + (ended - began) * LOOK_RESTS)


@pytest.mark.parametrize("case", ["prompt", "routes", "no looks", "no patience"])
def test_nobody_is_looked_at(own, case):
    crew = honest(own)
    dispatch = make_dispatch(own, crew, patience_s=0.0 if case == "no patience" else 2.0)
    look_with(
        dispatch,
        {} if case == "no looks" else LOOKS,
        fixed(route_of(BOB, layers=LAYERS)) if case == "routes" else {},
    )
    forward(dispatch, count=SLOTS + 1 if case == "prompt" else SLOTS)
    assert ANN not in {call.peer for call in crew.calls}


def test_law_2_and_3_a_look_that_is_taken_back_ends_in_the_forward_that_is_under_way(own):
    crew = honest(own)
    dispatch = unhurried(own, crew)
    look_with(dispatch, LOOKS)
    dispatch.begin(SLOTS)
    dispatch(0, *random_rows(0))
    look_with(dispatch, {})
    dispatch(1, *random_rows(1))
    assert [call.layer for call in crew.calls] == [0]


ANSWERS = {
    "honest": lambda own, call: memoryview(bytearray(honest_body(own, call.request))),
    "silent": lambda own, call: None,
    "gone": lambda own, call: Unreachable("the connection ended"),
    "wrong": lambda own, call: changed_body(own, call.request, lambda sums: sums + 1.0),
    "nan": lambda own, call: changed_body(own, call.request, lambda sums: sums * float("nan")),
}


@pytest.mark.parametrize("kind", ANSWERS)
@pytest.mark.parametrize("row", [(ANN, None), (ANN,), (ANN, BOB, None)])
def test_law_1_and_5_same_answer_whatever_who_is_looked_at_does(own, truth, kind, row):
    crew = FakeCrew(dict.fromkeys((ANN, BOB), lambda call: ANSWERS[kind](own, call)))
    dispatch = make_dispatch(own, crew, checks=True)
    look_with(dispatch, fixed(route_of(*row)))
    for seed in range(4):
        rest(dispatch)
        for layer, sums in enumerate(forward(dispatch, seed)):
            torch.testing.assert_close(sums, truth(layer, *random_rows(seed + layer)), atol=1e-5, rtol=1e-5)
    assert crew.calls
