"""Which codes let a page become a guest, once, for a while, and whose wrong ones are no longer listened to.

It does not know the codes, only their digests; nor what a pass is. Codes are long (wire/guest_pass), so nobody guesses
one: the limits on wrong ones bound what trying costs this node, and show its owner that somebody tries.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kvasir_node.base.ids import PeerId
from kvasir_node.decide.trial_caps import address_range

CODES_MAX = 64  # remembered, used and expired ones included; the oldest goes
WRONG_MAX = 5  # wrong codes of one range of addresses, or of one peer, within the window
WRONG_WINDOW_S = 60.0
ORIGINS_MAX = 1024  # ranges and peers with wrong codes that are remembered; the oldest goes


class PairRefusal(StrEnum):
    """Why a page gets no pass."""

    WRONG = "wrong"  # no such code, or one of long ago
    EXPIRED = "expired"
    USED = "used"  # by another peer
    TOO_MANY = "too_many"  # wrong codes came from there; wait a minute
    UNWANTED = "unwanted"  # the node's settings refuse this peer


@dataclass(slots=True)
class _Code:
    expires_at: float
    used_by: PeerId | None = None


@dataclass(slots=True)
class _Wrong:
    since: float
    count: int = 0


@dataclass(slots=True)
class PairingCodes:
    """`digest` stands for a code; `address` is the multiaddr that the page connects from. Times are of one clock."""

    _codes: dict[bytes, _Code] = field(default_factory=dict[bytes, _Code])  # the oldest first
    _wrong: dict[str, _Wrong] = field(default_factory=dict[str, _Wrong])  # whose window began longest ago first

    def issue(self, digest: bytes, expires_at: float) -> None:
        """A code is good from now on, for the first peer that brings it."""
        self._codes[digest] = _Code(expires_at)
        if len(self._codes) > CODES_MAX:
            del self._codes[next(iter(self._codes))]

    def open_count(self, now: float) -> int:
        """Codes that somebody may still use."""
        return sum(code.used_by is None and now < code.expires_at for code in self._codes.values())

    def redeem(self, digest: bytes, peer: PeerId, address: str, now: float) -> PairRefusal | None:
        """None = the peer may have a pass. The peer that used a code may come again until it expires: an answer may
        have been lost on its way, and the pass is the same."""
        if self.is_too_many(peer, address, now):
            return PairRefusal.TOO_MANY
        code = self._codes.get(digest)
        if code is None:
            self.note_wrong(peer, address, now)
            return PairRefusal.WRONG
        if code.used_by not in (None, peer):
            return PairRefusal.USED
        if now >= code.expires_at:
            return PairRefusal.EXPIRED
        code.used_by = peer
        return None

    def is_too_many(self, peer: PeerId, address: str, now: float) -> bool:
        found = (self._wrong.get(origin) for origin in (peer, address_range(address)))
        return any(w is not None and now - w.since < WRONG_WINDOW_S and w.count >= WRONG_MAX for w in found)

    def note_wrong(self, peer: PeerId, address: str, now: float) -> None:
        """What came was no code, or none of ours."""
        for origin in (peer, address_range(address)):
            wrong = self._wrong.get(origin)
            if wrong is None or now - wrong.since >= WRONG_WINDOW_S:
                self._wrong.pop(origin, None)
                wrong = self._wrong[origin] = _Wrong(now)
                if len(self._wrong) > ORIGINS_MAX:
                    del self._wrong[next(iter(self._wrong))]
            wrong.count += 1
