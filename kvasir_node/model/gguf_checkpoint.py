"""A GGUF file as a checkpoint: config and trunk in transformers' words, experts in parts.

It does not know how a header is read, nor how bytes are decoded. Only architectures whose converter (llama.cpp's
`convert_hf_to_gguf.py`) renames tensors without changing their values are here; others permute or shift some of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf

from kvasir_node.base.errors import DataError
from kvasir_node.base.ids import ExpertId
from kvasir_node.model.expert_parts import part_name
from kvasir_node.model.gguf_file import GgufHeader, GgufTensor
from kvasir_node.model.tensor_file import TensorRange

ARCHITECTURES: Mapping[str, str] = {"qwen3moe": "qwen3_moe"}  # GGUF's name -> model_type
ENCODED = ".gguf_"
"""Between a trunk tensor's name and the format of its bytes, in an index; such a tensor is decoded when loaded."""

_MATRICES = {"ffn_gate_exps": "gate", "ffn_up_exps": "up", "ffn_down_exps": "down"}


def find_gguf(folder: Path) -> Path | None:
    """The GGUF file of a folder that has no safetensors; None when there is none. Raises DataError for several."""
    files = sorted(folder.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(file.name[:60] for file in files[:3])
        raise DataError(f"{folder.name} has several GGUF files ({names}); a folder must have one, and not be split")
    return files[0] if files else None


def config_of(header: GgufHeader) -> dict[str, Any]:
    """What config.json would say. Raises DataError for an architecture or a setting that is not known here."""
    name = header.metadata.get("general.architecture")
    family = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if not isinstance(name, str) or family is None:
        supported = ", ".join(ARCHITECTURES)
        raise DataError(f"the GGUF architecture {str(name)[:40]!r} is not supported; supported: {supported}")
    if header.metadata.get(f"{name}.rope.scaling.type", "none") != "none":
        raise DataError(
            f"{name} in GGUF with scaled rotary embeddings is not supported without a config.json beside it"
        )
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise DataError(f"the {name} in GGUF has no token_embd.weight")

    def take(key: str, kind: type = int) -> Any:
        value = header.metadata.get(f"{name}.{key}")
        if type(value) is not kind:
            raise DataError(f"the GGUF metadata {name}.{key} must be a {kind.__name__}; got {str(value)[:40]}")
        return value

    return {
        "model_type": family,
        "vocab_size": embedding.shape[0],
        "hidden_size": take("embedding_length"),
        "num_hidden_layers": take("block_count"),
        "num_attention_heads": take("attention.head_count"),
        "num_key_value_heads": take("attention.head_count_kv"),
        "max_position_embeddings": take("context_length"),
        "rms_norm_eps": take("attention.layer_norm_rms_epsilon", float),
        "rope_parameters": {"rope_type": "default", "rope_theta": take("rope.freq_base", float)},
        "num_experts": take("expert_count"),
        "num_experts_per_tok": take("expert_used_count"),
        "moe_intermediate_size": take("expert_feed_forward_length"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "head_dim": take("attention.key_length"),
        "norm_topk_prob": True,  # GGUF does not say; llama.cpp computes every qwen3moe so
    }


def split_gguf(
    header: GgufHeader, layers: Sequence[int], experts: int, layer_count: int, names: Sequence[str]
) -> tuple[dict[ExpertId, dict[str, TensorRange]], dict[str, TensorRange]]:
    """Experts' parts, and the trunk under transformers' `names`. Raises DataError for a tensor that is missing, and for
    one that nothing uses: it would change answers."""
    left = dict(header.tensors)
    found: dict[ExpertId, dict[str, TensorRange]] = {}
    for layer in layers:
        for name, matrix in _MATRICES.items():
            tensor = _take(left, f"blk.{layer}.{name}.weight")
            for index, piece in enumerate(_cut(tensor, experts)):
                found.setdefault(ExpertId(layer, index), {})[part_name(matrix, tensor.format)] = piece
    architecture = header.metadata["general.architecture"]
    kind = next(number for number, text in gguf.MODEL_ARCH_NAMES.items() if text == architecture)
    name_map = gguf.get_tensor_name_map(kind, layer_count)
    trunk: dict[str, TensorRange] = {}
    for name in names:
        if name == "lm_head.weight" and "output.weight" not in header.tensors:
            continue  # tied
        theirs = name_map.get_name(name, try_suffixes=(".weight", ".bias"))
        if theirs is None:
            raise DataError(f"{architecture} in GGUF has no name for the trunk's {name[:100]!r}")
        tensor = _take(left, theirs)
        trunk[name + (ENCODED + tensor.format if tensor.format else "")] = tensor.data
    if left:
        raise DataError(f"the GGUF file has tensors that nothing here uses: {', '.join(sorted(left))[:200]}")
    return found, trunk


def _take(tensors: dict[str, GgufTensor], name: str) -> GgufTensor:
    tensor = tensors.pop(name, None)
    if tensor is None:
        raise DataError(f"the GGUF file has no tensor {name!r}")
    return tensor


def _cut(tensor: GgufTensor, experts: int) -> list[TensorRange]:
    data = tensor.data
    if len(data.shape) != 3 or data.shape[0] != experts:
        raise DataError(
            f"a GGUF tensor of experts has the shape {list(tensor.shape)}, expected {experts} experts first"
        )
    nbytes = data.nbytes // experts
    return [replace(data, offset=data.offset + n * nbytes, nbytes=nbytes, shape=data.shape[1:]) for n in range(experts)]
