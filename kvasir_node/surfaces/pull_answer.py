"""`POST /kvasir/v1/pull`: a model comes to the node's disk while the client reads how far it is.

One JSON object a line: `{"model","done","total"}` every second (bytes), then `{"id"}`, or the error as everywhere with
the `"status"` that it would have had.
It does not know where a model comes from. A client that leaves stops the fetch; what came is kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import trio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvasir_node.base.errors import KvasirError
from kvasir_node.surfaces.answers import document_of_error
from kvasir_node.surfaces.beside import run_beside
from kvasir_node.surfaces.exchange import disconnected, end_body, send_part
from kvasir_node.surfaces.ports import NodePort

INTERVAL_S = 1.0
_HEADERS = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store")]


class PullAnswer(Response):
    def __init__(self, node: NodePort, ref: str) -> None:
        super().__init__()
        self._node, self._ref = node, ref
        self._heard: dict[str, Any] = {"model": ref, "done": 0, "total": 0}
        self._last: Mapping[str, Any] = {}
        self._ended = trio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if await run_beside(lambda: disconnected(receive), lambda: self._stream(send)):
            await end_body(send)

    async def _stream(self, send: Send) -> bool:
        """True when all but the end of the body is sent."""
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._pull)
            while not self._ended.is_set():
                await send_part(send, _line(self._heard))
                with trio.move_on_after(INTERVAL_S):  # a send is never cancelled: half a chunk would be the end
                    await self._ended.wait()
        await send_part(send, _line(self._last))
        return True

    async def _pull(self) -> None:
        try:
            self._last = {"id": await self._node.pull(self._ref, self._hear)}
        except KvasirError as error:
            # The answer's own status was sent before this one was known.
            self._last = {**document_of_error(error), "status": error.http_status}
        self._ended.set()

    def _hear(self, name: str, done: int, total: int) -> None:
        self._heard = {"model": name, "done": done, "total": total}


def _line(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, ensure_ascii=False).encode() + b"\n"
