"""The page's cipher, held to OpenSSL's, and in part to the one in JavaScript that it stands for: bytes and refusals."""

from __future__ import annotations

import random
import struct

import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from phone_parts import PartError

CIPHERS = ("wasm", "js")
NOISE_BYTES_MAX = 65_519  # of one message's text
P = 2**130 - 5

# RFC 8439, 2.8.2
KEY = bytes(range(0x80, 0xA0))
NONCE = bytes.fromhex("070000004041424344454647")
EXTRA = bytes.fromhex("50515253c0c1c2c3c4c5c6c7")
TEXT = (
    b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the future, "
    b"sunscreen would be it."
)
SEALED = bytes.fromhex(
    "d31a8d34648e60db7b86afbc53ef7ec2a4aded51296e08fea9e2b5a736ee62d63dbea45e8ca9671282fafb69da92728b1a71de0a9e06"
    "0b2905d6a5b67ecd3b3692ddbd7f2d778b8c9803aee328091b58fab324e4fad675945585808b4831d7bc3ff4def08e4b7a9de576d265"
    "86cec64b6116" + "1ae10b594f09e26a7e902ecbd0600691"
)
# RFC 8439, A.5
OTHER_KEY = bytes.fromhex("1c9240a5eb55d38af333888604f6b5f0473917c1402b80099dca5cbc207075c0")
OTHER_NONCE, OTHER_EXTRA = bytes.fromhex("000000000102030405060708"), bytes.fromhex("f33388860000000000004e91")
OTHER_TAG = bytes.fromhex("eead9d67890cbb22392336fea1851f38")
OTHER_TEXT = (
    b"Internet-Drafts are draft documents valid for a maximum of six months and may be updated, replaced, or "
    b"obsoleted by other documents at any time. It is inappropriate to use Internet-Drafts as reference material or to "
    b"cite them other than as /\xe2\x80\x9cwork in progress./\xe2\x80\x9d"
)


def made(seed, text_bytes, extra_bytes):
    """A key, a nonce, extra data and a text."""
    chance = random.Random(seed)
    return tuple(chance.randbytes(size) for size in (32, 12, extra_bytes, text_bytes))


def seal(parts, key, nonce, extra, text, cuts=(), cipher="wasm"):
    return bytes.fromhex(parts("seal", cipher, key.hex(), nonce.hex(), extra.hex(), text.hex(), cuts))


def unseal(parts, key, nonce, extra, sealed, cuts=(), cipher="wasm"):
    return bytes.fromhex(parts("unseal", cipher, key.hex(), nonce.hex(), extra.hex(), sealed.hex(), cuts))


@pytest.mark.parametrize("cipher", CIPHERS)
def test_the_examples_of_the_rfc(parts, cipher):
    assert seal(parts, KEY, NONCE, EXTRA, TEXT, cipher=cipher) == SEALED
    assert unseal(parts, KEY, NONCE, EXTRA, SEALED, cipher=cipher) == TEXT
    sealed = seal(parts, OTHER_KEY, OTHER_NONCE, OTHER_EXTRA, OTHER_TEXT, cipher=cipher)
    assert sealed[-16:] == OTHER_TAG
    assert unseal(parts, OTHER_KEY, OTHER_NONCE, OTHER_EXTRA, sealed, cipher=cipher) == OTHER_TEXT


@pytest.mark.parametrize("sizes", [range(300), (511, 512, 513, 4096, 16_932, NOISE_BYTES_MAX)], ids=["short", "long"])
def test_texts_of_any_length_are_sealed_as_openssl_seals_them(parts, sizes):
    for size in sizes:
        key, nonce, extra, text = made(size, size, (0, 32, size % 65)[size % 3])
        sealed = ChaCha20Poly1305(key).encrypt(nonce, text, extra)
        assert seal(parts, key, nonce, extra, text) == sealed, size
        assert unseal(parts, key, nonce, extra, sealed) == text, size


def test_a_message_in_pieces_is_the_same_message(parts):
    key, nonce, extra, text = made(1, 1000, 32)
    sealed = ChaCha20Poly1305(key).encrypt(nonce, text, extra)
    for cuts in ([0], [1], [12, 26], [64, 128, 999], [500, 500]):
        assert seal(parts, key, nonce, extra, text, cuts) == sealed
        assert unseal(parts, key, nonce, extra, sealed, cuts) == text


def one_time_key(key, nonce):
    stream = Cipher(algorithms.ChaCha20(key, struct.pack("<I", 0) + nonce), None).encryptor().update(bytes(32))
    clamped = int.from_bytes(stream[:16], "little") & 0x0FFFFFFC0FFFFFFC0FFFFFFC0FFFFFFF
    return clamped, int.from_bytes(stream[16:], "little")


