import contextlib
import dataclasses

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_samples import ADDRESS, DEMAND, MODEL, PART, SAMPLES, STEADY, TABLE, any_values, flips

from kvasir_node.base.errors import Misbehaved
from kvasir_node.base.ids import DAG_CBOR_CODEC, ModelId, PeerId, SliceId, cid_of
from kvasir_node.decide.demand import Wanted
from kvasir_node.wire.codec import encode
from kvasir_node.wire.messages import (
    ADDRESSES_MAX,
    DTYPES,
    PROVEN_MAX,
    TABLE_BYTES_MAX,
    TABLE_MODELS_MAX,
    About,
    Attachment,
    DemandRecord,
    DemandTable,
    Offer,
    Poll,
    TableRow,
    read_address,
    read_poll_answer,
)

every_message = pytest.mark.parametrize("name", SAMPLES)
readers = st.sampled_from([reader for _, _, reader in SAMPLES.values()])


@every_message
def test_golden_vector(name):
    message, spelling, reader = SAMPLES[name]
    assert message.to_bytes().hex() == spelling
    assert reader(bytes.fromhex(spelling)) == message
    assert reader(memoryview(bytes.fromhex(spelling))) == message


@every_message
def test_each_flip_is_refused_or_is_another_message_in_its_one_spelling(name):
    _, spelling, reader = SAMPLES[name]
    for flipped in flips(bytes.fromhex(spelling)):
        try:
            message = reader(flipped)
        except Misbehaved:
            continue
        assert message.to_bytes() == flipped


@every_message
def test_each_cut_is_refused(name):
    _, spelling, reader = SAMPLES[name]
    data = bytes.fromhex(spelling)
    for length in range(len(data)):
        with pytest.raises(Misbehaved):
            reader(data[:length])


@every_message
def test_each_field_is_required_and_no_other_is_known(name):
    _, spelling, reader = SAMPLES[name]
    fields = cbor2.loads(bytes.fromhex(spelling))
    for field in fields:
        with pytest.raises(Misbehaved):
            reader(encode({key: value for key, value in fields.items() if key != field}))
    with pytest.raises(Misbehaved, match="unknown fields: zz"):
        reader(encode(fields | {"zz": 1}))


@STEADY
@given(readers, st.binary(max_size=200))
def test_arbitrary_bytes_are_read_or_refused(reader, data):
    with contextlib.suppress(Misbehaved):
        reader(data)


@STEADY
@given(st.data(), st.sampled_from(sorted(SAMPLES)), any_values)
def test_any_value_in_any_field_is_read_or_refused(data, name, value):
    _, spelling, reader = SAMPLES[name]
    fields = cbor2.loads(bytes.fromhex(spelling))
    field = data.draw(st.sampled_from(sorted(fields)))
    try:
        message = reader(cbor2.dumps(fields | {field: value}, canonical=True))
    except Misbehaved:
        return
    assert reader(message.to_bytes()) == message


names = st.text(st.characters(exclude_categories=("Cc", "Cs")), max_size=20)
counts = st.integers(0, 1 << 20)
peer_ids = names.map(PeerId)
slice_ids = st.builds(
    lambda layer, first, more: SliceId(layer, first, first + more),
    st.integers(0, 999_999),
    st.integers(0, 99_999),
    st.integers(0, 99_999),
)
models = st.binary(max_size=8).map(lambda data: ModelId(cid_of(data, DAG_CBOR_CODEC)))
addresses = st.lists(names.map("/".__add__), max_size=4).map(tuple)
seconds = st.floats(0, 86_400)
wants = st.lists(
    st.builds(Wanted, slice_ids, counts, st.lists(peer_ids, max_size=3, unique=True).map(tuple)),
    max_size=4,
    unique_by=lambda wanted: wanted.slice,
).map(tuple)
rows = st.lists(st.builds(TableRow, models, slice_ids, counts, counts, counts), max_size=5).map(tuple)
big = st.integers(0, 1 << 62)
demands = st.builds(
    DemandRecord,
    epoch=big,
    sequence=big,
    issued_at=st.floats(0, 1e11),
    ttl_s=seconds,
    model=models,
    model_name=names,
    dtype=st.sampled_from(DTYPES),
    slice_bytes=st.integers(0, 1 << 50),
    addresses=addresses,
    slots=counts,
    busy=counts,
    queued=counts,
    wants=wants,
)
tables = st.builds(
    DemandTable,
    epoch=big,
    sequence=big,
    issued_at=st.floats(0, 1e11),
    ttl_s=seconds,
    addresses=addresses,
    rows=rows,
)
held = st.lists(st.tuples(models, slice_ids), max_size=4).map(tuple)
offers = st.builds(Offer, names, models, st.sampled_from(DTYPES), slice_ids, peer_ids, addresses, seconds)
round_trips = st.one_of(
    st.tuples(demands, st.just(DemandRecord.from_bytes)),
    st.tuples(tables, st.just(DemandTable.from_bytes)),
    st.tuples(st.builds(Poll, st.integers(0, 1 << 50), held, held), st.just(Poll.from_bytes)),
    st.tuples(offers, st.just(read_poll_answer)),
    st.tuples(st.builds(About, names, names, st.just(("hub",)), addresses), st.just(About.from_bytes)),
)


@STEADY
@given(round_trips)
def test_round_trip(case):
    message, reader = case
    assert reader(message.to_bytes()) == message


