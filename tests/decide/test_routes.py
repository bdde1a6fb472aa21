from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_node.base.ids import PeerId, SliceId
from kvasir_node.decide.routes import at_home, shares_held, without_unproven

ANN, BOB = PeerId("ann"), PeerId("bob")
STEADY = settings(max_examples=100, deadline=None, derandomize=True)
EXPERTS, LAYERS = 6, (0, 2)
rows = st.lists(st.sampled_from([None, ANN, BOB]), min_size=EXPERTS, max_size=EXPERTS).map(tuple)
some_routes = st.dictionaries(st.sampled_from(LAYERS), rows)
pairs = st.builds(
    lambda peer, layer, first, more: (peer, SliceId(layer, first, first + more)),
    st.sampled_from([ANN, BOB]),
    st.sampled_from(LAYERS),
    st.integers(0, EXPERTS - 1),
    st.integers(0, EXPERTS),
)
held_sets = st.dictionaries(st.sampled_from(LAYERS), st.frozensets(st.integers(0, EXPERTS - 1)))


def is_able(proven, peer, layer, index) -> bool:
    return any(who == peer and part.layer == layer and part.first <= index <= part.last for who, part in proven)


@STEADY
@given(some_routes, st.lists(pairs, max_size=6))
def test_law_3_what_a_peer_is_not_proven_for_is_taken_off_and_nothing_else(routes, proven):
    left = without_unproven(routes, proven)
    assert left == {
        layer: tuple(peer if is_able(proven, peer, layer, index) else None for index, peer in enumerate(row))
        for layer, row in routes.items()
    }
    assert (left is routes) == (left == routes)


@STEADY
@given(some_routes, held_sets)
def test_law_2_what_is_held_here_stays_and_what_is_not_leaves_as_before(routes, held):
    left = at_home(routes, held)
    for layer, row in routes.items():
        here = held.get(layer, frozenset())
        assert left[layer] == tuple(None if index in here else peer for index, peer in enumerate(row))
    assert shares_held(left, held) == 0
    assert (left is routes) == (shares_held(routes, held) == 0)


def test_layers_of_which_something_that_is_held_here_is_elsewhere():
    routes = {0: (None, ANN, BOB), 2: (None, None, ANN)}
    assert shares_held(routes, {0: frozenset((0, 1, 2)), 2: frozenset((0, 1, 2))}) == 2
    assert shares_held(routes, {0: frozenset((2,)), 2: frozenset((0, 1))}) == 1
    assert shares_held(routes, {}) == 0
