"""The live screen in a real terminal: redraws a few times a second, reads keys, and always gives the terminal back.

It does not know what is drawn (`tui.render`) nor what quitting means.
"""

from __future__ import annotations

import os
import sys
import termios
import tty
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace

import trio
from rich.console import Console
from rich.live import Live

from kvasir_node.surfaces.ports import NodePort
from kvasir_node.surfaces.tui import Frame, render

REDRAW_S = 0.25
KEY_BYTES_MAX = 64


def can_show_screen(no_color: bool = False) -> bool:
    """A terminal on both ends that can move its cursor."""
    return sys.stdin.isatty() and sys.stdout.isatty() and not _console(no_color).is_dumb_terminal


def _console(no_color: bool) -> Console:
    return Console(no_color=no_color or None, highlight=False, markup=False)  # None: rich looks at NO_COLOR itself


@asynccontextmanager
async def terminal_screen(
    node: NodePort, api: str | None, lines: deque[str], *, no_color: bool = False
) -> AsyncIterator[trio.Event]:
    """Shows the node while the context is open; the event is set when `q` is pressed or input ends."""
    quit_key = trio.Event()
    console = _console(no_color)
    with keys_at_once(sys.stdin.fileno()), _alternate_screen(console) as live:
        view = _View(node, console, live, Frame(api, lines, ascii_only=not console.encoding.startswith("utf")))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(view.redraw_forever)
            nursery.start_soon(view.read_keys, sys.stdin.fileno(), quit_key)
            yield quit_key
            nursery.cancel_scope.cancel()


@contextmanager
def keys_at_once(fd: int) -> Iterator[None]:
    """Keys arrive one by one and are not echoed; Ctrl-C stays a signal. Restores what was, whatever happens."""
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


@contextmanager
def _alternate_screen(console: Console) -> Iterator[Live]:
    with Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:
        yield live


class _View:
    """What is shown, and which keys change it."""

    def __init__(self, node: NodePort, console: Console, live: Live, frame: Frame) -> None:
        self.node, self.console, self.live, self.frame = node, console, live, frame

    def redraw(self) -> None:
        width, height = self.console.size
        self.live.update(render(self.node.snapshot(), self.frame, width, height), refresh=True)

    async def redraw_forever(self) -> None:
        while True:
            self.redraw()
            await trio.sleep(REDRAW_S)

    async def read_keys(self, fd: int, quit_key: trio.Event) -> None:
        while True:
            await trio.lowlevel.wait_readable(fd)
            keys = os.read(fd, KEY_BYTES_MAX)
            if not keys or b"q" in keys.lower():
                quit_key.set()
                return
            if b"?" in keys:
                self.frame = replace(self.frame, help=not self.frame.help)
                self.redraw()
