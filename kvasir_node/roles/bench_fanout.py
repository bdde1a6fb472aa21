"""Measures what fan-out gains: tokens per second of a coordinator with workers against the same coordinator alone.

It does not know how figures are shown, nor how nodes decide. In one run and with real processes: one real worker on the
machine's other core, beside both cores as threads of one process; then emulated devices (roles/slowdown.py), near and
far. Those that are compared take turns, so that other load on the machine meets all alike, and figures are medians;
only ratios within one run mean anything.

Emulated devices share this machine's cores and memory bus, their network is its loopback, and distance is answers that
are held back. So their figures say what the split does with its computations and its waits, and nothing about
bandwidth, jitter or loss.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import psutil
import torch

from kvasir_node.base.errors import CapacityError
from kvasir_node.base.settings import MIB
from kvasir_node.model.checkpoint import Checkpoint, open_checkpoint
from kvasir_node.model.experts import ExpertShard, stored_dtype
from kvasir_node.roles.bench_nodes import BenchNode, Burst, Prompt, open_node
from kvasir_node.roles.bench_parts import PROMPT_TOKENS, StepParts, open_parts
from kvasir_node.roles.loading import compute_dtype

AT = 16  # the concurrency of the figures in brief
SLOWDOWN = 10
COPIES_MAX = 2  # of a slice: so that the load of its experts can be balanced between workers
SLICES_OF_LAYER = 8
LAN_RTT_MS, FAR_RTTS_MS, FAR_WORKERS = 0.5, (20.0, 40.0), 4
TOKENS_MIN, TOKENS_MAX = 6, 64  # steps of one burst
SPARE_PROMPTS = 4  # for those whose answers end early
PROBE_TOKENS = 32  # of the answers that are compared
BURST_S = 2.0  # about, of one burst
SETTLE_S = 4.0  # after a change of load, before a coordinator with workers is measured
EMULATED_SETTLE_S = 30.0  # after emulated workers came: their steps are that much longer, and loading them cost time
EMULATED_BURSTS = 3  # of each side, of which the median counts
PARTS_SHARE, REAL_SHARE = 0.1, 0.35  # of the time; the rest is for emulated workers, if there are any
PHASES_SHARE = 0.8  # of the rest: kept for emulated workers while the coordinator alone is measured
STALLED_S = 120.0  # without one more proven slice
POLL_S = 0.3
CONTEXT = 512
ALONE, WORKER, THREADS = "alone", "worker", "two_threads"
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked for; `overrides` are settings of all nodes."""

    model: Path
    seconds: float
    concurrency: tuple[int, ...]
    workers: tuple[int, ...]  # emulated ones
    overrides: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(slots=True)
class RealPoint:
    """One number of requests at once: the bursts of each side, in turns, and the parts of a step."""

    parts: StepParts
    bursts: dict[str, list[Burst]] = field(default_factory=lambda: {ALONE: [], WORKER: [], THREADS: []})

    def tokens_per_s(self, side: str) -> float:
        return statistics.median(each.tokens_per_s for each in self.bursts[side])

    def ratio(self, side: str) -> float:
        return self.tokens_per_s(side) / self.tokens_per_s(ALONE)


@dataclass(frozen=True, slots=True)
class EmulatedPoint:
    """So many emulated workers, so far away, at so many requests at once. `bound` is a gain, as is `gain`."""

    workers: int
    rtt_ms: float
    concurrency: int
    tokens_per_s: float
    alone: float
    bound: float
    latency_ms: float
    latency_idle_ms: float

    @property
    def gain(self) -> float:
        return self.tokens_per_s / self.alone

    @property
    def fraction(self) -> float:
        return self.gain / self.bound


@dataclass(frozen=True, slots=True)
class FanoutFigures:
    """`same_tokens`: all answers of all sides were the same, prompt by prompt."""

    model: str
    real: Mapping[int, RealPoint]
    emulated: tuple[EmulatedPoint, ...]
    same_tokens: bool
    proven_ratio: float  # of the slices, before the real worker was measured

    @property
    def at(self) -> int:
        """The concurrency of `ratio` and the like: 16, or the nearest that was measured."""
        return min(self.real, key=_away_from_at)


