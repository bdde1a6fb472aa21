"""GET /kvasir/v1/events: what happens in the node, as server-sent events that go on where a reader left off.

It does not know what the events mean. A reader has a place in the node's log and no queue of its own, so a slow one
costs nothing: when it comes back for more than the log still keeps, it is told how many it lost.
"""

from __future__ import annotations

import re
from typing import Any

import trio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvasir_node.base.errors import CapacityError, UsageError
from kvasir_node.base.events import EVENT_SCHEMA, EventLog
from kvasir_node.surfaces.beside import run_beside
from kvasir_node.surfaces.event_words import LOST, said_of
from kvasir_node.surfaces.exchange import disconnected, send_part
from kvasir_node.surfaces.sse import HEADERS, HEARTBEAT, sse_data

READERS_MAX = 64
BATCH_MAX = 64  # events written at once
FROM_THE_BEGINNING = "0"
_ID = re.compile(r"(?P<life>[0-9a-f]{1,16})-(?P<number>[0-9]{1,15})\Z", re.ASCII)


class EventFeed:
    """All readers of one node's events."""

    def __init__(self, log: EventLog, heartbeat_s: float) -> None:
        self.log, self.heartbeat_s = log, heartbeat_s
        self.readers = 0

    def answer(self, last_event_id: str) -> Response:
        """What the header Last-Event-ID says: empty = from now on, "0" = all that is kept, else what came after it.

        Raises UsageError for what is no id, CapacityError when too many read already.
        """
        if self.readers >= READERS_MAX:
            raise CapacityError(f"{READERS_MAX} read the events already; close one of them, or try again")
        if not last_event_id:
            return _EventStream(self, self.log.last)
        if last_event_id == FROM_THE_BEGINNING:
            return _EventStream(self, 0)
        match = _ID.match(last_event_id)
        if match is None:
            message = f'Last-Event-ID must be the id of an event, or "0"; got {last_event_id[:40]!r}'
            raise UsageError(message, param="Last-Event-ID")
        if match["life"] != self.log.life:
            return _EventStream(self, 0, is_new_life=True)
        return _EventStream(self, min(int(match["number"]), self.log.last))


class _EventStream(Response):
    """One reader. `is_new_life`: it has read events of the process before this one."""

    def __init__(self, feed: EventFeed, place: int, *, is_new_life: bool = False) -> None:
        super().__init__()
        self._feed, self._log = feed, feed.log
        self._place = place  # number of the last event that it was sent
        self._is_new_life = is_new_life

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._feed.readers += 1
        try:
            await run_beside(lambda: disconnected(receive), lambda: self._stream(send))
        finally:
            self._feed.readers -= 1

    async def _stream(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        # The id lets a reader that is cut off before the first event go on from here.
        await send_part(send, HEARTBEAT + f"id: {self._id}\n\n".encode())
        if self._is_new_life:
            await send_part(send, self._lost(None))
        while True:
            with trio.move_on_after(self._feed.heartbeat_s):
                await self._log.wait_after(self._place)
            await send_part(send, self._next_batch() or HEARTBEAT)

    def _next_batch(self) -> bytes:
        parts: list[bytes] = []
        if lost := self._log.lost_after(self._place):
            self._place += lost
            parts.append(self._lost(lost))
        for event in self._log.after(self._place, BATCH_MAX):
            self._place = event.number
            parts.append(self._part(event.to_json(self._log.life)))
        return b"".join(parts)

    def _lost(self, count: int | None) -> bytes:
        """`count` None = nobody knows: they were of an earlier life of the node."""
        return self._part({"schema": EVENT_SCHEMA, "id": self._id, "type": LOST, "count": count})

    def _part(self, document: dict[str, Any]) -> bytes:
        return f"id: {self._id}\n".encode() + sse_data({**document, **said_of(document)})

    @property
    def _id(self) -> str:
        return f"{self._log.life}-{self._place}"
