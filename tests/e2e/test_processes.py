"""Real processes: crashes, stops, signals, and what is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import trio
from local_swarm import PROMPTS, Process, ask, node

TOKENS = 32


@pytest.fixture
def join(monkeypatch):
    def set_ticket(ready: dict[str, object]) -> None:
        monkeypatch.setenv("KVASIR_NETWORK__JOIN", str(ready["ticket"]))

    return set_ticket


async def wait_for(main: Process, seen, what: str, timeout_s: float = 40) -> dict:
    status = {}
    with trio.move_on_after(timeout_s):
        while True:
            status = await trio.to_thread.run_sync(main.status)
            if seen(status):
                return status
            await trio.sleep(0.1)
    raise AssertionError(f"not seen within {timeout_s} s: {what}; {json.dumps(status)}")


async def solo_answers(main: Process) -> dict[str, str]:
    async with httpx.AsyncClient() as client:
        return {p: (await ask(client, main.ready["api"], p, TOKENS))["choices"][0]["text"] for p in PROMPTS}


class Load:
    """Requests without pause until stopped; any answer that is not 200, or not the solo one, is kept."""

    def __init__(self, main: Process, solo: dict[str, str]) -> None:
        self.url, self.solo = main.ready["api"], solo
        self.answered, self.bad, self.stop = 0, [], False

    async def client(self, number: int) -> None:
        async with httpx.AsyncClient() as client:
            while not self.stop:
                prompt = PROMPTS[number % len(PROMPTS)]
                number += 1
                answer = await ask(client, self.url, prompt, TOKENS)
                self.answered += 1
                if answer["choices"][0]["text"] != self.solo[prompt]:
                    self.bad.append(prompt)


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill-9", "sigstop"])
async def test_a_serving_worker_that_dies_or_freezes_changes_no_token_and_a_healthy_one_takes_over(
    tmp_path, join, signal_number
):
    # The model is too small for workers to pay, and this is about what becomes of their share.
    shares = ("--set", "fanout.when=forced")
    with node(tmp_path, "main", "--role", "coordinator,hub", "--slots", "2", *shares) as main:
        join(main.ready)
        solo = await solo_answers(main)
        with node(tmp_path, "victim", "--role", "worker") as victim:
            load = Load(main, solo)
            async with trio.open_nursery() as nursery:
                for number in range(6):
                    nursery.start_soon(load.client, number)
                await wait_for(main, lambda s: s["fanout"]["remote_pairs"] > 200, "remote pairs")
                os.kill(victim.popen.pid, signal_number)
                gone = await wait_for(
                    main,
                    lambda s: [w["slices"] for w in s["workers"] if w["name"] == "victim"] == [[]],
                    "the victim is gone",
                )
                assert gone["workers"][0]["failures"] == 0  # nobody can know whose fault that is
                assert gone["workers"][0]["reason"]
                with node(tmp_path, "healthy", "--role", "worker"):
                    before = await trio.to_thread.run_sync(main.status)
                    await wait_for(
                        main,
                        lambda s: (
                            any(w["name"] == "healthy" and w["state"] == "proven" for w in s["workers"])
                            and s["fanout"]["remote_pairs"] > before["fanout"]["remote_pairs"] + 200
                        ),
                        "the healthy worker's share",
                    )
                    load.stop = True
            if signal_number == signal.SIGSTOP:
                os.kill(victim.popen.pid, signal.SIGCONT)
        assert load.answered > 0
        assert not load.bad


def open_paths(pid: int) -> set[str]:
    return {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}


def test_start_and_stop_leaves_no_process_port_or_temp_file_behind(tmp_path, monkeypatch):
    """Three times here; twenty times with -m soak below."""
    start_and_stop(tmp_path, monkeypatch, 3)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_twenty_starts_and_stops_leave_nothing_behind(tmp_path, monkeypatch):
    start_and_stop(tmp_path, monkeypatch, 20)


def start_and_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    first_files: set[str] | None = None
    for _ in range(times):
        with node(tmp_path, "node") as running:
            pid, api = running.popen.pid, running.ready["api"]
            assert httpx.get(f"{api}/health").status_code == 200
            began = time.monotonic()
            running.popen.send_signal(signal.SIGTERM)
            assert running.popen.wait(25) == 0
            assert time.monotonic() - began < 20
        assert not Path(f"/proc/{pid}").exists()
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{api}/health")
        files = {str(p.relative_to(tmp_path)) for p in (tmp_path / "node").rglob("*") if p.is_file()}
        first_files = first_files or files
        assert files == first_files
        assert not list(temporary.iterdir())


async def test_sigterm_lets_a_running_answer_finish_and_exits_0(tmp_path):
    with node(tmp_path, "node", "--role", "coordinator") as running:
        async with httpx.AsyncClient() as client, trio.open_nursery() as nursery:
            answers: list[dict] = []

            async def one() -> None:
                answers.append(await ask(client, running.ready["api"], PROMPTS[0], 300))

            nursery.start_soon(one)
            await wait_for(running, lambda s: s["slots"]["busy"] == 1, "a busy slot")
            running.popen.send_signal(signal.SIGTERM)
        assert answers[0]["usage"]["completion_tokens"] == 300
        assert await trio.to_thread.run_sync(running.popen.wait, 25) == 0


def test_the_local_swarm_example_shows_every_phase_and_exits_0():
    example = Path(__file__).parents[2] / "examples" / "local_swarm.py"
    done = subprocess.run(
        [sys.executable, str(example), "--seconds", "2"], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASSED" in done.stdout
