"""Writes a model's folder out of the store, file by file, so that being killed costs at most the file under way.

Every block is verified when it is read from the store, and every file that was there before is verified again when the
assembly begins. As soon as a file is complete its blocks are read from it, and their copies in the store are given up:
the model takes its room once. It does not know peers. All calls block on the disk; one thread at a time.

A folder is `ID.part` until it is whole; one that was whole (and lacks something now) stays `ID`, and its note always
tells the truth.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from kvasir_node.base.content import BlockSource, FilePiece, Piece
from kvasir_node.base.errors import CapacityError, DataError
from kvasir_node.base.ids import Cid, ExpertId, ModelId
from kvasir_node.model.checkpoint import SIDE_FILES, Checkpoint, expert_file, open_checkpoint
from kvasir_node.model.folder import (
    NOTE_FILE,
    TRUNK_FILE,
    WEIGHTS_INDEX,
    FolderNote,
    blob_sources,
    encode_note,
    expert_pieces,
    layer_file_header,
    layer_file_name,
    read_experts,
    read_note,
    weights_index,
)
from kvasir_node.model.indexing import CONFIG_FILE
from kvasir_node.model.manifest import LayerNode, Manifest
from kvasir_node.roles.content import read_block
from kvasir_node.roles.library import UNFINISHED
from kvasir_node.store.blocks import BlockStore
from kvasir_node.wire.blobs import BlobNode, BlobRef, decode_blob_node, is_node

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Part:
    """A file of the folder: the blobs it is made of, and what writes it once they are in the store."""

    name: str
    blobs: tuple[BlobRef, ...]
    write: Callable[[], None]

    @property
    def nbytes(self) -> int:
        return sum(blob.size for blob in self.blobs)


@dataclass(frozen=True, slots=True)
class AssembledModel:
    """An `IndexedContent`: a whole folder's blocks."""

    model: ModelId
    name: str
    blocks: Mapping[Cid, BlockSource]


