"""Our side of `bench model`: the real engine, all experts in this process, fed with bursts of requests.

It does not know what it is compared with, nor how often. Where time goes is told by a second engine whose dispatch
watches the first one's experts: the engine that is timed is the one that a node runs, without anything in between.

Units: seconds of a monotonic clock. B = requests at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from kvasir_node.base.generation import SamplingOptions
from kvasir_node.model.checkpoint import Checkpoint
from kvasir_node.model.engine import Engine, Job
from kvasir_node.model.experts import load_from_checkpoint
from kvasir_node.model.threads import Threads
from kvasir_node.model.trunk import ExpertDispatch, LocalDispatch, RowTally, Trunk, load_trunk

Prompt = tuple[int, ...]
_GREEDY = SamplingOptions(temperature=0.0)
_HEAD_KEYS = ("lm_head.weight", "output.weight")  # of safetensors, of GGUF


@dataclass(frozen=True, slots=True)
class Burst:
    """Tokens per second of one burst: of its prompts up to each one's first token, then of all answers together."""

    prefill_tokens_s: float
    decode_tokens_s: float


@dataclass(frozen=True, slots=True)
class StepProfile:
    """One decode step, the mean of several. `rest_s` is the engine's own: seats, sampling, tallies.

    `experts_read` are the different experts that the router chose, in a layer on the average; `touched_bytes` the
    weights that must be read for it: these experts and the trunk, of whose input embeddings only B rows count.
    """

    trunk_s: float
    experts_s: float
    rest_s: float
    experts_read: float
    touched_bytes: float


class EngineBench:
    """An engine with as many slots as the largest burst needs. Loading takes the memory of the whole model."""

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, *, slots: int, tokens_max: int, prefill_chunk: int
    ) -> None:
        """`tokens_max`: of a prompt and the steps of a burst together."""
        self._checkpoint = checkpoint
        self._slots = slots
        self._prefill_chunk = prefill_chunk
        # Requests whose prompts come first answer while the prompts of the others are computed.
        self._context = tokens_max + slots * -(-tokens_max // prefill_chunk) + 1
        self._threads = Threads(torch.get_num_threads())
        self._shard = load_from_checkpoint(checkpoint, checkpoint.experts, dtype, threads=self._threads)
        self._local = LocalDispatch(self._shard)
        self._engine, self._trunk = self._open_engine(self._local)

    @property
    def nbytes(self) -> int:
        return self._shard.nbytes + self._trunk.nbytes

    @property
    def vocabulary(self) -> int:
        return self._trunk.vocab_size

    def warm_up(self, prompts: Sequence[Prompt], steps: int) -> None:
        """The first forward of a shape may cost more than the next."""
        self.burst(prompts, steps)

    def burst(self, prompts: Sequence[Prompt], steps: int) -> Burst:
        """All prompts at once, then `steps` tokens of each."""
        began = perf_counter()
        _join(self._engine, prompts, max_tokens=1)
        while not self._engine.is_idle:
            self._engine.step()
        prefill_s = perf_counter() - began
        self._start(self._engine, prompts)
        began = perf_counter()
        tokens = sum(len(self._engine.step()) for _ in range(steps))
        decode_s = perf_counter() - began
        _leave(self._engine, len(prompts))
        return Burst(sum(map(len, prompts)) / prefill_s, tokens / decode_s)

    def profiles(self, bursts: Sequence[Sequence[Prompt]], steps: int) -> list[StepProfile]:
        """Where the time of a decode step goes and what it reads, for each burst. Costs a second trunk's memory."""
        watched = _WatchedDispatch(self._local)
        engine, _ = self._open_engine(watched)
        return [self._profile(engine, watched, prompts, steps) for prompts in bursts]

    def _profile(self, engine: Engine, watched: _WatchedDispatch, prompts: Sequence[Prompt], steps: int) -> StepProfile:
        self._start(engine, prompts)
        engine.step()  # what the first step of a shape prepares, or compiles, is not part of a step
        watched.reset()
        began = perf_counter()
        for _ in range(steps):
            engine.step()
        step_s = (perf_counter() - began) / steps
        _leave(engine, len(prompts))
        forward_s, experts_s = watched.forward_s / steps, watched.experts_s / steps
        read = sum(len(torch.unique(chosen)) for chosen in watched.chosen) / steps
        return StepProfile(
            trunk_s=forward_s - experts_s,
            experts_s=experts_s,
            rest_s=step_s - forward_s,
            experts_read=read / len(self._checkpoint.layers),
            touched_bytes=self._touched_trunk_bytes() + read * self._shard.expert_bytes,
        )

    def _touched_trunk_bytes(self) -> int:
        if not any(key in self._checkpoint.trunk for key in _HEAD_KEYS):
            return self._trunk.nbytes  # the head is the embeddings, so all of them are read
        embedding = self._trunk.vocab_size * self._checkpoint.hidden_size
        return self._trunk.nbytes - embedding * self._trunk.dtype.itemsize

    def _open_engine(self, dispatch: ExpertDispatch) -> tuple[Engine, Trunk]:
        trunk = load_trunk(self._checkpoint.path, self._shard.dtype, "cpu", dispatch, self._threads)
        engine = Engine(
            trunk,
            self._slots,
            self._context,
            self._prefill_chunk,
            reuses_prefixes=False,  # a burst's prompts come twice
        )
        return engine, trunk

    def _start(self, engine: Engine, prompts: Sequence[Prompt]) -> None:
        """Goes on until every request has its first token."""
        _join(engine, prompts, max_tokens=self._context)
        answering: set[int] = set()
        while len(answering) < len(prompts):
            answering.update(token.job_id for token in engine.step())


class _WatchedDispatch:
    """Hands on to another dispatch, and keeps the time and the router's choices since `reset`."""

    def __init__(self, inner: ExpertDispatch) -> None:
        self._inner = inner
        self._began_at = 0.0
        self.reset()

    def reset(self) -> None:
        self.forward_s = self.experts_s = 0.0
        self.chosen: list[torch.Tensor] = []

    def begin(self, rows: int) -> None:
        self._began_at = perf_counter()
        self._inner.begin(rows)

    def __call__(self, layer: int, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        began_at = perf_counter()
        sums = self._inner(layer, rows, chosen, weights)
        self.experts_s += perf_counter() - began_at
        self.chosen.append(chosen.clone())
        return sums

    def tally(self) -> RowTally:
        self.forward_s += perf_counter() - self._began_at
        return self._inner.tally()

    def fork(self) -> _WatchedDispatch:
        return _WatchedDispatch(self._inner.fork())


def _join(engine: Engine, prompts: Sequence[Prompt], max_tokens: int) -> None:
    for number, prompt in enumerate(prompts):
        engine.join(Job(number, prompt, max_tokens, _GREEDY, end_tokens=frozenset()))


def _leave(engine: Engine, jobs: int) -> None:
    for number in range(jobs):
        engine.leave(number)
