"""How far something is: a bar in a terminal, lines elsewhere, and nothing for what is over at once."""

from __future__ import annotations

import io

import pytest

from kvasir_node.surfaces.progress import progress, waiting


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def steps(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch, *moments: float) -> str:
    """A fetch of 4 MiB that advances at each of these moments."""
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    clock = Clock()
    with progress("fetching demo", clock=clock) as advance:
        for number, clock.now in enumerate(moments):
            advance(number << 20, 4 << 20)
    return stream.getvalue()


def test_what_is_over_within_a_second_shows_nothing(monkeypatch):
    assert steps(io.StringIO(), monkeypatch, 0.0, 0.5, 0.9) == ""
    assert steps(Terminal(), monkeypatch, 0.0, 0.5, 0.9) == ""


def test_elsewhere_a_line_now_and_then(monkeypatch):
    assert steps(io.StringIO(), monkeypatch, 0.5, 1.5, 5.0, 12.0).splitlines() == [
        "fetching demo: 25 % (1.0 MiB of 4.0 MiB)",
        "fetching demo: 75 % (3.0 MiB of 4.0 MiB)",
    ]


def test_a_terminal_shows_a_bar_and_gets_its_cursor_back(monkeypatch):
    shown = steps(Terminal(), monkeypatch, 0.5, 1.5, 2.0)
    assert "fetching demo" in shown
    assert "/4.0 MiB" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def test_waiting_shows_the_newest_words_in_a_terminal_and_nothing_elsewhere(monkeypatch):
    for stream, expected in ((io.StringIO(), False), (Terminal(), True)):
        monkeypatch.setattr("sys.stderr", stream)
        monkeypatch.setenv("TERM", "xterm")
        with waiting(lambda: "loading [demo]"):
            pass
        assert ("loading [demo]" in stream.getvalue()) is expected