# Bounds ---------------------------------------------------------------------------------------------------------


def test_addresses_beyond_the_bound_are_left_out():
    many = tuple(f"/ip4/192.0.2.{n}/tcp/1" for n in range(40))
    for message, reader in (
        (dataclasses.replace(DEMAND, addresses=many), DemandRecord.from_bytes),
        (dataclasses.replace(TABLE, addresses=many), DemandTable.from_bytes),
        (dataclasses.replace(SAMPLES["offer"][0], addresses=many), read_poll_answer),
        (About("host", "0.1.0", (), many), About.from_bytes),
    ):
        assert reader(message.to_bytes()).addresses == many[:ADDRESSES_MAX]


def test_long_names_and_long_lists_of_proven_peers_are_cut():
    proven = tuple(PeerId(f"peer {n}") for n in range(PROVEN_MAX + 10))
    long = dataclasses.replace(DEMAND, model_name="x" * 200, wants=(Wanted(PART, 300, proven),))
    read = DemandRecord.from_bytes(long.to_bytes())
    assert read.model_name == "x" * 128
    assert read.wants == (Wanted(PART, 300, proven[:PROVEN_MAX]),)
    assert About.from_bytes(About("x" * 200, "0.1.0", (), ()).to_bytes()).name == "x" * 128


def test_a_table_that_is_too_large_keeps_as_many_of_its_first_rows_as_fit():
    widest = tuple(TableRow(MODEL, SliceId(n, 999_998, 999_999), 1 << 20, 1 << 20, 1 << 20) for n in range(4096))
    addresses = tuple("/" + "x" * 255 for _ in range(ADDRESSES_MAX))
    data = dataclasses.replace(TABLE, rows=widest, addresses=addresses).to_bytes()
    kept = DemandTable.from_bytes(data).rows
    assert TABLE_BYTES_MAX - 64 < len(data) <= TABLE_BYTES_MAX
    assert kept == widest[: len(kept)]


def test_a_table_of_more_models_than_it_can_name_keeps_the_first():
    found = tuple(
        TableRow(ModelId(cid_of(bytes((n,)), DAG_CBOR_CODEC)), PART, 1, 0, 0) for n in range(TABLE_MODELS_MAX + 9)
    )
    table = dataclasses.replace(TABLE, rows=found)
    assert DemandTable.from_bytes(table.to_bytes()).rows == found[:TABLE_MODELS_MAX]


def test_a_row_is_never_open_by_less_than_nothing():
    assert TableRow(MODEL, PART, want=1, proven=2, leased=3).open == 0
    assert TableRow(MODEL, PART, want=6, proven=2, leased=3).open == 1


@pytest.mark.parametrize(
    ("wants", "complaint"),
    [
        ([["3:0-7", 1, []], ["3:0-7", 1, []]], "a slice is listed twice"),
        ([["3:0-7", 1, ["ann", "ann"]]], "a proven peer is listed twice"),
        ([["3:0-7", 1, ["x" * 65]]], "text of at most 64"),
        ([["3:0-7", 1, [str(n) for n in range(PROVEN_MAX + 1)]]], "at most 256 peers"),
        ([["3:0-7", -1, []]], "a count"),
        ([["3:0-7", 1 << 21, []]], "a count"),
        ([["3:7-0", 1, []]], "a slice"),
        ([["3:0-7", 1]], "a slice, its want and its proven peers"),
        ([["0:0-0", 1, []]] * 4097, "at most 4096 items"),
    ],
)
def test_demand_is_refused_when(wants, complaint):
    fields = cbor2.loads(DEMAND.to_bytes())
    with pytest.raises(Misbehaved, match=complaint):
        DemandRecord.from_bytes(encode(fields | {"wants": wants}))


def test_a_row_that_names_no_model_of_the_table_is_refused():
    fields = cbor2.loads(TABLE.to_bytes())
    with pytest.raises(Misbehaved, match="index of a model"):
        DemandTable.from_bytes(encode(fields | {"rows": [[1, "3:0-7", 1, 0, 0]]}))


@pytest.mark.parametrize("bad", [str(cid_of(b"x")).upper(), "x", "", str(MODEL)[:-1] + "r"])
def test_a_model_id_is_a_cid_in_its_one_spelling(bad):
    with pytest.raises(Misbehaved, match="a model id"):
        Attachment.from_bytes(encode({"model": bad, "dtype": "float32", "slices": []}))


@pytest.mark.parametrize("bad", ["float16", "FLOAT32", "", "float32 "])
def test_a_dtype_is_one_that_experts_are_computed_in(bad):
    with pytest.raises(Misbehaved, match="float32, bfloat16, int8"):
        Attachment.from_bytes(encode({"model": str(MODEL), "dtype": bad, "slices": []}))


@pytest.mark.parametrize("bad", ["x", "", 7, "/" + "x" * 256, "/\x1b[2J"])
def test_an_address_is_a_short_multiaddr(bad):
    with pytest.raises(Misbehaved):
        read_address(bad)
    assert read_address(ADDRESS) == ADDRESS


def test_a_name_that_would_move_the_cursor_of_a_terminal_is_refused():
    with pytest.raises(Misbehaved, match="control character"):
        About.from_bytes(About("\x1b[2Jhost", "0.1.0", (), ()).to_bytes())
