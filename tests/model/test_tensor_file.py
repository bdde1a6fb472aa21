"""Hostile safetensors headers, and the canonical file of one expert."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load, save

from kvasir_node.base.errors import DataError
from kvasir_node.model.tensor_file import (
    DTYPES,
    expert_file,
    expert_file_bytes,
    parse_expert_file,
    read_header,
    read_tensor,
)

PARTS = {"gate": ("BF16", (3, 4), 24), "up": ("BF16", (3, 4), 24), "down": ("BF16", (4, 3), 24)}


def entry(dtype: str = "F32", shape: Any = (2, 2), begin: Any = 0, end: Any = 16) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "data_offsets": [begin, end]}


def with_header(header: Any, data: bytes = bytes(16), length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


GOOD = with_header({"a": entry()})


def read(folder: Path, data: bytes) -> dict:
    file = folder / "x.safetensors"
    file.write_bytes(data)
    return read_header(file)


HOSTILE = {
    "an empty file": b"",
    "half a length": b"\x10\x00",
    "a length of 0": with_header({"a": entry()}, length=0),
    "a length of 1": with_header({"a": entry()}, length=1),
    "a length of 2^63": with_header({"a": entry()}, length=1 << 63),
    "a length of 2^64 - 1": with_header({"a": entry()}, length=(1 << 64) - 1),
    "a length one past the file": with_header({"a": entry()}, length=len(GOOD) - 8 + 1),
    "a length that eats the data": with_header({"a": entry()}, length=len(GOOD) - 8),
    "not JSON": with_header(b"{]"),
    "not UTF-8": with_header(b'{"\xff": 1}'),
    "not an object": with_header([1, 2]),
    "a tower of lists": with_header(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "a number of 5000 digits": with_header(
        b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,16]}}'
    ),
    "a key twice": with_header(b'{"a":%b,"a":%b}' % ((json.dumps(entry()).encode(),) * 2)),
    "a field twice": with_header(b'{"a":{"dtype":"F32","dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}'),
    "an unknown field": with_header({"a": entry() | {"strides": [1]}}),
    "a missing field": with_header({"a": {"dtype": "F32", "shape": [2, 2]}}),
    "an unknown dtype": with_header({"a": entry(dtype="F12")}),
    "a dtype that is a list": with_header({"a": entry() | {"dtype": ["F32"]}}),
    "a negative size": with_header({"a": entry(shape=[-2, -2])}),
    "a size that is a float": with_header({"a": entry(shape=[2.0, 2])}),
    "a size that is true": with_header({"a": entry(shape=[True, 4])}),
    "too many dimensions": with_header({"a": entry(shape=[1] * 64 + [4])}),
    "a shape that lies": with_header({"a": entry(shape=(2, 3))}),
    "sizes that overflow 64 bits to the right number": with_header({"a": entry(shape=[1 << 62, 16, 4])}),
    "offsets backwards": with_header({"a": entry(begin=16, end=0)}),
    "offsets before the data": with_header({"a": entry(begin=-16, end=0)}),
    "an offset too many": with_header({"a": entry() | {"data_offsets": [0, 16, 16]}}),
    "data beyond the file": with_header({"a": entry(shape=(4, 2), end=32)}),
    "data left over": with_header({"a": entry()}, data=bytes(17)),
    "a gap": with_header({"a": entry(begin=4, end=20)}, data=bytes(20)),
    "an overlap": with_header({"a": entry(), "b": entry(begin=8, end=24)}, data=bytes(24)),
    "the same bytes twice": with_header({"a": entry(), "b": entry()}),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_header_is_refused(tmp_path, what):
    with pytest.raises(DataError, match=r"x\.safetensors"):
        read(tmp_path, HOSTILE[what])


def test_a_huge_length_allocates_nothing(tmp_path):
    # A sparse file of 300 MB whose header length is within the file but above the format's limit.
    file = tmp_path / "x.safetensors"
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", 100_000_001))
        stream.truncate(300_000_000)
    with pytest.raises(DataError, match="expected 2 to 100000000"):
        read_header(file)


def test_offsets_are_absolute_and_metadata_is_no_tensor(tmp_path):
    tensors = {"w": torch.arange(6.0).view(2, 3), "n": torch.tensor(3, dtype=torch.int64), "e": torch.zeros(0, 4)}
    data = save(tensors, metadata={"format": "pt"})
    found = read(tmp_path, data)
    assert set(found) == {"w", "n", "e"}
    assert found["w"].spec == ("F32", (2, 3), 24)
    assert data[found["w"].offset :][:24] == tensors["w"].numpy().tobytes()
    assert torch.equal(read_tensor(found["w"]), tensors["w"])


def test_a_file_that_shrank_after_it_was_indexed_is_noticed(tmp_path):
    found = read(tmp_path, GOOD)
    (tmp_path / "x.safetensors").write_bytes(GOOD[:-1])
    with pytest.raises(DataError, match="ends 1 bytes before"):
        read_tensor(found["a"])
    (tmp_path / "x.safetensors").unlink()
    with pytest.raises(DataError, match="No such file"):
        read_tensor(found["a"])


_GOOD_FILE = save({"a": torch.ones(2, 3), "b": torch.ones(5, dtype=torch.bfloat16)})


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.integers(0, len(_GOOD_FILE) - 1), st.integers(1, 255))
def test_a_changed_byte_is_refused_or_still_describes_the_file(tmp_path_factory, at, change):
    """And never accepted where the reference reader refuses."""
    data = bytearray(_GOOD_FILE)
    data[at] ^= change
    folder = tmp_path_factory.mktemp("flip")
    try:
        found = read(folder, bytes(data))
    except DataError:
        return
    for tensor in found.values():
        assert 0 <= tensor.offset <= tensor.offset + tensor.nbytes <= len(data)
    assert sum(tensor.nbytes for tensor in found.values()) == 34
    try:
        load(bytes(data))
    except SafetensorError as error:
        pytest.fail(f"the reference reader refuses: {error}")


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.binary(max_size=200), st.integers(0, 220))
def test_noise_is_refused_and_nothing_else_is_raised(tmp_path_factory, noise, length):
    with pytest.raises(DataError):
        read(tmp_path_factory.mktemp("noise"), struct.pack("<Q", length) + b"{" + noise)


def test_the_file_of_an_expert_has_a_fixed_spelling():
    assert expert_file(PARTS) == (
        b"\xb8\x00\x00\x00\x00\x00\x00\x00"
        b'{"gate":{"dtype":"BF16","shape":[3,4],"data_offsets":[0,24]},'
        b'"up":{"dtype":"BF16","shape":[3,4],"data_offsets":[24,48]},'
        b'"down":{"dtype":"BF16","shape":[4,3],"data_offsets":[48,72]}}   '
    )
    assert expert_file_bytes(PARTS) == len(expert_file(PARTS)) + 72


def some_expert(dtype: str) -> tuple[dict[str, torch.Tensor], dict[str, tuple[str, tuple[int, ...], int]], bytes]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"gate": (3, 4), "up": (3, 4), "down": (4, 3)}
    tensors = {p: torch.randn(s, generator=generator).to(DTYPES[dtype]) for p, s in shapes.items()}
    specs = {p: (dtype, shapes[p], t.nbytes) for p, t in tensors.items()}
    data = expert_file(specs) + b"".join(bytes(tensors[p].view(torch.uint8).numpy()) for p in shapes)
    return tensors, specs, data


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_experts_file_is_a_valid_safetensors_file_and_comes_back(tmp_path, dtype):
    tensors, specs, data = some_expert(dtype)
    assert set(read(tmp_path, data)) == set(tensors)
    for loaded in (load(data), parse_expert_file(data, specs), parse_expert_file(bytearray(data), specs)):
        assert all(torch.equal(loaded[part], tensors[part]) for part in tensors)


def test_a_writable_buffer_is_viewed_and_a_read_only_one_is_not():
    tensors, specs, data = some_expert("BF16")
    buffer = bytearray(data)
    views = parse_expert_file(memoryview(buffer), specs)
    buffer[-24:] = bytes(24)
    assert views["down"].count_nonzero() == 0
    assert torch.equal(views["up"], tensors["up"])


@given(st.data())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_every_change_of_an_experts_header_is_refused(data):
    _, specs, file = some_expert("F16")
    buffer = bytearray(file)
    buffer[data.draw(st.integers(0, len(expert_file(specs)) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(DataError, match="expected the canonical header"):
        parse_expert_file(buffer, specs)


@pytest.mark.parametrize("change", [-1, 1, -72])
def test_an_experts_file_of_another_length_is_refused(change):
    _, specs, data = some_expert("BF16")
    with pytest.raises(DataError, match=f"has {len(data) + change} bytes, expected {len(data)}"):
        parse_expert_file(data[:change] if change < 0 else data + b"x", specs)


def test_a_file_for_other_shapes_is_refused():
    _, specs, data = some_expert("BF16")
    other = {part: (dtype, shape[::-1], nbytes) for part, (dtype, shape, nbytes) in specs.items()}
    with pytest.raises(DataError, match="expected the canonical header"):
        parse_expert_file(data, other)


@pytest.mark.parametrize(
    "parts",
    [
        {},
        PARTS | {"up": ("F8_E5M2", (3, 4), 12)},
        PARTS | {"up": ("BF16", (3, 4), 23)},
        PARTS | {"up": ("BF16", (0, 4), 0)},
    ],
)
def test_parts_that_are_no_expert_are_refused(parts):
    with pytest.raises(DataError, match="an expert"):
        expert_file(parts)


def test_item_sizes_agree_with_torch():
    assert all(math.prod((2, 3)) * d.itemsize == torch.zeros(2, 3, dtype=d).nbytes for d in DTYPES.values())
