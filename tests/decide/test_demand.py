import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_node.base.ids import PeerId, SliceId
from kvasir_node.decide.demand import (
    DECAY_FACTOR_MAX,
    SOON,
    Demands,
    Wanted,
    missing_slices,
    slice_heat,
    surge_copies,
)

ANN, BOB = PeerId("ann"), PeerId("bob")
LOW, HIGH = SliceId(0, 0, 1), SliceId(0, 2, 3)
ALL, NONE = {0: frozenset(range(4))}, {0: frozenset[int]()}
STEADY = settings(max_examples=150, deadline=None, derandomize=True)


DECAY_S = 30.0


def demand(held, *, saturated=False, pressure=0.0, proven=(), heat=None, most=2) -> tuple[Wanted, ...]:
    """Of a coordinator that has just begun."""
    demands = Demands((LOW, HIGH), most, DECAY_S)
    demands.observe(0.0, saturated=saturated, pressure=pressure, load=0.0)
    demands.note_heat({} if heat is None else heat)
    return demands.wants(missing_slices((LOW, HIGH), held), proven)


@pytest.mark.parametrize(
    ("pressure", "most", "copies"),
    [(0, 4, 0), (0.9, 4, 0), (1, 4, 1), (1.9, 4, 1), (2, 4, 2), (4, 4, 3), (8, 4, 4), (1e9, 4, 4), (1e9, 0, 0)],
)
def test_surge_copies(pressure, most, copies):
    assert surge_copies(pressure, most) == copies


@pytest.mark.parametrize(
    ("held", "saturated", "wants"),
    [
        (ALL, False, []),
        (NONE, False, [(LOW, 1), (HIGH, 1)]),
        ({0: frozenset({0, 1, 2})}, False, [(HIGH, 1)]),  # one expert missing: the slice is
        ({}, False, [(LOW, 1), (HIGH, 1)]),
        (ALL, True, [(LOW, 2), (HIGH, 2)]),
        ({0: frozenset({0, 1})}, True, [(LOW, 2), (HIGH, 3)]),  # what is missing comes on top
    ],
)
def test_what_is_wanted(held, saturated, wants):
    found = demand(held, saturated=saturated, pressure=3.0)
    assert [(wanted.slice, wanted.want) for wanted in found] == wants


def test_a_cold_slice_wants_one_copy_fewer_but_never_no_first_one():
    cold = {0: [9.0, 9.0, 1.0, 1.0]}
    assert [w.want for w in demand(ALL, saturated=True, pressure=4.0, heat=cold)] == [2, 1]
    assert [w.want for w in demand(ALL, saturated=True, pressure=1.0, heat=cold)] == [1, 1]


def test_playbook_of_a_surge():
    proven = [(BOB, LOW), (ANN, LOW)]
    assert demand(ALL) == ()
    assert demand(ALL, saturated=True, pressure=1.0) == (Wanted(LOW, 1, ()), Wanted(HIGH, 1, ()))
    served = demand(ALL, saturated=True, pressure=2.0, proven=proven)
    assert served == (Wanted(LOW, 2, (BOB, ANN)), Wanted(HIGH, 2, ()))
    assert demand(ALL, proven=proven) == (Wanted(LOW, 0, (BOB, ANN)),)  # so that hubs see what is surplus
    assert demand(ALL) == ()


def test_the_heat_of_a_slice_is_that_of_its_experts():
    assert slice_heat(HIGH, {0: [1.0, 2.0, 3.0, 4.0, 5.0]}) == 7.0
    assert slice_heat(HIGH, {0: [1.0, 2.0, 3.0]}) == 3.0
    assert slice_heat(HIGH, {1: [1.0]}) == 0.0


heats = st.dictionaries(st.just(0), st.lists(st.floats(0, 1e6), min_size=4, max_size=4))
helds = st.sets(st.integers(0, 3)).map(lambda held: {0: frozenset(held)})
holders = st.lists(st.tuples(st.sampled_from([ANN, BOB]), st.sampled_from([LOW, HIGH])), unique=True)


@STEADY
@given(held=helds, heat=heats, pressure=st.floats(0, 100), proven=holders)
def test_while_calm_only_missing_slices_are_wanted(held, heat, pressure, proven):
    for wanted in demand(held, heat=heat, pressure=pressure, proven=proven):
        missing = any(index not in held[0] for index in range(wanted.slice.first, wanted.slice.last + 1))
        assert wanted.want == (1 if missing else 0)


@STEADY
@given(held=helds, heat=heats, pressure=st.floats(0, 100), more=st.floats(0, 100), most=st.integers(0, 6))
def test_more_pressure_never_wants_less_and_the_surge_is_bounded(held, heat, pressure, more, most):
    def wants(at: float) -> dict[SliceId, int]:
        found = demand(held, saturated=True, pressure=at, heat=heat, most=most)
        return dict.fromkeys((LOW, HIGH), 0) | {w.slice: w.want for w in found}

    less, greater = wants(pressure), wants(pressure + more)
    assert all(less[part] <= greater[part] <= 1 + most for part in (LOW, HIGH))


