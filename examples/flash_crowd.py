"""A flash crowd on one machine: a calm time, a burst of clients, and calm again; what the swarm does, as a chart.

    python examples/flash_crowd.py --png flash_crowd.png

Real processes, emulated slow devices (see local_swarm.py for why). Every quarter of a second the coordinator is asked
how many tokens it made, how many copies of slices are in demand, and how many workers are proven. Exits 0 only if
demand was none before the crowd, rose with it, workers came and took a share, and all was as before in the end.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import trio
from local_swarm import PROMPTS, Process, ask, node

from kvasir_node.surfaces.chart import curves_png

SAMPLE_S = 0.25
SMOOTHED = 8  # samples over which tokens are counted
DRAIN_TIMEOUT_S = 60.0
LINE_S = 3.0


@dataclass(frozen=True, slots=True)
class Sample:
    """What the coordinator, which is the hub too, said at one moment."""

    at_s: float
    tokens: int  # of answers, since the start
    wanted: int  # copies of slices
    workers: int  # proven, with slices
    remote_pairs: int


def sample(main: Process, started_at: float) -> Sample:
    status = main.status()
    return Sample(
        at_s=time.monotonic() - started_at,
        tokens=status["throughput"]["tokens_total"],
        wanted=sum(row["want"] for row in status["hub"]["demand"]),
        workers=sum(1 for worker in status["workers"] if worker["state"] == "proven" and worker["slices"]),
        remote_pairs=status["fanout"]["remote_pairs"],
    )


async def client(url: str, number: int, tokens: int, until: float) -> None:
    """Asks without pause until that time."""
    async with httpx.AsyncClient() as http:
        while time.monotonic() < until:
            await ask(http, url, PROMPTS[number % len(PROMPTS)], tokens)
            number += 1


async def run(main: Process, options: argparse.Namespace) -> tuple[list[Sample], float, float]:
    """The samples, and when the crowd came and left."""
    started_at = time.monotonic()
    came, left = started_at + options.calm, started_at + options.calm + options.burst
    samples: list[Sample] = []

    def is_done() -> bool:
        over_s = time.monotonic() - left
        return over_s > DRAIN_TIMEOUT_S or (over_s > 0 and is_over(samples[-1]))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch, main, started_at, samples, is_done)
        nursery.start_soon(client, main.ready["api"], 0, options.tokens, left)
        await trio.sleep(came - time.monotonic())
        for number in range(1, options.clients):
            nursery.start_soon(client, main.ready["api"], number, options.tokens, left)
    return samples, came - started_at, left - started_at


async def watch(main: Process, started_at: float, samples: list[Sample], done: Callable[[], bool]) -> None:
    while not (samples and done()):
        samples.append(await trio.to_thread.run_sync(sample, main, started_at))
        await trio.sleep(SAMPLE_S)


def is_over(last: Sample) -> bool:
    return not last.wanted and not last.workers


def chart(samples: Sequence[Sample], title: str) -> bytes:
    """Throughput, demand and workers over time, each as a share of its most, which stands beside its name."""
    speeds = [
        (late.at_s, (late.tokens - early.tokens) / (late.at_s - early.at_s))
        for early, late in zip(samples, samples[SMOOTHED:], strict=False)
    ]
    curves = {
        "tokens/s": speeds,
        "copies wanted": [(each.at_s, float(each.wanted)) for each in samples],
        "workers proven": [(each.at_s, float(each.workers)) for each in samples],
    }
    most = {name: max(y for _, y in points) for name, points in curves.items()}
    shares = {
        f"{name} (1: {most[name]:.0f})": [(x, y / (most[name] or 1)) for x, y in points]
        for name, points in curves.items()
    }
    return curves_png(title, "seconds", "share of the most", shares, doublings=False)


def verdict(samples: Sequence[Sample], came_s: float) -> list[str]:
    """What did not happen; empty = all did."""
    calm = [each for each in samples if each.at_s < came_s]
    wrong = {
        "demand before the crowd came": any(each.wanted for each in calm),
        "no demand while it was there": not any(each.wanted for each in samples),
        "no worker was proven": not any(each.workers for each in samples),
        "no pair was computed by workers": samples[-1].remote_pairs == 0,
        "demand or workers at the end": not is_over(samples[-1]),
    }
    return [what for what, is_so in wrong.items() if is_so]


def tell(samples: Sequence[Sample], came_s: float, left_s: float) -> None:
    """A line every few seconds, and the sums."""
    print("   time  tokens  copies wanted  workers")
    told_s = -LINE_S
    for each in samples:
        if each.at_s < told_s + LINE_S:
            continue
        told_s = each.at_s
        mark = " crowd" if came_s <= each.at_s < left_s else ""
        print(f"{each.at_s:5.1f} s  {each.tokens:6}  {each.wanted:13}  {each.workers:7}{mark}")
    first = {
        "demand": next((each.at_s for each in samples if each.wanted), None),
        "worker": next((each.at_s for each in samples if each.workers), None),
    }
    for what, at_s in first.items():
        if at_s is not None:
            print(f"first {what} {at_s - came_s:.1f} s after the crowd came")
    print(f"all gone {samples[-1].at_s - left_s:.1f} s after it left; {samples[-1].remote_pairs} remote pairs")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--slowdown", type=float, default=40, help="how many times slower than this machine a node is")
    parser.add_argument("--calm", type=float, default=6, help="seconds with one client, before the crowd")
    parser.add_argument("--burst", type=float, default=20, help="seconds with all clients")
    parser.add_argument("--png", type=Path, default=Path("flash_crowd.png"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvasir-crowd-") as folder, ExitStack() as stack:
        root = Path(folder)
        os.environ["KVASIR_COMPUTE__SLOWDOWN"] = str(options.slowdown)
        main_node = stack.enter_context(node(root, "coordinator", "--role", "coordinator,hub"))
        os.environ["KVASIR_NETWORK__JOIN"] = main_node.ready["ticket"]
        for number in range(1, options.workers + 1):
            stack.enter_context(node(root, f"worker-{number}", "--role", "worker"))
        samples, came_s, left_s = trio.run(run, main_node, options)
    tell(samples, came_s, left_s)
    options.png.write_bytes(chart(samples, f"Flash crowd: {options.clients} clients, {options.workers} workers"))
    print(f"chart: {options.png}")
    wrong = verdict(samples, came_s)
    print("PASSED" if not wrong else f"FAILED: {'; '.join(wrong)}")
    return 0 if not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
