"""How a person looks at the screen, and what their keys do to that: a pure machine.

It does not know what is drawn, terminals, or how an action is carried out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from kvasir_node.surfaces.keys import PASTE
from kvasir_node.surfaces.panes.lines import ASCII, UNICODE, Signs

FILTER_CHARACTERS_MAX = 40
PAGE = 10


class Pane(StrEnum):
    """In the order of their numbers, from 1, and of their places."""

    NOW = "Now"
    SLOTS = "Slots"
    EXPERTS = "Experts"
    WORKERS = "Workers"
    DEMAND = "Demand"
    LOG = "Log"

    @property
    def number(self) -> int:
        return PANES.index(self) + 1


PANES = tuple(Pane)
SORTS = {
    Pane.WORKERS: ("state", "name", "rows", "rtt", "failures"),
    Pane.DEMAND: ("lacking", "slice"),
    Pane.SLOTS: ("age", "tokens"),
}
LEVELS = ("all", "warning")
_FILTERED = (Pane.WORKERS, Pane.DEMAND, Pane.LOG)


class Sheet(StrEnum):
    """What covers the panes."""

    HELP = "help"
    TICKET = "ticket"
    PHONE = "phone"
    WARNINGS = "warnings"


class Action(StrEnum):
    """What a key asks of others."""

    QUIT = "quit"
    LEND_OR_NOT = "lend or not"
    INVITE_PHONE = "invite a phone"


@dataclass(frozen=True, slots=True)
class View:
    """`panes` are those that this node has; `scroll` is of the focused one, in rows."""

    panes: tuple[Pane, ...] = PANES
    focus: Pane = Pane.NOW
    is_whole: bool = False  # the focused pane takes the whole screen
    scroll: int = 0
    sheet: Sheet | None = None
    filter: str = ""
    is_typing: bool = False  # keys go into the filter
    sort: tuple[tuple[Pane, int], ...] = ()
    level: str = LEVELS[0]
    notice: str = ""  # what came of the last action
    ascii_only: bool = False

    @property
    def signs(self) -> Signs:
        return ASCII if self.ascii_only else UNICODE

    def sort_of(self, pane: Pane) -> str:
        return SORTS[pane][dict(self.sort).get(pane, 0)]

    def scroll_of(self, pane: Pane) -> int:
        return self.scroll if pane is self.focus else 0

    def keeps(self, *texts: str) -> bool:
        """Whether a row with these texts passes the filter."""
        return not self.filter or self.filter.lower() in " ".join(texts).lower()

    def with_panes(self, panes: tuple[Pane, ...]) -> View:
        """Of a node whose roles are known now."""
        if panes == self.panes:
            return self
        return replace(self, panes=panes, focus=self.focus if self.focus in panes else panes[0])


def press(view: View, key: str) -> tuple[View, Action | None]:
    """The view after a key, and what it asks of others."""
    if view.is_typing:
        return _typed(view, key), None
    view = replace(view, notice="")
    if key in ("q", "Q"):
        return view, Action.QUIT
    if key == "p":
        return view, Action.LEND_OR_NOT
    if key == "t" and view.sheet is Sheet.TICKET:
        return replace(view, sheet=Sheet.PHONE, scroll=0), Action.INVITE_PHONE
    if key == "t" and view.sheet is Sheet.PHONE:
        return replace(view, sheet=None, scroll=0), None
    sheets = {"?": Sheet.HELP, "t": Sheet.TICKET, "w": Sheet.WARNINGS}
    if key in sheets:
        return replace(view, sheet=None if view.sheet is sheets[key] else sheets[key], scroll=0), None
    return _moved(view, key), None


def _typed(view: View, key: str) -> View:
    if key == "enter":
        return replace(view, is_typing=False)
    if key == "esc":
        return replace(view, is_typing=False, filter="")
    if key == "backspace":
        return replace(view, filter=view.filter[:-1])
    text = key.removeprefix(PASTE)
    if len(key) == 1 or text != key:
        return replace(view, filter=(view.filter + text)[:FILTER_CHARACTERS_MAX], scroll=0)
    return view


def _moved(view: View, key: str) -> View:
    steps = {"tab": 1, "right": 1, "shift-tab": -1, "left": -1}
    scrolls = {"down": 1, "j": 1, "up": -1, "k": -1, "page-down": PAGE, "page-up": -PAGE}
    if key in steps:
        place = view.panes.index(view.focus) + steps[key]
        return _focused(view, view.panes[place % len(view.panes)])
    if key in scrolls:
        return replace(view, scroll=max(view.scroll + scrolls[key], 0))
    if key == "home":
        return replace(view, scroll=0)
    if key.isdecimal() and 1 <= int(key) <= len(PANES):
        pane = PANES[int(key) - 1]
        if pane is view.focus and view.sheet is None:
            return replace(view, is_whole=not view.is_whole, scroll=0)
        return _focused(view, pane) if pane in view.panes else replace(view, notice=f"this node has no {pane} pane")
    if key in ("enter", "z", " "):
        return replace(view, is_whole=not view.is_whole, sheet=None, scroll=0)
    if key == "esc":
        return _back(view)
    return _told(view, key)


def _focused(view: View, pane: Pane) -> View:
    return replace(view, focus=pane, sheet=None, scroll=0)


def _back(view: View) -> View:
    """One step: closes the sheet, else leaves the whole screen, else drops the filter."""
    if view.sheet is not None:
        return replace(view, sheet=None, scroll=0)
    if view.is_whole:
        return replace(view, is_whole=False, scroll=0)
    return replace(view, filter="", scroll=0)


def _told(view: View, key: str) -> View:
    if key == "/":
        focus = view.focus if view.focus in _FILTERED else next((p for p in _FILTERED if p in view.panes), view.focus)
        return replace(view, is_typing=True, sheet=None, focus=focus, filter="", scroll=0)
    if key == "l":
        level = LEVELS[(LEVELS.index(view.level) + 1) % len(LEVELS)]
        return replace(view, level=level, notice=f"the log shows {'everything' if level == 'all' else 'warnings only'}")
    if key == "s" and view.focus in SORTS:
        orders = dict(view.sort)
        orders[view.focus] = (orders.get(view.focus, 0) + 1) % len(SORTS[view.focus])
        view = replace(view, sort=tuple(orders.items()), scroll=0)
        return replace(view, notice=f"{view.focus} by {view.sort_of(view.focus)}")
    return view
