"""A swarm on one machine: a hub+coordinator and three workers, each a process of its own, and a burst of requests.

    python examples/local_swarm.py

Prints what happens when, and exits 0 only if every phase happened and every answer equalled its solo run:
saturated -> demand up -> leased -> fetched -> trial -> proven -> remote share -> calm -> drained.

The demo model is so small that a step takes this machine a millisecond or two, and no worker is as quick as not asking
one: a coordinator that measures what pays would stay alone. So each node is an emulated device here, `--slowdown` times
slower than this machine, and its status says so. With a model worth sharing nothing of the kind is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import trio

PROMPTS = (
    "She was not in the room",
    "The evening was spent in conversation",
    "Mr. Knightley had always been",
    "It was a delightful visit",
    "He looked at her with surprise",
    "The carriage was ordered",
    "My dear sister",
    "They walked on together",
    "Nothing could be more agreeable",
    "Her father was at home",
    "The letter was from London",
    "There was no time to be lost",
)
START_TIMEOUT_S = 60.0
PHASES = ("saturated", "demand up", "leased", "fetched", "trial", "proven", "remote share", "calm", "drained")


@dataclass(slots=True)
class Process:
    """One running node and its ready line."""

    name: str
    popen: subprocess.Popen[str]
    ready: dict[str, Any]

    def status(self) -> dict[str, Any]:
        return httpx.get(f"{self.ready['api']}/kvasir/v1/status", timeout=5).json()


@contextmanager
def node(folder: Path, name: str, *flags: str) -> Iterator[Process]:
    """A headless node with its own data directory and free ports; stopped, and waited for, at the end."""
    command = [sys.executable, "-P", "-m", "kvasir_node", "--data-dir", str(folder / name), "--log-level", "info", "up"]
    command += ["--headless", "--name", name, "--api", "127.0.0.1:0", "--listen", "/ip4/127.0.0.1/tcp/0", *flags]
    with (folder / f"{name}.log").open("w") as log:
        # The ticket travels in the environment: it is a secret, and arguments are seen by everyone on a machine.
        popen = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert popen.stdout is not None
        line = popen.stdout.readline()
        if not line:
            raise SystemExit(f"{name} did not start:\n{(folder / f'{name}.log').read_text()[-2000:]}")
        yield Process(name, popen, json.loads(line))
    finally:
        popen.send_signal(signal.SIGTERM)
        try:
            code = popen.wait(30)
        except subprocess.TimeoutExpired:
            popen.kill()
            code = popen.wait()
        if popen.stdout is not None:
            popen.stdout.close()
        if code != 0:
            print(f"{name} ended with code {code}", file=sys.stderr)


@dataclass(slots=True)
class Timeline:
    """Notes the first moment of each phase, and prints it."""

    started_at: float = field(default_factory=time.monotonic)
    seen: dict[str, float] = field(default_factory=dict)

    def note(self, phase: str, detail: str) -> None:
        if phase not in self.seen:
            self.seen[phase] = time.monotonic() - self.started_at
            print(f"{self.seen[phase]:7.2f} s  {phase:<13} {detail}", flush=True)

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.started_at:7.2f} s  {text}", flush=True)


def observe(timeline: Timeline, before: dict[str, Any], main: dict[str, Any], workers: list[dict[str, Any]]) -> None:
    """Reads one round of statuses and notes which phases they show."""
    slots, fanout, hub = main["slots"], main["fanout"], main["hub"]
    if slots["state"] == "saturated":
        timeline.note("saturated", f"{slots['busy']} of {slots['total']} slots busy, {slots['queued']} waiting")
    wanted = sum(row["want"] for row in hub["demand"])
    if wanted:
        timeline.note("demand up", f"{wanted} copies of {len(hub['demand'])} slices wanted")
    if hub["leases"]:
        timeline.note("leased", f"{hub['leases']} leases")
    fetched = sum(w["worker"]["bytes_fetched"] for w in workers)
    if fetched and any(w["worker"]["slices"] for w in workers):
        timeline.note("fetched", f"{fetched / 1e6:.1f} MB fetched by content address")
    if fanout["trial_pairs"] > before["fanout"]["trial_pairs"]:
        timeline.note("trial", f"{fanout['trial_pairs']} pairs in trials")
    proven = [w for w in main["workers"] if w["state"] == "proven"]
    if proven:
        timeline.note("proven", f"{len(proven)} workers")
    if fanout["remote_pairs"] > before["fanout"]["remote_pairs"]:
        timeline.note("remote share", fanout["reason"])
    if "remote share" in timeline.seen and slots["state"] == "calm":
        timeline.note("calm", f"fan-out {fanout['reason']}")
    if "calm" in timeline.seen and not wanted and all(w["worker"]["state"] == "idle" for w in workers):
        timeline.note("drained", "every worker idle, demand 0")


async def ask(client: httpx.AsyncClient, url: str, prompt: str, tokens: int) -> dict[str, Any]:
    body = {"model": "demo", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    answer = await client.post(f"{url}/v1/completions", json=body, timeout=120)
    answer.raise_for_status()
    return answer.json()


@dataclass(slots=True)
class Burst:
    """Keeps `clients` requests going until told to stop; remembers answers that differ from the solo run."""

    url: str
    solo: dict[str, str]
    tokens: int
    answered: int = 0
    remote_pairs: int = 0
    wrong: list[str] = field(default_factory=list)
    stop: bool = False

    async def client(self, number: int) -> None:
        async with httpx.AsyncClient() as client:
            turn = number
            while not self.stop:
                prompt = PROMPTS[turn % len(PROMPTS)]
                answer = await ask(client, self.url, prompt, self.tokens)
                self.answered += 1
                self.remote_pairs += answer["kvasir"]["remote_pairs"]
                if answer["choices"][0]["text"] != self.solo[prompt]:
                    self.wrong.append(prompt)
                turn += 1


async def run(main: Process, workers: list[Process], options: argparse.Namespace) -> bool:
    timeline = Timeline()
    url = main.ready["api"]
    async with httpx.AsyncClient() as client:
        solo = {p: (await ask(client, url, p, options.tokens))["choices"][0]["text"] for p in PROMPTS}
    before = await trio.to_thread.run_sync(main.status)
    timeline.say(f"{len(solo)} solo answers; remote pairs {before['fanout']['remote_pairs']}")
    timeline.started_at = time.monotonic()
    burst = Burst(url, solo, options.tokens)

    async def watch_until(done: Callable[[], bool], timeout_s: float) -> None:
        with trio.move_on_after(timeout_s):
            while not done():
                status = await trio.to_thread.run_sync(main.status)
                states = [await trio.to_thread.run_sync(worker.status) for worker in workers]
                observe(timeline, before, status, states)
                await trio.sleep(0.2)

    async with trio.open_nursery() as nursery:
        for number in range(options.clients):
            nursery.start_soon(burst.client, number)
        await watch_until(lambda: "remote share" in timeline.seen, 60)
        until = time.monotonic() + options.seconds
        await watch_until(lambda: time.monotonic() > until, options.seconds + 1)
        burst.stop = True
    timeline.say(f"burst over: {burst.answered} answers, {burst.remote_pairs} remote pairs, {len(burst.wrong)} wrong")
    await watch_until(lambda: "drained" in timeline.seen, 60)
    settled = await trio.to_thread.run_sync(main.status)
    await trio.sleep(2)
    after = await trio.to_thread.run_sync(main.status)
    growth = after["fanout"]["remote_pairs"] - settled["fanout"]["remote_pairs"]
    missing = [phase for phase in PHASES if phase not in timeline.seen]
    pairs = f"remote pairs before {before['fanout']['remote_pairs']}, growth after {growth}"
    print(f"phases missing: {missing or 'none'}; {pairs}")
    return not missing and not burst.wrong and not before["fanout"]["remote_pairs"] and not growth


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--slowdown", type=float, default=40, help="how many times slower than this machine a node is")
    parser.add_argument("--seconds", type=float, default=8, help="how long the burst goes on once work is shared")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvasir-swarm-") as folder, ExitStack() as stack:
        root = Path(folder)
        os.environ["KVASIR_COMPUTE__SLOWDOWN"] = str(options.slowdown)
        main_node = stack.enter_context(node(root, "coordinator", "--role", "coordinator,hub"))
        print(f"coordinator ready: {main_node.ready['model']['name']} at {main_node.ready['api']}", flush=True)
        os.environ["KVASIR_NETWORK__JOIN"] = main_node.ready["ticket"]
        workers = [
            stack.enter_context(node(root, f"worker-{number}", "--role", "worker"))
            for number in range(1, options.workers + 1)
        ]
        print(f"{len(workers)} workers ready", flush=True)
        passed = trio.run(run, main_node, workers, options)
    print("PASSED" if passed else "FAILED")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
