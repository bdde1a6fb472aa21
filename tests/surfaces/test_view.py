"""What keys do to the view: tables of presses, and no key in any order breaks it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_node.surfaces.view import LEVELS, PANES, Action, Pane, Sheet, View, press


def pressed(*keys: str, view: View | None = None) -> View:
    view = view or View()
    for key in keys:
        view, _ = press(view, key)
    return view


@pytest.mark.parametrize(
    ("keys", "changes"),
    [
        (["tab"], {"focus": Pane.SLOTS}),
        (["shift-tab"], {"focus": Pane.LOG}),
        (["right", "right", "left"], {"focus": Pane.SLOTS}),
        (["4"], {"focus": Pane.WORKERS}),
        (["4", "4"], {"focus": Pane.WORKERS, "is_whole": True}),
        (["4", "enter"], {"focus": Pane.WORKERS, "is_whole": True}),
        (["z", "esc"], {}),
        (["down", "j", "up"], {"scroll": 1}),
        (["page-down", "home"], {"scroll": 0}),
        (["up", "k"], {"scroll": 0}),
        (["down", "tab"], {"scroll": 0, "focus": Pane.SLOTS}),
        (["?"], {"sheet": Sheet.HELP}),
        (["?", "?"], {}),
        (["t", "w"], {"sheet": Sheet.WARNINGS}),
        (["t", "t"], {"sheet": Sheet.PHONE}),
        (["t", "t", "t"], {}),
        (["t", "esc"], {}),
        (["t", "1"], {}),
        (["/", "a", "q", "enter"], {"filter": "aq", "focus": Pane.WORKERS}),
        (["/", "a", "b", "backspace"], {"filter": "a", "is_typing": True, "focus": Pane.WORKERS}),
        (["/", "a", "paste:bq", "enter"], {"filter": "abq", "focus": Pane.WORKERS}),
        (["paste:q"], {}),
        (["/", "a", "esc"], {"focus": Pane.WORKERS}),
        (["6", "/", "a", "enter", "esc"], {"focus": Pane.LOG}),
        (["x", "9", "0", "end"], {}),
    ],
)
def test_keys(keys, changes):
    assert pressed(*keys) == replace(View(), **changes)


def test_q_quits_unless_it_is_typed_and_p_asks_for_lending():
    assert press(View(), "q")[1] is Action.QUIT
    assert press(View(sheet=Sheet.HELP), "Q")[1] is Action.QUIT
    assert press(View(is_typing=True), "q")[1] is None
    assert press(View(), "p")[1] is Action.LEND_OR_NOT
    assert press(View(), "t")[1] is None
    assert press(View(sheet=Sheet.TICKET), "t")[1] is Action.INVITE_PHONE


def test_s_turns_through_the_orders_of_the_focused_pane_and_says_which():
    view = pressed("4", "s")
    assert (view.sort_of(Pane.WORKERS), view.notice) == ("name", "Workers by name")
    assert pressed("4", *["s"] * 5).sort_of(Pane.WORKERS) == "state"
    assert pressed("1", "s") == pressed("1")
    assert pressed("tab", view=view).notice == ""


def test_l_turns_the_log_between_everything_and_warnings():
    assert pressed("l").level == LEVELS[1]
    assert pressed("l", "l").level == LEVELS[0]


def test_a_pane_that_this_node_lacks_cannot_be_reached():
    view = View(panes=(Pane.NOW, Pane.LOG))
    assert pressed("4", view=view) == replace(view, notice="this node has no Workers pane")
    assert pressed("tab", view=view).focus is Pane.LOG
    assert pressed("/", view=view).focus is Pane.LOG


def test_a_focused_pane_that_goes_away_gives_the_focus_up():
    assert View(focus=Pane.DEMAND).with_panes((Pane.NOW, Pane.LOG)).focus is Pane.NOW


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from([*"123456789?twspl/zq ", "tab", "left", "up", "down", "esc", "enter", "backspace", "ü"]))
)
def test_no_order_of_keys_leaves_the_panes_or_grows_the_filter_without_end(keys):
    view = pressed(*keys, *"aaaa" * 20)
    assert view.focus in PANES
    assert view.scroll >= 0
    assert len(view.filter) <= 40
