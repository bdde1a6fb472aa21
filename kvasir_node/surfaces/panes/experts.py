"""The pane Experts: a heat map of the model. The shade of a cell is use, the mark beside it is where it is computed.

A cell stands for several experts or layers where there is no room for all: it has the hottest one's shade and the
mark of the one that is farthest away.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from kvasir_node.base.snapshot import ExpertLayerSnapshot
from kvasir_node.surfaces.panes.content import Content, nothing, rows
from kvasir_node.surfaces.panes.lines import BAD, DIM, NEW, WARN, Line, Signs, Span, plain
from kvasir_node.surfaces.picture import Picture
from kvasir_node.surfaces.view import View

HERE, MAPPED, WORKER, MISSING = "h", "m", "w", "."  # of ExpertLayerSnapshot.where
FARTHEST = (HERE, MAPPED, WORKER, MISSING)  # the last is the farthest
MARKS = {HERE: " ", MAPPED: "m", WORKER: "w", MISSING: "!"}
NAMES = {HERE: "here", MAPPED: "mapped", WORKER: "worker", MISSING: "missing"}
STYLES = {HERE: "", MAPPED: WARN, WORKER: NEW, MISSING: BAD}
USE_MAX = 100  # of the most used expert of the model
CELL = 2  # a shade and a mark
LABEL_CELLS = 4


def content(picture: Picture, view: View, width: int, height: int) -> Content[Any]:
    layers = picture.experts
    if not layers:
        return nothing("no model is served here" if picture.snapshot.model is None else "not known yet")
    across = -(-len(layers[0].use) // max((width - LABEL_CELLS) // CELL, 1))
    down = 1 if len(layers) == height else -(-len(layers) // max(height - 1, 1))
    lines = _map(layers, across, down, view.signs)
    cell = ((f"cell {across}x{down}", DIM),) if across * down > 1 else ()
    # Where the whole map fits without the line above it, the map says as much.
    head = [(*_places(layers), *cell)] if len(lines) < height else []
    foot = [plain(f"unused {view.signs.shades} hot", DIM)] if len(lines) + 2 <= height else []
    return rows([*head, *lines, *foot])


def _places(layers: Sequence[ExpertLayerSnapshot]) -> Line:
    """How many experts are computed where, with the marks of those places that there are."""
    line: list[Span] = []
    for place in FARTHEST:
        count = sum(layer.where.count(place) for layer in layers)
        if count:
            line.append((f"{MARKS[place].strip()} {NAMES[place]} {count}  ".lstrip(), STYLES[place]))
    return tuple(line)


@lru_cache(maxsize=4)  # it changes every two seconds and is drawn four times a second
def _map(layers: tuple[ExpertLayerSnapshot, ...], across: int, down: int, signs: Signs) -> tuple[Line, ...]:
    return tuple(_layers(layers[at : at + down], across, signs) for at in range(0, len(layers), down))


def _layers(layers: Sequence[ExpertLayerSnapshot], across: int, signs: Signs) -> Line:
    """One line: these layers' experts, `across` to a cell; neighbours of one style are one span."""
    line: list[Span] = [(f"{layers[0].layer:<{LABEL_CELLS}}", DIM)]
    for begin in range(0, len(layers[0].use), across):
        end = begin + across
        use = max(max(layer.use[begin:end]) for layer in layers)
        where = max((max(layer.where[begin:end], key=FARTHEST.index) for layer in layers), key=FARTHEST.index)
        cell, style = _shade(use, signs) + MARKS[where], STYLES[where]
        if line[-1][1] == style:
            line[-1] = (line[-1][0] + cell, style)
        else:
            line.append((cell, style))
    return tuple(line)


def _shade(use: int, signs: Signs) -> str:
    steps = len(signs.shades) - 1
    return signs.shades[0] if use <= 0 else signs.shades[min(-(-use * steps // USE_MAX), steps)]
