"""Lets a thread wait until nobody uses any more what it has just taken out of sight.

It does not know what is used. Users never wait for each other nor for whoever settles, only for a lock that is held for
moments (the idea of read-copy-update: P. McKenney, J. Slingwine, 1998).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Quiescence:
    """Take something out of sight, `settle`, then destroy it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._users: set[object] = set()  # one for each thread that uses something

    @contextmanager
    def use(self) -> Iterator[None]:
        """What is in sight at the start may be used until the block ends."""
        user = object()
        with self._changed:
            self._users.add(user)
        try:
            yield
        finally:
            with self._changed:
                self._users.discard(user)
                self._changed.notify_all()

    def settle(self) -> None:
        """Returns when all who are using something now have ended; those who begin later are not waited for."""
        with self._changed:
            before = frozenset(self._users)
            self._changed.wait_for(lambda: not before & self._users)
