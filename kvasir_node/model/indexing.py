"""Names every block of a checkpoint where it lies: nothing is copied, each byte is read and hashed once.

Only two kinds of bytes do not come from the checkpoint's own files: the safetensors headers of experts and trunk, and
the CBOR nodes. It does not know where the index is kept, nor who reads it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvasir_node.base.content import BlockSource, FilePiece, Piece, read_source, source_bytes, split_pieces
from kvasir_node.base.errors import DataError
from kvasir_node.base.ids import DAG_CBOR_CODEC, Cid, ExpertId, ModelId, cid_of
from kvasir_node.model.checkpoint import Checkpoint, TensorRange, expert_file
from kvasir_node.model.manifest import LayerNode, Manifest, encode_layer_node, encode_manifest, is_safe_name
from kvasir_node.wire.blobs import BlobRef, encode_blob_node
from kvasir_node.wire.blocks import BLOCK_BYTES_MAX

CONFIG_FILE = "config.json"
_ALIGNMENT_BYTES = 8
Progress = Callable[[int, int], None]
"""(bytes done, bytes in all)."""


@dataclass(frozen=True, slots=True)
class IndexedModel:
    """A manifest and where each block of its model is, the manifest and the nodes included."""

    manifest: Manifest
    blocks: Mapping[Cid, BlockSource]

    @property
    def model(self) -> ModelId:
        return self.manifest.model

    @property
    def name(self) -> str:
        return self.manifest.name


def index_checkpoint(
    checkpoint: Checkpoint,
    *,
    name: str | None = None,
    block_bytes: int = BLOCK_BYTES_MAX,
    progress: Progress | None = None,
) -> IndexedModel:
    """Hashes a checkpoint; blocks the calling thread for about a second per GB, and holds one block in memory.

    `name` defaults to the folder's name and is part of what the model id names. `block_bytes` is at most 1 MiB.
    Raises DataError when the experts of a layer are stored differently, when a file changed meanwhile, or when a blob
    is too large.
    """
    if not 1 <= block_bytes <= BLOCK_BYTES_MAX:
        raise DataError(f"a block has 1 to {BLOCK_BYTES_MAX} bytes; got store.block_bytes = {block_bytes}")
    indexer = _Indexer(block_bytes, _all_bytes(checkpoint), progress)
    files = {file: indexer.add_file(checkpoint.path / file) for file in checkpoint.side_files}
    config = files.pop(CONFIG_FILE, None)
    if config is None:  # a GGUF file holds it in other words
        config = indexer.add_blob((json.dumps(checkpoint.config, sort_keys=True).encode(),))
    trunk = indexer.add_blob(trunk_pieces(checkpoint.trunk))
    layer_nodes = {layer: _add_layer(indexer, checkpoint, layer) for layer in checkpoint.layers}
    manifest = Manifest(
        name=name if name is not None else model_name(checkpoint.path),
        family=checkpoint.family,
        config=config,
        maths=checkpoint.maths.to_dict(),
        layer_nodes=layer_nodes,
        experts_per_layer=checkpoint.experts_per_layer,
        chosen_per_row=checkpoint.chosen_per_row,
        hidden_size=checkpoint.hidden_size,
        expert_hidden_size=checkpoint.expert_hidden_size,
        layer_parts={layer: checkpoint.parts(ExpertId(layer, 0)) for layer in checkpoint.layers},
        files=files,
        trunk=trunk,
    )
    indexer.add_node(encode_manifest(manifest))
    return IndexedModel(manifest, indexer.blocks)


def model_name(path: Path) -> str:
    """A name for the checkpoint in this folder: the folder's own, or `model` with what is not allowed left out."""
    kept = "".join(
        letter if letter.isascii() and (letter.isalnum() or letter in "._+-") else "-" for letter in path.name
    )
    kept = kept.strip(".-+")[:128].replace("..", ".")
    return kept if is_safe_name(kept) else "model"


def trunk_pieces(trunk: Mapping[str, TensorRange]) -> tuple[Piece, ...]:
    """One safetensors file of tensors that lie in several.

    Order and header are the reference writer's (safetensors 0.8, `tensor.rs`, `prepare`): larger items first, so that
    every tensor stays aligned, then by name.
    """
    ordered = sorted(trunk.items(), key=lambda item: (-_item_bytes(item[1]), item[0]))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[key] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return (len(text).to_bytes(8, "little") + text, *(_piece(tensor) for _, tensor in ordered))


def _item_bytes(tensor: TensorRange) -> int:
    count = 1
    for size in tensor.shape:
        count *= size
    return tensor.nbytes // count if count else 0


def _piece(tensor: TensorRange) -> FilePiece:
    return FilePiece(tensor.file, tensor.offset, tensor.nbytes)


def _all_bytes(checkpoint: Checkpoint) -> int:
    ranges = [tensor for parts in checkpoint.experts.values() for tensor in parts.values()]
    ranges += checkpoint.trunk.values()
    return sum(tensor.nbytes for tensor in ranges)


def _add_layer(indexer: _Indexer, checkpoint: Checkpoint, layer: int) -> Cid:
    first = checkpoint.parts(ExpertId(layer, 0))
    experts = [ExpertId(layer, index) for index in range(checkpoint.experts_per_layer)]
    if odd := next((expert for expert in experts if checkpoint.parts(expert) != first), None):
        raise DataError(
            f"expert {odd.index} of layer {layer} is stored unlike expert 0: a model whose experts differ within a "
            "layer cannot be shared; convert it to one dtype"
        )
    return indexer.add_node(
        encode_layer_node(LayerNode(layer, tuple(indexer.add_blob(_expert_pieces(checkpoint, e)) for e in experts)))
    )


def _expert_pieces(checkpoint: Checkpoint, expert: ExpertId) -> tuple[Piece, ...]:
    return (expert_file(checkpoint.parts(expert)), *(_piece(tensor) for tensor in checkpoint.experts[expert].values()))


@dataclass(slots=True)
class _Indexer:
    block_bytes: int
    total_bytes: int
    progress: Progress | None
    done_bytes: int = 0
    blocks: dict[Cid, BlockSource] = field(default_factory=dict)

    def add_file(self, path: Path) -> BlobRef:
        return self.add_blob((FilePiece(path, 0, path.stat().st_size),))

    def add_blob(self, pieces: Sequence[Piece]) -> BlobRef:
        size = source_bytes(pieces)
        cids = [self._add_block(source) for source in split_pieces(pieces, self.block_bytes)] or [
            self._add_block((b"",))
        ]
        return BlobRef(cids[0] if len(cids) == 1 else self.add_node(encode_blob_node(size, cids)), size)

    def add_node(self, data: bytes) -> Cid:
        cid = cid_of(data, DAG_CBOR_CODEC)
        self.blocks[cid] = (data,)
        return cid

    def _add_block(self, source: BlockSource) -> Cid:
        data = read_source(source)
        cid = cid_of(data)
        self.blocks[cid] = source
        if self.progress is not None:
            # Headers and side files are not in the total; they would only make it overrun.
            self.done_bytes = min(self.total_bytes, self.done_bytes + len(data))
            self.progress(self.done_bytes, self.total_bytes)
        return cid
