"""The models on this machine's disk: where a data directory keeps them.

It does not know running nodes. What imports torch is imported when a checkpoint is indexed: `ls` must answer at once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import kvasir_node
from kvasir_node.base.errors import UsageError
from kvasir_node.base.settings import Settings, data_dir_of
from kvasir_node.store.blocks import BlockStore
from kvasir_node.store.catalog import Catalog, IndexedContent

UNFINISHED = ".part"  # ends the name of a fetched model's folder that is not whole yet
Progress = Callable[[int, int], None]


def demo_folder() -> Path:
    return Path(kvasir_node.__file__).parent / "demo"


def models_dir(settings: Settings) -> Path:
    """Where models that were fetched have their folders."""
    return (data_dir_of(settings) / "models").absolute()


def open_library(settings: Settings) -> tuple[BlockStore, Catalog]:
    """The blocks and the catalog of the data directory; makes their folders on first use.

    Raises UsageError when the directory cannot be used.
    """

    def index(path: Path, name: str | None, progress: Progress | None) -> IndexedContent:
        from kvasir_node.model.checkpoint import open_checkpoint
        from kvasir_node.model.indexing import index_checkpoint
        from kvasir_node.model.text import TextModel

        TextModel(path)  # hashing may take minutes; a tokenizer that cannot be read is told before, and not kept
        block_bytes = settings.store.block_bytes
        return index_checkpoint(open_checkpoint(path), name=name, block_bytes=block_bytes, progress=progress)

    data_dir = data_dir_of(settings)
    try:
        store = BlockStore(data_dir, quota_bytes=settings.store.quota_bytes)
        return store, Catalog(data_dir, store, index, demo_folder())
    except OSError as error:
        raise UsageError(
            f"the data directory {data_dir} cannot be used: {error.strerror}; choose another --data-dir"
        ) from error
