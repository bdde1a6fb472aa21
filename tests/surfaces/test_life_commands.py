"""`drain` and `stop`: what they wait for, what they say, and how they end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from test_cli import SCRIPT

from kvasir_node.surfaces import (
    client,  # noqa: F401  imported before there is an answer that must not end meanwhile
    life_commands,
    reports,  # noqa: F401
)
from kvasir_node.surfaces.nodefile import is_claimed


@contextmanager
def running(data_dir: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, str(SCRIPT), str(data_dir), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, json.loads(process.stdout.readline())["api"]
        finally:
            process.kill()


def ask(url: str, answers: list[int]) -> threading.Thread:
    """An answer that has begun when this returns."""

    def run_it() -> None:
        body = {"model": "demo", "prompt": "x"}
        answers.append(httpx.post(url + "/v1/completions", json=body, trust_env=False).status_code)

    thread = threading.Thread(target=run_it)
    thread.start()
    while httpx.get(url + "/kvasir/v1/status", trust_env=False).json()["slots"]["busy"] == 0:
        pass
    return thread


def test_a_drained_node_is_unhealthy_and_stops_at_once_and_a_second_stop_finds_none(run, tmp_path, monkeypatch):
    monkeypatch.setattr(life_commands, "QUIET_S", 0.0)
    where = ("--data-dir", str(tmp_path / "d"))
    with running(tmp_path / "d", "piece_s=0.5") as (process, url):
        answers: list[int] = []
        asking = ask(url, answers)
        code, out, err = run("drain", *where)
        assert (code, out) == (0, "drained; `kvasir-node stop` ends the node\n")
        assert err == "waiting for 1 answer\n"
        asking.join()
        assert answers == [200]
        assert run("status", "--check", *where)[0] == 4
        code, out, _ = run("drain", "--json", *where)
        assert (code, json.loads(out)["draining"]) == (0, True)
        code, out, err = run("stop", *where)
        assert (code, out, err.splitlines()[-1]) == (0, "", "stopped")
        assert process.wait(5) == 0
        code, _, err = run("stop", *where)
        assert (code, "no node runs on the data directory" in err) == (3, True)


def test_a_restart_by_url_says_why_it_is_refused_and_ends_with_75(run, tmp_path):
    with running(tmp_path) as (process, url):
        (tmp_path / "refusal").write_text("setting coordinator.slots must be a whole number")
        code, _, err = run("stop", "--restart", "--url", url)
        assert (code, "coordinator.slots" in err) == (2, True)
        code, _, err = run("stop", "--restart", "--data-dir", str(tmp_path))
        assert (code, "coordinator.slots" in err) == (2, True)
        (tmp_path / "refusal").unlink()
        code, out, err = run("stop", "--restart", "--url", url)
        assert (code, out, err.splitlines()[-1]) == (0, "", "stopped")  # the end may take a while here
        assert process.wait(5) == 75
        assert not is_claimed(tmp_path)


def test_a_node_without_an_api_gets_a_signal_and_one_that_hangs_is_not_waited_for_in_vain(run, tmp_path, monkeypatch):
    monkeypatch.setattr(life_commands, "END_GRACE_S", 0.2)
    monkeypatch.setenv("KVASIR_NODE__DRAIN_TIMEOUT_S", "0.1")
    with running(tmp_path, "api.listen=") as (process, _):
        process.send_signal(signal.SIGSTOP)
        code, _, err = run("stop", "--data-dir", str(tmp_path))
        assert (code, f"kill -9 {process.pid}" in err) == (4, True)
        process.send_signal(signal.SIGCONT)
        assert process.wait(5) == 0
