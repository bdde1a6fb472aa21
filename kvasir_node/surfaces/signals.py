"""Signals that mean something else for a while. It does not know what is done meanwhile."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def handled(numbers: Sequence[signal.Signals], handler: Callable[[int, object], object]) -> Iterator[None]:
    """`handler` gets these signals while the block lasts, then whoever had them before. For the main thread."""
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
