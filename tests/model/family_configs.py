"""Tiny random checkpoints of every family, made by transformers itself, and what sets their configs apart."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

VOCABULARY = 256
EXPERTS = 8

# Each config takes of these what it knows.
_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "top_k_experts": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "first_k_dense_replace": 0,
    "num_dense_layers": 0,
    "decoder_sparse_step": 1,
    "moe_layer_start_index": 0,
    "moe_layer_interval": 1,
    "moe_layer_end_index": -1,
    "mlp_only_layers": [],
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_heads": 2,
    "linear_head_dim": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 1,
    "use_mamba_kernels": False,
    "sliding_window": 12,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_LINEAR_AND_FULL = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "linear_attention", "full_attention"]}
_SLIDING_AND_FULL = {"layer_types": ["sliding_attention", "full_attention"]}
_LATENT = {"num_key_value_heads": 4}
_DENSE_FIRST = {"first_k_dense_replace": 1, "num_hidden_layers": 3}
_UNSET = object()

SPECIAL: dict[str, dict[str, Any]] = {
    "afmoe": _SLIDING_AND_FULL,
    "aria_text": {},
    "bailing_hybrid": _LINEAR_AND_FULL | _LATENT,
    "cohere2_moe": _SLIDING_AND_FULL,
    "deepseek_v2": _LATENT | _DENSE_FIRST | {"topk_method": "greedy"},
    "deepseek_v3": _LATENT | _DENSE_FIRST,
    "dots1": _SLIDING_AND_FULL,
    "ernie4_5_moe": {},
    "exaone_moe": _SLIDING_AND_FULL,
    "flex_olmo": {},
    "gemma4_text": _SLIDING_AND_FULL
    | {"enable_moe_block": True, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    "glm4_moe": {},
    "glm4_moe_lite": _LATENT | {"head_dim": _UNSET},
    "gpt_oss": _SLIDING_AND_FULL,
    "granitemoe": {},
    "granitemoe_swa": _SLIDING_AND_FULL,
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 16},
    "granitemoeshared": {},
    "hunyuan_v1_moe": {"moe_topk": [2, 2]},
    "hy_v3": _DENSE_FIRST,
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_dt_rank": 8,
        "mamba_expand": 2,
    },
    "kimi_linear": _LINEAR_AND_FULL | _LATENT,
    "laguna": _SLIDING_AND_FULL,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {
        "head_dim": 8,
        "zero_expert_num": 4,
        "expert_ffn_hidden_size": 32,
        "ffn_hidden_size": 96,
        "num_layers": 2,
        "moe_topk": 3,
        "num_key_value_heads": 4,
    },
    "mellum": _SLIDING_AND_FULL,
    "mimo_v2_flash": _SLIDING_AND_FULL,
    "minimax_m2": {},
    "mixtral": {"moe_intermediate_size": _UNSET},
    "nemotron_h": {"num_hidden_layers": 3, "layers_block_type": ["mamba", "attention", "moe"]},
    "olmoe": {},
    "phimoe": {},
    "qwen2_moe": _SLIDING_AND_FULL | {"use_sliding_window": True, "max_window_layers": 0},
    "qwen3_5_moe_text": _LINEAR_AND_FULL,
    "qwen3_moe": {"use_sliding_window": True, "mlp_only_layers": [0], "num_hidden_layers": 3},
    "qwen3_next": _LINEAR_AND_FULL,
    "solar_open": {},
}


def family_config(family: str, **changes: Any) -> Any:
    kind = CONFIG_MAPPING[family]
    known = set(inspect.signature(kind.__init__).parameters) | set(kind.attribute_map)
    known |= {name for base in kind.__mro__ for name in inspect.get_annotations(base)}
    settings = {name: value for name, value in _COMMON.items() if name in known} | SPECIAL[family] | changes
    return kind(**{name: value for name, value in settings.items() if value is not _UNSET})


def family_model(family: str, **changes: Any) -> Any:
    """A seeded random model; routers are decided enough that no two experts nearly tie."""
    torch.manual_seed(7)
    config = family_config(family, **changes)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 or "bias" in name:
                parameter.normal_(0, 0.08)
            if "router" in name or ".gate.weight" in name or "classifier" in name:
                parameter.normal_(0, 1.0)
    if model.can_generate():
        model.generation_config.eos_token_id = None
    return model


def save_family(family: str, folder: Path, shard: str = "50GB") -> Any:
    """Saves the model as a standard checkpoint, and returns it: the reference."""
    model = family_model(family)
    model.save_pretrained(folder, max_shard_size=shard)
    return model
