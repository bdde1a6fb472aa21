from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_node.decide.gossip_pace import SAVED_S, GossipPace

STEADY = settings(max_examples=100, deadline=None, derandomize=True)


def pace(bytes_s: float = 100.0) -> GossipPace:
    made = GossipPace(interval_min_s=1.0, refresh_s=30.0, bytes_s=bytes_s)
    made.told(0.0, 0.0, 0)
    return made


def due(made: GossipPace, now: float, open_copies: int = 0, polls_anyway: float = 0.0, changed: bool = False) -> bool:
    return made.is_due(now, open_copies=open_copies, polls_anyway=polls_anyway, changed=changed)


def test_a_hub_that_begins_tells_its_table():
    assert due(GossipPace(1.0, 30.0, 100.0), 0.0)


def test_a_table_that_says_nothing_new_is_repeated_in_time():
    made = pace()
    assert not due(made, 29.9)
    assert due(made, 30.0)


def test_what_changed_goes_out_soon_while_the_budget_is_more_than_half_full():
    made = pace()
    assert not due(made, 0.9, changed=True)
    assert due(made, 1.0, changed=True)
    made.told(1.0, 0.6 * 100.0 * SAVED_S, 0)
    assert not due(made, 2.0, changed=True)
    assert due(made, 32.0, changed=True)  # a refresh


def test_demand_that_appears_grows_or_is_met_is_told_at_once_even_on_credit():
    made = pace()
    made.told(0.0, 1.5 * 100.0 * SAVED_S, 0)
    assert not due(made, 31.0)
    assert due(made, 31.0, open_copies=10)
    made.told(31.0, 0.0, 10)
    assert not due(made, 32.0, open_copies=20)
    assert due(made, 32.0, open_copies=21)
    assert not due(made, 32.0, open_copies=1)
    assert due(made, 32.0, open_copies=0)
    made.told(32.0, 1e9, 0)
    assert not due(made, 40.0, open_copies=10)  # credit has an end


def test_what_those_who_poll_anyway_will_find_is_no_news():
    made = pace()
    made.told(0.0, 0.6 * 100.0 * SAVED_S, 0)
    assert not due(made, 5.0, open_copies=10, polls_anyway=30.0)
    assert due(made, 5.0, open_copies=10, polls_anyway=29.0)


@STEADY
@given(st.lists(st.tuples(st.integers(0, 100), st.floats(1.0, 5000.0)), min_size=1, max_size=300))
def test_over_any_time_the_budget_is_kept(steps):
    made, sent, largest = pace(), 0.0, 0.0
    for second, (open_copies, table_bytes) in enumerate(steps):
        if due(made, float(second), open_copies, changed=True):
            made.told(float(second), table_bytes, open_copies)
            sent, largest = sent + table_bytes, max(largest, table_bytes)
    assert sent <= 100.0 * (len(steps) + 2 * SAVED_S) + largest
