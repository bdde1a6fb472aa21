import math
import tracemalloc

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_samples import STEADY, any_values, plain_values

from kvasir_node.base.errors import Misbehaved, RejectReason
from kvasir_node.wire.codec import ITEMS_MAX, Fields, decode, encode
from kvasir_node.wire.plain_cbor import DEPTH_MAX, check_plain


def read(data: bytes, max_bytes: int = 1 << 20):
    return decode(data, max_bytes=max_bytes, what="a thing")


@pytest.mark.parametrize(
    ("value", "spelling"),
    [
        ({"b": 1, "a": [True, None]}, "a2616182f5f6616201"),  # keys sorted
        ({"aa": 1, "b": 2}, "a261620262616101"),  # by length first
        (1.5, "f93e00"),  # the shortest float that holds it
        (0.1, "fb3fb999999999999a"),
        ([0, 23, 24, 255, 256, -1, 1 << 63], "8700171818" + "18ff" + "190100" + "20" + "1b8000000000000000"),
        (b"\x00\xff", "4200ff"),
        ("é", "62c3a9"),
    ],
)
def test_golden_vectors(value, spelling):
    assert encode(value).hex() == spelling
    assert read(bytes.fromhex(spelling)) == value


@pytest.mark.parametrize(
    ("spelling", "complaint"),
    [
        ("", "ends inside a value"),
        ("81", "1 items where 0 bytes"),
        ("1901", "ends inside a value"),
        ("fa3f", "ends inside a value"),
        ("0101", "1 bytes after the value"),
        ("1801", "canonical"),  # a longer spelling of 1
        ("fa3fc00000", "canonical"),  # 1.5 in four bytes
        ("a2616201616101", "canonical"),  # keys out of order
        ("a2616101616102", "canonical"),  # a key twice
        ("9f01ff", "indefinite"),
        ("7f6161ff", "indefinite"),
        ("1c", "reserved"),
        ("a10101", "key that is not text"),
        ("a1800101", "key that is not text"),
        ("f97e00", "NaN"),
        ("fb7ff8000000000000", "NaN"),
        ("f7", "undefined"),
        ("f8ff", "simple"),
        ("ff", "simple"),
        ("c101", "tag"),
        ("c249010000000000000000", "tag"),  # a whole number of more than 64 bits
        ("61ff", "text"),
        ("63eda080", "text"),  # half a surrogate pair
        ("9bffffffffffffffff", "items where"),
        ("bb7fffffffffffffff", "items where"),
        ("5b7fffffffffffffff", "bytes where"),
        ("7affffffff", "bytes where"),
    ],
)
def test_what_is_not_plain_and_canonical_is_refused(spelling, complaint):
    with pytest.raises(Misbehaved, match=complaint) as refused:
        read(bytes.fromhex(spelling))
    assert refused.value.reason is RejectReason.BAD_MESSAGE


def test_containers_nest_to_the_bound_and_no_deeper():
    assert read(b"\x81" * DEPTH_MAX + b"\x01") is not None
    assert read((b"\xa1\x61a") * DEPTH_MAX + b"\x01") is not None
    for deep in (b"\x81" * (DEPTH_MAX + 1) + b"\x01", b"\x81" * 1_000_000, b"\xa1\x61a" * 300_000):
        with pytest.raises(Misbehaved, match="nested deeper"):
            read(deep, 1 << 21)


def test_too_many_bytes_are_not_even_looked_at():
    with pytest.raises(Misbehaved) as refused:
        read(bytes(11), 10)
    assert refused.value.reason is RejectReason.TOO_LARGE


def test_many_items_are_read_as_the_bound_in_bytes_allows_and_no_more():
    assert len(read(encode([1] * (ITEMS_MAX - 1)), 100_000)) == ITEMS_MAX - 1
    with pytest.raises(Misbehaved, match=f"more than {ITEMS_MAX} items"):
        read(encode([{}] * ITEMS_MAX), 100_000)
    assert len(read(encode([1] * 100_000))) == 100_000
    with pytest.raises(Misbehaved, match="more than 131072 items"):
        read(encode([{}] * 1_000_000), 1 << 20)


