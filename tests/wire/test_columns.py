import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_samples import STEADY, flips

from kvasir_node.base.errors import Misbehaved
from kvasir_node.base.ids import SliceId
from kvasir_node.wire.columns import INDEX_MAX, read_numbers, read_slices, spell_numbers, spell_slices

numbers = st.lists(st.integers(0, 3) | st.integers(0, 1 << 20), max_size=40)
slices = st.sets(
    st.builds(lambda layer, first, more: SliceId(layer, first, first + more), *[st.integers(0, 6)] * 3)
    | st.builds(
        lambda layer, first, more: SliceId(layer, first, first + more),
        st.integers(0, INDEX_MAX),
        *[st.integers(0, 9)] * 2,
    ),
    max_size=40,
).map(sorted)


@pytest.mark.parametrize(
    ("values", "spelling"),
    [([], ""), ([7], "0e"), ([7, 7], "0f00"), ([1] * 1000, "03e607"), ([0, 0, 300], "0100d804")],
)
def test_golden_numbers(values, spelling):
    assert spell_numbers(values).hex() == spelling
    assert read_numbers(bytes.fromhex(spelling), len(values), 300) == values


@pytest.mark.parametrize(
    ("values", "spelling"),
    [
        ([], ""),
        (["0:0-0"], "00000000"),
        (["3:0-7", "3:8-15", "3:16-23", "4:0-7"], "0300070201000700"),
        (["3:0-7", "3:8-15", "3:16-20", "3:30-30"], "0300070100080400000e0000"),
        (["3:0-7", "3:0-15", "3:8-15"], "030007000000 0f00 00080700".replace(" ", "")),
    ],
)
def test_golden_slices(values, spelling):
    parts = tuple(SliceId(*map(int, text.replace("-", ":").split(":"))) for text in values)
    assert spell_slices(parts).hex() == spelling
    assert read_slices(bytes.fromhex(spelling), len(values)) == parts


@STEADY
@given(numbers)
def test_numbers_come_back(values):
    assert read_numbers(spell_numbers(values), len(values), 1 << 20) == values


@STEADY
@given(slices)
def test_slices_come_back(parts):
    assert list(read_slices(spell_slices(parts), 40)) == parts


@STEADY
@given(numbers, slices)
def test_each_flip_is_refused_or_is_another_list_in_its_one_spelling(values, parts):
    for flipped in flips(spell_numbers(values)):
        with contextlib.suppress(Misbehaved):
            assert spell_numbers(read_numbers(flipped, len(values), 1 << 20)) == flipped
    for flipped in flips(spell_slices(parts)):
        with contextlib.suppress(Misbehaved):
            assert spell_slices(read_slices(flipped, 40)) == flipped


@STEADY
@given(st.binary(max_size=60), st.integers(0, 50))
def test_arbitrary_bytes_are_read_or_refused(data, count):
    with contextlib.suppress(Misbehaved):
        assert len(read_numbers(data, count, 1 << 20)) == count
    with contextlib.suppress(Misbehaved):
        assert len(read_slices(data, count)) <= count


@pytest.mark.parametrize(
    "data",
    [
        "03ffffffff7f",  # one number 34 thousand million times
        "038080808000",  # a longer spelling of one run
        "0202",  # two runs of one number
        "0e80",  # a varint that does not end
        "ffffffffff01",  # a varint of six bytes
        "0e0e0e",  # more than were promised
    ],
)
def test_numbers_that_are_refused(data):
    with pytest.raises(Misbehaved):
        read_numbers(bytes.fromhex(data), 2, 1 << 20)


@pytest.mark.parametrize(
    "data",
    [
        "000000ffffffff7f",  # one slice 34 thousand million times
        "00000763",  # a hundred
        "0000070000080700",  # two runs that are one
        "0000070000000700",  # the same slice twice
        "0008070000",  # half a run
        "ffffff7f000000",  # a layer that nobody can write
    ],
)
def test_slices_that_are_refused(data):
    with pytest.raises(Misbehaved):
        read_slices(bytes.fromhex(data), 99)
