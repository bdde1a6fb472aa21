"""Real nodes for a benchmark: processes of this machine, pinned to cores, and load through their HTTP API.

It does not know what is compared. All of it blocks. What is measured is decoding with so many requests at once, and
nothing else: one request is timed, by the node itself, from its first token to its last, while all others have begun
before it and are given up after it. Prompts are the same each time, so that nodes have them in their caches.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from http.client import HTTPConnection
from pathlib import Path
from time import sleep
from typing import Any

import httpx

from kvasir_node.base.errors import BugError, Unreachable
from kvasir_node.base.settings import environment

START_TIMEOUT_S = 600.0  # a large model is indexed and loaded first
STOP_TIMEOUT_S = 30.0
BURST_TIMEOUT_S = 1800.0
POLL_S = 0.01
SPARE_STEPS = 250  # that the others may be ahead of the one timed
SATURATING_TOKENS = 64  # of each answer that is asked for only to make load
Prompt = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Burst:
    """What came of one burst. `token_s` is the time of one step: of one token of each answer."""

    tokens_per_s: float
    token_s: float
    bytes_per_token: float
    remote_pairs: int
    fallbacks: int


class BenchNode:
    """A node that was started. Whatever needs it to be ready waits for that: several start at the same time.

    All methods raise Unreachable when it did not start.
    """

    def __init__(self, name: str, process: subprocess.Popen[str], log: Path) -> None:
        self.name = name
        self._process = process
        self._log = log
        self._client = httpx.Client(verify=False, timeout=BURST_TIMEOUT_S)  # plain HTTP on loopback

    @cached_property
    def ready(self) -> dict[str, Any]:
        """Its ready line."""
        stdout = self._process.stdout
        assert stdout is not None
        has_line, _, _ = select.select([stdout], [], [], START_TIMEOUT_S)
        line = stdout.readline() if has_line else ""
        if not line:
            raise Unreachable(f"{self.name} did not start; its log ends: {self.log_end()}")
        return json.loads(line)

    def close(self) -> None:
        """Ends our side of its connections."""
        self._client.close()

    def await_ready(self) -> None:
        """Returns once it is."""
        _ = self.ready

    @property
    def ticket(self) -> str:
        return str(self.ready["ticket"])

    def status(self) -> dict[str, Any]:
        try:
            return self._client.get(f"{self.ready['api']}/kvasir/v1/status").json()
        except httpx.TransportError as error:
            raise Unreachable(f"{self.name} does not answer ({error}); its log ends: {self.log_end()}") from error

    @property
    def _completions(self) -> str:
        return f"{self.ready['api']}/v1/completions"

    def _body(self, prompts: Sequence[Prompt], tokens: int) -> dict[str, Any]:
        model = self.ready["model"]["name"]
        return {"model": model, "prompt": [list(each) for each in prompts], "max_tokens": tokens, "temperature": 0}

    def burst(self, prompts: Sequence[Prompt], tokens: int) -> Burst:
        """So many requests at once for `tokens` steps. The last prompt is the one that is timed."""
        before = self.status()
        spare = tokens + 2 * len(prompts) + SPARE_STEPS
        with self._company(prompts[:-1], spare):
            answer = self._complete(prompts[-1:], tokens)
        after = self.status()
        made = max(1, after["throughput"]["tokens_total"] - before["throughput"]["tokens_total"])
        moved = sum(after["net"][key] - before["net"][key] for key in ("bytes_in", "bytes_out"))
        steps = answer["usage"]["completion_tokens"] - 1  # from the first token on
        token_s = answer["kvasir"]["decode_ms"] / 1000 / max(1, steps)
        return Burst(
            tokens_per_s=len(prompts) / max(token_s, 1e-9),
            token_s=token_s,
            bytes_per_token=moved / made,
            remote_pairs=after["fanout"]["remote_pairs"] - before["fanout"]["remote_pairs"],
            fallbacks=after["fanout"]["fallbacks"] - before["fanout"]["fallbacks"],
        )

    def answers(self, prompts: Sequence[Prompt], tokens: int) -> list[tuple[str, str]]:
        """Text and finish reason of each prompt's greedy answer."""
        choices = sorted(self._complete(prompts, tokens)["choices"], key=lambda each: each["index"])
        return [(each["text"], each["finish_reason"]) for each in choices]

    @contextmanager
    def _company(self, prompts: Sequence[Prompt], tokens: int) -> Iterator[None]:
        """Keeps these requests going meanwhile; nobody reads their answers, and in the end the node lets go of them.

        Raises BugError when they ended before.
        """
        if not prompts:
            yield
            return
        address = httpx.URL(self.ready["api"])
        connection = HTTPConnection(address.host, address.port)
        body = json.dumps(self._body(prompts, tokens))
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})

        def go_on() -> None:
            if select.select([connection.sock], [], [], 0)[0]:
                raise BugError(f"{len(prompts)} requests of {tokens} tokens to {self.name} ended before the one timed")

        try:
            while self.status()["slots"]["busy"] != len(prompts):
                go_on()
                sleep(POLL_S)
            yield
            go_on()
        finally:
            connection.close()
            while self.status()["slots"]["busy"]:
                sleep(POLL_S)

    def _complete(self, prompts: Sequence[Prompt], tokens: int) -> dict[str, Any]:
        try:
            answer = self._client.post(self._completions, json=self._body(prompts, tokens))
        except httpx.TransportError as error:
            raise Unreachable(f"{self.name} did not answer ({error}); its log ends: {self.log_end()}") from error
        if answer.status_code != httpx.codes.OK:
            raise Unreachable(f"{self.name} refused a burst of {len(prompts)} prompts: {answer.text[:500]}")
        return answer.json()

    def saturate(self, prompts: Sequence[Prompt], stop: threading.Event) -> None:
        """Keeps these prompts going until `stop`; their answers are given up then. Raises as `burst`."""
        body = {**self._body(prompts, SATURATING_TOKENS), "stream": True}
        while not stop.is_set():
            with self._client.stream("POST", self._completions, json=body) as answer:
                if answer.status_code != httpx.codes.OK:
                    raise Unreachable(f"{self.name} refused {len(prompts)} prompts: {answer.read()[:500]!r}")
                for _ in answer.iter_raw():
                    if stop.is_set():
                        break

    def log_end(self) -> str:
        return self._log.read_text(errors="replace")[-1500:]


