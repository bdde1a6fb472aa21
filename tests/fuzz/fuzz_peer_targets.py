"""What reads a live peer's bytes: handshakes, sessions, connections and call streams, each whole, over scripted bytes.

Unlike the other targets these have state and wait, so each input runs under trio; none of them may wait for ever.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import trio
import trio.testing
from cryptography.exceptions import InvalidTag
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable

from kvasir_node.base.errors import Unreachable
from kvasir_node.base.ids import PeerId
from kvasir_node.base.settings import NetworkSettings
from kvasir_node.net import hello
from kvasir_node.net.dialler import parse_addresses, plan_dials
from kvasir_node.net.express import DirectionKey, ExpressChannel, answer_body, result_of
from kvasir_node.net.express_door import MAGIC, OPENING_BYTES, TOKEN_BYTES, Invitations, _Invitation, _keys
from kvasir_node.net.hello import Membership
from kvasir_node.net.muxer import YamuxConnection
from kvasir_node.net.muxer_frames import Flag, FrameType, pack
from kvasir_node.net.negotiation import GREETING, choose_protocol, encode_line
from kvasir_node.net.noise_session import NoiseSession
from kvasir_node.net.rpc import CallStream
from kvasir_node.net.rpc_credits import Grant
from kvasir_node.net.rpc_frames import Kind, encode_grant, pack_header
from kvasir_node.net.websocket import accept_websocket

PROTOCOL = "/kvasir/blocks/1.0.0"
OURS, THEIRS = PeerId("ann"), PeerId("bob")
SECRET, NONCE, ABOUT = bytes(32), bytes(range(32)), b"about us"
PATIENCE_S = 5.0
BODY_BYTES_MAX = 1024
_TAG = bytes(16)


class Script:
    """A stream, session or socket that gives its bytes in pieces of `step`, then ends; what is sent is only counted."""

    is_initiator = False
    peer, protocol = THEIRS, PROTOCOL
    can_write_now = False
    has_unsent = False

    def __init__(self, data: bytes, step: int = 11) -> None:
        self._data, self._step, self._at = data, step, 0
        self.written_bytes = 0

    async def read(self, max_bytes: int | None = None) -> bytes:
        await trio.lowlevel.checkpoint()
        count = self._step if max_bytes is None else min(self._step, max_bytes)
        chunk = self._data[self._at : self._at + count]
        self._at += len(chunk)
        return chunk

    receive = read

    async def read_chunks(self) -> list[bytes]:
        if chunk := await self.read():
            return [chunk]
        raise ConnectionClosedError("the script has ended")

    async def pump(self, deliver: Callable[[bytes], None]) -> None:
        while chunk := await self.read():
            deliver(chunk)

    def write_now(self, *parts: Any) -> bool:
        self.written_bytes += sum(len(part) for part in parts)
        return True

    async def write(self, *parts: Any) -> None:
        self.write_now(*parts)
        await trio.lowlevel.checkpoint()

    send = write

    async def send_all(self, parts: Any) -> None:
        await self.write(*parts)

    async def flush(self) -> None:
        await trio.lowlevel.checkpoint()

    async def close(self) -> None:
        await trio.lowlevel.checkpoint()

    reset = close


def _run(main: Callable[[bytes], Awaitable[None]]) -> Callable[[bytes], None]:
    async def limited(data: bytes) -> None:
        with trio.fail_after(PATIENCE_S):
            await main(data)

    # Where nothing moves any more this clock jumps to the limit, however busy the machine is.
    return lambda data: trio.run(limited, data, clock=trio.testing.MockClock(autojump_threshold=0))


async def _disconnect(peer: PeerId) -> None:
    await trio.lowlevel.checkpoint()


def _membership() -> tuple[Membership, dict[str, Any]]:
    handlers: dict[str, Any] = {}
    send, receive = trio.open_memory_channel[Any](0)
    transport: Any = SimpleNamespace(peer_id=OURS, set_handler=handlers.__setitem__, watch=lambda: receive)
    transport.connections, transport.disconnect = tuple, _disconnect
    return Membership(transport, SECRET, ABOUT, nonce=lambda: NONCE), {"keep": send, **handlers}


async def _hello_heard(data: bytes) -> None:
    membership, handlers = _membership()
    stream: Any = Script(data)
    handler = next(each for name, each in handlers.items() if name != "keep")
    await handler(stream)
    assert membership.is_member(THEIRS)


async def _hello_answered(data: bytes) -> None:
    membership, _ = _membership()
    stream: Any = Script(data)
    await membership._prove_as_dialler(stream)
    assert membership.is_member(THEIRS)


async def _choice(data: bytes) -> None:
    stream: Any = Script(data)
    await choose_protocol(stream, PROTOCOL)


class _PlainCipher:
    """Authenticates by a tag of zeros, so that inputs reach what lies behind it."""

    def decrypt(self, nonce: bytes, message: Any, extra: None) -> bytes:
        if bytes(message[-16:]) != _TAG:
            raise InvalidTag
        return bytes(message[:-16])


async def _noise_messages(data: bytes) -> None:
    """The session's buffers against a plain reading of the same messages, whatever the pieces."""
    cipher = SimpleNamespace(cipher=SimpleNamespace(cipher=_PlainCipher()), n=0)
    protocol = SimpleNamespace(cipher_state_encrypt=cipher, cipher_state_decrypt=cipher)
    names = ("local_peer", "local_private_key", "remote_peer", "remote_permanent_pubkey", "is_initiator")
    stock: Any = SimpleNamespace(
        **dict.fromkeys(names), conn=SimpleNamespace(noise_state=SimpleNamespace(noise_protocol=protocol))
    )
    raw: Any = SimpleNamespace(raw=Script(data, 1 + len(data) // 3), take_buffered=lambda: b"")
    raw.raw.read = _until_closed(raw.raw.read)
    session = NoiseSession(stock, raw)
    received = b""
    with suppress(ConnectionClosedError):
        while True:
            received += b"".join(await session.read_chunks())
    assert received == _plain_reading(data)


def _until_closed(read: Callable[[int], Awaitable[bytes]]) -> Callable[[int], Awaitable[bytes]]:
    async def reading(count: int) -> bytes:
        if chunk := await read(count):
            return chunk
        raise ConnectionClosedError("the script has ended")

    return reading


def _plain_reading(data: bytes) -> bytes:
    received, at = b"", 0
    while at + 2 <= len(data):
        end = at + 2 + int.from_bytes(data[at : at + 2], "big")
        if end > len(data):
            break
        received += data[at + 2 : end - 16]
        at = end
    return received


async def _websocket(data: bytes) -> None:
    tcp: Any = Script(data, 64)
    try:
        stream = await accept_websocket(tcp)
        received_bytes = 0
        while chunk := await stream.read():
            received_bytes += len(chunk)
        await stream.write(b"answer")
    except ConnectionClosedError as error:
        raise Unreachable(str(error)) from error
    assert received_bytes <= len(data)


async def _muxer(data: bytes) -> None:
    session: Any = Script(data)
    connection = YamuxConnection(session, None, NetworkSettings())  # type: ignore[arg-type]
    own = connection.open_stream_now()

    async def read_inbound() -> None:
        with suppress(MuxedConnUnavailable):
            while True:
                with suppress(Unreachable):
                    await (await connection.accept_stream()).receive(5)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read_inbound)
        await connection.start()
        nursery.cancel_scope.cancel()
    reason = connection.end_reason or ""
    assert not reason.startswith("internal error"), reason
    assert own.is_closed
    assert connection.buffered_bytes >= 0


async def _call_stream(data: bytes) -> None:
    stream: Any = Script(data)
    delivered: list[Any] = []

    async def handler(method: int, body: memoryview) -> list[memoryview]:
        for _ in range(method % 4):
            await trio.lowlevel.checkpoint()
        return [body]

    calls = CallStream(
        stream, handler=handler, in_flight_max=4, body_bytes_max=BODY_BYTES_MAX, on_notice=lambda method, body: None
    )
    for number in range(6):
        calls.submit(number, [b"question"], delivered.append, into=memoryview(bytearray(3)) if number % 2 else None)
    try:
        await calls.run()
    finally:
        assert len(delivered) == 6
        assert calls.serving <= 4
        assert calls.statistics().sent == calls.statistics().waiting == 0


def _addresses(data: bytes) -> None:
    texts = data.decode("utf-8", "replace").split("\n")
    _, found = parse_addresses(texts)
    assert len(plan_dials(found)) <= len(found) <= len(texts)


class ScriptedSocket:
    """As a `Script`, for a thread: a socket that gives its bytes in pieces and then ends."""

    def __init__(self, data: bytes, step: int = 11) -> None:
        self._data, self._step = data, step
        self._nothing = os.open(os.devnull, os.O_RDONLY)  # a descriptor that is always ready

    def fileno(self) -> int:
        return self._nothing

    def recvmsg_into(self, buffers: list[memoryview], *_: int) -> tuple[int, list[Any], int, None]:
        chunk, self._data = self._data[: self._step], self._data[self._step :]
        buffers[0][: len(chunk)] = chunk
        return len(chunk), [], 0, None

    def close(self) -> None:
        if self._nothing >= 0:
            os.close(self._nothing)
            self._nothing = -1

    def ignored(self, *_: object) -> None: ...

    setblocking = setsockopt = shutdown = ignored


def _express_frames(data: bytes) -> None:
    sock: Any = ScriptedSocket(data)
    keys = DirectionKey(SECRET), DirectionKey(SECRET)
    channel = ExpressChannel(sock, THEIRS, *keys, body_bytes_max=BODY_BYTES_MAX)
    received_bytes = 0
    with suppress(Unreachable):  # the end of the script
        while (frame := channel.receive(PATIENCE_S)) is not None:
            received_bytes += len(frame[1])
            result_of(frame[1])
    assert received_bytes <= len(data)
    assert channel.is_closed


def _express_opening(data: bytes) -> None:
    invitations = Invitations()
    invitations._valid.append(_Invitation(THEIRS, bytes(TOKEN_BYTES), SECRET, 1.0, lambda channel: None))
    peer, *_ = invitations.redeem(data[:OPENING_BYTES].ljust(OPENING_BYTES), 0.0)
    assert (peer, invitations._valid) == (THEIRS, [])


PEER_TARGETS: dict[str, Callable[[bytes], None]] = {
    "hello heard": _run(_hello_heard),
    "hello answered": _run(_hello_answered),
    "protocol choice": _run(_choice),
    "noise messages": _run(_noise_messages),
    "websocket": _run(_websocket),
    "muxer": _run(_muxer),
    "call stream": _run(_call_stream),
    "express frames": _express_frames,
    "express opening": _express_opening,
    "addresses": _addresses,
}


def _hello_seeds() -> tuple[bytes, bytes]:
    """What the other side of a whole hello sends, as dialler and as listener."""
    packed = len(ABOUT).to_bytes(2, "little") + ABOUT
    ids = (THEIRS.encode(), OURS.encode())
    as_dialler = (NONCE, NONCE, *ids)
    as_listener = (NONCE, NONCE, OURS.encode(), THEIRS.encode())
    dialler = NONCE + b"\x01" + hello._hint(SECRET, NONCE, ids)
    dialler += packed + hello._mac(SECRET, b"dialler", as_dialler, ABOUT)
    listener = b"\x01" + NONCE + packed + hello._mac(SECRET, b"listener", as_listener, ABOUT) + b"\x01"
    return dialler, listener


def _masked(opcode: int, payload: bytes, mask: bytes = b"\x07\x99\x00\xfe") -> bytes:
    """One frame of a client."""
    size = bytes([0x80 | len(payload)]) if len(payload) < 126 else b"\xfe" + len(payload).to_bytes(2, "big")
    return bytes([0x80 | opcode]) + size + mask + bytes(byte ^ mask[at % 4] for at, byte in enumerate(payload))


def _websocket_seed() -> bytes:
    """By hand: wsproto draws its key and masks anew each time."""
    opening = b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    opening += b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    frames = ((2, b"some bytes"), (9, b"?"), (2, b"x" * 130))
    return opening + b"".join(_masked(*frame) for frame in frames)


def peer_seeds() -> dict[str, list[bytes]]:
    dialler, listener = _hello_seeds()
    sealed = b"".join((len(text) + 16).to_bytes(2, "big") + text + _TAG for text in (b"one", b"", b"three" * 30))
    frames = [
        pack(FrameType.WINDOW_UPDATE, Flag.SYN, 1, 0),
        pack(FrameType.DATA, Flag.NONE, 1, 5) + b"hello",
        pack(FrameType.WINDOW_UPDATE, Flag.ACK, 2, 1000),
        pack(FrameType.PING, Flag.SYN, 0, 7),
        pack(FrameType.DATA, Flag.FIN, 1, 0),
        pack(FrameType.DATA, Flag.SYN, 3, 3) + b"abc",
        pack(FrameType.WINDOW_UPDATE, Flag.RST, 3, 0),
        pack(FrameType.GO_AWAY, Flag.NONE, 0, 0),
    ]
    calls = [
        pack_header(Kind.CALL, 3, 1, 3) + b"abc",
        pack_header(Kind.RESULT, 0, 1, 2) + b"ok",
        pack_header(Kind.CANCEL, 0, 1, 0),
        pack_header(Kind.CALL, 1, 2, 0),
        pack_header(Kind.NOTICE, 9, 0, 1) + b"n",
        pack_header(Kind.GRANT, 0, 0, 8) + encode_grant(Grant(3, 1 << 17)),
        pack_header(Kind.RESULT, 1, 3, 4) + b"full",
        pack_header(Kind.ERROR, 0, 2, 5) + b"\x04busy",
    ]
    peer = "12D3KooWCryG7Mon9orvQxcS1rYZjotPgpwoJNHHKcLLfE4Hf5mV"
    addresses = [
        f"/ip4/192.0.2.1/tcp/9481/p2p/{peer}\n/ip6/2001:db8::1/tcp/9481/p2p/{peer}",
        f"/dns4/example.org/tcp/443/ws/p2p/{peer}\n/ip4/192.0.2.1/tcp/1/p2p/{peer}/p2p-circuit/p2p/{peer}",
    ]
    inviter = DirectionKey(SECRET)
    frames_sealed = [
        inviter.seal(number.to_bytes(8, "little") + b"".join(answer_body([b"sums"]))) for number in range(3)
    ]
    guest, _ = _keys(bytes(TOKEN_BYTES), SECRET)
    return {
        "express frames": [b"".join(len(each).to_bytes(4, "little") + each for each in frames_sealed)],
        "express opening": [MAGIC + bytes(TOKEN_BYTES) + guest.seal(b"")],
        "hello heard": [dialler],
        "hello answered": [listener],
        "protocol choice": [encode_line(GREETING) + encode_line(PROTOCOL)],
        "noise messages": [sealed],
        "websocket": [_websocket_seed()],
        "muxer": [b"".join(frames)],
        "call stream": [b"".join(calls)],
        "addresses": [text.encode() for text in addresses],
    }
