"""An answer that is computed faster or slower than its reader reads: the outbox between the two, and SSE's bytes.

It does not know OpenAI's shapes or sockets. The producer never waits for the reader, so a stalled client holds
no slot; memory is bounded by the answer itself (its tokens and choices are), and deltas that were not taken yet are
joined.
"""

from __future__ import annotations

import json
from collections import deque
from typing import Any

import trio

from kvasir_node.base.errors import KvasirError
from kvasir_node.base.generation import AnswerEvent, Finished, TextDelta

HEARTBEAT = b": heartbeat\n\n"
DONE = b"data: [DONE]\n\n"
HEADERS = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]


def sse_data(document: dict[str, Any]) -> bytes:
    """One SSE event. JSON escapes line breaks, so a text can never end an event early."""
    return b"data: " + json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class Outbox:
    """Events of one answer for one reader: `put` and `fail` never wait, `take` does.

    What waits is in order for each choice; several choices may overtake one another.
    """

    def __init__(self) -> None:
        self._waiting: deque[list[AnswerEvent]] = (
            deque()
        )  # each entry is deltas of one choice to be joined, or one event
        self._open: dict[int, list[AnswerEvent]] = {}  # by choice: its last entry, if more text can be joined to it
        self._end: Finished | KvasirError | None = None
        self._news = trio.Event()

    def put(self, event: AnswerEvent) -> None:
        if isinstance(event, Finished):
            self._end = event
        elif isinstance(event, TextDelta) and event.choice in self._open:
            self._open[event.choice].append(event)
        else:
            entry: list[AnswerEvent] = [event]
            self._waiting.append(entry)
            self._open.pop(event.choice, None)
            if isinstance(event, TextDelta):
                self._open[event.choice] = entry
        self._news.set()

    def fail(self, error: KvasirError) -> None:
        """The answer ends here, after whatever is still to be taken."""
        self._end = error
        self._news.set()

    async def take(self, timeout_s: float) -> AnswerEvent | KvasirError | None:
        """The next event, deltas of one choice since the last take as one; None when nothing came in time.

        Cancel-safety: a cancelled take loses nothing.
        """
        with trio.move_on_after(timeout_s):
            await self._news.wait()
        if not self._waiting:
            return self._end
        entry = self._waiting.popleft()
        if self._open.get(entry[0].choice) is entry:
            del self._open[entry[0].choice]
        if not self._waiting and self._end is None:
            self._news = trio.Event()
        return _joined(entry)


def _joined(entry: list[AnswerEvent]) -> AnswerEvent:
    deltas = [event for event in entry if isinstance(event, TextDelta)]
    if len(deltas) < 2:
        return entry[0]
    logprobs = tuple(scored for delta in deltas for scored in delta.logprobs)
    return TextDelta("".join(delta.text for delta in deltas), deltas[0].choice, logprobs)
