"""The screen of `up` and `top` as text: a pure function of a picture, a view and a size.

It does not know terminals, keys or time. Nothing is told by colour alone; what other peers chose (names, reasons) is
cleaned before it is shown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvasir_node.base.snapshot import NodeSnapshot
from kvasir_node.surfaces.panes import demand, experts, headline, log, now, sheets, slots, workers
from kvasir_node.surfaces.panes.content import Content, Seen, window
from kvasir_node.surfaces.panes.layout import Body, Cell, framed, rows_of
from kvasir_node.surfaces.panes.lines import DIM, STRONG, Line, fitted, in_ascii, plain, text_of
from kvasir_node.surfaces.picture import Picture
from kvasir_node.surfaces.view import Pane, View
from kvasir_node.surfaces.words import clean

TALL = 30  # lines from which on more than one warning is shown
WARNINGS_TALL = 3
_CONTENTS: dict[Pane, Callable[[Picture, View, int, int], Content[Any]]] = {
    Pane.NOW: now.content,
    Pane.SLOTS: slots.content,
    Pane.DEMAND: demand.content,
    Pane.WORKERS: workers.content,
    Pane.EXPERTS: experts.content,
    Pane.LOG: log.content,
}
KEYS = "1-6 pane  enter zoom  / filter  s sort  p pause  t ticket  ? help  q quit"
KEYS_SHORT = "? help  q quit"


@dataclass(frozen=True, slots=True)
class Drawn:
    """`scroll_max`: how far the focused pane, or the sheet, can be scrolled now."""

    lines: list[Line]
    scroll_max: int

    @property
    def text(self) -> str:
        return "\n".join(map(text_of, self.lines))


def panes_of(snapshot: NodeSnapshot) -> tuple[Pane, ...]:
    """The panes that a node of these roles has something for."""
    coordinates = "coordinator" in snapshot.roles
    hidden = set[Pane]() if coordinates else {Pane.SLOTS, Pane.WORKERS, Pane.EXPERTS}
    if snapshot.hub is None:
        hidden.add(Pane.DEMAND)
    return tuple(pane for pane in Pane if pane not in hidden)


def render(picture: Picture, view: View, width: int, height: int) -> Drawn:
    """Exactly `height` lines of exactly `width` cells."""
    view = view.with_panes(panes_of(picture.snapshot))
    above = [
        headline.title(picture, width),
        *headline.above(picture, view.signs, WARNINGS_TALL if height >= TALL else 1),
    ]
    room = max(height - len(above) - 1, 0)
    draw = _panes if view.sheet is None else _sheet
    body, scroll_max = draw(picture, view, width, room)
    lines = [*above, *body][: max(height - 1, 0)]
    lines += [()] * (height - 1 - len(lines)) + [_foot(view, width)]
    lines = [in_ascii(line) for line in lines] if view.ascii_only else lines
    return Drawn([fitted(line, width, view.signs.more) for line in lines[:height]], scroll_max)


def _panes(picture: Picture, view: View, width: int, height: int) -> tuple[list[Line], int]:
    scroll_max = 0

    def body(cell: Cell, lines_max: int) -> Body:
        nonlocal scroll_max
        content = _CONTENTS[cell.pane](picture, view, cell.width, lines_max)
        seen = window(content, lines_max, view.scroll_of(cell.pane))
        if cell.pane is view.focus:
            scroll_max = seen.scroll_max
        return Body(_name(picture, view, cell.pane, seen), seen.lines)

    return framed(rows_of(view, width, height), view, body), scroll_max


def _name(picture: Picture, view: View, pane: Pane, seen: Seen) -> str:
    """`4 Workers v12`: twelve more are below."""
    name = picture.log_name if pane is Pane.LOG else str(pane)
    way = view.signs.above if seen.is_log else view.signs.below
    return f"{pane.number} {name}{f' {way}{seen.hidden}' if seen.hidden else ''}"


def _sheet(picture: Picture, view: View, width: int, height: int) -> tuple[list[Line], int]:
    assert view.sheet is not None
    seen = window(sheets.content(view.sheet, picture, width), height - 1, view.scroll)
    more = f"  {view.signs.below}{seen.hidden}" if seen.hidden else ""
    return [plain(f" {view.sheet.upper()}{more} ", "bold reverse"), *seen.lines], seen.scroll_max


def _foot(view: View, width: int) -> Line:
    if view.is_typing:
        return (("filter: ", STRONG), (f"{clean(view.filter)}_", ""), ("   enter keeps it, esc drops it", DIM))
    told = view.notice or (f"filter: {clean(view.filter)}" if view.filter else "")
    keys = KEYS if len(KEYS) <= width and not told else KEYS_SHORT
    return ((told, STRONG), ("   " if told else "", ""), (keys, DIM))
