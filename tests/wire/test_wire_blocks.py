import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_node.base.errors import Misbehaved, RejectReason
from kvasir_node.base.ids import DAG_CBOR_CODEC, cid_of, cid_to_bytes
from kvasir_node.wire.blocks import (
    BLOCK_BYTES_MAX,
    WANT_BYTES_MAX,
    WANTED_MAX,
    Absent,
    decode_answer,
    decode_want,
    encode_answer,
    encode_want,
)

A, B = cid_of(b"a"), cid_of(b"b", DAG_CBOR_CODEC)
GOLDEN_WANT = bytes.fromhex(
    "825824"
    "01551220ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"
    "5824"
    "017112203e23e8160039594a33894f6564e1b1348bbd7a0088d42c4acb73eeaed59c009d"
)
GOLDEN_ANSWER = bytes.fromhex("03000000616263fffffffffeffffff")


def joined(parts) -> bytes:
    return b"".join(parts)


def test_golden_vectors():
    assert encode_want((A, B)) == GOLDEN_WANT
    assert decode_want(GOLDEN_WANT) == (A, B)
    assert joined(encode_answer([b"abc", Absent.MISSING, Absent.NOT_NOW])) == GOLDEN_ANSWER
    assert decode_answer(GOLDEN_ANSWER, 3) == (b"abc", Absent.MISSING, Absent.NOT_NOW)


def test_the_longest_want_list_fits_its_bound():
    cids = tuple(cid_of(bytes((n,))) for n in range(WANTED_MAX))
    assert len(encode_want(cids)) == WANT_BYTES_MAX
    assert decode_want(encode_want(cids)) == cids


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", RejectReason.BAD_MESSAGE),
        (b"\x80", RejectReason.TOO_MANY),
        (cbor2.dumps({"a": 1}), RejectReason.BAD_MESSAGE),
        (cbor2.dumps([1]), RejectReason.BAD_MESSAGE),
        (cbor2.dumps([b"short"]), RejectReason.BAD_MESSAGE),
        (cbor2.dumps([cid_to_bytes(A)] * 2), RejectReason.BAD_MESSAGE),
        (cbor2.dumps([b""] * 17), RejectReason.TOO_MANY),
        (cbor2.dumps([str(A)]), RejectReason.BAD_MESSAGE),
        (bytes.fromhex("9f5824") + cid_to_bytes(A) + b"\xff", RejectReason.BAD_MESSAGE),
        (b"\x9b" + b"\xff" * 8, RejectReason.BAD_MESSAGE),  # a list of 2^64 - 1
        (b"\x5b\x7f" + b"\xff" * 7, RejectReason.BAD_MESSAGE),
        (bytes(WANT_BYTES_MAX + 1), RejectReason.TOO_LARGE),
    ],
)
def test_hostile_want_lists_are_refused_by_reason(body, reason):
    with pytest.raises(Misbehaved) as caught:
        decode_want(body)
    assert caught.value.reason is reason


@pytest.mark.parametrize(
    ("body", "count"),
    [
        (b"", 1),
        (b"\x01\x00\x00", 1),
        (b"\x02\x00\x00\x00a", 1),  # promises more than is there
        (b"\xfd\xff\xff\xff", 1),  # 4 GiB
        ((BLOCK_BYTES_MAX + 1).to_bytes(4, "little") + bytes(BLOCK_BYTES_MAX + 1), 1),
        (GOLDEN_ANSWER, 2),
        (GOLDEN_ANSWER, 4),
        (GOLDEN_ANSWER + b"\0", 3),
    ],
)
def test_hostile_answers_are_refused(body, count):
    with pytest.raises(Misbehaved) as caught:
        decode_answer(body, count)
    assert caught.value.reason is RejectReason.BAD_MESSAGE


@given(st.lists(st.one_of(st.binary(max_size=40), st.sampled_from(Absent)), max_size=WANTED_MAX))
def test_any_answer_comes_back_as_it_was(blocks):
    assert list(decode_answer(joined(encode_answer(blocks)), len(blocks))) == blocks


@pytest.mark.parametrize("at", range(len(GOLDEN_WANT)))
def test_a_flipped_byte_of_a_want_list_is_refused_or_another_list(at):
    body = bytearray(GOLDEN_WANT)
    body[at] ^= 0x55
    try:
        cids = decode_want(body)
    except Misbehaved:
        return
    assert cids != (A, B)
    assert encode_want(cids) == body


@pytest.mark.parametrize("at", range(len(GOLDEN_ANSWER)))
def test_a_flipped_byte_of_an_answer_is_refused_or_another_answer(at):
    body = bytearray(GOLDEN_ANSWER)
    body[at] ^= 0x01
    try:
        answer = decode_answer(body, 3)
    except Misbehaved:
        return
    assert joined(encode_answer(answer)) == body


@given(st.binary(max_size=200), st.integers(1, WANTED_MAX))
def test_random_bytes_end_in_misbehaved_or_a_value(body, count):
    for read in (decode_want, lambda data: decode_answer(data, count)):
        try:
            read(body)
        except Misbehaved:
            continue
