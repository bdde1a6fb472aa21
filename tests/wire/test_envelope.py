import base58
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st
from wire_samples import STEADY, any_values, flips

from kvasir_node.base.errors import Misbehaved, RejectReason
from kvasir_node.base.ids import PeerId
from kvasir_node.wire.codec import encode
from kvasir_node.wire.envelope import SignedRecord, open_record, public_key_of, seal

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
ISSUER = PeerId("12D3KooWA4Xop1JaT3MHxwYMkCepYsv4iPVopMXwCz5iHYdBfeSB")
SEALED = bytes.fromhex(
    "a3616244626f647961697834313244334b6f6f574134586f70314a6154334d487877594d6b436570597376346950566f"
    "704d5877437a35694859644266655342617358409b2bc12851f9fbc266f7e31efc809d60c9cf820f1b1df0e6f239a278"
    "79a8eaadedfe04402d302f29cd3bb5a0f7461d7d572b9c024efe9986480a7077cb95ac0e"
)


def opened(data: bytes, kind: str = "demand", body_bytes_max: int = 100) -> SignedRecord:
    return open_record(kind, data, body_bytes_max=body_bytes_max)


def test_golden_vector():
    assert seal("demand", b"body", ISSUER, KEY.sign) == SEALED
    assert opened(SEALED) == SignedRecord(ISSUER, b"body")


def test_each_flip_is_refused():
    for flipped in flips(SEALED):
        with pytest.raises(Misbehaved):
            opened(flipped)


def test_each_cut_is_refused():
    for length in range(len(SEALED)):
        with pytest.raises(Misbehaved):
            opened(SEALED[:length])


def test_a_record_never_passes_as_one_of_another_kind():
    with pytest.raises(Misbehaved) as refused:
        opened(SEALED, kind="table")
    assert refused.value.reason is RejectReason.BAD_SIGNATURE
    assert "not signed by its issuer" in str(refused.value)


def test_a_record_that_another_signed_is_refused():
    other = Ed25519PrivateKey.from_private_bytes(bytes(32))
    with pytest.raises(Misbehaved) as refused:
        opened(seal("demand", b"body", ISSUER, other.sign))
    assert refused.value.reason is RejectReason.BAD_SIGNATURE


@pytest.mark.parametrize("extra", [0, 1])
def test_a_body_is_at_most_as_large_as_asked(extra):
    sealed = seal("demand", bytes(100 + extra), ISSUER, KEY.sign)
    if not extra:
        assert opened(sealed).body == bytes(100)
        return
    with pytest.raises(Misbehaved):
        opened(sealed)


def test_the_largest_body_fits_whatever_the_envelope_adds():
    for size in (10, 300, 70_000):
        assert opened(seal("demand", bytes(size), ISSUER, KEY.sign), body_bytes_max=size).body == bytes(size)


def test_a_record_beyond_the_bound_is_not_even_decoded():
    with pytest.raises(Misbehaved) as refused:
        opened(bytes(1000))
    assert refused.value.reason is RejectReason.TOO_LARGE


@STEADY
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(data):
    with pytest.raises(Misbehaved):
        opened(data)


@STEADY
@given(st.fixed_dictionaries({"i": any_values, "b": any_values, "s": any_values}))
def test_arbitrary_fields_are_refused(fields):
    with pytest.raises(Misbehaved):
        opened(encode(fields))


def test_the_public_key_is_inside_the_peer_id():
    assert public_key_of(ISSUER) == KEY.public_key().public_bytes_raw()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "0OIl",
        "é" * 52,
        "1" * 64,
        "1" * 10_000,
        base58.b58encode(bytes.fromhex("00240801122f") + bytes(32)).decode(),  # not ed25519
        base58.b58encode(bytes.fromhex("002408011220") + bytes(31)).decode(),
        base58.b58encode(bytes.fromhex("1220") + bytes(32)).decode(),  # a hash: the key is not inside
    ],
)
def test_a_text_without_a_key_inside_is_no_peer_id(text):
    with pytest.raises(Misbehaved, match="not a peer id with an ed25519 key"):
        public_key_of(PeerId(text))


@pytest.mark.parametrize("blanks", [" ", "\n", "\t ", "\x0b"])
def test_a_peer_has_one_name_only(blanks):
    with pytest.raises(Misbehaved):
        public_key_of(PeerId(ISSUER + blanks))
    with pytest.raises(Misbehaved):
        opened(seal("demand", b"body", PeerId(ISSUER + blanks), KEY.sign))
