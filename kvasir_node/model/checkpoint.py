"""A Hugging Face checkpoint on disk: what it holds, where each expert's bytes lie, and that nothing is missing.

It does not load weights, does not know how a model computes, and never guesses: a family, a layout or a setting
that is not in its tables is refused by name. The folder is not trusted; only headers and JSON are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvasir_node.base.errors import DataError, UsageError
from kvasir_node.base.ids import ExpertId
from kvasir_node.model.folder import read_experts, read_note
from kvasir_node.model.tensor_file import (
    EXPERT_DTYPES,
    PARTS,
    TensorRange,
    TensorSpec,
    expert_file,
    expert_file_bytes,
    parse_expert_file,
    parse_json_object,
    read_header,
)

__all__ = [
    "PARTS",
    "Checkpoint",
    "ExpertMaths",
    "TensorRange",
    "TensorSpec",
    "expert_file",
    "expert_file_bytes",
    "open_checkpoint",
    "parse_expert_file",
]

CONFIG_BYTES_MAX = 4 * 1024 * 1024
INDEX_BYTES_MAX = 100_000_000
SHARDS_MAX = 4096
LAYERS_MAX = 1024
EXPERTS_PER_LAYER_MAX = 4096
WIDTH_MAX = 1 << 20

SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)


@dataclass(frozen=True, slots=True)
class ExpertMaths:
    """How an expert computes: down(activation(gate(x)) * up(x)), each a bias-free matrix [out, in].

    Goes into the manifest, so that a worker needs no model code to serve an expert.
    """

    activation: str = "silu"
    form: str = "glu"

    def to_dict(self) -> dict[str, str]:
        return {"activation": self.activation, "form": self.form}

    @staticmethod
    def from_dict(value: Mapping[str, Any]) -> ExpertMaths:
        """Raises DataError for anything but the maths that experts.py knows."""
        if dict(value) != {"activation": "silu", "form": "glu"}:
            raise DataError(f"experts with the maths {str(dict(value))[:200]} cannot be computed by this version")
        return ExpertMaths()


@dataclass(frozen=True, slots=True)
class _Family:
    expert_key: re.Pattern[str]  # groups: layer, expert, the checkpoint's name of the part
    part_names: Mapping[str, str]  # the checkpoint's name of a part -> ours
    expert_width_key: str  # of the config
    may_mix_dense: bool  # some layers may have a plain MLP, by mlp_only_layers and decoder_sparse_step


_NUMBER = r"(0|[1-9][0-9]{0,5})"
_QWEN_KEY = re.compile(rf"model\.layers\.{_NUMBER}\.mlp\.experts\.{_NUMBER}\.(gate_proj|up_proj|down_proj)\.weight\Z")
_MIXTRAL_KEY = re.compile(rf"model\.layers\.{_NUMBER}\.block_sparse_moe\.experts\.{_NUMBER}\.(w1|w2|w3)\.weight\Z")
_QWEN_PARTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
_MIXTRAL_PARTS = {"w1": "gate", "w3": "up", "w2": "down"}
_FAMILIES: Mapping[str, _Family] = {
    "qwen3_moe": _Family(_QWEN_KEY, _QWEN_PARTS, "moe_intermediate_size", True),
    "qwen2_moe": _Family(_QWEN_KEY, _QWEN_PARTS, "moe_intermediate_size", True),
    "olmoe": _Family(_QWEN_KEY, _QWEN_PARTS, "intermediate_size", False),
    "mixtral": _Family(_MIXTRAL_KEY, _MIXTRAL_PARTS, "intermediate_size", False),
}
FAMILIES = tuple(_FAMILIES)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An indexed checkpoint. `layers` are the decoder layers that have routed experts; `trunk` is all the rest.

    D = hidden_size, I = expert_hidden_size: gate and up are [I, D], down is [D, I].
    """

    path: Path
    config: Mapping[str, Any]
    family: str
    maths: ExpertMaths
    layers: tuple[int, ...]
    experts_per_layer: int
    chosen_per_row: int
    hidden_size: int
    expert_hidden_size: int
    experts: Mapping[ExpertId, Mapping[str, TensorRange]]
    trunk: Mapping[str, TensorRange]
    side_files: tuple[str, ...]

    def parts(self, expert: ExpertId) -> dict[str, TensorSpec]:
        """What `expert_file` and `parse_expert_file` need to know of one expert. Raises DataError if unknown."""
        ranges = self.experts.get(expert)
        if ranges is None:
            raise DataError(f"{self.path.name} has no expert {expert.index} in layer {expert.layer}")
        return {part: ranges[part].spec for part in PARTS}

    @property
    def expert_dtype(self) -> str:
        """The dtype of the first expert's gate, as safetensors spells it."""
        return self.parts(ExpertId(self.layers[0], 0))["gate"][0]


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Indexes the checkpoint in a folder, without reading weights; one that was fetched (folder.py) may lack experts.

    Raises UsageError when there is no such folder, DataError (naming what is wrong) for a family, layout or
    quantisation this version cannot compute, a missing or misshapen expert, or a hostile file.
    """
    folder = Path(path).absolute()
    if not folder.is_dir():
        raise UsageError(f"no checkpoint folder at {folder}", param="model")
    config = read_config(folder)
    family_name, family = _family_of(config)
    tensors = _all_tensors(folder)
    experts, trunk = _split(tensors, family, family_name)
    note = read_note(folder)
    if note is not None:
        experts = read_experts([(layer, _inside(folder, name)) for layer, name in note.layer_files.items()])
    sizes = _Sizes(config, family)
    _check_experts(experts, sizes, may_lack=note is not None)
    return Checkpoint(
        path=folder,
        config=config,
        family=family_name,
        maths=ExpertMaths(),
        layers=sizes.layers,
        experts_per_layer=sizes.experts,
        chosen_per_row=sizes.chosen,
        hidden_size=sizes.hidden,
        expert_hidden_size=sizes.width,
        experts=experts,
        trunk=trunk,
        side_files=tuple(name for name in SIDE_FILES if _inside(folder, name).is_file()),
    )


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint folder, bounded. Raises DataError."""
    return _read_json(folder, "config.json", CONFIG_BYTES_MAX)


