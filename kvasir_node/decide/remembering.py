"""Which members a node remembers beyond its own life, and which of them it tries while it has no hub.

It does not know files, connections or what members do. Whoever was met last is kept; when the table is full, the range
of addresses with the most entries gives up the one met longest ago, so that one machine with many identities cannot
push out all others, and hubs give way to others only beyond half of the places. A remembered member need not be a hub:
gossip goes through any member, and tells where the hubs are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from kvasir_node.base.ids import PeerId
from kvasir_node.decide.patience import Patience
from kvasir_node.decide.reach import host_of
from kvasir_node.decide.trial_caps import address_range

MEMBERS_MAX = 64
HUBS_MAX = MEMBERS_MAX // 2  # beyond these it is a hub that gives up its place
ADDRESSES_MAX = 8  # of one member, the best first
TRIES_MAX = 4  # under way at once
GUIDES_MAX = 4  # members connected without any hub; more would lead nowhere else
PAUSE_S = 2.0  # after a failed attempt; doubles ...
PAUSE_MAX_S = 120.0  # ... up to this
HEADSTART_S = 2.0  # without a hub, before anyone is tried: the ticket's addresses and the local network come first


@dataclass(frozen=True, slots=True)
class KnownMember:
    """Where a member was reached, or said it can be; the address that a connection was made at comes first."""

    addresses: tuple[str, ...]
    is_hub: bool


def best_addresses(peer: PeerId, dialled: str, seen_from: str, told: Sequence[str]) -> tuple[str, ...]:
    """Where to try a member again. `dialled`: the address at which we reached it, or empty; `seen_from`: the one that
    it came from, whose port means nothing but whose IP does; `told`: what it says. Each ends in its id."""
    end = f"/p2p/{peer}"
    own = [address for address in told if address.endswith(end)]
    host = host_of(seen_from)
    near = [address for address in own if host and host_of(address) == host]
    first = [f"{dialled.removesuffix(end)}{end}"] if host_of(dialled) else []
    return tuple(dict.fromkeys([*first, *near, *own]))[:ADDRESSES_MAX]


@dataclass(slots=True)
class Remembering:
    """See the module. `members` are in the order in which they were met, the newest last."""

    members: dict[PeerId, KnownMember] = field(default_factory=dict[PeerId, KnownMember])
    _patience: dict[PeerId, Patience] = field(default_factory=dict[PeerId, Patience])
    _alone_since: float | None = None

    def recall(self, members: Mapping[PeerId, KnownMember]) -> None:
        """What an earlier life knew; whoever was met in this one stays newer."""
        met = self.members
        self.members = {peer: known for peer, known in members.items() if peer not in met} | met
        self._trim()

    def met(self, peer: PeerId, known: KnownMember) -> bool:
        """Whether there is anything new to be kept."""
        if not known.addresses:
            return False
        is_news = self.members.pop(peer, None) != known
        self.members[peer] = known
        self._trim()
        return is_news

    def _trim(self) -> None:
        while len(self.members) > MEMBERS_MAX:
            gives_hub = sum(known.is_hub for known in self.members.values()) > HUBS_MAX
            ranges = {
                peer: address_range(known.addresses[0])
                for peer, known in self.members.items()
                if known.is_hub is gives_hub
            }
            ((crowded, _),) = Counter(ranges.values()).most_common(1)
            oldest = next(peer for peer, where in ranges.items() if where == crowded)
            del self.members[oldest]
            self._patience.pop(oldest, None)

    def due(self, connected: Collection[PeerId], *, has_hub: bool, now: float) -> list[PeerId]:
        """Whom to dial now: hubs first, the newest first; each counts as under way until `joined` or `failed`."""
        if has_hub:
            self._alone_since = None
            return []
        self._alone_since = now if self._alone_since is None else self._alone_since
        trying = sum(each.is_under_way for each in self._patience.values())
        room = min(TRIES_MAX, GUIDES_MAX - len(connected)) - trying
        if now - self._alone_since < HEADSTART_S or room <= 0:
            return []
        newest_first = list(self.members)[::-1]
        order = sorted(newest_first, key=lambda peer: not self.members[peer].is_hub)
        able = [peer for peer in order if peer not in connected and self._patience_of(peer).allows(now)][:room]
        for peer in able:
            self._patience_of(peer).is_under_way = True
        return able

    def joined(self, peer: PeerId) -> None:
        self._patience.pop(peer, None)

    def failed(self, peer: PeerId, now: float) -> None:
        if peer in self.members:
            self._patience_of(peer).failed(now, PAUSE_MAX_S)

    def _patience_of(self, peer: PeerId) -> Patience:
        return self._patience.setdefault(peer, Patience(PAUSE_S))
