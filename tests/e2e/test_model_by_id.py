"""An empty machine becomes a coordinator of a model that it knows by id alone: two processes, the same tokens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
from local_swarm import PROMPTS, Process, node

TOKENS = 16


def answers(running: Process) -> list[str]:
    body = {"model": running.ready["model"]["name"], "max_tokens": TOKENS, "temperature": 0}
    url = f"{running.ready['api']}/v1/completions"
    replies = [httpx.post(url, json={**body, "prompt": prompt}, timeout=60).json() for prompt in PROMPTS[:2]]
    return [reply["choices"][0]["text"] for reply in replies]


def start(folder: Path, name: str, *flags: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "kvasir_node", "--data-dir", str(folder / name), "up", "--headless", "--no-api"]
    with (folder / f"{name}.log").open("ab") as log:
        return subprocess.Popen([*command, "--listen", "/ip4/127.0.0.1/tcp/0", *flags], stdout=log, stderr=log)


def test_an_empty_machine_serves_the_same_tokens_and_refetches_nothing(tmp_path, monkeypatch):
    with node(tmp_path, "first", "--role", "coordinator,hub") as first:
        model = first.ready["model"]["id"]
        expected = answers(first)
        monkeypatch.setenv("KVASIR_NETWORK__JOIN", first.ready["ticket"])
        killed = start(tmp_path, "second", model, "--role", "coordinator", "--set", "store.download_bytes_s=4M")
        folder = tmp_path / "second" / "models" / f"{model}.part"
        until = time.monotonic() + 60
        while not (folder / "config.json").exists() and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(0.7)
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
        assert folder.exists(), (tmp_path / "second.log").read_text()
        with node(tmp_path, "second", model, "--role", "coordinator") as second:
            assert second.ready["model"]["id"] == model
            assert answers(second) == expected
    monkeypatch.delenv("KVASIR_NETWORK__JOIN")
    with node(tmp_path, "second", model, "--role", "coordinator") as alone:  # nobody is there to fetch from
        assert answers(alone) == expected
    kept = tmp_path / "second" / "models" / model
    own_blocks = sum(file.stat().st_size for file in (tmp_path / "second" / "blocks").rglob("*") if file.is_file())
    assert own_blocks < 100_000, "the blocks are kept twice"
    assert json.loads((kept / "kvasir.json").read_text())["model"] == model
