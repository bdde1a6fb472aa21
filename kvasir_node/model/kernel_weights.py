"""Which experts the kernel computes, and where their weights lie in memory.

It does not know rows, layers or files.
"""

from __future__ import annotations

import torch

from kvasir_node.model.expert_kernel import ExpertForm
from kvasir_node.model.expert_parts import ExpertWeights
from kvasir_node.model.kernels.abi import BF16, CLAMPED, F32, GLU, GPT_OSS, STEP
from kvasir_node.model.kernels.library import is_able
from kvasir_node.model.maths import ExpertMaths

_FORMS = {"glu": GLU, "clamped": CLAMPED, "gptoss": GPT_OSS}
_KINDS = {torch.float32: F32, torch.bfloat16: BF16}


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
    up, bias = weights.up, weights.up_bias
    half = up.shape[0] - inner  # where the rows of `up` begin: behind those of the gate, if there are any
    biases = [0, 0, 0]
    if bias is not None and weights.down_bias is not None:
        biases = [bias.data_ptr(), bias[half:].data_ptr(), weights.down_bias.data_ptr()]
    return [up.data_ptr(), up[half:].data_ptr(), weights.down.data_ptr(), 0, 0, 0, *biases]
