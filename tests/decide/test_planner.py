import math
import random
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_cases import M_LIKE, NAMES, S_LIKE, costs, like, scene

from kvasir_node.base.ids import SliceId
from kvasir_node.decide.costs import Costs, OwnCosts, WorkerCosts
from kvasir_node.decide.planner import PlanLimits, plan
from kvasir_node.decide.prediction import Scene, predict

ANN, BOB = NAMES[:2]
FREE = PlanLimits(max_slowdown=4.0)
STEADY = settings(max_examples=50, deadline=None, derandomize=True)


def slowed(own: OwnCosts, times: float) -> OwnCosts:
    return OwnCosts(
        own.trunk_s * times,
        own.trunk_row_s * times,
        own.layer_s * times,
        own.expert_s * times,
        own.pair_s * times,
        own.call_s,
        own.borrow_s,
    )


# The telling cases ------------------------------------------------------------------------------------------------


def test_a_small_model_gains_nothing_at_eight_rows_and_little_at_more():
    s = scene(8, 32, 4, 1)
    assert plan(s, costs(S_LIKE, like(S_LIKE)), 8, FREE).gain < 1.15
    assert plan(s, costs(S_LIKE, like(S_LIKE)), 32, FREE).gain < 1.3


def test_a_near_equal_takes_half_of_every_layer_in_one_lane():
    m = scene(12, 64, 8, 1)
    found = plan(m, costs(M_LIKE, like(M_LIKE)), 16, FREE)
    assert 1.5 < found.gain < 1.86
    assert 0.4 < found.shares[ANN] < 0.5
    assert (found.lanes, found.layers_shared, found.obstacle) == (1, 12, "")


def test_four_near_equals_share_evenly():
    found = plan(scene(12, 64, 8, 4), costs(M_LIKE, *[like(M_LIKE)] * 4), 16, FREE)
    assert found.gain > 2.5
    assert max(found.shares.values()) - min(found.shares.values()) < 0.04


@pytest.mark.parametrize(("slower", "least", "most"), [(2.0, 0.25, 0.36), (10.0, 0.0, 0.1), (100.0, 0.0, 0.0)])
def test_a_slow_worker_gets_little_or_nothing(slower, least, most):
    found = plan(scene(12, 64, 8, 1), costs(M_LIKE, like(M_LIKE, slower=slower)), 16, FREE)
    assert least <= found.shares.get(ANN, 0.0) <= most
    assert found.gain >= 1.0


def test_a_worker_in_doubt_gets_less_than_one_that_is_known():
    known = like(M_LIKE)
    doubted = WorkerCosts(
        known.rtt_s, known.call_s, known.expert_s, known.pair_s, known.sent_byte_s, known.received_byte_s, doubt=0.6
    )
    found = plan(scene(12, 64, 8, 2), costs(M_LIKE, known, doubted), 16, FREE)
    assert found.shares[BOB] < 0.85 * found.shares[ANN]


@pytest.mark.parametrize(
    ("worker", "limits", "words"),
    [
        (like(M_LIKE, rtt_s=0.08), FREE, "worker RTT 80 ms × 24 layers > budget"),
        (like(M_LIKE, rtt_s=0.04), FREE, "worker RTT 40 ms × 24 layers > budget"),
        (like(M_LIKE, slower=400.0), FREE, "the quickest worker is 400× slower than this machine"),
        (like(M_LIKE, rtt_s=0.01), PlanLimits(4.0), "calls would cost more than they save"),
        (like(M_LIKE), PlanLimits(4.0, bytes_s=1e3), "rows would need more than 0.001 MB/s"),
    ],
)
def test_what_stands_against_fanning_out_is_said(worker, limits, words):
    found = plan(scene(24, 64, 8, 1), costs(M_LIKE, worker), 8, limits)
    assert found.obstacle.startswith(words)
    assert found.shares == {}
    assert found.gain == 1.0


def test_nobody_to_send_to_is_said():
    assert plan(scene(2, 4, 2, 0), costs(M_LIKE), 8, FREE).obstacle == "no proven worker"
    assert plan(scene(2, 4, 2, 1), costs(M_LIKE), 8, FREE).obstacle == "no proven worker"  # costs do not know it


