"""Tensors where they lie in a file: the same values, no copy, and files that are not what they were."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from kvasir_node.base.errors import DataError
from kvasir_node.model.mapped_files import MappedFiles
from kvasir_node.model.tensor_file import read_header, read_tensor


@pytest.fixture
def ranges(tmp_path):
    generator = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(3, 5, generator=generator).to(torch.bfloat16) for name in ("a", "b")}
    save_file(tensors, tmp_path / "model.safetensors")
    return read_header(tmp_path / "model.safetensors")


def test_values_are_those_that_are_read_and_the_file_is_mapped_once(ranges):
    files = MappedFiles()
    first, second = files.tensor(ranges["a"]), files.tensor(ranges["b"])
    assert torch.equal(first, read_tensor(ranges["a"]))
    assert torch.equal(second, read_tensor(ranges["b"]))
    assert second.data_ptr() - first.data_ptr() == ranges["b"].offset - ranges["a"].offset


def test_a_tensor_outlives_the_mapper_and_the_name_of_its_file(ranges):
    expected = read_tensor(ranges["a"])
    tensor = MappedFiles().tensor(ranges["a"])
    ranges["a"].file.unlink()
    gc.collect()
    assert torch.equal(tensor, expected)


def test_what_cannot_be_mapped_is_bad_data(ranges, tmp_path):
    files, where = MappedFiles(), ranges["a"]
    with pytest.raises(DataError, match="ends at"):
        files.tensor(replace(ranges["b"], nbytes=1000))
    with pytest.raises(DataError, match="begins at"):
        files.tensor(replace(where, offset=where.offset + 1))
    with pytest.raises(DataError, match="mapping gone"):
        files.tensor(replace(where, file=tmp_path / "gone"))
    (tmp_path / "empty").touch()
    with pytest.raises(DataError, match="mapping empty"):
        files.tensor(replace(where, file=tmp_path / "empty"))


def test_a_file_that_was_cut_before_it_is_mapped_is_bad_data(ranges):
    file = ranges["b"].file
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DataError, match="ends at"):
        MappedFiles().tensor(ranges["b"])
