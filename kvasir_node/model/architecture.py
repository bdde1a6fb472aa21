"""What transformers makes of a config: the model class, and how its routed experts compute and are stored.

The model is built on the meta device, where it has shapes but no memory, and its expert modules are read. Nothing is
guessed: a family that was not tested, an expert module with a gate, an activation or an option that `maths` does not
describe is refused by name. It does not know files or weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from torch.nn import functional
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from kvasir_node.base.errors import DataError
from kvasir_node.model.expert_keys import ExpertKeys
from kvasir_node.model.families import FAMILIES, REFUSED, Family
from kvasir_node.model.lean_transformers import compiler_left_out
from kvasir_node.model.maths import ExpertMaths

LAYERS_MAX = 1024
EXPERTS_PER_LAYER_MAX = 4096
WIDTH_MAX = 1 << 20
VOCABULARY_MAX = 1 << 24
CONTEXT_MAX = 1 << 31
CONFIG_ERRORS = (
    OSError,
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    RuntimeError,
    ArithmeticError,
    StrictDataclassError,
)
"""What transformers raises for configs that do not add up."""

_LAYER = re.compile(r"(?:^|\.)layers\.(0|[1-9][0-9]{0,5})\.(?:.*\.)?experts\Z")
_ACTIVATIONS: Mapping[str, str] = {  # by the name of transformers' class
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "ReLU": "relu",
    "ReLUSquaredActivation": "relu2",
}
_GATES: Mapping[str, str] = {  # by the qualified name of the module's `_apply_gate`
    "_default_apply_gate": "glu",
    "GptOssExperts._apply_gate": "gptoss",
    "DeepseekV4Experts._apply_gate": "clamped",
    "HYV4Experts._apply_gate": "clamped",
}
_UNDECORATED = ("LongcatFlashExperts",)  # plain, yet without the attributes that say so
_CHOSEN_KEYS = ("num_experts_per_tok", "top_k_experts", "moe_topk")


def is_experts(name: str, module: nn.Module) -> bool:
    """Whether a model's module holds the routed experts of a layer."""
    return name.rpartition(".")[2] == "experts" and isinstance(getattr(module, "down_proj", None), torch.Tensor)


def layer_of(module_name: str) -> int:
    """The decoder layer of an experts module. Raises DataError when its name tells none."""
    match = _LAYER.search(module_name)
    if match is None:
        raise DataError(f"the experts {module_name[:100]!r} are in no numbered layer")
    return int(match[1])


def identity_experts(module: nn.Module) -> int:
    """How many ids beyond the routed experts stand for the row itself (LongCat's zero-computation experts)."""
    return int(getattr(module, "zero_expert_num", 0) or 0)


@dataclass(frozen=True, slots=True)
class Architecture:
    """A config understood. D = hidden_size is the width of the rows that experts get, I = expert_hidden_size."""

    family: str
    traits: Family
    config: Any  # transformers', of the text model
    model_class: Any
    maths: ExpertMaths
    layers: tuple[int, ...]
    experts_per_layer: int
    chosen_per_row: int
    hidden_size: int
    expert_hidden_size: int
    keys: ExpertKeys


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """Raises DataError, naming what is wrong, for a config that cannot be served."""
    family, traits = _family_of(config)
    scale_rows, scale_columns = _fp8_blocks(family, config)
    parsed, model_class = _parse(family, config)
    model = _on_meta(family, parsed, model_class)
    modules = {name: module for name, module in model.named_modules() if is_experts(name, module)}
    if not modules:
        raise DataError(f"the config of this {family} leaves no layer with routed experts")
    maths, sizes = _common(family, modules)
    experts, hidden_size, expert_hidden_size = sizes
    maths = ExpertMaths.from_dict(maths.to_dict() | {"scale_rows": scale_rows, "scale_columns": scale_columns})
    layers = {name: layer_of(name) for name in modules}
    ignored = {p for m in model.modules() for p in getattr(m, "_keys_to_ignore_on_load_unexpected", None) or ()}
    identities = identity_experts(next(iter(modules.values())))
    return Architecture(
        family=family,
        traits=traits,
        config=parsed,
        model_class=model_class,
        maths=maths,
        layers=tuple(sorted(layers.values())),
        experts_per_layer=experts,
        chosen_per_row=_chosen(parsed, experts + identities),
        hidden_size=hidden_size,
        expert_hidden_size=expert_hidden_size,
        keys=ExpertKeys(family, model, layers, range(experts, experts + identities), sorted(ignored)),
    )


def _family_of(config: Mapping[str, Any]) -> tuple[str, Family]:
    name = config.get("model_type")
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if isinstance(name, str) and family is not None:
        return name, family
    reason = REFUSED.get(name, "it was not tested") if isinstance(name, str) else "the config names none"
    raise DataError(
        f"model family {str(name)[:60]!r} is not supported: {reason}; supported: {', '.join(sorted(FAMILIES))}"
    )


def _fp8_blocks(family: str, config: Mapping[str, Any]) -> tuple[int, int]:
    """The block of one fp8 scale, (0, 0) for other checkpoints. Raises DataError for quantisations we cannot decode."""
    settings = config.get("quantization_config")
    method = settings.get("quant_method") if isinstance(settings, dict) else settings
    match method:
        case None | "mxfp4":  # MXFP4 parts are known by their names
            return 0, 0
        case "fp8":
            block = settings.get("weight_block_size") if isinstance(settings, dict) else None
            if isinstance(block, list | tuple) and len(block) == 2 and all(type(n) is int and n > 0 for n in block):
                return block[0], block[1]
            raise DataError(f"{family}: fp8 without weight_block_size cannot be decoded; got {str(block)[:40]}")
    raise DataError(f"{family}: checkpoints quantised by {str(method)[:40]!r} are not supported; fp8 and mxfp4 are")


