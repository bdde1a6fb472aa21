"""The experts that a worker holds in memory: model by model, each for the leases that need it.

It does not know the market, coordinators, or how blocks came to this disk. Room is reserved before anything is read, so
that slices which load at the same time never take more than `memory_bytes` together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from kvasir_node.base.errors import CapacityError, DataError
from kvasir_node.base.ids import ExpertId, ModelId
from kvasir_node.model.experts import ExpertShard
from kvasir_node.model.manifest import Manifest
from kvasir_node.model.tensor_file import TensorSpec, parse_expert_file
from kvasir_node.model.threads import ONE_THREAD, Threads
from kvasir_node.roles.content import read_blob
from kvasir_node.roles.download import RunBlocking
from kvasir_node.roles.loading import shard_for
from kvasir_node.store.blocks import BlockStore
from kvasir_node.wire.blobs import BlobRef


@dataclass(slots=True)
class _HeldModel:
    manifest: Manifest
    shard: ExpertShard
    needed: dict[str, frozenset[ExpertId]] = field(default_factory=dict[str, frozenset[ExpertId]])  # by lease

    @property
    def experts(self) -> frozenset[ExpertId]:
        return frozenset[ExpertId]().union(*self.needed.values())

    @property
    def reserved_bytes(self) -> int:
        return len(self.experts) * self.shard.expert_bytes


class Holdings:
    """See the module."""

    def __init__(
        self,
        memory_bytes: int,
        device: torch.device,
        store: BlockStore,
        run_blocking: RunBlocking,
        threads: Threads = ONE_THREAD,
    ) -> None:
        self._memory_bytes = memory_bytes
        self._device = device
        self._store = store
        self._run_blocking = run_blocking
        self._threads = threads
        self._models: dict[tuple[ModelId, str], _HeldModel] = {}  # by model and dtype

    @property
    def reserved_bytes(self) -> int:
        """What is held, and what is being loaded."""
        return sum(model.reserved_bytes for model in self._models.values())

    def leases(self) -> frozenset[str]:
        return frozenset(lease for model in self._models.values() for lease in model.needed)

    def bytes_of(self, model: ModelId, dtype: str, experts: int) -> int | None:
        """Memory that so many experts of a model take; None while nothing of it is held."""
        held = self._models.get((model, dtype))
        return None if held is None else experts * held.shard.expert_bytes

    def shard(self, model: ModelId, dtype: str) -> ExpertShard:
        """The weights of a model of which something is held."""
        return self._models[model, dtype].shard

    async def load(
        self, lease: str, model: ModelId, dtype: str, manifest: Manifest, experts: Mapping[ExpertId, BlobRef]
    ) -> None:
        """Reads experts that are in the store, and tries them.

        Raises CapacityError when they do not fit beside the rest, DataError for blobs that are not what the manifest
        promises, UsageError for a dtype that this machine cannot compute them in. Cancel-safety: after a failure or a
        cancel only `drop` is left to do; a cancel takes effect between two experts.
        """
        held = self._reserve(lease, (model, dtype), manifest, frozenset(experts))
        for expert, blob in experts.items():
            if not held.shard.holds(expert):
                await self._run_blocking(self._read_in, held.shard, expert, blob, manifest.expert_parts(expert.layer))
        await self._run_blocking(_self_test, held.shard, tuple(experts))

    def _read_in(self, shard: ExpertShard, expert: ExpertId, blob: BlobRef, parts: Mapping[str, TensorSpec]) -> None:
        shard.add(expert, parse_expert_file(read_blob(self._store, blob), parts))

    def _reserve(
        self, lease: str, key: tuple[ModelId, str], manifest: Manifest, experts: frozenset[ExpertId]
    ) -> _HeldModel:
        held = self._models.get(key)
        if held is None:
            held = _HeldModel(manifest, shard_for(manifest, key[1], self._device, self._threads))
        others = sum(other.reserved_bytes for other in self._models.values() if other is not held)
        needed = len(held.experts | experts) * held.shard.expert_bytes
        if others + needed > self._memory_bytes:
            raise CapacityError(
                f"{len(experts)} experts of {manifest.name} take {len(experts) * held.shard.expert_bytes} bytes in "
                f"memory; {self.reserved_bytes} of the {self._memory_bytes} of worker.memory_bytes are taken"
            )
        self._models[key] = held
        held.needed[lease] = experts
        return held

    def drop(self, lease: str, model: ModelId, dtype: str) -> None:
        """Forgets what only this lease needed; a lease that holds nothing is ignored."""
        held = self._models.get((model, dtype))
        if held is None:
            return
        given_up = held.needed.pop(lease, frozenset()) - held.experts
        for expert in given_up:
            held.shard.remove(expert)
        if not held.needed:
            del self._models[model, dtype]


def _self_test(shard: ExpertShard, experts: tuple[ExpertId, ...]) -> None:
    """One row of ones through each expert: what is not finite here would only fail its trial."""
    count = len(experts)
    rows = torch.ones(1, shard.hidden_size, device=shard.device)
    index = torch.tensor([expert.index for expert in experts], device=shard.device)
    weights = torch.ones(count, device=shard.device)
    sums = shard.compute(experts[0].layer, rows, torch.zeros_like(index), index, weights)
    if not bool(torch.isfinite(sums).all()):
        raise DataError(f"the experts of layer {experts[0].layer} give values that are not finite on this machine")
