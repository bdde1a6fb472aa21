"""transformers without torch's compiler and without distribution, which no node uses and which take memory and time.

It does not change what is computed. While the compiler is `left_out` a stand-in takes its marks and does nothing with
them; afterwards whoever needs the real one (torch.compile, or a family whose code asks for it) imports it as ever.
Measured for a trunk that was loaded and ran once: see docs/log.md. transformers is pinned, and a version that asks the
stand-in for more raises AttributeError when it is imported.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"
_WRAPPED = f"{_COMPILER}._trace_wrapped_higher_order_op"
_MARKS = ("disable", "assume_constant_result", "allow_in_graph")  # tell the compiler something about a function
_CODE = ("modeling_utils", "masking_utils", "cache_utils", "conversion_mapping", "core_model_loading")


def import_lean() -> None:
    """Call it before anything imports transformers' model code; does nothing when something has."""
    if "transformers.modeling_utils" not in sys.modules:
        with compiler_left_out(), _distribution_left_out():
            for name in _CODE:
                importlib.import_module(f"transformers.{name}")


@contextmanager
def compiler_left_out() -> Iterator[None]:
    """For imports, and for what runs on the meta device, where torch tells the compiler to stay away from its code."""
    if _COMPILER in sys.modules:
        yield
        return
    compiler, wrapped = ModuleType(_COMPILER), ModuleType(_WRAPPED)
    compiler.__path__ = []  # a package, or Python would not look for modules inside
    for name in _MARKS:
        setattr(compiler, name, _mark)
    # Entered only around masks that transformers makes by vmap; ours come ready made (see `Trunk`).
    wrapped.TransformGetItemToIndex = _real_transform  # type: ignore[attr-defined]
    stand_ins = {_COMPILER: compiler, _WRAPPED: wrapped}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            del sys.modules[name]


@contextmanager
def _distribution_left_out() -> Iterator[None]:
    """transformers believes while it is imported that torch can neither be distributed nor has flex attention."""
    names = ("is_torch_distributed_available", "is_torch_flex_attn_available")
    modules = [importlib.import_module(name) for name in ("transformers.utils", "transformers.utils.import_utils")]
    real = {(module, name): getattr(module, name) for module in modules for name in names}
    for module, name in real:
        setattr(module, name, lambda: False)
    try:
        yield
    finally:
        for (module, name), function in real.items():
            setattr(module, name, function)


def _mark(function: Callable[..., Any] | None = None, *_: object, **__: object) -> Any:
    """Used as a decorator with and without arguments."""
    return _mark if function is None else function


def _real_transform() -> Any:
    return importlib.import_module(_WRAPPED).TransformGetItemToIndex()