def test_round_trips_that_are_short_beside_a_layer_cost_little():
    slow = slowed(M_LIKE, 10.0)
    near = plan(scene(12, 64, 8, 4), costs(slow, *[like(slow, rtt_s=5e-4)] * 4), 16, FREE)
    far = plan(scene(12, 64, 8, 4), costs(slow, *[like(slow, rtt_s=0.02)] * 4), 16, FREE)
    assert far.predicted.tokens_per_s > 0.7 * near.predicted.tokens_per_s


def test_far_workers_take_whole_layers_and_lanes_hide_the_way():
    """A round trip takes about as long as a layer here: a share would not pay, whole layers in lanes do."""
    quick = like(M_LIKE, slower=0.02, rtt_s=0.015)
    s, c = scene(12, 64, 8, 1), costs(M_LIKE, quick)
    found = plan(s, c, 16, PlanLimits(20.0))
    assert found.lanes > 1
    assert 0 < found.layers_shared < 12
    assert {row.count(ANN) for row in found.routes.values()} == {0, 64}
    assert found.gain > plan(s, c, 16, PlanLimits(20.0, lanes_max=1)).gain
    near = costs(M_LIKE, like(M_LIKE, rtt_s=3e-4))
    assert plan(s, near, 16, PlanLimits(20.0)).lanes == 1


def test_dear_calls_go_to_few_of_many():
    own = replace(M_LIKE, call_s=2e-3)
    plans = [plan(scene(12, 64, 8, w), costs(own, *[like(own)] * w), 4, FREE) for w in (1, 2, 4, 8)]
    gains = [each.gain for each in plans]
    assert gains == sorted(gains)
    assert len(plans[-1].shares) < 4


def test_the_hottest_stay_here():
    heat = {layer: [2.0 ** -(index / 4) for index in range(64)] for layer in range(12)}
    found = plan(scene(12, 64, 8, 1, heat=heat), costs(M_LIKE, like(M_LIKE, rtt_s=2e-3)), 16, FREE)
    for row in found.routes.values():
        assert row[:4] == (None,) * 4
        assert ANN in row


def test_what_is_not_held_goes_away_whatever_the_limits():
    s = scene(4, 8, 2, 1, missing=(6, 7))
    found = plan(s, costs(M_LIKE, like(M_LIKE, rtt_s=0.01)), 1, PlanLimits(1.0, bytes_s=1.0))
    assert all(row == (None,) * 6 + (ANN,) * 2 for row in found.routes.values())
    assert found.layers_shared == 0
    assert found.gain == 1.0


def test_what_is_not_held_goes_to_whoever_has_proven_it_however_far_and_is_read_when_nobody_has():
    s = scene(1, 8, 2, 1, missing=(6, 7), proven=[(ANN, SliceId(0, 6, 6))])
    for rows in (1, 16):
        found = plan(s, costs(M_LIKE, like(M_LIKE, rtt_s=5.0)), rows, FREE)
        assert found.routes[0] == found.home[0] == (None,) * 6 + (ANN, None)
        assert (found.layers_shared, found.shares.keys()) == (0, {ANN})


@pytest.mark.parametrize("worker", [like(M_LIKE, rtt_s=0.5), like(M_LIKE, slower=1e6), like(M_LIKE)])
@pytest.mark.parametrize("layers", [2, 12])
def test_what_must_be_shared_is_shared_even_at_a_loss(worker, layers):
    s, c = scene(layers, 8, 2, 1), costs(M_LIKE, worker)
    forced = plan(s, c, 8, replace(FREE, must_share=True))
    assert forced.layers_shared > 0
    assert forced.obstacle == ""
    free = plan(s, c, 8, FREE)
    assert forced.gain <= free.gain
    assert (forced == free) == (free.layers_shared > 0)
    nobody = plan(scene(layers, 8, 2, 0), c, 8, replace(FREE, must_share=True))
    assert (nobody.layers_shared, nobody.obstacle) == (0, "no proven worker")


def test_replicas_share_the_load_of_what_both_hold():
    proven = [(peer, SliceId(layer, 0, 31)) for layer in range(8) for peer in (ANN, BOB)]
    found = plan(scene(8, 64, 8, 2, proven=proven), costs(M_LIKE, like(M_LIKE), like(M_LIKE)), 16, FREE)
    for row in found.routes.values():
        assert abs(row.count(ANN) - row.count(BOB)) <= 2
        assert set(row[32:]) == {None}


