"""Where the bytes of a block can be read from when they are not in a file of their own.

A block of an indexed checkpoint is a run of pieces: bytes kept inline (a header) and byte ranges of the original
shards. It does not know what a block is named, nor whether what is read is still right: the store checks that.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvasir_node.base.errors import DataError
from kvasir_node.base.ids import Cid, ModelId


@dataclass(frozen=True, slots=True)
class FilePiece:
    """`nbytes` bytes of a file from `offset` on."""

    file: Path
    offset: int
    nbytes: int


Piece = bytes | FilePiece
BlockSource = tuple[Piece, ...]


class IndexedContent(Protocol):
    """A model's blocks and where they are: all that a catalog needs to know of a checkpoint."""

    @property
    def model(self) -> ModelId: ...

    @property
    def name(self) -> str: ...

    @property
    def blocks(self) -> Mapping[Cid, BlockSource]: ...


def piece_bytes(piece: Piece) -> int:
    return piece.nbytes if isinstance(piece, FilePiece) else len(piece)


def source_bytes(source: Sequence[Piece]) -> int:
    return sum(map(piece_bytes, source))


def split_pieces(pieces: Sequence[Piece], chunk_bytes: int) -> Iterator[BlockSource]:
    """Cuts a run of pieces into consecutive sources of `chunk_bytes` (the last may be shorter); reads nothing."""
    chunk: list[Piece] = []
    room = chunk_bytes
    for piece in pieces:
        at, left = 0, piece_bytes(piece)
        while left:
            size = min(left, room)
            chunk.append(_part(piece, at, size))
            at, left, room = at + size, left - size, room - size
            if room == 0:
                yield tuple(chunk)
                chunk, room = [], chunk_bytes
    if chunk:
        yield tuple(chunk)


def read_source(source: Sequence[Piece]) -> bytes:
    """All bytes of a source; raises DataError that names the file when one is gone or too short."""
    parts = [_read_piece(piece) if isinstance(piece, FilePiece) else piece for piece in source]
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _part(piece: Piece, at: int, size: int) -> Piece:
    if isinstance(piece, FilePiece):
        return FilePiece(piece.file, piece.offset + at, size)
    return piece[at : at + size]


def _read_piece(piece: FilePiece) -> bytes:
    # A file is opened per piece: at 1 MiB a piece that costs less than 1 % of hashing it, and no table of
    # descriptors has to be bounded.
    try:
        with open(piece.file, "rb", buffering=0) as file:
            data = os.pread(file.fileno(), piece.nbytes, piece.offset)
            while len(data) < piece.nbytes:
                more = os.pread(file.fileno(), piece.nbytes - len(data), piece.offset + len(data))
                if not more:
                    break
                data += more
    except OSError as error:
        raise DataError(
            f"cannot read {piece.file}: {error.strerror}; put the file back or add the model again"
        ) from error
    if len(data) != piece.nbytes:
        raise DataError(
            f"{piece.file} ends before byte {piece.offset + piece.nbytes}: it changed since it was indexed; "
            "add the model again"
        )
    return data
