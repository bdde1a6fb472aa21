"""Real processes: whatever its worker does, a coordinator answers the same, fails nobody, is hardly slower than alone.

Both are emulated devices of equal speed, so that sharing pays and this machine's cores are no part of the matter. The
trouble is real: the worker's process is stopped and continued by signals, or killed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvasir_node.model.bench_checkpoint import make_checkpoint
from kvasir_node.roles.bench_nodes import BenchNode, open_node
from kvasir_node.roles.library import demo_folder

SLOTS, STREAMS, TOKENS = 16, 20, 24
ALONE_S, TROUBLE_S = 12.0, 15.0
WINDOW_S = 0.5
LEAST, LOW_MAX_S = 0.9, 2.0  # of alone; how long it may be less
SLOWDOWN = 6


@dataclass(slots=True)
class Load:
    """So many streams at a time, each the next prompt when it ends; tokens by when they came."""

    node: BenchNode
    prompts: list[list[int]]
    came_at: list[float] = field(default_factory=list)
    answers: dict[int, set[str]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    next_prompt: int = 0

    def stream(self) -> None:
        with httpx.Client(timeout=120.0) as client:
            while not self.stop.is_set():
                with self.lock:
                    number, self.next_prompt = self.next_prompt % len(self.prompts), self.next_prompt + 1
                try:
                    self._one(client, number)
                except (httpx.HTTPError, AssertionError) as error:
                    if not self.stop.is_set():
                        self.failures.append(repr(error)[:300])

    def _one(self, client: httpx.Client, number: int) -> None:
        body: dict[str, Any] = {"model": self.node.ready["model"]["name"], "prompt": self.prompts[number]}
        body |= {"max_tokens": TOKENS, "temperature": 0, "stream": True}
        text = ""
        with client.stream("POST", f"{self.node.ready['api']}/v1/completions", json=body) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                text += "".join(choice["text"] for choice in chunk["choices"])
                with self.lock:
                    self.came_at.append(time.monotonic())
        with self.lock:
            self.answers.setdefault(number, set()).add(text)

    def rate(self, since: float, until: float) -> float:
        with self.lock:
            return sum(since <= at < until for at in self.came_at) / (until - since)


@contextmanager
def running(load: Load) -> Iterator[None]:
    threads = [threading.Thread(target=load.stream, daemon=True) for _ in range(STREAMS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        load.stop.set()
        for thread in threads:
            thread.join(60)


def longest_low_s(load: Load, since: float, until: float, alone: float) -> float:
    """How long the rate, over sliding windows, stayed below LEAST of alone without a break."""
    longest = low = 0.0
    at = since
    while at + WINDOW_S <= until:
        low = low + WINDOW_S / 2 if load.rate(at, at + WINDOW_S) < LEAST * alone else 0.0
        longest = max(longest, low)
        at += WINDOW_S / 2
    return longest


Trouble = Callable[[int, float], None]
"""Makes a process's life hard until a time (time.monotonic)."""


def ten_times_slower(pid: int, until: float) -> None:
    while time.monotonic() < until:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.045)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.005)


def flaps(pid: int, until: float) -> None:
    while time.monotonic() < until:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(2.0)
        os.kill(pid, signal.SIGCONT)
        time.sleep(2.0)


def late_at_random(pid: int, until: float) -> None:
    draw = random.Random(4)
    while time.monotonic() < until:
        time.sleep(draw.expovariate(3.0))
        os.kill(pid, signal.SIGSTOP)
        time.sleep(draw.uniform(0.05, 0.4))
        os.kill(pid, signal.SIGCONT)


def vanishes(pid: int, until: float) -> None:
    os.kill(pid, signal.SIGKILL)
    time.sleep(max(0.0, until - time.monotonic()))


TROUBLES: dict[str, Trouble] = {
    "ten times slower": ten_times_slower,
    "flaps": flaps,
    "late at random": late_at_random,
    "vanishes": vanishes,
}


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_no_worker_makes_a_coordinator_wrong_or_slow(tmp_path: Path):
    """Minutes on two cores, which should have nothing else to do."""
    model = tmp_path / "S"
    make_checkpoint("S", model, demo_folder())
    draw = random.Random(1)
    prompts = [[draw.randrange(1, 2000) for _ in range(16)] for _ in range(STREAMS)]
    common = {
        "node.threads": 1,
        "compute.slowdown": SLOWDOWN,
        "market.poll_interval_s": 0.2,
        "market.slice_bytes": 1 << 24,
        "market.tenure_min_s": 3600,
        "network.keepalive_timeout_s": 30,
    }
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        serving = {**common, "coordinator.slots": SLOTS, "coordinator.queue": 64, "coordinator.context": 256}
        main = stack.enter_context(
            open_node(tmp_path, "main", str(model), "--role", "coordinator,hub", cores=cores, settings=serving)
        )
        main.await_ready()
        load = Load(main, prompts)
        stack.enter_context(running(load))
        time.sleep(4.0)
        began = time.monotonic()
        time.sleep(ALONE_S)
        alone = load.rate(began, began + ALONE_S)
        print(f"alone: {alone:.1f} tokens/s")
        for name, trouble in TROUBLES.items():
            with open_node(  # each time another one, whom no earlier trouble is held against
                tmp_path, name, "--role", "worker", cores=cores, settings=common, ticket=main.ticket
            ) as worker:
                await_on(main)
                healthy_at = time.monotonic()
                time.sleep(6.0)
                began = time.monotonic()
                healthy = load.rate(healthy_at, began) / alone
                print(f"  healthy x{healthy:.2f}: {main.status()['fanout']['reason']}")
                trouble(worker._process.pid, began + TROUBLE_S)
                ended = time.monotonic()
            low_s = longest_low_s(load, began, ended, alone)
            print(f"{name}: x{load.rate(began, ended) / alone:.2f}, below {LEAST} for {low_s:.1f} s at most")
            assert low_s <= LOW_MAX_S, name
        assert load.failures == []
    assert all(len(texts) == 1 for texts in load.answers.values())
    assert len(load.answers) == STREAMS


def await_on(main: BenchNode) -> None:
    """Until the coordinator shares, which after much trouble it does late."""
    until = time.monotonic() + 120
    while not main.status()["fanout"]["on"]:
        assert time.monotonic() < until, main.status()["fanout"]
        time.sleep(0.5)
