"""A forward through the trunk of the most used layouts by kernels: same weights, same cache, a fraction of the time.

It does not know requests, nor where experts are computed: as the trunk does, it hands rows to a dispatch. What it
cannot compute, `fused_model` answers with None, and transformers' own code goes on as for every other family. At few
rows a forward is bound by the reading of weights and by Python between torch's calls; here a decoder block is one call
besides its experts. Rows are float32 between the blocks whatever the dtype of the weights.

Shapes: B rows, D model width, N heads, H key/value heads, W head width, V vocabulary. Each row is one token of some
slot at some position, so chunks of prompts and single tokens are the same to it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kvasir_node.model.cache import SlotCache
from kvasir_node.model.kernels.abi import (
    BF16,
    BLOCK_ALL,
    BLOCK_ATTEND,
    BLOCK_LAYER,
    BLOCK_NORM,
    BLOCK_NUMBERS,
    BLOCK_OUTPUT,
    BLOCK_PLACE,
    BLOCK_PROJECT,
    BLOCK_ROUTE,
    BLOCK_SIZES,
    BLOCK_WORK,
    F32,
    LINEAR_ALL,
    LINEAR_NORM,
    LINEAR_NUMBERS,
    LINEAR_PROJECT,
    POSITIONS_MIN,
    STEP,
    TILE_OUTPUTS,
)
from kvasir_node.model.kernels.library import is_able, kernels
from kvasir_node.model.threads import Threads

_KINDS = {torch.float32: F32, torch.bfloat16: BF16}
_LAYOUTS = ("Qwen3MoeForCausalLM", "MixtralForCausalLM", "OlmoeForCausalLM")
_PART_MIN = 128  # outputs of one thread
_Numbers, _Layer, _Work = (ctypes.c_int64 * len(names) for names in (BLOCK_NUMBERS, BLOCK_LAYER, BLOCK_WORK))
_Sizes, _Linear = (ctypes.c_int64 * len(names) for names in (BLOCK_SIZES, LINEAR_NUMBERS))

Experts = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, rows [B, D], chosen [B, K], weights [B, K]) -> sums [B, D]: an `ExpertDispatch` after `begin`. The rows are
float32 numbers that the trunk's dtype can tell."""


@dataclass(frozen=True, slots=True)
class _Shape:
    width: int
    heads: int
    kv_heads: int
    head_width: int
    experts: int
    chosen: int
    vocabulary: int
    window: int  # 0 = none
    renormalises: bool
    epsilon: float
    scale: float


