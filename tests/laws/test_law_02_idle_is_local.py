"""Law 2: while the coordinator is calm and holds an expert, that expert's rows never touch the network."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_node.base.ids import PeerId, SliceId
from kvasir_node.decide.admission import Admission, AdmissionLimits, Load
from kvasir_node.decide.costs import CostBook
from kvasir_node.decide.demand import Demands, missing_slices
from kvasir_node.decide.planner import PlanLimits, plan
from kvasir_node.decide.prediction import Scene
from kvasir_node.decide.routes import at_home, shares_held

STEADY = settings(max_examples=150, deadline=None, derandomize=True)
EXPERTS = 8
SLICES = tuple(SliceId(layer, first, first + 3) for layer in (0, 1) for first in (0, 4))
proven_pairs = st.lists(
    st.tuples(st.sampled_from([PeerId("ann"), PeerId("bob")]), st.sampled_from(SLICES)), unique=True, max_size=8
)
heats = st.dictionaries(st.integers(0, 1), st.lists(st.floats(0, 1e6), min_size=EXPERTS, max_size=EXPERTS))
held_sets = st.fixed_dictionaries({layer: st.frozensets(st.integers(0, EXPERTS - 1)) for layer in (0, 1)})


@STEADY
@given(held_sets, proven_pairs, heats)
def test_whoever_is_proven_no_held_expert_leaves_while_calm(held, proven, heat):
    """Neither by the routes that are planned for it, nor by those that were in force when it came."""
    scene = Scene((0, 1), EXPERTS, 2, 1024, held, proven, heat)
    costs = CostBook(borrow_s=0.01).costs(0.0, {peer for peer, _ in proven})
    found = plan(scene, costs, 16, PlanLimits(4.0, must_share=True))
    for routes in (found.home, at_home(found.routes, held)):
        assert shares_held(routes, held) == 0
        assert all(routes[layer][index] is None for layer in held for index in held[layer])
    assert found.layers_shared == shares_held(found.routes, held)


@STEADY
@given(proven_pairs, heats, st.floats(0, 100))
def test_who_holds_everything_asks_for_nothing_while_calm(proven, heat, pressure):
    everything = {layer: frozenset(range(EXPERTS)) for layer in (0, 1)}
    demands = Demands(SLICES, 4, 5.0)
    demands.observe(0.0, saturated=False, pressure=pressure, load=1.0)
    demands.note_heat(heat)
    found = demands.wants(missing_slices(SLICES, everything), proven)
    assert all(wanted.want == 0 for wanted in found)


@STEADY
@given(st.lists(st.sampled_from([0.0, 0.1, 1.0, 30.0]), max_size=40))
def test_requests_that_never_wait_never_saturate(pauses_s):
    admission = Admission(AdmissionLimits(4, 64, saturated_after_s=0.5, calm_after_s=5.0, calm_busy_ratio=0.75))
    now = 0.0
    for request, pause_s in enumerate(pauses_s):
        if admission.busy == 4:
            admission.leave(request - 4, now)
        admission.arrive(request, now)
        now += pause_s
        admission.tick(now)
        assert admission.load is Load.CALM
