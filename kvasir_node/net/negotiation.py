"""Agreeing on a stream's protocol, as the side that opened it: one round trip, in two lines each way.

It does not know connections or handlers. Source: multiformats/multistream-select README. libp2p's own client
waits for the greeting before it asks; both lines may go at once, which halves the wait.
"""

from __future__ import annotations

from kvasir_node.base.errors import Misbehaved, RejectReason, Unreachable
from kvasir_node.net.muxer_stream import YamuxStream
from kvasir_node.net.stream_io import read_exactly

GREETING = "/multistream/1.0.0"
NOT_AVAILABLE = "na"
LINE_BYTES_MAX = 1024


async def choose_protocol(stream: YamuxStream, protocol: str) -> None:
    """Raises Unreachable when the peer does not speak the protocol, Misbehaved for an answer that is neither.

    Cancel-safety: afterwards only `reset` makes sense.
    """
    await stream.send(encode_line(GREETING) + encode_line(protocol))
    greeting = await _read_line(stream)
    if greeting != GREETING:
        text = f"expected the greeting {GREETING}, got {greeting[:80]!r}"
        raise Misbehaved(RejectReason.BAD_MESSAGE, text)
    answer = await _read_line(stream)
    if answer == NOT_AVAILABLE:
        raise Unreachable(f"the peer does not speak {protocol}")
    if answer != protocol:
        raise Misbehaved(RejectReason.BAD_MESSAGE, f"asked for {protocol}, the peer answered {answer[:80]!r}")


def encode_line(text: str) -> bytes:
    """A varint length, the text, a newline."""
    body = text.encode() + b"\n"
    length, prefix = len(body), bytearray()
    while length >= 0x80:
        prefix.append(length & 0x7F | 0x80)
        length >>= 7
    prefix.append(length)
    return bytes(prefix) + body


async def _read_line(stream: YamuxStream) -> str:
    length, shift = 0, 0
    while True:
        byte = (await read_exactly(stream.receive, 1))[0]
        length |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
        if shift > 14:
            raise Misbehaved(RejectReason.TOO_LARGE, "the length of a protocol line is longer than two bytes")
    if not 0 < length <= LINE_BYTES_MAX:
        raise Misbehaved(RejectReason.TOO_LARGE, f"a protocol line of {length} bytes; at most {LINE_BYTES_MAX}")
    line = await read_exactly(stream.receive, length)
    if line[-1:] != b"\n":
        raise Misbehaved(RejectReason.BAD_MESSAGE, f"a protocol line without its newline: {line[:80]!r}")
    return line[:-1].decode("utf-8", "replace")
