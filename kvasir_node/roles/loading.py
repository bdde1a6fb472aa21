"""A model from this machine's disk into memory: what a coordinator holds, in which dtype, on which device.

It does not know the network, requests or leases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from kvasir_node.base.errors import UsageError
from kvasir_node.base.ids import ExpertId
from kvasir_node.base.settings import Settings
from kvasir_node.model.checkpoint import Checkpoint, open_checkpoint
from kvasir_node.model.experts import ExpertShard, load_from_checkpoint
from kvasir_node.model.manifest import Manifest
from kvasir_node.model.text import TextModel

ReadExpert = Callable[[ExpertId], Mapping[str, torch.Tensor]]
"""The tensors of an expert; raises CapacityError when it cannot be had now."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What loading gives: everything on this machine, nothing on the network yet."""

    manifest: Manifest
    checkpoint: Checkpoint
    text: TextModel
    shard: ExpertShard
    held: dict[int, frozenset[int]]
    read_missing: ReadExpert | None = None  # reads an expert that the checkpoint lacks; any thread, may take seconds

    @property
    def lacks_experts(self) -> bool:
        """Whether some are not even on this machine's disk."""
        return len(self.checkpoint.experts) < len(self.manifest.layers) * self.manifest.experts_per_layer


def compute_dtype(wanted: str, trunk_bytes: int) -> torch.dtype:
    """`auto` is float32 for a trunk under 256 MiB, where it costs little and answers are exact, else bfloat16."""
    if wanted == "auto":
        return torch.float32 if trunk_bytes < 1 << 28 else torch.bfloat16
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[wanted]


def is_out_of_memory(error: Exception) -> bool:
    """torch has no class of its own for it on the CPU: a RuntimeError says "can't allocate memory" there."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)


def pick_device(wanted: str) -> torch.device:
    """`auto` = cuda when there is one; raises UsageError for a device that is not there."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"node.device {wanted!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device


def load_model(path: Path, manifest: Manifest, settings: Settings) -> LoadedModel:
    """Reads the tokenizer and the experts that this coordinator holds. Blocks; run it in a thread."""
    checkpoint = open_checkpoint(path)
    dtype = compute_dtype(settings.coordinator.dtype, manifest.trunk.size)
    experts = held_experts(manifest, settings.coordinator.hold)
    shard = load_from_checkpoint(checkpoint, experts, dtype, pick_device(settings.node.device))
    held = {layer: shard.held(layer) for layer in checkpoint.layers}
    return LoadedModel(manifest, checkpoint, TextModel(path), shard, held)


def held_experts(manifest: Manifest, hold: str) -> list[ExpertId]:
    """The experts that a coordinator with this `coordinator.hold` has for good, in order."""
    experts = (ExpertId(layer, index) for layer in manifest.layers for index in range(manifest.experts_per_layer))
    return [expert for expert in experts if _is_held(expert, hold)]


def _is_held(expert: ExpertId, hold: str) -> bool:
    return hold == "all" or (hold == "half" and expert.index % 2 == 0)
