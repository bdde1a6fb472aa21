"""Which swarm this node is in: its secret, kept in the data directory, and where it wants to connect.

It does not know how membership is proved or connections are made. While one secret replaces another, the old one is
kept in a second file until its time is over, so that nodes which have only that one are still members meanwhile.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from kvasir_node.base.errors import DataError, UsageError
from kvasir_node.roles.peers import join_targets
from kvasir_node.wire.swarm_keys import (
    SECRET_BYTES_MAX,
    SwarmKeys,
    new_secret,
    read_secret,
    replacing_secret,
    swarm_id,
)
from kvasir_node.wire.ticket import is_ticket, read_ticket

logger = logging.getLogger(__name__)

FILE_NAME = "swarm.key"
OLD_FILE_NAME = "swarm.key.old"  # seconds since 1970 until which it counts (8, big-endian), then the secret
_UNTIL_BYTES = 8


class Renewal(Enum):
    """What a node does about its secret when it starts."""

    KEEP = "keep"
    SWARM = "swarm"  # a swarm of its own
    SECRET = "secret"  # another secret for the same swarm


@dataclass(frozen=True, slots=True)
class SwarmKey:
    """The swarm's secret, and addresses (with /p2p/PEER) of peers in it; the secret that it replaced, and until when
    that counts, in seconds since 1970."""

    secret: bytes
    join: tuple[str, ...]
    old_secret: bytes = b""
    old_until: float = 0.0

    def valid_keys(self, wall: Callable[[], float] = time.time) -> tuple[SwarmKeys, ...]:
        """Those that count now, the newest first."""
        old = (read_secret(self.old_secret),) if self.old_secret and wall() < self.old_until else ()
        return (read_secret(self.secret), *old)


def read_join(join: Sequence[str]) -> tuple[bytes | None, tuple[str, ...]]:
    """The secret of the tickets in `join`, if there are any, and all addresses.

    Of tickets that differ only in what they let a node do, the one that lets it do most counts. Raises UsageError for
    tickets that are damaged or of different swarms, and for addresses that name no peer.
    """
    addresses: list[str] = []
    given: bytes | None = None
    for item in join:
        if not is_ticket(item):
            addresses.append(item)
            continue
        ticket = read_ticket(item)
        if given is not None and read_secret(given).entry != read_secret(ticket.secret).entry:
            raise UsageError(
                "the tickets given with --join are of different swarms, or of one before and after its "
                "secret was replaced; a node is in one swarm: give the newest ticket alone"
            )
        given = _stronger(given, ticket.secret)
        addresses += ticket.addresses
    join_targets(addresses)
    return given, tuple(dict.fromkeys(addresses))


def read_swarm_key(
    join: Sequence[str],
    data_dir: Path,
    *,
    renewal: Renewal = Renewal.KEEP,
    old_secret_s: float,
    wall: Callable[[], float] = time.time,
) -> SwarmKey:
    """The secret of the tickets in `join`, else the one kept in the data directory, else a new one.

    A ticket's secret replaces the kept one, so that the node stays in that swarm; where it is a new secret of the same
    swarm the kept one counts for another `old_secret_s`. Raises as `read_join`, UsageError when the secret cannot be
    kept or may not be renewed, DataError for a damaged or unreadable file.
    """
    given, addresses = read_join(join)
    path = data_dir / FILE_NAME
    may_replace = given is not None or renewal is Renewal.SWARM
    kept = _read(path, may_replace=may_replace)
    secret = _chosen(given, kept, renewal)
    old_path = data_dir / OLD_FILE_NAME
    if kept is not None and _is_replaced(kept, secret):
        logger.info("swarm %s has a new secret; the old one counts for %.1f h", swarm_id(secret), old_secret_s / 3600)
        _write(old_path, int(wall() + old_secret_s).to_bytes(_UNTIL_BYTES, "big") + kept)
    elif kept is not None and swarm_id(kept) != swarm_id(secret):
        logger.warning("this node leaves swarm %s and joins %s", swarm_id(kept), swarm_id(secret))
        old_path.unlink(missing_ok=True)
    if secret != kept:
        _write(path, secret)
    old_until, old_secret = _read_old(old_path)
    return SwarmKey(secret, addresses, old_secret, old_until)


def _chosen(given: bytes | None, kept: bytes | None, renewal: Renewal) -> bytes:
    if renewal is not Renewal.KEEP and given is not None:
        raise UsageError("a node that joins with a ticket takes the secret in it; make a new one without --join TICKET")
    if renewal is Renewal.SWARM:
        return new_secret()
    if renewal is Renewal.SECRET:
        if kept is None:
            raise UsageError("this node is in no swarm yet, so there is no secret to replace; start it without that")
        return replacing_secret(kept)
    if given is not None and kept is not None and read_secret(given).entry == read_secret(kept).entry:
        return _stronger(kept, given)
    return given or kept or new_secret()


def _stronger(one: bytes | None, other: bytes) -> bytes:
    """Of two spellings of one secret the one that lets its holder do more; the first of equals."""
    if one is None:
        return other
    return max(one, other, key=lambda secret: (read_secret(secret).is_root, len(read_secret(secret).private)))


def _is_replaced(kept: bytes, secret: bytes) -> bool:
    old, new = read_secret(kept), read_secret(secret)
    return old.name == new.name and old.entry != new.entry


def _read(path: Path, *, may_replace: bool) -> bytes | None:
    """The kept secret; None when there is none, or a damaged one is to be replaced."""
    try:
        kept = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; give this user access to it") from error
    try:
        read_secret(kept)
    except UsageError as error:
        if may_replace:
            return None
        raise DataError(
            f"{path} is damaged: {error}; join with a ticket to replace it, or start with --new-swarm"
        ) from error
    return kept


def _read_old(path: Path) -> tuple[float, bytes]:
    """(until, secret); nothing where there is none that can be read: it only ever lasts a while."""
    try:
        content = path.read_bytes()[: _UNTIL_BYTES + SECRET_BYTES_MAX + 1]
        read_secret(content[_UNTIL_BYTES:])
    except FileNotFoundError:
        return 0.0, b""
    except (OSError, UsageError) as error:
        logger.warning("%s cannot be read (%s); nodes that have only the old secret are strangers now", path, error)
        return 0.0, b""
    return float(int.from_bytes(content[:_UNTIL_BYTES], "big")), content[_UNTIL_BYTES:]


def _write(path: Path, content: bytes) -> None:
    """Mode 0600; a crash leaves the old file or the new one."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"cannot keep the swarm's key at {path}: {error.strerror}; choose another data dir") from error
