"""`/kvasir/blocks/1.0.0`: a want-list of blocks and its answer.

1. The asker calls WANT with a canonical CBOR list of 1 to 16 binary Cids, no Cid twice.
2. The answer holds, for each of them in order, a u32 (little endian) and that many bytes of the block.
3. A u32 of 0xFFFFFFFF says "I do not have it", 0xFFFFFFFE "not now": the answer was full, ask again.

It does not know streams or stores, and it never checks what a block holds: whoever asked compares the hash.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import Enum, IntEnum
from typing import Any, cast

from kvasir_node.base.errors import DataError, Misbehaved, RejectReason
from kvasir_node.base.ids import Cid, cid_from_bytes, cid_to_bytes
from kvasir_node.wire.codec import decode, encode

BLOCK_BYTES_MAX = 1 << 20
WANTED_MAX = 16  # Cids of one call
CALLS_MAX = 8  # of one stream at once: what a server grants
WANT_BYTES_MAX = 1 + WANTED_MAX * 38  # a short list of byte strings of 36 bytes
_LENGTH = struct.Struct("<I")
LENGTH_BYTES = _LENGTH.size


class BlocksMethod(IntEnum):
    WANT = 1


class Absent(Enum):
    """Why a block is not in an answer."""

    MISSING = 0xFFFFFFFF
    NOT_NOW = 0xFFFFFFFE


def encode_want(cids: Sequence[Cid]) -> bytes:
    return encode([cid_to_bytes(cid) for cid in cids])


def decode_want(body: bytes | memoryview) -> tuple[Cid, ...]:
    """Raises Misbehaved (too_large, too_many, bad_message) for anything but 1 to 16 different Cids."""
    value = decode(body, max_bytes=WANT_BYTES_MAX, what="a want-list")
    if type(value) is not list:
        raise Misbehaved(RejectReason.BAD_MESSAGE, f"a want-list must be a list; got {type(value).__name__}")
    items = cast("list[Any]", value)
    if not 1 <= len(items) <= WANTED_MAX:
        raise Misbehaved(RejectReason.TOO_MANY, f"a want-list names 1 to {WANTED_MAX} blocks; got {len(items)}")
    cids = tuple(map(_cid, items))
    if len(set(cids)) != len(cids):
        raise Misbehaved(RejectReason.BAD_MESSAGE, "a want-list names a block twice")
    return cids


def _cid(value: Any) -> Cid:
    try:
        if type(value) is bytes:
            return cid_from_bytes(value)
    except DataError:
        pass
    raise Misbehaved(RejectReason.BAD_MESSAGE, f"a want-list holds binary Cids; got {value!r:.60}")


def encode_answer(blocks: Sequence[bytes | memoryview | Absent]) -> list[bytes | memoryview]:
    """The parts of an answer, to be written one after the other; blocks are not copied."""
    parts: list[bytes | memoryview] = []
    for block in blocks:
        if isinstance(block, Absent):
            parts.append(_LENGTH.pack(block.value))
        else:
            parts += (_LENGTH.pack(len(block)), block)
    return parts


def decode_answer(body: bytes | memoryview, wanted_count: int) -> tuple[memoryview | Absent, ...]:
    """One entry per wanted block, as views of `body`; raises Misbehaved (bad_message) when it is anything else."""
    view = memoryview(body)
    answer: list[memoryview | Absent] = []
    at = 0
    for index in range(wanted_count):
        if len(view) - at < LENGTH_BYTES:
            raise _wrong(f"ends before block {index} of {wanted_count}")
        length = int(_LENGTH.unpack_from(view, at)[0])
        at += LENGTH_BYTES
        if length in (Absent.MISSING.value, Absent.NOT_NOW.value):
            answer.append(Absent(length))
            continue
        if length > min(BLOCK_BYTES_MAX, len(view) - at):
            raise _wrong(f"says that block {index} has {length} bytes; {len(view) - at} are left")
        answer.append(view[at : at + length])
        at += length
    if at != len(view):
        raise _wrong(f"has {len(view) - at} bytes after its last block")
    return tuple(answer)


def _wrong(what: str) -> Misbehaved:
    return Misbehaved(RejectReason.BAD_MESSAGE, f"an answer to a want-list {what}")
