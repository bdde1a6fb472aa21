import random
from contextlib import suppress

import pytest
import trio
from libp2p.io.exceptions import ConnectionClosedError
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, BytesMessage, CloseConnection, Ping, Pong, Request, TextMessage

from kvasir_node.base.errors import Unreachable
from kvasir_node.net.raw_link import TcpStream
from kvasir_node.net.websocket import (
    HANDSHAKE_BYTES_MAX,
    HTTP_START,
    MESSAGE_BYTES_MAX,
    accept_websocket,
    begins_as_http,
    connect_websocket,
)

MIB = 1024 * 1024


async def tcp_pair():
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        left = await trio.open_tcp_stream("127.0.0.1", listener.socket.getsockname()[1])
        return left, TcpStream(await listener.accept())


async def websocket_pair():
    left, right = await tcp_pair()
    streams = [None, None]

    async def dial():
        streams[0] = await connect_websocket(TcpStream(left), "127.0.0.1", 1)

    async def accept():
        assert await begins_as_http(right)
        streams[1] = await accept_websocket(right)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(dial)
        nursery.start_soon(accept)
    return streams


async def read_all(stream, count):
    received = bytearray()
    while len(received) < count:
        received += await stream.read(65_536)
    return bytes(received)


async def test_bytes_of_any_length_arrive_both_ways():
    left, right = await websocket_pair()
    for size in (1, 126, 70_000, 3 * MESSAGE_BYTES_MAX + 1):
        data = random.Random(size).randbytes(size)
        for sender, receiver in ((left, right), (right, left)):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(sender.write, data)
                assert await read_all(receiver, size) == data
    await left.close()
    assert await right.read(10) == b""
    await right.close()


@pytest.mark.parametrize("pieces", [[b"\x13/mul"], [b"G", b"E", b"T", b" /"], [b"GE", b"X"], [b"G"], [b""]])
async def test_the_first_bytes_tell_and_are_not_lost(pieces):
    left, right = await tcp_pair()
    async with left:
        for piece in pieces:
            await left.send_all(piece)
        await left.send_eof()
        sent = b"".join(pieces)
        assert await begins_as_http(right) == sent.startswith(HTTP_START)
        received = b""
        while chunk := await right.read(3):
            received += chunk
        assert received == sent
    await right.close()


@pytest.mark.parametrize(
    "request_",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET " + b"x" * (2 * HANDSHAKE_BYTES_MAX),
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * HANDSHAKE_BYTES_MAX,
        b"GET \xff\x00\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: \xa0\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n",
    ],
)
async def test_what_is_no_websocket_request_is_refused(request_):
    left, right = await tcp_pair()
    async with left, trio.open_nursery() as nursery:

        async def send():
            try:
                await left.send_all(request_)
                await left.send_eof()
            except trio.BrokenResourceError:
                pass

        nursery.start_soon(send)
        with pytest.raises(ConnectionClosedError), trio.fail_after(5):
            await accept_websocket(right)
        await right.close()


async def raw_client():
    """(trio stream after a handshake made by hand, its protocol, our end)."""
    left, right = await tcp_pair()
    protocol = WSConnection(ConnectionType.CLIENT)
    await left.send_all(protocol.send(Request(host="x", target="/")))
    ours = await accept_websocket(right)
    protocol.receive_data(await left.receive_some())
    assert isinstance(next(protocol.events()), AcceptConnection)
    return left, protocol, ours


@pytest.mark.parametrize("cut", [0, 3, 50])
async def test_what_comes_with_the_request_is_no_less_than_what_comes_after_it(cut):
    left, right = await tcp_pair()
    protocol = WSConnection(ConnectionType.CLIENT)
    opening = protocol.send(Request(host="x", target="/"))
    server = WSConnection(ConnectionType.SERVER)
    server.receive_data(opening)
    list(server.events())
    protocol.receive_data(server.send(AcceptConnection()))
    list(protocol.events())
    frames = protocol.send(BytesMessage(b"early " * 20)) + protocol.send(BytesMessage(b"bytes"))
    await left.send_all(opening + frames[:cut])
    ours = await accept_websocket(right)
    await left.send_all(frames[cut:])
    assert await read_all(ours, 125) == b"early " * 20 + b"bytes"
    await left.aclose()
    await ours.close()


