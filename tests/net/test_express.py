"""Express channels: frames between two threads over a socket of their own."""

from __future__ import annotations

import socket
import threading

import pytest

from kvasir_node.base.ids import PeerId
from kvasir_node.net.express import DirectionKey, ExpressChannel

BODY_MAX = 1 << 20


def socket_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        right, _ = server.accept()
    return left, right


def channel_on(sock: socket.socket, *, is_guest: bool) -> ExpressChannel:
    keys = [DirectionKey(bytes([number]) * 32) for number in ((1, 2) if is_guest else (2, 1))]
    return ExpressChannel(sock, PeerId("ann" if is_guest else "carl"), *keys, body_bytes_max=BODY_MAX)


@pytest.fixture
def pair():
    left, right = socket_pair()
    channels = channel_on(left, is_guest=True), channel_on(right, is_guest=False)
    yield channels
    for channel in channels:
        channel.close()


@pytest.mark.parametrize("size", [0, 1, 7, 8, 4096, 32_768, 65_536, 262_100, 262_144, 524_288, BODY_MAX])
def test_bodies_of_all_sizes_go_both_ways(pair, size):
    guest, inviter = pair
    body = bytes(range(256)) * (size // 256) + bytes(size % 256)

    def answer() -> None:
        for _ in range(3):
            call_id, asked = inviter.receive(5)
            inviter.send(call_id, [asked], 5)

    thread = threading.Thread(target=answer)
    thread.start()
    for call_id in (0, 1, 2**64 - 1):
        guest.send(call_id, [body[: size // 3], memoryview(body)[size // 3 :]], 5)
        got, answered = guest.receive(5)
        assert (got, answered) == (call_id, body)
        assert not answered.readonly
    thread.join()
    assert guest.bytes_out == guest.bytes_in == inviter.bytes_in == 3 * (4 + 8 + size + 16)
