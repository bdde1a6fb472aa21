"""DATA_DIR/node.json: how the commands of one machine find the node that runs on a data directory.

It does not know HTTP. The file holds the ticket, a secret of the swarm, so only its owner may read it; it is
written when the node is ready and removed when it ends. A file whose process is gone counts as absent.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from kvasir_node.base.errors import UsageError

FILE_NAME = "node.json"
KEY_NAME = "node.key"  # the peer's identity, beside it


@dataclass(frozen=True, slots=True)
class NodeFile:
    pid: int
    api: str | None  # URL
    peer_id: str
    ticket: str


@contextmanager
def claimed(data_dir: Path) -> Iterator[None]:
    """Makes the directory and holds it, so that two nodes never share one; a killed process holds nothing.

    Raises UsageError when another process holds it or it cannot be made.
    """
    try:
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(data_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(f"the data directory {data_dir} cannot be used: {error.strerror}") from error
    try:
        _lock(handle, data_dir)
        yield
    finally:
        os.close(handle)


def _lock(handle: int, data_dir: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UsageError(f"a node already runs on {data_dir}; give this one another --data-dir") from error


def is_claimed(data_dir: Path) -> bool:
    """Whether a process holds it now."""
    try:
        handle = os.open(data_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def why_none(data_dir: Path) -> str:
    """What a person is told where `read_node_file` finds none; what to do about it is the caller's to add."""
    return f"{'a node is just starting' if is_claimed(data_dir) else 'no node runs'} on the data directory {data_dir}"


def is_running(data_dir: Path, pid: int) -> bool:
    """Whether that process, which held the directory, has not ended; one that nobody has waited for has."""
    return _is_alive(pid) and is_claimed(data_dir)


def write_node_file(data_dir: Path, found: NodeFile) -> None:
    """Atomic, mode 0600."""
    path = data_dir / FILE_NAME
    temporary = path.with_suffix(f".{found.pid}.tmp")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(asdict(found), file)
    temporary.replace(path)


def remove_node_file(data_dir: Path) -> None:
    """Only our own: a newer node's file stays."""
    found = _read(data_dir / FILE_NAME)
    if found is not None and found.pid == os.getpid():
        with suppress(FileNotFoundError):
            (data_dir / FILE_NAME).unlink()


def read_node_file(data_dir: Path) -> NodeFile | None:
    """The running node's file; None when there is none or its process is gone."""
    found = _read(data_dir / FILE_NAME)
    return found if found is not None and _is_alive(found.pid) else None


def _read(path: Path) -> NodeFile | None:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        found = NodeFile(fields["pid"], fields["api"], fields["peer_id"], fields["ticket"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    texts = (found.peer_id, found.ticket, "" if found.api is None else found.api)
    is_sound = type(found.pid) is int and found.pid > 0 and all(isinstance(text, str) for text in texts)
    return found if is_sound else None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True  # someone else's process; whether the API answers will tell
    return True
