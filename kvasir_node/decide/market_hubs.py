"""What the other hubs of a swarm have told, and which hub a slice belongs to first.

It does not know demand or leases. All hubs that know of each other come to the same order for a slice: by a hash of
both names, so that each fills about as many slices first, and none must ask another.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvasir_node.base.ids import PeerId
from kvasir_node.decide.market_books import Key


@dataclass(slots=True)
class _Hub:
    name: str
    heard_at: float
    granted_at: float = float("-inf")  # when it last told of more leases on a slice than before
    told: dict[Key, int] = field(default_factory=dict[Key, int])


class OtherHubs:
    """Unproven leases that other hubs tell of; at most `hubs_max` hubs with `keys_max` slices each."""

    def __init__(self, own_name: str, told_ttl_s: float, hubs_max: int, keys_max: int) -> None:
        self._own_name = own_name
        self._told_ttl_s = told_ttl_s
        self._hubs_max = hubs_max
        self._keys_max = keys_max
        self._hubs: dict[PeerId, _Hub] = {}

    @property
    def count(self) -> int:
        """Hubs of the swarm, as far as we know, ourselves among them."""
        return 1 + len(self._hubs)

    def is_new(self, peer: PeerId, name: str) -> bool:
        """Whether a hub was not heard of yet under that name, and there is room for it."""
        hub = self._hubs.get(peer)
        return hub.name != name if hub is not None else len(self._hubs) < self._hubs_max

    def meet(self, peer: PeerId, name: str, now: float) -> None:
        self._hubs[peer] = _Hub(name, now)

    def take(self, peer: PeerId, counts: Mapping[Key, int], now: float, *, is_all: bool) -> dict[Key, int]:
        """What changed by its news; with `is_all` what it does not mention is none."""
        hub = self._hubs.get(peer)
        if hub is None:
            return {}
        hub.heard_at = now
        changed = {key: 0 for key in hub.told if key not in counts} if is_all else {}
        changed |= {key: count for key, count in counts.items() if hub.told.get(key, 0) != count}
        room = self._keys_max - len(hub.told)
        for key in [key for key, count in changed.items() if count and key not in hub.told][max(0, room) :]:
            del changed[key]
        for key, count in changed.items():
            hub.granted_at = now if count > hub.told.get(key, 0) else hub.granted_at
            self.note(peer, key, count)
        return changed

    def note(self, peer: PeerId, key: Key, count: int) -> None:
        told = self._hubs[peer].told
        if count:
            told[key] = count
        else:
            told.pop(key, None)

    def forget(self, peer: PeerId) -> tuple[Key, ...]:
        """A hub has gone, or was restarted; the slices on which it had told of leases."""
        hub = self._hubs.pop(peer, None)
        return () if hub is None else tuple(hub.told)

    def silent(self, now: float) -> tuple[PeerId, ...]:
        """Hubs that were not heard of for too long."""
        return tuple(peer for peer, hub in self._hubs.items() if now - hub.heard_at >= self._told_ttl_s)

    def granted(self, peer: PeerId, lease_id: str) -> bool:
        """Whether a lease has the name of one that this hub grants."""
        return lease_id.startswith(f"{self._hubs[peer].name}.")

    def granted_at(self, peer: PeerId) -> float:
        """When that hub was last heard to have granted anything."""
        return self._hubs[peer].granted_at

    def first_for(self, key: Key) -> PeerId | None:
        """The hub that a slice belongs to first; None = us."""
        first, most = None, _weight(self._own_name, key)
        for peer, hub in self._hubs.items():
            weight = _weight(hub.name, key)
            if weight > most:
                first, most = peer, weight
        return first

    def comes_before_us(self, peer: PeerId, key: Key) -> bool:
        """Of two hubs that have granted too many, whether the other keeps its leases."""
        return _weight(self._hubs[peer].name, key) > _weight(self._own_name, key)


def _weight(name: str, key: Key) -> tuple[int, str]:
    return zlib.crc32(f"{name}/{key[0]}/{key[2]}".encode()), name
