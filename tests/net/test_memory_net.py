import itertools

import pytest
import trio
import trio.testing

from kvasir_node.base.errors import Unreachable, UsageError
from kvasir_node.net.identity import verify_signature
from kvasir_node.net.memory_gossip import MemoryGossip
from kvasir_node.net.memory_net import SILENCE_S, Link, open_memory_network
from kvasir_node.net.transport import PeerConnected, PeerLost

ECHO = "/test/echo/1"


async def echo(stream):
    while chunk := await stream.read():
        await stream.write(bytes(chunk))


async def read_exactly(stream, count):
    received = b""
    while len(received) < count:
        chunk = await stream.read(count - len(received))
        assert chunk
        received += chunk
    return received


def pair(network):
    left, right = network.transport("left"), network.transport("right")
    right.set_handler(ECHO, echo)
    return left, right


async def test_ids_and_signatures_are_real_and_repeatable():
    async with open_memory_network(3) as one, open_memory_network(3) as two, open_memory_network(4) as three:
        peers = [each.transport("hub") for each in (one, two, three)]
        assert peers[0].peer_id == peers[1].peer_id != peers[2].peer_id
        assert verify_signature(peers[0].peer_id, b"x", peers[0].sign(b"x"))


async def test_latency_is_paid_each_way(autojump_clock):
    async with open_memory_network() as network:
        left, right = pair(network)
        network.set_link(left.peer_id, right.peer_id, Link(latency_s=0.05))
        await left.connect(right.addresses())
        stream = await left.open_stream(right.peer_id, ECHO)
        before = trio.current_time()
        await stream.write(b"x")
        assert bytes(await stream.read()) == b"x"
        assert trio.current_time() - before == pytest.approx(0.1)
        assert left.connections()[0].rtt_s == pytest.approx(0.1)


async def test_bandwidth_is_shared_by_the_streams_of_a_direction(autojump_clock):
    async with open_memory_network() as network:
        left, right = pair(network)
        network.set_link(None, None, Link(bandwidth_bytes_s=1e6))
        await left.connect(right.addresses())
        streams = [await left.open_stream(right.peer_id, ECHO) for _ in range(2)]
        before = trio.current_time()
        for stream in streams:
            await stream.write(bytes(500_000))
        for stream in streams:
            await read_exactly(stream, 500_000)
        assert trio.current_time() - before == pytest.approx(1.5, abs=0.1)


async def test_loss_delays_and_never_loses_or_reorders(autojump_clock):
    async with open_memory_network(7) as network:
        left, right = pair(network)
        network.set_link(None, None, Link(latency_s=0.01, loss_ratio=0.3))
        await left.connect(right.addresses())
        stream = await left.open_stream(right.peer_id, ECHO)
        before = trio.current_time()
        for number in range(100):
            await stream.write(bytes([number]))
        assert await read_exactly(stream, 100) == bytes(range(100))
        assert trio.current_time() - before > 0.2


async def test_a_writer_waits_for_a_reader(autojump_clock):
    async def idle(stream):
        await trio.sleep(100)
        while await stream.read():
            pass

    async with open_memory_network() as network:
        left, right = pair(network)
        right.set_handler("/test/idle/1", idle)
        await left.connect(right.addresses())
        stream = await left.open_stream(right.peer_id, "/test/idle/1")
        for _ in range(40):
            await stream.write(bytes(100_000))
        assert trio.current_time() >= 100


async def test_half_close_and_reset(autojump_clock):
    async with open_memory_network() as network:
        left, right = pair(network)
        await left.connect(right.addresses())
        stream = await left.open_stream(right.peer_id, ECHO)
        await stream.write(b"x")
        await stream.close()
        assert await read_exactly(stream, 1) == b"x"
        assert not await stream.read()
        with pytest.raises(Unreachable, match="closed by us"):
            await stream.write(b"y")
        assert left.streams == right.streams == set()
        other = await left.open_stream(right.peer_id, ECHO)
        await other.reset()
        with pytest.raises(Unreachable, match="reset"):
            await other.read()
        assert left.streams == right.streams == set()


async def test_a_partition_that_heals_in_time_only_delays(autojump_clock):
    async with open_memory_network() as network:
        left, right = pair(network)
        await left.connect(right.addresses())
        stream = await left.open_stream(right.peer_id, ECHO)
        network.partition(left.peer_id, right.peer_id)
        await stream.write(b"x")
        with trio.move_on_after(SILENCE_S / 2) as scope:
            await stream.read()
        assert scope.cancelled_caught
        network.heal(left.peer_id, right.peer_id)
        assert bytes(await stream.read()) == b"x"
        await trio.sleep(SILENCE_S)
        assert left.connections()


