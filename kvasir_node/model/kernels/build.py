"""Translates the kernels into LLVM code that any machine's own LLVM finishes.

    python -m kvasir_node.model.kernels.build

For developers, whenever a kernel's source has changed: numba, which does this, takes most of a minute and a lot of
memory, and no node needs it. The result, CODE_FILE, is kept beside the sources and begins with their hash.
"""

from __future__ import annotations

import lzma
from typing import Any

import llvmlite.binding as llvm
import numba
from numba import types

from kvasir_node.model.kernels.abi import (
    ANSWER_FACTORS,
    ANSWER_NUMBERS,
    BLOCK_FACTORS,
    BLOCK_NUMBERS,
    EXPERTS_FACTORS,
    EXPERTS_NUMBERS,
    JOIN_NUMBERS,
    KERNELS,
    LINEAR_FACTORS,
    LINEAR_NUMBERS,
    NARROW_NUMBERS,
    SPLIT_NUMBERS,
    WIDEN_NUMBERS,
)
from kvasir_node.model.kernels.answer_code import answer
from kvasir_node.model.kernels.block_code import block, linear
from kvasir_node.model.kernels.expert_code import experts
from kvasir_node.model.kernels.frame_code import narrow, widen
from kvasir_node.model.kernels.library import CODE_FILE, source_hash
from kvasir_node.model.kernels.split_code import join, split

_SIGNATURE = types.int64(types.CPointer(types.int64), types.CPointer(types.float32))
_FAMILIES: dict[str, tuple[tuple[Any, ...], int, int]] = {
    "experts": (experts, len(EXPERTS_NUMBERS), len(EXPERTS_FACTORS)),
    "answer": (answer, len(ANSWER_NUMBERS), len(ANSWER_FACTORS)),
    "block": (block, len(BLOCK_NUMBERS), len(BLOCK_FACTORS)),
    "linear": (linear, len(LINEAR_NUMBERS), len(LINEAR_FACTORS)),
    "split": ((split,), len(SPLIT_NUMBERS), 0),
    "join": ((join,), len(JOIN_NUMBERS), 0),
    "widen": ((widen,), len(WIDEN_NUMBERS), 0),
    "narrow": ((narrow,), len(NARROW_NUMBERS), 0),
}


def code_of(name: str) -> str:
    """LLVM code of one kernel, optimised, under its own name."""
    family, _, kind = name.partition("_")
    kernels, number_count, factor_count = _FAMILIES[family]
    kernel = kernels[int(kind or 0)]

    def with_factors(numbers: Any, factors: Any) -> Any:
        return kernel(numba.carray(numbers, (number_count,)), numba.carray(factors, (factor_count,)))

    def without(numbers: Any, factors: Any) -> Any:
        return kernel(numba.carray(numbers, (number_count,)))

    entry = with_factors if factor_count else without
    compiled: Any = numba.cfunc(_SIGNATURE, error_model="numpy")(entry)
    return compiled._library.get_llvm_str().replace(compiled.native_name, name)


def build() -> None:
    """Writes CODE_FILE."""
    module = llvm.parse_assembly(code_of(KERNELS[0]))
    for name in KERNELS[1:]:
        module.link_in(llvm.parse_assembly(code_of(name)))
    for function in module.functions:
        if not function.is_declaration and function.name not in KERNELS:
            function.linkage = "internal"
    text = f"; sources {source_hash()}\n{module}"
    CODE_FILE.write_bytes(lzma.compress(text.encode(), preset=9))


if __name__ == "__main__":
    build()
