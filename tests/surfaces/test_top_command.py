"""`top` in a terminal: it shows a node of another process, acts on it, says when it is gone, and leaves it alone."""

from __future__ import annotations

import json
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from terminals import in_terminal

NODE = Path(__file__).with_name("fake_up.py")


@pytest.fixture
def node(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, str(NODE), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())["api"]
        process.terminate()


def test_top_shows_a_running_node_and_leaves_it_alone(node, tmp_path):
    process, api = node
    command = [sys.executable, "-m", "kvasir_node", "--data-dir", str(tmp_path), "top"]
    with in_terminal(command, {"TERM": "xterm"}, lines=40, width=120) as (shown, end):
        before = termios.tcgetattr(end)
        for text in ("SERVING demo", "+ proven", "! cannot reach", "m mapped", "Events"):
            shown.until(text)
        shown.type("t")
        shown.until("kvasir1fake")
        shown.type("t")
        shown.until("/phone#kvasirp1fake1")
        shown.type("\x1b")
        shown.until("4 Workers")
        shown.type("p")
        shown.until("lending: paused: paused by its owner")
        assert httpx.get(f"{api}/kvasir/v1/status", trust_env=False).json()["worker"]["state"] == "paused"
        process.terminate()
        shown.until("NO ANSWER")
        shown.type("q")
        assert shown.end() == 0
        assert termios.tcgetattr(end) == before


def test_top_without_a_terminal_says_what_to_do(tmp_path, run):
    code, _, err = run("--data-dir", str(tmp_path), "top")
    assert code == 2
    assert "kvasir-node status" in err