def _read_json(folder: Path, name: str, bytes_max: int) -> dict[str, Any]:
    file = _inside(folder, name)
    try:
        with file.open("rb") as stream:
            text = stream.read(bytes_max + 1)
    except OSError as error:
        raise DataError(f"reading {name} of the checkpoint {folder.name}: {error.strerror or error}") from error
    if len(text) > bytes_max:
        raise DataError(f"{name} of the checkpoint {folder.name} is larger than {bytes_max} bytes")
    return parse_json_object(text, name)


def _inside(folder: Path, name: str) -> Path:
    """The file `name` of the folder. A link may only lead inside the folder, or into the blobs of the Hugging Face
    cache it belongs to (models--X/snapshots/REVISION links to models--X/blobs): what is indexed here is offered to
    the swarm, and a downloaded folder must not be able to offer the rest of the disk."""
    if name != Path(name).name or "\\" in name or name in ("", ".", ".."):
        raise DataError(f"the checkpoint names the file {name[:100]!r}, expected a plain file name")
    file = folder / name
    real, home = file.resolve(), folder.resolve()
    is_cache_blob = home.parent.name == "snapshots" and real.parent == home.parent.parent / "blobs"
    if not real.is_relative_to(home) and not is_cache_blob:
        raise DataError(f"{name[:100]!r} of the checkpoint {folder.name} is a link that leads out of the folder")
    return file


def _family_of(config: Mapping[str, Any]) -> tuple[str, _Family]:
    name = config.get("model_type")
    family = _FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise DataError(f"model family {str(name)[:60]!r} is not supported; supported: {', '.join(_FAMILIES)}")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise DataError(f"{name} with the activation {str(activation)[:40]!r} is not supported, only silu")
    if config.get("quantization_config") is not None:
        raise DataError(f"{name}: quantised checkpoints (quantization_config) are not supported")
    return str(name), family


