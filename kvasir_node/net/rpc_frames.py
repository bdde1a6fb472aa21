"""The frames of a call stream: layout, assembly from chunks, and how errors travel.

Pure: it does not know streams, tasks or which calls are under way.

Layout, little-endian: u32 body length, u8 kind, u8 method, u64 id, then the body. The body of an ERROR is a u8 code
of `ErrorCode` and UTF-8 text of at most 500 bytes; for REFUSED the text is a RejectReason, a newline, and words. The
body of a GRANT is u32 calls and u32 bytes: what its receiver may have under way (rpc_credits.py); its id is 0.
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
from kvasir_node.net.rpc_credits import Grant

HEADER = struct.Struct("<IBBQ")
GRANT = struct.Struct("<II")
GRANT_BYTES_MAX = 2**32 - 1
ERROR_TEXT_BYTES_MAX = 500


class Kind(IntEnum):
    CALL = 1
    RESULT = 2
    ERROR = 3
    CANCEL = 4
    NOTICE = 5
    GRANT = 6


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
    """`dropped_bytes` > 0: the body had no room where it was to go; it is empty here, and the stream goes on."""

    kind: Kind
    method: int
    id: int
    body: memoryview
    dropped_bytes: int = 0


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


def encode_grant(grant: Grant) -> bytes:
    return GRANT.pack(grant.calls, min(grant.bytes, GRANT_BYTES_MAX))


def decode_grant(body: memoryview | bytes) -> Grant:
    """Raises Misbehaved when it is not the body of a GRANT."""
    if len(body) != GRANT.size:
        raise Misbehaved(RejectReason.BAD_FRAME, f"a GRANT of {len(body)} bytes; expected {GRANT.size}")
    return Grant(*GRANT.unpack(body))


_NOTHING = memoryview(b"")
_KINDS = {int(kind): kind for kind in Kind}  # many times quicker than the enum's own look-up


class FrameAssembler:
    """Puts frames together from chunks of any size; each body is copied once, into a buffer of its own.

    That buffer is made here, which also fills it with zeros, or it is the one that `place` was told of: then the copy
    is all there is.
    """

    def __init__(self, body_bytes_max: int) -> None:
        self._bytes_max = {int(kind): body_bytes_max for kind in Kind}
        self._bytes_max |= {int(Kind.ERROR): 1 + ERROR_TEXT_BYTES_MAX, int(Kind.CANCEL): 0, int(Kind.GRANT): GRANT.size}
        self._header = bytearray()
        self._frame: CallFrame | None = None
        self._body_bytes = 0  # of the frame under way
        self._filled = 0
        self._places: dict[int, memoryview] = {}

    @property
    def is_mid_frame(self) -> bool:
        return bool(self._header) or self._frame is not None

    def place(self, call_id: int, buffer: memoryview) -> None:
        """The RESULT of this call goes to the start of `buffer` (writable, of bytes); too large, it is dropped."""
        self._places[call_id] = buffer

    def displace(self, call_id: int) -> None:
        """The call is over: nothing more is written to its buffer, also when its RESULT is half here."""
        if not self._places or self._places.pop(call_id, None) is None:
            return
        if self._frame is not None and self._frame.kind is Kind.RESULT and self._frame.id == call_id:
            self._frame = self._frame._replace(body=_NOTHING, dropped_bytes=self._body_bytes)

    def feed(self, chunk: bytes | memoryview) -> Iterator[CallFrame]:
        """All frames that the chunk completes. Raises Misbehaved for a header no honest peer sends."""
        view, position = memoryview(chunk), 0
        while True:
            if self._frame is None:
                position = self._take_header(view, position)
                if self._frame is None:
                    return
            frame = self._frame
            count = min(self._body_bytes - self._filled, len(view) - position)
            if not frame.dropped_bytes:
                frame.body[self._filled : self._filled + count] = view[position : position + count]
            self._filled += count
            position += count
            if self._filled < self._body_bytes:
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
            raise Misbehaved(RejectReason.BAD_FRAME, f"unknown kind of frame: {kind}; expected 1 to {max(_KINDS)}")
        if length > self._bytes_max[kind]:
            text = f"a {Kind(kind).name} frame of {length} bytes; at most {self._bytes_max[kind]} are taken"
            raise Misbehaved(RejectReason.TOO_LARGE, text)
        self._body_bytes, self._filled = length, 0
        buffer = self._places.get(call_id) if self._places and kind == Kind.RESULT else None
        if buffer is None:
            self._frame = CallFrame(_KINDS[kind], method, call_id, memoryview(bytearray(length)))
        elif length > len(buffer):
            self._frame = CallFrame(_KINDS[kind], method, call_id, _NOTHING, length)
        else:
            self._frame = CallFrame(_KINDS[kind], method, call_id, buffer[:length])
