"""Blocks on this machine's disk: files named by their Cid, and byte ranges of checkpoints that were indexed in place.

It does not know models, blobs or peers. Every read is compared with the Cid before anyone sees it, so a torn write, a
damaged disk or an edited checkpoint costs a refetch or an error, never a wrong weight. All calls block on the disk:
roles run them in threads, and any number of threads may call at once.

Layout: `blocks/XY/CID` (XY = the third and second last letters of the Cid: 1024 folders, evenly filled) and `tmp/`.
A file's modification time says when the block was used last. When own files would exceed `quota_bytes`, those used
longest ago are deleted; those that somebody pinned never are.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from kvasir_node.base.content import BlockSource, read_source, source_bytes
from kvasir_node.base.errors import CapacityError, DataError
from kvasir_node.base.ids import Cid, digest_of, parse_cid

EVICT_TO_RATIO = 0.95  # of the quota: looking at every file is worth it only when it makes room for many blocks


class BlockStore:
    """All blocks under one folder. Several processes may use the same folder at once."""

    def __init__(self, directory: Path, *, quota_bytes: int = 0) -> None:
        """Makes the folders and clears what writers that were killed left behind. `quota_bytes` 0 = no quota."""
        self._quota_bytes = quota_bytes
        self._room = threading.Lock()  # of the three below
        self._used_bytes: int | None = None  # of own files; None until they were counted
        self._writing_bytes = 0  # of blocks that are being stored
        self._pins: dict[str, frozenset[Cid]] = {}
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
        return self._get_mapped(cid)

    def _get_mapped(self, cid: Cid) -> bytes | None:
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
        with self._room_for(len(data)):
            self._write(path, cid, data)

    def _write(self, path: Path, cid: Cid, data: bytes | memoryview) -> None:
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

    def pin(self, owner: str, cids: Iterable[Cid]) -> None:
        """Keeps blocks from being deleted for room until `unpin` of the same owner; more calls add up.

        Only in this process: another one that fetches into the same folder does not see it.
        """
        with self._room:
            self._pins[owner] = self._pins.get(owner, frozenset()).union(cids)

    def unpin(self, owner: str) -> None:
        """Never waits for the disk."""
        self._pins.pop(owner, None)

    def own(self) -> Iterator[tuple[Cid, int]]:
        """Every block that has a file here, and its bytes; what else lies in the folder is passed over."""
        for entry in self._own_files():
            with contextlib.suppress(FileNotFoundError):
                yield Cid(entry.name), entry.stat().st_size

    def check_own(self, cid: Cid) -> bool:
        """Whether the block's own file, if any, is right; a damaged one is deleted."""
        path = self._path(cid)
        return not path.exists() or self._get_own(cid) is not None

    def check_mapped(self, cid: Cid) -> bool:
        """Whether the mapped bytes, if any, are still what the Cid promises. Raises nothing for a file that is gone."""
        try:
            return self._get_mapped(cid) is not None or cid not in self._mapped
        except DataError:
            return False

    def drop_own(self, cid: Cid) -> None:
        """Deletes the block's own file; a mapping stays."""
        path = self._path(cid)
        with contextlib.suppress(FileNotFoundError):
            size = path.stat().st_size
            path.unlink()
            self._note_freed(size)

    def map(self, cid: Cid, source: BlockSource) -> None:
        """Lets the block be read from where its bytes already are. Not kept over a restart: the catalog is."""
        self._mapped[cid] = source

    def unmap(self, cid: Cid) -> None:
        self._mapped.pop(cid, None)

    def delete(self, cid: Cid) -> None:
        """Forgets a block: its file and its mapping; a checkpoint is never touched."""
        self.unmap(cid)
        self.drop_own(cid)

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
            if self._quota_bytes:
                with contextlib.suppress(OSError):
                    os.utime(path)
            return data
        self.drop_own(cid)
        return None

    # Room.

    def _own_files(self) -> Iterator[os.DirEntry[str]]:
        for folder in self._blocks.iterdir():
            with contextlib.suppress(NotADirectoryError, FileNotFoundError), os.scandir(folder) as entries:
                for entry in entries:
                    with contextlib.suppress(DataError):
                        parse_cid(entry.name)
                        yield entry

    @contextlib.contextmanager
    def _room_for(self, size: int) -> Iterator[None]:
        """Raises CapacityError when the quota leaves no room even without all that nobody uses."""
        if not self._quota_bytes:
            yield
            return
        with self._room:
            if self._used_bytes is None:
                self._used_bytes = sum(size for _, size in self.own())
            if self._used_bytes + self._writing_bytes + size > self._quota_bytes:
                self._evict(size)
            self._writing_bytes += size
        try:
            yield
            with self._room:
                self._used_bytes += size
        finally:
            with self._room:
                self._writing_bytes -= size

    def _note_freed(self, size: int) -> None:
        with self._room:
            if self._used_bytes is not None:
                self._used_bytes = max(0, self._used_bytes - size)

    def _evict(self, size: int) -> None:
        """Counts again, as other processes write here too, and deletes what was unused longest."""
        pinned = frozenset[Cid]().union(*list(self._pins.values()))
        files: list[tuple[int, int, Cid]] = []
        for entry in self._own_files():
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat()
                files.append((status.st_mtime_ns, status.st_size, Cid(entry.name)))
        used = self._writing_bytes + sum(each for _, each, _ in files)
        for _, each, cid in sorted(files):
            if used + size <= int(self._quota_bytes * EVICT_TO_RATIO):
                break
            if cid not in pinned:
                self._path(cid).unlink(missing_ok=True)
                used -= each
        self._used_bytes = used - self._writing_bytes
        if used + size > self._quota_bytes:
            raise CapacityError(
                f"a block of {size} bytes does not fit: {used} of the {self._quota_bytes} bytes of store.quota_bytes "
                "are taken by blocks in use; raise it, or let go of a model or slice"
            )

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
