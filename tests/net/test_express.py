"""Express channels: frames between two threads over a socket of their own."""

from __future__ import annotations

import ctypes
import math
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_node.base.errors import CallTimeout, Misbehaved, Overloaded, Unreachable, UsageError
from kvasir_node.base.ids import PeerId
from kvasir_node.decide.spinning import Spinning
from kvasir_node.net.arrival_stamps import stamp_age_s
from kvasir_node.net.express import (
    ECHO,
    KEPT_BYTES,
    SEND_BUFFER_BYTES,
    DirectionKey,
    ExpressChannel,
    answer_body,
    result_of,
)

BODY_MAX = 1 << 20


def socket_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        right, _ = server.accept()
    return left, right


def channel_on(
    sock: socket.socket,
    *,
    is_guest: bool,
    body_bytes_max: int = BODY_MAX,
    clock: Callable[[], float] = time.monotonic,
    spinning: Spinning | None = None,
) -> ExpressChannel:
    sending, receiving = (DirectionKey(bytes([number]) * 32) for number in ((1, 2) if is_guest else (2, 1)))
    peer = PeerId("carl" if is_guest else "ann")
    return ExpressChannel(sock, peer, sending, receiving, body_bytes_max=body_bytes_max, clock=clock, spinning=spinning)


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