def _parse(family: str, config: Mapping[str, Any]) -> tuple[Any, Any]:
    """transformers' config of the text model, and its class. `auto_map` and the like are never followed."""
    plain = {key: value for key, value in config.items() if key not in ("quantization_config", "auto_map")}
    try:
        kind = CONFIG_MAPPING[family]
        parsed = kind.from_dict(kind._decode_special_floats(plain))  # infinities, which JSON has no word for
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(parsed)]
        parsed = parsed.get_text_config()
        layer_count = parsed.num_hidden_layers
    except CONFIG_ERRORS as error:
        raise DataError(f"config.json of this {family}: {str(error)[:300]}") from error
    _check_numbers(family, parsed)
    if type(layer_count) is not int or not 1 <= layer_count <= LAYERS_MAX:
        raise DataError(f"config.json: {family} with {str(layer_count)[:40]} layers; 1 to {LAYERS_MAX} are read")
    return parsed, model_class


def _check_numbers(family: str, config: Any) -> None:
    """What transformers takes as it comes, and no model can compute with."""
    for name, most in (("vocab_size", VOCABULARY_MAX), ("max_position_embeddings", CONTEXT_MAX)):
        value = getattr(config, name, None)
        if value is not None and (type(value) is not int or not 1 <= value <= most):
            raise DataError(f"config.json: {family} with {name} {str(value)[:40]}; 1 to {most} are read")
    rope = getattr(config, "rope_parameters", None)
    factors = {"rms_norm_eps": getattr(config, "rms_norm_eps", None)}
    if isinstance(rope, dict) and "rope_theta" in rope:
        factors["rope_theta"] = rope["rope_theta"]
    for name, value in factors.items():
        if value is not None and not (isinstance(value, int | float) and 0 < value < math.inf):
            raise DataError(f"config.json: {family} with {name} {str(value)[:40]}; expected a number above 0")


def _on_meta(family: str, config: Any, model_class: Any) -> nn.Module:
    try:
        with compiler_left_out(), torch.device("meta"):
            return model_class(config)
    except CONFIG_ERRORS as error:
        raise DataError(f"building a {family} by its config.json: {str(error)[:300]}") from error


def _common(family: str, modules: Mapping[str, nn.Module]) -> tuple[ExpertMaths, tuple[int, int, int]]:
    """Maths, and (experts, D, I), which all layers must share."""
    found = {name: (maths_of(module), _sizes(module)) for name, module in modules.items()}
    first_name, first = next(iter(found.items()))
    odd = next((name for name, each in found.items() if each != first), None)
    if odd is not None:
        raise DataError(
            f"{family}: the experts of {odd} and {first_name} differ in size or maths; that is not supported"
        )
    experts, hidden_size, expert_hidden_size = first[1]
    if not 1 <= experts <= EXPERTS_PER_LAYER_MAX:
        raise DataError(f"config.json: {experts} experts in a layer; 1 to {EXPERTS_PER_LAYER_MAX} are read")
    for width in (hidden_size, expert_hidden_size):
        if not 1 <= width <= WIDTH_MAX:
            raise DataError(f"config.json: experts of width {width}; 1 to {WIDTH_MAX} are read")
    return first


def _sizes(module: Any) -> tuple[int, int, int]:
    experts, rows, columns = module.down_proj.shape
    return (experts, columns, rows) if getattr(module, "is_transposed", False) else (experts, rows, columns)


def maths_of(module: Any) -> ExpertMaths:
    """How transformers' experts module computes. Raises DataError that names what ExpertMaths has no word for."""
    kind = type(module).__name__
    if kind in _UNDECORATED:
        return ExpertMaths(activation=_activation(kind, module.act_fn))
    if not hasattr(module, "has_gate"):
        raise DataError(f"the expert module {kind} does not say how it computes")
    if module.has_post_expert_norm:
        raise DataError(f"the expert module {kind} has a norm after each expert, which is not supported")
    gate = "none" if not module.has_gate else _GATES.get(type(module)._apply_gate.__qualname__)
    if gate is None:
        raise DataError(f"the expert module {kind} has a gate of its own kind, which is not supported")
    limit = getattr(module, "limit", getattr(module, "swiglu_limit", None)) if gate in ("clamped", "gptoss") else None
    if gate == "gptoss" or getattr(module, "act_fn", None) is None:
        activation = "silu"  # what the classes in _GATES without an `act_fn` have written out
    else:
        activation = _activation(kind, module.act_fn)
    return ExpertMaths(
        activation=activation,
        gate=gate,
        limit=None if limit is None else float(limit),
        alpha=float(module.alpha) if gate == "gptoss" else None,
        bias=bool(module.has_bias),
        transposed=bool(module.is_transposed),
        interleaved=not module.is_concatenated,
    )


def _activation(kind: str, activation: Any) -> str:
    if activation is functional.silu:
        return "silu"
    name = _ACTIVATIONS.get(type(activation).__name__)
    if name is None:
        raise DataError(
            f"the expert module {kind} has the activation {type(activation).__name__}, which is not supported"
        )
    return name


def _chosen(config: Any, most: int) -> int:
    value = next((value for key in _CHOSEN_KEYS if (value := getattr(config, key, None)) is not None), None)
    if isinstance(value, list) and value and value.count(value[0]) == len(value):
        value = value[0]
    if type(value) is not int or not 1 <= value <= most:
        raise DataError(f"config.json: experts chosen per token must be from 1 to {most}; got {str(value)[:40]}")
    return value