@STEADY
@given(proven=holders)
def test_every_proven_copy_is_told_once(proven):
    found = demand(ALL, proven=proven)
    assert sorted((peer, w.slice) for w in found for peer in w.proven) == sorted(proven)


# Over time ------------------------------------------------------------------------------------------------------


def at_full_surge() -> Demands:
    demands = Demands((LOW, HIGH), 2, DECAY_S)
    demands.observe(0.0, saturated=True, pressure=2.0, load=1.0)
    assert demands.surge == 2
    return demands


def test_a_surge_comes_at_once_and_stays_while_the_queue_is_empty_only_thanks_to_it():
    demands = at_full_surge()
    for now in range(1, 3600):
        demands.observe(float(now), saturated=False, pressure=0.5, load=0.8)
    assert demands.surge == 2
    assert demands.next_at() is None


def test_a_surge_goes_one_copy_at_a_time_when_this_machine_could_do_it_alone():
    demands = at_full_surge()
    seen = []
    for now in range(100):
        demands.observe(float(now), saturated=False, pressure=0.5, load=0.7)
        seen.append(demands.surge)
    assert seen == [2] * 30 + [1] * 30 + [0] * 40
    assert demands.next_at() is None


def test_a_light_moment_is_not_enough():
    demands = at_full_surge()
    for now in range(1000):
        demands.observe(float(now), saturated=False, pressure=0.5, load=0.8 if now % 29 == 0 else 0.1)
    assert demands.surge == 2


def test_a_surge_that_came_back_counts_from_anew():
    demands = at_full_surge()
    demands.observe(1.0, saturated=False, pressure=0.0, load=0.0)
    assert demands.next_at() == 1.0 + DECAY_S
    demands.observe(1.0 + DECAY_S, saturated=False, pressure=0.0, load=0.0)
    assert demands.surge == 1
    demands.observe(32.0, saturated=True, pressure=9.0, load=2.0)
    assert demands.surge == 2
    assert demands.next_at() is None


def test_a_surge_that_comes_back_soon_after_it_had_gone_stays_longer_each_time_up_to_a_bound():
    demands, now, stayed = at_full_surge(), 0.0, []
    for _ in range(7):
        began_at = now
        while demands.surge:
            now += 1.0
            demands.observe(now, saturated=False, pressure=0.0, load=0.5)
        stayed.append(now - began_at - 1.0)
        now += 60.0
        demands.observe(now, saturated=True, pressure=2.0, load=1.5)
    assert stayed == [2 * each for each in (30, 60, 120, 240, 480, 480, 480)]
    while demands.surge:
        now += 1.0
        demands.observe(now, saturated=False, pressure=0.0, load=0.5)
    now += DECAY_S * (SOON + DECAY_FACTOR_MAX)
    demands.observe(now, saturated=True, pressure=1.0, load=1.5)  # after a long rest all is forgotten
    demands.observe(now + 1, saturated=False, pressure=0.0, load=0.5)
    assert demands.next_at() == now + 1 + DECAY_S


def test_wants_are_the_base_and_the_surge_and_what_is_proven_in_the_order_given():
    demands = at_full_surge()
    assert demands.wants({HIGH}, ((BOB, LOW), (ANN, LOW))) == (Wanted(LOW, 2, (BOB, ANN)), Wanted(HIGH, 3, ()))
    demands.surge = 0
    assert demands.wants({HIGH}, ((BOB, LOW),)) == (Wanted(LOW, 0, (BOB,)), Wanted(HIGH, 1, ()))
    assert demands.wants((), ()) == ()


def test_what_did_not_change_is_the_same_object():
    demands = at_full_surge()
    before, after = demands.wants((), ((BOB, LOW),)), demands.wants((), ((BOB, LOW),))
    assert all(one is other for one, other in zip(before, after, strict=True))


def test_a_slice_between_cold_and_warm_stays_what_it_was():
    demands = at_full_surge()
    wants = []
    for low in (10.0, 5.5, 4.0, 2.4, 4.0, 6.0, 10.0):  # of HIGH's 10: shares of the mean 1, .71, .57, .39, .57, .75, 1
        demands.note_heat({0: [low, 0.0, 10.0, 0.0]})
        wants.append(demands.wants((), ())[0].want)
    assert wants == [2, 2, 2, 1, 1, 2, 2]


@STEADY
@given(st.lists(st.tuples(st.booleans(), st.floats(0, 8), st.floats(0, 3), st.floats(0.1, 100)), max_size=60))
def test_a_surge_is_bounded_and_falls_by_one_copy_in_so_many_seconds_at_most(steps):
    demands, now, fell_at = Demands((LOW,), 3, DECAY_S), 0.0, float("-inf")
    for saturated, pressure, load, passed_s in steps:
        now += passed_s
        before = demands.surge
        demands.observe(now, saturated=saturated, pressure=pressure, load=load)
        assert 0 <= demands.surge <= 3
        if demands.surge < before:
            assert before - demands.surge == 1
            assert now - fell_at >= DECAY_S
            fell_at = now
