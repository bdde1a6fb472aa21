"""Which dtype a model is computed in when nobody said so.

It does not know settings, trunks or files beyond what a checkpoint says of itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import perf_counter

import torch

from kvasir_node.base.ids import ExpertId
from kvasir_node.model.checkpoint import Checkpoint
from kvasir_node.model.experts import ExpertShard, stored_dtype
from kvasir_node.model.kernels.abi import STEP
from kvasir_node.model.maths import ExpertMaths

logger = logging.getLogger(__name__)

EXACT_TRUNK_BYTES = 1 << 28  # up to here float32 costs little, and answers are exact
SIDE_MAX = 2048  # of the experts that are timed
EXPERTS_TIMED = 4  # together larger than the caches of one core
ROUNDS = 5

Measure = Callable[[ExpertMaths, int, int, torch.dtype, torch.device], float]
"""(maths, D, I, dtype, device) -> seconds of one row through one expert."""


def choose_dtype(checkpoint: Checkpoint, device: torch.device, measure: Measure | None = None) -> torch.dtype:
    """float32 for a small trunk and for a checkpoint of float32, whose answers bfloat16 would change; else whichever of
    both is quicker on this machine at one row, which is what decoding does. Takes up to some tenths of a second."""
    parts = {tensor.spec for expert in checkpoint.experts.values() for tensor in expert.values()}
    trunk_bytes = sum(tensor.nbytes for tensor in checkpoint.trunk.values())
    if trunk_bytes < EXACT_TRUNK_BYTES or all(part[0] == "F32" for part in parts):
        return torch.float32
    hidden_size = min(checkpoint.hidden_size, SIDE_MAX) // STEP * STEP or STEP
    inner = min(checkpoint.expert_hidden_size, SIDE_MAX) // STEP * STEP or STEP
    timed, dtypes = measure or time_of_row, (torch.float32, torch.bfloat16)
    taken_s = {dtype: timed(checkpoint.maths, hidden_size, inner, dtype, device) for dtype in dtypes}
    quicker = min(taken_s, key=lambda dtype: taken_s[dtype])
    logger.info(
        "computing in %s: an expert takes %.0f µs in float32 and %.0f µs in bfloat16 here",
        str(quicker).removeprefix("torch."),
        1e6 * taken_s[torch.float32],
        1e6 * taken_s[torch.bfloat16],
    )
    return quicker


def time_of_row(
    maths: ExpertMaths, hidden_size: int, expert_hidden_size: int, dtype: torch.dtype, device: torch.device
) -> float:
    """Seconds for one row through one expert of random weights, the best of some rounds."""
    plain = ExpertMaths(activation=maths.activation, gate=maths.gate, limit=maths.limit, alpha=maths.alpha)
    shapes = {"up": (expert_hidden_size, hidden_size), "down": (hidden_size, expert_hidden_size)}
    if plain.has_gate:
        shapes["gate"] = shapes["up"]
    tensors = {part: torch.full(shape, 0.01, dtype=dtype) for part, shape in shapes.items()}
    specs = {("F32" if dtype is torch.float32 else "BF16", shape, 0) for shape in shapes.values()}
    stored = stored_dtype(plain, hidden_size, expert_hidden_size, specs, dtype, device)
    shard = ExpertShard(plain, hidden_size, expert_hidden_size, dtype, device, stored=stored)
    for index in range(EXPERTS_TIMED):
        shard.add(ExpertId(0, index), tensors)
    row, weight = torch.ones(1, hidden_size, dtype=dtype, device=device), torch.ones(EXPERTS_TIMED, device=device)
    expert = torch.arange(EXPERTS_TIMED, device=device)
    best_s = float("inf")
    for _ in range(ROUNDS):
        started = perf_counter()
        float(shard.compute(0, row, torch.zeros_like(expert), expert, weight).sum())  # waits for the device
        best_s = min(best_s, (perf_counter() - started) / EXPERTS_TIMED)
    return best_s