class Assembly:
    """`held` = the experts that the folder is to have, `which` = a short word for that choice."""

    def __init__(
        self,
        store: BlockStore,
        models_dir: Path,
        manifest: Manifest,
        layers: Mapping[int, LayerNode],
        held: Iterable[ExpertId],
        which: str,
    ) -> None:
        self._store = store
        self._manifest = manifest
        self._layers = layers
        self._held: dict[int, list[int]] = {}
        for expert in held:
            self._held.setdefault(expert.layer, []).append(expert.index)
        self._which = which
        self._whole = models_dir / manifest.model
        self._unfinished = models_dir / f"{manifest.model}{UNFINISHED}"
        self._folder = self._whole if self._whole.is_dir() else self._unfinished
        self._note = FolderNote(manifest.model)
        self._present: dict[int, frozenset[int]] = {}  # experts in the files of the note
        self._blocks: dict[Cid, BlockSource] = {}

    def begin(self) -> None:
        """Makes the folder, or takes over what is right of one that was begun."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CapacityError(f"cannot make {self._folder}: {error.strerror}; check node.data_dir") from error
        for left in self._folder.glob("*.tmp"):
            left.unlink()
        self._note = read_note(self._folder) or self._note
        for name, blob in self._plain_files():
            if (self._folder / name).exists():
                self._take_over(self._folder / name, {blob.cid: (blob, (self._file_piece(name, blob),))})
        for layer, name in tuple(self._note.layer_files.items()):
            self._take_over_layer(layer, self._folder / name)

    def parts(self) -> tuple[Part, ...]:
        """All files, small ones first, with those that are there already left out."""
        plain = [
            Part(name, (blob,), lambda name=name, blob=blob: self._write_plain(name, blob))
            for name, blob in self._plain_files()
            if not (self._folder / name).exists()
        ]
        layers = [
            Part(self._layer_name(layer), self._blobs_of(layer), lambda layer=layer: self._write_layer(layer))
            for layer in self._manifest.layers
            if not self._present.get(layer, frozenset()).issuperset(self._experts_of(layer))
        ]
        return (*plain, *layers)

    @property
    def total_bytes(self) -> int:
        """Of all that the folder is to have."""
        manifest = self._manifest
        layers = sum(len(self._experts_of(layer)) * manifest.expert_bytes(layer) for layer in manifest.layers)
        return layers + sum(blob.size for _, blob in self._plain_files())

    def finish(self) -> tuple[Path, AssembledModel]:
        """Checks the folder as a whole and gives it its name.

        Raises DataError when what the manifest, the config and the trunk say does not fit together.
        """
        self._write_file(WEIGHTS_INDEX, weights_index(self._folder / TRUNK_FILE))
        self._write_file(NOTE_FILE, encode_note(self._note))
        _check_agreement(self._manifest, open_checkpoint(self._folder))
        if self._folder != self._whole:
            self._folder.rename(self._whole)
            self._folder = self._whole
        _sync_folder(self._whole.parent)
        self._remove_strangers()
        self._map_all()
        return self._whole, AssembledModel(self._manifest.model, self._manifest.name, self._blocks)

    # Files.

    def _plain_files(self) -> list[tuple[str, BlobRef]]:
        """Files whose bytes are a blob; names that this version does not know are left out, as nothing reads them."""
        known = [(name, blob) for name, blob in self._manifest.files.items() if name in SIDE_FILES]
        return [(CONFIG_FILE, self._manifest.config), *known, (TRUNK_FILE, self._manifest.trunk)]

    def _layer_name(self, layer: int) -> str:
        return layer_file_name(layer, self._which)

    def _experts_of(self, layer: int) -> list[int]:
        return self._held.get(layer, [])

    def _blobs_of(self, layer: int) -> tuple[BlobRef, ...]:
        return tuple(self._layers[layer].experts[index] for index in self._experts_of(layer))

    def _write_plain(self, name: str, blob: BlobRef) -> None:
        with self._new_file(name) as file:
            self._copy(blob, file)
            self._save_note()  # before the file has its name: only with the size of blocks can it be taken over
        self._adopt(blob, (self._file_piece(name, blob),))

    def _write_layer(self, layer: int) -> None:
        name = self._layer_name(layer)
        with self._new_file(name) as file:
            file.write(layer_file_header(layer, self._experts_of(layer), self._manifest.expert_parts(layer)))
            for blob in self._blobs_of(layer):
                self._copy(blob, file, expert_file(self._manifest.expert_parts(layer)))
        self._note = replace(self._note, layer_files={**self._note.layer_files, layer: name})
        self._save_note()
        self._present[layer] = frozenset(self._experts_of(layer))
        for blob, pieces in self._expert_sources(layer, self._folder / name).values():
            self._adopt(blob, pieces)

    def _copy(self, blob: BlobRef, file: BinaryIO, header: bytes = b"") -> None:
        """Appends a blob's bytes without the `header` that they must begin with."""
        cids, at = self._cids(blob), 0
        for number, cid in enumerate(cids):
            data = memoryview(read_block(self._store, cid))
            if number < len(cids) - 1:
                self._check_block_size(blob, len(data))
            skipped = min(len(data), max(0, len(header) - at))
            if data[:skipped] != header[at : at + skipped]:
                raise DataError(f"expert {blob.cid} does not begin with the header that its model prescribes")
            file.write(data[skipped:])
            at += len(data)
        if at != blob.size:
            raise DataError(f"blob {blob.cid} has {at} of the {blob.size} bytes that were promised")

    def _check_block_size(self, blob: BlobRef, size: int) -> None:
        if self._note.block_bytes not in (0, size):
            raise DataError(
                f"blob {blob.cid} has a block of {size} bytes, others have {self._note.block_bytes}: a model whose "
                "blocks differ in size cannot be kept in a folder"
            )
        self._note = replace(self._note, block_bytes=size)

    @contextmanager
    def _new_file(self, name: str) -> Iterator[BinaryIO]:
        """A file that has its name only when it is whole and on the disk."""
        temporary = self._folder / f"{name}.tmp"
        try:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._folder / name)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise CapacityError(f"cannot write {temporary}: {error.strerror}; free some disk space") from error

    def _write_file(self, name: str, data: bytes) -> None:
        with self._new_file(name) as file:
            file.write(data)

    def _save_note(self) -> None:
        self._write_file(NOTE_FILE, encode_note(self._note))

    def _remove_strangers(self) -> None:
        """Files of a choice of experts that is no longer the folder's."""
        kept = set(self._note.layer_files.values())
        for file in self._folder.glob("experts-*"):
            if file.name not in kept:
                file.unlink()

    # Blocks.

    def _node(self, blob: BlobRef) -> BlobNode | None:
        return decode_blob_node(read_block(self._store, blob.cid)) if is_node(blob.cid) else None

    def _cids(self, blob: BlobRef) -> tuple[Cid, ...]:
        node = self._node(blob)
        return (blob.cid,) if node is None else node.blocks

    def _file_piece(self, name: str, blob: BlobRef) -> FilePiece:
        return FilePiece(self._folder / name, 0, blob.size)

    def _expert_sources(self, layer: int, file: Path) -> dict[Cid, tuple[BlobRef, tuple[Piece, ...]]]:
        blobs = self._layers[layer].experts
        ranges = read_experts([(layer, file)])
        parts = self._manifest.expert_parts(layer)
        return {blobs[e.index].cid: (blobs[e.index], expert_pieces(parts, found)) for e, found in ranges.items()}

    def _adopt(self, blob: BlobRef, pieces: Sequence[Piece]) -> None:
        """From now on the blob's blocks are read from where the pieces lie."""
        sources = blob_sources(blob, self._node(blob), pieces, self._note.block_bytes)
        for cid, source in sources.items():
            self._store.map(cid, source)
            self._store.drop_own(cid)
        self._blocks |= sources

    def _take_over_layer(self, layer: int, file: Path) -> None:
        try:
            if self._take_over(file, self._expert_sources(layer, file)):
                self._present[layer] = frozenset(expert.index for expert in read_experts([(layer, file)]))
        except (DataError, IndexError, KeyError) as error:  # not ours, or of no layer or expert of the model
            logger.warning("%s is fetched again: %s", file, error)
            self._discard(file)

    def _take_over(self, file: Path, blobs: Mapping[Cid, tuple[BlobRef, tuple[Piece, ...]]]) -> bool:
        """Keeps a file all of whose blocks are right; of another one, its right blocks go to the store."""
        found: dict[Cid, BlockSource] = {}
        try:
            for blob, pieces in blobs.values():
                found |= blob_sources(blob, self._node(blob), pieces, self._note.block_bytes)
        except DataError as error:  # a node that is not here any more, or another size of blocks
            logger.warning("%s is fetched again: %s", file, error)
            self._discard(file)
            return False
        for cid, source in found.items():
            self._store.map(cid, source)
        wrong = [cid for cid in found if not self._store.check_mapped(cid)]
        if not wrong:
            for blob, pieces in blobs.values():
                self._adopt(blob, pieces)
            return True
        logger.warning("%s is damaged: %d of its %d blocks are fetched again", file, len(wrong), len(found))
        for cid in found.keys() - set(wrong):
            self._store.put(cid, read_block(self._store, cid))
        for cid in found:
            self._store.unmap(cid)
        self._discard(file)
        return False

    def _discard(self, file: Path) -> None:
        file.unlink(missing_ok=True)
        layer_files = {layer: name for layer, name in self._note.layer_files.items() if name != file.name}
        self._note = replace(self._note, layer_files=layer_files)
        self._save_note()

    def _map_all(self) -> None:
        """Once more, with the folder's last name, and with the nodes that only the store had."""
        for name, blob in self._plain_files():
            self._adopt(blob, (self._file_piece(name, blob),))
            self._keep_node(blob.cid)
        for layer, name in self._note.layer_files.items():
            for blob, pieces in self._expert_sources(layer, self._folder / name).values():
                self._adopt(blob, pieces)
        for layer in self._manifest.layers:
            self._keep_node(self._manifest.layer_nodes[layer])
            for blob in self._layers[layer].experts:
                if self._store.has(blob.cid):
                    self._keep_node(blob.cid)
        self._keep_node(Cid(self._manifest.model))

    def _keep_node(self, cid: Cid) -> None:
        """A list of blocks lies in no file of the folder: the index keeps its bytes."""
        if is_node(cid):
            data = read_block(self._store, cid)
            self._blocks[cid] = (data,)
            self._store.map(cid, (data,))
            self._store.drop_own(cid)


def _check_agreement(manifest: Manifest, checkpoint: Checkpoint) -> None:
    """Both came from strangers; the coordinator believes the one about routing and the other about shapes."""
    for name, promised, found in (
        ("family", manifest.family, checkpoint.family),
        ("layers", manifest.layers, checkpoint.layers),
        ("experts per layer", manifest.experts_per_layer, checkpoint.experts_per_layer),
        ("experts chosen", manifest.chosen_per_row, checkpoint.chosen_per_row),
        ("hidden size", manifest.hidden_size, checkpoint.hidden_size),
        ("maths", dict(manifest.maths), checkpoint.maths.to_dict()),
    ):
        if promised != found:
            raise DataError(f"the manifest of {manifest.name} says {name} {promised}, its config says {found}")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
