"""The pane Workers: who computes for this coordinator, how well, and what is held against them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvasir_node.base.snapshot import WorkerPeerSnapshot
from kvasir_node.surfaces.panes.content import HEAD, Content, nothing
from kvasir_node.surfaces.panes.lines import BAD, DIM, GOOD, NEW, WARN, Line, column, plain
from kvasir_node.surfaces.picture import Picture
from kvasir_node.surfaces.view import Pane, View
from kvasir_node.surfaces.words import clean, count_text, short_id

SIGNS = {"proven": "+", "trial": "?", "new": ".", "suspect": "!", "banned": "x"}
STYLES = {"proven": GOOD, "suspect": WARN, "banned": BAD, "trial": NEW}
NAME_CELLS_MIN, NAME_CELLS_MAX = 6, 24
NUMBERS_CELLS = 10 + 6 + 6 + 8  # state, share, round trip, rows
PATH_FROM, PATH_CELLS = 60, 5 + 8  # cells, with failures and path
WHOLE_FROM, WHOLE_CELLS = 86, 30  # with what was wrong, slices and id
_ORDERS: dict[str, Callable[[WorkerPeerSnapshot], Any]] = {
    "state": lambda worker: (list(SIGNS).index(worker.state) if worker.state in SIGNS else len(SIGNS), worker.name),
    "name": lambda worker: worker.name.lower(),
    "rows": lambda worker: -worker.rows,
    "rtt": lambda worker: worker.rtt_ms if worker.rtt_ms is not None else float("inf"),
    "failures": lambda worker: -worker.failures,
}


def content(picture: Picture, view: View, width: int, height: int) -> Content[Any]:
    workers = picture.snapshot.workers
    shown = [each for each in workers if view.keeps(each.name, each.peer_id, each.state, each.path, *each.slices)]
    if not shown:
        return nothing("nothing passes the filter" if workers else "none yet; t shows how another machine joins")
    shown.sort(key=_ORDERS[view.sort_of(Pane.WORKERS)])
    more_cells = PATH_CELLS * (width >= PATH_FROM) + WHOLE_CELLS * (width >= WHOLE_FROM)
    name_cells = max(min(width - NUMBERS_CELLS - more_cells, NAME_CELLS_MAX), NAME_CELLS_MIN)
    shares = picture.snapshot.fanout.shares

    def draw(worker: WorkerPeerSnapshot) -> Line:
        name = column(clean(worker.name, 60) or short_id(worker.peer_id), name_cells, view.signs.more)
        numbers = f"{_share(shares.get(worker.peer_id))}{_round_trip(worker.rtt_ms)}{count_text(worker.rows):>8}"
        state = (f"{SIGNS.get(worker.state, ' ')} {worker.state:<8}", STYLES.get(worker.state, ""))
        return (state, (f"{name}{numbers}", ""), (_more(worker, width), DIM))

    more = f"{'fail':>5}  path  " * (width >= PATH_FROM) + "  slices" * (width >= WHOLE_FROM)
    head = f"{'state':<10}{column('name', name_cells)}{'share':>6}{'ms':>6}{'rows':>8}{more}"
    return Content(shown, draw, plain(head, HEAD))


def _share(share: float | None) -> str:
    """Of all pairs, what this worker computes now."""
    return f"{'-' if share is None else f'{share:.0%}':>6}"


def _round_trip(rtt_ms: float | None) -> str:
    return f"{'-' if rtt_ms is None else f'{rtt_ms:.1f}' if rtt_ms < 1000 else f'{rtt_ms:.0f}':>6}"


def _more(worker: WorkerPeerSnapshot, width: int) -> str:
    """What there is room for; what was wrong comes before what it has."""
    path = f"{worker.failures:>5}  {worker.path:<6}" if width >= PATH_FROM else ""
    if width < WHOLE_FROM:
        return path
    reason = f"  {clean(worker.reason)}" if worker.reason else ""
    return f"{path}{reason}  {' '.join(worker.slices)}  {short_id(worker.peer_id)}"