def measure(plan: Plan, folder: Path, say: Say) -> FanoutFigures:
    """Blocks for about `plan.seconds`, and at least as long again for nodes that start, share out experts and settle.

    Raises CapacityError when the memory of this machine is too small for the processes, Unreachable when one of them
    does not start or ends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fanout-", dir=folder) as name:
        return _Bench(plan, Path(name), say).run()


class _Bench:
    def __init__(self, plan: Plan, folder: Path, say: Say) -> None:
        self._plan = plan
        self._folder = folder
        self._say = say
        self._checkpoint = open_checkpoint(plan.model)
        self._memory_bytes = _memory_bytes(self._checkpoint, self._dtype)
        self._slots = max(plan.concurrency)
        self._began_at = monotonic()
        self.same_tokens = True
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
        self._cores = (cores[:1], cores[1:2] or cores[:1])
        self._all_cores = cores
        self._prompts = _draw_prompts(self._checkpoint, 2 * self._slots)

    def run(self) -> FanoutFigures:
        self._check_memory()
        parts = self._measure_parts()
        real, proven_ratio = self._measure_real(parts)
        emulated = self._measure_emulated(parts) if any(self._plan.workers) else []
        return FanoutFigures(self._checkpoint.path.name, real, tuple(emulated), self.same_tokens, proven_ratio)

    def _left_s(self, share: float) -> float:
        """Of the time until this share of all of it has passed."""
        return self._began_at + share * self._plan.seconds - monotonic()

    @contextmanager
    def _not_counted(self) -> Iterator[None]:
        """Nodes that start, fetch, prove themselves, warm up and settle take none of the time."""
        began_at = monotonic()
        try:
            yield
        finally:
            self._began_at += monotonic() - began_at

    def _check_memory(self) -> None:
        needed, free = 4 * self._memory_bytes + (1 << 30), psutil.virtual_memory().available
        if needed > free:
            raise CapacityError(
                f"{self._checkpoint.path.name} needs about {needed >> 20} MiB for three coordinators and a worker, and "
                f"{free >> 20} MiB are free; take a smaller model with --model S"
            )

    # Parts ----------------------------------------------------------------------------------------------------

    def _measure_parts(self) -> dict[int, StepParts]:
        self._say("the parts of a step, with no network")
        counts = self._plan.concurrency
        with open_parts(self._plan.model, self._folder, self._dtype, self._cores) as bench:
            self._began_at = monotonic()
            each_s = max(0.05, min(1.0, self._left_s(PARTS_SHARE) / len(counts) / 3))
            return {count: bench.step(count, each_s) for count in counts}

    @property
    def _dtype(self) -> str:
        return self._plan.overrides.get("coordinator.dtype", "auto")

    # One real worker ------------------------------------------------------------------------------------------

    def _measure_real(self, parts: Mapping[int, StepParts]) -> tuple[dict[int, RealPoint], float]:
        own, other = self._cores
        with ExitStack() as stack:
            self._say("starting a coordinator alone, one with both cores, one for a worker, and the worker")
            sides = {ALONE: self._coordinator(stack, ALONE, own, **{"fanout.enabled": "false"})}
            sides[THREADS] = self._coordinator(
                stack, THREADS, self._all_cores[:2], **{"fanout.enabled": "false", "node.threads": 2}
            )
            # What is wanted is had, so that nobody goes on asking the core that is measured.
            sides[WORKER] = self._coordinator(stack, WORKER, own, **{"market.surge_copies_max": 1})
            worker = self._worker(stack, 1, sides[WORKER], other, _with_spare(self._memory_bytes))
            proven_ratio = self._share_out(sides[WORKER], [worker], 1)
            self._choose_prompts(sides[ALONE])
            points = {count: RealPoint(part) for count, part in parts.items()}
            lengths = {count: self._warm_up(sides, count, TOKENS_MIN) for count in points}
            rounds, share = 0, REAL_SHARE if any(self._plan.workers) else 1.0
            while rounds == 0 or self._left_s(share) > 0:
                rounds += 1
                self._say(f"round {rounds} with a real worker")
                for count, point in points.items():
                    self._settle(sides[WORKER], count, lengths[count])
                    for name, side in sides.items():
                        point.bursts[name].append(side.burst(self._prompts[:count], lengths[count]))
            self._compare({WORKER: sides[WORKER], THREADS: sides[THREADS]}, sides[ALONE])
            return points, proven_ratio

    def _warm_up(self, sides: Mapping[str, BenchNode], count: int, least: int) -> int:
        """The prompts into each side's cache, and what a plan needs to know; returns how long bursts should be."""
        took_s = [side.burst(self._prompts[:count], TOKENS_MIN).token_s for side in sides.values()]
        return min(TOKENS_MAX, max(least, round(BURST_S / max(took_s))))

    def _settle(self, side: BenchNode, count: int, length: int, seconds: float = SETTLE_S) -> None:
        """Until a coordinator has found out what pays with so many requests; not counted."""
        with self._not_counted():
            until = monotonic() + seconds
            while monotonic() < until:
                side.burst(self._prompts[:count], length)

    def _compare(self, sides: Mapping[str, BenchNode], expected: BenchNode) -> None:
        """All prompts at once: each side's greedy answers and the expected ones."""
        prompts = self._prompts[: self._slots]
        wanted = expected.answers(prompts, PROBE_TOKENS)
        for name, side in sides.items():
            differ = sum(own != other for own, other in zip(side.answers(prompts, PROBE_TOKENS), wanted, strict=True))
            if differ:
                self._say(f"{name}: {differ} of {len(prompts)} answers differ from those of the coordinator alone")
            self.same_tokens &= not differ

    def _choose_prompts(self, side: BenchNode) -> None:
        """Those come first whose answers do not end by themselves, so that bursts have the same work all along."""
        looked_at = self._prompts[: self._slots + SPARE_PROMPTS]
        ended = [reason != "length" for _, reason in side.answers(looked_at, TOKENS_MAX)]
        chosen = sorted(range(len(looked_at)), key=lambda number: ended[number])
        self._prompts = [looked_at[number] for number in chosen] + self._prompts[len(looked_at) :]

    # Emulated devices -----------------------------------------------------------------------------------------

    def _measure_emulated(self, parts: Mapping[int, StepParts]) -> list[EmulatedPoint]:
        counts = sorted(parts, key=lambda count: (count != min(parts), _away_from_at(count)))  # for want of time
        phases = [(workers, LAN_RTT_MS) for workers in sorted(self._plan.workers) if workers]
        far = min(FAR_WORKERS, max(self._plan.workers))
        phases += [(far, rtt_ms) for rtt_ms in FAR_RTTS_MS if far]
        found: list[EmulatedPoint] = []
        with ExitStack() as stack:
            self._say(f"starting two coordinators that are {SLOWDOWN} times slower, one of them alone")
            slow = {"compute.slowdown": SLOWDOWN}
            sides = {
                ALONE: self._coordinator(stack, "slow-alone", self._all_cores, **slow, **{"fanout.enabled": "false"}),
                WORKER: self._coordinator(stack, "slow", self._all_cores, **slow),
            }
            with self._not_counted():
                for side in sides.values():
                    side.await_ready()
            lengths: dict[int, int] = {}
            idle_s = 0.0
            for number, count in enumerate(counts):
                with self._not_counted():
                    lengths[count] = self._warm_up(sides, count, TOKENS_MIN)
                alone = sides[ALONE].burst(self._prompts[:count], lengths[count])
                idle_s = idle_s or alone.token_s  # of the fewest, who come first
                found.append(_point(0, 0.0, count, alone, alone, parts, idle_s))
                if number and self._left_s(1) < (1 - REAL_SHARE) * self._plan.seconds * PHASES_SHARE:
                    break
            for number, (workers, rtt_ms) in enumerate(phases):
                if self._left_s(1) <= 0 and number:
                    self._say("no time left for the rest")
                    break
                ends_s = self._left_s(1) / (len(phases) - number)
                found += self._phase(sides, workers, rtt_ms, lengths, parts, idle_s, ends_s)
        return found

    def _phase(
        self,
        sides: Mapping[str, BenchNode],
        workers: int,
        rtt_ms: float,
        lengths: Mapping[int, int],
        parts: Mapping[int, StepParts],
        idle_s: float,
        seconds: float,
    ) -> list[EmulatedPoint]:
        self._say(f"{workers} emulated workers at {rtt_ms:g} ms")
        settings = {"compute.slowdown": SLOWDOWN, "compute.answer_delay_s": rtt_ms / 1000}
        copies = min(COPIES_MAX, workers)
        room = _with_spare(self._memory_bytes * copies // workers)  # so that each gets its share and no more
        found: list[EmulatedPoint] = []
        main = sides[WORKER]
        with ExitStack() as stack:
            nodes = [
                self._worker(stack, number, main, self._all_cores, room, **settings) for number in range(1, workers + 1)
            ]
            self._share_out(main, nodes, copies)
            left_s = self._left_s(1) - seconds
            for number, count in enumerate(sorted(lengths, key=_away_from_at)):
                if number and self._left_s(1) < left_s:
                    break
                if number == 0:
                    self._settle(main, count, TOKENS_MIN, EMULATED_SETTLE_S)
                medians = self._in_turns(sides, count, lengths[count])
                found.append(_point(workers, rtt_ms, count, medians[WORKER], medians[ALONE], parts, idle_s))
        return found

    def _in_turns(self, sides: Mapping[str, BenchNode], count: int, length: int) -> dict[str, Burst]:
        """The median of some bursts of each side. The one with workers settles before each of its own, as it had
        nothing to do meanwhile."""
        bursts: dict[str, list[Burst]] = {name: [] for name in sides}
        for _ in range(EMULATED_BURSTS):
            for name, side in sides.items():
                if name == WORKER:
                    self._settle(side, count, TOKENS_MIN)
                bursts[name].append(side.burst(self._prompts[:count], length))
        return {
            name: sorted(each, key=lambda burst: burst.tokens_per_s)[EMULATED_BURSTS // 2]
            for name, each in bursts.items()
        }

    # Nodes ----------------------------------------------------------------------------------------------------

    def _coordinator(self, stack: ExitStack, name: str, cores: Collection[int], **settings: object) -> BenchNode:
        node = open_node(
            self._folder,
            name,
            str(self._plan.model),
            "--role",
            "coordinator,hub",
            cores=cores,
            settings={**self._common(), **settings, **self._plan.overrides},
        )
        return stack.enter_context(node)

    def _worker(
        self, stack: ExitStack, number: int, main: BenchNode, cores: Collection[int], room: int, **settings: object
    ) -> BenchNode:
        settings = {**self._common(), "worker.memory_bytes": room, **settings, **self._plan.overrides}
        node = open_node(
            self._folder,
            f"worker-{number}",
            "--role",
            "worker",
            cores=cores,
            settings=settings,
            ticket=main.ticket,
        )
        return stack.enter_context(node)

    def _common(self) -> dict[str, object]:
        """Workers come at once and stay; whether they are used is the coordinator's to decide, at any load."""
        slice_bytes = _file_bytes(self._checkpoint) // len(self._checkpoint.layers) // SLICES_OF_LAYER
        return {
            "node.threads": 1,
            "coordinator.slots": self._slots,
            "coordinator.queue": 4 * self._slots,
            "coordinator.context": CONTEXT,
            "coordinator.memory_bytes": _with_spare(self._memory_bytes),
            "network.keepalive_timeout_s": 30,  # many processes that load at once on few cores are not dead
            "fanout.when": "always",
            "fanout.proof_ttl_s": 86400,
            "market.slice_bytes": slice_bytes + slice_bytes // 8,
            "market.surge_copies_max": COPIES_MAX,
            "market.poll_interval_s": 0.1,
            "market.report_interval_s": 0.5,
            "market.progress_timeout_s": 600,
            "market.lease_ttl_s": 600,
            "market.renew_interval_s": 120,  # each lease is renewed by itself, on the core that is measured
            "market.tenure_min_s": 86400,
            "market.surplus_grace_s": 86400,
            "worker.slices_max": 4096,
        }

    def _share_out(self, main: BenchNode, workers: Sequence[BenchNode], copies: int) -> float:
        """Loads `main` until workers have proven all slices so many times; returns the share of them that is proven."""
        with self._not_counted():
            for worker in workers:
                worker.await_ready()
            return self._proven_share(main, copies)

    def _proven_share(self, main: BenchNode, copies: int) -> float:
        stop = threading.Event()
        began_at = changed_at = monotonic()
        proven = wanted = 0
        with ThreadPoolExecutor(1) as pool:
            load = pool.submit(main.saturate, self._prompts, stop)
            try:
                while not load.done() and monotonic() - changed_at < STALLED_S:
                    before = proven
                    proven, wanted = _proven(main.status(), copies)
                    if proven == wanted:
                        break
                    changed_at = monotonic() if proven != before else changed_at
                    sleep(POLL_S)
            finally:
                stop.set()
            load.result()
        self._say(f"{proven} of {wanted} copies of slices are proven after {monotonic() - began_at:.0f} s")
        return proven / wanted


def _away_from_at(count: int) -> int:
    """What matters most has the least of it."""
    return abs(count - AT)


def _proven(status: Mapping[str, Any], copies: int) -> tuple[int, int]:
    """Copies of slices that are proven, and that there should be."""
    proven = sum(min(copies, row["proven"]) for row in status["hub"]["demand"])
    return proven, copies * status["model"]["slices"]


def _point(
    workers: int,
    rtt_ms: float,
    count: int,
    burst: Burst,
    alone: Burst,
    parts: Mapping[int, StepParts],
    idle_s: float,
) -> EmulatedPoint:
    return EmulatedPoint(
        workers,
        rtt_ms,
        count,
        burst.tokens_per_s,
        alone.tokens_per_s,
        parts[count].bound_equal(workers),
        1000 * burst.token_s,
        1000 * idle_s,
    )


def _file_bytes(checkpoint: Checkpoint) -> int:
    """Of all routed experts, as they are stored."""
    return sum(tensor.nbytes for expert in checkpoint.experts.values() for tensor in expert.values())


def _memory_bytes(checkpoint: Checkpoint, dtype: str) -> int:
    """Of all routed experts, as a node holds them."""
    sizes = checkpoint.maths, checkpoint.hidden_size, checkpoint.expert_hidden_size
    parts = {tensor.spec for expert in checkpoint.experts.values() for tensor in expert.values()}
    cpu = torch.device("cpu")
    computed = compute_dtype(dtype, checkpoint, cpu)
    shard = ExpertShard(*sizes, computed, cpu, stored=stored_dtype(*sizes, parts, computed, cpu))
    return shard.expert_bytes * len(checkpoint.experts)


def _with_spare(expert_bytes: int) -> int:
    """A setting of memory that surely has room for so much."""
    return expert_bytes + expert_bytes // 16 + MIB


def _draw_prompts(checkpoint: Checkpoint, count: int) -> list[Prompt]:
    vocabulary = min(2000, int(checkpoint.config.get("vocab_size", 2000)))  # special tokens are mostly beyond
    draw = torch.Generator().manual_seed(0)
    return [tuple(row) for row in torch.randint(1, vocabulary, (count, PROMPT_TOKENS), generator=draw).tolist()]