@contextmanager
def open_node(
    folder: Path,
    name: str,
    *flags: str,
    cores: Collection[int],
    settings: Mapping[str, object],
    ticket: str | None = None,
) -> Iterator[BenchNode]:
    """A headless node with a data directory `folder`/`name`; drained, and waited for, at the end.

    Its settings are the defaults and those given here, whatever this machine's file and environment say.
    """
    log, config = folder / f"{name}.log", folder / "config.toml"
    config.write_text("version = 1\n")
    command = [sys.executable, "-P", "-m", "kvasir_node", "--config", str(config), "--data-dir", str(folder / name)]
    command += ["--log-level", "info", "up", *flags, "--headless", "--name", name]
    command += ["--api", "127.0.0.1:0", "--listen", "/ip4/127.0.0.1/tcp/0"]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    with log.open("a") as errors:
        process = _start_pinned(command, cores, _environment(ticket), errors)
    node = BenchNode(name, process, log)
    try:
        yield node
    finally:
        node.close()
        _stop(process)


def _environment(ticket: str | None) -> dict[str, str]:
    """The ticket is a secret, and arguments are seen by everyone on a machine. One thread, for whatever counts them."""
    found = {key: value for key, value in environment().items() if not key.startswith("KVASIR_")}
    found |= {"OMP_NUM_THREADS": "1"}
    return found if ticket is None else found | {"KVASIR_NETWORK__JOIN": ticket}


def _start_pinned(
    command: Sequence[str], cores: Collection[int], variables: Mapping[str, str], errors: Any
) -> subprocess.Popen[str]:
    """A process whose threads all stay on these cores: it inherits them from the thread that starts it."""
    with pinned(cores):
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, env=variables, text=True
        )


@contextmanager
def pinned(cores: Collection[int]) -> Iterator[None]:
    """This thread, and processes it starts, on these cores, where the system can do that and has them."""
    if not hasattr(os, "sched_setaffinity") or not set(cores) <= os.sched_getaffinity(0):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
