"""An answer that is computed faster or slower than its reader reads: the outbox between the two, and SSE's bytes.

It does not know OpenAI's shapes or sockets. The producer never waits for the reader, so a stalled client holds
no slot; memory is bounded by the answer's own text, because deltas that were not taken yet are joined.
"""

from __future__ import annotations

import json
from typing import Any

import trio

from kvasir_node.base.errors import KvasirError
from kvasir_node.base.generation import Finished, TextDelta

HEARTBEAT = b": heartbeat\n\n"
DONE = b"data: [DONE]\n\n"
MEDIA_TYPE = b"text/event-stream"


def sse_data(document: dict[str, Any]) -> bytes:
    """One SSE event. JSON escapes line breaks, so a text can never end an event early."""
    return b"data: " + json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class Outbox:
    """Events of one answer for one reader: `put` and `fail` never wait, `take` does."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._end: Finished | KvasirError | None = None
        self._news = trio.Event()

    def put(self, event: TextDelta | Finished) -> None:
        if isinstance(event, TextDelta):
            self._text.append(event.text)
        else:
            self._end = event
        self._news.set()

    def fail(self, error: KvasirError) -> None:
        """The answer ends here, after whatever text is still to be taken."""
        self._end = error
        self._news.set()

    async def take(self, timeout_s: float) -> TextDelta | Finished | KvasirError | None:
        """The text since the last take as one delta, then the end; None when nothing came in time.

        Cancel-safety: a cancelled take loses nothing.
        """
        with trio.move_on_after(timeout_s):
            await self._news.wait()
        if self._text:
            delta = TextDelta("".join(self._text))
            self._text.clear()
            if self._end is None:
                self._news = trio.Event()
            return delta
        return self._end
