"""The live screen: redraws a few times a second, reads keys, and always gives the terminal back.

It does not know what is drawn (`tui.render`), where it comes from (`sources`), nor what quitting means. The terminal is
given back at a suspension (Ctrl-Z) too, and taken again once the shell has put us in its foreground; in the background
the node goes on unseen.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import trio

from kvasir_node.surfaces.invitation import Invitation
from kvasir_node.surfaces.keys import KeyReader
from kvasir_node.surfaces.ports import NodePort
from kvasir_node.surfaces.sources import LocalSource, Source
from kvasir_node.surfaces.terminal import Terminal, taken_terminal
from kvasir_node.surfaces.tui import panes_of, render
from kvasir_node.surfaces.view import Action, View, press

REDRAW_S = 0.25
KEY_BYTES_MAX = 64
KEY_REST_S = 0.05  # the bytes of one key come together; what comes alone is Esc


@asynccontextmanager
async def terminal_screen(
    node: NodePort, api: str | None, lines: deque[str], *, no_color: bool = False
) -> AsyncIterator[trio.Event]:
    """Shows a node of this process while the context is open; the event is set when its person wants to leave."""
    async with shown(LocalSource(node, api, lines), no_color=no_color) as quit_key:
        yield quit_key


@asynccontextmanager
async def shown(source: Source, *, no_color: bool) -> AsyncIterator[trio.Event]:
    """Shows a source while the context is open; the event is set when `q` is pressed or input ends."""
    quit_key = trio.Event()
    watched = (signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH)
    # Signals first: a Ctrl-Z that came between would stop us with the terminal taken.
    with trio.open_signal_receiver(*watched) as signals, taken_terminal(no_color) as terminal:
        screen = _Screen(source, terminal)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(screen.redraw_forever)
            nursery.start_soon(screen.read_keys, quit_key)
            nursery.start_soon(screen.follow_signals, signals)
            yield quit_key
            nursery.cancel_scope.cancel()


class _Screen:
    """What is shown, and which keys change it."""

    def __init__(self, source: Source, terminal: Terminal) -> None:
        self.source, self.terminal = source, terminal
        self.view = View(ascii_only=terminal.ascii_only)
        self._invitation: Invitation | None = None
        self._keys = KeyReader()

    def redraw(self) -> None:
        if not self.terminal.is_ours:
            return
        picture = replace(self.source.picture(), invitation=self._invitation)
        self.view = self.view.with_panes(panes_of(picture.snapshot))
        drawn = render(picture, self.view, *self.terminal.size())
        self.view = replace(self.view, scroll=min(self.view.scroll, drawn.scroll_max))
        self.terminal.show(drawn.lines)

    async def redraw_forever(self) -> None:
        while True:
            self.terminal.take()
            self.redraw()
            await trio.sleep(REDRAW_S)

    async def read_keys(self, quit_key: trio.Event) -> None:
        while True:
            with trio.move_on_after(KEY_REST_S if self._keys.is_waiting else float("inf")) as scope:
                await trio.lowlevel.wait_readable(self.terminal.fd)
            if not self.terminal.is_ours or not self.terminal.is_foreground():
                await trio.sleep(REDRAW_S)  # what is typed now is the shell's
                continue
            keys = self._keys.rest() if scope.cancelled_caught else self._typed()
            if keys is None or await self._press(keys):
                quit_key.set()
                return

    def _typed(self) -> list[str] | None:
        """None at the end of input, which is that of a terminal that was closed, too."""
        try:
            data = os.read(self.terminal.fd, KEY_BYTES_MAX)
        except OSError:
            return None
        return self._keys.feed(data) if data else None

    async def _press(self, keys: list[str]) -> bool:
        """True when one of them was to quit."""
        for key in keys:
            if key == "redraw":
                self.terminal.forget()
            self.view, action = press(self.view, key)
            if action is Action.QUIT:
                return True
            if action is Action.LEND_OR_NOT:
                self.view = replace(self.view, notice=await self.source.lend_or_not())
            elif action is Action.INVITE_PHONE:
                self._invitation = await self.source.invite_phone()
        self.redraw()
        return False

    async def follow_signals(self, signals: AsyncIterator[int]) -> None:
        """Ctrl-Z gives the terminal back before it stops us; whoever continues us may have changed the terminal."""
        async for number in signals:
            if number == signal.SIGTSTP:
                self.terminal.give_back()
                _stop()
            if number != signal.SIGWINCH:
                self.terminal.take()
                self.terminal.mend()
            self.terminal.forget()
            self.redraw()


def _stop() -> None:
    """As if we had never caught the signal: the system does not stop a process that nobody could continue."""
    ours = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    signal.raise_signal(signal.SIGTSTP)  # returns when we are continued
    signal.signal(signal.SIGTSTP, ours)
