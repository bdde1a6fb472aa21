"""`up`, from settings to exit code: the node, its API, the ready line or the screen, signals, and the end.

It does not know how a node is built (`open_node` is handed in) nor how flags became settings.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TextIO

import trio

from kvasir_node.base.errors import KvasirError
from kvasir_node.base.settings import Settings, data_dir_of, environment
from kvasir_node.surfaces.address import check_key_policy, parse_address
from kvasir_node.surfaces.beside import run_beside
from kvasir_node.surfaces.exits import INTERRUPTED, RESTART, say
from kvasir_node.surfaces.http import serve_api
from kvasir_node.surfaces.listener import bound_address, open_listeners, url_of
from kvasir_node.surfaces.nodefile import NodeFile, claimed, remove_node_file, write_node_file
from kvasir_node.surfaces.phone_door import PhoneDoor
from kvasir_node.surfaces.phone_page import PhonePage, serve_page
from kvasir_node.surfaces.ports import NodePort
from kvasir_node.surfaces.reports import work_left
from kvasir_node.surfaces.service_manager import ServiceManager

OpenNode = Callable[[Settings], AbstractAsyncContextManager[NodePort]]
Screen = Callable[[NodePort, str | None, deque[str]], AbstractAsyncContextManager[trio.Event]]
"""Shows the node until left; the event is set when the person wants to quit. It restores the terminal when left."""

API_GRACE_S = 1.0  # after draining: answers are complete, this is for their last bytes
DRAIN_WORDS_S = 2.0  # between two lines about what a drain waits for

logger = logging.getLogger(__name__)


async def run_up(
    open_node: OpenNode,
    settings: Settings,
    *,
    screen: Screen | None = None,
    log_lines: deque[str] | None = None,
    stdout: TextIO | None = None,
    recheck: Callable[[], object] = lambda: None,
) -> int:
    """Runs one node until SIGTERM, SIGINT, SIGHUP or the screen's quit key, drains it, and returns the exit code.

    0, but 130 when SIGINT came before the node was ready, and 75 after SIGHUP: whoever supervises us starts us again,
    with the settings as they are then. With a screen SIGHUP says that its terminal is gone, and is as SIGTERM.
    `recheck` raises KvasirError when those settings would not start; then SIGHUP changes nothing. A second SIGINT
    ends the process at once with 130. Raises what `open_node` and the API raise at the start.
    """
    if settings.api.listen:
        check_key_policy(settings.api.listen, settings.api.key)
    data_dir = data_dir_of(settings)
    with claimed(data_dir), trio.open_signal_receiver(*_signals_heard()) as signals:
        lines = log_lines if log_lines is not None else deque(maxlen=1)
        life = _Life(settings, data_dir, screen, lines, stdout or sys.stdout, recheck)
        await run_beside(lambda: life.watch(signals), lambda: life.run(open_node))
        return life.exit_code


def _signals_heard() -> tuple[signal.Signals, ...]:
    """`nohup` has us ignore SIGHUP, and that stays so."""
    heard = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return tuple(number for number in heard if signal.getsignal(number) is not signal.SIG_IGN)


async def _bound(opened: AsyncExitStack, section: str, listen: str) -> list[trio.SocketListener]:
    """The listeners of one setting, which are closed with the stack; none when it is empty."""
    listeners = await open_listeners(parse_address(listen, f"{section}.listen"), f"--{section}") if listen else []
    for listener in listeners:
        opened.push_async_callback(listener.aclose)
    return listeners


class _Life:
    """One node's life, told by its signals and its API."""

    def __init__(
        self,
        settings: Settings,
        data_dir: Path,
        screen: Screen | None,
        log_lines: deque[str],
        stdout: TextIO,
        recheck: Callable[[], object],
    ) -> None:
        self.settings, self.data_dir = settings, data_dir
        self.screen, self.log_lines, self.stdout = screen, log_lines, stdout
        self.ready = False
        self.exit_code = 0
        self.door = PhoneDoor(PhonePage(), None)
        self._recheck = recheck
        self._manager = ServiceManager(environment())
        self._stop = trio.Event()

    def stop(self) -> None:
        self._stop.set()

    def restart(self) -> None:
        """Raises UsageError when the settings as they are now would not start, and changes nothing then."""
        self._recheck()
        if not self._stop.is_set():
            self.exit_code = RESTART
        self._stop.set()

    async def watch(self, signals: AsyncIterator[int]) -> None:
        """Returns, which cancels `run`, when a signal comes before the node is ready: there is nothing to drain."""
        async for number in signals:
            if self._stop.is_set() and number == signal.SIGINT:
                self._end_at_once()
            if self.ready:
                logger.info("%s received", signal.Signals(number).name)
            self._obey(number)
            if not self.ready and self._stop.is_set():
                self.exit_code = INTERRUPTED if number == signal.SIGINT else self.exit_code
                return

    def _obey(self, number: int) -> None:
        if number != signal.SIGHUP or self.screen is not None:  # the terminal of the screen is gone
            self.stop()
            return
        try:
            self.restart()
        except KvasirError as error:
            logger.error("going on as before, not restarting: %s", error)

    def _end_at_once(self) -> None:
        """Threads that compute cannot be cancelled, so this does not go through trio's end."""
        remove_node_file(self.data_dir)
        sys.stdout.flush()
        os._exit(INTERRUPTED)

    async def run(self, open_node: OpenNode) -> None:
        """Binds before it loads anything: a port in use is told at once, and early clients wait instead of failing."""
        async with AsyncExitStack() as opened:
            listeners = await _bound(opened, "api", self.settings.api.listen)
            phone_listeners = await _bound(opened, "phone", self.settings.phone.listen)
            if page_listeners := phone_listeners or listeners:
                self.door = replace(self.door, served_at=bound_address(page_listeners))
            node = await opened.enter_async_context(open_node(self.settings))
            await self._serve(node, listeners, phone_listeners)

    async def _serve(
        self, node: NodePort, listeners: list[trio.SocketListener], phone_listeners: list[trio.SocketListener]
    ) -> None:
        url = url_of(listeners) if listeners else None
        info = node.ready_info()
        api_stop = trio.Event()
        async with trio.open_nursery() as nursery:
            if listeners:
                nursery.start_soon(partial(serve_api, node, self, listeners, stop=api_stop, grace_s=API_GRACE_S))
            if phone_listeners:
                nursery.start_soon(
                    partial(serve_page, self.door.page, phone_listeners, stop=api_stop, grace_s=API_GRACE_S)
                )
            write_node_file(self.data_dir, NodeFile(os.getpid(), url, info["peer_id"], info["ticket"]))
            try:
                self.ready = True
                await run_beside(self._manager.prove_alive, lambda: self._until_drained(node, url))
            finally:
                remove_node_file(self.data_dir)
            api_stop.set()

    async def _until_drained(self, node: NodePort, url: str | None) -> None:
        self._manager.tell(READY="1", STATUS=f"serving{f' at {url}' if url else ''}")
        await self._until_stopped(node, url)
        self._stop.set()
        self._manager.tell(STOPPING="1", STATUS="draining")
        await run_beside(lambda: self._tell_of_drain(node), lambda: self._drain(node))

    async def _until_stopped(self, node: NodePort, url: str | None) -> None:
        if self.screen is None:
            print(json.dumps({**node.ready_info(), "api": url}), file=self.stdout, flush=True)
            await self._stop.wait()
            return
        async with self.screen(node, url, self.log_lines) as quit_key:
            await run_beside(quit_key.wait, self._stop.wait)

    async def _drain(self, node: NodePort) -> None:
        timeout_s = self.settings.node.drain_timeout_s
        with trio.move_on_after(timeout_s) as scope:
            await node.drain()
        if scope.cancelled_caught:
            self._say("stopping with work under way: it did not end within %.0f s", timeout_s)

    async def _tell_of_drain(self, node: NodePort) -> None:
        """Until cancelled; silent when there is nothing to wait for."""
        await trio.sleep(DRAIN_WORDS_S / 10)
        while True:
            if left := work_left(node.snapshot().to_json()):
                self._say("draining: waiting for %s; a second SIGINT (Ctrl-C) ends at once", left)
            await trio.sleep(DRAIN_WORDS_S)

    def _say(self, words: str, *values: object) -> None:
        """Once the screen has gone nobody sees its lines of the log."""
        logger.warning(words, *values)
        if self.screen is not None:
            say(words % values)
