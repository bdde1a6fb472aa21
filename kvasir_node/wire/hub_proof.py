"""What a hub puts before a table that it gossips, where strangers can write: that a member sent it, and a hub.

It does not know tables. For each secret that counts (two while an old one is still valid) a MAC by the entry key over
all that follows the proofs, and the grant of the hub. The MAC is cheap and comes first: a stranger's bytes are dropped
before a signature is looked at. It proves nothing about who: the grant names the hub, and the record inside is signed.

u8 count, then count × (MAC (32), grant (64)), then the record.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence

from kvasir_node.base.errors import Misbehaved, RejectReason
from kvasir_node.base.ids import PeerId
from kvasir_node.wire.swarm_keys import GRANT_BYTES, HUB, SwarmKeys

PROOFS_MAX = 2
_MAC_BYTES = 32
_PROOF_BYTES = _MAC_BYTES + GRANT_BYTES
_GRANTS_KNOWN_MAX = 256


def with_hub_proof(keys: Sequence[SwarmKeys], hub: PeerId, record: bytes) -> bytes:
    """Proofs by those of the secrets that let their holder be a hub; by none, if none does."""
    used = [each for each in keys if HUB in each.private][:PROOFS_MAX]
    proofs = (_mac(each, hub, record) + each.grants(hub)[HUB] for each in used)
    return bytes([len(used)]) + b"".join(proofs) + record


class HubProofs:
    """Opens what `with_hub_proof` made. `keys` tells the secrets that count now."""

    def __init__(self, keys: Callable[[], Sequence[SwarmKeys]]) -> None:
        self._keys = keys
        self._known: dict[tuple[PeerId, bytes, bytes], None] = {}  # grants that were checked: a check is dear

    def open(self, hub: PeerId, data: bytes | memoryview) -> bytes:
        """The record; raises Misbehaved (not_a_member) when there is no proof that this hub is one of ours."""
        raw = bytes(data)
        count = raw[0] if raw else 0
        record = raw[1 + count * _PROOF_BYTES :]
        if 1 <= count <= PROOFS_MAX:
            for at in range(1, 1 + count * _PROOF_BYTES, _PROOF_BYTES):
                mac, grant = raw[at : at + _MAC_BYTES], raw[at + _MAC_BYTES : at + _PROOF_BYTES]
                if any(self._holds(each, hub, mac, grant, record) for each in self._keys()):
                    return record
        raise Misbehaved(RejectReason.NOT_A_MEMBER, f"a record of {hub} comes without proof that a hub of ours sent it")

    def _holds(self, keys: SwarmKeys, hub: PeerId, mac: bytes, grant: bytes, record: bytes) -> bool:
        if not hmac.compare_digest(mac, _mac(keys, hub, record)):
            return False
        known = (hub, keys.entry, grant)
        if known not in self._known:
            if not keys.may(hub, HUB, grant):
                return False
            self._known[known] = None
            if len(self._known) > _GRANTS_KNOWN_MAX:
                del self._known[next(iter(self._known))]
        return True


def _mac(keys: SwarmKeys, hub: PeerId, record: bytes) -> bytes:
    return hmac.digest(keys.entry, b"kvasir-node/table/1\0" + hub.encode("ascii") + b"\0" + record, "sha256")
