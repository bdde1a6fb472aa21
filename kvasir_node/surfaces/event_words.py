"""What an event says to a person, which is a part of its document, and how it stands in a log.

It does not know how events are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from kvasir_node.surfaces.words import clean, counted

Event = Mapping[str, Any]
LOST = "lost"
_BAD_WORKERS = ("suspect", "banned")


def _request_ended(event: Event) -> str:
    took_s = (event["queue_ms"] + event["prefill_ms"] + event["decode_ms"]) / 1000
    told = f"{counted(event['answer_tokens'], 'token')} in {took_s:.1f} s, {event['queue_ms'] / 1000:.1f} s waiting"
    remote = f", {counted(event['remote_pairs'], 'remote pair')}" if event["remote_pairs"] else ""
    return f"request {event['request']} ended ({event['outcome']}): {told}{remote}"


def _worker_changed(event: Event) -> str:
    was = f" (was {event['was']})" if event["was"] not in ("", event["state"]) else ""
    reason = f": {event['reason']}" if event["reason"] else ""
    return f"worker {event['name']} is {event['state']}{was}, {counted(event['slices'], 'slice')}{reason}"


def _lending_changed(event: Event) -> str:
    reason = f": {event['reason']}" if event["reason"] else ""
    return f"lending: {event['state']}{reason}"


_WORDS: dict[str, Callable[[Event], str]] = {
    LOST: lambda e: f"{'some' if e['count'] is None else e['count']} events before this were lost",
    "request.started": lambda e: (
        f"request {e['request']} {'waits' if e['queued'] else 'starts'}: {counted(e['prompt_tokens'], 'prompt token')}"
    ),
    "request.ended": _request_ended,
    "load.changed": lambda e: f"{e['state']}: {e['busy']} busy, {e['queued']} waiting",
    "fanout.changed": lambda e: f"fan-out {e['reason']}",
    "worker.changed": _worker_changed,
    "demand.changed": lambda e: f"wants {counted(e['slices'], 'slice')}, {e['copies']} copies, {e['proven']} proven",
    "leases.changed": lambda e: f"hub: {counted(e['leases'], 'lease')}, {e['open_copies']} copies still wanted",
    "lending.changed": _lending_changed,
    "warnings.changed": lambda e: "; ".join(e["warnings"]) or "no warnings any more",
}


def said_of(event: Event) -> dict[str, str]:
    """The fields `level` (info | warning) and `words` of an event; of a type that is not known here, its name."""
    kind = str(event.get("type"))
    words = _WORDS.get(kind)
    return {"level": _level(event), "words": clean(words(event)) if words is not None else kind}


def event_line(event: Event) -> str:
    """`12:34:56 info type: words`, of an event as it came from a node, which may be of another version."""
    at = datetime.fromtimestamp(float(event.get("at") or 0)).strftime("%H:%M:%S")
    return f"{at} {event.get('level')} {event.get('type')}: {clean(str(event.get('words')))}"


def _level(event: Event) -> str:
    is_bad = event.get("state") in ("saturated", *_BAD_WORKERS) or event.get("outcome") == "failed"
    return "warning" if is_bad or event.get("warnings") or event["type"] == LOST else "info"
