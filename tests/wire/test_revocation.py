"""What the swarm's owner has signed about who is shut out, and what is not believed."""

from __future__ import annotations

from contextlib import suppress

import pytest

from kvasir_node.base.errors import Misbehaved, UsageError
from kvasir_node.base.ids import PeerId
from kvasir_node.wire.revocation import (
    REVOCATIONS_BYTES_MAX,
    REVOCATIONS_MAX,
    Revocation,
    make_revocation,
    read_revocations,
    write_revocations,
)
from kvasir_node.wire.swarm_keys import GUARDED_ROLES, lesser_secret, read_secret, replacing_secret

SECRET = bytes(range(32))
ROOT = read_secret(SECRET)
WORKER = read_secret(lesser_secret(SECRET, []))
PEER = PeerId("12D3KooWLShEmUMRzomUQ2kA4V8Gxc42syLYf6L18Jqy6uoVkgCd")
GOLDEN = (
    "81a4616e0761707834313244334b6f6f574c5368456d554d527a6f6d5551326b41345638477863343273794c5966364c31384a71793675"
)


def test_a_set_is_read_as_it_was_written():
    one = make_revocation(ROOT, PEER, 7, is_revoked=True)
    data = write_revocations([one])
    assert read_revocations(data) == (one,)
    assert data.hex().startswith(GOLDEN)
    assert read_revocations(write_revocations([])) == ()


def test_every_holder_of_any_ticket_can_check_it_and_only_the_whole_secret_makes_it():
    one = make_revocation(ROOT, PEER, 7, is_revoked=True)
    assert one.is_by_owner([ROOT])
    assert one.is_by_owner([WORKER])
    assert not one.is_by_owner([read_secret(replacing_secret(SECRET))])
    for roles in ([], list(GUARDED_ROLES)):
        with pytest.raises(UsageError, match="whole secret"):
            make_revocation(read_secret(lesser_secret(SECRET, roles)), PEER, 7, is_revoked=True)


def test_whatever_is_changed_in_it_is_no_longer_the_owners_word():
    one = make_revocation(ROOT, PEER, 7, is_revoked=True)
    changed = [
        Revocation(PEER, 8, True, one.signature),
        Revocation(PEER, 7, False, one.signature),
        Revocation(PeerId(PEER[:-1] + "e"), 7, True, one.signature),
        Revocation(PEER, 7, True, bytes(64)),
    ]
    assert not any(each.is_by_owner([ROOT, WORKER]) for each in changed)
    data = write_revocations([one])
    for at in range(len(data)):
        flipped = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        with suppress(Misbehaved):
            assert not any(each.is_by_owner([ROOT]) for each in read_revocations(flipped))


def test_too_many_too_much_and_the_same_twice_are_refused():
    one = make_revocation(ROOT, PEER, 7, is_revoked=True)
    with pytest.raises(Misbehaved, match="listed twice"):
        read_revocations(write_revocations([one, one]))
    with pytest.raises(Misbehaved, match=f"at most {REVOCATIONS_MAX}"):
        read_revocations(write_revocations([one] * (REVOCATIONS_MAX + 1)))
    with pytest.raises(Misbehaved, match="at most"):
        read_revocations(bytes(REVOCATIONS_BYTES_MAX + 1))
    assert len(write_revocations([one] * REVOCATIONS_MAX)) < REVOCATIONS_BYTES_MAX
