"""Where the panes are: rows of panes that share their borders, for any size. It does not know what is in a pane."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvasir_node.surfaces.panes.lines import DIM, STRONG, Line, Span, fitted, in_ascii, width_of
from kvasir_node.surfaces.view import Pane, View

TWO_COLUMNS_FROM = 72  # cells
PANE_LINES_MIN = 4  # of a pane in one column, with a border
FOCUSED = "bold cyan"
NOW_LINES_MAX = 9  # it and the slots have no more to say
_PAIRS = ((Pane.NOW, Pane.SLOTS, 0.56), (Pane.EXPERTS, Pane.WORKERS, 0.47), (Pane.DEMAND, Pane.LOG, 0.42))
_WEIGHTS = {Pane.NOW: 5, Pane.EXPERTS: 7, Pane.DEMAND: 4}
_BY_NEED = (Pane.NOW, Pane.SLOTS, Pane.WORKERS, Pane.LOG, Pane.EXPERTS, Pane.DEMAND)


@dataclass(frozen=True, slots=True)
class Cell:
    pane: Pane
    width: int  # without borders


@dataclass(frozen=True, slots=True)
class Row:
    height: int  # without borders
    cells: tuple[Cell, ...]


def rows_of(view: View, width: int, height: int) -> list[Row]:
    """Rows for an area of that size; with the borders above, between and below, the heights add up to `height`."""
    if view.is_whole:
        return [Row(max(height - 2, 0), (Cell(view.focus, max(width - 2, 0)),))]
    if width < TWO_COLUMNS_FROM:
        return _one_column(view, width, height)
    pairs = [_present(pair, view.panes, width) for pair in _PAIRS]
    chosen = [cells for cells in pairs if cells]
    heights = _heights([_WEIGHTS.get(cells[0].pane, 4) for cells in chosen], height - len(chosen) - 1)
    if chosen[0][0].pane is Pane.NOW and len(chosen) > 1 and heights[0] > NOW_LINES_MAX:
        rest = _heights([_WEIGHTS.get(cells[0].pane, 4) for cells in chosen[1:]], sum(heights) - NOW_LINES_MAX)
        heights = [NOW_LINES_MAX, *rest]
    return [Row(lines, cells) for lines, cells in zip(heights, chosen, strict=True)]


def _present(pair: tuple[Pane, Pane, float], panes: Sequence[Pane], width: int) -> tuple[Cell, ...]:
    left, right, part = pair
    if left in panes and right in panes:
        cells = round((width - 3) * part)
        return (Cell(left, cells), Cell(right, width - 3 - cells))
    return tuple(Cell(pane, width - 2) for pane in (left, right) if pane in panes)


def _one_column(view: View, width: int, height: int) -> list[Row]:
    """The panes that are needed most, and the focused one, as many as have room for a few lines."""
    count = max(height // PANE_LINES_MIN, 1)
    chosen = [pane for pane in _BY_NEED if pane in view.panes][:count]
    if view.focus not in chosen:
        chosen[-1] = view.focus
    chosen.sort(key=lambda pane: pane.number)
    heights = _heights([1] * len(chosen), max(height - len(chosen) - 1, 0))
    return [Row(lines, (Cell(pane, max(width - 2, 0)),)) for lines, pane in zip(heights, chosen, strict=True)]


def _heights(weights: Sequence[int], total: int) -> list[int]:
    """`total` lines shared out by weight."""
    total, whole = max(total, 0), sum(weights)
    shares = [total * weight // whole for weight in weights]
    by_rest = sorted(range(len(weights)), key=lambda index: -(total * weights[index] % whole))
    for index in by_rest[: total - sum(shares)]:
        shares[index] += 1
    return shares


@dataclass(frozen=True, slots=True)
class Body:
    """What stands in a cell: its lines, and its name for the border above it."""

    name: str
    lines: list[Line]


def framed(rows: Sequence[Row], view: View, body: Callable[[Cell, int], Body]) -> list[Line]:
    """The rows with their borders around and between them."""
    lines: list[Line] = []
    above: Sequence[Cell] = ()
    upright = (view.signs.upright, DIM)
    for row in rows:
        bodies = [body(cell, row.height) for cell in row.cells]
        lines.append(_border(above, row.cells, [each.name for each in bodies], view))
        filled = [
            _filled(each.lines, cell.width, row.height, view) for cell, each in zip(row.cells, bodies, strict=True)
        ]
        for parts in zip(*filled, strict=True):
            line: list[Span] = [upright]
            for part in parts:
                line += [*part, upright]
            lines.append(tuple(line))
        above = row.cells
    return [*lines, _border(above, (), (), view)]


def _filled(lines: list[Line], width: int, height: int, view: View) -> list[Line]:
    lines = lines[:height] + [()] * max(height - len(lines), 0)
    lines = [in_ascii(line) for line in lines] if view.ascii_only else lines
    return [fitted(line, width, view.signs.more) for line in lines]


def _border(above: Sequence[Cell], below: Sequence[Cell], names: Sequence[str], view: View) -> Line:
    """A line across with the names of the panes below it; the focused one's stands in brackets."""
    down, up = _uprights(below), _uprights(above)
    last = max(down | up)
    drawn = "".join(_joint(at in up, at in down, at, last, view) for at in range(last + 1))
    line: list[Span] = []
    begin = 0
    for cell, name in zip(below, names, strict=True):
        focused = cell.pane is view.focus
        label = f"[{name}]" if focused else f" {name} "
        label = label if width_of(label) < cell.width else ""
        end = begin + cell.width + 1
        line += [(drawn[begin : begin + 2], DIM), (label, FOCUSED if focused else STRONG)]
        line.append((drawn[begin + 2 + width_of(label) : end], DIM))
        begin = end
    return (*line, (drawn[begin:], DIM))


def _uprights(cells: Sequence[Cell]) -> set[int]:
    """Where lines go up and down beside these cells, from the left border on."""
    places = [0] if cells else []
    for cell in cells:
        places.append(places[-1] + cell.width + 1)
    return set(places)


def _joint(up: bool, down: bool, at: int, last: int, view: View) -> str:
    signs = view.signs
    if at in (0, last):
        if up and down:
            return signs.tees[0 if at == 0 else 1]
        return signs.corners[(0 if down else 2) + (0 if at == 0 else 1)]
    if up and down:
        return signs.tees[4]
    return signs.tees[2] if down else signs.tees[3] if up else signs.across
