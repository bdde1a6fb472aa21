"""Revocations: that a peer is shut out of the swarm, or let in again, signed with a key of the whole secret alone.

It does not know who keeps them or passes them on. Each is of one peer; of two the one with the higher sequence counts,
so that sets of them can be joined in any order and come out the same. A set is a CBOR list of {p: peer, n: sequence,
r: whether it is shut out, s: signature}.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvasir_node.base.errors import Misbehaved, RejectReason
from kvasir_node.base.ids import PeerId
from kvasir_node.wire.codec import Fields, decode, encode
from kvasir_node.wire.envelope import public_key_of
from kvasir_node.wire.readers import no_repeats, read_peer
from kvasir_node.wire.swarm_keys import SwarmKeys, is_signed_by_owner, sign_as_owner

REVOCATIONS_MAX = 256  # of one swarm; a new secret shuts out any number
REVOCATIONS_BYTES_MAX = 64 * 1024
_SEQUENCE_MAX = 1 << 62
_SIGNATURE_BYTES = 64


@dataclass(frozen=True, slots=True)
class Revocation:
    """`sequence` is of its own peer alone; ms since 1970 by the signer's clock, or more."""

    peer: PeerId
    sequence: int
    is_revoked: bool
    signature: bytes

    def is_by_owner(self, keys: Sequence[SwarmKeys]) -> bool:
        """Whether it is signed under one of these secrets. Costs a check of a signature for each."""
        signed = ((each, _signed(each.name, self.peer, self.sequence, self.is_revoked)) for each in keys)
        return any(is_signed_by_owner(each, message, self.signature) for each, message in signed)


def make_revocation(keys: SwarmKeys, peer: PeerId, sequence: int, *, is_revoked: bool) -> Revocation:
    """Raises UsageError for who has not the whole secret."""
    message = _signed(keys.name, peer, sequence, is_revoked)
    return Revocation(peer, sequence, is_revoked, sign_as_owner(keys, message))


def write_revocations(revocations: Iterable[Revocation]) -> bytes:
    rows = (
        {"p": str(each.peer), "n": each.sequence, "r": each.is_revoked, "s": each.signature} for each in revocations
    )
    return encode(list(rows))


def read_revocations(data: bytes | memoryview) -> tuple[Revocation, ...]:
    """Their form alone; raises Misbehaved."""
    value = {"all": decode(data, max_bytes=REVOCATIONS_BYTES_MAX, what="a set of revocations")}
    found = Fields(value, "revocations").items("all", REVOCATIONS_MAX, _read)
    no_repeats("revoked peer", [each.peer for each in found])
    return found


def _read(value: Any) -> Revocation:
    fields = Fields(value, "revocation")
    peer = read_peer(fields.text("p", 64))
    public_key_of(peer)
    sequence, is_revoked = fields.integer("n", 0, _SEQUENCE_MAX), fields.boolean("r")
    signature = fields.binary("s", _SIGNATURE_BYTES)
    fields.end()
    if len(signature) != _SIGNATURE_BYTES:
        raise Misbehaved(RejectReason.BAD_SIGNATURE, f"a signature of {len(signature)} bytes")
    return Revocation(peer, sequence, is_revoked, signature)


def _signed(name: bytes, peer: PeerId, sequence: int, is_revoked: bool) -> bytes:
    return (
        b"kvasir-node/revocation/1\0" + name + sequence.to_bytes(8, "big") + bytes([is_revoked]) + peer.encode("ascii")
    )