def _all_tensors(folder: Path) -> dict[str, TensorRange]:
    if (folder / "model.safetensors").exists():
        return read_header(_inside(folder, "model.safetensors"))
    if not (folder / "model.safetensors.index.json").exists():
        raise DataError(f"the checkpoint {folder.name} has no model.safetensors and no model.safetensors.index.json")
    weight_map = _read_json(folder, "model.safetensors.index.json", INDEX_BYTES_MAX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise DataError(f"model.safetensors.index.json of {folder.name} has no weight_map of key to file name")
    names = sorted(set(weight_map.values()))
    if len(names) > SHARDS_MAX:
        raise DataError(f"the checkpoint {folder.name} has {len(names)} shards, at most {SHARDS_MAX} are read")
    files = [_inside(folder, name) for name in names]
    tensors: dict[str, TensorRange] = {}
    for file in files:
        for key, tensor in read_header(file).items():
            if weight_map.get(key) != file.name:
                raise DataError(f"{file.name} holds {key[:100]!r}, which the index places in {weight_map.get(key)!r}")
            tensors[key] = tensor
    for key in weight_map:
        if key not in tensors:
            raise DataError(f"the index places {key[:100]!r} in {weight_map[key]!r}, which does not hold it")
    return tensors


def _split(
    tensors: Mapping[str, TensorRange], family: _Family, family_name: str
) -> tuple[dict[ExpertId, dict[str, TensorRange]], dict[str, TensorRange]]:
    experts: dict[ExpertId, dict[str, TensorRange]] = {}
    trunk: dict[str, TensorRange] = {}
    for key, tensor in tensors.items():
        match = family.expert_key.match(key)
        if match is not None:
            expert = ExpertId(int(match[1]), int(match[2]))
            experts.setdefault(expert, {})[family.part_names[match[3]]] = tensor
        elif ".experts." in key:
            raise DataError(f"{family_name}: the layout of the expert tensor {key[:100]!r} is not supported")
        else:
            trunk[key] = tensor
    return experts, trunk


class _Sizes:
    """The sizes a config promises, each checked and bounded before anything is built from it."""

    def __init__(self, config: Mapping[str, Any], family: _Family) -> None:
        self.hidden = _size(config, ("hidden_size",), WIDTH_MAX)
        self.width = _size(config, (family.expert_width_key,), WIDTH_MAX)
        self.experts = _size(config, ("num_experts", "num_local_experts"), EXPERTS_PER_LAYER_MAX)
        self.chosen = _size(config, ("num_experts_per_tok",), self.experts)
        layer_count = _size(config, ("num_hidden_layers",), LAYERS_MAX)
        self.layers = tuple(_sparse_layers(config, layer_count) if family.may_mix_dense else range(layer_count))
        if not self.layers:
            raise DataError("the config leaves no layer with routed experts")


def _size(config: Mapping[str, Any], keys: tuple[str, ...], maximum: int) -> int:
    key = next((key for key in keys if config.get(key) is not None), keys[0])
    value = config.get(key)
    if type(value) is not int or not 1 <= value <= maximum:
        raise DataError(f"config.json: {key} must be a whole number from 1 to {maximum}; got {str(value)[:40]}")
    return value


def _sparse_layers(config: Mapping[str, Any], layer_count: int) -> Iterable[int]:
    """Source: Qwen3MoeDecoderLayer.__init__ of transformers 5.24; Qwen2-MoE is the same."""
    dense = config.get("mlp_only_layers") or []
    step = config.get("decoder_sparse_step", 1)
    if not isinstance(dense, list) or type(step) is not int or step < 1:
        raise DataError("config.json: mlp_only_layers must be a list and decoder_sparse_step a whole number above 0")
    return (layer for layer in range(layer_count) if layer not in dense and (layer + 1) % step == 0)


def _check_experts(experts: Mapping[ExpertId, Mapping[str, TensorRange]], sizes: _Sizes, *, may_lack: bool) -> None:
    gate_shape, down_shape = (sizes.width, sizes.hidden), (sizes.hidden, sizes.width)
    expected = {ExpertId(layer, index) for layer in sizes.layers for index in range(sizes.experts)}
    for expert in sorted(experts.keys() - expected if may_lack else experts.keys() ^ expected):
        state = "is missing" if expert in expected else "is not foreseen by config.json"
        raise DataError(f"expert {expert.index} of layer {expert.layer} {state}")
    for expert, parts in experts.items():
        where = f"expert {expert.index} of layer {expert.layer}"
        for part in PARTS:
            tensor = parts.get(part)
            shape = down_shape if part == "down" else gate_shape
            if tensor is None:
                raise DataError(f"{where} has no {part} matrix")
            if tensor.shape != shape:
                raise DataError(f"{where}: {part} has the shape {list(tensor.shape)}, expected {list(shape)}")
            if tensor.dtype not in EXPERT_DTYPES:
                raise DataError(f"{where}: {part} is {tensor.dtype}; supported: {', '.join(EXPERT_DTYPES)}")
