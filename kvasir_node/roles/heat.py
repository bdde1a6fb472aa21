"""How much each expert of each layer was used lately.

It does not know what is concluded from it. Any forward of any thread may be counted.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

HEAT_EVERY = 4  # forwards of which one is counted: that is enough to share experts out, and costs a quarter
HEAT_DECAY = 0.96  # of an expert's heat at each forward that is counted


class Heat:
    def __init__(self, layers: Sequence[int], experts_per_layer: int) -> None:
        self._layers = tuple(layers)
        self._heat = torch.zeros(len(self._layers), experts_per_layer)  # replaced as a whole under the lock
        self._lock = threading.Lock()

    def by_layer(self) -> dict[int, list[float]]:
        return dict(zip(self._layers, self._heat.tolist(), strict=True))

    def count(self, layers: Sequence[int], chosen: Sequence[torch.Tensor]) -> None:
        """The experts [T, K] that one forward chose in each of some layers: all in one go, because each by itself
        would cost more."""
        together = torch.stack(list(chosen)).flatten(1).cpu()  # [L, T × K]
        used = torch.zeros(together.shape[0], self._heat.shape[1])
        used.scatter_add_(1, together, torch.ones((), dtype=used.dtype).expand(together.shape))
        if tuple(layers) != self._layers:
            each = torch.zeros_like(self._heat)
            each[[self._layers.index(layer) for layer in layers]] = used
            used = each
        with self._lock:
            self._heat = self._heat * HEAT_DECAY + used
