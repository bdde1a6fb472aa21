"""Runs `up`'s machinery over a FakeNode as a process of its own: `python fake_up.py DATA_DIR [screen] [PIECE_S]`."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import trio

from kvasir_node.base.errors import DataError, UsageError
from kvasir_node.base.settings import Settings, data_dir_of, load_settings
from kvasir_node.surfaces import log
from kvasir_node.surfaces.app import run_up
from kvasir_node.surfaces.fake_node import FakeNode, busy_snapshot
from kvasir_node.surfaces.screen import terminal_screen


@asynccontextmanager
async def open_fake(settings: Settings, start_s: float, piece_s: float) -> AsyncIterator[FakeNode]:
    print("opening", file=sys.stderr, flush=True)
    await trio.sleep(start_s)
    if settings.node.name == "broken":
        raise DataError("no such weights")
    node = FakeNode(settings, piece_s=piece_s)
    node.status = busy_snapshot()
    yield node


def recheck(settings: Settings) -> None:
    """Refuses as long as a file in the data directory says why."""
    refusal = data_dir_of(settings) / "refusal"
    if refusal.exists():
        raise UsageError(refusal.read_text())


def main(data_dir: str, *options: str) -> int:
    given = dict(option.split("=", 1) for option in options)
    screen, start_s = given.pop("screen", None), float(given.pop("start_s", 0))
    piece_s = float(given.pop("piece_s", 0))
    settings = load_settings(flags={"node.data_dir": data_dir, "api.listen": "127.0.0.1:0", **given})
    lines = log.pane()
    log.set_up_logging(settings.log, lines=lines if screen else None)
    open_node = partial(open_fake, start_s=start_s, piece_s=piece_s)
    shown = terminal_screen if screen else None
    run = partial(run_up, open_node, settings, screen=shown, log_lines=lines, recheck=partial(recheck, settings))
    return trio.run(run)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