async def test_a_partition_is_noticed_by_both_and_heals(autojump_clock):
    async with open_memory_network() as network:
        left, right = pair(network)
        events = right.watch()
        await left.connect(right.addresses())
        stream = await left.open_stream(right.peer_id, ECHO)
        network.partition(left.peer_id, right.peer_id)
        with pytest.raises(Unreachable, match="nothing heard for 5 s"):
            await stream.read()
        assert await events.receive() == PeerConnected(left.peer_id)
        assert await events.receive() == PeerLost(left.peer_id, "nothing heard for 5 s")
        with pytest.raises(Unreachable, match="timed out after 4 s"):
            await left.connect(right.addresses())
        network.heal(left.peer_id, right.peer_id)
        await left.connect(right.addresses())


@pytest.mark.parametrize("silently", [False, True])
async def test_a_killed_peer_is_lost_at_once_or_after_silence(autojump_clock, silently):
    ended = []

    async def forever(stream):
        try:
            await trio.sleep_forever()
        finally:
            ended.append(trio.current_time())

    async with open_memory_network() as network:
        left, right = pair(network)
        right.set_handler("/test/forever/1", forever)
        await left.connect(right.addresses())
        stream = await left.open_stream(right.peer_id, "/test/forever/1")
        await trio.sleep(1)
        before = trio.current_time()
        network.kill(right.peer_id, silently=silently)
        with pytest.raises(Unreachable):
            await stream.read()
        assert trio.current_time() - before == pytest.approx(SILENCE_S if silently else 0)
        await trio.testing.wait_all_tasks_blocked()
        assert ended == [before]
        with pytest.raises(Unreachable):
            await left.connect(right.addresses())


async def test_errors_name_what_went_wrong(autojump_clock):
    async with open_memory_network() as network:
        left, right = pair(network)
        with pytest.raises(UsageError, match="itself"):
            await left.connect(left.addresses())
        with pytest.raises(Unreachable, match="not connected"):
            await left.open_stream(right.peer_id, ECHO)
        with pytest.raises(Unreachable, match="connection refused"):
            await left.connect([f"/ip4/192.0.2.1/tcp/1/p2p/{right.peer_id}"])
        await left.connect(right.addresses())
        with pytest.raises(Unreachable, match="does not speak"):
            await left.open_stream(right.peer_id, "/no/such/1")
        await left.disconnect(right.peer_id)
        assert left.connections() == right.connections() == ()


async def test_a_failing_handler_resets_its_stream_alone(autojump_clock):
    async def failing(stream):
        raise RuntimeError("a bug")

    async with open_memory_network() as network:
        left, right = pair(network)
        right.set_handler("/test/fail/1", failing)
        await left.connect(right.addresses())
        good = await left.open_stream(right.peer_id, ECHO)
        bad = await left.open_stream(right.peer_id, "/test/fail/1")
        with pytest.raises(Unreachable, match="reset"):
            await bad.read()
        await good.write(b"x")
        assert bytes(await good.read()) == b"x"


async def gossip_line(network, count):
    """Peers in a line, so that the last hears the first only through the others."""
    transports = [network.transport(f"peer{number}") for number in range(count)]
    gossips = [MemoryGossip(each) for each in transports]
    for first, second in itertools.pairwise(transports):
        await first.connect(second.addresses())
    return transports, gossips


async def test_gossip_passes_along_and_arrives_once(autojump_clock):
    async with open_memory_network() as network:
        network.set_link(None, None, Link(latency_s=0.1))
        transports, gossips = await gossip_line(network, 4)
        await transports[0].connect(transports[3].addresses())  # a ring: every message has two ways
        channels = [await each.subscribe("t", lambda peer, data: True) for each in gossips]
        await gossips[0].publish("t", b"hello")
        await trio.sleep(1)
        for channel in channels[1:]:
            assert channel.receive_nowait() == (transports[0].peer_id, b"hello")
            assert channel.statistics().current_buffer_used == 0
        assert channels[0].statistics().current_buffer_used == 0


async def test_a_refused_message_goes_no_further(autojump_clock):
    async with open_memory_network() as network:
        transports, gossips = await gossip_line(network, 3)
        await gossips[1].subscribe("t", lambda peer, data: data != b"bad" and peer == transports[0].peer_id)
        last = await gossips[2].subscribe("t", lambda peer, data: True)
        await gossips[0].publish("t", b"bad")
        await gossips[0].publish("t", b"good")
        await trio.sleep(1)
        assert last.receive_nowait() == (transports[0].peer_id, b"good")
        assert last.statistics().current_buffer_used == 0


async def test_gossip_does_not_cross_a_partition(autojump_clock):
    async with open_memory_network() as network:
        transports, gossips = await gossip_line(network, 2)
        channel = await gossips[1].subscribe("t", lambda peer, data: True)
        network.partition(transports[0].peer_id, transports[1].peer_id)
        await gossips[0].publish("t", b"x")
        await trio.sleep(1)
        assert channel.statistics().current_buffer_used == 0
