"""The models this machine knows: id, name, where the checkpoint lies, and the index that says which byte is where.

An index is kept on disk, so a second start hashes nothing as long as size and modification time of every indexed file
are the same. It does not know how a checkpoint is read (an `Indexer` is passed in) nor what a block means; the store
still compares every block it reads, so a wrong guess here costs an error and never a wrong weight.

Files: `catalog.cbor` (all models, small), `index/ID.cbor` (the blocks of one), `catalog.lock`. Canonical CBOR, replaced
whole; several processes may use one folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvasir_node.base.content import BlockSource, FilePiece, IndexedContent, Piece
from kvasir_node.base.errors import CapacityError, DataError, Misbehaved, NotFoundError, UsageError
from kvasir_node.base.ids import Cid, ModelId, cid_from_bytes, cid_to_bytes, parse_cid
from kvasir_node.store.blocks import BlockStore
from kvasir_node.wire.codec import Fields, decode, encode

DEMO = "demo"
VERSION = 1
MODELS_MAX = 4096
CATALOG_BYTES_MAX = 8 << 20
INDEX_BYTES_MAX = 512 << 20  # about 80 bytes a block: 6 million blocks of 1 MiB
_FILES_MAX = 8192
_BLOCKS_MAX = 1 << 23
_CATALOG_ADVICE = " and add the models again with `kvasir-node add PATH`: only names and indexes are in it, no weights"
_INDEX_ADVICE = ": the model is indexed again when it is next used by its name, and keeps its id"

Progress = Callable[[int, int], None]
Indexer = Callable[[Path, str | None, Progress | None], IndexedContent]
"""(folder, name or None for its own choice, progress) -> the model's blocks; raises UsageError or DataError."""


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A known model; `path` None = it was fetched, its blocks are in the store."""

    model: ModelId
    name: str
    path: Path | None


@dataclass(frozen=True, slots=True)
class _Stamp:
    """What a file looked like when it was indexed."""

    file: Path
    size: int
    modified_ns: int


class Catalog:
    """All calls block on the disk (`add` for as long as hashing takes): roles run them in threads."""

    def __init__(self, directory: Path, store: BlockStore, indexer: Indexer, demo: Path | None = None) -> None:
        """`demo` is the folder of the embedded model, known by the name "demo" without being added."""
        self._file = directory / "catalog.cbor"
        self._lock = directory / "catalog.lock"
        self._indexes = directory / "index"
        self._store = store
        self._indexer = indexer
        self._demo = demo
        self._opened: dict[ModelId, dict[Cid, BlockSource]] = {}  # mapped into the store by this process
        self._indexes.mkdir(parents=True, exist_ok=True)

    def list(self) -> tuple[CatalogEntry, ...]:
        """All known models, by name; the embedded one only once it was opened. Raises DataError for a damaged file."""
        return tuple(sorted(self._read(), key=lambda entry: entry.name))

    def find(self, ref: str) -> CatalogEntry | None:
        """By name, id or path."""
        path = Path(ref).absolute()
        matches = (lambda e: e.name == ref, lambda e: e.model == ref, lambda e: e.path == path)
        entries = self._read()
        return next((entry for match in matches for entry in entries if match(entry)), None)

    def add(self, path: Path, *, name: str | None = None, progress: Progress | None = None) -> CatalogEntry:
        """Indexes a checkpoint and serves its blocks from where it lies; adding it again indexes it again.

        Raises UsageError when another checkpoint has the name or it is empty, and whatever the indexer raises.
        """
        if name is not None and not name.strip():
            raise UsageError(f"the name of a model has at least one letter, got {name!r}", param="name")
        folder = path.absolute()
        content = self._indexer(folder, name, progress)
        entry = CatalogEntry(content.model, content.name, folder)
        with self._locked():
            known = self._read()
            replaced = [e for e in known if e.path == folder or e.model == entry.model]
            kept = [e for e in known if e not in replaced]
            self._check_free(entry, kept)
            self._write(self._index_file(entry.model), _encode_index(content.blocks))
            self._write_entries([*kept, entry])
        for old in replaced:
            if old.model != entry.model:
                self._forget(old.model)
        self._map(entry.model, content.blocks)
        return entry

    def note_fetched(self, model: ModelId, name: str) -> CatalogEntry:
        """Remembers a model whose blocks are in the store; one that is known by a path stays so."""
        with self._locked():
            known = self._read()
            if (found := next((e for e in known if e.model == model), None)) is not None:
                return found
            entry = CatalogEntry(model, name, None)
            self._check_free(entry, known)
            self._write_entries([*known, entry])
        return entry

    def add_fetched(self, content: IndexedContent, path: Path) -> CatalogEntry:
        """Remembers a model that came by content and now lies at `path`; a name that is taken gets a part of the id."""
        with self._locked():
            kept = [e for e in self._read() if e.model != content.model]
            entry = CatalogEntry(content.model, content.name, path)
            if content.name == DEMO or any(e.name == content.name for e in kept):
                entry = CatalogEntry(content.model, f"{content.name}-{content.model[-8:]}", path)
            self._check_free(entry, kept)
            self._write(self._index_file(entry.model), _encode_index(content.blocks))
            self._write_entries([*kept, entry])
        self._map(entry.model, content.blocks)
        return entry

    def open(self, ref: str, *, progress: Progress | None = None) -> CatalogEntry:
        """Makes a model's blocks readable from the store, by name, id, or the path of a checkpoint (added if new).

        A checkpoint that changed is indexed again when it is opened by name or path, and gets a new id. Raises
        NotFoundError for an unknown ref, DataError for an id whose checkpoint changed or is gone.
        """
        if ref == DEMO and self._demo is not None:
            return self._open_folder(self._demo.absolute(), DEMO, progress)
        entry = self.find(ref)
        if entry is None:
            if os.sep in ref or Path(ref).is_dir():
                return self.add(Path(ref), progress=progress)
            embedded = [DEMO] if self._demo is not None else []  # known before it is in the list
            known = ", ".join(dict.fromkeys([*embedded, *(entry.name for entry in self.list())])) or "none yet"
            raise NotFoundError(
                f"no model {ref!r} here; known: {known}; `kvasir-node add PATH` adds one", param="model"
            )
        if entry.path is None or self.map_if_fresh(entry):
            return entry
        if ref == entry.model:
            raise DataError(
                f"the checkpoint of {entry.name} at {entry.path} changed since it was indexed, so it is no longer "
                f"{entry.model}; put the files back, or add it again"
            )
        return self.add(entry.path, name=entry.name, progress=progress)

    def remove(self, ref: str) -> CatalogEntry:
        """Forgets a model and its index; the checkpoint itself and fetched blocks are not touched."""
        entry = self.find(ref)
        if entry is None:
            raise NotFoundError(f"no model {ref!r} here; `kvasir-node ls` lists those that are", param="model")
        with self._locked():
            self._write_entries([e for e in self._read() if e.model != entry.model])
        self._forget(entry.model)
        return entry

    def _open_folder(self, folder: Path, name: str, progress: Progress | None) -> CatalogEntry:
        entry = self.find(name)
        if entry is not None and entry.path == folder and self.map_if_fresh(entry):
            return entry
        if entry is not None and entry.path != folder:
            self.remove(name)  # the program was installed elsewhere since
        return self.add(folder, name=name, progress=progress)

    def _check_free(self, entry: CatalogEntry, others: Iterable[CatalogEntry]) -> None:
        others = list(others)
        if len(others) >= MODELS_MAX:
            raise CapacityError(f"{len(others)} models are known, at most {MODELS_MAX}; `kvasir-node rm` forgets one")
        holder = next((e for e in others if e.name == entry.name), None)
        if holder is not None or (
            entry.name == DEMO and self._demo is not None and entry.path != self._demo.absolute()
        ):
            where = holder.path if holder is not None else self._demo
            raise UsageError(
                f"the name {entry.name!r} is taken by the model at {where}; give another one", param="name"
            )

    def index(self, entry: CatalogEntry) -> Mapping[Cid, BlockSource]:
        """Where each block of a model was when it was indexed; nothing when there is no index."""
        file = self._index_file(entry.model)
        return _decode_index(self._read_file(file, INDEX_BYTES_MAX), file)[1] if file.exists() else {}

    def map_if_fresh(self, entry: CatalogEntry) -> bool:
        """Makes a model's blocks readable; False when its index is missing or a file is not as it was.

        Then only what the index itself holds can be read: lists of blocks, which are needed to mend the model.
        """
        file = self._index_file(entry.model)
        if not file.exists():
            return False
        stamps, blocks = _decode_index(self._read_file(file, INDEX_BYTES_MAX), file)
        if any(_stamp(stamp.file) != stamp for stamp in stamps):
            inline = {cid: source for cid, source in blocks.items() if all(isinstance(p, bytes) for p in source)}
            self._map(entry.model, inline)
            return False
        self._map(entry.model, blocks)
        return True

    def _map(self, model: ModelId, blocks: Mapping[Cid, BlockSource]) -> None:
        self._opened.setdefault(model, {}).update(blocks)
        for cid, source in blocks.items():
            self._store.map(cid, source)

    def _forget(self, model: ModelId) -> None:
        self._index_file(model).unlink(missing_ok=True)
        for cid in self._opened.pop(model, {}):
            self._store.unmap(cid)
        for blocks in self._opened.values():  # blocks that the models share
            for cid, source in blocks.items():
                self._store.map(cid, source)

    def _index_file(self, model: ModelId) -> Path:
        return self._indexes / f"{parse_cid(model)}.cbor"

    def _read(self) -> list[CatalogEntry]:
        if not self._file.exists():
            return []
        data = self._read_file(self._file, CATALOG_BYTES_MAX)
        with _damaged(self._file, _CATALOG_ADVICE):
            fields = _open_document(data, "catalog", CATALOG_BYTES_MAX)
            entries = fields.items("models", MODELS_MAX, _decode_entry)
            fields.end()
        return list(entries)

    def _write_entries(self, entries: Iterable[CatalogEntry]) -> None:
        models = [[entry.model, entry.name, str(entry.path) if entry.path else None] for entry in entries]
        self._write(self._file, encode({"v": VERSION, "kind": "catalog", "models": models}))

    def _read_file(self, file: Path, bytes_max: int) -> bytes:
        with file.open("rb") as stream:
            return stream.read(bytes_max + 1)

    def _write(self, file: Path, data: bytes) -> None:
        """Replaces a file whole. Called with the lock held, so the temporary name is ours, and is used again."""
        temporary = file.with_suffix(".tmp")
        try:
            with temporary.open("wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, file)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise CapacityError(
                f"cannot write {file}: {error.strerror}; free some disk space, or set node.data_dir to a folder that "
                "can be written"
            ) from error

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock.open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


@contextlib.contextmanager
def _damaged(file: Path, advice: str) -> Iterator[None]:
    try:
        yield
    except (Misbehaved, DataError) as error:
        raise DataError(f"{file} is damaged or of another version ({error}); delete it{advice}") from error


def _open_document(data: bytes, kind: str, bytes_max: int) -> Fields:
    fields = Fields(decode(data, max_bytes=bytes_max, what=f"the {kind} file"), kind)
    fields.integer("v", VERSION, VERSION)
    if fields.text("kind", 16) != kind:
        raise DataError(f"{kind}.kind must be {kind!r}")
    return fields


def _decode_entry(value: Any) -> CatalogEntry:
    match value:
        case [str(model), str(name), str() | None as path]:
            return CatalogEntry(ModelId(parse_cid(model)), name, Path(path) if path is not None else None)
        case _:
            raise DataError("catalog.models must hold [id, name, path]")


def _stamp(file: Path) -> _Stamp | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return _Stamp(file, status.st_size, status.st_mtime_ns)


def _encode_index(blocks: Mapping[Cid, BlockSource]) -> bytes:
    """Raises DataError when an indexed file has vanished meanwhile."""
    numbers: dict[Path, int] = {}

    def plain(piece: Piece) -> bytes | list[int]:
        if isinstance(piece, bytes):
            return piece
        return [numbers.setdefault(piece.file, len(numbers)), piece.offset, piece.nbytes]

    rows = [[cid_to_bytes(cid), [plain(piece) for piece in source]] for cid, source in blocks.items()]
    stamps: list[list[Any]] = []
    for file in numbers:
        if (stamp := _stamp(file)) is None:
            raise DataError(f"{file} vanished while it was indexed; put it back and add the model again")
        stamps.append([str(file), stamp.size, stamp.modified_ns])
    return encode({"v": VERSION, "kind": "index", "files": stamps, "blocks": rows})


def _decode_index(data: bytes, file: Path) -> tuple[tuple[_Stamp, ...], dict[Cid, BlockSource]]:
    with _damaged(file, _INDEX_ADVICE):
        fields = _open_document(data, "index", INDEX_BYTES_MAX)
        stamps = fields.items("files", _FILES_MAX, _decode_stamp)
        headers: dict[bytes, bytes] = {}  # the same few headers occur once per expert

        def piece(value: Any) -> Piece:
            match value:
                case bytes():
                    return headers.setdefault(value, value)
                case [int(number), int(offset), int(nbytes)] if 0 <= number < len(stamps) and min(offset, nbytes) >= 0:
                    return FilePiece(stamps[number].file, offset, nbytes)
                case _:
                    raise DataError("index.blocks must hold bytes or [file, offset, nbytes]")

        def row(value: Any) -> tuple[Cid, BlockSource]:
            match value:
                case [bytes(raw), list(pieces)]:
                    return cid_from_bytes(raw), tuple(map(piece, pieces))
                case _:
                    raise DataError("index.blocks must hold [Cid, pieces]")

        blocks = dict(fields.items("blocks", _BLOCKS_MAX, row))
        fields.end()
    return stamps, blocks


def _decode_stamp(value: Any) -> _Stamp:
    match value:
        case [str(file), int(size), int(modified_ns)]:
            return _Stamp(Path(file), size, modified_ns)
        case _:
            raise DataError("index.files must hold [path, size, modified_ns]")
