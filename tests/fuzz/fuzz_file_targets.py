"""Decoders of files that strangers made: checkpoints of safetensors and GGUF, and the folder of a fetched model."""

from __future__ import annotations

import atexit
import os
import shutil
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

from kvasir_node.base.ids import ExpertId, ModelId, cid_of
from kvasir_node.model.folder import (
    NOTE_FILE,
    TRUNK_FILE,
    FolderNote,
    encode_note,
    layer_file_header,
    layer_file_name,
    read_experts,
    read_note,
    weights_index,
)
from kvasir_node.model.gguf_checkpoint import config_of, find_gguf, split_gguf
from kvasir_node.model.gguf_file import read_gguf_header
from kvasir_node.model.tensor_file import TensorSpec, parse_json_object, read_header

PARTS: dict[str, TensorSpec] = {"gate": ("F32", (2, 4), 32), "up": ("F32", (2, 4), 32), "down": ("F32", (4, 2), 32)}
TRUNK_NAMES = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
_LAYER_FILE = layer_file_name(2, "all")
_FILES = (NOTE_FILE, TRUNK_FILE, _LAYER_FILE, "model.gguf")


class HostileFolder:
    """A folder whose files are all the same bytes, in memory."""

    def __init__(self) -> None:
        self._memory_file = os.memfd_create("hostile")
        self.path = Path(tempfile.mkdtemp(prefix="kvasir-fuzz-"))
        atexit.register(shutil.rmtree, self.path, ignore_errors=True)
        for name in _FILES:
            (self.path / name).symlink_to(f"/proc/self/fd/{self._memory_file}")

    def holding(self, data: bytes) -> Path:
        os.ftruncate(self._memory_file, 0)
        os.pwrite(self._memory_file, data, 0)
        return self.path


_FOLDER = HostileFolder()


def _safetensors(data: bytes) -> None:
    tensors = read_header(_FOLDER.holding(data) / TRUNK_FILE)
    assert sum(tensor.nbytes for tensor in tensors.values()) < len(data)


def _trunk_file(data: bytes) -> None:
    index = parse_json_object(weights_index(_FOLDER.holding(data) / TRUNK_FILE), "index")
    assert index["metadata"]["total_size"] < len(data)


def _layer_file(data: bytes) -> None:
    experts = read_experts([(2, _FOLDER.holding(data) / _LAYER_FILE)])
    assert all(expert.layer == 2 and parts for expert, parts in experts.items())
    assert all(tensor.offset + tensor.nbytes <= len(data) for parts in experts.values() for tensor in parts.values())


def _note(data: bytes) -> None:
    note = read_note(_FOLDER.holding(data))
    assert note is not None
    assert all("/" not in name and ".." not in name for name in note.layer_files.values())
    _FOLDER.holding(encode_note(note))
    assert read_note(_FOLDER.path) == note


def _gguf(data: bytes) -> None:
    file = find_gguf(_FOLDER.holding(data))
    assert file is not None
    header = read_gguf_header(file)
    for tensor in header.tensors.values():
        assert 0 < tensor.data.offset <= tensor.data.offset + tensor.data.nbytes <= len(data)
    config_of(header)
    experts, trunk = split_gguf(header, (0,), 2, 1, TRUNK_NAMES)
    assert set(experts) == {ExpertId(0, 0), ExpertId(0, 1)}
    assert trunk


FILE_TARGETS: dict[str, Callable[[bytes], None]] = {
    "safetensors": _safetensors,
    "trunk file": _trunk_file,
    "layer file": _layer_file,
    "folder note": _note,
    "gguf": _gguf,
}


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


_COUNTS = {
    "embedding_length": 32,
    "block_count": 1,
    "attention.head_count": 1,
    "attention.head_count_kv": 1,
    "context_length": 64,
    "expert_count": 2,
    "expert_used_count": 1,
    "expert_feed_forward_length": 1,
    "attention.key_length": 4,
}
_FLOATS = {"attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e4}
_F32, _Q8_0 = 0, 8  # ggml's numbers
_TENSORS = [  # name, shape with the fastest dimension first, type, bytes
    ("token_embd.weight", (32, 1), _F32, 128),
    ("output_norm.weight", (32,), _F32, 128),
    ("output.weight", (32, 1), _Q8_0, 34),
    ("blk.0.ffn_gate_exps.weight", (32, 1, 2), _Q8_0, 68),
    ("blk.0.ffn_up_exps.weight", (32, 1, 2), _Q8_0, 68),
    ("blk.0.ffn_down_exps.weight", (1, 32, 2), _F32, 256),
]


def tiny_gguf() -> bytes:
    """A whole file of one layer with two experts, with a vocabulary to skip."""
    pairs = [_text("general.architecture") + struct.pack("<I", 8) + _text("qwen3moe")]
    pairs += [_text(f"qwen3moe.{key}") + struct.pack("<II", 4, count) for key, count in _COUNTS.items()]
    pairs += [_text(f"qwen3moe.{key}") + struct.pack("<If", 6, value) for key, value in _FLOATS.items()]
    pairs += [_text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + _text("a") + _text("b")]
    pairs += [_text("tokenizer.ggml.scores") + struct.pack("<IIQff", 9, 6, 2, 0.5, 1.5)]
    infos, offset = b"", 0
    for name, shape, kind, nbytes in _TENSORS:
        infos += _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
        offset += -(-nbytes // 32) * 32
    header = b"GGUF" + struct.pack("<IQQ", 3, len(_TENSORS), len(pairs)) + b"".join(pairs) + infos
    return header + bytes(-len(header) % 32) + bytes(offset)


def file_seeds() -> dict[str, list[bytes]]:
    header = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"__metadata__":{"format":"pt"}}'
    safetensors = len(header).to_bytes(8, "little") + header + bytes(8)
    note = FolderNote(ModelId(cid_of(b"a model")), 1 << 20, {2: _LAYER_FILE, 7: layer_file_name(7, "half")})
    return {
        "safetensors": [safetensors],
        "trunk file": [safetensors],
        "layer file": [layer_file_header(2, (0, 5), PARTS) + bytes(2 * 96)],
        "folder note": [encode_note(note)],
        "gguf": [tiny_gguf()],
    }
