"""What the two ends of a hole may say to each other, and what they cannot cause. Real holes: test_nat.py."""

from __future__ import annotations

import pytest
import trio

from kvasir_node.base.errors import Unreachable
from kvasir_node.net.memory_net import open_memory_network
from kvasir_node.net.punch import ADDRESSES_MAX, AGREE_S, ATTEMPT_S, PUNCH_PROTOCOL, Puncher
from kvasir_node.net.stream_io import read_exactly


async def never(tcp, peer, dials):
    raise AssertionError("nothing was connected")


async def ends(network):
    near, far = network.transport("near"), network.transport("far")
    asked = Puncher(far, (), lambda: ("/ip4/198.51.100.7/tcp/4001",), never)
    far.set_handler(PUNCH_PROTOCOL, asked.serve)
    await near.connect(far.addresses())
    return near, far


async def test_an_attempt_that_finds_no_way_ends_and_says_where_it_tried(autojump_clock):
    async with open_memory_network() as network:
        near, far = await ends(network)
        puncher = Puncher(near, (), lambda: (), never)
        began_at = trio.current_time()
        with pytest.raises(Unreachable, match=r"came about in .* at /ip4/198\.51\.100\.7/tcp/4001"):
            await puncher.punch(far.peer_id)
        assert trio.current_time() - began_at == pytest.approx(ATTEMPT_S, abs=0.1)


@pytest.mark.parametrize(
    "address",
    [
        "/ip4/127.0.0.1/tcp/80",
        "/ip4/0.0.0.0/tcp/80",
        "/ip6/::1/tcp/80",
        "/dns/example.org/tcp/80",
        "/ip4/1.2.3.4/udp/1",
    ],
)
async def test_nobody_is_sent_to_this_machine_itself_or_to_what_is_no_tcp_address(autojump_clock, address):
    async with open_memory_network() as network:
        near, far = await ends(network)
        with pytest.raises(Unreachable):
            await say(near, far, bytes([1, len(address)]) + address.encode())


async def test_a_long_list_of_addresses_is_refused(autojump_clock):
    async with open_memory_network() as network:
        near, far = await ends(network)
        with pytest.raises(Unreachable):
            await say(near, far, bytes([ADDRESSES_MAX + 1]))


async def say(near, far, addresses):
    """Says this as the side that drives; raises Unreachable when it is not answered."""
    stream = await near.open_stream(far.peer_id, PUNCH_PROTOCOL)
    await stream.write(bytes(16) + addresses)
    return await read_exactly(stream.read, 1)


async def test_addresses_outside_are_answered_with_ours(autojump_clock):
    async with open_memory_network() as network:
        near, far = await ends(network)
        assert await say(near, far, bytes([0])) == b"\x01"


async def test_who_never_says_when_is_not_waited_for(autojump_clock):
    async with open_memory_network() as network:
        near, far = await ends(network)
        stream = await near.open_stream(far.peer_id, PUNCH_PROTOCOL)
        await stream.write(bytes(16) + bytes([0]))
        began_at = trio.current_time()
        with pytest.raises(Unreachable):
            await read_exactly(stream.read, 100)
        assert trio.current_time() - began_at == pytest.approx(AGREE_S, abs=0.1)
