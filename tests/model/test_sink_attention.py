"""Attention with sinks: against transformers' own of every family that has them."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from kvasir_node.model.sink_attention import SINK_ATTENTION, sink_attention

FAMILIES = ("gpt_oss", "mimo_v2_flash", "granitemoe_swa")
B, N, H, W, V, S = 3, 12, 3, 16, 8, 20


def both(family: str, each: int, dtype: torch.dtype, *, sinks: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Ours, then transformers': rows that see the last positions up to their own, each row from elsewhere on."""
    eager = import_module(f"transformers.models.{family}.modeling_{family}").eager_attention_forward
    generator = torch.Generator().manual_seed(each)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    query, key, value = drawn(B, each, N, W).transpose(1, 2), drawn(B, H, S + 5, W)[:, :, :S], drawn(B, H, S, V)
    seen = torch.ones(B, 1, each, S, dtype=torch.bool).tril(S - each)
    for row, first in enumerate((0, 4, S - each)):
        seen[row, ..., :first] = False
    module = SimpleNamespace(num_key_value_groups=N // H, training=False, sinks=2 * drawn(N) if sinks else None)
    ours, weights = sink_attention(module, query, key, value, seen, scaling=0.3, dropout=0.0, sliding_window=None)
    assert weights is None
    added = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)
    return ours, eager(module, query, key, value, added, scaling=0.3)[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("each", [1, 7])
def test_it_is_that_of_transformers(family, each):
    ours, theirs = both(family, each, torch.float32)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    ours, theirs = both(family, each, torch.bfloat16)
    assert ours.dtype is torch.bfloat16
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def test_a_layer_may_have_no_sinks():
    ours, theirs = both("mimo_v2_flash", 4, torch.float32, sinks=False)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(ours, both("mimo_v2_flash", 4, torch.float32)[0], atol=1e-2)


def test_a_key_or_value_that_is_not_seen_is_not_touched_by_the_answer():
    query, sinks = torch.ones(1, 4, 1, W), SimpleNamespace(sinks=torch.zeros(4))
    key, value = torch.ones(1, 2, 3, W), torch.ones(1, 2, 3, V)
    seen = torch.tensor([True, False, True]).view(1, 1, 1, 3)
    expected = sink_attention(sinks, query, key, value, seen, scaling=0.1)[0]
    key[:, :, 1] = 1e30
    assert torch.equal(sink_attention(sinks, query, key, value, seen, scaling=0.1)[0], expected)


def test_transformers_knows_it_by_its_name():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    assert ALL_ATTENTION_FUNCTIONS[SINK_ATTENTION] is sink_attention
