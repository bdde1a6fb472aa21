"""The screen in a pseudo-terminal: it shows the node, leaves on `q` and on Ctrl-C, and gives the terminal back.

Suspending is tested under a real shell with job control.
"""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from terminals import ENTER, LEAVE, Terminal, in_terminal, resize

SCRIPT = Path(__file__).with_name("fake_up.py")
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


@pytest.fixture
def terminal(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Terminal, int]]:
    environment = {"TERM": "xterm", "COLUMNS": "80", "LINES": "24", **getattr(request, "param", {})}
    with in_terminal(["sh", "-c", f"exec {_up(tmp_path)}"], environment) as found:
        yield found


def _up(data_dir: Path) -> str:
    return shlex.join([sys.executable, str(SCRIPT), str(data_dir), "screen=yes"]) + " 2>/dev/null"


@pytest.mark.parametrize("key", [b"q", b"\x03"])
def test_it_shows_the_node_and_gives_the_terminal_back(terminal, key):
    shown, end = terminal
    before = termios.tcgetattr(end)
    shown.until("q quit")
    assert ENTER in shown.shown
    text = ESCAPES.sub("", shown.shown)
    for part in ("attic", "http://127.0.0.1:", "+ proven", "! cannot reach"):
        assert part in text
    os.write(shown.controller, b"?")
    shown.until("? on trial")
    assert not termios.tcgetattr(end)[3] & termios.ECHO
    os.write(shown.controller, key)
    assert shown.end() == 0
    assert termios.tcgetattr(end) == before


@pytest.mark.parametrize(
    ("terminal", "coloured"), [({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True)], indirect=["terminal"]
)
def test_no_color_is_kept(terminal, coloured):
    shown, _ = terminal
    shown.until("q quit")
    assert bool(re.search(r"\x1b\[[0-9;]*3[1-7]m", shown.shown)) == coloured


@pytest.mark.parametrize("terminal", [{"PYTHONIOENCODING": "ascii", "LANG": "C"}], indirect=True)
def test_a_terminal_without_unicode_gets_ascii(terminal):
    shown, _ = terminal
    shown.until("q quit")
    assert ESCAPES.sub("", shown.shown).isascii()


def test_ctrl_z_gives_the_terminal_to_the_shell_and_fg_takes_it_again(tmp_path):
    environment = {"TERM": "xterm", "PS1": "shell> "}
    with in_terminal(["bash", "--norc", "--noprofile", "-i"], environment) as (shown, end):
        shown.type(f"{_up(tmp_path)}\n")
        shown.until("q quit")
        shown.type("\x1a")
        shown.until(LEAVE)
        shown.until("Stopped")
        shown.type("stty -a; echo mode-s$((1))\n")
        shown.until("mode-s1")
        assert " echo " in shown.shown
        assert " icanon " in shown.shown
        shown.type("fg\n")
        shown.until(ENTER)
        shown.until("q quit")
        assert not termios.tcgetattr(end)[3] & (termios.ECHO | termios.ICANON)
        shown.type("?")
        shown.until("? on trial")
        shown.type("q")
        shown.until(LEAVE)
        shown.type("echo code-$?\n")
        shown.until("code-0")


def test_in_the_background_the_node_goes_on_without_the_terminal(tmp_path):
    with in_terminal(["bash", "--norc", "--noprofile", "-i"], {"TERM": "xterm"}) as (shown, _):
        shown.type(f"{_up(tmp_path)}\n")
        shown.until("q quit")
        shown.type("\x1a")
        shown.until("Stopped")
        shown.type("bg\n")
        shown.until("&")
        shown.type("sleep 0.6; jobs; kill -TERM %1; wait %1; echo code-$?\n")  # it must not draw, nor read "q", now
        shown.until("code-0")
        assert "Running" in shown.shown
        assert ENTER not in shown.shown
        assert "q quit" not in shown.shown


def test_it_follows_the_terminals_size_and_one_that_takes_nothing_holds_the_node_up_in_nothing(tmp_path):
    """Nobody reads what is drawn, as when a connection fell asleep; the API answers and the node ends on SIGTERM."""
    with in_terminal(["sh", "-c", f"exec {_up(tmp_path)}"], {"TERM": "xterm"}) as (shown, end):
        shown.until("q quit")
        shown.shown = ""
        resize(end, 12, 40)
        shown.until("\x1b[12;1H")
        assert "\x1b[13;1H" not in shown.shown
        for width in range(200, 240):  # every size draws everything anew, until the buffer is full
            resize(end, 60, width)
            time.sleep(0.02)
        assert not select.select([], [end], [], 0)[1]
        api = json.loads((tmp_path / "node.json").read_text())["api"]
        assert httpx.get(f"{api}/health", timeout=5, trust_env=False).status_code == 200
        shown.process.terminate()
        assert shown.process.wait(15) == 0
