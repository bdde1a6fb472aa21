import pytest
import trio
import trio.testing
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.security.noise.transport import Transport as StockNoise
from net_helpers import BufferedNoise, RawOverStream, handshake, session_pair

from kvasir_node.base.errors import Misbehaved
from kvasir_node.net.noise_session import PLAINTEXT_BYTES_MAX

SIZES = (1, 2, 1000, PLAINTEXT_BYTES_MAX, PLAINTEXT_BYTES_MAX + 1, 300_000)


async def read_all(session, count):
    received = b""
    while len(received) < count:
        received += await session.read(count - len(received))
    return received


@pytest.mark.parametrize(("dialler", "listener"), [(StockNoise, BufferedNoise), (BufferedNoise, StockNoise)])
async def test_speaks_with_the_stock_session_both_ways(dialler, listener):
    left, right = trio.testing.memory_stream_pair()
    first, second = await handshake(dialler, listener, RawOverStream(left, True), RawOverStream(right, False))
    for size in SIZES:
        data = bytes(range(256)) * (size // 256 + 1)
        for sender, receiver in ((first, second), (second, first)):
            await sender.write(data[:size])
            assert await read_all(receiver, size) == data[:size]


async def test_parts_arrive_in_order_whatever_pieces_the_socket_gives():
    first, second = await session_pair(read_max=7)
    await first.write_parts([b"a" * 10, memoryview(b"b" * 70_000), b"c"])
    assert await read_all(second, 70_011) == b"a" * 10 + b"b" * 70_000 + b"c"


async def test_one_write_of_many_messages_is_one_send():
    first, second = await session_pair()
    sends = []
    raw = first._connection.raw
    original = raw.stream.send_all

    async def counting(data):
        sends.append(len(data))
        await original(data)

    raw.stream.send_all = counting
    await first.write_parts([bytes(200_000)])
    assert len(sends) == 1
    assert await read_all(second, 200_000) == bytes(200_000)


async def test_a_flipped_bit_is_the_peers_fault_and_never_data():
    first, second = await session_pair()
    for bit in (0, 9, 100):
        sealed = bytearray(b"".join(first._seal([b"x" * 40])))
        sealed[2 + bit // 8] ^= 1 << (bit % 8)
        second._keep(bytes(sealed))
        with pytest.raises(Misbehaved, match="does not authenticate"):
            await second.read_chunks()


async def test_a_message_too_short_for_its_tag_is_refused():
    _, second = await session_pair()
    second._keep(b"\0\x05hello")
    with pytest.raises(Misbehaved, match="cannot hold its tag"):
        await second.read_chunks()


async def test_cancelled_reads_lose_nothing(autojump_clock):
    first, second = await session_pair()
    received = b""
    for number in range(20):
        with trio.move_on_after(0.5):
            received += await second.read(100)
        await first.write(bytes([number]) * 10)
    assert received + await read_all(second, 200 - len(received)) == b"".join(bytes([n]) * 10 for n in range(20))


async def test_the_end_of_the_connection_is_told():
    first, second = await session_pair()
    await first.write(b"last")
    await first.close()
    assert await second.read() == b"last"
    with pytest.raises(ConnectionClosedError):
        await second.read()


async def test_bytes_are_counted_as_on_the_wire():
    first, second = await session_pair()
    await first.write(b"x" * 100)
    await read_all(second, 100)
    assert first.bytes_out == second.bytes_in == 2 + 100 + 16
