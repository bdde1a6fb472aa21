"""An iterative look-up in a Kademlia DHT: whom to ask next on the way to those whose ids are closest to a key.

It does not know messages, connections or what is looked for. Source: libp2p/specs kad-dht/README.md, "Peer routing":
ids are compared by XOR of sha2-256. What nodes answer is not believed to be much, or to end: all is bounded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

CLOSEST_MAX = 20  # k: nodes that keep a record
ASKED_MAX = 40  # of one look-up
TOLD_MAX = 20  # nodes that are believed of one answer
PARALLEL = 3  # alpha
KNOWN_MAX = 256


@dataclass(frozen=True, slots=True)
class DhtNode:
    """`id` is the binary peer id."""

    id: bytes
    addresses: tuple[str, ...]


@dataclass(slots=True)
class Lookup:
    """See the module. Nodes count as asked from `next` on, until `answered` or `failed`."""

    key: bytes
    _known: dict[bytes, DhtNode] = field(default_factory=dict[bytes, DhtNode])
    _asked: set[bytes] = field(default_factory=set[bytes])
    _waiting: set[bytes] = field(default_factory=set[bytes])
    _answered: set[bytes] = field(default_factory=set[bytes])
    _failed: set[bytes] = field(default_factory=set[bytes])

    def begin(self, nodes: Iterable[DhtNode]) -> None:
        """With those that are known already."""
        for node in nodes:
            self._known.setdefault(node.id, node)

    def next(self) -> list[DhtNode]:
        """Whom to ask now; none when what was asked has to answer first, or all is done."""
        room = min(PARALLEL - len(self._waiting), ASKED_MAX - len(self._asked))
        due = [node for node in self._closest() if node.id not in self._asked][: max(0, room)]
        self._asked.update(node.id for node in due)
        self._waiting.update(node.id for node in due)
        return due

    def answered(self, node: DhtNode, closer: Iterable[DhtNode]) -> None:
        self._waiting.discard(node.id)
        self._answered.add(node.id)
        for _, told in zip(range(TOLD_MAX), closer, strict=False):
            if told.addresses and told.id not in self._known and len(self._known) < KNOWN_MAX:
                self._known[told.id] = told

    def failed(self, node: DhtNode) -> None:
        self._waiting.discard(node.id)
        self._failed.add(node.id)

    @property
    def is_done(self) -> bool:
        """Nobody is being asked, and nobody closer is left to ask."""
        return not self._waiting and (
            len(self._asked) >= ASKED_MAX or all(node.id in self._asked for node in self._closest())
        )

    def found(self) -> list[DhtNode]:
        """Those that answered, the closest first."""
        return [node for node in self._closest() if node.id in self._answered]

    def _closest(self) -> list[DhtNode]:
        return closest(self.key, {node.id: node for node in self._known.values() if node.id not in self._failed})


def closest(key: bytes, nodes: Mapping[bytes, DhtNode]) -> list[DhtNode]:
    """At most CLOSEST_MAX nodes, by their distance to the key."""
    target = _place(key)
    return sorted(nodes.values(), key=lambda node: _place(node.id) ^ target)[:CLOSEST_MAX]


def _place(name: bytes) -> int:
    return int.from_bytes(hashlib.sha256(name).digest(), "big")
