"""Blocks on this machine's disk: files named by their Cid, and byte ranges of checkpoints that were indexed in place.

It does not know models, blobs or peers. Every read is compared with the Cid before anyone sees it, so a torn write, a
damaged disk or an edited checkpoint costs a refetch or an error, never a wrong weight. All calls block on the disk:
roles run them in threads, and any number of threads may call at once.

Layout: `blocks/XY/CID` (XY = the third and second last letters of the Cid: 1024 folders, evenly filled) and `tmp/`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from kvasir_node.base.content import BlockSource, read_source, source_bytes
from kvasir_node.base.errors import CapacityError, DataError
from kvasir_node.base.ids import Cid, digest_of


class BlockStore:
    """All blocks under one folder. Several processes may use the same folder at once."""

    def __init__(self, directory: Path) -> None:
        """Makes the folders and clears what writers that were killed left behind."""
        self._blocks = directory / "blocks"
        self._temporary = directory / "tmp"
        self._mapped: dict[Cid, BlockSource] = {}
        self._counter = itertools.count()
        self._blocks.mkdir(parents=True, exist_ok=True)
        self._temporary.mkdir(exist_ok=True)
        self._clear_temporary()

    def size(self, cid: Cid) -> int | None:
        """Bytes of the copy that is believed to be here, None without one; only `get` reads and checks it."""
        try:
            return self._path(cid).stat().st_size
        except FileNotFoundError:
            source = self._mapped.get(cid)
            return None if source is None else source_bytes(source)

    def has(self, cid: Cid) -> bool:
        return self.size(cid) is not None

    def get(self, cid: Cid) -> bytes | None:
        """The verified bytes, or None when there is no copy.

        A damaged copy of our own is deleted and counts as absent: it can be fetched again. Raises DataError when
        the only copy is a range of a checkpoint that changed or is gone.
        """
        if (data := self._get_own(cid)) is not None:
            return data
        source = self._mapped.get(cid)
        if source is None:
            return None
        data = read_source(source)
        if not _matches(cid, data):
            files = sorted({str(piece.file) for piece in source if not isinstance(piece, bytes)})
            raise DataError(
                f"block {cid} no longer matches {', '.join(files)}: the file changed since it was indexed; "
                "add the model again"
            )
        return data

    def put(self, cid: Cid, data: bytes | memoryview) -> None:
        """Stores a block, whole or not at all; a copy that is there already is left alone.

        Raises DataError when the bytes are not what the Cid promises, CapacityError when they cannot be written.
        """
        if not _matches(cid, data):
            raise DataError(f"{len(data)} bytes offered as block {cid} have another sha2-256; they were not stored")
        path = self._path(cid)
        if path.exists():
            return
        try:
            path.parent.mkdir(exist_ok=True)
            with self._temporary_file() as (descriptor, temporary):
                _write_all(descriptor, data)
                # The bytes must be on the disk before the name is. The folder is not synced: a name lost with the
                # power is a block to fetch again, and it costs as much again per block.
                os.fsync(descriptor)
                os.replace(temporary, path)
        except OSError as error:
            raise CapacityError(
                f"cannot store block {cid} of {len(data)} bytes in {self._blocks}: {error.strerror}; free some disk "
                "space, or set node.data_dir to a folder that can be written"
            ) from error

    def map(self, cid: Cid, source: BlockSource) -> None:
        """Lets the block be read from where its bytes already are. Not kept over a restart: the catalog is."""
        self._mapped[cid] = source

    def unmap(self, cid: Cid) -> None:
        self._mapped.pop(cid, None)

    def delete(self, cid: Cid) -> None:
        """Forgets a block: its file and its mapping; a checkpoint is never touched."""
        self.unmap(cid)
        self._path(cid).unlink(missing_ok=True)

    def _path(self, cid: Cid) -> Path:
        digest_of(cid)  # refuses what is not a Cid, so no name can leave the folder
        return self._blocks / cid[-3:-1] / cid

    def _get_own(self, cid: Cid) -> bytes | None:
        path = self._path(cid)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DataError(f"cannot read block {cid} at {path}: {error.strerror}; check the disk") from error
        if _matches(cid, data):
            return data
        path.unlink(missing_ok=True)
        return None

    @contextlib.contextmanager
    def _temporary_file(self) -> Iterator[tuple[int, Path]]:
        """A locked file that `_clear_temporary` of another process leaves alone; gone afterwards if still there."""
        while True:
            path = self._temporary / f"{os.getpid()}-{id(self)}-{next(self._counter)}"
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                if os.fstat(descriptor).st_nlink == 0:
                    continue  # cleared between open and lock
                yield descriptor, path
                return
            finally:
                os.close(descriptor)
                path.unlink(missing_ok=True)

    def _clear_temporary(self) -> None:
        # A lock ends with its process, also after kill -9, so a file that can be locked has no writer.
        for path in self._temporary.iterdir():
            with contextlib.suppress(FileNotFoundError, BlockingIOError), open(path, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


def _matches(cid: Cid, data: bytes | memoryview) -> bool:
    return hashlib.sha256(data).digest() == digest_of(cid)


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
