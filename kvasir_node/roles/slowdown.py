"""Emulated devices: one process that computes as slowly as the settings say, with the same answers.

It does not know requests, routes or the network. One machine can so stand for many slower ones: a trunk or expert
computation that took c seconds is followed by sleep until `slowdown` × c have passed since it began. What is not
stretched: frames, the loop, the splitting and adding of rows. So a swarm of emulated devices is one of slow devices
with a quick network, and only ratios of such devices mean anything.

c is CPU time of the computing thread and not time on the clock. Many emulated devices share few cores: while one waits
for a core that another one uses, its clock runs and it computes nothing, and stretching that wait would count the
crowd `slowdown` times. Up to 1 / slowdown of the devices can compute at once on one core before it shows. With more
than one of `node.threads` only the calling thread's part is measured, which lasts about as long as all of them.

Nor do devices share a memory bus, as processes of one machine do: two that compute a layer's experts at the same
moment, as a coordinator and its workers would, each take longer for it. So they take turns (`Turns`), and the wait for
one's turn is part of the sleep.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvasir_node.model.experts import ExpertShard
from kvasir_node.model.trunk import ExpertDispatch, RowTally
from kvasir_node.roles.link import Compute
from kvasir_node.roles.own_experts import OwnExperts
from kvasir_node.wire.tensors import ExpertRequest

GRAIN_S = 0.0002  # shorter sleeps are put off: the kernel ends each one some 50 µs late
LATE_MAX_S = 0.005  # of what was slept too long, or waited for a core, and is taken off later sleeps


@dataclass(frozen=True, slots=True)
class Mark:
    """When a computation began, on the clock and in CPU time of its thread."""

    at: float
    used_s: float


class Turns:
    """One at a time among all emulated devices of this user and machine; a process that dies gives its turn back."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path or Path(tempfile.gettempdir()) / f"kvasir-emulated-{os.getuid()}.lock"

    @contextmanager
    def turn(self) -> Iterator[None]:
        # Opened anew each time: so it holds between the threads of a process as well, and closing it gives it back.
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


class Pace:
    """The one core of an emulated device. Any thread may compute; together they are as slow as one core.

    The core's time is booked: a computation begins when it is asked for or when all before it are over, whichever is
    later, and lasts `slowdown` times its CPU time. So what is too short to be slept adds up, what was waited for is no
    part of it, and the total is right.
    """

    def __init__(
        self,
        slowdown: float,
        turns: Turns | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        used: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._slowdown = slowdown
        self._turns = turns
        self._clock = clock
        self._used = used
        self._sleep = sleep
        self._lock = threading.Lock()  # of both
        self._free_at = 0.0  # when all that was computed so far is over
        self._late_s = 0.0  # how much later than booked computations ended, and not made up for yet

    def begin(self) -> Mark:
        return Mark(self._clock(), self._used())

    def turn(self) -> AbstractContextManager[None]:
        """For experts: held while they are computed, between `begin` and `end`."""
        return nullcontext() if self._turns is None else self._turns.turn()

    def end(self, mark: Mark) -> None:
        """Sleeps until the computation that began at `mark`, in this thread, is over on the emulated device."""
        used_s = self._used() - mark.used_s
        with self._lock:
            began_at = max(self._free_at, mark.at - self._late_s)
            self._late_s -= max(0.0, mark.at - began_at)
            self._free_at = until = began_at + self._slowdown * used_s
        left_s = until - self._clock()
        if left_s >= GRAIN_S:
            self._sleep(left_s)
        with self._lock:
            self._late_s = min(LATE_MAX_S, self._late_s + max(0.0, self._clock() - until))


class StretchedDispatch:
    """An `ExpertDispatch` that hands on to another one, and stretches what the trunk computes between its calls.

    The waiting for experts is no part of that. After a forward that raised, `begin` starts anew.
    """

    def __init__(self, inner: ExpertDispatch, pace: Pace) -> None:
        self._inner = inner
        self._pace = pace
        self._mark = pace.begin()

    def begin(self, rows: int) -> None:
        self._inner.begin(rows)
        self._mark = self._pace.begin()

    def __call__(self, layer: int, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        self._pace.end(self._mark)
        sums = self._inner(layer, rows, chosen, weights)
        self._mark = self._pace.begin()
        return sums

    def tally(self) -> RowTally:
        self._pace.end(self._mark)
        return self._inner.tally()

    def fork(self) -> StretchedDispatch:
        return StretchedDispatch(self._inner.fork(), self._pace)


class StretchedExperts(OwnExperts):
    """`OwnExperts` at the pace of an emulated device, for whatever they are computed."""

    def __init__(self, pace: Pace, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._pace = pace

    def compute(
        self,
        layer: int,
        rows: torch.Tensor,
        pair_row: torch.Tensor,
        pair_expert: torch.Tensor,
        pair_weight: torch.Tensor,
    ) -> torch.Tensor:
        mark = self._pace.begin()
        with self._pace.turn():
            sums = super().compute(layer, rows, pair_row, pair_expert, pair_weight)
        self._pace.end(mark)
        return sums


def stretched(compute: Compute, pace: Pace) -> Compute:
    """A worker's computation at the pace of an emulated device."""

    def compute_slowly(shard: ExpertShard, request: ExpertRequest) -> torch.Tensor:
        mark = pace.begin()
        with pace.turn():
            sums = compute(shard, request)
        pace.end(mark)
        return sums

    return compute_slowly
