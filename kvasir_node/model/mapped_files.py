"""Tensors of a checkpoint's files without a copy: what is touched is in the system's page cache, and leaves it again
when memory is wanted elsewhere.

It does not know experts, nor who computes. What is on the disk is believed as when it is read (`read_tensor`).
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from pathlib import Path

import numpy as np
import torch

from kvasir_node.base.errors import DataError
from kvasir_node.model.tensor_file import DTYPES, TensorRange


class MappedFiles:
    """Maps each file once, whole, when it is first asked for a tensor of it; any thread may ask.

    At most as many mappings as a checkpoint has shards; they end with the last tensor of them.
    """

    def __init__(self) -> None:
        self._bytes: dict[Path, torch.Tensor] = {}
        self._lock = threading.Lock()

    def tensor(self, tensor: TensorRange) -> torch.Tensor:
        """Its bytes where they lie, in the checkpoint's dtype; nobody may write to it, which would end the process.

        Raises DataError when the file is shorter than the tensor's end or cannot be mapped, or when the tensor does
        not begin at a multiple of its items' size.
        """
        with self._lock:
            if tensor.file not in self._bytes:
                self._bytes[tensor.file] = _map(tensor.file)
            whole = self._bytes[tensor.file]
        end, dtype = tensor.offset + tensor.nbytes, DTYPES[tensor.dtype]
        if end > whole.shape[0]:
            raise DataError(f"{tensor.file.name} has {whole.shape[0]} bytes, and a tensor ends at {end}")
        if tensor.offset % dtype.itemsize:
            raise DataError(f"a tensor of {tensor.file.name} begins at {tensor.offset}, which {dtype} cannot")
        return whole[tensor.offset : end].view(dtype).view(tensor.shape)


def _map(file: Path) -> torch.Tensor:
    """All bytes of a file, [N] uint8.

    A file that is cut short while it is mapped takes the process down (SIGBUS) when a lost page is touched, and one
    that is written to changes answers. Neither can be prevented here: a checkpoint that is served must be left alone,
    as with every program that maps weights; whoever replaces one should rename the new file into place.
    """
    try:
        with file.open("rb") as stream:
            # Read-only, so that the system need not promise memory for a checkpoint that is larger than it has.
            mapping = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: the file is empty
        raise DataError(f"mapping {file.name}: {error}") from error
    # torch warns of memory that is not writable each process anew; by its address it does not see that. The array owns
    # the mapping, and is owned by every tensor that is made of it.
    array = (ctypes.c_ubyte * len(mapping)).from_address(np.frombuffer(mapping, np.uint8).ctypes.data)
    array.mapping = mapping  # type: ignore[attr-defined]
    return torch.frombuffer(array, dtype=torch.uint8)
