"""Yamux frames: their layout, and a reader that turns chunks of bytes into frames.

Pure: it does not know connections, streams' states or time.
Source: hashicorp/yamux spec.md, "Framing"; libp2p/specs yamux/README.md.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum, IntFlag
from typing import NamedTuple

from kvasir_node.base.errors import Misbehaved, RejectReason

HEADER = struct.Struct("!BBHII")  # version, type, flags, stream id, length
HEADER_BYTES = HEADER.size
_DATA_HEADER = struct.Struct("!III")  # version, type and flags in one number
INITIAL_WINDOW_BYTES = 256 * 1024  # of both directions of every stream, fixed by the specification
WINDOW_BYTES_MAX = 2**32 - 1


class FrameType(IntEnum):
    DATA = 0
    WINDOW_UPDATE = 1
    PING = 2
    GO_AWAY = 3


class Flag(IntFlag):
    NONE = 0
    SYN = 1
    ACK = 2
    FIN = 4
    RST = 8


class GoAway(IntEnum):
    NORMAL = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2


class Frame(NamedTuple):
    """A header. `length` counts payload bytes for DATA, and is the value of every other type."""

    type: int
    flags: int
    stream_id: int
    length: int


class FramePart(NamedTuple):
    """A frame's header as soon as it is known (payload None), then each piece of its payload as it comes.

    `complete` is true exactly once per frame, with its last part.
    """

    frame: Frame
    payload: memoryview | None
    complete: bool


def pack(frame_type: FrameType, flags: Flag, stream_id: int, length: int) -> bytes:
    return HEADER.pack(0, frame_type, flags, stream_id, length)


def pack_data(stream_id: int, length: int, *, is_last: bool) -> bytes:
    """`pack` for the frames that are counted by the thousand, without enums."""
    return HEADER.pack(0, 0, 4 if is_last else 0, stream_id, length)


class FrameReader:
    """Cuts a byte stream into frames, whatever the boundaries of its chunks; payload is never copied."""

    def __init__(self) -> None:
        self._partial_header = bytearray()
        self._frame = Frame(0, 0, 0, 0)
        self._payload_left = 0

    def whole_data_frame(self, chunk: bytes) -> int | None:
        """The stream of a chunk that is exactly one data frame without flags, as each small message is; else None."""
        if self._payload_left or self._partial_header or len(chunk) < HEADER_BYTES:
            return None
        kind, stream_id, length = _DATA_HEADER.unpack_from(chunk)
        return stream_id if kind == 0 and length == len(chunk) - HEADER_BYTES else None

    def feed(self, chunk: bytes) -> Iterator[FramePart]:
        """All parts that the chunk completes. Raises Misbehaved for an unknown version or type."""
        view, position, size = memoryview(chunk), 0, len(chunk)
        while position < size:
            if self._payload_left:
                end = min(size, position + self._payload_left)
                self._payload_left -= end - position
                yield FramePart(self._frame, view[position:end], self._payload_left == 0)
                position = end
                continue
            end = position + HEADER_BYTES - len(self._partial_header)
            if end > size:
                self._partial_header += view[position:]
                return
            if self._partial_header:
                self._begin_frame(self._partial_header + view[position:end], 0)
                self._partial_header.clear()
            else:
                self._begin_frame(view, position)
            position = end
            yield FramePart(self._frame, None, self._payload_left == 0)

    def _begin_frame(self, data: bytearray | memoryview, position: int) -> None:
        version, frame_type, flags, stream_id, length = HEADER.unpack_from(data, position)
        if version != 0 or frame_type > FrameType.GO_AWAY:
            text = f"not a yamux frame: version {version}, type {frame_type}; expected version 0, type 0 to 3"
            raise Misbehaved(RejectReason.BAD_FRAME, text)
        self._frame = Frame(frame_type, flags, stream_id, length)
        self._payload_left = length if frame_type == FrameType.DATA else 0
