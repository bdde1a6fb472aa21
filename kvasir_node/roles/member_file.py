"""The members that a node has met, beyond its own life: one small file in the data directory.

Every address of the ticket may be dead when the node is started again, and the swarm live elsewhere. It does not know
who is worth remembering (decide/remembering). A file that cannot be read is an empty one, with a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvasir_node.base.errors import Misbehaved, RejectReason
from kvasir_node.base.ids import PeerId
from kvasir_node.decide.remembering import ADDRESSES_MAX, MEMBERS_MAX, KnownMember
from kvasir_node.wire.codec import Fields, decode, encode
from kvasir_node.wire.readers import bad, read_address

logger = logging.getLogger(__name__)

FILE_NAME = "members.cbor"
VERSION = 1
FILE_BYTES_MAX = 1 << 20
_ID_CHARS_MAX = 64

Members = Mapping[PeerId, KnownMember]  # met last, last


class MemberFile:
    """The file of one node, for one swarm at a time: a node that joins another one begins anew."""

    def __init__(self, path: Path, swarm: str) -> None:
        self._path = path
        self._swarm = swarm

    def read(self) -> Members:
        """Blocks on the disk."""
        try:
            with self._path.open("rb") as stream:
                swarm, members = _decode(stream.read(FILE_BYTES_MAX + 1))
        except FileNotFoundError:
            return {}
        except (OSError, Misbehaved) as error:
            logger.warning("%s cannot be read (%s); members met before are forgotten", self._path, error)
            return {}
        return members if swarm == self._swarm else {}

    def write(self, members: Members) -> None:
        """Replaces the file whole. Blocks on the disk; a file that cannot be written is a warning."""
        rows = [
            {"peer": peer, "hub": known.is_hub, "addrs": list(known.addresses[:ADDRESSES_MAX])}
            for peer, known in list(members.items())[-MEMBERS_MAX:]
        ]
        draft = self._path.with_suffix(".tmp")
        try:
            draft.write_bytes(encode({"v": VERSION, "kind": "members", "swarm": self._swarm, "members": rows}))
            draft.replace(self._path)
        except OSError as error:
            logger.warning("the members that were met cannot be kept in %s: %s", self._path, error.strerror)


def _decode(data: bytes) -> tuple[str, Members]:
    """Raises Misbehaved for whatever we would not have written."""
    fields = Fields(decode(data, max_bytes=FILE_BYTES_MAX, what="the file of members"), "members")
    if fields.integer("v", 0, 1 << 31) != VERSION or fields.text("kind", 16) != "members":
        raise Misbehaved(RejectReason.BAD_MESSAGE, f"it is not of version {VERSION}")
    swarm, members = fields.text("swarm", 128), fields.items("members", MEMBERS_MAX, _member_of)
    fields.end()
    return swarm, dict(members)


def _member_of(value: Any) -> tuple[PeerId, KnownMember]:
    fields = Fields(value, "member")
    peer = PeerId(fields.text("peer", _ID_CHARS_MAX))
    known = KnownMember(fields.items("addrs", ADDRESSES_MAX, read_address), fields.boolean("hub"))
    fields.end()
    if not known.addresses:
        raise bad("a member with an address", value)
    return peer, known
