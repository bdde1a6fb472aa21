"""What a pane has to show, and the part of it that fits. It does not know what the rows mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvasir_node.surfaces.panes.lines import DIM, Line, plain

Item = TypeVar("Item")
HEAD = "dim underline"


@dataclass(frozen=True, slots=True)
class Content(Generic[Item]):
    """Rows that are drawn only when they are seen, under a head; of a log, the end is what is seen first."""

    items: Sequence[Item]
    draw: Callable[[Item], Line]
    head: Line | None = None
    is_log: bool = False


def rows(lines: Sequence[Line]) -> Content[Line]:
    """Lines as they are."""
    return Content(lines, lambda line: line)


def nothing(words: str) -> Content[Line]:
    return rows([plain(words, DIM)])


@dataclass(frozen=True, slots=True)
class Seen:
    """The lines that fit; `scroll_max` rows can be passed, `hidden` of them are still to be."""

    lines: list[Line]
    scroll_max: int
    hidden: int
    is_log: bool


def window(content: Content[Item], lines_max: int, scroll: int) -> Seen:
    """The lines that fit when `scroll` rows are passed."""
    head = [content.head] if content.head is not None and lines_max > 1 else []
    room = max(lines_max - len(head), 0)
    scroll_max = max(len(content.items) - room, 0)
    scroll = min(scroll, scroll_max)
    begin = scroll_max - scroll if content.is_log else scroll
    lines = [*head, *map(content.draw, content.items[begin : begin + room])]
    return Seen(lines, scroll_max, scroll_max - scroll, content.is_log)
