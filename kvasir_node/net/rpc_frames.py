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


class FrameAssembler:
    """Puts frames together from chunks of any size; each body goes into one buffer of its own, copied once."""

    def __init__(self, body_bytes_max: int) -> None:
        self._body_bytes_max = body_bytes_max
        self._header = bytearray()
        self._frame: CallFrame | None = None
        self._filled = 0

    @property
    def is_mid_frame(self) -> bool:
        return bool(self._header) or self._frame is not None

    def feed(self, chunk: bytes | memoryview) -> Iterator[CallFrame]:
        """All frames that the chunk completes. Raises Misbehaved for a header no honest peer sends."""
        view, position = memoryview(chunk), 0
        while position < len(view) or self._is_complete():
            if self._frame is None:
                position = self._feed_header(view, position)
            else:
                position = self._feed_body(view, position, self._frame.body)
            if self._is_complete() and self._frame is not None:
                frame, self._frame = self._frame, None
                yield frame

    def _is_complete(self) -> bool:
        return self._frame is not None and self._filled == len(self._frame.body)

    def _feed_header(self, view: memoryview, position: int) -> int:
        end = min(len(view), position + HEADER.size - len(self._header))
        self._header += view[position:end]
        if len(self._header) == HEADER.size:
            self._begin_frame()
        return end

    def _feed_body(self, view: memoryview, position: int, body: memoryview) -> int:
        end = min(len(view), position + len(body) - self._filled)
        body[self._filled : self._filled + end - position] = view[position:end]
        self._filled += end - position
        return end

    def _begin_frame(self) -> None:
        length, kind, method, call_id = HEADER.unpack(self._header)
        self._header.clear()
        if not Kind.CALL <= kind <= Kind.NOTICE:
            raise Misbehaved(RejectReason.BAD_FRAME, f"unknown kind of frame: {kind}; expected 1 to 5")
        bytes_max = {Kind.ERROR: 1 + ERROR_TEXT_BYTES_MAX, Kind.CANCEL: 0}.get(Kind(kind), self._body_bytes_max)
        if length > bytes_max:
            text = f"a {Kind(kind).name} frame of {length} bytes; at most {bytes_max} are taken"
            raise Misbehaved(RejectReason.TOO_LARGE, text)
        self._frame = CallFrame(Kind(kind), method, call_id, memoryview(bytearray(length)))
        self._filled = 0
