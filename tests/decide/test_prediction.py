import pytest
from planner_cases import M_LIKE, NAMES, costs, like, scene

from kvasir_node.base.ids import SliceId
from kvasir_node.decide.costs import OwnCosts, WorkerCosts
from kvasir_node.decide.prediction import CALL_BYTES, CAUTION, PAIR_BYTES, cycle_s, expected_shares, predict

ANN, BOB = NAMES[:2]
OWN = OwnCosts(trunk_s=1.0, trunk_row_s=0.1, layer_s=0.01, expert_s=0.2, pair_s=0.03, call_s=0.004, borrow_s=5.0)
WORKER = WorkerCosts(rtt_s=0.5, call_s=0.05, expert_s=0.1, pair_s=0.02, sent_byte_s=1e-5, received_byte_s=2e-5)


def test_alone_one_row_activates_the_experts_it_chose():
    found = predict(scene(3, 8, 2, 0), costs(OWN), 1, 1, {})
    assert found.token_s == pytest.approx(1.0 + 0.1 + 3 * (0.01 + 2 * 0.2 + 2 * 0.03))
    assert found.tokens_per_s == pytest.approx(1 / found.token_s)
    assert found.bytes_s == 0.0


def test_many_rows_read_each_weight_once():
    found = predict(scene(1, 4, 2, 0), costs(OWN), 1000, 1, {})
    assert found.token_s == pytest.approx(1.0 + 100.0 + 0.01 + 4 * 0.2 + 2000 * 0.03)


def test_a_layer_takes_as_long_as_the_longest_of_its_parts():
    """Two rows, two of four uniform experts each; ann has half of the experts: by hand."""
    found = predict(scene(1, 4, 2, 1, row_bytes=1000), costs(OWN, WORKER), 2, 1, {0: (None, None, ANN, ANN)})
    activated, pairs, rows = 2 * (1 - 0.5**2), 2.0, 2 * (1 - 0.5**2)
    sent, received = CALL_BYTES / 2 + 1000 * rows + PAIR_BYTES * pairs, CALL_BYTES / 2 + 1000 * rows
    call_s = 0.5 + sent * 1e-5 + received * 2e-5 + 0.05 + 0.1 * activated + 0.02 * pairs
    assert call_s > 0.01 + 0.2 * activated + 0.03 * pairs
    assert found.token_s == pytest.approx(1.2 + 0.004 + call_s)
    assert found.bytes_s == pytest.approx((sent + received) / found.token_s)


def test_doubt_makes_a_worker_slower_and_its_link_longer_each_for_itself():
    doubted = WorkerCosts(0.5, 0.05, 0.1, 0.02, 1e-5, 2e-5, doubt=0.4, link_doubt=0.2)
    here = WorkerCosts(0.0, 0.05, 0.1, 0.02, 0.0, 0.0)
    routes = {0: (ANN,) * 4}
    sure_s, unsure_s, computing_s = (
        predict(scene(1, 4, 2, 1), costs(OWN, each), 2, 1, routes).token_s - 1.204 for each in (WORKER, doubted, here)
    )
    travel_s = sure_s - computing_s
    assert travel_s > 0.5
    assert unsure_s == pytest.approx((1 + CAUTION * 0.4) * computing_s + (1 + CAUTION * 0.2) * travel_s)


def test_what_a_peer_is_not_proven_for_is_computed_here():
    s = scene(1, 4, 2, 1, proven=[(ANN, SliceId(0, 0, 1))])
    alone = predict(s, costs(OWN, WORKER), 2, 1, {})
    assert predict(s, costs(OWN, WORKER), 2, 1, {0: (BOB, None, ANN, BOB)}) == alone
    assert predict(s, costs(OWN), 2, 1, {0: (ANN, ANN, None, None)}) == alone


def test_what_is_not_in_memory_is_read_when_it_is_wanted():
    s = scene(1, 4, 2, 0, missing=(3,))
    more_s = predict(s, costs(OWN), 2, 1, {}).token_s - predict(scene(1, 4, 2, 0), costs(OWN), 2, 1, {}).token_s
    assert more_s == pytest.approx(5.0 * (1 - 0.5**2))


def test_lanes_overlap_but_never_perfectly():
    assert cycle_s(1, 1.0, 3.0, 2.0) == 3.0
    for lanes, here_s, path_s, busy_s in ((2, 1.0, 3.0, 0.1), (4, 1.0, 3.0, 2.0), (3, 1.0, 3.0, 0.5)):
        longest_s = max(lanes * here_s, path_s, lanes * busy_s)
        assert longest_s < cycle_s(lanes, here_s, path_s, busy_s) < 3**0.25 * longest_s * (1 + 1e-9)


def test_two_lanes_read_weights_twice():
    """Near worker, half of each layer: the second lane costs more than it hides (docs/log.md says the same)."""
    s, near = scene(12, 64, 8, 1), costs(M_LIKE, like(M_LIKE))
    half = dict.fromkeys(range(12), (None, ANN) * 32)
    assert predict(s, near, 16, 2, half).tokens_per_s < predict(s, near, 16, 1, half).tokens_per_s


def test_shares_are_shares_and_nobody_weighs_nothing():
    assert expected_shares(4, ()) == expected_shares(4, [0.0] * 4) == [0.25] * 4
    found = expected_shares(4, [3.0, 1.0, 0.0, 0.0])
    assert sum(found) == pytest.approx(1.0)
    assert found[0] > found[1] > found[2] == found[3] > 0.0
