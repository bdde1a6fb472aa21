from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_node.base.ids import DAG_CBOR_CODEC, ModelId, PeerId, SliceId, cid_of
from kvasir_node.decide.told_leases import ToldLeases

MODEL = ModelId(cid_of(b"model", DAG_CBOR_CODEC))
CARL, HUB, OTHER = PeerId("carl"), PeerId("hub"), PeerId("other hub")
PATIENCE_S, REST_S = 120.0, 15.0


def key(number: int = 0):
    return (CARL, MODEL, SliceId(0, number, number))


def told_leases(keys_max: int = 100) -> ToldLeases:
    return ToldLeases(PATIENCE_S, REST_S, keys_max)


def test_what_is_told_counts_for_a_bounded_time_however_often_it_is_told():
    told = told_leases()
    for now in range(0, 120, 10):
        assert told.take(HUB, {key(): 2}, now, is_all=True) == {key(): 2}
        assert told.overdue(now) == {}
    assert told.overdue(120.0) == {HUB: {key(): 0}}
    assert told.overdue(121.0) == {}
    assert told.take(HUB, {key(): 2}, 500.0, is_all=True) == {key(): 0}


def test_another_hub_that_tells_of_the_same_slice_gains_it_no_time():
    told = told_leases()
    told.take(HUB, {key(): 1}, 0.0, is_all=False)
    assert told.take(OTHER, {key(): 1}, 100.0, is_all=False) == {key(): 1}
    told.take(HUB, {key(): 0}, 110.0, is_all=False)
    assert told.overdue(120.0) == {OTHER: {key(): 0}}
    assert told.take(PeerId("made up"), {key(): 1}, 130.0, is_all=False) == {key(): 0}


def test_after_a_rest_it_counts_again():
    told = told_leases()
    told.take(HUB, {key(): 1}, 0.0, is_all=False)
    told.overdue(120.0)
    told.take(HUB, {}, 130.0, is_all=True)  # no mention is none
    assert told.take(HUB, {key(): 1}, 144.0, is_all=False) == {key(): 0}
    told.take(HUB, {key(): 0}, 145.0, is_all=False)
    assert told.take(HUB, {key(): 1}, 160.0, is_all=False) == {key(): 1}
    assert told.overdue(279.0) == {}
    assert told.overdue(280.0) == {HUB: {key(): 0}}


def test_a_hub_that_is_gone_tells_of_nothing():
    told = told_leases()
    told.take(HUB, {key(): 1}, 0.0, is_all=False)
    told.forget(HUB, 10.0)
    assert told.overdue(200.0) == {}
    assert told.take(HUB, {key(): 1}, 200.0, is_all=False) == {key(): 1}


def test_law_7_so_many_slices_are_believed_and_no_more():
    told = told_leases(keys_max=3)
    counts = told.take(HUB, {key(number): 1 for number in range(10)}, 0.0, is_all=True)
    assert sum(counts.values()) == 3
    told.take(HUB, {}, 1.0, is_all=True)
    told.overdue(500.0)
    assert told.take(HUB, {key(20): 1}, 500.0, is_all=True) == {key(20): 1}


@settings(deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([HUB, OTHER]), st.integers(0, 2), st.integers(0, 2), st.booleans(), st.integers(0, 40)
        ),
        max_size=60,
    )
)
def test_no_slice_is_kept_from_others_for_longer_than_patience_without_a_rest(events):
    told, now = told_leases(), 0.0
    held: dict = {}  # what the market has been told, by hub and slice
    since: dict = {}
    for peer, number, count, is_all, passed_s in events:
        for _ in range(passed_s):
            now += 1.0
            for other, counts in told.overdue(now).items():
                held |= {(other, part): 0 for part in counts}
            for part in map(key, range(3)):
                if any(held.get((hub, part)) for hub in (HUB, OTHER)):
                    assert now - since.setdefault(part, now) <= PATIENCE_S
                else:
                    since.pop(part, None)
        if is_all:
            held |= {pair: 0 for pair in held if pair[0] == peer}
        held |= {(peer, part): n for part, n in told.take(peer, {key(number): count}, now, is_all=is_all).items()}
