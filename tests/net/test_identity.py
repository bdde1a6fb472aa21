import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_node.base.errors import UsageError
from kvasir_node.base.ids import PeerId
from kvasir_node.net.identity import key_from_seed, load_or_create_key, peer_id_of, sign_with, verify_signature

KEY = key_from_seed(b"\5" * 32)
SIGNATURE = sign_with(KEY, b"message")


def test_a_key_is_made_once_and_for_the_owner_alone(tmp_path):
    path = tmp_path / "sub" / "node.key"
    first = peer_id_of(load_or_create_key(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert peer_id_of(load_or_create_key(path)) == first
    assert list(path.parent.iterdir()) == [path]


def test_a_key_that_others_can_read_is_refused_with_the_remedy(tmp_path):
    path = tmp_path / "node.key"
    load_or_create_key(path)
    path.chmod(0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        load_or_create_key(path)


def test_a_broken_key_file_is_not_replaced(tmp_path):
    path = tmp_path / "node.key"
    path.write_bytes(b"garbage")
    path.chmod(0o600)
    with pytest.raises(UsageError, match="not a readable node key"):
        load_or_create_key(path)
    assert path.read_bytes() == b"garbage"


def test_a_signature_is_checked_with_the_peer_id_alone():
    assert verify_signature(peer_id_of(KEY), b"message", SIGNATURE)
    assert not verify_signature(peer_id_of(KEY), b"another", SIGNATURE)
    assert not verify_signature(peer_id_of(key_from_seed(b"\6" * 32)), b"message", SIGNATURE)


@given(st.integers(0, len(SIGNATURE) - 1), st.integers(1, 255))
def test_no_changed_byte_passes(position, change):
    changed = bytearray(SIGNATURE)
    changed[position] ^= change
    assert not verify_signature(peer_id_of(KEY), b"message", bytes(changed))


@given(st.text(max_size=60), st.binary(max_size=80))
def test_junk_is_false_and_never_raises(peer, signature):
    assert not verify_signature(PeerId(peer), b"message", signature)