def test_prompts_are_planned_by_the_same_means():
    """Thousands of rows activate everything; bytes and pairs are what counts."""
    own = OwnCosts(0.02, 3e-5, 1e-4, 3e-4, 1.2e-5, 5e-4, 0.05)
    near = plan(scene(12, 64, 8, 1), costs(own, like(own, bytes_s=1e9)), 1024, PlanLimits(math.inf, lanes_max=1))
    thin = plan(scene(12, 64, 8, 1), costs(own, like(own, bytes_s=2e7)), 1024, PlanLimits(math.inf, lanes_max=1))
    assert near.gain > 1.5
    assert thin.gain < near.gain
    assert near.predicted.bytes_s > 12 * 1024 * 2048 / near.predicted.token_s


# Against the best there is ----------------------------------------------------------------------------------------


def brute_force(s: Scene, given_costs: Costs, rows: int, limits: PlanLimits) -> float:
    """The most tokens per second of all routes within the limits, by trying every one."""
    peers = [None, *sorted({peer for peer, _ in s.proven})]
    able = {(peer, part.layer, index) for peer, part in s.proven for index in range(part.first, part.last + 1)}
    choices = [
        [peer for peer in peers if peer is None or (peer, layer, index) in able]
        for layer in s.layers
        for index in range(s.experts)
    ]
    nobody = dict.fromkeys(s.layers, (None,) * s.experts)
    alone = predict(s, given_costs, rows, 1, nobody)
    idle = predict(s, given_costs, 1, 1, nobody)
    best = alone.tokens_per_s
    for lanes in range(1, min(limits.lanes_max, rows) + 1):
        for row in product(*choices):
            routes = {layer: row[place * s.experts :][: s.experts] for place, layer in enumerate(s.layers)}
            found = predict(s, given_costs, rows, lanes, routes)
            fits = found.token_s <= max(alone.token_s, limits.max_slowdown * idle.token_s)
            if fits and (not limits.bytes_s or found.bytes_s <= limits.bytes_s):
                best = max(best, found.tokens_per_s)
    return best


def random_case(seed: int) -> tuple[Scene, Costs, int, PlanLimits]:
    chance = random.Random(seed)
    layers, experts, workers = chance.choice([(1, 4, 2), (1, 6, 1), (2, 3, 1), (2, 2, 2), (1, 3, 3)])
    own = OwnCosts(
        trunk_s=chance.uniform(1e-4, 5e-3),
        trunk_row_s=chance.uniform(0, 5e-4),
        layer_s=1e-5,
        expert_s=10 ** chance.uniform(-4, -2),
        pair_s=10 ** chance.uniform(-5, -3.5),
        call_s=10 ** chance.uniform(-5, -3),
        borrow_s=1.0,
    )
    helpers = [
        like(
            own,
            slower=10 ** chance.uniform(-0.5, 0.7),
            rtt_s=10 ** chance.uniform(-4, -1.5),
            bytes_s=10 ** chance.uniform(6.5, 9),
        )
        for _ in range(workers)
    ]
    heat = {layer: [chance.expovariate(1.0) for _ in range(experts)] for layer in range(layers)}
    proven = [
        (peer, SliceId(layer, first, experts - 1))
        for layer in range(layers)
        for peer in NAMES[:workers]
        for first in [chance.choice((0, 0, 1))]
    ]
    limits = PlanLimits(chance.choice((1.0, 2.0, 4.0)), chance.choice((0.0, 0.0, 1e6)), lanes_max=3)
    case = scene(layers, experts, min(2, experts), workers, heat=heat, proven=proven)
    return case, costs(own, *helpers), chance.choice((1, 2, 8, 16)), limits


@pytest.mark.parametrize("seeds", [range(start, start + 30) for start in range(0, 120, 30)])
def test_no_route_is_more_than_two_percent_better(seeds):
    for seed in seeds:
        case, given_costs, rows, limits = random_case(seed)
        found = plan(case, given_costs, rows, limits)
        best = brute_force(case, given_costs, rows, limits)
        assert 0.98 * best <= found.predicted.tokens_per_s <= best * (1 + 1e-6), f"seed {seed}"


# Invariants -------------------------------------------------------------------------------------------------------

worlds = st.fixed_dictionaries(
    {
        "layers": st.sampled_from((1, 3, 24)),
        "experts": st.sampled_from((2, 8, 60)),
        "rows": st.sampled_from((1, 4, 32)),
        "seed": st.integers(0, 10_000),
        "workers": st.integers(0, 6),
    }
)


