"""Attention for families that torch's own cannot compute: a learned *sink* takes a share of each head's attention.

It does not know families, caches nor where masks come from; transformers calls it as one of its attention functions.
Their own way (eager) first copies all keys and values once for each query head of their group; here the query heads of
a group are rows of one product instead, so that nothing is copied. Measured: docs/log.md.

Shapes: B rows, Q new tokens per row, N query heads, H key/value heads, S positions, W head width, V width of values.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

SINK_ATTENTION = "kvasir_sinks"  # as transformers' `attn_implementation`


def sink_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """query [B, N, Q, W], key [B, H, S, W], value [B, H, S, V], attention_mask bool [B, 1, Q, S] -> [B, Q, N, V].

    `module.sinks` [N], or None for a layer without: a sink is one more score of every row, whose value is zero. Scores
    and softmax are float32.

    Source: `eager_attention_forward` of gpt_oss, mimo_v2_flash and granitemoe_swa in transformers 5.24.
    """
    batch, heads, each, width = query.shape
    groups, positions = key.shape[1:3]
    rows = query.reshape(batch, groups, -1, width)  # [B, H, N / H × Q, W]
    products = (rows @ key.transpose(2, 3)).to(torch.float32).view(batch, heads, each, positions)
    scores = products.new_empty(batch, heads, each, positions + 1)  # the sink's comes last
    seen = torch.mul(products, scaling, out=scores[..., :positions])
    seen.masked_fill_(~attention_mask, -torch.inf)
    scores[..., positions] = -torch.inf if module.sinks is None else module.sinks.to(torch.float32).view(1, -1, 1)
    shares = scores.softmax(-1)[..., :positions].to(value.dtype)
    output = shares.reshape(batch, groups, -1, positions) @ value  # [B, H, N / H × Q, V]
    return output.view(batch, heads, each, -1).transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(SINK_ATTENTION, sink_attention)
