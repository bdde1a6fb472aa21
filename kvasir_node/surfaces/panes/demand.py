"""The pane Demand: which slices the swarm wants held, as this node's hub sees it, and what is lacking."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvasir_node.base.snapshot import DemandSnapshot
from kvasir_node.surfaces.panes.content import HEAD, Content, nothing
from kvasir_node.surfaces.panes.lines import WARN, Line, column, plain
from kvasir_node.surfaces.picture import Picture
from kvasir_node.surfaces.view import Pane, View
from kvasir_node.surfaces.words import clean

SLICE_CELLS = 10
NUMBERS = "want have lent"


def lacking(demand: DemandSnapshot) -> int:
    """Copies that nobody has and nobody is about to have."""
    return max(demand.want - demand.proven - demand.leased, 0)


_ORDERS: dict[str, Callable[[DemandSnapshot], Any]] = {
    "lacking": lambda each: (-lacking(each), each.model, each.slice),
    "slice": lambda each: (each.model, each.slice),
}


def content(picture: Picture, view: View, width: int, height: int) -> Content[Any]:
    hub = picture.snapshot.hub
    if hub is None:
        return nothing("this node is no hub")
    shown = [each for each in hub.demand if view.keeps(each.model, each.slice)]
    if not shown:
        return nothing("nothing passes the filter" if hub.demand else "nothing is wanted now")
    shown.sort(key=_ORDERS[view.sort_of(Pane.DEMAND)])
    name_cells = max(min(width - SLICE_CELLS - len(NUMBERS) - 4, 30), 0)

    def draw(each: DemandSnapshot) -> Line:
        sign = "!" if lacking(each) else " "
        name = column(clean(each.model, 60), name_cells, view.signs.more)
        told = f"{column(each.slice, SLICE_CELLS)} {each.want:>4} {each.proven:>4} {each.leased:>4}"
        return plain(f"{sign} {name}{' ' * bool(name)}{told}", WARN if lacking(each) else "")

    head = f"  {column('model', name_cells)}{' ' * bool(name_cells)}{'slice':<{SLICE_CELLS}} {NUMBERS}"
    return Content(shown, draw, plain(head, HEAD))
