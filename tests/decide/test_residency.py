from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvasir_node.base.ids import ExpertId
from kvasir_node.decide.residency import HOTTER_PAIRS, HOTTER_RATIO, Swap, places, plan_swaps, spread_over_layers

ALL = [ExpertId(layer, index) for layer in range(3) for index in range(4)]


def test_all_stay_when_they_fit_and_else_some_room_is_left_for_borrowing():
    assert places(12, 12) == 12
    assert places(100, 12) == 12
    assert places(11, 12) == 10
    assert places(80, 100) == 70
    assert places(1, 12) == 0


def test_what_is_held_at_first_is_spread_over_the_layers():
    assert spread_over_layers(ALL, 7) == [ExpertId(0, 0), ExpertId(0, 1), ExpertId(0, 2), ExpertId(1, 0),
                                          ExpertId(1, 1), ExpertId(2, 0), ExpertId(2, 1)]  # fmt: skip
    assert spread_over_layers(ALL[::2], 3) == [ExpertId(0, 0), ExpertId(1, 0), ExpertId(2, 0)]
    assert spread_over_layers(ALL, 99) == ALL
    assert spread_over_layers(ALL, 0) == []


def test_the_hottest_newcomer_takes_the_place_of_the_coldest_expert_in_whatever_layer():
    heat = {0: [9.0, 8.0, 0.0, 7.0], 1: [1.0, 2.0, 0.0, 0.0], 2: [0.0, 0.0, 30.0, 0.0]}
    held = {0: frozenset({0, 1}), 1: frozenset({0, 1}), 2: frozenset()}
    assert plan_swaps(wanted=ALL, held=held, heat=heat, swaps_max=8) == [
        Swap(ExpertId(1, 0), ExpertId(2, 2)),
        Swap(ExpertId(1, 1), ExpertId(0, 3)),
    ]
    assert plan_swaps(wanted=ALL, held=held, heat=heat, swaps_max=1) == [Swap(ExpertId(1, 0), ExpertId(2, 2))]


def test_a_little_hotter_is_not_enough():
    held = {0: frozenset({0})}
    wanted = [ExpertId(0, 0), ExpertId(0, 1)]
    for cold, hot, swaps in ((10.0, 15.9, 0), (10.0, 16.0, 1), (0.0, 0.9, 0), (0.0, 1.0, 1)):
        assert len(plan_swaps(wanted=wanted, held=held, heat={0: [cold, hot]}, swaps_max=4)) == swaps


def test_only_what_is_wanted_comes_and_nothing_moves_without_heat():
    held = {0: frozenset({0}), 1: frozenset({0})}
    assert plan_swaps(wanted=[ExpertId(0, 0)], held=held, heat={0: [0.0, 99.0]}, swaps_max=4) == []
    assert plan_swaps(wanted=ALL, held=held, heat={}, swaps_max=4) == []


@given(
    st.lists(st.lists(st.floats(0, 100), min_size=4, max_size=4), min_size=3, max_size=3),
    st.sets(st.sampled_from(ALL)),
    st.integers(1, 12),
)
def test_swaps_warm_memory_keep_its_size_and_come_to_an_end(rows, inside, swaps_max):
    heat = dict(enumerate(rows))
    held = {layer: frozenset(e.index for e in inside if e.layer == layer) for layer in heat}

    def warmth(expert: ExpertId) -> float:
        return heat[expert.layer][expert.index]

    for _ in range(len(ALL)):
        swaps = plan_swaps(wanted=ALL, held=held, heat=heat, swaps_max=swaps_max)
        assert len(swaps) <= swaps_max
        assert len({swap.taken for swap in swaps}) == len({swap.given_up for swap in swaps}) == len(swaps)
        if not swaps:
            break
        for swap in swaps:
            assert warmth(swap.taken) >= HOTTER_RATIO * warmth(swap.given_up) + HOTTER_PAIRS
            assert swap.given_up.index in held[swap.given_up.layer]
            assert swap.taken.index not in held[swap.taken.layer]
            held[swap.given_up.layer] -= {swap.given_up.index}
            held[swap.taken.layer] |= {swap.taken.index}
        assert sum(map(len, held.values())) == len(inside)
    assert plan_swaps(wanted=ALL, held=held, heat=heat, swaps_max=swaps_max) == []
