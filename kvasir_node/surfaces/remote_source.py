"""The screen's source that is a node somewhere else, read through its API, as `top` does.

It does not know how a picture is drawn. A node that does not answer is asked again and again; meanwhile the last
picture says for how long it has been silent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any, TypeVar

import httpx
import msgspec
import trio

from kvasir_node.base.errors import DataError
from kvasir_node.base.snapshot import ExpertLayerSnapshot, NodeSnapshot, RequestSnapshot, RequestsSnapshot
from kvasir_node.surfaces.event_words import event_line
from kvasir_node.surfaces.invitation import Invitation
from kvasir_node.surfaces.phone_invitation import TIMEOUT_S, api_client, ask_invitation
from kvasir_node.surfaces.picture import Picture
from kvasir_node.surfaces.sources import Curves, is_paused, lending_told

STATUS_S = 0.5
REQUESTS_S = 1.0
EXPERTS_S = 2.0
RETRY_S = 2.0  # after a failure
SILENT_EVENTS_S = 30.0  # three heartbeats
LINES_MAX = 200

Document = TypeVar("Document")


class _Experts(msgspec.Struct):
    layers: tuple[ExpertLayerSnapshot, ...]


class RemoteSource:
    """Made by `open_remote`. All of it is of the loop."""

    def __init__(self, client: httpx.AsyncClient, first: NodeSnapshot, ticket: str) -> None:
        self._client, self._snapshot, self._ticket = client, first, ticket
        self._curves = Curves()
        self._experts: tuple[ExpertLayerSnapshot, ...] = ()
        self._requests: tuple[RequestSnapshot, ...] = ()
        self._lines: deque[str] = deque(maxlen=LINES_MAX)
        self._heard_at = trio.current_time()
        self._trouble = ""

    def picture(self) -> Picture:
        return Picture(
            self._snapshot,
            str(self._client.base_url).rstrip("/"),
            tuple(self._lines),
            "Events",
            experts=self._experts,
            requests=self._requests,
            speeds=tuple(self._curves.speeds),
            pressures=tuple(self._curves.pressures),
            ticket=self._ticket,
            silent_s=trio.current_time() - self._heard_at,
            trouble=self._trouble,
        )

    async def lend_or_not(self) -> str:
        verb = "resume" if is_paused(self._snapshot) else "pause"
        try:
            response = await self._client.post(f"/kvasir/v1/{verb}")
            if response.status_code != 200:
                return str(response.json()["error"]["message"])
            self._note_status(read_document(response.content, NodeSnapshot))
        except (httpx.HTTPError, DataError, ValueError, KeyError, TypeError) as error:
            return f"{verb} was not taken: {_words(error)}"
        return lending_told(self._snapshot)

    async def invite_phone(self) -> Invitation:
        return await ask_invitation(self._client)

    def start(self, nursery: trio.Nursery) -> None:
        nursery.start_soon(self._poll, "status", NodeSnapshot, self._note_status, STATUS_S)
        if "coordinator" in self._snapshot.roles:
            nursery.start_soon(self._poll, "experts", _Experts, self._note_experts, EXPERTS_S)
            nursery.start_soon(self._poll, "requests", RequestsSnapshot, self._note_requests, REQUESTS_S)
        nursery.start_soon(self._follow_events)

    def _note_status(self, snapshot: NodeSnapshot) -> None:
        self._snapshot = snapshot
        self._heard_at = trio.current_time()
        self._trouble = ""
        self._curves.note(snapshot, self._heard_at)

    def _note_experts(self, document: _Experts) -> None:
        self._experts = document.layers

    def _note_requests(self, document: RequestsSnapshot) -> None:
        self._requests = document.running

    async def _poll(self, name: str, kind: type[Document], note: Callable[[Document], None], interval_s: float) -> None:
        while True:
            try:
                response = await self._client.get(f"/kvasir/v1/{name}")
                if response.status_code != 200:
                    raise DataError(f"{name}: HTTP {response.status_code}")
                note(read_document(response.content, kind))
            except (httpx.HTTPError, DataError) as error:
                self._trouble = _words(error)
                await trio.sleep(RETRY_S)
            await trio.sleep(interval_s)

    async def _follow_events(self) -> None:
        """From the oldest that the node keeps, and after a cut from where it was."""
        last = "0"
        while True:
            try:
                async for name, data in _events(self._client, last):
                    last = name or last
                    self._lines.append(event_line(data))
            except (httpx.HTTPError, DataError):
                pass  # `_poll` tells the person
            except Exception as error:  # whatever a library of HTTP may raise besides: without events the rest goes on
                at = datetime.now().strftime("%H:%M:%S")
                self._lines.append(f"{at} warning top: events were cut: {type(error).__name__}: {error}")
            await trio.sleep(RETRY_S)


def read_document(content: bytes, kind: type[Document]) -> Document:
    """A document of a node as a value; fields that this version does not know are left out. Raises DataError."""
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.MsgspecError as error:
        raise DataError(f"the node's answer cannot be read; is it another version? {error}") from error


async def _events(client: httpx.AsyncClient, last: str) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Ids and documents of server-sent events, as they come, after the one with id `last`."""
    headers = {"last-event-id": last}
    timeout = httpx.Timeout(TIMEOUT_S, read=SILENT_EVENTS_S)
    async with client.stream("GET", "/kvasir/v1/events", headers=headers, timeout=timeout) as response:
        if response.status_code != 200:
            raise DataError(f"events: HTTP {response.status_code}")
        name = ""
        async for line in response.aiter_lines():
            field, _, value = line.partition(":")
            if field == "id":
                name = value.strip()
            elif field == "data":
                yield name, read_document(value.encode(), dict[str, Any])


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


@asynccontextmanager
async def open_remote(url: str, key: str, first: NodeSnapshot, ticket: str) -> AsyncIterator[RemoteSource]:
    """The node at an API's URL, asked again and again while the block lasts; `first` is what it answered before."""
    async with api_client(url, key) as client, trio.open_nursery() as nursery:
        source = RemoteSource(client, first, ticket)
        source.start(nursery)
        yield source
        nursery.cancel_scope.cancel()
