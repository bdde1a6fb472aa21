"""Blobs: files of any size, named by one Cid.

A blob of one block is that block, and its Cid is of codec raw. A larger one is named by a dag-cbor node that lists
its blocks in order: `{"v": 1, "kind": "blob", "size": N, "blocks": [binary Cid, …]}`. Each block but the last has the
same size, which is the indexer's choice. It does not know where blocks are, nor what a blob holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvasir_node.base.errors import DataError, Misbehaved
from kvasir_node.base.ids import DAG_CBOR_CODEC, RAW_CODEC, Cid, cid_from_bytes, cid_to_bytes, codec_of
from kvasir_node.wire.blocks import BLOCK_BYTES_MAX
from kvasir_node.wire.codec import Fields, decode, encode

NODE_VERSION = 1
BLOB_BLOCKS_MAX = 25_000  # a node of 38 bytes per block then stays under 1 MiB; 25 GB of blocks of 1 MiB


@dataclass(frozen=True, slots=True)
class BlobRef:
    """A blob as others name it: `size` is promised by whoever names it, and checked."""

    cid: Cid
    size: int


@dataclass(frozen=True, slots=True)
class BlobNode:
    """The blocks of a blob, in order."""

    size: int
    blocks: tuple[Cid, ...]


def is_node(blob: Cid) -> bool:
    """Whether the blob's Cid names a list of blocks rather than its only block."""
    return codec_of(blob) == DAG_CBOR_CODEC


def encode_blob_node(size: int, blocks: Sequence[Cid]) -> bytes:
    """Raises DataError when the blob has too many blocks for one node."""
    if len(blocks) > BLOB_BLOCKS_MAX:
        raise DataError(
            f"a blob of {size} bytes needs {len(blocks)} blocks; at most {BLOB_BLOCKS_MAX} of "
            f"{BLOCK_BYTES_MAX} bytes can be named: split the file"
        )
    return encode({"v": NODE_VERSION, "kind": "blob", "size": size, "blocks": [cid_to_bytes(cid) for cid in blocks]})


def decode_blob_node(data: bytes | memoryview) -> BlobNode:
    """Raises DataError that names the wrong field; the bytes are what their Cid promises, but anyone made that Cid."""
    try:
        fields = Fields(decode(data, max_bytes=BLOCK_BYTES_MAX, what="a blob node"), "blob node")
        fields.integer("v", NODE_VERSION, NODE_VERSION)
        kind = fields.text("kind", 16)
        size = fields.integer("size", 1, BLOB_BLOCKS_MAX * BLOCK_BYTES_MAX)
        blocks = fields.items("blocks", BLOB_BLOCKS_MAX, _raw_cid)
        fields.end()
    except Misbehaved as error:
        raise DataError(str(error)) from error
    if kind != "blob":
        raise DataError(f"blob node.kind must be blob; got {kind!r}")
    if not len(blocks) <= size <= len(blocks) * BLOCK_BYTES_MAX:
        raise DataError(f"blob node.size of {size} bytes cannot come from {len(blocks)} blocks")
    return BlobNode(size, blocks)


def _raw_cid(value: Any) -> Cid:
    cid = cid_from_bytes(value if type(value) is bytes else b"")
    if codec_of(cid) != RAW_CODEC:
        raise DataError("blob node.blocks must name raw blocks")
    return cid
