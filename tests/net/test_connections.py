from types import SimpleNamespace

import trio

from kvasir_node.base.ids import PeerId
from kvasir_node.net.connections import CONNECTIONS_PER_PEER_MAX, ConnectionTable
from kvasir_node.net.transport import PeerConnected, PeerLost

SMALL, LARGE = PeerId("A"), PeerId("B")


class FakeMuxed:
    """What the table needs of a muxer."""

    def __init__(self, *, dialled: bool) -> None:
        self.is_initiator = dialled
        self.end_reason = None
        self.on_ended = None
        self.rtt_s = None
        self.session = SimpleNamespace(bytes_in=10, bytes_out=1)

    def end(self, reason):
        self.end_reason = reason
        self.on_ended(reason)


def test_both_sides_prefer_the_connection_that_the_smaller_peer_dialled():
    of_small, of_large = ConnectionTable(SMALL, 8), ConnectionTable(LARGE, 8)
    by_small, by_large = FakeMuxed(dialled=True), FakeMuxed(dialled=False)
    at_large_by_small, at_large_by_large = FakeMuxed(dialled=False), FakeMuxed(dialled=True)
    of_small.add(LARGE, by_small, "x", "direct")
    retired = of_small.add(LARGE, by_large, "y", "direct")
    of_large.add(SMALL, at_large_by_large, "y", "direct")
    not_retired = of_large.add(SMALL, at_large_by_small, "x", "direct")
    assert of_small.preferred(LARGE).muxed is by_small
    assert of_large.preferred(SMALL).muxed is at_large_by_small
    assert [each.muxed for each in retired] == [by_large]
    assert not_retired == []  # one side alone retires


def test_of_two_dialled_by_the_same_peer_the_newest_is_preferred():
    table = ConnectionTable(SMALL, 8)
    old, new = FakeMuxed(dialled=False), FakeMuxed(dialled=False)
    table.add(LARGE, old, "x", "direct")
    assert [each.muxed for each in table.add(LARGE, new, "y", "direct")] == [old]


def test_a_peer_cannot_pile_up_connections():
    table = ConnectionTable(LARGE, 8)
    retired = [table.add(SMALL, FakeMuxed(dialled=False), "x", "direct") for _ in range(CONNECTIONS_PER_PEER_MAX + 1)]
    assert retired[-2] == []
    assert len(retired[-1]) == CONNECTIONS_PER_PEER_MAX


async def test_only_the_first_and_the_last_connection_of_a_peer_are_events():
    table = ConnectionTable(SMALL, 8)
    events = table.watch()
    first, second = FakeMuxed(dialled=True), FakeMuxed(dialled=True)
    table.add(LARGE, first, "x", "direct")
    table.add(LARGE, second, "x", "direct")
    first.end("why not")
    first.on_ended("told twice")
    second.end("because")
    assert events.receive_nowait() == PeerConnected(LARGE)
    assert events.receive_nowait() == PeerLost(LARGE, "because")
    assert events.statistics().current_buffer_used == 0
    assert LARGE not in table


def test_bytes_of_ended_connections_stay_counted():
    table = ConnectionTable(SMALL, 8)
    first = FakeMuxed(dialled=True)
    table.add(LARGE, first, "x", "direct")
    table.add(LARGE, FakeMuxed(dialled=True), "x", "direct")
    first.end("x")
    assert (table.bytes_in, table.bytes_out) == (20, 2)


def test_full_is_counted_in_peers():
    table = ConnectionTable(SMALL, 1)
    assert not table.is_full
    table.add(LARGE, FakeMuxed(dialled=True), "x", "direct")
    assert table.is_full


async def test_a_connection_that_has_ended_already_is_lost_at_once():
    table = ConnectionTable(SMALL, 8)
    events = table.watch()
    muxed = FakeMuxed(dialled=True)
    muxed.end_reason = "gone"
    table.add(LARGE, muxed, "x", "direct")
    await trio.lowlevel.checkpoint()
    assert LARGE not in table
    assert events.receive_nowait() == PeerConnected(LARGE)
    assert events.receive_nowait() == PeerLost(LARGE, "gone")
