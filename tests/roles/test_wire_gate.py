"""Which encodings a loaded model bears: a model that bears int8, one that does not, and what cannot be measured."""

from __future__ import annotations

import math
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvasir_node.base.errors import DataError
from kvasir_node.base.snapshot import WireSnapshot
from kvasir_node.model.checkpoint import open_checkpoint
from kvasir_node.model.experts import ExpertShard, load_from_checkpoint
from kvasir_node.model.trunk import LocalDispatch, Trunk, load_trunk
from kvasir_node.roles.library import demo_folder
from kvasir_node.roles.wire_gate import (
    GREEDY_TOKENS,
    LOGIT_ERROR_MAX,
    PROBE_MAX_S,
    PROBES,
    TOKENS_MIN,
    Measured,
    measure_wire,
    refusal_of,
)
from kvasir_node.wire.tensors import Encoding

ALL = PROBES * GREEDY_TOKENS


def load(path: Path, dtype: torch.dtype = torch.float32) -> tuple[Trunk, ExpertShard]:
    checkpoint = open_checkpoint(path)
    shard = load_from_checkpoint(checkpoint, checkpoint.experts, dtype)
    return load_trunk(checkpoint.path, dtype, "cpu", LocalDispatch(shard)), shard


def model_with_outlier(folder: Path, size: float, context: int = 64) -> Path:
    """A random model; the first column of the rows that experts get is `size` times larger, and their weights for it
    and the router's as much smaller: whatever `size` is, it is the same function."""
    torch.manual_seed(7)
    config = transformers.Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        max_position_embeddings=context,
        tie_word_embeddings=False,
    )
    model = transformers.Qwen3MoeForCausalLM(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.08)
        for layer in model.model.layers:
            layer.mlp.experts.down_proj *= 0.3
            layer.post_attention_layernorm.weight[0] *= size
            layer.mlp.gate.weight[:, 0] /= size
            layer.mlp.experts.gate_up_proj[..., 0] /= size
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def mild(tmp_path_factory):
    return load(model_with_outlier(tmp_path_factory.mktemp("models") / "mild", 1.0))


@pytest.fixture(scope="module")
def heavy(tmp_path_factory):
    return load(model_with_outlier(tmp_path_factory.mktemp("models") / "heavy", 300.0))


def test_a_model_that_bears_int8_gets_it_and_the_status_says_what_was_measured(mild, caplog):
    trunk, shard = mild
    choice = measure_wire(trunk, shard.compute, "int8")
    assert choice.encoding is Encoding.INT8
    assert choice.refusal == ""
    assert choice.measured is not None
    assert 1e-4 < choice.measured.error < LOGIT_ERROR_MAX
    assert choice.snapshot() == WireSnapshot("int8", "int8", choice.measured.error, ALL, ALL, "")
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_the_same_model_with_a_heavy_column_is_not_sent_in_int8_and_a_warning_has_the_figures(heavy, caplog):
    trunk, shard = heavy
    choice = measure_wire(trunk, shard.compute, "int8")
    assert choice.encoding is Encoding.FLOAT32
    shown = choice.snapshot()
    assert (shown.encoding, shown.asked, shown.tokens) == ("float32", "int8", ALL)
    assert shown.tokens_agreeing < ALL
    assert shown.error is not None
    assert shown.error > 5 * LOGIT_ERROR_MAX
    assert shown.refusal == choice.refusal
    assert f"{shown.tokens_agreeing} of {ALL} greedy tokens" in caplog.text
    assert "rows travel in float32" in caplog.text


def test_bfloat16_has_an_exponent_for_each_value_and_does_not_mind(heavy, mild):
    for trunk, shard in (heavy, mild):
        choice = measure_wire(trunk, shard.compute, "bfloat16")
        assert choice.encoding is Encoding.BFLOAT16
        assert choice.measured is not None
        assert 1e-5 < choice.measured.error < 1e-3


