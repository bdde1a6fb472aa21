"""Which swarm this node is in: its secret, kept in the data directory, and where it wants to connect.

It does not know how membership is proved or connections are made.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvasir_node.base.errors import DataError, UsageError
from kvasir_node.roles.peers import join_targets
from kvasir_node.wire.ticket import PREFIX, SECRET_BYTES, read_ticket, swarm_id

logger = logging.getLogger(__name__)

FILE_NAME = "swarm.key"


@dataclass(frozen=True, slots=True)
class SwarmKey:
    """The swarm's secret, and addresses (with /p2p/PEER) of peers in it."""

    secret: bytes
    join: tuple[str, ...]


def read_join(join: Sequence[str]) -> tuple[bytes | None, tuple[str, ...]]:
    """The secret of the tickets in `join`, if there are any, and all addresses.

    Raises UsageError for tickets that are damaged or of different swarms, and for addresses that name no peer.
    """
    addresses: list[str] = []
    given: bytes | None = None
    for item in join:
        if not item.startswith(PREFIX):
            addresses.append(item)
            continue
        ticket = read_ticket(item)
        if given not in (None, ticket.secret):
            raise UsageError("the tickets given with --join are of different swarms; a node is in one")
        given = ticket.secret
        addresses += ticket.addresses
    join_targets(addresses)
    return given, tuple(dict.fromkeys(addresses))


def read_swarm_key(join: Sequence[str], data_dir: Path) -> SwarmKey:
    """The secret of the tickets in `join`, else the one kept in the data directory, else a new one.

    A ticket's secret replaces the kept one, so that the node stays in that swarm. Raises as `read_join`, UsageError
    when the secret cannot be kept, DataError for a damaged or unreadable file.
    """
    given, addresses = read_join(join)
    path = data_dir / FILE_NAME
    kept = _read(path, given)
    secret = given or kept or secrets.token_bytes(SECRET_BYTES)
    if kept is not None and secret != kept:
        logger.warning("this node leaves swarm %s and joins %s, as its ticket says", swarm_id(kept), swarm_id(secret))
    if secret != kept:
        _write(path, secret)
    return SwarmKey(secret, addresses)


def _read(path: Path, given: bytes | None) -> bytes | None:
    """The kept secret; None when there is none, or a ticket replaces a damaged one."""
    try:
        kept = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; give this user access to it") from error
    if len(kept) == SECRET_BYTES:
        return kept
    if given is not None:
        return None
    raise DataError(
        f"{path} must hold {SECRET_BYTES} bytes, it has {len(kept)}; join with a ticket to replace it, or remove it "
        "for a new swarm"
    )


def _write(path: Path, secret: bytes) -> None:
    """Mode 0600; a crash leaves the old file or the new one."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(secret)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"cannot keep the swarm's key at {path}: {error.strerror}; choose another data dir") from error
