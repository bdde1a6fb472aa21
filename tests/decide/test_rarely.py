from kvasir_node.decide.rarely import INTERVAL_S, Rarely


def test_it_is_time_once_in_an_interval_from_the_last_yes():
    rarely = Rarely()
    steps = (0.0, 0.1, INTERVAL_S - 0.1, INTERVAL_S, INTERVAL_S + 9.9, 2 * INTERVAL_S)
    assert [rarely.is_time(now) for now in steps] == [True, False, False, True, False, True]
