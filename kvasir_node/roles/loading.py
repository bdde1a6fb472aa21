"""A model from this machine's disk into memory: what a coordinator holds, in which dtype, on which device.

It does not know the network, requests or leases.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from kvasir_node.base.errors import CapacityError, UsageError
from kvasir_node.base.ids import ExpertId
from kvasir_node.base.settings import Settings
from kvasir_node.decide.residency import places, spread_over_layers
from kvasir_node.model.checkpoint import Checkpoint, open_checkpoint
from kvasir_node.model.dtype_choice import choose_dtype
from kvasir_node.model.experts import ExpertShard, load_from_checkpoint, stored_dtype
from kvasir_node.model.int8_error import int8_error
from kvasir_node.model.kernels.library import is_able
from kvasir_node.model.manifest import Manifest
from kvasir_node.model.maths import ExpertMaths
from kvasir_node.model.text import TextModel
from kvasir_node.model.threads import ONE_THREAD, Threads

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
INT8 = "int8"
SWITCH_INTERVAL_S = 0.0005  # Python's own is ten times that: as long as a whole forward of a small model
PROGRESS_INTERVAL_S = 2.0  # between two lines of one progress
FREE_MEMORY_RATIO = 0.6  # of what the trunk leaves free, for experts: caches, answers and other programs need some too


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What loading gives: everything on this machine, nothing on the network yet.

    `held` says, by layer, what is in the shard; `wanted` are those that should be, as far as there is room;
    `borrowed_bytes_max` may come on top for a while.
    """

    manifest: Manifest
    checkpoint: Checkpoint
    text: TextModel
    shard: ExpertShard
    held: dict[int, frozenset[int]]
    wanted: frozenset[ExpertId]
    borrowed_bytes_max: int
    threads: Threads
    expert_error: float | None = None  # of int8 experts, as `int8_error` measures it

    @property
    def lacks_experts(self) -> bool:
        """Whether some are not even on this machine's disk."""
        return len(self.checkpoint.experts) < len(self.manifest.layers) * self.manifest.experts_per_layer