def shared_references(width: int, levels: int) -> bytes:
    """Lists of references to the list before: few bytes, width ** levels items."""
    head = b"\xd8\x1c" + bytes((0x98, width))
    lists = [head + (b"\xd8\x1d" + cbor2.dumps(level)) * width for level in range(levels)]
    return bytes((0x81 + levels,)) + b"\xd8\x1c\x80" + b"".join(lists)


@pytest.mark.parametrize(
    "bomb",
    [
        shared_references(100, 6),
        b"\xd8\x23" + cbor2.dumps("(" + "a?" * 100_000 + "){1000}"),
        b"\xc5\x82\x1a\x3b\x9a\xca\x00\x03",  # 3 × 2 ** 1e9
        b"\x5a\xff\xff\xff\xff" * 1000,
        b"\x9a\x7f\xff\xff\xff",
    ],
    ids=["shared references", "regular expression", "big float", "long bytes", "long list"],
)
def test_a_bomb_is_refused_before_anything_is_built(bomb):
    tracemalloc.start()
    try:
        with pytest.raises(Misbehaved):
            read(bomb)
        assert tracemalloc.get_traced_memory()[1] < 100_000 + 2 * len(bomb)
    finally:
        tracemalloc.stop()


def depth(value) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth, inner), default=0)


@STEADY
@given(plain_values)
def test_a_plain_value_is_read_as_it_was_written(value):
    if depth(value) <= DEPTH_MAX:
        read_back = read(encode(value))
        assert read_back == value
        assert encode(read_back) == encode(value)


@STEADY
@given(st.binary(max_size=64))
def test_arbitrary_bytes_are_read_or_refused(data):
    try:
        value = read(data)
    except Misbehaved:
        return
    assert encode(value) == data


@STEADY
@given(any_values)
def test_arbitrary_cbor_is_read_or_refused(value):
    data = cbor2.dumps(value)
    try:
        read_back = read(data)
    except Misbehaved:
        return
    assert encode(read_back) == data


@STEADY
@given(st.binary(max_size=64))
def test_what_is_plain_is_one_whole_value_for_the_decoder_too(data):
    try:
        check_plain(data, 1000)
    except ValueError:
        return
    refusals = []
    try:
        cbor2.loads(data)
    except cbor2.CBORDecodeError as error:
        refusals.append(str(error))
    assert all("text string" in refusal for refusal in refusals)  # UTF-8 is all that is left to the decoder


# Fields ---------------------------------------------------------------------------------------------------------


def fields(**values: object) -> Fields:
    return Fields(values, "thing")


@pytest.mark.parametrize(
    ("take", "good", "bad"),
    [
        (lambda f: f.integer("x", 1, 9), [1, 9], [0, 10, 1.0, True, "1", None]),
        (lambda f: f.number("x", 0, 9), [0, 9, 4.5], [-0.1, 9.1, math.inf, -math.inf, True, "1", 1 << 63]),
        (lambda f: f.text("x", 3), ["", "abc", "é💡x"], ["abcd", b"a", 1, "a\n", "\x1b[2J", "\x7f", "\x9b"]),
        (lambda f: f.binary("x", 3), [b"", b"abc"], [b"abcd", "a", 1]),
        (lambda f: f.boolean("x"), [True, False], [0, 1, None]),
        (lambda f: f.items("x", 2, lambda item: item), [[], [1, 2]], [[1, 2, 3], {}, "ab", None]),
        (lambda f: f.mapping("x"), [{}], [[], None]),
    ],
)
def test_a_field_is_of_its_kind_and_within_its_bounds(take, good, bad):
    for value in good:
        take(fields(x=value))
    for value in bad:
        with pytest.raises(Misbehaved, match=r"thing\.x must be"):
            take(fields(x=value))
    with pytest.raises(Misbehaved, match=r"thing\.x is missing"):
        take(fields())


def test_a_field_that_nobody_takes_is_refused_by_name():
    left = fields(x=1, y=2)
    left.integer("x", 0, 9)
    assert left.has("y")
    with pytest.raises(Misbehaved, match="unknown fields: y"):
        left.end()


def test_only_a_map_has_fields():
    with pytest.raises(Misbehaved, match="thing must be a map; got list"):
        Fields([], "thing")


def test_a_message_about_a_wrong_field_is_short():
    with pytest.raises(Misbehaved) as refused:
        fields(x="x" * 100_000).integer("x", 0, 1)
    assert len(str(refused.value)) < 150
