"""What a swarm's secret is worth, and what is left of it in a ticket for some roles."""

from __future__ import annotations

import itertools

import pytest

from kvasir_node.base.errors import Misbehaved, UsageError
from kvasir_node.base.ids import PeerId
from kvasir_node.wire.hub_proof import PROOFS_MAX, HubProofs, with_hub_proof
from kvasir_node.wire.swarm_keys import (
    COORDINATOR,
    GUARDED_ROLES,
    HUB,
    WORKER,
    has_role,
    lesser_secret,
    new_secret,
    read_secret,
    replacing_secret,
    swarm_id,
)

SECRET = bytes(range(32))
ANN, BOB = PeerId("12D3KooWann"), PeerId("12D3KooWbob")
SUBSETS = [roles for n in range(3) for roles in itertools.combinations(GUARDED_ROLES, n)]


def test_golden_vector():
    keys = read_secret(SECRET)
    assert swarm_id(SECRET) == "udly4nsxpvjthqlc"
    assert keys.entry.hex() == "0aca115d60413c99c7aeb529e89ad78aca42ed800ad77d9a73882ddd6c643921"
    assert {role: key.hex() for role, key in keys.public.items()} == {
        "hub": "ceb8968cbb63425497f121f3513d94be4ab1802c49d5d78c3c3d3e17459cf8c8",
        "coordinator": "2eff8f71f0c40cfbacba6df7028d60f3862a68896f9fca5233bec5ce944ad376",
    }
    assert keys.roles == (HUB, COORDINATOR, WORKER)


@pytest.mark.parametrize("roles", SUBSETS)
def test_a_lesser_secret_lets_take_its_roles_and_no_others(roles):
    root, lesser = read_secret(SECRET), read_secret(lesser_secret(SECRET, roles))
    assert lesser.roles == (*roles, WORKER)
    assert (lesser.entry, lesser.public, lesser.name) == (root.entry, root.public, root.name)
    assert not lesser.is_root
    assert lesser.owner == root.owner
    for role in GUARDED_ROLES:
        grants = list(lesser.grants(ANN).items())
        assert has_role([root], ANN, role, grants) is (role in roles)
        assert not has_role([root], BOB, role, grants)
        assert has_role([lesser], ANN, role, list(root.grants(ANN).items()))
    assert has_role([root], ANN, WORKER, [])
    assert not has_role([root], ANN, "emperor", [("emperor", bytes(64))])


@pytest.mark.parametrize("roles", SUBSETS)
def test_a_lesser_secret_holds_no_private_key_that_it_should_not(roles):
    secret, root = lesser_secret(SECRET, roles), read_secret(SECRET)
    assert SECRET not in secret
    assert root.owner_private not in secret
    for role in GUARDED_ROLES:
        assert (root.private[role] in secret) is (role in roles)


def test_who_has_less_cannot_make_more_of_it():
    hub = lesser_secret(SECRET, [HUB])
    assert lesser_secret(hub, [HUB]) == hub
    assert read_secret(lesser_secret(hub, [WORKER])).roles == (WORKER,)
    with pytest.raises(UsageError, match="does not let it be coordinator"):
        lesser_secret(hub, [COORDINATOR])
    with pytest.raises(UsageError, match="no role 'emperor'"):
        lesser_secret(hub, ["emperor"])
    with pytest.raises(UsageError, match="whole secret"):
        replacing_secret(lesser_secret(SECRET, GUARDED_ROLES))


def test_a_replacing_secret_is_of_the_same_swarm_and_has_nothing_else_of_the_old_one():
    first = replacing_secret(SECRET)
    second = replacing_secret(first)
    assert len({SECRET, first, second, new_secret()}) == 4
    assert swarm_id(SECRET) == swarm_id(first) == swarm_id(second) == swarm_id(lesser_secret(second, [HUB]))
    old, new = read_secret(SECRET), read_secret(first)
    assert new.is_root
    assert old.entry != new.entry
    grants = list(new.grants(ANN).items())
    assert not has_role([old], ANN, HUB, grants)
    assert has_role([old, new], ANN, HUB, grants)
    assert has_role([old, new], ANN, HUB, [*grants, *old.grants(ANN).items()])


@pytest.mark.parametrize("secret", [b"", bytes(31), bytes(33), bytes(43), b"\x06" + bytes(138), bytes(140)])
def test_what_is_no_secret_is_refused_and_not_shown(secret):
    with pytest.raises(UsageError, match=rf"has 32, 43 or 139 bytes; got {len(secret)}"):
        read_secret(secret)


@pytest.mark.parametrize("grant", [b"", bytes(64), bytes(63), bytes(1000)])
def test_a_wrong_grant_is_no_error(grant):
    assert not read_secret(SECRET).may(ANN, HUB, grant)


def test_a_hubs_proof_is_of_this_hub_and_this_record():
    keys = read_secret(SECRET)
    proofs = HubProofs(lambda: (keys,))
    data = with_hub_proof((keys,), ANN, b"record")
    assert proofs.open(ANN, data) == b"record"
    assert proofs.open(ANN, memoryview(data)) == b"record"
    with pytest.raises(Misbehaved, match="without proof"):
        proofs.open(BOB, data)
    for at in range(len(data)):
        with pytest.raises(Misbehaved):
            proofs.open(ANN, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(Misbehaved):
            proofs.open(ANN, data[:at])
    assert proofs.open(ANN, with_hub_proof((keys,) * 3, ANN, b"record")) == b"record"
    with pytest.raises(Misbehaved):
        proofs.open(ANN, bytes([PROOFS_MAX + 1]) + 3 * data[1:97] + b"record")


def test_what_hub_proofs_remember_is_bounded():
    keys = read_secret(SECRET)
    proofs = HubProofs(lambda: (keys,))
    for number in range(300):
        hub = PeerId(f"hub {number}")
        assert proofs.open(hub, with_hub_proof((keys,), hub, b"record")) == b"record"
    assert len(proofs._known) == 256
