"""The kernels, compiled for this machine's processor and ready to be called.

It does not know what they compute (see `abi`). Their code comes with the package as LLVM code; finishing it takes about
a second, once for a process, in a process of its own: what it takes in memory goes back when that ends.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import lzma
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

from kvasir_node.model.kernels import finish
from kvasir_node.model.kernels.abi import KERNELS

logger = logging.getLogger(__name__)

CODE_FILE = Path(__file__).with_name("kernels.ll.xz")
SOURCES = (
    "abi.py",
    "vector_code.py",
    "expert_code.py",
    "block_code.py",
    "split_code.py",
    "frame_code.py",
    "answer_code.py",
    "build.py",
)
"""What CODE_FILE is made from, by `build`."""

_NEEDED = {"x86_64": ("avx2", "fma"), "aarch64": ("neon",), "arm64": ("neon",)}  # else sums would be calls into libm
_TIMEOUT_S = 120.0
_UNREACHED = re.compile(r"(?:Py|NRT_|numba_)\w+")  # what numba's code would call if an array had an owner, or on errors

Kernel = Callable[[Any, Any], int]
"""Takes arrays of ctypes (int64 and float) or None for no factors."""


def source_hash() -> str:
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update(CODE_FILE.with_name(name).read_bytes())
    return digest.hexdigest()


def read_source_hash() -> str:
    """Of what CODE_FILE was made from: its first line says so."""
    return lzma.decompress(CODE_FILE.read_bytes()).partition(b"\n")[0].removeprefix(b"; sources ").decode()


def is_able() -> bool:
    """Whether there are kernels for this machine; where there are none, torch computes. Takes about a second when it is
    called first, from whichever thread."""
    with _loading:
        return bool(_loaded())


def kernels() -> Mapping[str, Kernel]:
    """By the names of `abi.KERNELS`; any thread may call them, and they run without the GIL. Empty unless `is_able`."""
    with _loading:
        return _loaded()


def address_of(buffer: bytearray | memoryview, offset: int = 0) -> int:
    """Where a writable buffer, or its byte at `offset`, lies; good as long as the buffer lives and keeps its size."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer, offset))


_loading = threading.Lock()


@cache
def _loaded() -> Mapping[str, Kernel]:
    if not _has_instructions():
        logger.warning("this processor lacks the instructions of the kernels; torch computes instead, slower")
        return {}
    try:
        return _load(_compiled())
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        logger.warning("the kernels cannot be compiled here (%s); torch computes instead, slower", error)
        return {}


def _has_instructions() -> bool:
    features = llvm.get_host_cpu_features()
    architecture = llvm.get_process_triple().partition("-")[0]
    return architecture in _NEEDED and all(features.get(each) for each in _NEEDED[architecture])


def _compiled() -> bytes:
    command = [sys.executable, "-I", finish.__file__, str(CODE_FILE)]
    done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"the compiler ended with {done.returncode}: {done.stderr.decode()[-300:].strip()}")
    return done.stdout


def _load(code: bytes) -> Mapping[str, Kernel]:
    """llvmlite raises RuntimeError for what it cannot link."""
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), finish.machine())
    for symbol in _unreached_symbols(code):
        llvm.add_symbol(symbol, _address_of_abort())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    signature = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)
    return _Library(engine, {name: signature(engine.get_function_address(name)) for name in KERNELS})


class _Library(dict[str, Kernel]):
    """Keeps the machine code alive."""

    def __init__(self, engine: llvm.ExecutionEngine, functions: Mapping[str, Kernel]) -> None:
        super().__init__(functions)
        self._engine = engine


def _unreached_symbols(object_file: bytes) -> set[str]:
    return set(_UNREACHED.findall(object_file.decode("latin-1")))


def _address_of_abort() -> int:
    address = ctypes.cast(ctypes.CDLL(None).abort, ctypes.c_void_p).value
    assert address is not None
    return address
