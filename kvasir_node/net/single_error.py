"""Lets a single error leave a nursery as itself.

It does not know which error. A caller of one of our context managers wants to catch `Unreachable`, not a group of
one that holds it because there happens to be a nursery inside.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def single_error_unwrapped() -> Iterator[None]:
    """Raises the only error of a group in the group's place; a group of several stays one."""
    try:
        yield
    except BaseExceptionGroup as group:
        error = _sole_error(group)
        if error is None:
            raise
        raise error from error.__cause__


def _sole_error(group: BaseExceptionGroup[BaseException]) -> BaseException | None:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        if len(error.exceptions) != 1:
            return None
        error = error.exceptions[0]
    return error
