"""The screen as text: everything that matters is on it, at any size, without colour, whatever peers call themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from kvasir_node.base.snapshot import HubSnapshot, NetSnapshot, NodeSnapshot, WorkerSnapshot
from kvasir_node.surfaces.fake_node import busy_snapshot, fake_snapshot
from kvasir_node.surfaces.tui import BAR_CELLS, Frame, bar, render

LOG = [f"12:00:{index:02d} info roles.node: line {index}" for index in range(50)]


def lines_of(snapshot: NodeSnapshot, width: int, height: int, **frame: bool) -> list[str]:
    return render(snapshot, Frame("http://127.0.0.1:9480", LOG, **frame), width, height).plain.split("\n")


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40)])
def test_a_busy_node_shows_what_matters(width, height):
    lines = lines_of(busy_snapshot(), width, height)
    text = "\n".join(lines)
    assert len(lines) == height
    assert lines[1].startswith("! cannot reach /ip4/192.0.2.1/tcp/9481")
    for part in (
        "demo  qwen3_moe  6 layers x 16 experts  12/12 slices",
        "http://127.0.0.1:9480",
        f"[{'#' * BAR_CELLS}] 4/4 busy",
        "9/64  oldest 1.2 s",
        "SATURATED   pressure 3.25",
        "61.4 tokens/s",
        "on: queue 9, gain 1.7x, 2 workers",
        "remote 18,100",
        "0:0-7           2      1      1",
        "cellar",
        "+ proven",
        "! suspect",
        "? trial",
        "kvasir-node ticket",
        "line 49",
        "q quit",
    ):
        assert part in text, part
    assert lines[-2].endswith("line 49")


def test_a_calm_node_says_so():
    text = "\n".join(lines_of(fake_snapshot(), 80, 24))
    assert "calm" in text
    assert "SATURATED" not in text
    assert "off: calm" in text
    assert f"[{'-' * BAR_CELLS}] 0/4 busy" in text


def test_a_worker_without_model_or_hub_fits_too():
    snapshot = fake_snapshot(roles=("worker",), model=None, hub=None)
    text = "\n".join(lines_of(snapshot, 80, 24))
    assert "model    none" in text
    assert "slots" not in text
    assert "worker   idle" in text
    assert "demand" not in text
    assert "workers" not in text


def test_a_paused_worker_says_why():
    snapshot = fake_snapshot(worker=WorkerSnapshot("paused", reason="on battery"))
    assert "worker   paused: on battery   rows 0" in "\n".join(lines_of(snapshot, 80, 24))


def test_one_peer_is_no_peers_and_what_is_unknown_is_not_shown():
    text = "\n".join(lines_of(fake_snapshot(net=NetSnapshot(1, 1, 0)), 80, 24))
    assert "net      1 peer (1 direct, 0 relayed)   in 0 B" in text
    text = "\n".join(lines_of(fake_snapshot(net=NetSnapshot(2, 2, 0, reachability="public")), 80, 24))
    assert "net      2 peers (2 direct, 0 relayed)   public   in 0 B" in text


def test_after_a_burst_saturated_says_that_it_ends():
    slots = replace(busy_snapshot().slots, busy=0, queued=0, pressure=0.0)
    assert "SATURATED   pressure 0.00   calm again soon" in "\n".join(lines_of(fake_snapshot(slots=slots), 80, 24))
    assert "calm again soon" not in "\n".join(lines_of(busy_snapshot(), 80, 24))


def test_what_does_not_fit_is_counted():
    worker = busy_snapshot().workers[0]
    want = replace(busy_snapshot().hub or HubSnapshot(), demand=busy_snapshot().hub.demand * 20)
    lines = lines_of(fake_snapshot(workers=(worker,) * 40, hub=want, warnings=("w",) * 9), 80, 30)
    assert sum("more" in line for line in lines) == 3
    assert "! and 6 more: kvasir-node status" in lines
    assert lines[-2].endswith("line 49")


def test_help_replaces_the_tables():
    text = "\n".join(lines_of(busy_snapshot(), 80, 24, help=True))
    assert "this help" in text
    assert "cellar" not in text


def test_names_of_peers_cannot_move_the_cursor():
    evil = replace(busy_snapshot().workers[0], name="\x1b[2J\nforged", reason="\u202etxt\x07")
    text = "\n".join(lines_of(fake_snapshot(workers=(evil,), name="\x9b31m"), 120, 40))
    assert text.count("\n") == 39
    assert all(c.isprintable() or c == "\n" for c in text)


def test_ascii_terminals_get_ascii():
    text = "\n".join(lines_of(fake_snapshot(name="M\u00fcller \U0001f9ca"), 80, 24, ascii_only=True))
    assert text.isascii()
    assert "M?ller" in text


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(1, 200), st.integers(1, 60), st.booleans(), st.text(max_size=8))
def test_any_size_is_kept(width, height, busy, name):
    snapshot = replace(busy_snapshot() if busy else fake_snapshot(), name=name)
    lines = lines_of(snapshot, width, height)
    assert len(lines) == height
    assert all(cell_len(line) <= width for line in lines)


@pytest.mark.parametrize(
    ("used", "total", "cells"), [(0, 4, 0), (1, 1000, 1), (2, 4, 6), (999, 1000, 11), (4, 4, 12), (9, 4, 12), (0, 0, 0)]
)
def test_bars_never_round_to_empty_or_full(used, total, cells):
    assert bar(used, total).count("#") == cells
