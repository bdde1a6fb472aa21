"""How a family's experts compute, as data: what travels in the manifest, and all that a worker goes by.

It does not know model classes, files or layers. An expert maps a row x to

    down · gated(up · x + up_bias) + down_bias

where `up` has the gate's rows first, then up's own, unless there is no gate.

Shapes: n rows, D model width, I expert width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from kvasir_node.base.errors import DataError

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda states: functional.relu(states).square(),
}
GATES = ("glu", "clamped", "gptoss", "none")
SCALE_BLOCK_MAX = 4096
_FACTOR_MAX = 1e6


@dataclass(frozen=True, slots=True)
class ExpertMaths:
    """The spec of one model's experts; every field is plain.

    gate: glu      activation(g) × u
          clamped  activation(min(g, limit)) × clamp(u, ±limit)
          gptoss   g' × σ(alpha × g') × (u' + 1), with g' and u' clamped as above; the activation is silu's shape
          none     activation(u), and there is no gate
    bias: every matrix has one. The rest says how matrices are stored (see expert_parts): `transposed` as [in, out],
    `interleaved` with the rows of gate and up taking turns, `scale_rows` × `scale_columns` weights to an fp8 scale.

    Source: `use_experts_implementation`, `_default_apply_gate`, `GptOssExperts` and `DeepseekV4Experts` of
    transformers 5.24.
    """

    activation: str = "silu"
    gate: str = "glu"
    limit: float | None = None
    alpha: float | None = None
    bias: bool = False
    transposed: bool = False
    interleaved: bool = False
    scale_rows: int = 0
    scale_columns: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(value: Mapping[str, Any]) -> ExpertMaths:
        """Raises DataError for anything but maths that this version computes."""
        names = {field.name for field in fields(ExpertMaths)}
        if set(value) == names:
            maths = ExpertMaths(**value)
            if not maths._problem():
                return maths
            raise DataError(f"experts cannot be computed by this version: {maths._problem()}")
        odd = ", ".join(sorted(names ^ set(value)))[:200]
        raise DataError(f"experts cannot be computed by this version: unknown or missing in their maths: {odd}")

    def _problem(self) -> str:
        is_clamped = self.gate in ("clamped", "gptoss")
        checks = (
            (self.activation in ACTIVATIONS, f"the activation is {str(self.activation)[:40]!r}"),
            (self.gate in GATES, f"the gate is {str(self.gate)[:40]!r}"),
            (_is_factor(self.limit) if is_clamped else self.limit is None, f"the limit is {str(self.limit)[:40]}"),
            (
                _is_factor(self.alpha) if self.gate == "gptoss" else self.alpha is None,
                f"alpha is {str(self.alpha)[:40]}",
            ),
            (self.gate != "gptoss" or self.activation == "silu", "a gptoss gate has the activation silu"),
            (
                all(type(flag) is bool for flag in (self.bias, self.transposed, self.interleaved)),
                "bias, transposed and interleaved must be true or false",
            ),
            (
                all(type(n) is int and 0 <= n <= SCALE_BLOCK_MAX for n in (self.scale_rows, self.scale_columns))
                and (self.scale_rows == 0) == (self.scale_columns == 0),
                f"fp8 scales of {str(self.scale_rows)[:20]} × {str(self.scale_columns)[:20]} weights",
            ),
        )
        return next((problem for holds, problem in checks if not holds), "")

    @property
    def has_gate(self) -> bool:
        return self.gate != "none"

    def up_rows(self, expert_hidden_size: int) -> int:
        """Rows of `up`: 2I with a gate, else I."""
        return 2 * expert_hidden_size if self.has_gate else expert_hidden_size

    def gated(self, states: torch.Tensor) -> torch.Tensor:
        """[n, 2I] (or [n, I] without a gate) -> [n, I]. May change `states`."""
        activation = ACTIVATIONS[self.activation]
        if self.gate == "none":
            return activation(states)
        gate, up = states.chunk(2, dim=-1)
        if self.gate == "glu":
            return activation(gate).mul_(up)
        gate, up = gate.clamp(max=self.limit), up.clamp(-_number(self.limit), self.limit)
        if self.gate == "clamped":
            return activation(gate) * up
        return (up + 1) * (gate * torch.sigmoid(gate * _number(self.alpha)))


def _is_factor(value: Any) -> bool:
    return type(value) is float and math.isfinite(value) and 0 < value <= _FACTOR_MAX


def _number(value: float | None) -> float:
    assert value is not None  # `from_dict` and the families see to it
    return value
