"""What a name, an id or a path of a model means on this machine, told without hashing or loading anything.

It does not know how a model is indexed, fetched or computed, and never imports what does: it serves commands that ask.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from kvasir_node.base.errors import DataError, NotFoundError, UsageError
from kvasir_node.base.ids import DAG_CBOR_CODEC, codec_of, parse_cid
from kvasir_node.store.blocks import BlockStore
from kvasir_node.store.catalog import DEMO, Catalog, CatalogEntry


def locate_model(data_dir: Path, ref: str) -> Path | None:
    """The folder that `up REF` would read; None = the embedded model, or one that has to be fetched first.

    Raises NotFoundError for a name that nobody knows, UsageError for a folder that is not there, DataError for a
    damaged catalog.
    """
    if ref == DEMO:
        return None
    catalog = _catalog(data_dir)
    entry = catalog.find(ref) if catalog is not None else None
    if entry is not None:
        return _folder_of(entry, data_dir)
    if os.sep in ref or Path(ref).is_dir():
        return _existing(Path(ref))
    if _is_model_id(ref):
        return None
    known = ", ".join(_names(catalog))
    raise NotFoundError(f"no model {ref!r} here; known: {known}; `kvasir-node add PATH` adds one", param="model")


def known_names(data_dir: Path) -> list[str]:
    """The models of `ls`, by name. Raises as `locate_model`."""
    return _names(_catalog(data_dir))


def _names(catalog: Catalog | None) -> list[str]:
    return [DEMO, *(each.name for each in (catalog.list() if catalog is not None else ()) if each.name != DEMO)]


def _catalog(data_dir: Path) -> Catalog | None:
    """None when nothing was ever kept there: asking must not make folders. Raises UsageError."""
    try:
        if not (data_dir / "catalog.cbor").exists():
            return None
        return Catalog(data_dir, BlockStore(data_dir), _refuse_to_index)
    except OSError as error:
        raise UsageError(f"the data directory {data_dir} cannot be used: {error.strerror}") from error


def _refuse_to_index(path: Path, *_: object) -> NoReturn:
    raise UsageError(f"{path} is only looked up here")


def _folder_of(entry: CatalogEntry, data_dir: Path) -> Path | None:
    if entry.path is None or (not entry.path.is_dir() and entry.path.is_relative_to(data_dir.absolute())):
        return None  # it came by content, so what is missing comes again
    return _existing(entry.path)


def _existing(folder: Path) -> Path:
    if not folder.is_dir():
        raise UsageError(f"no checkpoint folder at {folder.absolute()}", param="model")
    return folder.absolute()


def _is_model_id(ref: str) -> bool:
    with suppress(DataError):
        return codec_of(parse_cid(ref)) == DAG_CBOR_CODEC
    return False
