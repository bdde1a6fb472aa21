"""One task's work with a watcher beside it. It does not know what either does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

T = TypeVar("T")


async def run_beside(watch: Callable[[], Awaitable[None]], work: Callable[[], Awaitable[T]]) -> T | None:
    """What `work` returns or raises, the exception as itself and not in a group; None when `watch` returned first.

    Cancel-safety: as safe as `work`, which is cancelled when `watch` returns.
    """
    result: T | None = None
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:

        async def watch_and_cancel() -> None:
            await watch()
            nursery.cancel_scope.cancel()

        nursery.start_soon(watch_and_cancel)
        try:
            result = await work()
        except Exception as error:
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return result
