"""Names of things: peers, content, slices.

Pure values. This module does not know where content is stored, nor how peers are reached.

A `Cid` here is always CIDv1, base32, sha2-256, of codec `raw` (bytes of a block) or `dag-cbor` (a node that
links blocks); the text form starts with "b". Source: multiformats/cid README, "CIDv1".
"""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from typing import NewType

from kvasir_node.base.errors import DataError, UsageError

PeerId = NewType("PeerId", str)
"""A libp2p peer id in base58 text."""

Cid = NewType("Cid", str)
"""Text of a CIDv1; `cid_of` makes one, `parse_cid` checks one."""

ModelId = NewType("ModelId", str)
"""The Cid of a model's manifest."""

RAW_CODEC = 0x55
DAG_CBOR_CODEC = 0x71
_SHA2_256 = bytes((0x12, 0x20))
_CID_BYTES = 36


def cid_of(data: bytes | memoryview, codec: int = RAW_CODEC) -> Cid:
    """Names bytes by their content."""
    return cid_from_digest(hashlib.sha256(data).digest(), codec)


def cid_from_digest(digest: bytes, codec: int = RAW_CODEC) -> Cid:
    """Names content whose sha2-256 (32 bytes) is already known."""
    raw = bytes((1, codec)) + _SHA2_256 + digest
    return Cid("b" + base64.b32encode(raw).decode("ascii").lower().rstrip("="))


def cid_to_bytes(cid: Cid) -> bytes:
    """The 36 binary bytes of a Cid; raises DataError when the text is not one of ours."""
    text = str(cid)
    if len(text) != 59 or not text.startswith("b"):
        raise DataError(f"not a CIDv1 in base32 of 59 characters: {text[:80]!r}")
    try:
        raw = base64.b32decode(text[1:].upper() + "======")
    except ValueError as error:
        raise DataError(f"not base32: {text[:80]!r}") from error
    return _checked(raw, text)


def cid_from_bytes(raw: bytes) -> Cid:
    """The text of a binary Cid; raises DataError when it is not one of ours."""
    _checked(raw, raw.hex())
    return Cid("b" + base64.b32encode(raw).decode("ascii").lower().rstrip("="))


def parse_cid(text: str) -> Cid:
    """Checks a text that should be a Cid, in its canonical spelling."""
    if cid_from_bytes(cid_to_bytes(Cid(text))) != text:
        raise DataError(f"not the canonical spelling of a Cid: {text!r}")
    return Cid(text)


def codec_of(cid: Cid) -> int:
    """RAW_CODEC or DAG_CBOR_CODEC."""
    return cid_to_bytes(cid)[1]


def digest_of(cid: Cid) -> bytes:
    """The 32 bytes of sha2-256 that the Cid promises."""
    return cid_to_bytes(cid)[4:]


def _checked(raw: bytes, shown: str) -> bytes:
    if len(raw) != _CID_BYTES or raw[0] != 1 or raw[2:4] != _SHA2_256 or raw[1] not in (RAW_CODEC, DAG_CBOR_CODEC):
        raise DataError(f"a Cid must be version 1, raw or dag-cbor, sha2-256: {shown[:80]!r}")
    return raw


@dataclass(frozen=True, order=True, slots=True)
class ExpertId:
    """One routed expert: `layer` counts the model's decoder layers (dense ones too), `index` is within the layer."""

    layer: int
    index: int


_SLICE = re.compile(r"(0|[1-9][0-9]{0,5}):(0|[1-9][0-9]{0,5})-(0|[1-9][0-9]{0,5})\Z")


@dataclass(frozen=True, order=True, slots=True)
class SliceId:
    """A run of experts of one layer, `first` to `last` inclusive; its text is "layer:first-last"."""

    layer: int
    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.layer}:{self.first}-{self.last}"

    def __contains__(self, expert: ExpertId) -> bool:
        return expert.layer == self.layer and self.first <= expert.index <= self.last

    @property
    def count(self) -> int:
        return self.last - self.first + 1

    def experts(self) -> tuple[ExpertId, ...]:
        return tuple(ExpertId(self.layer, index) for index in range(self.first, self.last + 1))


def parse_slice(text: str) -> SliceId:
    """Reads "layer:first-last"; raises UsageError for anything else."""
    match = _SLICE.match(text)
    if match is None or int(match[2]) > int(match[3]):
        raise UsageError(f"a slice is written layer:first-last, such as 3:0-7; got {text[:40]!r}")
    return SliceId(int(match[1]), int(match[2]), int(match[3]))
