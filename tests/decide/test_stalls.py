from kvasir_node.decide.stalls import LOOK_INTERVAL_S, REMEMBERED_MAX, OwnStalls


def looked(*looks: tuple[float, float]) -> OwnStalls:
    stalls = OwnStalls()
    for now, wall in looks:
        stalls.look(now, wall)
    return stalls


def test_looks_in_time_are_no_absence():
    stalls = looked(*[(LOOK_INTERVAL_S * step, 1e9 + LOOK_INTERVAL_S * step) for step in range(100)])
    assert stalls.longest_s(0.0) == 0.0


def test_a_look_that_comes_late_shows_how_long_nobody_looked():
    stalls = looked((0.0, 1e9), (3.25, 1e9 + 3.25), (3.5, 1e9 + 3.5))
    assert stalls.longest_s(0.0) == 3.0
    assert stalls.longest_s(3.25) == 3.0
    assert stalls.longest_s(3.26) == 0.0


def test_sleep_is_seen_by_the_clock_that_goes_on_meanwhile():
    stalls = looked((0.0, 1e9), (0.25, 1e9 + 3600.25))
    assert stalls.longest_s(0.0) == 3600.0


def test_a_wall_clock_that_is_corrected_a_little_or_put_back_is_no_sleep():
    assert looked((0.0, 1e9), (0.25, 1e9 + 4.0), (0.5, 1e9 - 3600)).longest_s(0.0) == 0.0


def test_of_several_absences_the_longest_counts_and_only_so_many_are_remembered():
    stalls = looked(*[(5.0 * step, 5.0 * step) for step in range(5)], (40.0, 40.0), (45.0, 45.0))
    assert stalls.longest_s(0.0) == 19.75
    for step in range(1000):
        stalls.look(50.0 + step, 50.0 + step)
    assert len(stalls._stalls) == REMEMBERED_MAX