def sealed_with_sum(total, seed):
    """A message whose sum in Poly1305, before the key's second half, is `total`: key, nonce and its sealed text.

    Its last block is found by dividing; three of four keys want one that 128 bits do not hold.
    """
    chance = random.Random(seed)
    while True:
        key, nonce, first = chance.randbytes(32), chance.randbytes(12), chance.randbytes(16)
        r, s = one_time_key(key, nonce)
        back = pow(r, -1, P)
        lengths = 2**128 + (32 << 64)
        before = (total * back - lengths) * back - (int.from_bytes(first, "little") + 2**128) * r
        last = before % P - 2**128
        if 0 <= last < 2**128:
            tag = (total + s) % 2**128
            return key, nonce, first + last.to_bytes(16, "little") + tag.to_bytes(16, "little")


@pytest.mark.parametrize(
    "total", [0, 1, 4, 5, 2**26, 2**128 - 1, 2**128, 2**129, P - 2**104, P - 2**26, P - 1], ids=lambda total: hex(total)
)
def test_sums_at_the_ends_of_the_range(parts, total):
    """The first three, as all below 5, have two spellings below 2^130, and chance never meets one."""
    for seed in range(8):
        key, nonce, sealed = sealed_with_sum(total, seed)
        text = ChaCha20Poly1305(key).decrypt(nonce, sealed, None)
        assert unseal(parts, key, nonce, b"", sealed) == text
        assert seal(parts, key, nonce, b"", text) == sealed


def test_a_message_that_was_changed_is_refused_and_written_nowhere(parts):
    key, nonce, extra, text = made(2, 290, 32)
    sealed = ChaCha20Poly1305(key).encrypt(nonce, text, extra)
    right = {"key": key, "nonce": nonce, "extra": extra, "sealed": sealed}
    told = parts("unsealInPlace", "wasm", *(each.hex() for each in right.values()))
    assert told == [True, (text + sealed[-16:]).hex()]
    for name, value in right.items():
        for bit in range(0, 8 * len(value), 7):
            changed = bytearray(value)
            changed[bit // 8] ^= 1 << bit % 8
            given = {**right, name: bytes(changed)}
            told = parts("unsealInPlace", "wasm", *(each.hex() for each in given.values()))
            assert told == [False, given["sealed"].hex()], (name, bit)


@pytest.mark.parametrize("cipher", CIPHERS)
def test_a_message_of_another_length_is_refused(parts, cipher):
    key, nonce, extra, text = made(3, 40, 32)
    sealed = ChaCha20Poly1305(key).encrypt(nonce, text, extra)
    for wrong in (b"", sealed[:15], sealed[:16], sealed[:-1], sealed[1:], sealed + b"\0"):
        with pytest.raises(PartError):
            unseal(parts, key, nonce, extra, wrong, cipher=cipher)
    for wrong in (b"", extra[:-1], extra + b"\0"):
        with pytest.raises(PartError):
            unseal(parts, key, nonce, wrong, sealed, cipher=cipher)


def test_what_has_no_room_is_not_begun(parts):
    key, nonce, extra, text = made(4, 65_537, 65)
    for given in ((b"", text), (extra, b"")):
        with pytest.raises(PartError) as caught:
            seal(parts, key, nonce, *given)
        assert caught.value.name == "RangeError"


def test_a_key_or_nonce_of_another_length_is_refused(parts):
    key, nonce, extra, text = made(5, 40, 32)
    for given in ((key[:-1], nonce), (key + b"\0", nonce), (key, nonce[:-1]), (key, nonce + b"\0")):
        with pytest.raises(PartError) as caught:
            seal(parts, *given, extra, text)
        assert caught.value.name == "RangeError"


def test_the_cipher_in_javascript_serves_where_webassembly_does_not(parts):
    unknown = b"\0asm\2\0\0\0"  # a version that does not exist, as SIMD does not for older browsers
    assert parts("whichCipher", "", False) == "wasm"
    assert parts("whichCipher", "", True) == "js"
    assert parts("whichCipher", unknown.hex(), False) == "js"


def test_a_session_with_js_libp2ps_own_noise(parts):
    sizes = [1, 16_932, 65_519, 65_520, 200_000]
    sent = b"".join(bytes([size % 256]) * size for size in sizes).hex()
    for piece in (1 << 20, 60_000, 1001):
        told = parts("noise", sizes, piece, None)
        assert told["received"] == [sent, sent]
        assert told["ended"] is None


def test_no_error_is_made_for_each_message_that_comes(parts):
    """js-libp2p's own end makes one."""
    told = parts("noise", [100] * 5, 1 << 20, None)
    assert told["errors"] == 5


def test_a_session_ends_at_a_message_that_was_changed(parts):
    first, second = 2 + 100 + 16, 2 + 1000 + 16
    for at in (
        first + 2,
        first + second - 17,
        first + second - 1,
    ):  # of the second: its first and last byte, and the tag
        told = parts("noise", [100, 1000, 10], 1 << 20, at)
        assert told["received"][0] == (bytes([100]) * 100).hex()
        assert "tag" in told["ended"]
