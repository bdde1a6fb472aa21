"""Signed records: bytes, who signed them, and the proof, bound to what kind of record it is.

It does not know keys on disk (a `sign` function is passed in), nor what the body says.
A peer id of libp2p with an ed25519 key *contains* the public key (an identity multihash), so a record can be
checked without knowing its issuer. Source: libp2p specs, peer-ids/peer-ids.md, "Ed25519".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from kvasir_node.base.errors import Misbehaved, RejectReason
from kvasir_node.base.ids import PeerId
from kvasir_node.wire.codec import Fields, decode, encode

_ED25519_PREFIX = bytes.fromhex("002408011220")
_PEER_ID_CHARS_MAX = 64
_OVERHEAD_BYTES = 256
SignFunction = Callable[[bytes], bytes]


@dataclass(frozen=True, slots=True)
class SignedRecord:
    issuer: PeerId
    body: bytes


def public_key_of(peer: PeerId) -> bytes:
    """The 32 bytes of the ed25519 key inside a peer id; raises Misbehaved when there is none."""
    text = str(peer)
    try:
        raw = base58.b58decode(text) if len(text) <= _PEER_ID_CHARS_MAX else b""
    except ValueError:
        raw = b""
    # Compared with its own spelling, because base58 forgives blanks: a peer must not have several names.
    if len(raw) != 38 or not raw.startswith(_ED25519_PREFIX) or base58.b58encode(raw).decode("ascii") != text:
        raise Misbehaved(RejectReason.BAD_SIGNATURE, f"{text[:64]!r} is not a peer id with an ed25519 key")
    return raw[len(_ED25519_PREFIX) :]


def seal(kind: str, body: bytes, issuer: PeerId, sign: SignFunction) -> bytes:
    """A signed record of one kind (such as "demand"); a signature never passes as one of another kind."""
    return encode({"i": str(issuer), "b": body, "s": sign(_signed_bytes(kind, body))})


def open_record(kind: str, data: bytes | memoryview, *, body_bytes_max: int) -> SignedRecord:
    """Checks a record's signature; raises Misbehaved (bad_message, too_large, bad_signature)."""
    what = f"a {kind} record"
    fields = Fields(decode(data, max_bytes=body_bytes_max + _OVERHEAD_BYTES, what=what), what)
    issuer = PeerId(fields.text("i", _PEER_ID_CHARS_MAX))
    body = fields.binary("b", body_bytes_max)
    signature = fields.binary("s", 64)
    fields.end()
    try:
        Ed25519PublicKey.from_public_bytes(public_key_of(issuer)).verify(signature, _signed_bytes(kind, body))
    except InvalidSignature as error:
        raise Misbehaved(RejectReason.BAD_SIGNATURE, f"{what} is not signed by its issuer {issuer}") from error
    return SignedRecord(issuer, body)


def _signed_bytes(kind: str, body: bytes) -> bytes:
    return b"kvasir-node/" + kind.encode("ascii") + b"/1\0" + body
