"""Shipped faults: what a worker or a block server does wrong on purpose, for tests and demonstrations.

A node never has faults unless `open_node` is given some. It does not know how faults are found out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvasir_node.base.ids import Cid
from kvasir_node.model.experts import ExpertShard
from kvasir_node.roles.link import Compute, compute_here
from kvasir_node.store.blocks import BlockStore
from kvasir_node.wire.tensors import ExpertRequest


@dataclass(frozen=True, slots=True)
class Faults:
    """What is replaced in a node: the worker's computation, and the store that its block server reads."""

    compute: Compute = compute_here
    served: Callable[[BlockStore], BlockStore] = lambda store: store


NO_FAULTS = Faults()


class NoisyCompute:
    """Right up to noise of `scale` times the largest value of each answer; `honest_calls` come first."""

    def __init__(self, scale: float, seed: int = 0, honest_calls: int = 0) -> None:
        self._scale = scale
        self._honest_calls = honest_calls
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, shard: ExpertShard, request: ExpertRequest) -> torch.Tensor:
        sums = compute_here(shard, request)
        if self._honest_calls > 0:
            self._honest_calls -= 1
            return sums
        noise = torch.randn(sums.shape, generator=self._generator).to(sums.dtype)
        return sums + noise * self._scale * sums.abs().max()


def nan_compute(shard: ExpertShard, request: ExpertRequest) -> torch.Tensor:
    """One NaN among right values, as a device in half precision gives after an overflow."""
    sums = compute_here(shard, request).clone()
    sums[0, 0] = float("nan")
    return sums


class SilentCompute:
    """Never answers until `release` is called (so that its thread can end)."""

    def __init__(self, honest_calls: int = 0) -> None:
        self._released = threading.Event()
        self._honest_calls = honest_calls

    def release(self) -> None:
        self._released.set()

    def __call__(self, shard: ExpertShard, request: ExpertRequest) -> torch.Tensor:
        if self._honest_calls > 0:
            self._honest_calls -= 1
        else:
            self._released.wait()
        return compute_here(shard, request)


class CorruptingStore(BlockStore):
    """Serves each block with one byte flipped the first `times` times, then as it is."""

    def __init__(self, store: BlockStore, times: int = 1) -> None:
        self._store = store
        self._times = times
        self._served: dict[Cid, int] = {}
        self.corrupted = 0

    def has(self, cid: Cid) -> bool:
        return self._store.has(cid)

    def size(self, cid: Cid) -> int | None:
        return self._store.size(cid)

    def get(self, cid: Cid) -> bytes | None:
        data = self._store.get(cid)
        count = self._served.get(cid, 0)
        self._served[cid] = count + 1
        if not data or count >= self._times:
            return data
        self.corrupted += 1
        middle = len(data) // 2
        return data[:middle] + bytes((data[middle] ^ 1,)) + data[middle + 1 :]
