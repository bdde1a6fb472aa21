"""The trunk of a model: transformers' own model code with every routed expert cut out.

It does not know where experts are computed, nor requests: at each expert layer it hands rows to an
`ExpertDispatch` and takes back their weighted sums. Expert weights are never loaded here.

Shapes: B rows of one forward, Q new tokens per row, T tokens of all rows, one row after the other (B × Q of them unless
the forward is packed): the rows that experts see, K experts chosen for each, D model width, V vocabulary.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from safetensors import SafetensorError
from torch import nn

from kvasir_node.base.errors import DataError
from kvasir_node.model.architecture import CONFIG_ERRORS, architecture_of, identity_experts, is_experts, layer_of
from kvasir_node.model.cache import Lane, SlotCache
from kvasir_node.model.checkpoint import Checkpoint, open_checkpoint
from kvasir_node.model.experts import ExpertShard
from kvasir_node.model.families import Family, Masks
from kvasir_node.model.fused import FusedModel, fits_cache, fused_model
from kvasir_node.model.lean_transformers import compiler_left_out
from kvasir_node.model.sink_attention import SINK_ATTENTION
from kvasir_node.model.threads import ONE_THREAD, Threads
from kvasir_node.model.trunk_weights import decoded_trunk, needs_decoding

# These rescale all rotations by the longest row of a batch, so that an answer would depend on its neighbours.
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class RowTally:
    """For each of the T rows of one forward, over all its layers: how many (row, expert) pairs went which way.

    `fallback` pairs are those computed here after a remote call failed; they count as local too. `hedged` pairs are
    those computed here while the remote answer was still awaited.
    """

    local: Sequence[int]
    remote: Sequence[int]
    fallback: Sequence[int]
    hedged: Sequence[int]


class ExpertDispatch(Protocol):
    """Computes the routed experts of one forward at a time, wherever they are. Used by one thread at a time."""

    def begin(self, rows: int) -> None:
        """Called before each forward with its T; the tally starts at zero."""
        ...

    def __call__(self, layer: int, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """rows [T, D], chosen [T, K] int64, weights [T, K] -> [T, D] in any float dtype.

        The rows are in the trunk's dtype, or in float32 with values that the trunk's dtype can tell.

        May raise a KvasirError when no way to compute is left; the forward then ends and may be repeated.
        """
        ...

    def tally(self) -> RowTally:
        """What happened since `begin`."""
        ...

    def fork(self) -> ExpertDispatch:
        """One for a forward that is under way at the same time in another thread."""
        ...


class LocalDispatch:
    """All experts from one shard in this process."""

    def __init__(self, shard: ExpertShard) -> None:
        self._shard = shard
        self._rows = 0
        self._pairs_per_row = 0
        self._pair_row = torch.zeros(0, dtype=torch.int64)  # of the last shape of `chosen`: layers share it
        self._shape: tuple[int, ...] = (0, 0)

    def begin(self, rows: int) -> None:
        self._rows, self._pairs_per_row = rows, 0

    def __call__(self, layer: int, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        self._pairs_per_row += chosen.shape[1]
        if self._shape != chosen.shape:
            self._pair_row = torch.arange(rows.shape[0], device=rows.device).repeat_interleave(chosen.shape[1])
            self._shape = tuple(chosen.shape)
        return self._shard.compute(layer, rows, self._pair_row, chosen.reshape(-1), weights.reshape(-1))

    def tally(self) -> RowTally:
        none = [0] * self._rows
        return RowTally(local=[self._pairs_per_row] * self._rows, remote=none, fallback=none, hedged=none)

    def fork(self) -> LocalDispatch:
        return LocalDispatch(self._shard)


class _NoExperts:
    """Adds nothing; for a forward that only shows what each layer keeps in the cache."""

    def __call__(self, layer: int, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(rows)


class _Switch(threading.local):
    """What all stubs of one model hand their rows to, in the forward of this thread."""

    current: ExpertDispatch | _NoExperts


class _ExpertsStub(nn.Module):
    """Stands where a family's fused experts were; without parameters. transformers passes no layer index here."""

    def __init__(self, layer: int, experts: int, identities: int, switch: _Switch) -> None:
        super().__init__()
        self.layer = layer
        self._experts = experts
        self._identities = identities
        self._switch = switch

    def forward(self, hidden_states: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if self._identities == 0:
            return self._switch.current(self.layer, hidden_states, chosen, weights).to(hidden_states.dtype)
        # Ids beyond the experts mean the row itself. Their pairs go along with weight 0, so that every row keeps K.
        is_identity = chosen >= self._experts
        own = (weights * is_identity).sum(-1, keepdim=True) * hidden_states
        sums = self._switch.current(
            self.layer, hidden_states, chosen % self._experts, weights.masked_fill(is_identity, 0)
        )
        return (sums + own).to(hidden_states.dtype)


class Trunk:
    """A loaded trunk. One forward at a time; `fork` gives another one of the same weights for a forward beside it."""

    def __init__(
        self,
        model: nn.Module,
        config: Any,
        traits: Family,
        dispatch: ExpertDispatch,
        switch: _Switch,
        fused: FusedModel | None = None,
    ) -> None:
        self._model = model
        self._config = config
        self._traits = traits
        self._dispatch = dispatch
        self._switch = switch
        self._fused = fused
        self._window: int | None = getattr(config, "sliding_window", None) or None
        self.device = next(model.parameters()).device
        self.dtype: torch.dtype = model.dtype  # type: ignore[assignment]
        self.layer_count: int = config.num_hidden_layers
        self.vocab_size: int = config.vocab_size
        self.context_max: int = config.max_position_embeddings
        self.splits_prompts = traits.splits_prompts

    @property
    def is_fused(self) -> bool:
        """Whether forwards go by kernels instead of transformers' code."""
        return self._fused is not None

    def packs(self, cache: SlotCache) -> bool:
        """Whether one forward may take rows of any length, aimed by `lane.begin_packed`."""
        return self._fused is not None and fits_cache(cache)

    @property
    def nbytes(self) -> int:
        return sum(parameter.nbytes for parameter in self._model.parameters())

    @torch.inference_mode()
    def new_cache(self, slots: int, context: int) -> SlotCache:
        """A cache with all its memory. What each layer keeps is seen from one token sent through the trunk alone."""
        cache = SlotCache(slots, context, self.device)
        self._run(torch.zeros((1, 1), dtype=torch.int64, device=self.device), cache.lane(), _NoExperts())
        cache.clear(0, 0, 1)
        return cache

    def fork(self) -> Trunk:
        """The same weights with a dispatch of its own, for a forward that is under way at the same time."""
        return self.with_dispatch(self._dispatch.fork())

    def with_dispatch(self, dispatch: ExpertDispatch) -> Trunk:
        """The same weights, with experts computed otherwise."""
        return Trunk(self._model, self._config, self._traits, dispatch, self._switch, self._fused)

    @torch.inference_mode()
    def forward(self, tokens: torch.Tensor, lane: Lane) -> tuple[torch.Tensor, RowTally]:
        """One forward over the rows and positions that `lane.begin` (`begin_packed`) was given.

        tokens [B, Q] ([T]) int64 -> logits [B, V] float32 of each row's last token, and the tally of all T tokens.
        Recurrent states move on when the caller calls `lane.commit`. Raises what the dispatch raises.
        """
        self._dispatch.begin(tokens.numel())
        if self._fused is not None and fits_cache(lane.pools):
            logits = self._run_fused(self._fused, tokens, lane)
        else:
            logits = self._run(tokens, lane, self._dispatch)
        return logits, self._dispatch.tally()

    def _run_fused(self, fused: FusedModel, tokens: torch.Tensor, lane: Lane) -> torch.Tensor:
        slots, last = lane.rows, lane.last
        if tokens.dim() == 2:
            count, each = tokens.shape
            slots, last = slots.repeat_interleave(each), range(each - 1, count * each, each)
        return fused.forward(tokens.reshape(-1), slots, lane.positions.reshape(-1), last, lane.pools, self._dispatch)

    def _run(self, tokens: torch.Tensor, lane: Lane, dispatch: ExpertDispatch | _NoExperts) -> torch.Tensor:
        self._switch.current = dispatch
        output = self._model(
            input_ids=tokens,
            position_ids=lane.positions,
            attention_mask=self._masks(lane),
            cache=lane,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1].float()

    def _masks(self, lane: Lane) -> torch.Tensor | dict[str, torch.Tensor | None]:
        if self._traits.masks is Masks.BY_TYPE:
            full = lane.mask(None)
            return {
                "full_attention": full,
                "sliding_attention": full if self._window is None else lane.mask(self._window),
                "linear_attention": None,  # only tells padding, and there is none
                "conv": None,
            }
        return lane.mask(self._window if self._traits.masks is Masks.WINDOW else None)


def load_trunk(
    path: str | Path,
    dtype: torch.dtype,
    device: torch.device | str,
    dispatch: ExpertDispatch,
    threads: Threads = ONE_THREAD,
) -> Trunk:
    """Loads all of a checkpoint but its routed experts; the weights stay mapped files until they are touched, unless
    they are quantised.

    Never uses the network nor code from the checkpoint. Raises DataError when a weight is missing or misshapen, or
    the config asks for something whose answers would depend on the batch.
    """
    checkpoint = open_checkpoint(path)
    architecture = architecture_of(checkpoint.config)
    _quieten()
    config = architecture.config
    switch = _Switch()
    is_decoded = needs_decoding(checkpoint)
    try:
        config.output_router_logits = False
        _check_config(config)
        with compiler_left_out():
            model, report = _without_experts(architecture.model_class, switch).from_pretrained(
                None if is_decoded else checkpoint.path,
                config=config,
                dtype=dtype,
                attn_implementation="sdpa" if architecture.model_class._supports_sdpa else SINK_ATTENTION,
                state_dict=decoded_trunk(checkpoint, dtype) if is_decoded else None,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported instead of raised: _check_report then says which
            )
    except (*CONFIG_ERRORS, SafetensorError) as error:
        raise DataError(f"loading the trunk of {checkpoint.path.name}: {str(error)[:300]}") from error
    _check_report(checkpoint, model, report)
    model = model.to(torch.device(device)).eval()
    fused = None
    if architecture.traits.masks is not Masks.BY_TYPE:
        window = config.sliding_window if architecture.traits.masks is Masks.WINDOW else None
        fused = fused_model(model, config, window, threads)
    return Trunk(model, config, architecture.traits, dispatch, switch, fused)


def _quieten() -> None:
    """transformers speaks on stderr and draws progress bars, over a screen that is not its own."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity(logging.ERROR)


def _without_experts(base: Any, switch: _Switch) -> Any:
    """A subclass that swaps the expert modules while the model is still on the meta device and costs nothing."""

    class WithoutExperts(base):
        # Only silences the report: `open_checkpoint` has already checked that every expert is there.
        _keys_to_ignore_on_load_unexpected = (
            *(base._keys_to_ignore_on_load_unexpected or ()),
            r"\.experts\.",
            r"\.block_sparse_moe\.(input|output)_linear\.",
        )

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for name, module in list(self.named_modules()):
                if is_experts(name, module):
                    stub = _ExpertsStub(layer_of(name), module.down_proj.shape[0], identity_experts(module), switch)
                    parent, _, leaf = name.rpartition(".")
                    setattr(self.get_submodule(parent), leaf, stub)

    # transformers goes by these where it chooses how to rename a checkpoint's keys.
    WithoutExperts.__name__, WithoutExperts.__module__ = base.__name__, base.__module__
    return WithoutExperts


def _check_config(config: Any) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    for settings in (rope, *(each for each in rope.values() if isinstance(each, dict))):  # one, or one by layer type
        if settings.get("rope_type") in _BATCH_DEPENDENT_ROPE:
            raise DataError(f"rotary embeddings of the type {settings['rope_type']!r} are not supported")


def _check_report(checkpoint: Checkpoint, model: nn.Module, report: Mapping[str, Any]) -> None:
    for problem in ("missing_keys", "mismatched_keys", "error_msgs"):
        if report[problem]:
            found = ", ".join(map(str, sorted(report[problem], key=str)[:5]))
            raise DataError(f"the trunk of {checkpoint.path.name}: {problem.replace('_', ' ')}: {found[:300]}")
    stubbed = tuple(sorted(m.layer for m in model.modules() if isinstance(m, _ExpertsStub)))
    if stubbed != checkpoint.layers:
        raise DataError(
            f"{checkpoint.family}: routed experts were found in the layers {stubbed}, expected {checkpoint.layers}"
        )
