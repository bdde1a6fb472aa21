"""The spec of an expert: what it may say, and that it computes what transformers' own modules do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.activations import ACT2FN
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextExperts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.inkling2.modeling_inkling2 import Inkling2Experts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from kvasir_node.base.errors import DataError
from kvasir_node.base.ids import ExpertId
from kvasir_node.model.architecture import maths_of
from kvasir_node.model.experts import ExpertShard
from kvasir_node.model.maths import ACTIVATIONS, ExpertMaths

D, INNER, E = 16, 12, 4
CONFIG = SimpleNamespace(
    hidden_size=D,
    intermediate_size=INNER,
    moe_intermediate_size=INNER,
    num_experts=E,
    num_local_experts=E,
    n_routed_experts=E,
    moe_latent_size=None,
    hidden_act="silu",
    hidden_activation="gelu_pytorch_tanh",
    mlp_hidden_act="relu2",
    mlp_bias=False,
    swiglu_alpha=1.702,
    swiglu_limit=0.5,
    _experts_implementation="eager",
)
MODULES = {
    GptOssExperts: ExpertMaths("silu", "gptoss", 0.5, 1.702, bias=True, transposed=True, interleaved=True),
    DeepseekV4Experts: ExpertMaths("silu", "clamped", 0.5),
    Gemma4TextExperts: ExpertMaths("gelu_tanh"),
    NemotronHExperts: ExpertMaths("relu2", "none"),
}


def parts_of(module: Any, index: int) -> dict[str, torch.Tensor]:
    names = {name: name.replace("_proj", "") for name, _ in module.named_parameters()}
    return {ours: getattr(module, name).data[index] for name, ours in names.items()}


@pytest.mark.parametrize("kind", MODULES)
def test_a_module_of_transformers_is_described_and_computed(kind):
    torch.manual_seed(3)
    module = kind(CONFIG)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, 0, 0.5)
    maths = maths_of(module)
    assert maths == MODULES[kind]
    shard = ExpertShard(maths, D, INNER)
    for index in range(E):
        shard.add(ExpertId(0, index), parts_of(module, index))
    rows, chosen, weights = torch.randn(9, D), torch.randint(0, E, (9, 1)), torch.rand(9, 1)
    with torch.no_grad():
        expected = module(rows, chosen, weights)
    pairs = (torch.arange(9), chosen.flatten(), weights.flatten())
    torch.testing.assert_close(shard.compute(0, rows, *pairs), expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(shard.compute_naive(0, rows, *pairs), expected, rtol=0, atol=2e-5)


def test_a_gate_or_an_activation_that_has_no_word_is_refused_by_name():
    with pytest.raises(DataError, match="Inkling2Experts has a gate of its own kind"):
        maths_of(_as(Inkling2Experts))
    with pytest.raises(DataError, match="Gemma4TextExperts has a norm after each expert"):
        maths_of(_as(Gemma4TextExperts, has_post_expert_norm=True))
    with pytest.raises(DataError, match="Gemma4TextExperts has the activation Tanh"):
        maths_of(_as(Gemma4TextExperts, act_fn=torch.nn.Tanh()))
    with pytest.raises(DataError, match="the expert module Linear does not say how it computes"):
        maths_of(torch.nn.Linear(1, 1))


def _as(kind: Any, **attributes: Any) -> Any:
    module = kind.__new__(kind)
    torch.nn.Module.__init__(module)
    plain = {"has_gate": True, "has_post_expert_norm": False, "has_bias": False, "is_transposed": False}
    for name, value in (plain | {"is_concatenated": True} | attributes).items():
        setattr(module, name, value)
    return module


@pytest.mark.parametrize("maths", [*MODULES.values(), ExpertMaths(scale_rows=128, scale_columns=128)])
def test_maths_go_through_plain_values(maths):
    value = maths.to_dict()
    assert all(item is None or type(item) in (bool, int, float, str) for item in value.values())
    assert ExpertMaths.from_dict(value) == maths


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"activation": "tanh"}, "the activation is 'tanh'"),
        ({"gate": "swish"}, "the gate is 'swish'"),
        ({"limit": 7.0}, "the limit is 7.0"),
        ({"gate": "clamped"}, "the limit is None"),
        ({"gate": "clamped", "limit": float("nan")}, "the limit is nan"),
        ({"gate": "clamped", "limit": -1.0}, "the limit is -1.0"),
        ({"gate": "clamped", "limit": 7}, "the limit is 7"),
        ({"gate": "gptoss", "limit": 7.0}, "alpha is None"),
        ({"gate": "gptoss", "limit": 7.0, "alpha": 1.7, "activation": "gelu"}, "has the activation silu"),
        ({"alpha": 1.0}, "alpha is 1.0"),
        ({"bias": 1}, "must be true or false"),
        ({"transposed": None}, "must be true or false"),
        ({"scale_rows": 128}, "fp8 scales of 128 × 0"),
        ({"scale_rows": 1 << 20, "scale_columns": 1}, "fp8 scales"),
        ({"more": 1}, "unknown or missing in their maths: more"),
    ],
)
def test_other_maths_are_refused(changes, reason):
    with pytest.raises(DataError, match=reason):
        ExpertMaths.from_dict(ExpertMaths().to_dict() | changes)


def test_activations_are_those_of_transformers():
    states = torch.linspace(-8, 8, 1001)
    theirs = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu", "relu2": "relu2"}
    assert set(theirs) == set(ACTIVATIONS)
    for name, other in theirs.items():
        torch.testing.assert_close(ACTIVATIONS[name](states), ACT2FN[other](states), rtol=0, atol=1e-6)
