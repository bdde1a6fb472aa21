"""The commands' side of the HTTP API: finding a running node, reading its documents, streaming an answer.

It does not know how results are shown. Synchronous: a command does one thing.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from kvasir_node.base.errors import CapacityError, DataError, KvasirError, Unreachable, UsageError
from kvasir_node.base.settings import Settings, data_dir_of, default_data_dir
from kvasir_node.surfaces.address import parse_address
from kvasir_node.surfaces.nodefile import is_claimed, read_node_file, why_none

CONNECT_TIMEOUT_S = 3.0
JSON_TYPE = "application/json"
READ_TIMEOUT_S = 30.0  # a node answers or sends a heartbeat well within


def node_url(settings: Settings, url: str | None) -> str:
    """--url, else the node of the data directory, else, for the default directory alone, where a node listens.

    Who names a data directory means its node and no other. Raises Unreachable when that one does not run or has no API.
    """
    if url is not None:
        return (url if "://" in url else f"http://{url}").rstrip("/")
    data_dir = data_dir_of(settings)
    found = read_node_file(data_dir)
    if found is not None and found.api is not None:
        return found.api
    if found is not None:
        raise Unreachable(f"the node on the data directory {data_dir} serves no API; start it without --no-api")
    if is_claimed(data_dir):
        raise Unreachable(f"{why_none(data_dir)}; ask again once it is ready")
    if data_dir.absolute() != default_data_dir().absolute():
        raise Unreachable(
            f"{why_none(data_dir)}; start one with `kvasir-node up --data-dir {data_dir}`, "
            "or name another node's API with --url"
        )
    if not settings.api.listen:
        raise Unreachable("no API address is set; give --url")
    return parse_address(settings.api.listen).url


class NodeClient:
    """One node's API. Every method raises Unreachable when no node answers.

    Over the standard library's http.client, with a connection for each request: to import httpx takes longer than all
    the rest of `status`. No proxy of the environment is used: the node is ours, often on loopback.
    """

    def __init__(self, url: str, key: str = "") -> None:
        self.url = url
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        try:
            parts = urlsplit(url)
            self._scheme, self._host, self._port = parts.scheme, parts.hostname, parts.port
        except ValueError as error:
            raise UsageError(f"--url is http://HOST:PORT; got {url!r}") from error
        if self._scheme not in ("http", "https") or not self._host or not url.isprintable():
            raise UsageError(f"--url is http://HOST:PORT; got {url!r}")
        self._prefix = parts.path.rstrip("/")

    def __enter__(self) -> NodeClient:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing stays open between two requests."""

    def get(self, path: str) -> dict[str, Any]:
        """One JSON document; an error answer is raised as the KvasirError it tells of."""
        return self._ask("GET", path)

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The same of a request, with a body or none."""
        return self._ask("POST", path, body)

    def stream_chat(self, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The chunks of POST /v1/chat/completions; closing the iterator ends the answer."""
        with self._answer("POST", "/v1/chat/completions", {**body, "stream": True}) as response:
            if response.status != 200:
                self._document(response)
            yield from _chunks(response)

    def pull(self, ref: str) -> Iterator[dict[str, Any]]:
        """How far POST /kvasir/v1/pull is, then `{"id"}`; raises the KvasirError that ended it."""
        with self._answer("POST", "/kvasir/v1/pull", {"model": ref}) as response:
            if response.status != 200:
                self._document(response)
            for line in response:
                try:
                    document = json.loads(line)
                except ValueError as error:
                    raise DataError(f"{self.url} does not answer like a node: a line is not JSON") from error
                if "error" in document:
                    raise _error_of(int(document.get("status", 500)), document["error"])
                yield document

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        with self._answer(method, path, body) as response:
            return self._document(response)

    @contextmanager
    def _answer(self, method: str, path: str, body: Mapping[str, Any] | None) -> Iterator[HTTPResponse]:
        kind = HTTPSConnection if self._scheme == "https" else HTTPConnection
        connection = kind(self._host or "", self._port, timeout=CONNECT_TIMEOUT_S)
        data = None if body is None else json.dumps(body).encode()
        headers = {**self._headers, "connection": "close"} | ({} if data is None else {"content-type": JSON_TYPE})
        try:
            connection.connect()
            connection.sock.settimeout(READ_TIMEOUT_S)
            connection.request(method, self._prefix + path, data, headers)
            with connection.getresponse() as response:  # which keeps the socket when the connection lets go of it
                yield response
        except (OSError, HTTPException) as error:
            raise self._unreachable(error) from error
        finally:
            connection.close()

    def _document(self, response: HTTPResponse) -> dict[str, Any]:
        try:
            document = json.loads(response.read())
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise DataError(f"{self.url} does not answer like a node: HTTP {response.status} without JSON")
        if "error" in document:
            raise _error_of(response.status, document["error"])
        return document

    def _unreachable(self, error: Exception) -> Unreachable:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return Unreachable(f"no node reachable at {self.url} ({reason}); start one with `kvasir-node up`")


def _chunks(response: HTTPResponse) -> Iterator[dict[str, Any]]:
    """Raises DataError when the stream ends without [DONE]."""
    for line in response:
        if line.rstrip() == b"data: [DONE]":
            return
        if not line.startswith(b"data: "):
            continue
        try:
            document = json.loads(line[6:])
        except ValueError as error:
            raise DataError("the answer holds a line that is not JSON") from error
        if "error" in document:
            raise _error_of(500, document["error"])
        yield document
    raise DataError("the answer ended in the middle: the node stopped or the connection was cut")


def _error_of(status: int, error: Any) -> KvasirError:
    message = str(error.get("message", error)) if isinstance(error, dict) else str(error)
    if status in (429, 503):
        return CapacityError(message)
    return UsageError(message) if 400 <= status < 500 else KvasirError(message)
