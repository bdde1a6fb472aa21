from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_node.base.ids import DAG_CBOR_CODEC, ModelId, PeerId, cid_of
from kvasir_node.decide.market_offers import IdleWorkers, Strikes

MODEL, OTHER_MODEL = (ModelId(cid_of(name, DAG_CBOR_CODEC)) for name in (b"one", b"two"))
ANN, BOB = PeerId("ann"), PeerId("bob")
STEADY = settings(max_examples=200, deadline=None, derandomize=True)
peers = st.sampled_from([PeerId(f"peer {number}") for number in range(8)])


@STEADY
@given(st.lists(st.tuples(st.sampled_from(["put", "drop", "good", "trim"]), peers), max_size=60))
def test_the_good_ones_among_the_idle_are_counted_right_and_both_tables_are_bounded(story):
    idle = IdleWorkers(5)
    for at, (what, peer) in enumerate(story):
        match what:
            case "put":
                idle.put(peer, float(at))
            case "drop":
                idle.drop(peer)
            case "good":
                idle.note_good(peer)
            case "trim":
                idle.trim(at - 10.0)
        assert idle.good == sum(idle.is_good(each) for each in idle._asked_at)
        assert len(idle) <= 5
        assert len(idle._good) <= 5
        assert list(idle._asked_at.values()) == sorted(idle._asked_at.values())


def test_a_strike_makes_a_worker_wait_longer_each_time_for_that_model_alone_until_it_is_forgiven():
    strikes = Strikes(60.0, 10)
    for count, wait_s in enumerate((60.0, 120.0, 240.0)):
        strikes.add(ANN, MODEL, 1000.0 * count)
        assert strikes.must_wait(ANN, MODEL, 1000.0 * count + wait_s - 1.0)
        assert not strikes.must_wait(ANN, MODEL, 1000.0 * count + wait_s)
    assert (ANN, MODEL) in strikes
    assert not strikes.must_wait(ANN, OTHER_MODEL, 0.0)
    assert not strikes.must_wait(BOB, MODEL, 0.0)
    strikes.forgive(ANN, MODEL)
    assert (ANN, MODEL) not in strikes


def test_strikes_are_bounded_and_their_pauses_too():
    strikes = Strikes(60.0, 3)
    for number in range(10):
        strikes.add(PeerId(f"peer {number}"), MODEL, 0.0)
    assert len(strikes) == 3
    for _ in range(100):
        strikes.add(ANN, MODEL, 0.0)
    assert not strikes.must_wait(ANN, MODEL, 60.0 * 1024)
