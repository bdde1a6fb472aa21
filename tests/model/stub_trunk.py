"""A trunk without a model, whose forwards take no time and are remembered: for tests of the engine itself."""

from __future__ import annotations

from typing import Any

import torch

from kvasir_node.model.cache import Lane, SlotCache
from kvasir_node.model.trunk import RowTally


class StubTrunk:
    """Row i of each forward answers token i + 1. `widths`: the tokens per row of each forward so far."""

    device, context_max, splits_prompts = torch.device("cpu"), 8192, True

    def __init__(self, vocab_size: int = 4096) -> None:
        self.vocab_size = vocab_size
        self.widths: list[int] = []
        self._logits = torch.randn(64, vocab_size, generator=torch.Generator().manual_seed(0))
        self._logits[torch.arange(64), torch.arange(64) + 1] = 100.0

    def new_cache(self, slots: int, context: int) -> SlotCache:
        return SlotCache(slots, context, self.device)

    def packs(self, cache: SlotCache) -> bool:
        return False

    def fork(self) -> StubTrunk:
        return self

    def forward(self, tokens: torch.Tensor, lane: Lane) -> tuple[torch.Tensor, RowTally]:
        self.widths.append(tokens.shape[1])
        count = tokens.numel()
        none = [0] * count
        return self._logits[: tokens.shape[0]], RowTally([8] * count, none, none, none)


def stub_trunk(vocab_size: int = 4096) -> Any:
    return StubTrunk(vocab_size)
