import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_node.base.errors import DataError, UsageError
from kvasir_node.base.ids import (
    DAG_CBOR_CODEC,
    RAW_CODEC,
    Cid,
    ExpertId,
    SliceId,
    cid_from_bytes,
    cid_from_digest,
    cid_of,
    cid_to_bytes,
    codec_of,
    digest_of,
    parse_cid,
    parse_slice,
)

STEADY = settings(max_examples=200, deadline=None, derandomize=True)
# Both are well known: the empty raw block, and the empty dag-cbor map.
EMPTY = "bafkreihdwdcefgh4dqkjv67uzcmw7ojee6xedzdetojuzjevtenxquvyku"
EMPTY_MAP = "bafyreigbtj4x7ip5legnfznufuopl4sg4knzc2cof6duas4b3q2fy6swua"


def test_golden_vectors():
    assert cid_of(b"") == EMPTY
    assert cid_of(b"\xa0", DAG_CBOR_CODEC) == EMPTY_MAP
    assert cid_to_bytes(Cid(EMPTY)).hex() == "01551220" + hashlib.sha256(b"").hexdigest()
    assert (codec_of(Cid(EMPTY)), codec_of(Cid(EMPTY_MAP))) == (RAW_CODEC, DAG_CBOR_CODEC)
    assert digest_of(Cid(EMPTY)) == hashlib.sha256(b"").digest()


@STEADY
@given(st.binary(max_size=64), st.sampled_from([RAW_CODEC, DAG_CBOR_CODEC]))
def test_a_cid_survives_both_its_forms(data, codec):
    cid = cid_of(data, codec)
    assert parse_cid(cid) == cid_from_bytes(cid_to_bytes(cid)) == cid
    assert cid_from_digest(digest_of(cid), codec_of(cid)) == cid


def test_each_changed_letter_is_refused_or_is_another_cid():
    for at in range(len(EMPTY)):
        for mask in range(1, 256):
            text = EMPTY[:at] + chr(ord(EMPTY[at]) ^ mask) + EMPTY[at + 1 :]
            try:
                cid = parse_cid(text)
            except DataError:
                continue
            assert cid != EMPTY
            assert cid_from_bytes(cid_to_bytes(cid)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "b",
        EMPTY[:-1],
        EMPTY + "a",
        "z" + EMPTY[1:],
        EMPTY.upper(),
        "b" + EMPTY[1:].upper(),  # the same bytes in another spelling
        EMPTY[:-1] + "v",  # the same bytes: the last letter has two bits to spare
        "bafkreıhdwdcefgh4dqkjv67uzcmw7ojee6xedzdetojuzjevtenxquvyku",  # an i without its dot
        "b" + "1" * 58,
        "é" * 59,
    ],
)
def test_a_text_that_is_not_a_cid_of_ours_in_its_one_spelling_is_refused(text):
    with pytest.raises(DataError):
        parse_cid(text)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        bytes(36),
        bytes.fromhex("01551220") + bytes(31),
        bytes.fromhex("01551220") + bytes(33),
        bytes.fromhex("02551220") + bytes(32),  # another version
        bytes.fromhex("01701220") + bytes(32),  # dag-pb
        bytes.fromhex("01551320") + bytes(32),  # sha2-512
        bytes.fromhex("01551221") + bytes(32),
    ],
)
def test_bytes_that_are_not_a_cid_of_ours_are_refused(raw):
    with pytest.raises(DataError, match="version 1, raw or dag-cbor, sha2-256"):
        cid_from_bytes(raw)


@STEADY
@given(st.text(max_size=80) | st.text("abcdefghijklmnopqrstuvwxyz234567", min_size=58, max_size=58).map("b".__add__))
def test_arbitrary_text_is_read_or_refused(text):
    try:
        assert parse_cid(text) == text
    except DataError:
        return


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("0:0-0", SliceId(0, 0, 0)),
        ("3:0-7", SliceId(3, 0, 7)),
        ("999999:999998-999999", SliceId(999999, 999998, 999999)),
    ],
)
def test_a_slice_is_read_as_it_is_written(text, part):
    assert parse_slice(text) == part
    assert str(part) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "3",
        "3:0",
        "3:7-0",
        "03:0-7",
        "3:00-7",
        "3:0-07",
        "-1:0-7",
        "3:0-7 ",
        "3:0-7\n",
        " 3:0-7",
        "3:0-1000000",
        "٣:0-7",
    ],
)
def test_what_is_not_a_slice_is_refused(text):
    with pytest.raises(UsageError, match="layer:first-last"):
        parse_slice(text)


@STEADY
@given(st.integers(0, 999_999), st.integers(0, 900), st.integers(0, 99))
def test_a_slice_holds_its_experts_and_no_others(layer, first, more):
    part = SliceId(layer, first, first + more)
    assert part.count == len(part.experts()) == more + 1
    assert all(expert in part for expert in part.experts())
    for stranger in (ExpertId(layer, first - 1), ExpertId(layer, first + more + 1), ExpertId(layer + 1, first)):
        assert stranger not in part
    assert parse_slice(str(part)) == part
