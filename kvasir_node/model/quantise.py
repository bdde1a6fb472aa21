"""Matrices as int8 with one factor for each of their rows: half the bytes of bfloat16, and not exact.

It does not know experts, files or kernels. Whoever quantises the same matrix gets the same numbers: every step is one
operation per weight, rounded as IEEE 754 says, so a worker's experts are its coordinator's.
"""

from __future__ import annotations

import torch

LEVELS = 127  # on either side of zero; -128 is not used, so that no sign is favoured


def int8_rows(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, K] of any float dtype -> int8 [N, K] and float32 factors [N], on the same device.

    factor = max |w| / LEVELS of its row; weights are rounded to the nearest, halves to even. A row with a value that is
    not finite gets such a factor, so that it shows in every product.
    """
    exact = matrix.to(torch.float32)
    factors = exact.abs().amax(1) / LEVELS
    # A row of zeros, or of values so small that their factor is zero, divides to NaN or infinity.
    levels = (exact / factors[:, None]).nan_to_num_(0.0).round_().clamp_(-LEVELS, LEVELS)
    return levels.to(torch.int8), factors
