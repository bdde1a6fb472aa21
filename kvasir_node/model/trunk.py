"""The trunk of a model: transformers' own model code with every routed expert cut out.

It does not know where experts are computed, nor requests: at each expert layer it hands rows to an
`ExpertDispatch` and takes back their weighted sums. Expert weights are never loaded here.

Shapes: B rows of one forward, Q new tokens per row, T = B × Q expert rows (row-major), K experts chosen per row,
D model width, V vocabulary.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn

from kvasir_node.base.errors import DataError
from kvasir_node.model.cache import SlotCache
from kvasir_node.model.checkpoint import Checkpoint, open_checkpoint
from kvasir_node.model.experts import ExpertShard

_CLASSES: Mapping[str, str] = {
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
}
# These rescale all rotations by the longest row of a batch, so that an answer would depend on its neighbours.
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")
_EXPERTS_MODULE = re.compile(r"model\.layers\.([0-9]+)\..*\bexperts\Z")


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
    """Computes the routed experts of one forward, wherever they are. Used by one thread, layer after layer."""

    def begin(self, rows: int) -> None:
        """Called before each forward with its T; the tally starts at zero."""
        ...

    def __call__(self, layer: int, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """rows [T, D] in the trunk's dtype, chosen [T, K] int64, weights [T, K] -> [T, D] in any float dtype.

        May raise a KvasirError when no way to compute is left; the forward then ends and may be repeated.
        """
        ...

    def tally(self) -> RowTally:
        """What happened since `begin`."""
        ...


class LocalDispatch:
    """All experts from one shard in this process."""

    def __init__(self, shard: ExpertShard) -> None:
        self._shard = shard
        self._rows = 0
        self._pairs_per_row = 0

    def begin(self, rows: int) -> None:
        self._rows, self._pairs_per_row = rows, 0

    def __call__(self, layer: int, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        self._pairs_per_row += chosen.shape[1]
        pair_row = torch.arange(rows.shape[0], device=rows.device).repeat_interleave(chosen.shape[1])
        return self._shard.compute(layer, rows, pair_row, chosen.reshape(-1), weights.reshape(-1))

    def tally(self) -> RowTally:
        none = [0] * self._rows
        return RowTally(local=[self._pairs_per_row] * self._rows, remote=none, fallback=none, hedged=none)


class _ExpertsStub(nn.Module):
    """Stands where a family's fused experts were; without parameters. transformers passes no layer index here."""

    def __init__(self, layer: int, dispatch: ExpertDispatch) -> None:
        super().__init__()
        self._layer = layer
        self._dispatch = dispatch

    def forward(self, hidden_states: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self._dispatch(self._layer, hidden_states, chosen, weights).to(hidden_states.dtype)


class Trunk:
    """A loaded trunk. One forward at a time."""

    def __init__(self, model: nn.Module, config: Any, dispatch: ExpertDispatch, device: torch.device) -> None:
        self._model = model
        self._dispatch = dispatch
        self._window: int | None = getattr(config, "sliding_window", None) or None
        self._masks_by_type = config.model_type == "qwen2_moe"  # its layers pick a mask by their type
        self.device = device
        self.dtype: torch.dtype = model.dtype  # type: ignore[assignment]
        self.layer_count: int = config.num_hidden_layers
        self.vocab_size: int = config.vocab_size
        self.context_max: int = config.max_position_embeddings
        self._kv_heads: int = config.num_key_value_heads
        self._head_width: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    @property
    def nbytes(self) -> int:
        return sum(parameter.nbytes for parameter in self._model.parameters())

    def new_cache(self, slots: int, context: int) -> SlotCache:
        return SlotCache(self.layer_count, slots, self._kv_heads, context, self._head_width, self.dtype, self.device)

    @torch.inference_mode()
    def forward(self, tokens: torch.Tensor, cache: SlotCache) -> tuple[torch.Tensor, RowTally]:
        """One forward over the rows and positions that `cache.begin` was given.

        tokens [B, Q] int64 -> logits [B, V] float32 of each row's last token, and the tally of its B × Q rows.
        Raises what the dispatch raises.
        """
        self._dispatch.begin(tokens.numel())
        output = self._model(
            input_ids=tokens,
            position_ids=cache.positions,
            attention_mask=self._masks(cache),
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1].float(), self._dispatch.tally()

    def _masks(self, cache: SlotCache) -> torch.Tensor | dict[str, torch.Tensor]:
        if self._masks_by_type:
            return {"full_attention": cache.mask(None), "sliding_attention": cache.mask(self._window)}
        return cache.mask(self._window)  # Qwen3-MoE and Mixtral: a window, if set, holds for every layer


def load_trunk(path: str | Path, dtype: torch.dtype, device: torch.device | str, dispatch: ExpertDispatch) -> Trunk:
    """Loads all of a checkpoint but its routed experts; the weights stay mapped files until they are touched.

    Never uses the network nor code from the checkpoint. Raises DataError when a weight is missing or misshapen, or
    the config asks for something whose answers would depend on the batch.
    """
    checkpoint = open_checkpoint(path)
    _quieten()
    base = _model_class(checkpoint.family)
    try:
        config = base.config_class.from_pretrained(checkpoint.path, local_files_only=True)
        config.output_router_logits = False
        _check_config(config)
        model, report = _without_experts(base, dispatch).from_pretrained(
            checkpoint.path,
            config=config,
            dtype=dtype,
            attn_implementation="sdpa",
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported instead of raised: _check_report then says which
        )
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, SafetensorError, StrictDataclassError) as error:
        raise DataError(f"loading the trunk of {checkpoint.path.name}: {str(error)[:300]}") from error
    _check_report(checkpoint, model, report)
    place = torch.device(device)
    return Trunk(model.to(place).eval(), config, dispatch, place)


