"""Who is connected: the table of live connections and the events about it.

It does not know how connections are made, nor libp2p's own bookkeeping.

Two peers may dial each other at the same moment and get two connections. Both sides prefer the same one, the one
dialled by the peer with the smaller id, for new streams; the other one is retired by that peer alone, so two sides
can never close one each. So it is, too, when a direct connection comes beside one through a relay: the direct one is
preferred, whoever dialled it.
"""

from __future__ import annotations

from dataclasses import dataclass

import trio

from kvasir_node.base.ids import PeerId
from kvasir_node.net.feed import Feed
from kvasir_node.net.muxer import YamuxConnection
from kvasir_node.net.transport import Connection, PeerConnected, PeerLost

EVENTS_MAX = 256
CONNECTIONS_PER_PEER_MAX = 4


@dataclass(frozen=True, slots=True)
class LiveConnection:
    peer: PeerId
    muxed: YamuxConnection
    address: str
    inbound: bool
    path: str
    number: int  # counts up; the newest is the largest

    @property
    def is_plain(self) -> bool:
        """Whether it is TCP from machine to machine, at an address to be dialled: no relay, no WebSocket, no hole."""
        return self.path == "direct" and not self.muxed.is_punched and self.address.rpartition("/")[0].endswith("/tcp")


class ConnectionTable:
    """At most `peers_max` peers; every change is told to those who watch."""

    def __init__(self, own_peer: PeerId, peers_max: int) -> None:
        self._own_peer = own_peer
        self._peers_max = peers_max
        self._live: dict[PeerId, list[LiveConnection]] = {}
        self._events: Feed[PeerConnected | PeerLost] = Feed(EVENTS_MAX)
        self._numbers = 0
        self._closed_bytes_in = 0
        self._closed_bytes_out = 0

    @property
    def is_full(self) -> bool:
        return len(self._live) >= self._peers_max

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._live

    def watch(self) -> trio.MemoryReceiveChannel[PeerConnected | PeerLost]:
        return self._events.subscribe()

    def add(self, peer: PeerId, muxed: YamuxConnection, address: str, path: str) -> list[LiveConnection]:
        """Takes a started connection in; returns the peer's duplicates that this side has to retire.

        The caller has seen to it that a new peer finds room.
        """
        self._numbers += 1
        live = LiveConnection(peer, muxed, address, not muxed.is_initiator, path, self._numbers)
        known = self._live.setdefault(peer, [])
        known.append(live)
        muxed.on_ended = lambda reason: self._ended(live, reason)
        if len(known) == 1:
            self._events.publish(PeerConnected(peer))
        if muxed.end_reason is not None:
            self._ended(live, muxed.end_reason)
        if self._own_peer < peer or len(known) > CONNECTIONS_PER_PEER_MAX:
            return [each for each in known if each is not self.preferred(peer)]
        return []

    def _ended(self, live: LiveConnection, reason: str) -> None:
        known = self._live.get(live.peer, [])
        if live not in known:
            return
        known.remove(live)
        self._closed_bytes_in += live.muxed.session.bytes_in
        self._closed_bytes_out += live.muxed.session.bytes_out
        if not known:
            del self._live[live.peer]
            self._events.publish(PeerLost(live.peer, reason))

    def preferred(self, peer: PeerId) -> LiveConnection | None:
        """The connection for new streams: a direct one, dialled by the smaller peer id, the newest; in this order."""
        return max(self._live.get(peer, []), key=self._preference, default=None)

    def _preference(self, live: LiveConnection) -> tuple[bool, bool, int]:
        dialled_by = live.peer if live.inbound else self._own_peer
        return live.path == "direct", dialled_by == min(live.peer, self._own_peer), live.number

    def of(self, peer: PeerId) -> tuple[LiveConnection, ...]:
        return tuple(self._live.get(peer, ()))

    def all(self) -> tuple[LiveConnection, ...]:
        return tuple(live for known in self._live.values() for live in known)

    def snapshot(self) -> tuple[Connection, ...]:
        """One line per peer: its preferred connection."""
        preferred = (self.preferred(peer) for peer in self._live)
        return tuple(
            Connection(live.peer, live.address, live.inbound, live.path, live.muxed.rtt_s)
            for live in preferred
            if live is not None
        )

    @property
    def bytes_in(self) -> int:
        return self._closed_bytes_in + sum(live.muxed.session.bytes_in for live in self.all())

    @property
    def bytes_out(self) -> int:
        return self._closed_bytes_out + sum(live.muxed.session.bytes_out for live in self.all())

    def close(self) -> None:
        self._events.close()
