"""A checkpoint on disk, as Hugging Face or GGUF has it: what it holds, where its bytes lie, that nothing is missing.

It does not load weights, does not know how a model computes, and never guesses: a family, a layout or a setting
that is not in its tables is refused by name. The folder is not trusted; only headers and JSON are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvasir_node.base.errors import DataError, UsageError
from kvasir_node.base.ids import ExpertId
from kvasir_node.model.architecture import Architecture, architecture_of
from kvasir_node.model.expert_parts import check_parts, in_order
from kvasir_node.model.folder import read_experts, read_note
from kvasir_node.model.gguf_checkpoint import config_of, find_gguf, split_gguf
from kvasir_node.model.gguf_file import GgufHeader, read_gguf_header
from kvasir_node.model.maths import ExpertMaths
from kvasir_node.model.tensor_file import (
    TensorRange,
    TensorSpec,
    expert_file,
    expert_file_bytes,
    parse_expert_file,
    parse_json_object,
    read_header,
)

__all__ = [
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
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

CONFIG_FILE = "config.json"
SIDE_FILES = (
    CONFIG_FILE,
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
class Checkpoint:
    """An indexed checkpoint. `layers` are the decoder layers that have routed experts; `trunk` is all the rest.

    D = hidden_size is the width of the rows that experts get, I = expert_hidden_size. An expert's parts are named,
    ordered and shaped as expert_parts.py says.
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
        return {part: tensor.spec for part, tensor in ranges.items()}


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Indexes the checkpoint in a folder, without reading weights; one that was fetched (folder.py) may lack experts.

    Raises UsageError when there is no such folder, DataError (naming what is wrong) for a family, layout or
    quantisation this version cannot compute, a missing or misshapen expert, or a hostile file.
    """
    folder = Path(path).absolute()
    if not folder.is_dir():
        raise UsageError(f"no checkpoint folder at {folder}", param="model")
    header = _gguf_header(folder)
    config = config_of(header) if header is not None and not (folder / CONFIG_FILE).exists() else read_config(folder)
    architecture = architecture_of(config)
    if header is None:
        experts, trunk = _split(_all_tensors(folder), architecture)
    else:
        experts, trunk = split_gguf(
            header,
            architecture.layers,
            architecture.experts_per_layer,
            architecture.config.num_hidden_layers,
            architecture.keys.trunk_names(),
        )
    note = read_note(folder)
    if note is not None:
        here = read_experts([(layer, _inside(folder, name)) for layer, name in note.layer_files.items()])
        experts = {expert: {name: parts[name] for name in in_order(parts)} for expert, parts in here.items()}
    _check_experts(experts, architecture, may_lack=note is not None)
    return Checkpoint(
        path=folder,
        config=config,
        family=architecture.family,
        maths=architecture.maths,
        layers=architecture.layers,
        experts_per_layer=architecture.experts_per_layer,
        chosen_per_row=architecture.chosen_per_row,
        hidden_size=architecture.hidden_size,
        expert_hidden_size=architecture.expert_hidden_size,
        experts=experts,
        trunk=trunk,
        side_files=tuple(name for name in SIDE_FILES if _inside(folder, name).is_file()),
    )


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint folder, bounded. Raises DataError."""
    return _read_json(folder, CONFIG_FILE, CONFIG_BYTES_MAX)


def read_weight_map(folder: Path) -> dict[str, str]:
    """The file of each tensor, as the index of a checkpoint in several files says. Raises DataError."""
    weight_map = _read_json(folder, INDEX_FILE, INDEX_BYTES_MAX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise DataError(f"{INDEX_FILE} of {folder.name} has no weight_map of key to file name")
    return weight_map


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


def _gguf_header(folder: Path) -> GgufHeader | None:
    if any((folder / name).exists() for name in (SINGLE_FILE, INDEX_FILE)):
        return None
    file = find_gguf(folder)
    return None if file is None else read_gguf_header(_inside(folder, file.name))


def _all_tensors(folder: Path) -> dict[str, TensorRange]:
    if (folder / SINGLE_FILE).exists():
        return read_header(_inside(folder, SINGLE_FILE))
    if not (folder / INDEX_FILE).exists():
        raise DataError(f"the checkpoint {folder.name} has no {SINGLE_FILE}, no {INDEX_FILE} and no GGUF file")
    weight_map = read_weight_map(folder)
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
    tensors: Mapping[str, TensorRange], architecture: Architecture
) -> tuple[dict[ExpertId, dict[str, TensorRange]], dict[str, TensorRange]]:
    found: dict[ExpertId, dict[str, TensorRange]] = {}
    trunk: dict[str, TensorRange] = {}
    for key, tensor in tensors.items():
        if architecture.keys.is_ignored(key):
            continue
        location = architecture.keys.locate(key)
        if location is None:
            trunk[key] = tensor
            continue
        count = architecture.experts_per_layer
        pieces = [tensor] if location.expert is not None else _cut(key, tensor, count)
        for index, piece in enumerate(pieces, start=location.expert or 0):
            parts = found.setdefault(ExpertId(location.layer, index), {})
            if location.part in parts:
                raise DataError(f"expert {index} of layer {location.layer} has two tensors for its {location.part}")
            parts[location.part] = piece
    return {expert: {name: parts[name] for name in in_order(parts)} for expert, parts in found.items()}, trunk


def _cut(key: str, tensor: TensorRange, experts: int) -> list[TensorRange]:
    """The runs of bytes of each expert in a tensor of all, whose first dimension counts them."""
    if len(tensor.shape) < 2 or tensor.shape[0] != experts:
        raise DataError(f"{key[:100]!r} has the shape {list(tensor.shape)}, expected {experts} experts first")
    nbytes = tensor.nbytes // experts
    shape = tensor.shape[1:]
    return [replace(tensor, offset=tensor.offset + n * nbytes, nbytes=nbytes, shape=shape) for n in range(experts)]


def _check_experts(
    experts: Mapping[ExpertId, Mapping[str, TensorRange]], architecture: Architecture, *, may_lack: bool
) -> None:
    expected = {
        ExpertId(layer, index) for layer in architecture.layers for index in range(architecture.experts_per_layer)
    }
    for expert in sorted(experts.keys() - expected if may_lack else experts.keys() ^ expected):
        state = "is missing" if expert in expected else "is not foreseen by config.json"
        raise DataError(f"expert {expert.index} of layer {expert.layer} {state}")
    checked: set[tuple[tuple[str, TensorSpec], ...]] = set()  # most experts look the same
    for expert, parts in experts.items():
        specs = tuple((part, tensor.spec) for part, tensor in parts.items())
        if specs in checked:
            continue
        try:
            check_parts(architecture.maths, dict(specs), architecture.hidden_size, architecture.expert_hidden_size)
        except DataError as error:
            raise DataError(f"expert {expert.index} of layer {expert.layer}: {error}") from error
        checked.add(specs)
