"""What the parts of a decode step cost with no network between them: the bound that fan-out is held to.

It does not know nodes or workers. Two processes of this machine, each on its core: one has the trunk and all experts
and profiles whole steps, then both compute half of every layer's experts at the same time, on the rows and choices of
such a step. Run as `python -m kvasir_node.roles.bench_parts FOLDER DTYPE HALF`: it answers lines of JSON.

Shapes: as in `model.trunk`. Units: seconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from kvasir_node.base.errors import Unreachable
from kvasir_node.base.generation import SamplingOptions
from kvasir_node.model.checkpoint import open_checkpoint
from kvasir_node.model.engine import Engine, Job
from kvasir_node.model.experts import load_from_checkpoint
from kvasir_node.model.trunk import ExpertDispatch, LocalDispatch, RowTally, load_trunk
from kvasir_node.roles.bench_nodes import pinned
from kvasir_node.roles.loading import compute_dtype, use_threads

PROMPT_TOKENS = 32  # long enough to be found in a cache again
STEPS = 8
SLOTS = 32
HALVES = 2
_Layer = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # rows, chosen, weights of one layer


@dataclass(frozen=True, slots=True)
class StepParts:
    """One decode step of a number of requests: trunk and all else but experts, all experts, and the halves of them
    computed at once by two processes."""

    trunk_s: float
    experts_s: float
    halves_s: float

    @property
    def bound_real(self) -> float:
        """What one equal worker could gain with no network and the experts in equal halves."""
        return (self.trunk_s + self.experts_s) / (self.trunk_s + self.halves_s)

    def bound_equal(self, workers: int) -> float:
        """Amdahl: what so many equal devices could gain with a free network."""
        return (self.trunk_s + self.experts_s) / (self.trunk_s + self.experts_s / (1 + workers))


class PartsBench:
    """Both processes, ready. `step(count)` profiles a step of so many requests."""

    def __init__(self, whole: subprocess.Popen[str], half: subprocess.Popen[str], folder: Path) -> None:
        self._both = whole, half
        self._folder = folder

    def step(self, count: int, seconds: float) -> StepParts:
        file = self._folder / f"step-{count}.pt"
        profile = self._ask(0, {"do": "profile", "count": count, "seconds": seconds, "file": str(file)})
        for number in range(HALVES):
            self._tell(number, {"do": "half", "seconds": seconds, "file": str(file)})
        halves = [self._hear(number)["half_s"] for number in range(HALVES)]
        return StepParts(profile["trunk_s"], profile["experts_s"], max(halves))

    def _ask(self, number: int, question: dict[str, Any]) -> dict[str, Any]:
        self._tell(number, question)
        return self._hear(number)

    def _tell(self, number: int, question: dict[str, Any]) -> None:
        stdin = self._both[number].stdin
        assert stdin is not None
        stdin.write(json.dumps(question) + "\n")
        stdin.flush()

    def _hear(self, number: int) -> dict[str, Any]:
        stdout = self._both[number].stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            raise Unreachable("a process that measures parts of a step ended; its words are above")
        return json.loads(line)


@contextmanager
def open_parts(
    model: Path, folder: Path, dtype: str, cores: tuple[Collection[int], Collection[int]]
) -> Iterator[PartsBench]:
    with ExitStack() as stack:
        both = [stack.enter_context(_process(model, dtype, number, cores[number])) for number in range(HALVES)]
        bench = PartsBench(both[0], both[1], folder)
        for number in range(HALVES):
            bench._hear(number)  # it is ready
        yield bench


@contextmanager
def _process(model: Path, dtype: str, half: int, cores: Collection[int]) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-P", "-m", "kvasir_node.roles.bench_parts", str(model), dtype, str(half)]
    with pinned(cores):
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


# The processes.


class _RecordingDispatch:
    """Hands on to another dispatch; keeps the time of its calls and the last forward's rows and choices."""

    def __init__(self, inner: ExpertDispatch) -> None:
        self._inner = inner
        self.experts_s = 0.0
        self.step: list[_Layer] = []

    def begin(self, rows: int) -> None:
        self.step = []
        self._inner.begin(rows)

    def __call__(self, layer: int, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        began = perf_counter()
        sums = self._inner(layer, rows, chosen, weights)
        self.experts_s += perf_counter() - began
        self.step.append((rows.clone(), chosen.clone(), weights.clone()))
        return sums

    def tally(self) -> RowTally:
        return self._inner.tally()

    def fork(self) -> _RecordingDispatch:
        return _RecordingDispatch(self._inner.fork())


class _Parts:
    """`half` 0 has all experts and a trunk; 1 has every other expert."""

    def __init__(self, model: Path, dtype: str, half: int) -> None:
        use_threads(1)
        checkpoint = open_checkpoint(model)
        self._half = half
        self._layers = checkpoint.layers
        chosen = compute_dtype(dtype, checkpoint, torch.device("cpu"))
        experts = [each for each in checkpoint.experts if half == 0 or each.index % HALVES == half]
        self._shard = load_from_checkpoint(checkpoint, experts, chosen)
        if half == 0:
            self._recorder = _RecordingDispatch(LocalDispatch(self._shard))
            trunk = load_trunk(model, chosen, "cpu", self._recorder)
            self._vocabulary = trunk.vocab_size
            context = min(trunk.context_max, 1024)
            self._engine = Engine(trunk, SLOTS, context, 256, reuses_prefixes=False)
            self._steps_max = context - PROMPT_TOKENS - 2 * SLOTS
            self._jobs = 0

    def profile(self, count: int, seconds: float, file: str) -> dict[str, float]:
        """Steps of so many requests for about `seconds`; the last one's rows and choices go into `file`."""
        draw = torch.Generator().manual_seed(count)
        prompts = torch.randint(self._vocabulary, (count, PROMPT_TOKENS), generator=draw).tolist()
        first, self._jobs = self._jobs, self._jobs + count
        for number, prompt in enumerate(prompts):
            sampling = SamplingOptions(temperature=0.0)
            self._engine.join(Job(first + number, tuple(prompt), self._steps_max, sampling, frozenset()))
        answering: set[int] = set()
        while len(answering) < count:
            answering.update(token.job_id for token in self._engine.step())
        self._engine.step()
        self._recorder.experts_s, steps, began = 0.0, 0, perf_counter()
        while steps < STEPS or (perf_counter() - began < seconds and steps < self._steps_max - 2 * SLOTS):
            self._engine.step()
            steps += 1
        step_s, experts_s = (perf_counter() - began) / steps, self._recorder.experts_s / steps
        torch.save(self._recorder.step, file)
        for number in range(count):
            self._engine.leave(first + number)
        return {"trunk_s": step_s - experts_s, "experts_s": experts_s}

    def half(self, seconds: float, file: str) -> dict[str, float]:
        """Our half of the experts of a step, again and again for about `seconds`."""
        work = [self._share(*layer) for layer in torch.load(file, weights_only=True)]
        for layer, share in zip(self._layers, work, strict=True):
            self._shard.compute(layer, *share)
        steps, began = 0, perf_counter()
        while steps < STEPS or perf_counter() - began < seconds:
            for layer, share in zip(self._layers, work, strict=True):
                self._shard.compute(layer, *share)
            steps += 1
        return {"half_s": (perf_counter() - began) / steps}

    def _share(self, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pair_row, slot = (chosen % HALVES == self._half).nonzero(as_tuple=True)
        return rows, pair_row, chosen[pair_row, slot], weights[pair_row, slot]


def _serve(model: Path, dtype: str, half: int) -> None:
    parts = _Parts(model, dtype, half)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        do = parts.profile if question.pop("do") == "profile" else parts.half
        print(json.dumps(do(**question)), flush=True)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
