"""The live screen in a real terminal: redraws a few times a second, reads keys, and always gives the terminal back.

It does not know what is drawn (`tui.render`) nor what quitting means. The terminal is given back at a suspension
(Ctrl-Z) too, and taken again once the shell has put us in its foreground; in the background the node goes on unseen.
"""

from __future__ import annotations

import os
import signal
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
from rich.text import Text

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
    frame = Frame(api, lines, ascii_only=not console.encoding.startswith("utf"))
    # Signals first: a Ctrl-Z that came between would stop us with the terminal taken.
    with (
        trio.open_signal_receiver(signal.SIGTSTP, signal.SIGCONT) as signals,
        _taken_terminal(console, sys.stdin.fileno()) as terminal,
    ):
        view = _View(node, console, terminal, frame)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(view.redraw_forever)
            nursery.start_soon(view.read_keys, quit_key)
            nursery.start_soon(view.follow_job_control, signals)
            yield quit_key
            nursery.cancel_scope.cancel()


@contextmanager
def _taken_terminal(console: Console, fd: int) -> Iterator[_Terminal]:
    """Restores what was, whatever happens."""
    terminal = _Terminal(console, fd)
    try:
        terminal.take()
        yield terminal
    finally:
        terminal.give_back()


class _Terminal:
    """Ours or the shell's. While it is ours, the alternate screen is shown, keys come one by one and have no echo."""

    def __init__(self, console: Console, fd: int) -> None:
        self.fd = fd
        self.is_ours = False
        self._before = termios.tcgetattr(fd)
        self._live = Live(
            console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )

    def is_foreground(self) -> bool:
        """Whether the shell lets us use it: a job in the background that tries is stopped."""
        try:
            return os.tcgetpgrp(self.fd) == os.getpgrp()
        except OSError:  # not the terminal of our session, so there is no job control on it
            return True

    def take(self) -> None:
        if not self.is_ours and self.is_foreground():
            self.is_ours = True
            self._before = termios.tcgetattr(self.fd)
            tty.setcbreak(self.fd)  # Ctrl-C and Ctrl-Z stay signals
            self._live.start()

    def mend(self) -> None:
        """After a stop that did not ask us first; drops no key that was typed."""
        if self.is_ours and self.is_foreground():
            tty.setcbreak(self.fd, termios.TCSADRAIN)

    def give_back(self) -> None:
        if self.is_ours:
            self.is_ours = False
            self._live.stop()
            if self.is_foreground():
                termios.tcsetattr(self.fd, termios.TCSADRAIN, self._before)

    def show(self, text: Text) -> None:
        """Draws only while it is ours."""
        if self.is_ours and self.is_foreground():
            self._live.update(text, refresh=True)


class _View:
    """What is shown, and which keys change it."""

    def __init__(self, node: NodePort, console: Console, terminal: _Terminal, frame: Frame) -> None:
        self.node, self.console, self.terminal, self.frame = node, console, terminal, frame

    def redraw(self) -> None:
        width, height = self.console.size
        self.terminal.show(render(self.node.snapshot(), self.frame, width, height))

    async def redraw_forever(self) -> None:
        while True:
            self.terminal.take()
            self.redraw()
            await trio.sleep(REDRAW_S)

    async def read_keys(self, quit_key: trio.Event) -> None:
        while True:
            await trio.lowlevel.wait_readable(self.terminal.fd)
            if not self.terminal.is_ours or not self.terminal.is_foreground():
                await trio.sleep(REDRAW_S)  # what is typed now is the shell's
                continue
            keys = os.read(self.terminal.fd, KEY_BYTES_MAX)
            if not keys or b"q" in keys.lower():
                quit_key.set()
                return
            if b"?" in keys:
                self.frame = replace(self.frame, help=not self.frame.help)
                self.redraw()

    async def follow_job_control(self, signals: AsyncIterator[int]) -> None:
        """Ctrl-Z gives the terminal back before it stops us; whoever continues us may have changed the terminal."""
        async for number in signals:
            if number == signal.SIGTSTP:
                self.terminal.give_back()
                _stop()
            self.terminal.take()
            self.terminal.mend()
            self.redraw()


def _stop() -> None:
    """As if we had never caught the signal: the system does not stop a process that nobody could continue."""
    ours = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    signal.raise_signal(signal.SIGTSTP)  # returns when we are continued
    signal.signal(signal.SIGTSTP, ours)
