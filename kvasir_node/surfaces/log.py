"""Log lines on stderr, or in the screen's pane: console text or one JSON object a line.

It does not know what is logged. Prompts and answers are never logged by anyone; nothing here could add them.
"""

from __future__ import annotations

import json
import logging
import sys
from collections import deque
from datetime import UTC, datetime
from typing import TextIO

from kvasir_node.base.settings import LogSettings, log_levels
from kvasir_node.surfaces.words import clean

OUR_LOGGER = "kvasir_node"
PANE_LINES_MAX = 200
MESSAGE_CHARACTERS_MAX = 4000
PARTS = {  # LOG_PARTS: packages and modules of each
    "api": ("surfaces",),
    "net": (
        "net",
        "roles.hub_search",
        "roles.member_file",
        "roles.membership",
        "roles.peers",
        "roles.reaching",
        "roles.remembered",
        "roles.swarm_key",
    ),
    "market": (
        "roles.demand_tables",
        "roles.hub",
        "roles.hub_news",
        "roles.link",
        "roles.manners",
        "roles.worker",
    ),
    "fanout": (
        "roles.attendance",
        "roles.crew",
        "roles.express_calls",
        "roles.ledger_file",
        "roles.own_experts",
        "roles.peer_counts",
        "roles.steering",
        "roles.trials",
        "roles.wire_gate",
    ),
    "model": (
        "model",
        "roles.coordinator",
        "roles.desk",
        "roles.loading",
        "roles.missing_experts",
        "roles.residency",
    ),
    "store": ("store", "roles.assembly", "roles.content", "roles.download", "roles.pulling"),
}


class ConsoleFormatter(logging.Formatter):
    """`12:34:56 warning roles.hub: message`, with the traceback of an exception on the lines after it."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        room = record.name.removeprefix(f"{OUR_LOGGER}.")
        line = f"{at} {record.levelname.lower()} {room}: {clean(record.getMessage(), MESSAGE_CHARACTERS_MAX)}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One object a line: ts (UTC, ISO 8601), level, logger, message and, after a failure, exception."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": clean(record.getMessage(), MESSAGE_CHARACTERS_MAX),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


class PaneHandler(logging.Handler):
    """Keeps the newest lines for the screen; the oldest fall out."""

    def __init__(self, lines: deque[str]) -> None:
        super().__init__()
        self.lines = lines
        self.setFormatter(ConsoleFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.extend(self.format(record).splitlines())


def pane() -> deque[str]:
    return deque(maxlen=PANE_LINES_MAX)


def newest_message(lines: deque[str], otherwise: str) -> str:
    """Of a pane, without its time, level and room."""
    return lines[-1].partition(": ")[2] if lines else otherwise


def set_up_logging(settings: LogSettings, *, stream: TextIO | None = None, lines: deque[str] | None = None) -> None:
    """Replaces all handlers of the root logger; with `lines`, output goes there instead of to `stream` (stderr).

    `auto` is console text on a terminal and JSON elsewhere. Other packages' loggers speak from warning upwards. Parts
    without a level of their own follow the one of all.
    """
    root = logging.getLogger()
    for handler in root.handlers[:]:
        root.removeHandler(handler)
    root.addHandler(PaneHandler(lines) if lines is not None else _stream_handler(settings, stream or sys.stderr))
    root.setLevel(logging.WARNING)
    level, of_parts = log_levels(settings.level)
    logging.getLogger(OUR_LOGGER).setLevel(level.upper())
    for part, names in PARTS.items():
        for name in names:
            logging.getLogger(f"{OUR_LOGGER}.{name}").setLevel(of_parts.get(part, "notset").upper())
    logging.captureWarnings(True)


def _stream_handler(settings: LogSettings, stream: TextIO) -> logging.Handler:
    handler = logging.StreamHandler(stream)
    as_json = settings.format == "json" or (settings.format == "auto" and not stream.isatty())
    handler.setFormatter(JsonFormatter() if as_json else ConsoleFormatter())
    return handler
