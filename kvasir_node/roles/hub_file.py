"""The hubs that a node has found, beyond its own life: one small file in the data directory.

The hub that the ticket names may be gone for good when the node is started again, and the swarm with it. It does not
know how hubs are found (roles/hub_search). A file that cannot be read is an empty one, with a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvasir_node.base.errors import Misbehaved, RejectReason
from kvasir_node.base.ids import PeerId
from kvasir_node.wire.codec import Fields, decode, encode
from kvasir_node.wire.readers import ADDRESSES_MAX, cut_addresses, read_address

logger = logging.getLogger(__name__)

FILE_NAME = "hubs.cbor"
VERSION = 1
FILE_BYTES_MAX = 1 << 20
HUBS_MAX = 16  # found last
_ID_CHARS_MAX = 64

Hubs = Mapping[PeerId, tuple[str, ...]]  # where each was reached, found last, last


class HubFile:
    """The file of one node, for one swarm at a time: a node that joins another one begins anew."""

    def __init__(self, path: Path, swarm: str) -> None:
        self._path = path
        self._swarm = swarm

    def read(self) -> Hubs:
        """Blocks on the disk."""
        try:
            with self._path.open("rb") as stream:
                swarm, hubs = _decode(stream.read(FILE_BYTES_MAX + 1))
        except FileNotFoundError:
            return {}
        except (OSError, Misbehaved) as error:
            logger.warning("%s cannot be read (%s); hubs found before are forgotten", self._path, error)
            return {}
        return hubs if swarm == self._swarm else {}

    def write(self, hubs: Hubs) -> None:
        """Replaces the file whole. Blocks on the disk; a file that cannot be written is a warning."""
        rows = [{"peer": peer, "addrs": cut_addresses(hubs[peer])} for peer in list(hubs)[-HUBS_MAX:]]
        draft = self._path.with_suffix(".tmp")
        try:
            draft.write_bytes(encode({"v": VERSION, "kind": "hubs", "swarm": self._swarm, "hubs": rows}))
            draft.replace(self._path)
        except OSError as error:
            logger.warning("the hubs that were found cannot be kept in %s: %s", self._path, error.strerror)


def _decode(data: bytes) -> tuple[str, Hubs]:
    """Raises Misbehaved for whatever we would not have written."""
    fields = Fields(decode(data, max_bytes=FILE_BYTES_MAX, what="the file of hubs"), "hubs")
    if fields.integer("v", 0, 1 << 31) != VERSION or fields.text("kind", 16) != "hubs":
        raise Misbehaved(RejectReason.BAD_MESSAGE, f"it is not of version {VERSION}")
    swarm, hubs = fields.text("swarm", 128), fields.items("hubs", HUBS_MAX, _hub_of)
    fields.end()
    return swarm, dict(hubs)


def _hub_of(value: Any) -> tuple[PeerId, tuple[str, ...]]:
    fields = Fields(value, "hub")
    found = PeerId(fields.text("peer", _ID_CHARS_MAX)), fields.items("addrs", ADDRESSES_MAX, read_address)
    fields.end()
    return found
