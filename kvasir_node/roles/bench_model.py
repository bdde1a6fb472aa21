"""Measures the engine against transformers' batched generate on the same weights, and against the memory's roof.

It does not know how figures are shown. Both take turns in rounds, so that other load on the machine meets both alike;
figures are medians of the rounds, and only ratios within one run mean anything.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Protocol

import psutil
import torch

from kvasir_node.base.errors import UsageError
from kvasir_node.base.settings import Settings, data_dir_of
from kvasir_node.model.bench_checkpoint import make_checkpoint
from kvasir_node.model.bench_engine import Burst, EngineBench, Prompt, StepProfile
from kvasir_node.model.bench_memory import ReadBench
from kvasir_node.model.bench_reference import TransformersBench
from kvasir_node.model.checkpoint import Checkpoint, open_checkpoint
from kvasir_node.roles.known_models import locate_model
from kvasir_node.roles.library import demo_folder
from kvasir_node.roles.loading import compute_dtype
from kvasir_node.store.catalog import DEMO

PROMPT_TOKENS = 64
DECODE_STEPS = 16
ROUNDS_MIN = 3
# transformers stacks experts while it loads: with size M the process peaked at 2.0 times the weights in bfloat16, 2.3
# times in float32, mapped files included (2026-11-29).
LOADING_FACTOR = 2.5
SPARE_BYTES = 1 << 30
OURS, THEIRS = "kvasir", "transformers"
Say = Callable[[str], None]


@dataclass(slots=True)
class StreamFigures:
    """One number of requests at once: what each side gave in each round, and how a step of ours was spent."""

    profile: StepProfile
    bursts: dict[str, list[Burst]] = field(default_factory=lambda: {OURS: [], THEIRS: []})
    experts_implementation: str = ""  # of transformers, the quicker one

    def decode_tokens_s(self, side: str) -> float:
        return statistics.median(self.decode_rounds(side))

    def prefill_tokens_s(self, side: str) -> float:
        return statistics.median(self.prefill_rounds(side))

    def decode_rounds(self, side: str) -> list[float]:
        return [burst.decode_tokens_s for burst in self.bursts[side]]

    def prefill_rounds(self, side: str) -> list[float]:
        return [burst.prefill_tokens_s for burst in self.bursts[side]]


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """`is_interleaved` False: the two sides did not fit into memory together and were measured one after the other."""

    model: str
    dtype: str
    threads: int
    read_gb_s: float
    is_interleaved: bool
    streams: Mapping[int, StreamFigures]
    prompt_tokens: int = PROMPT_TOKENS
    decode_steps: int = DECODE_STEPS

    def roof_tokens_s(self, streams: int) -> float:
        """Decode if nothing took time but reading, once per step, every weight that the router's choices touch."""
        return streams * self.read_gb_s * 1e9 / self.streams[streams].profile.touched_bytes


class _Side(Protocol):
    def warm_up(self, prompts: Sequence[Prompt], steps: int) -> None: ...

    def burst(self, prompts: Sequence[Prompt], steps: int) -> Burst: ...


def bench_folder(settings: Settings, ref: str | None) -> Path:
    """The checkpoint that `bench model REF` measures; None = the one that a node would serve.

    Raises UsageError for a model that is not whole on this disk.
    """
    ref = ref or settings.coordinator.model
    folder = locate_model(data_dir_of(settings), ref)
    if folder is None and ref != DEMO:
        raise UsageError(f"{ref} is not on this disk; `kvasir-node pull {ref}` fetches it", param="model")
    return folder or demo_folder()


def make_bench_checkpoint(settings: Settings, size: str, out: Path | None, say: Say) -> Path:
    """Makes a seeded checkpoint once, in the data directory's cache unless `out` says where; returns its folder."""
    folder = (out or data_dir_of(settings) / "cache" / "bench" / size).absolute()
    make_checkpoint(size, folder, demo_folder(), progress=lambda done, total: say(f"{folder}: file {done} of {total}"))
    return folder


def _available_bytes() -> int:
    return psutil.virtual_memory().available


