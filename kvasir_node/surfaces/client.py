"""The commands' side of the HTTP API: finding a running node, reading its documents, streaming an answer.

It does not know how results are shown. Synchronous: a command does one thing.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping
from typing import Any

import httpx

from kvasir_node.base.errors import CapacityError, DataError, KvasirError, Unreachable, UsageError
from kvasir_node.base.settings import Settings, data_dir_of, default_data_dir
from kvasir_node.surfaces.address import parse_address
from kvasir_node.surfaces.nodefile import read_node_file

CONNECT_TIMEOUT_S = 3.0
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
    if data_dir.absolute() != default_data_dir().absolute():
        raise Unreachable(
            f"no node runs on the data directory {data_dir}; start one with `kvasir-node up --data-dir {data_dir}`, "
            "or name another node's API with --url"
        )
    if not settings.api.listen:
        raise Unreachable("no API address is set; give --url")
    return parse_address(settings.api.listen).url


class NodeClient:
    """A context manager over one node's API. Every method raises Unreachable when no node answers."""

    def __init__(self, url: str, key: str = "") -> None:
        self.url = url
        headers = {"authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        try:  # never through a proxy of the environment: the node is ours, often on loopback
            self._client = httpx.Client(base_url=url, headers=headers, timeout=timeout, trust_env=False)
        except (httpx.InvalidURL, ValueError) as error:
            raise UsageError(f"--url is http://HOST:PORT; got {url!r}") from error

    def __enter__(self) -> NodeClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def get(self, path: str) -> dict[str, Any]:
        """One JSON document; an error answer is raised as the KvasirError it tells of."""
        return self._ask("GET", path)

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The same of a request, with a body or none."""
        return self._ask("POST", path, body)

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        try:
            response = self._client.request(method, path, json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from error
        return self._document(response)

    def stream_chat(self, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The chunks of POST /v1/chat/completions; closing the iterator ends the answer."""
        try:
            with self._client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
                if response.status_code != 200:
                    response.read()
                    self._document(response)
                yield from _chunks(response)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from error

    def pull(self, ref: str) -> Iterator[dict[str, Any]]:
        """How far POST /kvasir/v1/pull is, then `{"id"}`; raises the KvasirError that ended it."""
        try:
            with self._client.stream("POST", "/kvasir/v1/pull", json={"model": ref}) as response:
                if response.status_code != 200:
                    response.read()
                    self._document(response)
                for line in response.iter_lines():
                    document = json.loads(line)
                    if "error" in document:
                        raise _error_of(int(document.get("status", 500)), document["error"])
                    yield document
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from error
        except ValueError as error:
            raise DataError(f"{self.url} does not answer like a node: a line is not JSON") from error

    def _document(self, response: httpx.Response) -> dict[str, Any]:
        try:
            document = response.json()
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise DataError(f"{self.url} does not answer like a node: HTTP {response.status_code} without JSON")
        if "error" in document:
            raise _error_of(response.status_code, document["error"])
        return document

    def _unreachable(self, error: Exception) -> Unreachable:
        reason = str(error) or type(error).__name__
        return Unreachable(f"no node reachable at {self.url} ({reason}); start one with `kvasir-node up`")


def _chunks(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Raises DataError when the stream ends without [DONE]."""
    for line in response.iter_lines():
        if line == "data: [DONE]":
            return
        if not line.startswith("data: "):
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
