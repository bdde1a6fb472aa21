"""float32 where it is cheap or asked for by the checkpoint, else what was measured to be quicker."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from model_checkpoints import make_checkpoint

from kvasir_node.model import dtype_choice
from kvasir_node.model.checkpoint import Checkpoint, open_checkpoint
from kvasir_node.model.dtype_choice import EXACT_TRUNK_BYTES, choose_dtype

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> dict[torch.dtype, Checkpoint]:
    folder = tmp_path_factory.mktemp("dtypes")
    dtypes = (torch.float32, torch.bfloat16)
    return {dtype: open_checkpoint(make_checkpoint("qwen3_moe", folder / str(dtype), dtype)) for dtype in dtypes}


def with_large_trunk(checkpoint: Checkpoint) -> Checkpoint:
    key, tensor = next(iter(checkpoint.trunk.items()))
    return replace(checkpoint, trunk={**checkpoint.trunk, key: replace(tensor, nbytes=EXACT_TRUNK_BYTES)})


def test_a_small_trunk_and_a_checkpoint_of_float32_stay_exact(stored):
    assert choose_dtype(stored[torch.bfloat16], CPU) is torch.float32
    assert choose_dtype(with_large_trunk(stored[torch.float32]), CPU) is torch.float32


@pytest.mark.parametrize(("float32_s", "bfloat16_s", "expected"), [(2.0, 1.0, "bfloat16"), (1.0, 2.0, "float32")])
def test_the_quicker_one_is_taken_and_told(stored, caplog, float32_s, bfloat16_s, expected):
    taken_s = {torch.float32: float32_s, torch.bfloat16: bfloat16_s}
    checkpoint = with_large_trunk(stored[torch.bfloat16])
    with caplog.at_level("INFO"):
        chosen = choose_dtype(checkpoint, CPU, lambda maths, hidden, inner, dtype, device: taken_s[dtype])
        assert chosen is getattr(torch, expected)
    assert f"computing in {expected}" in caplog.text


def test_it_is_measured(stored):
    checkpoint = with_large_trunk(stored[torch.bfloat16])
    assert choose_dtype(checkpoint, CPU) in (torch.float32, torch.bfloat16)
    for dtype in (torch.float32, torch.bfloat16):
        assert 0 < dtype_choice.time_of_row(checkpoint.maths, 512, 256, dtype, CPU) < 1
