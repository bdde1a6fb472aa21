"""The models on this machine's disk, for `add` and `ls`: where a data directory keeps them.

It does not know running nodes. Everything heavy is imported when it is used, so that commands which only ask a
running node start without it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvasir_node
from kvasir_node.base.settings import Settings
from kvasir_node.surfaces.nodefile import data_dir_of

if TYPE_CHECKING:
    from kvasir_node.store.catalog import Catalog

Progress = Callable[[int, int], None]
MODELS_SCHEMA = "kvasir.models/1"


def demo_folder() -> Path:
    return Path(kvasir_node.__file__).parent / "demo"


def open_catalog(settings: Settings) -> Catalog:
    """The catalog of the data directory; makes its folders on first use."""
    from kvasir_node.model.checkpoint import open_checkpoint
    from kvasir_node.model.indexing import index_checkpoint
    from kvasir_node.store.blocks import BlockStore
    from kvasir_node.store.catalog import Catalog

    def index(path: Path, name: str | None, progress: Progress | None) -> Any:
        block_bytes = settings.store.block_bytes
        return index_checkpoint(open_checkpoint(path), name=name, block_bytes=block_bytes, progress=progress)

    data_dir = data_dir_of(settings)
    return Catalog(data_dir, BlockStore(data_dir), index, demo_folder())


def models_document(catalog: Catalog) -> dict[str, Any]:
    """What `ls --json` prints; the embedded model is listed before its first use too, then without an id."""
    models = [{"id": e.model, "name": e.name, "path": str(e.path) if e.path else None} for e in catalog.list()]
    if not any(model["name"] == "demo" for model in models):
        models.insert(0, {"id": None, "name": "demo", "path": str(demo_folder())})
    return {"schema": MODELS_SCHEMA, "models": models}
