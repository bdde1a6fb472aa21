"""How far int8 experts are from those of the checkpoint: measured on the experts themselves when a model is loaded.

It does not know what an answer loses by it: rows are random here, and routers, softmax and further layers come after.
"""

from __future__ import annotations

import torch

from kvasir_node.base.ids import ExpertId
from kvasir_node.model.checkpoint import Checkpoint
from kvasir_node.model.experts import ExpertShard, load_from_checkpoint

LAYERS_MAX = 3  # tried: the first, the middle and the last one with experts on this disk
EXPERTS_MAX = 4  # of each of them; reading and decoding them twice is what takes the time
ROWS = 16


def int8_error(checkpoint: Checkpoint) -> float | None:
    """The relative error of a layer's sums with int8 experts, the largest of the layers tried; None without experts.

    Of a layer: RMS of the difference / RMS of the exact sums, over seeded normal rows which all go through the same few
    experts with equal weights. Raises DataError for an expert that cannot be read.
    """
    found = {layer: [e for e in checkpoint.experts if e.layer == layer] for layer in checkpoint.layers}
    layers = [layer for layer, experts in found.items() if experts]
    tried = sorted({layers[place] for place in (0, len(layers) // 2, -1)}) if layers else []
    errors = [_error_of(checkpoint, sorted(found[layer])[:EXPERTS_MAX]) for layer in tried[:LAYERS_MAX]]
    return max(errors, default=None)


def _error_of(checkpoint: Checkpoint, experts: list[ExpertId]) -> float:
    exact = _sums(load_from_checkpoint(checkpoint, experts, torch.float32), experts)
    rounded = _sums(load_from_checkpoint(checkpoint, experts, torch.float32, stored=torch.int8), experts)
    return float((rounded - exact).norm() / exact.norm().clamp_min(torch.finfo(torch.float32).tiny))


def _sums(shard: ExpertShard, experts: list[ExpertId]) -> torch.Tensor:
    rows = torch.randn(ROWS, shard.hidden_size, generator=torch.Generator().manual_seed(experts[0].layer))
    pair_row = torch.arange(ROWS).repeat_interleave(len(experts))
    pair_expert = torch.tensor([expert.index for expert in experts]).repeat(ROWS)
    return shard.compute(experts[0].layer, rows, pair_row, pair_expert, torch.ones(len(pair_row)))
