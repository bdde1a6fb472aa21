"""A terminal that is ours or the shell's: taking it, giving it back, and drawing only the lines that changed.

It does not know what is drawn. Drawing never waits: a terminal that takes nothing (a connection that fell asleep)
misses frames and holds nothing else up. So it is opened a second time, for writing without blocking; the flags of the
descriptors that we were given are shared with the shell and stay as they are.
"""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style

from kvasir_node.surfaces.panes.lines import Line

# The other screen, no cursor, and marks around what is pasted: nobody means the keys that are in it.
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l\x1b[?2004h\x1b[2J", "\x1b[0m\x1b[?2004l\x1b[?25h\x1b[?1049l"
GIVE_BACK_S = 1.0  # to a terminal that takes nothing
_PROBE = "x"


def can_show_screen(no_color: bool = False) -> bool:
    """A terminal on both ends that can move its cursor."""
    return sys.stdin.isatty() and sys.stdout.isatty() and not _console(no_color).is_dumb_terminal


def _console(no_color: bool) -> Console:
    return Console(no_color=no_color or None, highlight=False, markup=False)  # None: rich looks at NO_COLOR itself


@contextmanager
def taken_terminal(no_color: bool) -> Iterator[Terminal]:
    """Restores what was, whatever happens."""
    terminal = Terminal(_console(no_color), sys.stdin.fileno(), sys.stdout.fileno())
    try:
        terminal.take()
        yield terminal
    finally:
        terminal.give_back()
        terminal.close()


class Terminal:
    """Ours or the shell's. While it is ours, the alternate screen is shown, keys come one by one and have no echo."""

    def __init__(self, console: Console, keys_fd: int, shown_fd: int) -> None:
        self.fd = keys_fd
        self.is_ours = False
        self.ascii_only = not console.encoding.startswith("utf")
        self._console = console
        self._before = termios.tcgetattr(keys_fd)
        self._out = _opened_again(shown_fd)
        self._encoding = console.encoding
        self._shown: list[str] = []  # lines, as they were drawn
        self._unsent = b""

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
            self._send(ENTER)
            self.forget()

    def mend(self) -> None:
        """After a stop that did not ask us first; drops no key that was typed."""
        if self.is_ours and self.is_foreground():
            tty.setcbreak(self.fd, termios.TCSADRAIN)

    def give_back(self) -> None:
        """Waits a moment for a terminal that takes nothing, then leaves it as it is."""
        if not self.is_ours:
            return
        self.is_ours = False
        until = time.monotonic() + GIVE_BACK_S
        self._send(LEAVE)
        while self._unsent and (left := until - time.monotonic()) > 0:
            select.select([], [self._out], [], left)
            self._send("")
        self._unsent = b""
        if self.is_foreground():
            termios.tcsetattr(self.fd, termios.TCSANOW, self._before)

    def close(self) -> None:
        os.close(self._out)

    def size(self) -> tuple[int, int]:
        """Cells across and lines; what the terminal says now, else what the environment says."""
        try:
            size = os.get_terminal_size(self._out)
        except OSError:
            return self._console.size
        return (size.columns, size.lines) if size.columns and size.lines else self._console.size

    def forget(self) -> None:
        """Draws everything next time."""
        self._shown = []

    def show(self, lines: Sequence[Line]) -> None:
        """Draws the lines that are not as they were, only while the terminal is ours. Never waits."""
        if not self.is_ours or not self.is_foreground():
            return
        self._send("")
        if self._unsent:
            return
        drawn = [self._drawn(line) for line in lines]
        if len(drawn) != len(self._shown):
            self._shown = [""] * len(drawn)
            self._send("\x1b[0m\x1b[2J")
        changed = [f"\x1b[{at + 1};1H{new}" for at, new in enumerate(drawn) if new != self._shown[at]]
        self._shown = drawn
        self._send("".join(changed))

    def _drawn(self, line: Line) -> str:
        no_color = self._console.no_color
        return "".join(f"{_codes(style, no_color)[0]}{text}{_codes(style, no_color)[1]}" for text, style in line)

    def _send(self, text: str) -> None:
        """As much as the terminal takes now; the rest goes before whatever comes next."""
        self._unsent += text.encode(self._encoding, "replace")
        while self._unsent:
            try:
                self._unsent = self._unsent[os.write(self._out, self._unsent) :]
            except BlockingIOError:
                return
            except OSError:  # it is gone; whoever reads its keys finds out
                self._unsent = b""


@lru_cache(maxsize=64)
def _codes(style: str, no_color: bool) -> tuple[str, str]:
    """What a terminal is sent before and after text of that style."""
    if not style:
        return "", ""
    parsed = Style.parse(style)
    parsed = parsed.without_color if no_color else parsed
    before, _, after = parsed.render(_PROBE, color_system=ColorSystem.STANDARD).partition(_PROBE)
    return before, after


def _opened_again(fd: int) -> int:
    """The same terminal with flags of its own; where it has no name here, the same descriptor, which blocks."""
    try:
        return os.open(os.ttyname(fd), os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return os.dup(fd)
