"""The screen in a pseudo-terminal: it shows the node, leaves on `q` and on Ctrl-C, and gives the terminal back."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("fake_up.py")
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"


@dataclass
class Terminal:
    process: subprocess.Popen[bytes]
    controller: int
    shown: str = ""

    def until(self, text: str, timeout_s: float = 15.0) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in self.shown:
            assert time.monotonic() < deadline, f"never saw {text!r} in {self.shown[-2000:]!r}"
            if select.select([self.controller], [], [], 0.1)[0]:
                self.shown += os.read(self.controller, 65536).decode("utf-8", "replace")

    def end(self) -> int:
        code = self.process.wait(15)
        self.until(LEAVE)
        return code


@pytest.fixture
def terminal(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Terminal, int]]:
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24", **getattr(request, "param", {})}
    controller, end = pty.openpty()
    command = [sys.executable, str(SCRIPT), str(tmp_path), "screen=yes"]
    process = subprocess.Popen(
        command, stdin=end, stdout=end, stderr=subprocess.DEVNULL, env=environment, preexec_fn=_own_terminal
    )
    try:
        yield Terminal(process, controller), end
    finally:
        process.kill()
        process.wait()
        os.close(controller)
        os.close(end)


def _own_terminal() -> None:
    import fcntl

    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


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
    shown.until("this help")
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
