"""Which slices a worker has fetched, in this run and earlier ones: what its polls tell hubs that it has.

Blocks stay on the disk when a lease ends, so who gets back what it had serves at once. It does not look at blocks: the
store keeps what it has room for, so a note may be out of date, and then the slice is fetched once more. One small file
in the data directory; one that cannot be read is an empty one, with a warning.
"""

from __future__ import annotations

import logging
from pathlib import Path

from kvasir_node.base.errors import Misbehaved, RejectReason
from kvasir_node.base.ids import Cid, ModelId, SliceId
from kvasir_node.store.blocks import BlockStore
from kvasir_node.wire.codec import Fields, decode, encode
from kvasir_node.wire.lists import SLICES_MAX, read_pairs, spell_pairs

logger = logging.getLogger(__name__)

FILE_NAME = "slices.cbor"
VERSION = 1
FILE_BYTES_MAX = 1 << 20


class SliceNotes:
    """At most SLICES_MAX; `path` None = they end with this run."""

    def __init__(self, path: Path | None, store: BlockStore) -> None:
        self._path = path
        self._store = store
        self._notes: dict[tuple[ModelId, SliceId], None] = {}  # newest last

    def pairs(self) -> tuple[tuple[ModelId, SliceId], ...]:
        return tuple(self._notes)

    def add(self, model: ModelId, part: SliceId) -> bool:
        """Whether that was not known, so that `write` has something to keep."""
        pair = (model, part)
        is_new = pair not in self._notes
        self._notes.pop(pair, None)
        self._notes[pair] = None
        if len(self._notes) > SLICES_MAX:
            del self._notes[next(iter(self._notes))]
        return is_new

    def read(self) -> None:
        """Takes up what earlier runs have noted of models that the store still knows. Blocks on the disk."""
        if self._path is None:
            return
        try:
            with self._path.open("rb") as stream:
                found = _decode(stream.read(FILE_BYTES_MAX + 1))
        except FileNotFoundError:
            return
        except (OSError, Misbehaved) as error:
            logger.warning("%s cannot be read (%s); slices fetched before are offered anew", self._path, error)
            return
        known = {model for model in {model for model, _ in found} if self._store.has(Cid(model))}  # its manifest
        earlier = {pair: None for pair in found if pair[0] in known and pair not in self._notes}
        self._notes = {**earlier, **self._notes}

    def write(self) -> None:
        """Replaces the file whole. Blocks on the disk; a file that cannot be written is a warning."""
        if self._path is None:
            return
        draft = self._path.with_suffix(".tmp")
        try:
            draft.write_bytes(encode({"v": VERSION, "kind": "slices", "have": spell_pairs(tuple(self._notes))}))
            draft.replace(self._path)
        except OSError as error:
            logger.warning("which slices are on the disk cannot be kept in %s: %s", self._path, error.strerror)


def _decode(data: bytes) -> tuple[tuple[ModelId, SliceId], ...]:
    """Raises Misbehaved for whatever we would not have written."""
    fields = Fields(decode(data, max_bytes=FILE_BYTES_MAX, what="the file of slices"), "slices")
    if fields.integer("v", 0, 1 << 31) != VERSION or fields.text("kind", 16) != "slices":
        raise Misbehaved(RejectReason.BAD_MESSAGE, f"it is not of version {VERSION}")
    found = read_pairs(fields, "have")
    fields.end()
    return found
