import random

import pytest
import trio
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.network.connection.raw_connection import RawConnection
from net_helpers import RawOverStream

from kvasir_node.net.raw_link import PARTS_MAX, TcpStream, link_of


async def tcp_pair():
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        left = await trio.open_tcp_stream("127.0.0.1", listener.socket.getsockname()[1])
        return TcpStream(left), TcpStream(await listener.accept())


async def receive_all(link, count):
    received, buffer = bytearray(), memoryview(bytearray(100_000))
    while len(received) < count:
        size = await link.receive_into(buffer)
        received += buffer[:size]
    return bytes(received)


async def test_many_parts_arrive_in_order_whatever_the_kernel_takes_at_once():
    left, right = await tcp_pair()
    rng = random.Random(1)
    parts = [rng.randbytes(rng.choice((1, 100, 70_000))) for _ in range(2 * PARTS_MAX)]
    whole = b"".join(parts)
    rest = left.send_now(list(parts))
    assert 0 < sum(map(len, rest)) < len(whole)  # it is more than the sockets hold
    async with trio.open_nursery() as nursery:
        nursery.start_soon(left.send_all, rest)
        assert await receive_all(right, len(whole)) == whole
    await left.close()
    assert await right.receive_into(memoryview(bytearray(10))) == 0
    await right.close()


async def test_what_was_given_back_comes_first():
    left, right = await tcp_pair()
    left.send_now([b"world"])
    right.unread(b"hello ")
    assert await receive_all(right, 11) == b"hello world"
    for each in (left, right):
        await each.close()


async def test_a_closed_end_is_told_to_whoever_waits():
    left, right = await tcp_pair()
    async with trio.open_nursery() as nursery:

        async def wait():
            with pytest.raises(ConnectionClosedError, match="closed by us"):
                await left.receive_into(memoryview(bytearray(10)))

        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        left.close_now()
    with pytest.raises(ConnectionClosedError):
        await left.receive_into(memoryview(bytearray(10)))
    with pytest.raises(ConnectionClosedError):
        left.send_now([b"x"])
    await right.close()


async def test_any_other_raw_connection_is_waited_for():
    left, right = trio.testing.memory_stream_pair()
    sender, receiver = link_of(RawOverStream(left, True)), link_of(RawOverStream(right, False))
    assert not sender.sends_now
    assert sender.send_now([b"a", b"b"]) == [b"a", b"b"]
    await sender.send_all([b"a", b"b" * 10])
    small = memoryview(bytearray(4))
    assert await receiver.receive_into(small) == 4
    assert bytes(small) == b"abbb"
    assert await receive_all(receiver, 7) == b"b" * 7


async def test_our_own_socket_is_found_under_libp2ps_wrapping():
    left, right = await tcp_pair()
    assert link_of(RawConnection(left, True)) is left
    for each in (left, right):
        await each.close()
