"""The pane Log: the newest lines last. It does not know where they come from."""

from __future__ import annotations

from typing import Any

from kvasir_node.surfaces.panes.content import Content, nothing
from kvasir_node.surfaces.panes.lines import BAD, DIM, WARN, Line
from kvasir_node.surfaces.picture import Picture
from kvasir_node.surfaces.view import LEVELS, View
from kvasir_node.surfaces.words import clean

_STYLES = {"warning": WARN, "error": BAD, "critical": BAD}
WHOLE_FROM = 76  # cells
TIME_CELLS = len("12:34:56")


def content(picture: Picture, view: View, width: int, height: int) -> Content[Any]:
    lines = [line for line in picture.log if view.keeps(line)]
    if view.level != LEVELS[0]:
        lines = [line for line in lines if level_of(line) in _STYLES]
    if not lines:
        return nothing("nothing passes the filter" if picture.log else "nothing yet")
    return Content(lines, _whole if width >= WHOLE_FROM else _short, is_log=True)


def level_of(line: str) -> str:
    """Of a line as `log.ConsoleFormatter` writes it; the lines of a traceback have none."""
    parts = line[TIME_CELLS:].split(maxsplit=1)
    return parts[0] if parts and line[:1].isdecimal() else "error"


def _whole(line: str) -> Line:
    line = clean(line)
    return ((line[:TIME_CELLS], DIM), (line[TIME_CELLS:], _STYLES.get(level_of(line), "")))


def _short(line: str) -> Line:
    """Time and words: `info` goes without saying, anything worse is a `!`, and who said it is left out."""
    level, line = level_of(line), clean(line)
    time, _, rest = line.partition(f" {level} ")
    if not rest:
        return _whole(line)
    _, colon, words = rest.partition(": ")
    sign = "! " if level in _STYLES else ""
    return ((f"{time} ", DIM), (sign + (words if colon else rest), _STYLES.get(level, "")))