async def test_law_5_words_that_come_with_the_request_end_the_connection():
    left, right = await tcp_pair()
    protocol = WSConnection(ConnectionType.CLIENT)
    opening = protocol.send(Request(host="x", target="/"))
    await left.send_all(opening + b"\x81\x85\0\0\0\0words")
    with pytest.raises(ConnectionClosedError):
        await accept_websocket(right)
    await left.aclose()
    await right.close()


async def test_a_ping_is_answered_with_our_next_bytes():
    left, protocol, ours = await raw_client()
    await left.send_all(protocol.send(Ping(b"1")) + protocol.send(Ping(b"2")) + protocol.send(BytesMessage(b"data")))
    assert await ours.read(100) == b"data"
    await ours.write(b"answer")
    protocol.receive_data(await left.receive_some())
    pong, message = protocol.events()
    assert isinstance(pong, Pong)
    assert bytes(pong.payload) == b"2"
    assert bytes(message.data) == b"answer"
    await left.aclose()
    await ours.close()


async def test_a_message_is_handed_on_before_its_end():
    left, protocol, ours = await raw_client()
    message = protocol.send(BytesMessage(bytes(MIB)))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(left.send_all, message[: MIB // 2])
        with trio.fail_after(5):
            assert not any(await read_all(ours, MIB // 4))
    await left.aclose()
    await ours.close()


@pytest.mark.parametrize("garbage", [TextMessage("words"), b"\x70\x80\0\0\0\0", b"\x82\x05hello"])
async def test_what_no_honest_peer_sends_ends_the_connection(garbage):
    left, protocol, ours = await raw_client()
    await left.send_all(garbage if isinstance(garbage, bytes) else protocol.send(garbage))
    ended = b""
    with suppress(ConnectionClosedError):
        ended = await ours.read(100)
    assert ended == b""
    await left.aclose()
    await ours.close()


@pytest.mark.parametrize("after", [b"", Ping(b"1")])
async def test_nothing_is_written_to_a_peer_that_said_goodbye(after):
    left, protocol, ours = await raw_client()
    last = after if isinstance(after, bytes) else protocol.send(after)
    await left.send_all(last + protocol.send(CloseConnection(1000)))
    assert await ours.read(100) == b""
    with pytest.raises(ConnectionClosedError, match="has closed"):
        await ours.write(b"answer")
    await left.aclose()
    await ours.close()


async def echo(stream):
    while chunk := await stream.read():
        await stream.write(chunk)


async def test_two_nodes_meet_over_a_websocket_alone(open_hosts):
    data = random.Random(4).randbytes(4 * MIB)
    async with open_hosts(2) as (left, right), trio.open_nursery() as nursery:
        right.set_handler("/test/echo/1", echo)
        await left.connect([each for each in right.addresses() if "/ws/" in each])
        assert "/ws" in left.connections()[0].address
        assert "/ws" in right.connections()[0].address
        stream = await left.open_stream(right.peer_id, "/test/echo/1")
        nursery.start_soon(stream.write, data)
        received = bytearray()
        while len(received) < len(data):
            received += await stream.read()
        assert received == data


async def test_a_socket_that_says_get_and_no_more_is_dropped(open_hosts, autojump_clock):
    async with open_hosts(1) as (ours,):
        port = int(ours.addresses()[0].split("/")[4])
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(b"GET / HT")
            assert await stream.receive_some() == b""


async def test_nobody_listens_for_websockets_there(open_hosts):
    async with open_hosts(2) as (left, right):
        (dead,) = [each for each in right.addresses() if "/ws/" in each]
        with pytest.raises(Unreachable, match="refused"):
            await left.connect([dead.replace(f"/tcp/{dead.split('/')[4]}/", "/tcp/1/")])
