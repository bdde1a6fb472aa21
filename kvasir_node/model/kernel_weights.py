"""Which experts the kernel computes, and where their weights lie in memory.

It does not know rows, layers or files.
"""

from __future__ import annotations

import torch

from kvasir_node.model.expert_kernel import ExpertForm
from kvasir_node.model.expert_parts import ExpertWeights
from kvasir_node.model.kernels.abi import BF16, CLAMPED, F32, GLU, GPT_OSS, INT8, STEP
from kvasir_node.model.kernels.library import is_able
from kvasir_node.model.maths import ExpertMaths

_FORMS = {"glu": GLU, "clamped": CLAMPED, "gptoss": GPT_OSS}
_KINDS = {torch.float32: F32, torch.bfloat16: BF16, torch.int8: INT8}


def form_of(
    maths: ExpertMaths, hidden_size: int, expert_hidden_size: int, stored: torch.dtype, device: torch.device
) -> ExpertForm | None:
    """None for what torch must compute: other devices, processors, dtypes, widths, activations, or no gate."""
    if device.type != "cpu" or stored not in _KINDS or hidden_size % STEP or expert_hidden_size % STEP:
        return None
    if maths.activation != "silu" or maths.gate not in _FORMS or not is_able():
        return None
    return ExpertForm(_KINDS[stored], _FORMS[maths.gate], expert_hidden_size, maths.limit or 0.0, maths.alpha or 0.0)


def addresses(weights: ExpertWeights) -> list[int]:
    """A row of the kernel's table; the weights must live as long as it is used."""
    inner = weights.down.shape[1]
    up, gate = weights.up, weights.up if weights.gate is None else weights.gate
    half = up.shape[0] - inner  # where the rows of `up` begin: behind those of the gate, if there are any
    factors, biases = [0, 0, 0], [0, 0, 0]
    if weights.up_factors is not None and weights.down_factors is not None:
        factors = _of_three(weights.up_factors, half, weights.down_factors)
    if weights.up_bias is not None and weights.down_bias is not None:
        biases = _of_three(weights.up_bias, half, weights.down_bias)
    return [gate.data_ptr(), up[half:].data_ptr(), weights.down.data_ptr(), *factors, *biases]


def _of_three(ups: torch.Tensor, half: int, down: torch.Tensor) -> list[int]:
    return [ups.data_ptr(), ups[half:].data_ptr(), down.data_ptr()]
