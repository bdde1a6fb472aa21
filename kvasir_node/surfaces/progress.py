"""How far something is, on stderr: a bar in a terminal, a plain line now and then elsewhere.

It does not know what goes on. What is over within a second shows nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvasir_node.surfaces.exits import say
from kvasir_node.surfaces.words import size_text

QUIET_S = 1.0
LINE_S = 10.0  # between two lines where there is no terminal

Advance = Callable[[int, int], None]
"""(bytes done, bytes in all)"""


@contextmanager
def progress(words: str, *, no_color: bool = False, clock: Callable[[], float] = time.monotonic) -> Iterator[Advance]:
    """Tells of `words`, such as "fetching"; the bar goes when the context is left. Advance from any thread."""
    shown = _Bar(words, clock, no_color=no_color) if _is_terminal() else _Lines(words, clock)
    try:
        yield shown.advance
    finally:
        shown.end()


@contextmanager
def waiting(words: Callable[[], str], *, no_color: bool = False) -> Iterator[None]:
    """For what has no known length: in a terminal, `words()` and the seconds so far, until the context is left."""
    if not _is_terminal():
        yield
        return
    from rich.progress import Progress, ProgressColumn, SpinnerColumn, TimeElapsedColumn
    from rich.text import Text

    class Words(ProgressColumn):
        def render(self, task: Any) -> Text:
            return Text(words(), no_wrap=True, overflow="ellipsis")

    with Progress(SpinnerColumn(), TimeElapsedColumn(), Words(), console=_console(no_color), transient=True) as bar:
        bar.add_task("", total=None)
        yield


def _is_terminal() -> bool:
    return sys.stderr.isatty()


def _console(no_color: bool) -> Any:
    from rich.console import Console

    return Console(stderr=True, no_color=no_color or None, highlight=False)  # None: rich looks at NO_COLOR itself


class _Bar:
    def __init__(self, words: str, clock: Callable[[], float], *, no_color: bool) -> None:
        self._words, self._clock, self._no_color = words, clock, no_color
        self._began_at = clock()
        self._bar: Any = None
        self._task: Any = None

    def advance(self, done: int, total: int) -> None:
        if self._bar is None and self._clock() - self._began_at >= QUIET_S:
            self._open()
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)

    def _open(self) -> None:
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(compact=True),
        )
        self._bar = Progress(*columns, console=_console(self._no_color), transient=True)
        self._task = self._bar.add_task(self._words)
        self._bar.start()

    def end(self) -> None:
        if self._bar is not None:
            self._bar.stop()


class _Lines:
    def __init__(self, words: str, clock: Callable[[], float]) -> None:
        self._words, self._clock = words, clock
        self._said_at = clock() + QUIET_S - LINE_S

    def advance(self, done: int, total: int) -> None:
        if total and self._clock() - self._said_at >= LINE_S:
            self._said_at = self._clock()
            say(f"{self._words}: {100 * done // total} % ({size_text(done)} of {size_text(total)})")

    def end(self) -> None:
        pass
