"""The frames of a call stream: layout, assembly from chunks, and how errors travel.

Pure: it does not know streams, tasks or which calls are under way.

Layout, little-endian: u32 body length, u8 kind, u8 method, u64 id, then the body. The body of an ERROR is a u8 code
of `ErrorCode` and UTF-8 text of at most 500 bytes; for REFUSED the text is a RejectReason, a newline, and words.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

from kvasir_node.base.errors import (
    CallTimeout,
    CapacityError,
    DataError,
    KvasirError,
    Misbehaved,
    NotFoundError,
    Overloaded,
    PeerError,
    RejectReason,
    Unreachable,
    UsageError,
)

HEADER = struct.Struct("<IBBQ")
ERROR_TEXT_BYTES_MAX = 500


class Kind(IntEnum):
    CALL = 1
    RESULT = 2
    ERROR = 3
    CANCEL = 4
    NOTICE = 5


class ErrorCode(IntEnum):
    """The only failures that travel; whatever else goes wrong at the other end is INTERNAL."""

    INTERNAL = 1
    USAGE = 2
    NOT_FOUND = 3
    OVERLOADED = 4
    CAPACITY = 5
    DATA = 6
    REFUSED = 7
    TIMEOUT = 8
    UNREACHABLE = 9


class CallFrame(NamedTuple):
    kind: Kind
    method: int
    id: int
    body: memoryview


_CLASSES: tuple[tuple[type[KvasirError], ErrorCode], ...] = (  # the first that fits
    (NotFoundError, ErrorCode.NOT_FOUND),
    (UsageError, ErrorCode.USAGE),
    (Overloaded, ErrorCode.OVERLOADED),
    (CapacityError, ErrorCode.CAPACITY),
    (DataError, ErrorCode.DATA),
    (Misbehaved, ErrorCode.REFUSED),
    (CallTimeout, ErrorCode.TIMEOUT),
    (Unreachable, ErrorCode.UNREACHABLE),
)


def pack_header(kind: Kind, method: int, call_id: int, body_bytes: int) -> bytes:
    return HEADER.pack(body_bytes, kind, method, call_id)


def encode_error(error: KvasirError) -> bytes:
    """The body of an ERROR frame."""
    code = next((code for kind, code in _CLASSES if isinstance(error, kind)), ErrorCode.INTERNAL)
    text = f"{error.reason.value}\n{error}" if isinstance(error, Misbehaved) else str(error)
    cut = text.encode()[:ERROR_TEXT_BYTES_MAX].decode("utf-8", "ignore")
    return bytes((code,)) + cut.encode()


def decode_error(body: memoryview | bytes) -> KvasirError:
    """The error that an ERROR frame's body describes. Raises Misbehaved when it is not one."""
    raw = bytes(body)
    try:
        code, text = ErrorCode(raw[0]), raw[1:].decode()
    except (IndexError, ValueError) as error:
        raise Misbehaved(RejectReason.BAD_FRAME, f"not the body of an error: {raw[:40].hex()}") from error
    if code is ErrorCode.REFUSED:
        reason, _, words = text.partition("\n")
        known = {each.value: each for each in RejectReason}
        return Misbehaved(known.get(reason, RejectReason.BAD_MESSAGE), words)
    kind = next((kind for kind, each in _CLASSES if each is code), None)
    return kind(text) if kind is not None else PeerError(f"the peer failed: {text}")


_KINDS = {int(kind): kind for kind in Kind}  # many times quicker than the enum's own look-up


class FrameAssembler:
    """Puts frames together from chunks of any size; each body goes into one buffer of its own, copied once."""

    def __init__(self, body_bytes_max: int) -> None:
        self._bytes_max = {int(kind): body_bytes_max for kind in Kind}
        self._bytes_max |= {int(Kind.ERROR): 1 + ERROR_TEXT_BYTES_MAX, int(Kind.CANCEL): 0}
        self._header = bytearray()
        self._frame: CallFrame | None = None
        self._filled = 0

    @property
    def is_mid_frame(self) -> bool:
        return bool(self._header) or self._frame is not None

    def feed(self, chunk: bytes | memoryview) -> Iterator[CallFrame]:
        """All frames that the chunk completes. Raises Misbehaved for a header no honest peer sends."""
        view, position = memoryview(chunk), 0
        while True:
            if self._frame is None:
                position = self._take_header(view, position)
                if self._frame is None:
                    return
            frame = self._frame
            count = min(len(frame.body) - self._filled, len(view) - position)
            frame.body[self._filled : self._filled + count] = view[position : position + count]
            self._filled += count
            position += count
            if self._filled < len(frame.body):
                return
            self._frame = None
            yield frame

    def _take_header(self, view: memoryview, position: int) -> int:
        end = position + HEADER.size - len(self._header)
        if end > len(view):
            self._header += view[position:]
            return len(view)
        if self._header:
            self._begin_frame(self._header + view[position:end], 0)
            self._header.clear()
        else:
            self._begin_frame(view, position)
        return end

    def _begin_frame(self, data: bytearray | memoryview, position: int) -> None:
        length, kind, method, call_id = HEADER.unpack_from(data, position)
        if kind not in self._bytes_max:
            raise Misbehaved(RejectReason.BAD_FRAME, f"unknown kind of frame: {kind}; expected 1 to 5")
        if length > self._bytes_max[kind]:
            text = f"a {Kind(kind).name} frame of {length} bytes; at most {self._bytes_max[kind]} are taken"
            raise Misbehaved(RejectReason.TOO_LARGE, text)
        self._frame = CallFrame(_KINDS[kind], method, call_id, memoryview(bytearray(length)))
        self._filled = 0
