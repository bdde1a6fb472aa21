"""The Hugging Face hub as far as a download needs it, on localhost: a repository's list, its tree, its files."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

REPO = "org/tiny"
COMMIT = "c0ffee" + "0" * 34


class FakeHub:
    """Serves the files of one folder as REPO at COMMIT; the attributes make it misbehave."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.refusal: tuple[int, str] | None = None  # status and X-Error-Code of every answer about the repository
        self.cut_after: dict[str, int] = {}  # a file's next transfer breaks after so many bytes
        self.broken: set[str] = set()  # files whose transfer is refused
        self.served: dict[str, int] = {}  # bytes of each file's content
        self.ranges: list[tuple[str, str]] = []
        self.url = ""

    def document(self, path: str) -> Any:
        if path == f"/api/models/{REPO}/revision/main" or path == f"/api/models/{REPO}":
            siblings = [self._sibling(file) for file in self._files()]
            return {"_id": "1", "id": REPO, "modelId": REPO, "sha": COMMIT, "private": False, "siblings": siblings}
        if path == f"/api/models/{REPO}/tree/{COMMIT}":
            return [self._entry(file) for file in self._files()]
        return None

    def _files(self) -> list[Path]:
        return sorted(path for path in self.folder.rglob("*") if path.is_file())

    def name_of(self, file: Path) -> str:
        return file.relative_to(self.folder).as_posix()

    def _sibling(self, file: Path) -> dict[str, Any]:
        size = file.stat().st_size
        found: dict[str, Any] = {"rfilename": self.name_of(file), "size": size, "blobId": digest(file)[:40]}
        if file.suffix == ".safetensors":
            found["lfs"] = {"sha256": digest(file), "size": size, "pointerSize": 134}
        return found

    def _entry(self, file: Path) -> dict[str, Any]:
        size = file.stat().st_size
        found: dict[str, Any] = {"type": "file", "path": self.name_of(file), "size": size, "oid": digest(file)[:40]}
        if file.suffix == ".safetensors":
            found["lfs"] = {"oid": digest(file), "size": size, "pointerSize": 134}
        return found


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def etag(file: Path) -> str:
    return digest(file) if file.suffix == ".safetensors" else digest(file)[:40]


@contextmanager
def serve_hub(folder: Path) -> Iterator[FakeHub]:
    hub = FakeHub(folder)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, *, with_body: bool) -> None:
            path = self.path.partition("?")[0]
            prefix = f"/{REPO}/resolve/{COMMIT}/"
            if hub.refusal is not None:
                self._send(hub.refusal[0], b"{}", {"X-Error-Code": hub.refusal[1]})
            elif (document := hub.document(path)) is not None:
                self._send(200, json.dumps(document).encode(), {"Content-Type": "application/json"})
            elif path.startswith(prefix) and (file := hub.folder / path.removeprefix(prefix)).is_file():
                self._send_file(file, with_body=with_body)
            elif path.startswith(f"/api/models/{REPO}/revision/"):
                self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            else:
                self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

        def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def _send_file(self, file: Path, *, with_body: bool) -> None:
            name, data, first = hub.name_of(file), file.read_bytes(), 0
            if with_body and name in hub.broken:
                self._send(403, b"{}", {})
                return
            if with_body and (wanted := self.headers.get("Range")):
                hub.ranges.append((name, wanted))
                first = int(wanted.removeprefix("bytes=").partition("-")[0])
            self.send_response(206 if first else 200)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{etag(file)}"')
            self.send_header("Content-Length", str(len(data) - first))
            if first:
                self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
            self.end_headers()
            if not with_body:
                return
            body = data[first : first + hub.cut_after.pop(name, len(data))]
            hub.served[name] = hub.served.get(name, 0) + len(body)
            self.wfile.write(body)
            self.close_connection = len(body) < len(data) - first

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
