"""Looks: who is looked at next, how its layers are split for it, and how rarely it is done."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_cases import NAMES, S_LIKE, costs, like, scene

from kvasir_node.base.ids import SliceId
from kvasir_node.decide.looks import LOOK_PAUSE_S, LOOK_RESTS, Look, LookPace, next_look
from kvasir_node.decide.planner import PlanLimits, plan, shared_anyway

ANN, BOB, CYD = NAMES[:3]
ROWS = 16


def step_s(the_scene, the_costs) -> float:
    return plan(the_scene, the_costs, ROWS, PlanLimits(4.0)).alone.token_s


def look_at(the_scene, the_costs, peers, last=None, **changes: float) -> Look | None:
    options = {"step_s": step_s(the_scene, the_costs), **changes}
    return next_look(the_scene, the_costs, ROWS, peers, last, **options)


# How often -------------------------------------------------------------------------------------------------------


def test_after_a_look_nobody_is_looked_at_for_a_hundred_times_what_it_cost_more():
    pace = LookPace()
    assert pace.take(10.0)
    pace.took(0.03, 10.04)
    assert not pace.take(10.04 + 0.03 * LOOK_RESTS - 1e-6)
    assert pace.take(10.04 + 0.03 * LOOK_RESTS + 1e-6)


@pytest.mark.parametrize("more_s", [0.0, -0.01, 1e-5])
def test_a_look_that_costs_nothing_is_not_repeated_at_once(more_s):
    pace = LookPace()
    assert pace.take(10.0)
    pace.took(more_s, 10.001)
    assert not pace.take(10.0 + LOOK_PAUSE_S - 1e-6)
    assert pace.take(10.0 + LOOK_PAUSE_S + 1e-6)


def test_two_forwards_beside_each_other_do_not_look_at_once():
    pace = LookPace()
    assert [pace.take(1.0), pace.take(1.0)] == [True, False]


@settings(deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.floats(1e-4, 0.1), st.floats(-0.01, 0.5)), min_size=1, max_size=300))
def test_law_7_looks_take_a_hundredth_of_the_time_whatever_each_costs(forwards):
    """Each forward takes its own time, and with a look so much more."""
    pace, now, looked_s, last_s = LookPace(), 0.0, 0.0, 0.0
    for alone_s, more_s in forwards:
        if pace.take(now):
            assert looked_s <= now / LOOK_RESTS + 1e-9
            now += max(0.0, alone_s + more_s)
            pace.took(more_s, now)
            last_s = max(0.0, more_s)
            looked_s += last_s
        else:
            now += alone_s
    assert looked_s - last_s <= now / LOOK_RESTS + 1e-9


# Whom ------------------------------------------------------------------------------------------------------------


def test_each_is_looked_at_in_turn_by_itself_so_that_a_slow_one_is_not_forgotten_beside_a_quick_one():
    the_scene = scene(8, 32, 4, 3)
    the_costs = costs(S_LIKE, like(S_LIKE, slower=0.5), like(S_LIKE, slower=40.0), like(S_LIKE, rtt_s=4e-3))
    seen, last = [], None
    for _ in range(6):
        look = look_at(the_scene, the_costs, (CYD, ANN, BOB), last)
        assert look is not None
        assert set(look.layers) == set(the_scene.layers)
        assert all(
            set(each.planned()) <= {None, look.peer} and look.peer in each.planned() for each in look.layers.values()
        )
        assert not any(each.has_choice for each in look.layers.values())  # or what is believed would keep it away
        last = look.peer
        seen.append(last)
    assert seen == [ANN, BOB, CYD] * 2


def test_the_turn_goes_on_when_who_had_it_last_has_gone():
    the_scene, the_costs = scene(8, 32, 4, 3), costs(S_LIKE, *[like(S_LIKE)] * 3)
    assert look_at(the_scene, the_costs, (ANN, CYD), BOB).peer == CYD
    assert look_at(the_scene, the_costs, (ANN, BOB), CYD).peer == ANN


def test_whose_way_takes_longer_than_a_whole_step_is_not_looked_at():
    the_scene = scene(8, 32, 4, 2)
    for worker in (like(S_LIKE, rtt_s=0.04), like(S_LIKE, bytes_s=1e6)):
        the_costs = costs(S_LIKE, worker, like(S_LIKE))
        assert look_at(the_scene, the_costs, (ANN,)) is None
        assert look_at(the_scene, the_costs, (ANN, BOB)).peer == BOB
        assert look_at(the_scene, the_costs, (ANN,), step_s=0.1).peer == ANN
    assert look_at(the_scene, the_costs, ()) is None
    assert look_at(the_scene, costs(S_LIKE), (ANN,)) is None  # nothing is known of it, not even that


def test_only_what_a_worker_is_proven_for_goes_to_it():
    proven = [(ANN, SliceId(1, 4, 9)), (BOB, SliceId(2, 0, 31))]
    look = look_at(scene(8, 32, 4, 2, proven=proven), costs(S_LIKE, like(S_LIKE), like(S_LIKE)), (ANN, BOB))
    assert look.peer == ANN
    assert set(look.layers) == {1}
    assert {index for index, peer in enumerate(look.layers[1].planned()) if peer} <= set(range(4, 10))


def test_of_who_seems_so_slow_that_a_token_would_wait_for_another_step_only_one_expert_is_asked():
    heat = {layer: [float(index == 5 + layer) for index in range(32)] for layer in range(8)}
    the_scene = scene(8, 32, 4, 1, heat=heat)
    the_costs = costs(S_LIKE, like(S_LIKE, slower=200.0, rtt_s=5e-3))
    look = look_at(the_scene, the_costs, (ANN,))
    for layer in range(8):
        assert [index for index, peer in enumerate(look.layers[layer].planned()) if peer] == [5 + layer]
    look = look_at(replace(the_scene, heat={}), the_costs, (ANN,))
    assert [sum(map(bool, each.planned())) for each in look.layers.values()] == [1] * 8


def test_looks_keep_the_limit_of_bytes():
    the_scene, the_costs = scene(8, 32, 4, 1), costs(S_LIKE, like(S_LIKE))
    row_and_pair_bytes = 8 * ROWS * (2 * the_scene.row_bytes + 64)
    assert look_at(the_scene, the_costs, (ANN,), bytes_s=row_and_pair_bytes / LOOK_PAUSE_S).layers
    assert look_at(the_scene, the_costs, (ANN,), bytes_s=1000.0) == Look(ANN, {})


def test_something_is_shared_even_where_a_call_costs_more_than_a_layer():
    the_scene = scene(8, 32, 4, 1)
    for worker in (like(S_LIKE, slower=50.0), like(S_LIKE, rtt_s=0.02)):
        the_costs = costs(replace(S_LIKE, call_s=5e-3), worker)
        assert plan(the_scene, the_costs, ROWS, PlanLimits(4.0)).layers_shared == 0
        shared = shared_anyway(the_scene, the_costs, ROWS)
        assert (shared.layers_shared, shared.lanes) == (8, 1)