def test_sums_are_rounded_as_rows_are(mild):
    trunk, _ = mild
    generator = torch.Generator().manual_seed(1)
    outputs = torch.randn(8, 64, generator=generator) * torch.tensor([100.0, *[1.0] * 63])

    def compute(_: int, rows: torch.Tensor, pair_row: torch.Tensor, pair_expert: torch.Tensor, weight: torch.Tensor):
        """What comes out is the same whatever the rows are."""
        return torch.zeros_like(rows).index_add_(0, pair_row, outputs[pair_expert] * weight[:, None])

    shown = measure_wire(trunk, compute, "int8").snapshot()
    assert shown.error is not None
    assert shown.error > 0.01


def test_the_demo_model_bears_bfloat16():
    trunk, shard = load(demo_folder())
    assert measure_wire(trunk, shard.compute, "bfloat16").snapshot().tokens_agreeing == ALL


@pytest.mark.parametrize(
    ("dtype", "asked", "encoding"),
    [
        (torch.float32, "compute", Encoding.FLOAT32),
        (torch.bfloat16, "compute", Encoding.BFLOAT16),
        (torch.bfloat16, "bfloat16", Encoding.BFLOAT16),
    ],
)
def test_what_a_model_is_computed_in_needs_no_measurement(dtype, asked, encoding):
    trunk, _ = load(demo_folder(), dtype)
    choice = measure_wire(trunk, None, asked)  # pyright: ignore[reportArgumentType]
    assert choice.snapshot() == WireSnapshot(encoding.name.lower(), asked)


def test_an_expert_that_is_not_here_is_a_refusal(mild):
    trunk, _ = mild

    def compute(*_: Any) -> torch.Tensor:
        raise DataError("expert 3 is damaged")

    choice = measure_wire(trunk, compute, "int8")
    assert choice.encoding is Encoding.FLOAT32
    assert choice.snapshot().refusal == "it could not be measured: expert 3 is damaged"


def test_a_slow_machine_measures_as_much_as_the_time_allows(mild):
    trunk, shard = mild
    each_s = PROBE_MAX_S / 10
    ticks = count(0.0, each_s)
    choice = measure_wire(trunk, shard.compute, "int8", clock=lambda: next(ticks))
    assert choice.encoding is Encoding.FLOAT32
    assert choice.snapshot().tokens == 4 * PROBES  # 11 forwards, of which 7 open
    assert "only 32 tokens" in choice.refusal


def test_the_probes_fit_into_a_small_context(tmp_path):
    trunk, shard = load(model_with_outlier(tmp_path / "short", 1.0, context=20))
    assert measure_wire(trunk, shard.compute, "bfloat16").snapshot().tokens == PROBES * (20 - 7)


@pytest.mark.parametrize("last", [3, 50])
def test_logits_that_are_not_numbers_are_a_refusal_and_no_number_in_the_status(mild, last):
    trunk, shard = mild
    calls = count()

    def compute(*args: Any) -> torch.Tensor:
        return shard.compute(*args) * (math.nan if next(calls) > last else 1.0)

    choice = measure_wire(trunk, compute, "bfloat16")
    assert choice.encoding is Encoding.FLOAT32
    assert choice.snapshot().error is None
    assert "not finite" in choice.refusal


@pytest.mark.parametrize(
    ("measured", "refusal"),
    [
        (Measured(LOGIT_ERROR_MAX, ALL, ALL), ""),
        (Measured(LOGIT_ERROR_MAX * 1.01, ALL, ALL), "logits by more than 1.0%"),
        (Measured(math.nan, 0, 0), "not finite"),
        (Measured(0.0, ALL, ALL - 1), f"{ALL - 1} of {ALL} greedy tokens"),
        (Measured(0.0, TOKENS_MIN, TOKENS_MIN), ""),
        (Measured(0.0, TOKENS_MIN - 1, TOKENS_MIN - 1), f"{TOKENS_MIN} would tell"),
    ],
)
def test_every_token_must_agree_the_logits_nearly_and_enough_must_be_seen(measured, refusal):
    found = refusal_of(measured)
    assert refusal in found
    assert bool(found) == bool(refusal)