class _Room:
    """Memory of one forward of B rows; `block` is its work as the kernel wants it."""

    def __init__(self, shape: _Shape, rows: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        count, width = rows.shape
        group, most = shape.heads // shape.kv_heads, int(positions.max()) + POSITIONS_MIN
        states = (shape.heads + 2 * shape.kv_heads) * shape.head_width
        self.rows, self._slots, self._positions = rows, slots, positions
        self.plain = torch.empty(count, width)
        self.chosen = torch.empty(count, shape.chosen, dtype=torch.int64)
        self.weights = torch.empty(count, shape.chosen)
        self.spread = torch.empty(count, width)
        self._states = torch.empty(count, states)
        self._queries = torch.empty(2, count, shape.heads * shape.head_width)
        self._scores = torch.empty(count * shape.heads, most)
        self._logits = torch.empty(count, shape.experts)
        self.lines = torch.empty(count * (7 + 4 * shape.kv_heads * group), dtype=torch.int64)
        self._most = most

    def block(self, cosines: torch.Tensor, sines: torch.Tensor) -> ctypes.Array[ctypes.c_int64]:
        count = self.rows.shape[0]
        return _Work(
            self.rows.data_ptr(), count, self._slots.data_ptr(), self._positions.data_ptr(), cosines.data_ptr(),
            sines.data_ptr(), self.plain.data_ptr(), self.chosen.data_ptr(), self.weights.data_ptr(),
            self.spread.data_ptr(), self._states.data_ptr(), self._queries[0].data_ptr(), self._queries[1].data_ptr(),
            self._scores.data_ptr(), self._most, self._logits.data_ptr(), self.lines.data_ptr(),
            self.lines[7 * count :].data_ptr(),
        )  # fmt: skip


class FusedModel:
    """`forward` may be called by several threads at once, on slots that differ."""

    def __init__(self, model: Any, shape: _Shape, threads: Threads) -> None:
        self._model = model  # owns the memory of all matrices
        self._shape = shape
        self._threads = threads
        kind = _KINDS[model.dtype]
        self._block, self._linear = kernels()[f"block_{kind}"], kernels()[f"linear_{kind}"]
        self._factors = (ctypes.c_float * 2)(shape.epsilon, shape.scale)
        self._embedding: torch.Tensor = model.model.embed_tokens.weight
        self._norms: list[torch.Tensor] = []  # own the memory of all norms
        self._layers = [self._layer(each) for each in model.model.layers]
        self._final_norm = self._float32(model.model.norm.weight)
        self._head: int = model.lm_head.weight.data_ptr()
        rotary = model.model.rotary_emb
        self._frequencies = rotary.inv_freq.detach().to(torch.float32).clone()
        self._rope_factor = float(rotary.attention_scaling)

    def forward(
        self,
        tokens: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        last: Sequence[int],
        cache: SlotCache,
        experts: Experts,
    ) -> torch.Tensor:
        """tokens, slots, positions [B] int64 -> logits [len(last), V] float32 of the rows `last`."""
        shape = self._shape
        rows = self._embedding[tokens].to(torch.float32)
        room = _Room(shape, rows, slots.contiguous(), positions.contiguous())
        angles = positions[:, None] * self._frequencies
        cosines, sines = angles.cos() * self._rope_factor, angles.sin() * self._rope_factor
        work = room.block(cosines, sines)
        sizes = _Sizes(
            shape.width, shape.heads, shape.kv_heads, shape.head_width, shape.experts, shape.chosen, cache.context,
            shape.window, shape.renormalises,
        )  # fmt: skip
        for index, layer in enumerate(self._layers):
            keys, values = cache.keys[index].data_ptr(), cache.values[index].data_ptr()
            fixed = map(ctypes.addressof, (sizes, layer, work))
            self._run_block(_Numbers(BLOCK_ALL, 0, 0, *fixed, keys, values), rows.shape[0])
            rows.add_(experts(index, room.plain, room.chosen, room.weights))
        return self._logits(rows if len(last) == rows.shape[0] else rows[list(last)], room)

    def _run_block(self, numbers: ctypes.Array[ctypes.c_int64], count: int) -> None:
        if self._threads.count == 1:
            self._block(numbers, self._factors)
            return
        shape = self._shape
        outputs = (shape.heads + 2 * shape.kv_heads) * shape.head_width
        for phase, size, step, least in (
            (BLOCK_NORM, 0, 0, 0),
            (BLOCK_PROJECT, outputs, TILE_OUTPUTS, _PART_MIN),
            (BLOCK_PLACE, 0, 0, 0),
            (BLOCK_ATTEND, count * shape.kv_heads, 1, shape.kv_heads),
            (BLOCK_OUTPUT, shape.width, TILE_OUTPUTS, _PART_MIN),
            (BLOCK_ROUTE, 0, 0, 0),
        ):

            def part(first: int, end: int, phase: int = phase) -> None:
                self._block(_Numbers(phase, first, end, *numbers[3:]), self._factors)

            if size:
                self._threads.each_part(size, step, least, part)
            else:
                part(0, 0)

    def _logits(self, rows: torch.Tensor, room: _Room) -> torch.Tensor:
        count, outputs = rows.shape[0], self._shape.vocabulary
        logits = torch.empty(count, outputs)
        fixed = (
            rows.data_ptr(), count, self._shape.width, self._final_norm.data_ptr(), self._head, outputs,
            logits.data_ptr(), room.plain.data_ptr(), room.spread.data_ptr(), room.lines.data_ptr(),
        )  # fmt: skip
        if self._threads.count == 1:
            self._linear(_Linear(LINEAR_ALL, 0, 0, *fixed), self._factors)
            return logits
        self._linear(_Linear(LINEAR_NORM, 0, 0, *fixed), self._factors)

        def part(first: int, end: int) -> None:
            self._linear(_Linear(LINEAR_PROJECT, first, end, *fixed), self._factors)

        self._threads.each_part(outputs, TILE_OUTPUTS, _PART_MIN, part)
        return logits

    def _layer(self, module: Any) -> ctypes.Array[ctypes.c_int64]:
        attention = module.self_attn
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        norms: list[int] = []
        for name in ("q_norm", "k_norm"):
            norm = getattr(attention, name, None)
            norms += (0, 0) if norm is None else (self._float32(norm.weight).data_ptr(), norm.weight.shape[0])
        return _Layer(
            self._float32(module.input_layernorm.weight).data_ptr(),
            *(each.weight.data_ptr() for each in projections),
            *(0 if each.bias is None else self._float32(each.bias).data_ptr() for each in projections),
            *norms,
            attention.o_proj.weight.data_ptr(),
            0 if attention.o_proj.bias is None else self._float32(attention.o_proj.bias).data_ptr(),
            self._float32(module.post_attention_layernorm.weight).data_ptr(),
            module.mlp.gate.weight.data_ptr(),
        )

    def _float32(self, tensor: torch.Tensor) -> torch.Tensor:
        self._norms.append(tensor.detach().to(torch.float32).contiguous().clone())
        return self._norms[-1]


def fused_model(model: nn.Module, config: Any, window: int | None, threads: Threads) -> FusedModel | None:
    """None when the model is of another layout, dtype or device, or has an option that the kernels do not compute."""
    names = {each.__name__ for each in type(model).__mro__}
    if not names & set(_LAYOUTS) or getattr(config, "clip_qkv", None) is not None or not is_able():
        return None
    if model.dtype not in _KINDS or any(each.device.type != "cpu" for each in model.parameters()):
        return None
    shape = _shape(model, config, window or 0)
    return FusedModel(model, shape, threads) if shape is not None and _fits(model, shape) else None


def fits_cache(cache: SlotCache) -> bool:
    """Whether `FusedModel.forward` can use this cache."""
    return cache.context >= POSITIONS_MIN


def _shape(model: Any, config: Any, window: int) -> _Shape | None:
    blocks = list(model.model.layers)
    routers: list[Any] = [getattr(each.mlp, "gate", None) for each in blocks]
    if any(router is None or not hasattr(router, "top_k") for router in routers):
        return None  # a block without experts
    attention = blocks[0].self_attn
    return _Shape(
        width=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_width=attention.head_dim,
        experts=routers[0].weight.shape[0],
        chosen=routers[0].top_k,
        vocabulary=model.lm_head.weight.shape[0],
        window=window,
        renormalises=bool(getattr(routers[0], "norm_topk_prob", True)),  # Mixtral's always does
        epsilon=config.rms_norm_eps,
        scale=attention.scaling,
    )


def _fits(model: Any, shape: _Shape) -> bool:
    return (
        all(each.is_contiguous() and each.dtype is model.dtype for each in model.parameters())
        and model.config.hidden_act == "silu"
        and 2 * len(model.model.rotary_emb.inv_freq) == shape.head_width
        and shape.heads % shape.kv_heads == 0
        and all(inputs % STEP == 0 for inputs in (shape.width, shape.head_width))
        and all(outputs % TILE_OUTPUTS == 0 for outputs in (shape.experts, shape.vocabulary))
        and (shape.window == 0 or shape.window >= POSITIONS_MIN)
    )