def compute_dtype(wanted: str, checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    """As `coordinator.dtype` says; `auto` as `choose_dtype` does."""
    return choose_dtype(checkpoint, device) if wanted == "auto" else DTYPES[wanted]


def expert_dtype(shard: ExpertShard) -> str:
    """As messages spell it: whoever computes the same experts for the same coordinator must load them so."""
    if shard.stored is torch.int8:
        return INT8
    return next(name for name, each in DTYPES.items() if each == shard.dtype)


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
    """Reads the tokenizer and the experts that this coordinator holds at first. Blocks; run it in a thread.

    Raises UsageError when `coordinator.memory_bytes` is too small for a single expert, or for int8 experts that cannot
    be computed here.
    """
    checkpoint = open_checkpoint(path)
    device = pick_device(settings.node.device)
    dtype = compute_dtype(settings.coordinator.dtype, checkpoint, device)
    wanted = held_experts(manifest, settings.coordinator.hold)
    stored = torch.int8 if settings.coordinator.experts == INT8 else None
    empty = new_shard(manifest, dtype, device, stored=stored)
    expert_bytes = empty.expert_bytes
    memory_bytes = expert_memory(settings.coordinator.memory_bytes, manifest, dtype, device, expert_bytes)
    count = places(memory_bytes // expert_bytes, len(wanted), borrows=not _lies_ready(checkpoint, manifest, empty))
    if count < len(wanted):
        logger.info(
            "%d of the %d experts to hold fit into coordinator.memory_bytes, %d MB; the hottest stay, the others are "
            "computed from the disk",
            count,
            len(wanted),
            memory_bytes >> 20,
        )
    threads = Threads(thread_count(settings.node.threads))
    told = _told(spread_over_layers(wanted, count), f"loading {manifest.name}: experts")
    shard = load_from_checkpoint(checkpoint, told, dtype, device, threads, stored=empty.stored)
    held = {layer: shard.held(layer) for layer in checkpoint.layers}
    borrowed_bytes_max = memory_bytes - count * expert_bytes
    return LoadedModel(
        manifest,
        checkpoint,
        TextModel(path),
        shard,
        held,
        frozenset(wanted),
        borrowed_bytes_max,
        threads,
        _measured_error(checkpoint) if stored is torch.int8 else None,
    )


class LoggedProgress:
    """One line in the log every few seconds of what takes longer; runs in any thread."""

    def __init__(self, words: str) -> None:
        self._words = words
        self._said_at = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._said_at >= PROGRESS_INTERVAL_S:
            self._said_at = now
            logger.info("%s: %d %%", self._words, 100 * done // max(1, total))


def _told(experts: Collection[ExpertId], words: str) -> Iterator[ExpertId]:
    progress = LoggedProgress(words)
    for number, expert in enumerate(experts):
        progress(number, len(experts))
        yield expert


def _measured_error(checkpoint: Checkpoint) -> float | None:
    error = int8_error(checkpoint)
    if error is None:
        logger.warning("experts are int8; how far they are from the model's is unknown, as none of them is here yet")
    else:
        logger.info("experts are int8: a layer's sums are %.2f %% off those of the checkpoint's weights", 100 * error)
    return error


def _lies_ready(checkpoint: Checkpoint, manifest: Manifest, shard: ExpertShard) -> bool:
    """Whether no expert ever needs to be borrowed: all are on this disk, just as they are computed."""
    is_complete = len(checkpoint.experts) == len(manifest.layers) * manifest.experts_per_layer
    return is_complete and all(shard.can_view(manifest.expert_parts(layer)) for layer in manifest.layers)


def shard_for(manifest: Manifest, name: str, device: torch.device, threads: Threads = ONE_THREAD) -> ExpertShard:
    """For experts of this model in a dtype as messages spell it; empty. Raises UsageError as `ExpertShard` does."""
    if name == INT8:
        return new_shard(manifest, torch.float32, device, threads, stored=torch.int8)
    return new_shard(manifest, DTYPES[name], device, threads)


def new_shard(
    manifest: Manifest,
    dtype: torch.dtype,
    device: torch.device,
    threads: Threads = ONE_THREAD,
    *,
    stored: torch.dtype | None = None,
) -> ExpertShard:
    """For experts of this model; empty. `stored` is what `stored_dtype` says unless told otherwise."""
    sizes = ExpertMaths.from_dict(manifest.maths), manifest.hidden_size, manifest.expert_hidden_size
    parts = {part for layer in manifest.layers for part in manifest.expert_parts(layer).values()}
    stored = stored or stored_dtype(*sizes, parts, dtype, device)
    return ExpertShard(*sizes, dtype, device, stored=stored, threads=threads)


def use_threads(setting: int) -> None:
    """What torch itself computes shares the threads of `node.threads`; and the loop gets its turn beside them."""
    torch.set_num_threads(thread_count(setting))
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def prepare_kernels() -> None:
    """Blocks for about a second, so that nothing does later, on the loop."""
    is_able()


def thread_count(setting: int) -> int:
    """`node.threads`; 0 is half the logical processors: those that share a core only wait for each other's memory."""
    return setting or max(1, (os.cpu_count() or 2) // 2)


def expert_memory(
    setting_bytes: int, manifest: Manifest, dtype: torch.dtype, device: torch.device, expert_bytes: int
) -> int:
    """Bytes for experts in memory; a setting of 0 means FREE_MEMORY_RATIO of what is free now, but for the trunk."""
    if not setting_bytes:
        trunk_bytes = manifest.trunk.size * max(1, dtype.itemsize // 2)  # checkpoints are bfloat16 or less
        return max(expert_bytes, int((free_bytes(device) - trunk_bytes) * FREE_MEMORY_RATIO))
    if setting_bytes < expert_bytes:
        raise UsageError(
            f"coordinator.memory_bytes {setting_bytes} is less than the {expert_bytes} that one expert of "
            f"{manifest.name} takes; give it more, or 0 for a share of the free memory",
            param="memory",
        )
    return setting_bytes


def check_slots(slots: int, context: int, slot_bytes: int, free_bytes: int) -> None:
    """Raises CapacityError when so many slots are more than the memory that is free: it is taken at once."""
    if slots * slot_bytes > free_bytes:
        raise CapacityError(
            f"coordinator.slots {slots} of {context} tokens each need {slots * slot_bytes >> 20} MB of memory, "
            f"{free_bytes >> 20} MB are free; lower --slots or coordinator.context"
        )


def free_bytes(device: torch.device) -> int:
    """Memory that could be taken now without taking it from others."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def held_experts(manifest: Manifest, hold: str) -> list[ExpertId]:
    """The experts that a coordinator with this `coordinator.hold` has for good, in order."""
    experts = (ExpertId(layer, index) for layer in manifest.layers for index in range(manifest.experts_per_layer))
    return [expert for expert in experts if _is_held(expert, hold)]


def _is_held(expert: ExpertId, hold: str) -> bool:
    return hold == "all" or (hold == "half" and expert.index % 2 == 0)
