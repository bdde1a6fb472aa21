"""The screen as text: everything that matters is on it, at any size, without colour, whatever peers call themselves.

`screens/` holds whole screens. After a change that is meant, `python tests/surfaces/test_tui.py` writes them and the
docs anew; look at the difference before it is committed. docs/screens.md shows two of them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from tui_pictures import LOG, busy, calm, experts, lending

from kvasir_node.base.snapshot import FanoutSnapshot, HubSnapshot, ModelSnapshot, NetSnapshot, WorkerSnapshot
from kvasir_node.surfaces.fake_node import busy_snapshot, fake_snapshot
from kvasir_node.surfaces.invitation import Invitation
from kvasir_node.surfaces.panes.lines import ASCII, UNICODE, bar, curve
from kvasir_node.surfaces.picture import Picture
from kvasir_node.surfaces.tui import render
from kvasir_node.surfaces.view import LEVELS, Pane, Sheet, View

SCREENS = Path(__file__).with_name("screens")
DOCS = Path(__file__).parents[2] / "docs" / "screens.md"
SIZES = ((80, 24), (120, 40))
PICTURES = {"busy": busy, "calm": calm, "lending": lending}
SHOWN_IN_DOCS = (("busy", 80, 24), ("calm", 120, 40))


def text_of(picture: Picture, width: int, height: int, **view: Any) -> str:
    return render(picture, View(**view), width, height).text


def golden(name: str, width: int, height: int) -> str:
    """Lines of a file end where the last letter is."""
    lines = text_of(PICTURES[name](), width, height).split("\n")
    return "\n".join(line.rstrip() for line in lines) + "\n"


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("name", PICTURES)
def test_a_whole_screen_is_as_it_was_looked_at(name, width, height):
    assert golden(name, width, height) == (SCREENS / f"{name}_{width}x{height}.txt").read_text()


@pytest.mark.parametrize("shown", SHOWN_IN_DOCS)
def test_the_docs_show_it_as_it_is(shown):
    assert golden(*shown) in DOCS.read_text()


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_one_look_at_a_busy_node_tells_what_matters(width, height):
    text = text_of(busy(), width, height)
    for part in (
        "SATURATED  4 of 4 slots busy, 9 waiting; 1 worker helps, gain 1.7x",
        "! cannot reach /ip4/192.0.2.1/tcp/9481: timed out after 4 s",
        "workers help; another machine joins with what `kvasir-node ticket` prints",
        "61.4 tokens/s",
        "on: queue 9, gain 1.7x, 2 workers",
        "] 4/4 busy",
        "9/64 1.2s",
        "+ proven  cellar",
        "! suspect phone",
        "? trial   new one",
        "! demo",
        "! hub attic did not take our demand" if width == 80 else "! hub attic did not take our demand: time",
        "q quit",
    ):
        assert part in text, part


def test_a_calm_node_says_so_and_one_that_was_never_asked_says_how():
    assert "SERVING demo  calm, 0 of 4 slots busy; alone" in text_of(calm(), 80, 24)
    assert "all is well" in text_of(calm(), 80, 24)
    fresh = text_of(Picture(fake_snapshot(), "http://127.0.0.1:9480"), 80, 24)
    assert "ask it: `kvasir-node run demo`; in a browser: http://127.0.0.1:9480/" in fresh


@pytest.mark.parametrize(
    ("changes", "verdict", "advice"),
    [
        ({"draining": True}, "DRAINING", "it stops when its work is done"),
        ({"model": None}, "NOT SERVING", "kvasir-node up MODEL"),
        ({"warnings": ("a thing",)}, "SERVING demo", "kvasir-node doctor"),
        ({"worker": WorkerSnapshot("paused", reason="on battery")}, "SERVING demo", "resume` lends again"),
        ({"slots": replace(busy_snapshot().slots, queued=60)}, "SATURATED", "the queue is nearly full"),
        ({"slots": busy_snapshot().slots}, "SATURATED  4 of 4 slots busy, 9 waiting; alone", "nobody helps yet"),
        (  # it has left, or is shut out
            {"slots": busy_snapshot().slots, "workers": (replace(busy_snapshot().workers[0], slices=()),)},
            "SATURATED  4 of 4 slots busy, 9 waiting; alone",
            "nobody helps yet",
        ),
        (
            {"slots": busy_snapshot().slots, "workers": busy_snapshot().workers},
            "alone, 1 worker ready",
            "do not help: off",
        ),
        ({"roles": ("hub",), "worker": None, "model": None}, "HUB  1 coordinator, 0 leases", "all is well"),
        ({"roles": ("worker",), "hub": None, "worker": WorkerSnapshot("paused")}, "PAUSED", "resume` lends again"),
        ({"roles": (), "hub": None, "worker": None, "net": NetSnapshot(3)}, "RUNNING  3 peers", "all is well"),
    ],
)
def test_every_state_has_a_verdict_and_an_advice(changes, verdict, advice):
    text = text_of(Picture(fake_snapshot(**changes)), 100, 30)
    assert verdict in text
    assert advice in text


def test_a_node_that_does_not_answer_is_not_shown_as_well():
    text = text_of(calm(silent_s=12.4, trouble="connection refused"), 80, 24)
    assert "! NO ANSWER  for 12s; what is shown is old" in text
    assert "is it running? connection refused" in text
    assert "SERVING" not in text


def test_a_machine_that_only_lends_has_no_panes_of_others():
    text = text_of(lending(), 80, 24)
    assert "LENDING  2 slices held, 9,031 rows computed" in text
    assert not any(name in text for name in ("Slots", "Workers", "Experts", "Demand"))


def test_a_paused_worker_says_why():
    snapshot = fake_snapshot(worker=WorkerSnapshot("paused", reason="on battery"))
    assert "lending paused: on battery" in text_of(Picture(snapshot), 80, 24)


def test_what_is_unknown_is_not_shown():
    assert "net     1 peer " in text_of(Picture(fake_snapshot(net=NetSnapshot(1, 1, 0))), 80, 24)
    assert "unknown" not in text_of(Picture(fake_snapshot()), 80, 24)


def test_after_a_burst_saturated_says_that_it_ends():
    slots = replace(busy_snapshot().slots, busy=0, queued=0, pressure=0.0)
    assert "the burst is over" in text_of(Picture(fake_snapshot(slots=slots)), 80, 24)
    assert "the burst is over" not in text_of(busy(), 80, 24)


def test_what_does_not_fit_is_counted_and_can_be_scrolled_to():
    workers = tuple(replace(busy_snapshot().workers[0], name=f"w{index:02d}") for index in range(40))
    picture = Picture(fake_snapshot(workers=workers, warnings=("w",) * 9), log=LOG)
    drawn = render(picture, View(focus=Pane.WORKERS), 80, 30)
    assert "! (w: 6 more) w" in drawn.text
    assert "[4 Workers ↓" in drawn.text
    assert "w39" not in drawn.text
    assert "w39" in render(picture, View(focus=Pane.WORKERS, scroll=drawn.scroll_max), 80, 30).text
    beyond = render(picture, View(focus=Pane.WORKERS, scroll=10**6), 80, 30)
    assert "w39" in beyond.text
    assert beyond.scroll_max == drawn.scroll_max


def test_the_end_of_the_log_is_seen_first_and_its_beginning_by_scrolling():
    picture = calm(log=[f"12:00:{second:02d} info roles.node: line {second}" for second in range(60)])
    assert "line 59" in text_of(picture, 80, 24)
    assert "line 0" not in text_of(picture, 80, 24)
    assert "line 0" in text_of(picture, 80, 24, focus=Pane.LOG, scroll=60)


def test_a_filter_keeps_rows_that_hold_it_and_says_so():
    text = text_of(busy(), 80, 24, filter="PHONE")
    assert "suspect" in text
    assert "cellar" not in text.replace("worker cellar is proven", "")
    assert "filter: PHONE" in text
    assert "nothing passes the filter" in text_of(busy(), 80, 24, filter="zzz")


def test_the_log_can_show_warnings_only():
    text = text_of(busy(), 80, 24, level=LEVELS[1])
    assert "did not take our demand" in text
    assert "is proven for" not in text


def test_orders_of_rows():
    def names(order: int) -> list[str]:
        text = text_of(busy(), 80, 24, sort=((Pane.WORKERS, order),))
        return sorted(("cellar", "phone", "new one"), key=lambda name: text.index(f" {name} "))

    assert names(0) == ["cellar", "new one", "phone"]  # proven, trial, suspect
    assert names(4) == ["phone", "cellar", "new one"]  # by failures


def test_the_whole_of_a_log_line_is_there_when_its_pane_is():
    text = text_of(busy(), 100, 24, focus=Pane.LOG, is_whole=True)
    assert "12:01:07 warning roles.hub: hub attic did not take our demand: timed out after 4 s" in text
    assert "Workers" not in text


def test_sheets_cover_the_panes():
    assert "? on trial" in text_of(busy(), 80, 24, sheet=Sheet.HELP)
    assert "cellar" not in text_of(busy(), 80, 24, sheet=Sheet.HELP)
    ticket = text_of(busy(), 80, 24, sheet=Sheet.TICKET)
    assert busy().ticket in ticket.replace("\n", "")
    assert "run `kvasir-node ticket`" in text_of(busy(ticket=""), 80, 24, sheet=Sheet.TICKET)
    link = Invitation(("▀█" * 30,) * 30, ("http://192.0.2.7:9482/phone#kvasirp1fake", "for one phone"))
    phone = text_of(busy(invitation=link), 80, 40, sheet=Sheet.PHONE)
    assert phone.count("▀█" * 30) == 30
    assert "phone#kvasirp1fake" in phone
    assert "make the window wider" in text_of(busy(invitation=link), 50, 40, sheet=Sheet.PHONE)
    many = busy(snapshot=fake_snapshot(warnings=tuple(f"warning {index}" for index in range(9))))
    assert all(f"warning {index}" in text_of(many, 80, 24, sheet=Sheet.WARNINGS) for index in range(9))
    assert "no warnings" in text_of(calm(), 80, 24, sheet=Sheet.WARNINGS)


def test_names_of_peers_cannot_move_the_cursor():
    evil = replace(busy_snapshot().workers[0], name="\x1b[2J\nforged", reason="\u202etxt\x07", slices=("\x1b]0;x\x07",))
    demand = replace(busy_snapshot().hub or HubSnapshot(), demand=busy_snapshot().hub.demand[:1])
    demand = replace(demand, demand=(replace(demand.demand[0], model="\x1b[H", slice="\x9b1m"),))
    snapshot = fake_snapshot(
        workers=(evil,), hub=demand, name="\x9b31m", warnings=("\x1b[31m",), worker=WorkerSnapshot(slices=("\x07",))
    )
    for width in (80, 160):
        text = text_of(Picture(snapshot, log=("\x1b[2J",), experts=experts()), width, 40)
        assert text.count("\n") == 39
        assert all(c.isprintable() or c == "\n" for c in text)


def test_ascii_terminals_get_ascii():
    fanout = FanoutSnapshot(reason="off: measured 0.90× alone")
    snapshot = fake_snapshot(name="M\u00fcller \U0001f9ca", fanout=fanout)
    text = text_of(busy(snapshot=snapshot), 80, 24, ascii_only=True)
    assert text.isascii()
    assert "M?ller" in text
    assert "0.90x alone" in text


def test_the_map_of_experts_tells_use_by_shade_and_place_by_mark():
    text = text_of(busy(experts=experts(2, 4, "hmw.")), 80, 24)
    assert "here 2  m mapped 2  w worker 2  ! missing 2" in text_of(busy(experts=experts(2, 4, "hmw.")), 100, 24)
    assert "│0   █ ▒m▒w░!" in text
    assert "│1   ▒m▒w░!█ " in text


def test_a_large_map_shows_the_hottest_and_the_farthest_of_each_cell():
    layers = list(experts(48, 128, "h"))
    where = "h" * 100 + "." + "h" * 27
    layers[47] = replace(layers[47], where=where, use=(0,) * 127 + (100,))
    text = text_of(busy(experts=tuple(layers)), 80, 24)
    assert "cell 8x10" in text
    rows = [line[1:37] for line in text.split("\n") if line[1:3] == "40"]
    assert rows[0].count("!") == 1
    assert rows[0].rstrip().endswith("█")


def test_no_map_says_why():
    assert "no model is served here" in text_of(Picture(fake_snapshot(model=None)), 80, 24)
    assert "not known yet" in text_of(Picture(fake_snapshot()), 80, 24)


PICTURES_OF_ALL_KINDS = st.sampled_from(
    [
        busy(),
        calm(),
        lending(),
        busy(experts=experts(48, 128)),
        calm(snapshot=fake_snapshot(roles=("hub",), worker=None)),
    ]
)
VIEWS = st.builds(
    View,
    focus=st.sampled_from(list(Pane)),
    is_whole=st.booleans(),
    scroll=st.integers(0, 50),
    sheet=st.none() | st.sampled_from(list(Sheet)),
    is_typing=st.booleans(),
    filter=st.text(max_size=3),
    ascii_only=st.booleans(),
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(PICTURES_OF_ALL_KINDS, VIEWS, st.integers(1, 200), st.integers(1, 60), st.text(max_size=8))
def test_any_size_is_kept(picture, view, width, height, name):
    snapshot = replace(picture.snapshot, name=name, workers=(replace(busy_snapshot().workers[0], name=name),))
    lines = render(replace(picture, snapshot=snapshot), view, width, height).text.split("\n")
    assert len(lines) == height
    assert all(cell_len(line) <= width for line in lines)


@pytest.mark.parametrize(
    ("used", "total", "cells"), [(0, 4, 0), (1, 1000, 1), (2, 4, 6), (999, 1000, 11), (4, 4, 12), (9, 4, 12), (0, 0, 0)]
)
def test_bars_never_round_to_empty_or_full(used, total, cells):
    assert bar(used, total, 12, ASCII).count("#") == cells


def test_curves_end_with_the_newest_and_nothing_is_nothing():
    assert curve((0, 0.01, 5, 10), 8, UNICODE) == " ▁▄█"
    assert curve((9, 9, 1, 2), 2, UNICODE) == "▄█"
    assert curve((), 8, UNICODE) == curve((1,), 0, UNICODE) == ""
    assert curve((0, 0), 8, UNICODE) == "  "


def test_a_model_without_experts_yet_is_shown():
    model = ModelSnapshot("bafy", "large", "qwen3_moe", 48, 128, 96, 12)
    assert "large  48x128 experts  12/96 slices" in text_of(Picture(fake_snapshot(model=model)), 80, 24)


if __name__ == "__main__":
    SCREENS.mkdir(exist_ok=True)
    for each in PICTURES:
        for size in SIZES:
            (SCREENS / f"{each}_{size[0]}x{size[1]}.txt").write_text(golden(each, *size))
    blocks = DOCS.read_text().split("```\n")
    for place, shown in enumerate(SHOWN_IN_DOCS):
        blocks[2 * place + 1] = golden(*shown)
    DOCS.write_text("```\n".join(blocks))
