"""The files of a folder of this package, served as they are and nothing else.

It does not know what a page does. The files are read once and found by name in a table, so no request reaches the disk.
They hold no secret, so no key is needed for them.
"""

from __future__ import annotations

import gzip
import hashlib
import mimetypes
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from kvasir_node.base.errors import DataError

FILES_MAX = 64
BYTES_MAX = 16 << 20
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}\Z", re.ASCII)
_TYPES = {  # what the system says of these differs from system to system
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".wasm": "application/wasm",
    ".webmanifest": "application/manifest+json",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "cache-control": "no-cache",  # with the tag a reload is cheap and an update certain
    "vary": "accept-encoding",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class _File:
    media_type: str
    etag: str
    plain: bytes
    zipped: bytes


class StaticFiles:
    """The files of one flat folder; of no files when there is none. `headers` come on top of the usual ones."""

    def __init__(self, folder: Path, headers: Mapping[str, str]) -> None:
        """Raises DataError for a folder that holds more than a page does."""
        self._files = _read_all(folder)
        self._headers = {**_HEADERS, **headers}

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def answer(self, request: Request, name: str) -> Response | None:
        """None when there is no such file."""
        file = self._files.get(name)
        if file is None:
            return None
        if request.headers.get("if-none-match") == file.etag:
            return Response(status_code=304, headers={**self._headers, "etag": file.etag})
        headers, body = {**self._headers, "etag": file.etag, "content-type": file.media_type}, file.plain
        if "gzip" in request.headers.get("accept-encoding", ""):
            headers["content-encoding"], body = "gzip", file.zipped
        return Response(body, headers=headers)


def _read_all(folder: Path) -> dict[str, _File]:
    found: dict[str, _File] = {}
    left_bytes = BYTES_MAX
    for path in sorted(folder.glob("*")) if folder.is_dir() else ():
        if not path.is_file() or not _NAME.match(path.name):
            continue
        left_bytes -= path.stat().st_size
        if left_bytes < 0 or len(found) >= FILES_MAX:
            raise DataError(
                f"{folder} is no built page: more than {FILES_MAX} files or {BYTES_MAX} bytes; build it anew"
            )
        found[path.name] = _file_of(path)
    return found


def _file_of(path: Path) -> _File:
    plain = path.read_bytes()
    media_type = _TYPES.get(path.suffix) or mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    etag = f'"{hashlib.sha256(plain).hexdigest()[:32]}"'
    return _File(media_type, etag, plain, gzip.compress(plain, 9, mtime=0))