class CountedSocket(socket.socket):
    """Counts its system calls that move bytes."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(fileno=sock.detach())
        self.calls: list[str] = []

    def sendmsg(self, *args: Any):
        self.calls.append("send")
        return super().sendmsg(*args)

    def recvmsg_into(self, *args: Any):
        self.calls.append("receive")
        return super().recvmsg_into(*args)


@pytest.fixture
def raw():
    """A channel of a guest, and the bare socket at its other end."""
    left, right = socket_pair()
    channel = channel_on(left, is_guest=True)
    yield channel, right
    channel.close()
    right.close()


def frames_from_inviter(*bodies: bytes, key: int = 2) -> list[bytes]:
    """As the inviter would send them, one after the other, each with the call id 7."""
    sealing = DirectionKey(bytes([key]) * 32)
    sealed = [sealing.seal(struct.pack("<Q", 7) + body) for body in bodies]
    return [struct.pack("<I", len(each)) + each for each in sealed]


def receive_more(channel: ExpressChannel, timeout_s: float) -> list[bytes]:
    """What comes until nothing does, or it raises."""
    got = []
    for _ in range(4):
        frame = channel.receive(timeout_s)
        if frame is not None:
            got.append(bytes(frame[1]))
    return got


def send_much(channel: ExpressChannel, timeout_s: float) -> None:
    for _ in range(100):
        channel.send(1, [bytes(BODY_MAX)], timeout_s)


def test_a_frame_costs_one_system_call_at_each_end():
    sockets = [CountedSocket(each) for each in socket_pair()]
    guest, inviter = (channel_on(each, is_guest=each is sockets[0]) for each in sockets)
    inviter._poll.unregister(sockets[1])  # one that polls would raise
    for _ in range(10):
        guest.send(1, [b"a" * 32_768], 5)
        while not select.select([sockets[1]], [], [], 5)[0]:
            pass
        for each in sockets:
            each.calls.append("|")
        assert inviter.receive_now() is not None
    calls = ["".join(name[0] for name in each.calls).split("|") for each in sockets]
    assert calls[0] == ["s"] * 10 + [""]
    assert calls[1] == ["", *["r"] * 10]
    guest.close()
    inviter.close()


def test_half_a_mebibyte_is_sent_without_waiting_where_the_system_allows_such_buffers():
    sockets = [CountedSocket(each) for each in socket_pair()]
    guest, inviter = (channel_on(each, is_guest=each is sockets[0]) for each in sockets)
    if sockets[0].getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) >= SEND_BUFFER_BYTES:
        guest.send(1, [bytes(524_288)], 0.0)
        assert sockets[0].calls == ["send"]
    guest.close()
    inviter.close()


def test_frames_that_came_together_are_handed_out_one_by_one(raw):
    channel, other = raw
    frames = frames_from_inviter(*[bytes([number]) * number for number in range(50)])
    other.sendall(b"".join(frames[:-1]) + frames[-1][:5])
    got = [channel.receive(5) for _ in range(49)]
    assert got == [(7, bytes([number]) * number) for number in range(49)]
    assert channel.receive_now() is None
    other.sendall(frames[-1][5:])
    assert channel.receive(5) == (7, bytes([49]) * 49)


def test_a_frame_that_comes_byte_by_byte_is_not_lost_while_nothing_is_complete(raw):
    channel, other = raw
    (frame,) = frames_from_inviter(b"slow")
    for value in frame:
        assert channel.receive_now() is None
        other.sendall(bytes([value]))
    assert channel.receive(5) == (7, b"slow")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux stamps what comes")
def test_when_a_frame_came_is_known_however_late_it_is_looked_for(raw):
    channel, other = raw
    assert channel.arrived_at is None
    for frame in frames_from_inviter(*[b"here"] * 1000):  # the kernel begins to stamp some time after it was asked to
        before = time.monotonic()
        other.sendall(frame)
        select.select([channel._socket], [], [], 5)
        after = time.monotonic()
        while time.monotonic() < after + 0.01:
            pass
        assert channel.receive_now() is not None
        if channel.arrived_at is not None:
            break
    arrived_at = channel.arrived_at
    assert arrived_at is not None
    assert before - 0.001 <= arrived_at <= after + 0.001  # two clocks are compared


def test_a_stamp_of_nobody_or_of_the_future_says_nothing():
    stamp = struct.Struct("@qq")
    now = time.time()
    assert stamp_age_s([]) is None
    assert stamp_age_s([(socket.SOL_SOCKET, 1, bytes(16)), (socket.SOL_SOCKET, 35, bytes(8))]) is None
    assert stamp_age_s([(socket.SOL_SOCKET, 35, stamp.pack(int(now) + 60, 0))]) is None
    age = stamp_age_s([(socket.SOL_SOCKET, 35, stamp.pack(int(now) - 60, 500_000_000))])
    assert age is not None
    assert 58.5 <= age <= 62


@pytest.mark.parametrize("position", range(4 + 8 + 5 + 16))
def test_a_flipped_byte_anywhere_ends_the_channel_before_anything_is_handed_out(position):
    left, right = socket_pair()
    channel = channel_on(left, is_guest=True, body_bytes_max=1000)
    first, second, filler = frames_from_inviter(b"right", b"wrong", bytes(900))
    flipped = bytearray(second)
    flipped[position] ^= 1 << position % 8
    right.sendall(first + flipped + filler)  # a length that became larger is made of what follows
    assert channel.receive(5) == (7, b"right")
    with pytest.raises(Misbehaved):
        receive_more(channel, 0.01)
    assert channel.is_closed
    for use in (lambda: channel.receive(5), channel.receive_now, lambda: channel.send(1, [b""], 5)):
        with pytest.raises(Unreachable, match="has ended"):
            use()
    assert left.fileno() == -1
    assert right.recv(1) == b""
    right.close()


@pytest.mark.parametrize(
    ("name", "order"), [("repeated", (0, 0)), ("left out", (1,)), ("swapped", (0, 2, 1)), ("reflected", (3,))]
)
def test_frames_out_of_their_order_are_refused(raw, name, order):
    channel, other = raw
    frames = [*frames_from_inviter(b"a", b"b", b"c"), *frames_from_inviter(b"a", key=1)]
    other.sendall(b"".join(frames[each] for each in order))
    with pytest.raises(Misbehaved, match="not what was sealed"):
        receive_more(channel, 5)
    assert channel.is_closed


@pytest.mark.parametrize(
    ("length", "reason"), [(BODY_MAX + 25, "too_large"), (2**32 - 1, "too_large"), (23, "bad_frame")]
)
def test_a_length_that_no_frame_has_is_refused_from_its_four_bytes(raw, length, reason):
    channel, other = raw
    other.sendall(struct.pack("<I", length))
    with pytest.raises(Misbehaved) as refused:
        channel.receive(5)
    assert refused.value.reason == reason
    assert channel.is_closed


def test_law_7_a_length_that_is_only_claimed_takes_no_memory_and_a_large_frame_gives_it_back(raw):
    channel, other = raw
    (frame,) = frames_from_inviter(bytes(BODY_MAX))
    other.sendall(frame[:100])
    assert channel.receive(0.01) is None
    assert len(channel._buffer) == KEPT_BYTES
    other.sendall(frame[100 : KEPT_BYTES + 100])
    assert channel.receive(0.05) is None
    assert len(channel._buffer) <= 2 * KEPT_BYTES  # twice what came, not what is to come
    sender = threading.Thread(target=other.sendall, args=(frame[KEPT_BYTES + 100 :],))
    sender.start()
    got = channel.receive(5)
    sender.join()
    assert got == (7, bytes(BODY_MAX))
    assert len(channel._buffer) <= 4 + 8 + BODY_MAX + 16
    assert channel.receive_now() is None
    assert len(channel._buffer) == KEPT_BYTES


@given(st.binary(max_size=200))
@settings(max_examples=60, deadline=None)
def test_whatever_bytes_come_are_a_wait_or_misbehaviour(sent):
    left, right = socket_pair()
    channel = channel_on(left, is_guest=True)
    right.sendall(sent)
    right.close()
    with pytest.raises((Misbehaved, Unreachable)):
        receive_more(channel, 5)
    assert channel.is_closed


def test_a_peer_that_takes_nothing_costs_a_send_its_time_and_the_channel(raw):
    channel, _ = raw
    began_at = time.monotonic()
    with pytest.raises(CallTimeout, match=r"in 0\.05 s"):
        send_much(channel, 0.05)
    assert time.monotonic() - began_at < 5
    assert channel.is_closed
    with pytest.raises(Unreachable, match=r"not taken in 0\.05 s"):
        channel.send(1, [b""], 1)


def test_a_receive_that_gets_nothing_takes_its_time_and_costs_nothing(pair):
    guest, inviter = pair
    began_at = time.monotonic()
    assert guest.receive(0.05) is None
    assert 0.04 < time.monotonic() - began_at < 5
    inviter.send(1, [b"late"], 1)
    assert guest.receive(5) == (1, b"late")


class Spins(Spinning):
    """Always spins, for so long; keeps what it is told."""

    def __init__(self, spin_s: float) -> None:
        super().__init__()
        self._spin_s = spin_s
        self.waits: list[float] = []
        self.spins: list[tuple[float, float]] = []

    def spin_s(self, now: float) -> float:
        return self._spin_s

    def waited(self, took_s: float, *, came: bool) -> None:
        self.waits.append(took_s)

    def spun(self, took_s: float, used_s: float, now: float) -> None:
        self.spins.append((took_s, used_s))


@pytest.mark.parametrize("niceness", [0, 5])
def test_a_process_that_gives_way_to_others_does_not_spin(niceness):
    """Its niceness cannot be taken back, so it is a process of its own."""
    code = f"import os; os.nice({niceness}); from kvasir_node.net.express import _gives_way; print(_gives_way())"
    own = os.getpriority(os.PRIO_PROCESS, 0)
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == str(own + niceness > 0)


@pytest.fixture
def spinning():
    """A channel that spins for half a second, what it told, and the other end."""
    left, right = socket_pair()
    told = Spins(0.5)
    guest, inviter = channel_on(left, is_guest=True, spinning=told), channel_on(right, is_guest=False)
    yield guest, told, inviter
    guest.close()
    inviter.close()


def test_what_comes_during_a_spin_is_received_without_sleeping(spinning):
    guest, told, inviter = spinning
    sending = threading.Timer(0.05, inviter.send, (7, [b"soon"], 1))
    sending.start()
    assert guest.receive(5) == (7, b"soon")
    sending.join()
    [(took_s, used_s)] = told.spins
    assert 0 < used_s <= took_s + 0.01
    assert told.waits[0] >= took_s > 0.01


def test_what_comes_after_the_spin_is_slept_for(spinning):
    guest, told, inviter = spinning
    told._spin_s = 0.02
    sending = threading.Timer(0.1, inviter.send, (7, [b"later"], 1))
    sending.start()
    assert guest.receive(5) == (7, b"later")
    sending.join()
    assert 0.02 <= told.spins[0][0] < told.waits[0]


class Looks(ExpressChannel):
    """Nothing comes: a look takes a millisecond of `now`, and a sleep as long as it may."""

    now = 0.0

    def _ready(self, events: int, timeout_s: float) -> int:
        self.now += max(timeout_s, 0.001)
        return 0


@pytest.mark.parametrize("spin_s", [0.0, 0.02, 0.05, 0.5])
def test_a_receive_that_spins_takes_no_longer_than_its_time(spin_s):
    left, right = socket_pair()
    told, key = Spins(spin_s), DirectionKey(bytes(32))
    channel = Looks(left, PeerId("carl"), key, key, body_bytes_max=1, clock=lambda: channel.now, spinning=told)
    assert channel.receive(0.05) is None
    assert 0.05 <= channel.now <= 0.0511
    assert told.waits == [0.05]
    channel.close()
    right.close()


def test_the_end_is_seen_by_who_spins(spinning):
    guest, _, inviter = spinning
    ending = threading.Timer(0.05, inviter.close)
    ending.start()
    with pytest.raises(Unreachable):
        guest.receive(5)
    ending.join()


def test_who_does_not_wait_does_not_spin(spinning):
    guest, told, inviter = spinning
    assert guest.receive_now() is None
    inviter.send(1, [b"there"], 1)
    while guest.receive_now() is None:
        pass
    assert told.spins == told.waits == []


def test_what_comes_too_slowly_is_not_waited_for_beyond_the_time():
    now = iter(range(100))
    left, right = socket_pair()
    channel = channel_on(left, is_guest=True, clock=lambda: float(next(now)))
    right.sendall(frames_from_inviter(b"whole")[0][:-1])
    assert channel.receive(1.0) is None  # at the second look at the clock, whatever has come until then
    assert next(now) == 2
    channel.close()
    right.close()


def test_two_peers_that_both_send_more_than_the_system_holds_do_not_wait_for_each_other():
    size = 24 << 20
    left, right = socket_pair()
    ends = channel_on(left, is_guest=True, body_bytes_max=size), channel_on(right, is_guest=False, body_bytes_max=size)
    got: list[object] = []

    def exchange(channel: ExpressChannel) -> None:
        channel.send(1, [bytes(size)], 10)
        got.append(channel.receive(10))

    threads = [threading.Thread(target=exchange, args=(each,)) for each in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [(1, bytes(size))] * 2
    for each in ends:
        each.close()


@pytest.mark.parametrize("waits_in", ["receive", "send"])
def test_close_from_another_thread_wakes_who_waits_and_frees_the_descriptor(raw, waits_in):
    channel, _ = raw
    sock = channel._socket
    raised: list[BaseException] = []
    is_waiting = threading.Event()

    def use() -> None:
        is_waiting.set()
        try:
            while True:
                if waits_in == "receive":
                    channel.receive(math.inf)
                else:
                    channel.send(1, [bytes(BODY_MAX)], math.inf)
        except Unreachable as error:
            raised.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    is_waiting.wait()
    channel.close("the test is over")
    thread.join(5)
    assert not thread.is_alive()
    assert "the test is over" in str(raised[0])
    assert sock.fileno() == -1
    channel.close("again")
    assert channel.end_reason == "the test is over"


def test_the_end_comes_after_what_was_sent_before_it(pair):
    guest, inviter = pair
    inviter.send(1, [b"last words"], 1)
    inviter.close()
    assert guest.receive(5) == (1, b"last words")
    with pytest.raises(Unreachable, match="the peer closed the connection"):
        guest.receive(5)
    assert guest.is_closed


def test_a_reset_is_the_end(pair):
    guest, inviter = pair
    inviter._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    inviter._socket.close()
    with pytest.raises(Unreachable, match=r"broke|closed"):
        guest.receive(5)


def test_a_body_too_large_to_send_costs_nothing_else(pair):
    guest, inviter = pair
    with pytest.raises(UsageError, match="at most 1048576"):
        guest.send(1, [bytes(BODY_MAX), b"1"], 5)
    guest.send(2, [b"small"], 5)
    assert inviter.receive(5) == (2, b"small")


def test_a_dead_machine_is_noticed_by_the_system(raw):
    channel, _ = raw
    sock = channel._socket
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 10_000


def test_an_answer_is_a_result_whose_arrays_are_aligned_or_an_error(pair):
    guest, inviter = pair
    for result in ([b"head", b"sums"], [], [b"\x00"]):
        inviter.send(1, answer_body(result), 1)
        _, body = guest.receive(5)
        assert result_of(body) == b"".join(result)
        address = ctypes.addressof(ctypes.c_char.from_buffer(body)) if len(body) else 0
        assert address % 8 == 0
    inviter.send(1, answer_body(Overloaded("full")), 1)
    error = result_of(guest.receive(5)[1])
    assert isinstance(error, Overloaded)
    assert str(error) == "full"
    for nothing in (b"", b"\x00", b"\x00\x00\x00", b"\x63text"):
        with pytest.raises(Misbehaved):
            result_of(memoryview(nothing))


# How far it is ------------------------------------------------------------------------------------------------


def test_what_is_sent_there_and_back_says_how_far_it_is_and_what_came_late_before_is_passed_over(pair):
    ours, theirs = pair
    seen = []

    def send_back():
        theirs.send(7, answer_body([b"late"]), 5.0)
        for _ in range(2):
            call_id, body = received(theirs)
            seen.append((call_id, len(body)))
            time.sleep(0.02)
            theirs.send(call_id, [body], 5.0)

    thread = threading.Thread(target=send_back)
    thread.start()
    took_s = [ours.echo_s(size, 5.0) for size in (0, 65_536)]
    thread.join()
    assert seen == [(ECHO, 0), (ECHO, 65_536)]
    assert all(0.02 <= each < 5.0 for each in took_s)


def test_law_5_who_sends_nothing_back_loses_the_channel(pair):
    ours, _ = pair
    with pytest.raises(CallTimeout, match="did not send 100 bytes back"):
        ours.echo_s(100, 0.02)
    assert ours.is_closed


def received(channel: ExpressChannel) -> tuple[int, memoryview]:
    frame = channel.receive(5.0)
    assert frame is not None
    return frame
