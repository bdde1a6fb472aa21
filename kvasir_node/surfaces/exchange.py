"""One HTTP exchange's two ends, made safe against clients that stop reading or never stop writing.

It does not know requests or answers. hypercorn hands a body to the application through a channel of ten parts;
an application that answers without reading it all would leave the connection's reader stuck on that channel.
"""

from __future__ import annotations

import trio
from starlette.types import Message, Receive, Send

SEND_TIMEOUT_S = 60.0  # a client that takes nothing for this long is cut
DISCARD_TIMEOUT_S = 2.0  # an unread body is awaited this long before the answer: many clients read only afterwards


async def send_part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def end_body(send: Send) -> None:
    """Never beside `disconnected`: a body's end is a disconnect, too, and who is cancelled by it leaves the connection
    half closed."""
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def disconnected(receive: Receive) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Exchange:
    """Wraps ASGI's `receive` and `send`. `stalled` tells that a send ran into its deadline (TooSlowError)."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self._body_ended = False
        self._started = False
        self.stalled = False

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            self._body_ended = True
        return message

    async def send(self, message: Message) -> None:
        if not self._started and not self._body_ended:
            with trio.move_on_after(DISCARD_TIMEOUT_S):
                await self._discard_body()
            if not self._body_ended:
                message = {**message, "headers": [*message.get("headers", []), (b"connection", b"close")]}
        self._started = True
        try:
            with trio.fail_after(SEND_TIMEOUT_S):
                await self._send_and_discard(message)
        except trio.TooSlowError:
            self.stalled = True
            raise

    async def _send_and_discard(self, message: Message) -> None:
        if self._body_ended:
            await self._send(message)
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._discard_body)
            await self._send(message)
            nursery.cancel_scope.cancel()

    async def _discard_body(self) -> None:
        while not self._body_ended:
            await self.receive()
