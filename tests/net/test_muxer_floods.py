"""What a peer sends that nobody asked for costs next to no memory: short here, a gigabyte with `-m soak`."""

import resource

import pytest
import trio
from net_helpers import socket_session_pair
from test_muxer import QUIET

from kvasir_node.net.muxer import YamuxConnection
from kvasir_node.net.muxer_frames import INITIAL_WINDOW_BYTES, Flag, FrameType, pack

FLOODS = pytest.mark.parametrize(
    "blocks", [2000, pytest.param(17_000, marks=[pytest.mark.soak, pytest.mark.timeout(300)])]
)  # of 60,000 bytes: 120 MB, and 1 GB


async def flood(attacker, blocks, stream_id):
    block = bytes(60_000)
    for _ in range(blocks):
        await attacker.write_parts([pack(FrameType.DATA, Flag.NONE, stream_id, len(block)), block])


@FLOODS
async def test_a_flood_past_the_window_costs_little_memory(blocks):
    attacker, session = await socket_session_pair()
    right = YamuxConnection(session, session.get_remote_peer(), QUIET)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with trio.open_nursery() as nursery:
        nursery.start_soon(right.start)
        await right.event_started.wait()
        await attacker.write(pack(FrameType.WINDOW_UPDATE, Flag.SYN, 1, 0))
        with pytest.raises(Exception, match=r"reset|broken|closed|Broken"):
            await flood(attacker, blocks, 1)  # it is cut off before the end
        await right.wait_ended()
    await attacker.close()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 32 * 1024


@FLOODS
async def test_a_flood_on_a_stream_that_does_not_exist_is_dropped_and_costs_little_memory(blocks):
    attacker, session = await socket_session_pair()
    right = YamuxConnection(session, session.get_remote_peer(), QUIET)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with trio.open_nursery() as nursery:
        nursery.start_soon(right.start)
        await right.event_started.wait()
        await flood(attacker, blocks, 77)
        await attacker.write_parts([pack(FrameType.WINDOW_UPDATE, Flag.SYN, 1, 0)])
        await right.accept_stream()
        assert right.buffered_bytes <= INITIAL_WINDOW_BYTES
        await right.close()
    await attacker.close()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 32 * 1024
