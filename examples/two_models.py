"""Two models, one hub, and workers that belong to neither: they go where the demand is.

    python examples/two_models.py

A hub, a coordinator with the demo model, another with a second tiny checkpoint (made here, of random weights), and two
workers; each a process. First a crowd asks the one coordinator, then the other, then nobody asks. Exits 0 only if the
workers served each model while it was in demand and left it afterwards, and every answer equalled its solo run.

Both models are too small for workers to pay, so shares are forced here (`fanout.when`); which model gets them is not.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import trio
from local_swarm import PROMPTS, Process, node

import kvasir_node
from kvasir_node.model.bench_checkpoint import make_checkpoint

TOKENIZER = Path(kvasir_node.__file__).parent / "demo"
TURN_TIMEOUT_S = 60.0
LOOK_S = 0.25


@dataclass(slots=True)
class Coordinator:
    """One of the two, what it answered when alone, and how many answers differed since."""

    process: Process
    solo: dict[str, str] = field(default_factory=dict[str, str])
    answered: int = 0
    differed: int = 0

    @property
    def model(self) -> str:
        return self.process.ready["model"]["name"]

    async def text(self, http: httpx.AsyncClient, prompt: str, tokens: int) -> str:
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        answer = await http.post(f"{self.process.ready['api']}/v1/completions", json=body, timeout=120)
        answer.raise_for_status()
        return answer.json()["choices"][0]["text"]

    async def ask_alone(self, tokens: int) -> None:
        async with httpx.AsyncClient() as http:
            self.solo = {prompt: await self.text(http, prompt, tokens) for prompt in PROMPTS}

    async def keep_asking(self, number: int, tokens: int) -> None:
        """Until cancelled."""
        async with httpx.AsyncClient() as http:
            while True:
                prompt = PROMPTS[number % len(PROMPTS)]
                text = await self.text(http, prompt, tokens)
                self.answered += 1
                self.differed += text != self.solo[prompt]
                number += 1

    def seen(self) -> tuple[int, int]:
        """Proven workers that hold something of this model, and pairs that workers computed."""
        status = self.process.status()
        proven = sum(1 for worker in status["workers"] if worker["state"] == "proven" and worker["slices"])
        return proven, status["fanout"]["remote_pairs"]


async def until(both: list[Coordinator], done: Callable[[list[tuple[int, int]]], bool]) -> list[tuple[int, int]] | None:
    """What both saw when it was so; None when that took too long."""
    ends = time.monotonic() + TURN_TIMEOUT_S
    while time.monotonic() < ends:
        seen = [await trio.to_thread.run_sync(each.seen) for each in both]
        if done(seen):
            return seen
        await trio.sleep(LOOK_S)
    return None


async def turn(both: list[Coordinator], asked: int, options: argparse.Namespace) -> bool:
    """A crowd at one of the two, until workers serve it and have left the other."""
    started_at, before = time.monotonic(), both[asked].seen()[1]
    other = 1 - asked
    async with trio.open_nursery() as crowd:
        for number in range(options.clients):
            crowd.start_soon(both[asked].keep_asking, number, options.tokens)
        seen = await until(both, lambda seen: seen[asked][0] > 0 and seen[asked][1] > before and seen[other][0] == 0)
        crowd.cancel_scope.cancel()
    if seen is None:
        print(f"{both[asked].model}: asked for {TURN_TIMEOUT_S:.0f} s, and no worker serves it alone")
        return False
    workers, pairs = seen[asked]
    took_s = time.monotonic() - started_at
    print(f"{both[asked].model} asked: after {took_s:.1f} s {workers} of {options.workers} workers serve it,", end=" ")
    print(f"{seen[other][0]} serve {both[other].model}; {pairs - before} remote pairs")
    return True


async def run(both: list[Coordinator], options: argparse.Namespace) -> bool:
    for each in both:
        await each.ask_alone(options.tokens)
        print(f"{each.model}: {len(each.solo)} solo answers, {each.seen()[1]} remote pairs", flush=True)
    turns = [await turn(both, asked, options) for asked in (0, 1, 0)]
    started_at = time.monotonic()
    left = await until(both, lambda seen: not any(workers for workers, _ in seen))
    print("nobody asks:", "workers still hold slices" if left is None else "every worker gone", end=" ")
    print(f"after {time.monotonic() - started_at:.1f} s")
    for each in both:
        print(f"{each.model}: {each.answered} answers under load, {each.differed} other than solo")
    return all(turns) and left is not None and not any(each.differed for each in both)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvasir-models-") as folder, ExitStack() as stack:
        root = Path(folder)
        make_checkpoint("T", root / "tiny", TOKENIZER)
        hub = stack.enter_context(node(root, "hub", "--role", "hub"))
        os.environ["KVASIR_NETWORK__JOIN"] = hub.ready["ticket"]
        flags = ("--role", "coordinator", "--slots", "2", "--set", "fanout.when=forced")
        both = [
            Coordinator(stack.enter_context(node(root, name, *flags, model)))
            for name, model in (("first", "demo"), ("second", str(root / "tiny")))
        ]
        for number in range(1, options.workers + 1):
            stack.enter_context(node(root, f"worker-{number}", "--role", "worker"))
        passed = trio.run(run, both, options)
    print("PASSED" if passed else "FAILED")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
