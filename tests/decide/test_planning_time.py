"""How long a plan takes: everything on the loop waits for it. `pytest -m soak -s tests/decide/test_planning_time.py`"""

import random
import time

import pytest
from planner_cases import M_LIKE, NAMES, costs, like, scene

from kvasir_node.base.ids import SliceId
from kvasir_node.decide.planner import PlanLimits, plan
from kvasir_node.decide.prediction import predict

pytestmark = pytest.mark.soak
LAYERS, EXPERTS, WORKERS = 48, 128, 8


def quickest_ms(act) -> float:
    """Of ten, processor time."""
    times = []
    for _ in range(10):
        started = time.process_time()
        act()
        times.append(time.process_time() - started)
    return 1000 * min(times)


@pytest.mark.parametrize(("held_by", "most_ms"), [("everybody holds all", 10.0), ("one of eight holds each", 40.0)])
def test_a_large_model_with_eight_workers_is_planned_quickly(held_by, most_ms):
    chance = random.Random(1)
    heat = {layer: [chance.expovariate(1.0) for _ in range(EXPERTS)] for layer in range(LAYERS)}
    single = [
        (chance.choice(NAMES), SliceId(layer, index, index)) for layer in range(LAYERS) for index in range(EXPERTS)
    ]
    s = scene(LAYERS, EXPERTS, 8, WORKERS, heat=heat, proven=None if held_by.startswith("every") else single)
    for rtt_s in (3e-4, 5e-3, 5e-2):
        c = costs(M_LIKE, *[like(M_LIKE, slower=1 + number / 10, rtt_s=rtt_s) for number in range(WORKERS)])
        found = plan(s, c, 16, PlanLimits(4.0))
        plan_ms = quickest_ms(lambda c=c: plan(s, c, 16, PlanLimits(4.0)))
        predict_ms = quickest_ms(lambda c=c, found=found: predict(s, c, 16, found.lanes, found.routes))
        print(
            f"\n{held_by}, RTT {1000 * rtt_s:g} ms: plan {plan_ms:.1f} ms, prediction {predict_ms:.1f} ms; "
            f"{found.lanes} lanes, {found.layers_shared} layers shared, gain {found.gain:.2f}"
        )
        assert plan_ms < most_ms
