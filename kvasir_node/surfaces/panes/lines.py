"""Lines of styled text of an exact width, and the signs that they are drawn with.

It does not know panes or terminals. A style is a string that rich knows; nothing is told by style alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size

from kvasir_node.surfaces.words import clean

Span = tuple[str, str]  # text, style
Line = tuple[Span, ...]

DIM, STRONG, GOOD, WARN, BAD, NEW = "dim", "bold", "green", "bold yellow", "bold red", "cyan"


@dataclass(frozen=True, slots=True)
class Signs:
    """What is drawn that is no letter; `shades` go from unused to hot, `heights` from nothing to the most."""

    full: str
    empty: str
    shades: str
    heights: str
    dot: str
    arrow: str
    more: str
    below: str  # more rows are there
    above: str
    across: str
    upright: str
    corners: str  # top left, top right, bottom left, bottom right
    tees: str  # on the left, on the right, from a line down, from a line up, crossing


UNICODE = Signs("■", "·", "·░▒▓█", " ▁▂▃▄▅▆▇█", "●", "→", "…", "↓", "↑", "─", "│", "╭╮╰╯", "├┤┬┴┼")
ASCII = Signs("#", "-", ".-+*#", " .:-=+*%#", "*", ">", "~", "v", "^", "-", "|", "++++", "+++++")


LIKE = str.maketrans("×–→…", "x->~")


def plain(text: str, style: str = "") -> Line:
    return ((text, style),)


def text_of(line: Line) -> str:
    return "".join(text for text, _ in line)


def width_of(text: str) -> int:
    """Cells; most text needs no table for that."""
    return len(text) if text.isascii() else cell_len(text)


def in_ascii(line: Line) -> Line:
    """A letter that is no ASCII becomes one question mark, however wide it was; signs of our own have a likeness."""
    return tuple((text if text.isascii() else _ascii_of(text), style) for text, style in line)


def _ascii_of(text: str) -> str:
    return text.translate(LIKE).encode("ascii", "replace").decode()


def fitted(line: Line, width: int, more: str = "") -> Line:
    """Exactly `width` cells, with spaces after; `more` stands at the end of what was cut. All lines come through here,
    so nothing that a terminal would obey gets past it."""
    line = tuple((text if text.isprintable() else clean(text), style) for text, style in line)
    cells = sum(width_of(text) for text, _ in line)
    if cells <= width:
        return line if cells == width else (*line, (" " * (width - cells), ""))
    room = max(width - len(more), 0)
    kept: list[Span] = []
    for text, style in line:
        cells = width_of(text)
        if cells > room:
            kept.append((set_cell_size(text, room), style))
            break
        kept.append((text, style))
        room -= cells
    return (*kept, (more, DIM)) if more and width else tuple(kept)


def column(text: str, width: int, more: str = "") -> str:
    """Text of a table's column, on the left."""
    cells = width_of(text)
    if cells <= width:
        return text + " " * (width - cells)
    return set_cell_size(text, max(width - len(more), 0)) + more[:width]


def bar(used: int, total: int, cells: int, signs: Signs) -> str:
    """`[###---]`; anything above nothing shows, and only full shows as full."""
    filled = round(cells * min(used / total, 1)) if total else 0
    if 0 < used < total:
        filled = min(max(filled, 1), cells - 1)
    return f"[{signs.full * filled}{signs.empty * (cells - filled)}]"


def curve(values: Sequence[float], cells: int, signs: Signs) -> str:
    """The newest values as heights, the highest of them at full height; more than nothing is more than nothing."""
    shown = values[-cells:] if cells > 0 else ()
    most = max(shown, default=0.0)
    if most <= 0:
        return signs.heights[0] * len(shown)
    steps = len(signs.heights) - 1
    return "".join(signs.heights[max(round(value / most * steps), 1) if value > 0 else 0] for value in shown)