def measure(
    folder: Path,
    *,
    streams: Sequence[int],
    threads: int,
    dtype: str,
    prefill_chunk: int,
    seconds: float,
    say: Say,
    available_bytes: Callable[[], int] = _available_bytes,
) -> ModelFigures:
    """Loads both sides and measures about `seconds` long, at least ROUNDS_MIN rounds. Blocks.

    Raises DataError for a checkpoint that either side cannot load.
    """
    checkpoint = open_checkpoint(folder)
    chosen = compute_dtype(dtype, checkpoint, torch.device("cpu"))
    with _threads(threads):
        bench = _Bench(checkpoint, chosen, sorted(set(streams)), prefill_chunk, say)
        return bench.run(seconds, threads, available_bytes)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Bench:
    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, streams: Sequence[int], prefill_chunk: int, say: Say
    ) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._streams = streams
        self._prefill_chunk = prefill_chunk
        self._say = say
        self._reads_gb_s: list[float] = []
        self._figures: dict[int, StreamFigures] = {}
        self._vocabulary = 0  # known once our side is loaded
        self._prompt_sets = 0

    def run(self, seconds: float, threads: int, available_bytes: Callable[[], int]) -> ModelFigures:
        ours = self._load_ours()
        fits = available_bytes() > LOADING_FACTOR * ours.nbytes + SPARE_BYTES
        if fits:
            theirs = self._load_theirs()
            self._rounds({OURS: ours, THEIRS: theirs}, seconds)
        else:
            self._say("not enough memory for both at once: one after the other")
            self._rounds({OURS: ours}, seconds / 2)
            del ours
            gc.collect()
            theirs = self._load_theirs()
            self._rounds({THEIRS: theirs}, seconds / 2)
        for count, implementation in theirs.implementations.items():
            self._figures[count].experts_implementation = implementation
        return ModelFigures(
            model=self._checkpoint.path.name,
            dtype=str(self._dtype).removeprefix("torch."),
            threads=threads,
            read_gb_s=statistics.median(self._reads_gb_s),
            is_interleaved=fits,
            streams=self._figures,
        )

    def _load_ours(self) -> EngineBench:
        self._say(f"loading {self._checkpoint.path.name}")
        ours = EngineBench(
            self._checkpoint,
            self._dtype,
            slots=max(self._streams),
            tokens_max=PROMPT_TOKENS + DECODE_STEPS,
            prefill_chunk=self._prefill_chunk,
        )
        self._vocabulary = ours.vocabulary
        self._say("looking where the time of a step goes")
        profiles = ours.profiles([self._prompts(count) for count in self._streams], DECODE_STEPS)
        self._figures = {count: StreamFigures(one) for count, one in zip(self._streams, profiles, strict=True)}
        return ours

    def _load_theirs(self) -> TransformersBench:
        self._say("loading it into transformers")
        return TransformersBench(self._checkpoint.path, self._dtype)

    def _rounds(self, sides: Mapping[str, _Side], seconds: float) -> None:
        reading = ReadBench()
        self._say("warming up")
        for count in self._streams:
            for side in sides.values():
                side.warm_up(self._prompts(count), DECODE_STEPS)
        began_at = perf_counter()
        number = 0
        while number < ROUNDS_MIN or perf_counter() - began_at < seconds:
            number += 1
            self._say(f"round {number}, {perf_counter() - began_at:.0f} of {seconds:.0f} s")
            self._round(sides)
            self._reads_gb_s.append(reading.gb_s())

    def _round(self, sides: Mapping[str, _Side]) -> None:
        for count in self._streams:
            prompts = self._prompts(count)
            for name, side in sides.items():
                self._figures[count].bursts[name].append(side.burst(prompts, DECODE_STEPS))

    def _prompts(self, count: int) -> list[Prompt]:
        """New ones each time, of which no two begin alike: nobody may profit from what was computed before."""
        self._prompt_sets += 1
        draw = torch.Generator().manual_seed(self._prompt_sets)
        rows = torch.randint(self._vocabulary, (count, PROMPT_TOKENS), generator=draw)
        return [tuple(row) for row in rows.tolist()]
