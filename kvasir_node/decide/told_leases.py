"""How long a hub believes others that a slice is taken care of.

It does not know leases or demand: it stands before `Market.hear` and strikes out what is not believed. A hub that tells
of leases keeps all others from granting; one that lies, or whose workers get nowhere, must not do so for ever. So what
is told of a slice, by whichever hubs, counts for a bounded time, and then not before all of them have been silent about
it for a while. By slice and not by hub, as a member may make up hubs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvasir_node.base.ids import PeerId
from kvasir_node.decide.market_books import Key


@dataclass(slots=True)
class _Told:
    since: float
    peers: set[PeerId] = field(default_factory=set[PeerId])  # that tell of a lease now
    silent_since: float = 0.0  # when the last of them ceased
    is_over: bool = False  # told for too long


class ToldLeases:
    """`patience_s` = how long a slice may be leased elsewhere without proof; `rest_s` = how long nobody may tell of it
    until it counts again. At most `keys_max` slices are believed at once."""

    def __init__(self, patience_s: float, rest_s: float, keys_max: int) -> None:
        self._patience_s = patience_s
        self._rest_s = rest_s
        self._keys_max = keys_max
        self._told: dict[Key, _Told] = {}  # told longest ago first

    def take(self, peer: PeerId, counts: Mapping[Key, int], now: float, *, is_all: bool) -> dict[Key, int]:
        """What of a hub's news is to be believed; with `is_all` what it does not mention is none."""
        if is_all:
            for key in [key for key, told in self._told.items() if peer in told.peers and key not in counts]:
                self._cease(key, peer, now)
        return {key: self._believed(peer, key, count, now) for key, count in counts.items()}

    def _believed(self, peer: PeerId, key: Key, count: int, now: float) -> int:
        if not count:
            self._cease(key, peer, now)
            return 0
        told = self._told.get(key)
        if told is not None and not told.peers and now - told.silent_since >= self._rest_s:
            del self._told[key]
            told = None
        if told is None:
            if len(self._told) >= self._keys_max:
                return 0
            told = self._told[key] = _Told(now)
        told.peers.add(peer)
        return 0 if told.is_over or now - told.since >= self._patience_s else count

    def _cease(self, key: Key, peer: PeerId, now: float) -> None:
        told = self._told.get(key)
        if told is not None and peer in told.peers:
            told.peers.remove(peer)
            told.silent_since = now

    def overdue(self, now: float) -> dict[PeerId, dict[Key, int]]:
        """What is no longer believed since the last call: by hub, slices with a count of 0. Forgets what is at rest."""
        found: dict[PeerId, dict[Key, int]] = {}
        for key, told in list(self._told.items()):
            if now - told.since < self._patience_s:
                break
            if not told.peers and now - told.silent_since >= self._rest_s:
                del self._told[key]
            elif not told.is_over:
                told.is_over = True
                for peer in told.peers:
                    found.setdefault(peer, {})[key] = 0
        return found

    def forget(self, peer: PeerId, now: float) -> None:
        """A hub has gone, or was restarted."""
        for key in [key for key, told in self._told.items() if peer in told.peers]:
            self._cease(key, peer, now)
