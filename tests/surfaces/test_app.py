"""`up` as a process: the ready line, node.json, signals, draining, and what is left behind (nothing)."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvasir_node.surfaces.nodefile import read_node_file
from kvasir_node.surfaces.phone_page import PhonePage

SCRIPT = Path(__file__).with_name("fake_up.py")


ENDING = {"model": "demo", "prompt": "x", "stream": True}  # an answer of three pieces


@contextmanager
def started(data_dir: Path, *options: str, **popen: Any) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(SCRIPT), str(data_dir), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **popen) as process:
        try:
            yield process
        finally:
            process.kill()


def ready(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


@contextmanager
def streaming(url: str) -> Iterator[None]:
    """An answer that has begun, and will not end by itself."""
    with httpx.stream("POST", url + "/v1/completions", json=ENDING, trust_env=False) as response:
        parts = response.iter_raw()
        assert next(parts).startswith(b":")
        yield
        parts.close()


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, stderr = process.communicate(timeout=15)
    return process.returncode, stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ready_line_then_a_signal_ends_it_cleanly(tmp_path, number):
    data_dir = tmp_path / "data"
    with started(data_dir) as process:
        line = ready(process)
        assert (line["schema"], line["model"]["name"]) == ("kvasir.ready/1", "demo")
        assert httpx.get(line["api"] + "/health", trust_env=False).status_code == 200
        found = read_node_file(data_dir)
        assert found is not None
        assert (found.pid, found.api, found.ticket) == (process.pid, line["api"], line["ticket"])
        assert stat.S_IMODE((data_dir / "node.json").stat().st_mode) == 0o600
        process.send_signal(number)
        code, stderr = ended(process)
    assert code == 0, stderr
    assert list(data_dir.iterdir()) == []
    with pytest.raises(httpx.ConnectError):
        httpx.get(line["api"] + "/health", trust_env=False)


def test_the_page_for_phones_has_a_port_of_its_own_that_serves_nothing_else(tmp_path):
    with started(tmp_path / "data", "phone.listen=127.0.0.1:0") as process:
        api = ready(process)["api"]
        document = httpx.post(api + "/kvasir/v1/phone", trust_env=False).json()
        page = document["url"].partition("#")[0]
        assert not page.startswith(api)
        shown = httpx.get(page, trust_env=False)
        assert shown.status_code == (200 if PhonePage().is_built else 404)
        assert httpx.get(page.replace("/phone", "/kvasir/v1/status"), trust_env=False).status_code == 404
        process.send_signal(signal.SIGTERM)
        code, stderr = ended(process)
    assert code == 0, stderr
    with pytest.raises(httpx.ConnectError):
        httpx.get(page, trust_env=False)


def test_sigterm_lets_running_answers_finish_and_refuses_new_ones(tmp_path):
    with started(tmp_path, "piece_s=0.4") as process:
        url = ready(process)["api"]
        body = {"model": "demo", "prompt": "x"}
        answers = []

        def ask() -> None:
            answers.append(httpx.post(url + "/v1/completions", json=body, trust_env=False))

        asking = threading.Thread(target=ask)
        asking.start()
        while httpx.get(url + "/kvasir/v1/status", trust_env=False).json()["slots"]["busy"] == 0:
            pass
        process.send_signal(signal.SIGTERM)
        refused = httpx.post(url + "/v1/completions", json=body, trust_env=False)
        while refused.status_code == 200:
            refused = httpx.post(url + "/v1/completions", json=body, trust_env=False)
        asking.join()
        code, stderr = ended(process)
    assert (code, answers[0].status_code, refused.status_code) == (0, 200, 503), stderr
    assert answers[0].json()["choices"][0]["finish_reason"] == "stop"


def test_sighup_drains_and_asks_to_be_started_again_unless_the_settings_would_not_start(tmp_path):
    with started(tmp_path, "piece_s=0.2") as process:
        url = ready(process)["api"]
        (tmp_path / "refusal").write_text("setting coordinator.slots must be a whole number")
        process.send_signal(signal.SIGHUP)
        while "going on as before" not in (line := process.stderr.readline()):
            pass
        assert "coordinator.slots" in line
        refused = httpx.post(url + "/kvasir/v1/restart", trust_env=False)
        assert (refused.status_code, "coordinator.slots" in refused.text) == (400, True)
        (tmp_path / "refusal").unlink()
        with httpx.stream("POST", url + "/v1/completions", json=ENDING, trust_env=False) as answer:
            process.send_signal(signal.SIGHUP)
            text = answer.read().decode()
        code, stderr = ended(process)
    assert (code, "[DONE]" in text) == (75, True), stderr
    assert list(tmp_path.iterdir()) == []


def test_a_service_manager_hears_of_start_life_and_end_and_nohup_holds(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(str(tmp_path / "notify"))
        heard.settimeout(15)
        environment = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "100000"}
        ignore = partial(signal.signal, signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        with started(tmp_path / "data", env=environment, preexec_fn=ignore) as process:
            url = ready(process)["api"]
            words = [heard.recv(1000).decode() for _ in range(4)]
            assert sorted(words)[0] == f"READY=1\nSTATUS=serving at {url}"
            assert words.count("WATCHDOG=1") == 3
            process.send_signal(signal.SIGHUP)
            assert httpx.post(url + "/kvasir/v1/restart", trust_env=False).status_code == 202
            while "STOPPING=1" not in heard.recv(1000).decode():
                pass
            assert ended(process) == (75, "opening\n")


def test_draining_has_a_deadline(tmp_path):
    with started(tmp_path, "piece_s=60", "node.drain_timeout_s=1") as process:
        url = ready(process)["api"]
        with streaming(url):
            process.send_signal(signal.SIGTERM)
            code, stderr = ended(process)
    assert code == 0
    assert "waiting for 1 answer; a second SIGINT" in stderr
    assert "did not end within" in stderr


def test_the_second_sigint_ends_at_once(tmp_path):
    with started(tmp_path, "piece_s=60") as process:
        url = ready(process)["api"]
        with streaming(url):
            process.send_signal(signal.SIGINT)
            while "draining" not in process.stderr.readline():
                pass
            process.send_signal(signal.SIGINT)
            code, _ = ended(process)
    assert code == 130
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_before_ready_just_ends_it(tmp_path, number, expected):
    with started(tmp_path, "start_s=60") as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "opening\n"
        process.send_signal(number)
        code, stderr = ended(process)
    assert (code, stderr) == (expected, "")
    assert list(tmp_path.iterdir()) == []


def test_two_nodes_never_share_a_data_directory(tmp_path):
    with started(tmp_path) as first:
        ready(first)
        with started(tmp_path) as second:
            code, stderr = ended(second)
        assert code == 1  # the script does not translate errors; the command line does
        assert "another --data-dir" in stderr
        assert read_node_file(tmp_path) is not None


def test_a_port_in_use_is_told_before_anything_is_loaded(tmp_path):
    with started(tmp_path / "a") as first:
        listen = ready(first)["api"].removeprefix("http://")
        with started(tmp_path / "b", f"api.listen={listen}", "start_s=60") as second:
            _, stderr = ended(second)
    assert "the port is in use" in stderr
    assert list((tmp_path / "b").iterdir()) == []


def test_a_node_that_fails_to_start_raises_its_own_error(tmp_path):
    with started(tmp_path, "node.name=broken") as process:
        code, stderr = ended(process)
    assert code == 1
    assert "no such weights" in stderr
    assert "ExceptionGroup" not in stderr
