"""What is on this disk: how much it is, whether it is still right, and what can go.

It does not know the network: what is damaged here is listed, and fetched again by whoever has a swarm. All calls block
on the disk. The reader of manifests, which imports torch, is imported when there is one: `ls` must answer at once.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvasir_node.base.content import source_bytes
from kvasir_node.base.errors import DataError, NotFoundError
from kvasir_node.base.ids import DAG_CBOR_CODEC, Cid, ModelId, codec_of, parse_cid
from kvasir_node.roles.library import UNFINISHED
from kvasir_node.store.blocks import BlockStore
from kvasir_node.store.catalog import Catalog, CatalogEntry
from kvasir_node.wire.blobs import BlobRef, decode_blob_node, is_node

if TYPE_CHECKING:
    from kvasir_node.model.manifest import Manifest

Progress = Callable[[int, int], None]
"""(bytes read, bytes in all)."""


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model of which something is on this disk; `path` None = blocks alone, fetched to serve slices of it."""

    model: ModelId
    name: str
    path: Path | None
    nbytes: int


@dataclass(frozen=True, slots=True)
class Verified:
    """`dropped` blocks were damaged and are deleted; `damaged` files hold so many blocks that are not right."""

    checked_bytes: int
    dropped: tuple[Cid, ...]
    damaged: tuple[tuple[Path, int], ...]
    to_fetch: tuple[ModelId, ...]  # models whose folder is ours and damaged: a swarm can mend them
    to_add: tuple[CatalogEntry, ...]  # checkpoints of the user's that changed: only adding them again helps

    @property
    def is_right(self) -> bool:
        return not self.dropped and not self.damaged and not self.to_add


def stored_models(store: BlockStore, catalog: Catalog) -> list[StoredModel]:
    """Those of the catalog, then those of which only blocks are here."""
    entries = catalog.list()
    blocks = {entry.model: entry.name for entry in entries if entry.path is None}
    known = {entry.model for entry in entries}
    blocks |= {model: manifest.name for model, manifest in _own_manifests(store) if model not in known}
    found = [StoredModel(e.model, e.name, e.path, _folder_bytes(e.path)) for e in entries if e.path is not None]
    for model, name in blocks.items():
        sizes = (store.size(cid) for cid in content_of(store, model))
        found.append(StoredModel(model, name, None, sum(size or 0 for size in sizes)))
    return found


def _folder_bytes(folder: Path) -> int:
    total = 0
    with suppress(OSError):
        for file in folder.iterdir():
            with suppress(OSError):
                total += file.stat().st_size if file.is_file() else 0
    return total


def _own_manifests(store: BlockStore) -> Iterator[tuple[ModelId, Manifest]]:
    for cid, _ in store.own():
        if codec_of(cid) == DAG_CBOR_CODEC:
            with suppress(DataError):
                data = store.get(cid)
                if data is not None:
                    yield ModelId(cid), _manifest(data)


def _manifest(data: bytes) -> Manifest:
    from kvasir_node.model.manifest import decode_manifest

    return decode_manifest(data)


def content_of(store: BlockStore, model: ModelId) -> set[Cid]:
    """Every block that a model is made of, as far as the lists that are here tell."""
    from kvasir_node.model.manifest import decode_layer_node

    cids = {Cid(model)}
    with suppress(DataError):
        manifest = _manifest(store.get(Cid(model)) or b"")
        blobs = [manifest.config, manifest.trunk, *manifest.files.values()]
        for layer, node in manifest.layer_nodes.items():
            cids.add(node)
            with suppress(DataError):
                blobs += decode_layer_node(store.get(node) or b"", manifest, layer).experts
        cids |= _blocks_of(store, blobs)
    return cids


def _blocks_of(store: BlockStore, blobs: Iterable[BlobRef]) -> set[Cid]:
    cids: set[Cid] = set()
    for blob in blobs:
        cids.add(blob.cid)
        if is_node(blob.cid):
            with suppress(DataError):
                cids |= set(decode_blob_node(store.get(blob.cid) or b"").blocks)
    return cids


def verify(
    store: BlockStore, catalog: Catalog, models_dir: Path, ref: str | None = None, progress: Progress | None = None
) -> Verified:
    """Reads every byte of a model, or of all, and compares it with its address; damaged blocks of our own are deleted.

    Raises NotFoundError for a ref of which nothing is here.
    """
    entries, own = _what_to_verify(store, catalog, ref)
    indexed = [(entry, catalog.index(entry)) for entry in entries if entry.path is not None]
    total = sum(size for _, size in own) + sum(source_bytes(s) for _, blocks in indexed for s in blocks.values())
    done, dropped, damaged = 0, list[Cid](), Counter[Path]()
    to_fetch, to_add = list[ModelId](), list[CatalogEntry]()
    for cid, size in own:
        if not store.check_own(cid):
            dropped.append(cid)
        done = _advance(progress, done + size, total)
    for entry, blocks in indexed:
        wrong = 0
        for cid, source in blocks.items():
            store.map(cid, source)
            if not store.check_mapped(cid):
                wrong += 1
                damaged.update({piece.file for piece in source if not isinstance(piece, bytes)})
            done = _advance(progress, done + source_bytes(source), total)
        if wrong or not blocks:
            is_ours = entry.path == models_dir / entry.model
            to_fetch.append(entry.model) if is_ours else to_add.append(entry)
    return Verified(done, tuple(dropped), tuple(sorted(damaged.items())), tuple(to_fetch), tuple(to_add))


def _what_to_verify(
    store: BlockStore, catalog: Catalog, ref: str | None
) -> tuple[Sequence[CatalogEntry], list[tuple[Cid, int]]]:
    if ref is None:
        return catalog.list(), list(store.own())
    entry = catalog.find(ref)
    model = entry.model if entry is not None else _id_in_store(store, ref)
    content = content_of(store, model)
    return ([entry] if entry else []), [(cid, size) for cid, size in store.own() if cid in content]


def _id_in_store(store: BlockStore, ref: str) -> ModelId:
    with suppress(DataError):
        if store.has(parse_cid(ref)):
            return ModelId(Cid(ref))
    raise NotFoundError(f"nothing of a model {ref!r} is here; `kvasir-node ls` lists what is", param="model")


def _advance(progress: Progress | None, done: int, total: int) -> int:
    if progress is not None:
        progress(done, total)
    return done


def remove(store: BlockStore, catalog: Catalog, models_dir: Path, ref: str) -> int:
    """Forgets a model and frees the room of what was fetched of it; a checkpoint of the user's is not touched.

    Returns the bytes freed. Raises NotFoundError for a ref of which nothing is here.
    """
    entry = catalog.find(ref)
    model = entry.model if entry is not None else _id_in_store(store, ref)
    if entry is not None:
        catalog.map_if_fresh(entry)  # the lists of its blocks may lie in its index alone
    content = content_of(store, model)
    kept = {cid for other in _own_models(store, catalog) if other != model for cid in content_of(store, other)}
    if entry is not None:
        catalog.remove(ref)
    freed = sum(size for cid, size in list(store.own()) if cid in content - kept)
    for cid in content - kept:
        store.drop_own(cid)
    for folder in (models_dir / model, models_dir / f"{model}{UNFINISHED}"):
        if folder.is_dir():
            freed += _folder_bytes(folder)
            shutil.rmtree(folder)
    return freed


def _own_models(store: BlockStore, catalog: Catalog) -> set[ModelId]:
    return {model for model, _ in _own_manifests(store)} | {entry.model for entry in catalog.list()}
