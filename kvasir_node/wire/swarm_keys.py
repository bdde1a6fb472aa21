"""What a swarm's secret is worth: the keys that are derived from it, and which roles each holder may take.

It does not know tickets, files or connections. Everything comes from one root secret by HKDF-SHA256 (RFC 5869):

- the entry key, which every ticket holds: who has it is a member, and may work and fetch;
- for each of the roles hub and coordinator an ed25519 key pair. A ticket that lets its holder take the role holds the
  private half, every other ticket the public one. So a worker can check that a hub is one, and cannot be one;
- the owner's key pair, whose private half only the whole secret gives: it says which peers are shut out (revocation).

A grant is a signature of a role's key over a peer id. It is no secret: it serves only the peer that it names, and
whoever connects proves its peer id anyway (Noise), as does whoever signs a record.

A secret is written in one of three forms: the root (32 bytes); a root that replaced another, with the swarm's name
before it, which stays; or what is left of a root without the right to some roles.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from kvasir_node.base.errors import UsageError
from kvasir_node.base.ids import PeerId

HUB, COORDINATOR, WORKER = "hub", "coordinator", "worker"
GUARDED_ROLES = (HUB, COORDINATOR)  # a worker needs no more than membership
ROOT_BYTES = 32
KEY_BYTES = 32
GRANT_BYTES = 64
SECRET_BYTES_MAX = 160
NAME_BYTES = 10
_ROOT_LATER = 1  # first byte of a root that replaced another
_LESS = 2  # first byte of a lesser secret, plus 1 with the hub's private key, plus 2 with the coordinator's
_ROOT_LATER_BYTES = 1 + NAME_BYTES + ROOT_BYTES
_LESS_BYTES = 1 + NAME_BYTES + KEY_BYTES * (2 + len(GUARDED_ROLES))


@dataclass(frozen=True, slots=True)
class SwarmKeys:
    """The keys of one secret. `private` has only the roles that its holder may take beside working; `owner` is a
    public key, and `owner_private` empty for all but the whole secret."""

    name: bytes
    entry: bytes
    public: Mapping[str, bytes]
    private: Mapping[str, bytes]
    owner: bytes
    owner_private: bytes = b""

    @property
    def is_root(self) -> bool:
        """Whether it is the whole secret."""
        return bool(self.owner_private)

    @property
    def roles(self) -> tuple[str, ...]:
        """What a holder of the secret may be."""
        return (*(role for role in GUARDED_ROLES if role in self.private), WORKER)

    def grants(self, peer: PeerId) -> dict[str, bytes]:
        """For each guarded role that the holder may take, the proof that this peer may take it."""
        return {
            role: Ed25519PrivateKey.from_private_bytes(seed).sign(_granted(self.name, role, peer))
            for role, seed in self.private.items()
        }

    def may(self, peer: PeerId, role: str, grant: bytes) -> bool:
        """Whether the grant lets this peer take the role. Costs a check of a signature."""
        if role not in self.public:
            return role == WORKER
        try:
            Ed25519PublicKey.from_public_bytes(self.public[role]).verify(grant, _granted(self.name, role, peer))
        except InvalidSignature:
            return False
        return True


def new_secret() -> bytes:
    """The root secret of a new swarm."""
    return secrets.token_bytes(ROOT_BYTES)


@lru_cache(maxsize=16)
def read_secret(secret: bytes) -> SwarmKeys:
    """The keys of a secret in any of its forms; raises UsageError, which does not show it."""
    if len(secret) == ROOT_BYTES:
        digest = hashlib.sha256(b"kvasir-node/swarm-id/1\0" + secret).digest()
        return _keys_of_root(digest[:NAME_BYTES], secret)
    if len(secret) == _ROOT_LATER_BYTES and secret[0] == _ROOT_LATER:
        return _keys_of_root(secret[1 : 1 + NAME_BYTES], secret[1 + NAME_BYTES :])
    if len(secret) == _LESS_BYTES and secret[0] in range(_LESS, _LESS + 2 ** len(GUARDED_ROLES)):
        return _keys_of_less(secret)
    raise UsageError(
        f"a swarm's secret has {ROOT_BYTES}, {_ROOT_LATER_BYTES} or {_LESS_BYTES} bytes; got {len(secret)}"
    )


def _keys_of_root(name: bytes, root: bytes) -> SwarmKeys:
    private = {role: _derived(root, role) for role in GUARDED_ROLES}
    public = {role: _public(seed) for role, seed in private.items()}
    owner = _derived(root, "owner")
    return SwarmKeys(name, _derived(root, "entry"), public, private, _public(owner), owner)


def _keys_of_less(secret: bytes) -> SwarmKeys:
    body = secret[1 + NAME_BYTES :]
    entry, owner, *keys = (body[at : at + KEY_BYTES] for at in range(0, len(body), KEY_BYTES))
    held = secret[0] - _LESS
    private = {role: key for n, (role, key) in enumerate(zip(GUARDED_ROLES, keys, strict=True)) if held & 1 << n}
    public = {role: _public(key) if role in private else key for role, key in zip(GUARDED_ROLES, keys, strict=True)}
    return SwarmKeys(secret[1 : 1 + NAME_BYTES], entry, public, private, owner)


def lesser_secret(secret: bytes, roles: Collection[str]) -> bytes:
    """What lets its holder work, and take those of `roles` that `secret` lets take; raises UsageError for others."""
    keys = read_secret(secret)
    if unknown := sorted(set(roles) - {*GUARDED_ROLES, WORKER}):
        raise UsageError(f"there is no role {unknown[0]!r}; a ticket is for {', '.join((*GUARDED_ROLES, WORKER))}")
    if missing := sorted(set(roles) - set(keys.roles)):
        raise UsageError(f"this node's own ticket does not let it be {missing[0]}, so it cannot invite one")
    held = sum(1 << n for n, role in enumerate(GUARDED_ROLES) if role in roles)
    parts = (keys.private[role] if role in roles else keys.public[role] for role in GUARDED_ROLES)
    return bytes([_LESS + held]) + keys.name + keys.entry + keys.owner + b"".join(parts)


def replacing_secret(secret: bytes) -> bytes:
    """A fresh root for the same swarm; raises UsageError where `secret` is no root."""
    keys = read_secret(secret)
    if not keys.is_root:
        raise UsageError("only a node with the swarm's whole secret can replace it: one whose ticket is for all roles")
    return bytes([_ROOT_LATER]) + keys.name + new_secret()


def swarm_id(secret: bytes) -> str:
    """A public name of the swarm, which says nothing about the secret and outlives its replacement."""
    return base64.b32encode(read_secret(secret).name).decode("ascii").lower()


def has_role(keys: Sequence[SwarmKeys], peer: PeerId, role: str, grants: Iterable[tuple[str, bytes]]) -> bool:
    """Whether a member may take a role by any of the secrets that count now."""
    found = [grant for granted, grant in grants if granted == role]
    return role == WORKER or any(each.may(peer, role, grant) for each in keys for grant in found)


def sign_as_owner(keys: SwarmKeys, message: bytes) -> bytes:
    """Raises UsageError for all but the whole secret."""
    if not keys.is_root:
        raise UsageError("only a node with the swarm's whole secret may do that: one whose ticket is for all roles")
    return Ed25519PrivateKey.from_private_bytes(keys.owner_private).sign(message)


def is_signed_by_owner(keys: SwarmKeys, message: bytes, signature: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(keys.owner).verify(signature, message)
    except InvalidSignature:
        return False
    return True


def _derived(root: bytes, purpose: str) -> bytes:
    info = b"kvasir-node/" + purpose.encode("ascii") + b"/1"
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=info).derive(root)


def _public(seed: bytes) -> bytes:
    return Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()


def _granted(name: bytes, role: str, peer: PeerId) -> bytes:
    return b"kvasir-node/grant/1\0" + name + role.encode("ascii") + b"\0" + peer.encode("ascii")
