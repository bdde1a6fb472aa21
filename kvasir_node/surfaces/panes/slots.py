"""The pane Slots: how full this coordinator is, and which requests are under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvasir_node.base.snapshot import RequestSnapshot, SlotsSnapshot
from kvasir_node.surfaces.panes.content import Content
from kvasir_node.surfaces.panes.lines import DIM, GOOD, WARN, Line, bar, curve, plain
from kvasir_node.surfaces.picture import Picture
from kvasir_node.surfaces.view import Pane, View
from kvasir_node.surfaces.words import count_text

BAR_CELLS_MAX = 24
LABEL_CELLS = 7
REQUEST_SIGNS = {"queued": ".", "prefill": "+", "decode": ">"}
_ORDERS: dict[str, Callable[[RequestSnapshot], Any]] = {
    "age": lambda request: -request.age_s,
    "tokens": lambda request: -request.answer_tokens,
}


def content(picture: Picture, view: View, width: int, height: int) -> Content[Line | RequestSnapshot]:
    slots = picture.snapshot.slots
    cells = max(min(width - LABEL_CELLS - 14, BAR_CELLS_MAX), 4)
    style = WARN if slots.state == "saturated" else GOOD
    state = slots.state.upper() if slots.state == "saturated" else slots.state
    curve_cells = max(width - LABEL_CELLS - len(state) - 8, 0)
    facts: list[Line] = [
        (("slots  ", DIM), (bar(slots.busy, slots.total, cells, view.signs), style), (_used(slots), "")),
        (("queue  ", DIM), (bar(slots.queued, slots.queue_max, cells, view.signs), style), (_waiting(slots), "")),
        (
            ("load   ", DIM),
            (f"{state} {slots.pressure:.2f}", style if style is WARN else ""),
            (f"  {curve(picture.pressures, curve_cells, view.signs)}", style),
        ),
    ]
    requests = sorted(picture.requests, key=_ORDERS[view.sort_of(Pane.SLOTS)])
    head = [plain(f"{'request':<11}{'answer':>8}{'age':>8}", "dim underline")] if requests else []
    return Content([*facts, *head, *requests], _drawn)


def _used(slots: SlotsSnapshot) -> str:
    return f" {slots.busy}/{slots.total} busy"


def _waiting(slots: SlotsSnapshot) -> str:
    oldest = f" {slots.oldest_wait_s:.1f}s" if slots.queued else ""
    return f" {slots.queued}/{slots.queue_max}{oldest}"


def _drawn(item: Line | RequestSnapshot) -> Line:
    if not isinstance(item, RequestSnapshot):
        return item
    told = f"{count_text(item.answer_tokens):>8}{item.age_s:>7.1f}s"
    sign = REQUEST_SIGNS.get(item.state, " ")
    choices = f"  {item.choices} choices" if item.choices > 1 else ""
    return plain(f"{sign} {item.state:<9}{told}{choices}")
