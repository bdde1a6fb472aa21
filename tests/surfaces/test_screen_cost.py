"""What the screen costs: at most 3 % of a core at four pictures a second, of a large model and many workers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from terminals import in_terminal, resize
from tui_pictures import LOG, busy, experts

from kvasir_node.surfaces.fake_node import busy_snapshot
from kvasir_node.surfaces.screen import REDRAW_S
from kvasir_node.surfaces.tui import render
from kvasir_node.surfaces.view import View

pytestmark = pytest.mark.soak

SHARE_MAX = 0.03  # of a core
SECONDS = 10.0


def test_drawing_a_large_swarm():
    """Each picture another one: nothing but the heat map, which changes every two seconds, may be remembered."""
    workers = tuple(replace(busy_snapshot().workers[0], name=f"worker {index}", rows=index) for index in range(64))
    count, began = 100, time.process_time()
    for index in range(count):
        layers = experts(48, 128) if index % 8 == 0 else None
        snapshot = replace(busy().snapshot, workers=workers, uptime_s=float(index))
        seen = layers or seen  # noqa: F821  (the first has layers)
        drawn = render(busy(snapshot=snapshot, experts=seen, log=LOG * 40), View(), 120, 40)
    took_s = (time.process_time() - began) / count
    print(f"a picture of 120x40: {took_s * 1000:.2f} ms, {took_s / REDRAW_S:.2%} of a core")
    assert len(drawn.lines) == 40
    assert took_s / REDRAW_S < SHARE_MAX


def test_a_process_that_shows_it(tmp_path: Path):
    script = Path(__file__).with_name("fake_up.py")
    costs: dict[str, float] = {}
    for screen in ("", "screen=yes"):
        command = [sys.executable, str(script), str(tmp_path), *screen.split()]
        with in_terminal(command, {"TERM": "xterm"}) as (shown, end):
            resize(end, 40, 120)
            shown.until("q quit" if screen else "kvasir.ready")
            costs[screen] = _share_of_core(shown.process, shown.controller)
            shown.process.terminate()
            shown.process.wait(15)
    print(f"without the screen {costs['']:.2%} of a core, with it {costs['screen=yes']:.2%}")
    assert costs["screen=yes"] - costs[""] < SHARE_MAX


def _share_of_core(process: subprocess.Popen[bytes], controller: int) -> float:
    """Of the next seconds, while somebody reads what is drawn."""
    watched = psutil.Process(process.pid)
    os.set_blocking(controller, False)
    before, began = watched.cpu_times(), time.monotonic()
    while (lasted_s := time.monotonic() - began) < SECONDS:
        time.sleep(0.1)
        try:
            os.read(controller, 1 << 16)
        except BlockingIOError:
            continue
    after = watched.cpu_times()
    return (after.user + after.system - before.user - before.system) / lasted_s
