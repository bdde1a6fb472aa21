"""How far our clock is from the hubs', over links that take their time."""

from __future__ import annotations

import pytest
import trio
from role_fakes import KEYS

from kvasir_node.base.ids import PeerId
from kvasir_node.net.clock_probe import CLOCK_PROTOCOL
from kvasir_node.net.hello import Membership
from kvasir_node.net.memory_net import Link, MemoryNetwork, open_memory_network
from kvasir_node.roles.clocks import AGAIN_S, Clocks

WALL = 1_800_000_000.0


class Node:
    def __init__(self, network: MemoryNetwork, name: str, wrong_s: float, hubs: list[PeerId], *, is_hub: bool) -> None:
        self.wrong_s = wrong_s
        self.transport = network.transport(name)
        self.membership = Membership(self.transport, KEYS.entry, b"")
        wall = lambda: WALL + trio.current_time() + self.wrong_s  # noqa: E731
        self.clocks = Clocks(self.transport, self.membership, lambda: hubs, is_hub=is_hub, wall=wall)

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.membership.run)
            nursery.start_soon(self.clocks.run)


async def joined(node: Node, *hubs: Node) -> None:
    for hub in hubs:
        await node.transport.connect(hub.transport.addresses())
        await node.membership.require(hub.transport.peer_id, 5)


@pytest.mark.parametrize(("wrong_s", "expected_s"), [([0.0], 90.0), ([5.0], 85.0), ([0.0, 700.0, 1.0], 89.0)])
async def test_the_middle_one_of_the_hubs_clocks_counts(autojump_clock, nursery, wrong_s, expected_s):
    async with open_memory_network() as network:
        network.set_link(None, None, Link(latency_s=0.05))
        known: list[PeerId] = []
        hubs = [Node(network, f"hub {number}", each, known, is_hub=True) for number, each in enumerate(wrong_s)]
        ann = Node(network, "ann", 90.0, known, is_hub=False)
        for each in (*hubs, ann):
            nursery.start_soon(each.run)
        await trio.sleep(5)
        assert (ann.clocks.ahead_s, ann.clocks.doubt_s) == (None, 0.0)
        await joined(ann, *hubs)
        known += [hub.transport.peer_id for hub in hubs]
        await trio.sleep(10)
        assert ann.clocks.ahead_s == pytest.approx(expected_s, abs=0.01)
        assert ann.clocks.doubt_s == pytest.approx(0.05, abs=0.01)
        ann.wrong_s = 0.0  # it was set right
        await trio.sleep(AGAIN_S + 10)
        assert ann.clocks.ahead_s == pytest.approx(expected_s - 90.0, abs=0.01)
        known.clear()
        await trio.sleep(5)
        assert ann.clocks.ahead_s is None


async def test_a_hub_that_does_not_answer_or_a_stranger_tells_and_learns_nothing(autojump_clock, nursery):
    async with open_memory_network() as network:
        known: list[PeerId] = []
        mute, ann = Node(network, "mute", 0.0, known, is_hub=False), Node(network, "ann", 0.0, known, is_hub=True)

        async def silent(stream) -> None:
            await trio.sleep_forever()

        mute.transport.set_handler(CLOCK_PROTOCOL, silent)
        for each in (mute, ann):
            nursery.start_soon(each.run)
        await joined(ann, mute)
        known.append(mute.transport.peer_id)
        await trio.sleep(60)
        assert ann.clocks.ahead_s is None
        stranger = network.transport("stranger")
        await stranger.connect(ann.transport.addresses())
        stream = await stranger.open_stream(ann.transport.peer_id, CLOCK_PROTOCOL)
        await stream.write(b"?")
        with pytest.raises(Exception, match="reset"):
            await stream.read()
