"""What a coordinator computes itself: the experts it holds, and any other for a while, from its checkpoint on disk.

It does not know workers, routes or requests for text. Any thread may compute. Experts that are held stay for ever;
those that are borrowed from the checkpoint make room for each other, the longest unused first, so that a model larger
than this machine's memory never fills it.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import torch

from kvasir_node.base.errors import CapacityError
from kvasir_node.base.ids import ExpertId
from kvasir_node.model.checkpoint import Checkpoint
from kvasir_node.model.experts import ExpertShard
from kvasir_node.model.tensor_file import read_tensor
from kvasir_node.roles.loading import ReadExpert
from kvasir_node.wire.tensors import ExpertRequest

logger = logging.getLogger(__name__)


class OwnExperts:
    """`held` says, by layer, what `shard` holds for good; at most `borrowed_bytes_max` (or one expert) come on top.

    `read_missing` reads those that the checkpoint lacks, when it is one that was fetched in part.

    Shapes as in `model.experts`: rows [R,D], pair_row, pair_expert, pair_weight [P] -> [R,D] float32.
    """

    def __init__(
        self,
        shard: ExpertShard,
        checkpoint: Checkpoint,
        held: Mapping[int, frozenset[int]],
        borrowed_bytes_max: int,
        read_missing: ReadExpert | None = None,
    ) -> None:
        self._read_missing = read_missing
        self._shard = shard
        self._checkpoint = checkpoint
        self._held = held
        # Nothing can be missing there, so the hot path does not even ask.
        self._complete = frozenset(layer for layer, own in held.items() if len(own) == checkpoint.experts_per_layer)
        self._room = max(1, borrowed_bytes_max // shard.expert_bytes)
        self._borrowed: OrderedDict[ExpertId, None] = OrderedDict()  # longest unused first
        self._borrowing = threading.Lock()  # of whoever needs borrowed experts, until it has computed with them
        self.loads = 0

    @property
    def device(self) -> torch.device:
        return self._shard.device

    @property
    def hidden_size(self) -> int:
        return self._shard.hidden_size

    def compute(
        self,
        layer: int,
        rows: torch.Tensor,
        pair_row: torch.Tensor,
        pair_expert: torch.Tensor,
        pair_weight: torch.Tensor,
    ) -> torch.Tensor:
        """`ExpertShard.compute` for any expert of the model, all tensors on `device`. Raises DataError when a missing
        one cannot be read, CapacityError when one that lies elsewhere cannot be had."""
        if layer in self._complete:
            return self._shard.compute(layer, rows, pair_row, pair_expert, pair_weight)
        needed = set(pair_expert.unique().tolist())
        missing = sorted(needed - self._held[layer])
        if not missing:
            return self._shard.compute(layer, rows, pair_row, pair_expert, pair_weight)
        with self._borrowing:
            total = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
            for group in self._groups(missing, sorted(needed & self._held[layer])):
                self._borrow([ExpertId(layer, index) for index in group if index not in self._held[layer]])
                mine = torch.isin(pair_expert, torch.tensor(group, device=rows.device))
                total += self._shard.compute(layer, rows, pair_row[mine], pair_expert[mine], pair_weight[mine])
            return total

    def sums(self, request: ExpertRequest) -> torch.Tensor:
        """What a worker should have answered to a request; [R,D] float32 on the CPU, as requests are."""
        there = self.device
        return self.compute(
            request.layer,
            request.rows.to(there),
            request.pair_row.to(there, torch.int64),
            request.pair_expert.to(there, torch.int64),
            request.pair_weight.to(there),
        ).cpu()

    def _groups(self, missing: Sequence[int], own: Sequence[int]) -> list[list[int]]:
        """Experts to compute with at once: as many missing ones as there is room for, those held with the first."""
        groups = [list(missing[first : first + self._room]) for first in range(0, len(missing), self._room)]
        groups[0] += own
        return groups

    def _borrow(self, experts: Sequence[ExpertId]) -> None:
        """Takes experts in from the checkpoint; afterwards they are there, and no more than there is room for."""
        for expert in experts:
            if expert in self._borrowed:
                self._borrowed.move_to_end(expert)
        for expert in experts:
            if expert in self._borrowed:
                continue
            while len(self._borrowed) >= self._room:
                eldest, _ = self._borrowed.popitem(last=False)
                self._shard.remove(eldest)
            self._shard.add(expert, self._read(expert))
            self._borrowed[expert] = None
            if self.loads == 0:
                logger.info(
                    "no worker computes expert %d of layer %d: it is read from disk", expert.index, expert.layer
                )
            self.loads += 1

    def _read(self, expert: ExpertId) -> Mapping[str, torch.Tensor]:
        parts = self._checkpoint.experts.get(expert)
        if parts is not None:
            return {part: read_tensor(tensor) for part, tensor in parts.items()}
        if self._read_missing is None:
            raise CapacityError(
                f"expert {expert.index} of layer {expert.layer} is not on this machine and no worker computes it; "
                "start a worker, or hold more with coordinator.hold"
            )
        return self._read_missing(expert)
