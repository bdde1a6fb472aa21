"""A real node, guests of js-libp2p in Node.js, and the page in headless Chromium, for tests from end to end."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
from local_swarm import PROMPTS, Process, node
from phone_parts import bundle

HERE = Path(__file__).parent
TOKENS = 16
MEMORY_BYTES = 64 << 20


@contextmanager
def forced_swarm(folder: Path, *flags: str) -> Iterator[Process]:
    """A coordinator and hub whose work is shared at any loss: its model is too small for that to pay."""
    shares = ("--set", "fanout.when=forced", "--slots", "2")
    with node(folder, "main", "--role", "coordinator,hub", *shares, *flags) as main:
        yield main


def invite(main: Process) -> str:
    """The URL for one page."""
    answer = httpx.post(f"{main.ready['api']}/kvasir/v1/phone", json={}, timeout=10)
    answer.raise_for_status()
    return answer.json()["url"]


def wait_until(seen: Callable[[], Any], what: str, timeout_s: float = 40) -> Any:
    """What `seen` returns, once it is true."""
    until = time.monotonic() + timeout_s
    while not (found := seen()):
        if time.monotonic() > until:
            raise AssertionError(f"not seen within {timeout_s} s: {what}")
        time.sleep(0.1)
    return found


def workers_of(main: Process) -> dict[str, dict[str, Any]]:
    return {worker["name"]: worker for worker in main.status()["workers"]}


class Load:
    """Requests without pause; any answer that is not the solo one is kept."""

    def __init__(self, main: Process, clients: int = 6) -> None:
        self._url = f"{main.ready['api']}/v1/completions"
        self._client = httpx.Client(timeout=60)  # one for all: a new one reads certificates, and the queue runs dry
        self.solo = {prompt: self._ask(prompt) for prompt in PROMPTS[:3]}
        self.answered, self.bad, self._stop = 0, [], False
        self._threads = [Thread(target=self._run, args=(number,), daemon=True) for number in range(clients)]

    def _ask(self, prompt: str) -> str:
        body = {"model": "demo", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
        answer = self._client.post(self._url, json=body)
        answer.raise_for_status()
        return answer.json()["choices"][0]["text"]

    def _run(self, number: int) -> None:
        prompts = list(self.solo)
        while not self._stop:
            prompt = prompts[number % len(prompts)]
            number += 1
            try:
                if self._ask(prompt) != self.solo[prompt]:
                    self.bad.append(prompt)
                self.answered += 1
            except httpx.HTTPError as error:
                self.bad.append(repr(error))

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        for thread in self._threads:
            thread.join(60)
        self._client.close()


class Terminal:
    """The guest in Node.js (src/entries/terminal.ts)."""

    def __init__(self, phone: Path, folder: Path, main: Process, seed: int, *, tcp: bool) -> None:
        if not (folder / "terminal.mjs").exists():
            bundle(phone, phone / "src" / "entries" / "terminal.ts", folder / "terminal.mjs")
        config = {
            "seed": (bytes([seed]) * 32).hex(),
            "link": invite(main).partition("#")[2],
            "kernel": str(phone / "kernel" / "experts.wasm"),
            "memory_bytes": MEMORY_BYTES,
            "tcp": tcp,
        }
        # Node.js has WebSocket from version 22 on, and behind this flag in version 20.
        command = ["node", "--experimental-websocket", folder / "terminal.mjs", json.dumps(config)]
        self._popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.told: list[dict[str, Any]] = []
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            self.told.append(json.loads(line))

    def say(self, word: str) -> None:
        assert self._popen.stdin is not None
        self._popen.stdin.write(word + "\n")
        self._popen.stdin.flush()

    def leave(self) -> int:
        self.say("leave")
        return self._popen.wait(30)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self._popen.kill()
        self._popen.wait()
        self._reader.join(10)
        for stream in (self._popen.stdin, self._popen.stdout):
            assert stream is not None
            stream.close()


class Browser:
    """Headless Chromium with a profile of its own; each method is one of drive.mjs."""

    def __init__(self, phone: Path, profile: Path, rules: str = "") -> None:
        if shutil.which("chromium") is None:
            pytest.skip("chromium is not installed")
        command = ["node", HERE / "drive.mjs", phone, profile, *([rules] if rules else [])]
        self._popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, what: str, *given: Any) -> Any:
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._popen.stdin.write(json.dumps([what, *given]) + "\n")
        self._popen.stdin.flush()
        answer = json.loads(self._popen.stdout.readline())
        if "error" in answer:
            raise AssertionError(f"{what}: {answer['error']}")
        return answer["result"]

    def wait_for(self, seen: Callable[[dict[str, Any]], Any], what: str, timeout_s: float = 40) -> dict[str, Any]:
        """What the page shows, once `seen` says yes to it."""
        shown: list[dict[str, Any]] = []

        def look() -> bool:
            shown[:] = [self("look")]
            return bool(seen(shown[0]))

        try:
            wait_until(look, what, timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}; {shown}; {self('problems')}") from None
        return shown[0]

    @property
    def pid(self) -> int:
        return self._popen.pid

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self("close")
            self._popen.wait(20)
        finally:
            self._popen.kill()
            self._popen.wait()
            for stream in (self._popen.stdin, self._popen.stdout):
                assert stream is not None
                stream.close()