def _quieten() -> None:
    """transformers speaks on stderr and draws progress bars, over a screen that is not its own."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity(logging.ERROR)


def _model_class(family: str) -> Any:
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    return getattr(module, _CLASSES[family])


def _without_experts(base: Any, dispatch: ExpertDispatch) -> Any:
    """A subclass that swaps the expert modules while the model is still on the meta device and costs nothing."""

    class WithoutExperts(base):
        # Only silences the report: `open_checkpoint` has already checked that every expert is there.
        _keys_to_ignore_on_load_unexpected = (r"\.experts\.",)

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for name, module in list(self.named_modules()):
                match = _EXPERTS_MODULE.match(name)
                if match is not None and isinstance(getattr(module, "down_proj", None), torch.Tensor):
                    parent, _, leaf = name.rpartition(".")
                    setattr(self.get_submodule(parent), leaf, _ExpertsStub(int(match[1]), dispatch))

    WithoutExperts.__name__ = base.__name__  # transformers compares it with the checkpoint's "architectures"
    return WithoutExperts


def _check_config(config: Any) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in _BATCH_DEPENDENT_ROPE:
        raise DataError(f"rotary embeddings of the type {rope['rope_type']!r} are not supported")


def _check_report(checkpoint: Checkpoint, model: nn.Module, report: Mapping[str, Any]) -> None:
    for problem in ("missing_keys", "mismatched_keys", "error_msgs"):
        if report[problem]:
            found = ", ".join(map(str, sorted(report[problem], key=str)[:5]))
            raise DataError(f"the trunk of {checkpoint.path.name}: {problem.replace('_', ' ')}: {found[:300]}")
    stubbed = tuple(sorted(m._layer for m in model.modules() if isinstance(m, _ExpertsStub)))
    if stubbed != checkpoint.layers:
        raise DataError(
            f"{checkpoint.family}: routed experts were found in the layers {stubbed}, expected {checkpoint.layers}"
        )