def world(layers, experts, rows, seed, workers) -> tuple[Scene, Costs, int, PlanLimits]:
    """A scene larger than can be tried out, with slices, missing experts and workers of all kinds."""
    chance = random.Random(seed)
    own = slowed(M_LIKE, 10 ** chance.uniform(-1, 1))
    helpers = [
        like(own, slower=10 ** chance.uniform(-1, 1), rtt_s=10 ** chance.uniform(-4, -1)) for _ in range(workers)
    ]
    heat = {layer: [chance.expovariate(1.0) for _ in range(experts)] for layer in range(layers)}
    proven = [
        (peer, SliceId(layer, first, chance.randint(first, experts)))
        for layer in range(layers)
        for peer in NAMES[:workers]
        for first in [chance.randrange(experts)]
    ]
    missing = chance.choice(((), (), (0,)))
    case = scene(layers, experts, 2, workers, heat=heat, proven=proven, missing=missing)
    limits = PlanLimits(chance.choice((1.0, 3.0)), chance.choice((0.0, 3e6)))
    return case, costs(own, *helpers), rows, limits


@given(worlds)
@STEADY
def test_every_expert_is_somewhere_where_it_can_be_and_limits_are_kept(drawn):
    case, given_costs, rows, limits = world(**drawn)
    found = plan(case, given_costs, rows, limits)
    able = {(peer, part.layer, index) for peer, part in case.proven for index in range(part.first, part.last + 1)}
    assert set(found.routes) == set(case.layers)
    for layer, row in found.routes.items():
        assert len(row) == case.experts
        assert all(peer is None or (peer, layer, index) in able for index, peer in enumerate(row))
    assert found.gain >= 1.0
    assert found.predicted.token_s <= max(limits.max_slowdown * found.idle_s, found.alone.token_s) * (1 + 1e-9)
    if limits.bytes_s:
        assert found.predicted.bytes_s <= max(limits.bytes_s, found.alone.bytes_s) * (1 + 1e-9)
    assert 1 <= found.lanes <= min(4, rows)
    assert (found.layers_shared == 0) == (found.obstacle != "")


@given(worlds)
@STEADY
def test_the_same_facts_in_another_order_give_the_same_plan(drawn):
    case, given_costs, rows, limits = world(**drawn)
    turned = Scene(
        case.layers,
        case.experts,
        case.chosen,
        case.row_bytes,
        dict(reversed(case.held.items())),
        list(case.proven)[::-1],
        case.heat,
    )
    other = Costs(given_costs.own, dict(reversed(given_costs.workers.items())))
    assert plan(case, given_costs, rows, limits) == plan(turned, other, rows, limits)


@given(worlds)
@STEADY
def test_what_is_planned_in_bulk_is_what_the_formulas_predict(drawn):
    case, given_costs, rows, limits = world(**drawn)
    found = plan(case, given_costs, rows, limits)
    exact = predict(case, given_costs, rows, found.lanes, found.routes)
    assert exact.token_s == pytest.approx(found.predicted.token_s, rel=0.05)
    assert exact.bytes_s == pytest.approx(found.predicted.bytes_s, rel=0.1)


@given(worlds)
@STEADY
def test_one_more_worker_never_makes_a_plan_worse(drawn):
    """Exactly so where every set of workers is tried; by at most 1 % where they are too many for that.

    All is held here: what is not must leave as soon as somebody has it, however slow that one is.
    """
    drawn["workers"] = max(1, drawn["workers"])
    case, given_costs, rows, limits = world(**drawn)
    case = replace(case, held=dict.fromkeys(case.layers, frozenset(range(case.experts))))
    last = NAMES[drawn["workers"] - 1]
    fewer = Scene(
        case.layers,
        case.experts,
        case.chosen,
        case.row_bytes,
        case.held,
        [pair for pair in case.proven if pair[0] != last],
        case.heat,
    )
    more, less = (plan(each, given_costs, rows, limits).predicted.tokens_per_s for each in (case, fewer))
    assert more >= 0.99 * less


@pytest.mark.parametrize("own", [M_LIKE, S_LIKE])
@pytest.mark.parametrize("rows", [1, 16])
def test_what_fewer_and_more_rows_take_alone_is_predicted_too(own, rows):
    given_scene, given_costs = scene(4, 32, 4, 1), costs(own, like(own))
    found = plan(given_scene, given_costs, rows, PlanLimits(4.0))
    for other, taken_s in ((1, found.idle_s), (rows, found.alone.token_s), (2 * rows, found.wide_s)):
        assert taken_s == pytest.approx(predict(given_scene, given_costs, other, 1, found.home).token_s)
