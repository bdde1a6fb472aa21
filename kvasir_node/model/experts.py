"""Routed experts in memory and their maths: rows in, weighted partial sums out.

It does not know the network, the router, nor who else computes other experts of the same rows. Any thread may
compute while another adds or removes experts.

Shapes: R rows, D model width, I expert width, P (row, expert) pairs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from kvasir_node.base.errors import BugError, DataError, UsageError
from kvasir_node.base.ids import ExpertId
from kvasir_node.model.checkpoint import Checkpoint
from kvasir_node.model.expert_kernel import COLUMNS, AnswerKernel, ExpertKernel
from kvasir_node.model.expert_parts import ExpertWeights, as_they_lie, decode, lies_ready
from kvasir_node.model.kernel_weights import addresses, form_of
from kvasir_node.model.maths import ExpertMaths
from kvasir_node.model.tensor_file import TensorSpec, read_tensor
from kvasir_node.model.threads import ONE_THREAD, Threads


@dataclass(frozen=True, slots=True)
class HeldLayer:
    """What is held of a layer, and where it lies: a table as in `expert_kernel`, of zeros for what is not held."""

    experts: Mapping[int, ExpertWeights]
    table: torch.Tensor

    def with_expert(self, index: int, weights: ExpertWeights) -> HeldLayer:
        table = torch.zeros(max(len(self.table), index + 1), COLUMNS, dtype=torch.int64)
        table[: len(self.table)] = self.table
        table[index] = torch.tensor(addresses(weights))
        return HeldLayer({**self.experts, index: weights}, table)

    def without(self, index: int) -> HeldLayer:
        table = self.table.clone()
        table[index : index + 1] = 0
        return HeldLayer({i: weights for i, weights in self.experts.items() if i != index}, table)


_NOTHING = HeldLayer({}, torch.zeros(0, COLUMNS, dtype=torch.int64))


def stored_dtype(
    maths: ExpertMaths,
    hidden_size: int,
    expert_hidden_size: int,
    parts: Iterable[TensorSpec],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.dtype:
    """In which dtype a shard that computes in `dtype` should keep experts of these parts.

    bfloat16 weights are kept as they are where a kernel multiplies them by float32 rows: the results are those of
    float32 weights at half the memory and, as reading them is what takes the time, twice the speed.
    """
    is_bfloat16 = all(part[0] == "BF16" for part in parts)
    has_kernel = form_of(maths, hidden_size, expert_hidden_size, torch.bfloat16, device) is not None
    return torch.bfloat16 if is_bfloat16 and has_kernel else dtype


class ExpertShard:
    """The weights of a set of experts on one device.

    Computes in `dtype`: on a CPU by a kernel for most families, whose sums are in float32 whatever the dtype, else by
    torch. Keeps weights as `stored`, `dtype` unless told otherwise; another one is only for what `stored_dtype` allows,
    or int8. Raises UsageError for int8 where no kernel computes.
    """

    def __init__(
        self,
        maths: ExpertMaths,
        hidden_size: int,
        expert_hidden_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        *,
        stored: torch.dtype | None = None,
        threads: Threads = ONE_THREAD,
    ) -> None:
        self.maths = ExpertMaths.from_dict(maths.to_dict())
        self.hidden_size = hidden_size
        self.expert_hidden_size = expert_hidden_size
        self.dtype = dtype
        self.device = torch.device(device)
        self.stored = stored or dtype
        form = form_of(self.maths, hidden_size, expert_hidden_size, self.stored, self.device)
        if self.stored is torch.int8 and form is None:
            raise UsageError(
                f"int8 experts with {self.maths.activation} and the gate {self.maths.gate}, of {hidden_size} × "
                f"{expert_hidden_size}, cannot be computed on this {self.device.type}; they need a CPU with AVX2 or "
                'NEON, silu with a gate, and sizes in steps of 32: set coordinator.experts to "stored"'
            )
        self._form = form
        self._kernel = None if form is None else ExpertKernel(form, threads)
        self._computes_alone = threads.count == 1
        self._bias_dtype = self.stored if form is None else torch.float32
        self._writing = threading.Lock()
        # Replaced as a whole by writers, so that a computing thread keeps the layer it started with.
        self._layers: dict[int, HeldLayer] = {}

    @property
    def has_kernel(self) -> bool:
        """Whether a kernel computes, from float32 rows, and not torch."""
        return self._kernel is not None

    def answer_kernel(self) -> AnswerKernel | None:
        """For a thread of its own, to be used with `held_of`; None where torch computes, or several threads do."""
        return AnswerKernel(self._form) if self._form is not None and self._computes_alone else None

    def held_of(self, layer: int) -> HeldLayer:
        """What is held of a layer now; it stays in memory as long as somebody has this."""
        return self._layers.get(layer, _NOTHING)

    def add(self, expert: ExpertId, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes the parts of an expert as its checkpoint stores them; they are decoded or copied.

        Raises DataError when a part is missing, misshapen or in a form that these maths do not have.
        """
        try:
            weights = decode(
                self.maths,
                tensors,
                self.hidden_size,
                self.expert_hidden_size,
                self.stored,
                self._bias_dtype,
                self.device,
            )
        except DataError as error:
            raise DataError(f"expert {expert.index} of layer {expert.layer}: {error}") from error
        self._put(expert, weights)

    def can_view(self, parts: Mapping[str, TensorSpec]) -> bool:
        """Whether `add_views` may be given such parts: they lie just as they would be kept."""
        return self._kernel is not None and lies_ready(self.maths, parts, self.stored)

    def add_views(self, expert: ExpertId, tensors: Mapping[str, torch.Tensor]) -> None:
        """As `add`, of parts that `can_view` allows; not copied, so they must not change while they are held."""
        self._put(expert, as_they_lie(tensors))

    def _put(self, expert: ExpertId, weights: ExpertWeights) -> None:
        with self._writing:
            layer = self._layers.get(expert.layer, _NOTHING).with_expert(expert.index, weights)
            self._layers = {**self._layers, expert.layer: layer}

    def remove(self, expert: ExpertId) -> None:
        """Forgets an expert; one that is not held is ignored."""
        with self._writing:
            layer = self._layers.get(expert.layer, _NOTHING).without(expert.index)
            self._layers = {**self._layers, expert.layer: layer}

    def holds(self, expert: ExpertId) -> bool:
        return expert.index in self._layers.get(expert.layer, _NOTHING).experts

    def held(self, layer: int) -> frozenset[int]:
        return frozenset(self._layers.get(layer, _NOTHING).experts)

    @property
    def expert_bytes(self) -> int:
        """Memory of one expert that is not a view."""
        up_rows = self.maths.up_rows(self.expert_hidden_size)
        weights = up_rows * self.hidden_size + self.hidden_size * self.expert_hidden_size
        outputs = up_rows + self.hidden_size
        factor_bytes = 4 if self.stored is torch.int8 else 0
        bias_bytes = self._bias_dtype.itemsize if self.maths.bias else 0
        return weights * self.stored.itemsize + outputs * (factor_bytes + bias_bytes)

    @property
    def nbytes(self) -> int:
        """Memory of all that are held; views take none."""
        everything = (weights for layer in self._layers.values() for weights in layer.experts.values())
        return self.expert_bytes * sum(not weights.is_view for weights in everything)

    @torch.no_grad()
    def compute(
        self,
        layer: int,
        rows: torch.Tensor,
        pair_row: torch.Tensor,
        pair_expert: torch.Tensor,
        pair_weight: torch.Tensor,
    ) -> torch.Tensor:
        """Each row's sum of weight × expert(row) over its pairs; a row without pairs gives zeros.

        Shapes: rows [R, D] any float dtype; pair_row, pair_expert [P] int64; pair_weight [P]; result [R, D] float32,
        whatever the compute dtype, so that partial sums of several machines add up before they are rounded.
        Deterministic: the order of addition depends on the pairs alone. Raises BugError for an expert that is not
        held: the caller looks at `held` first.
        """
        if pair_row.shape[0] == 0:
            return rows.new_zeros(rows.shape, dtype=torch.float32)
        if self._kernel is not None:
            return self._by_kernel(self._kernel, layer, rows, pair_row, pair_expert, pair_weight)
        return self._by_torch(layer, rows, pair_row, pair_expert, pair_weight)

    def _by_kernel(
        self,
        kernel: ExpertKernel,
        layer: int,
        rows: torch.Tensor,
        pair_row: torch.Tensor,
        pair_expert: torch.Tensor,
        pair_weight: torch.Tensor,
    ) -> torch.Tensor:
        held = self._layers.get(layer, _NOTHING)  # keeps the weights alive meanwhile
        sums = kernel.sums(held.table, rows, pair_row, pair_expert, pair_weight)
        if isinstance(sums, int):
            raise _not_held(layer, sums)
        return sums

    def _by_torch(
        self,
        layer: int,
        rows: torch.Tensor,
        pair_row: torch.Tensor,
        pair_expert: torch.Tensor,
        pair_weight: torch.Tensor,
    ) -> torch.Tensor:
        order = torch.argsort(pair_expert, stable=True)
        pair_row, pair_weight = pair_row[order], pair_weight[order]
        experts, counts = torch.unique_consecutive(pair_expert[order], return_counts=True)
        chosen = [self._weights(layer, index) for index in experts.tolist()]
        states = rows.to(self.dtype)[pair_row].split(counts.tolist())  # one contiguous group per expert
        outputs = torch.cat([self._expert(state, weights) for state, weights in zip(states, chosen, strict=True)])
        weighted = outputs.to(torch.float32) * pair_weight.to(torch.float32)[:, None]
        return torch.zeros(rows.shape, dtype=torch.float32, device=rows.device).index_add_(0, pair_row, weighted)

    @torch.no_grad()
    def compute_naive(
        self,
        layer: int,
        rows: torch.Tensor,
        pair_row: torch.Tensor,
        pair_expert: torch.Tensor,
        pair_weight: torch.Tensor,
    ) -> torch.Tensor:
        """The slow, obvious version that `compute` is held to: one pair after the other."""
        total = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
        for row, index, weight in zip(pair_row.tolist(), pair_expert.tolist(), pair_weight.tolist(), strict=True):
            expert = self._weights(layer, index).to(self.dtype)
            inner = expert.up @ rows[row].to(self.dtype)
            inner = inner if expert.up_bias is None else inner + expert.up_bias
            output = expert.down @ self.maths.gated(inner)
            output = output if expert.down_bias is None else output + expert.down_bias
            total[row] += weight * output.to(torch.float32)
        return total

    def _expert(self, states: torch.Tensor, weights: ExpertWeights) -> torch.Tensor:
        inner = self.maths.gated(linear(states, weights.up, weights.up_bias))  # [n, I]
        return linear(inner, weights.down, weights.down_bias)  # [n, D]

    def _weights(self, layer: int, index: int) -> ExpertWeights:
        try:
            return self._layers[layer].experts[index]
        except KeyError:
            raise _not_held(layer, index) from None


def _not_held(layer: int, index: int) -> BugError:
    return BugError(f"expert {index} of layer {layer} was to be computed here but is not held")


def load_from_checkpoint(
    checkpoint: Checkpoint,
    experts: Iterable[ExpertId],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    threads: Threads = ONE_THREAD,
    *,
    stored: torch.dtype | None = None,
) -> ExpertShard:
    """Reads experts by byte range into a new shard; only one expert's file bytes are in memory at a time.

    `stored` is what `stored_dtype` says unless told otherwise. Raises UsageError as `ExpertShard` does.
    """
    sizes = checkpoint.maths, checkpoint.hidden_size, checkpoint.expert_hidden_size
    parts = {tensor.spec for expert in checkpoint.experts.values() for tensor in expert.values()}
    stored = stored or stored_dtype(*sizes, parts, dtype, torch.device(device))
    shard = ExpertShard(*sizes, dtype, device, stored=stored, threads=threads)
    for expert in experts:
        if expert not in checkpoint.experts:
            raise DataError(f"{checkpoint.path.name} has no expert {expert.index} in layer {expert.layer}")
        shard.add(expert, {part: read_tensor(tensor) for part, tensor in checkpoint.experts[expert].items()})
    return shard
