"""The network between simulated peers: how long messages take, which are lost, who can reach whom.

It does not know what messages say. Calls travel over TCP, so a lost packet costs time, not the message; a peer that is
down, or on the other side of a partition, costs the caller its patience. Every byte and every message of a hub is
counted here.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvasir_node.base.ids import PeerId
from kvasir_node.sim.heap import Heap

CALL_OVERHEAD_BYTES = 110  # of one message: TCP/IP 40, Noise 18, Yamux 12, frame and method about 40
GOSSIP_OVERHEAD_BYTES = 430  # gossipsub's envelope 190, our signature and proof of membership 200, transport 40
MESH_COPIES = 3.0  # of a gossiped message that a node sees: half of a mesh's degree of 6, as each link carries it once
CALL_TIMEOUT_S = 5.0  # until a caller knows that nobody answers: keepalive's interval and timeout
LOSS_PENALTY_S = 0.25  # a packet sent again


@dataclass(frozen=True, slots=True)
class Link:
    """How a peer is connected. `kind` is for people."""

    kind: str
    one_way_s: float
    up_bytes_s: float
    down_bytes_s: float


@dataclass(slots=True, eq=False)
class Peer:
    """Anything with an address. `life` counts its starts: what was meant for an earlier one does not reach it."""

    id: PeerId
    link: Link
    address: str = ""
    side: int = 0  # of a partition
    is_up: bool = True
    life: int = 0
    skew_s: float = 0.0  # of its wall clock


@dataclass(slots=True)
class Traffic:
    call_bytes: float = 0.0  # of nodes: polls, offers, renewals, releases, both ways
    gossip_bytes: float = 0.0  # received by nodes, copies included
    hub_messages: dict[PeerId, Counter[int]] = field(default_factory=dict[PeerId, Counter[int]])  # by second

    def count_hub(self, hub: PeerId, now: float, messages: int) -> None:
        self.hub_messages.setdefault(hub, Counter())[int(now)] += messages

    def busiest_second(self) -> int:
        return max((max(seconds.values()) for seconds in self.hub_messages.values()), default=0)


class Network:
    def __init__(self, heap: Heap, chance: random.Random, loss_ratio: float) -> None:
        self._heap = heap
        self._chance = chance
        self._loss_ratio = loss_ratio
        self.traffic = Traffic()
        self.wall_at_start = 1_700_000_000.0

    def wall(self, peer: Peer) -> float:
        """What the peer's clock says, seconds since 1970."""
        return self.wall_at_start + self._heap.now + peer.skew_s

    def reach(self, a: Peer, b: Peer) -> bool:
        return a.is_up and b.is_up and a.side == b.side

    def delay_s(self, a: Peer, b: Peer, message_bytes: float = 0.0) -> float:
        """One way; distance, jitter of a tenth, bytes, and now and then a lost packet."""
        chance = self._chance.random
        distance_s = (a.link.one_way_s + b.link.one_way_s) * (0.95 + 0.1 * chance())
        lost_s = LOSS_PENALTY_S * (1 + chance()) if chance() < self._loss_ratio else 0.0
        return distance_s + lost_s + message_bytes / min(a.link.up_bytes_s, b.link.down_bytes_s)

    def round_trip_s(self, a: Peer, b: Peer) -> float:
        return 2 * (a.link.one_way_s + b.link.one_way_s)

    def send(self, a: Peer, b: Peer, act: Callable[..., None], *arguments: Any) -> None:
        """A notice: it arrives, or is lost when the peer is gone by then."""
        if self.reach(a, b):
            self._heap.after(self.delay_s(a, b), self._arrive, a, b, b.life, act, arguments)

    def _arrive(self, a: Peer, b: Peer, life: int, act: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if b.is_up and b.life == life and a.side == b.side:
            act(*arguments)

    def call(
        self,
        a: Peer,
        b: Peer,
        handle: Callable[[], Any],
        answered: Callable[[Any], None],
        failed: Callable[[], None],
    ) -> None:
        """`handle` runs there and gives the answer; `answered` or `failed` runs here, unless we were restarted."""
        if self.reach(a, b):
            self._heap.after(self.delay_s(a, b), self._called, a, a.life, b, b.life, handle, answered, failed)
        else:
            self._heap.after(CALL_TIMEOUT_S, self._answered, a, a.life, failed, ())

    def _called(
        self,
        a: Peer,
        a_life: int,
        b: Peer,
        b_life: int,
        handle: Callable[[], Any],
        answered: Callable[[Any], None],
        failed: Callable[[], None],
    ) -> None:
        if b.is_up and b.life == b_life and a.side == b.side:
            answer = handle()
            if a.is_up:
                self._heap.after(self.delay_s(b, a), self._answered, a, a_life, answered, (answer,))
        else:
            self._heap.after(CALL_TIMEOUT_S, self._answered, a, a_life, failed, ())

    def _answered(self, a: Peer, life: int, act: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if a.is_up and a.life == life:
            act(*arguments)
