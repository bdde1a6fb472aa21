"""Reading an exact number of bytes from anything that gives some at a time.

It does not know what the bytes mean.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from kvasir_node.base.errors import Unreachable

Read = Callable[[int], Awaitable[bytes | bytearray | memoryview]]


async def read_exactly(read: Read, count: int) -> bytes:
    """`count` bytes; raises Unreachable when the stream ends before.

    Cancel-safety: what was read is lost, so a cancelled stream must be reset.
    """
    received = bytearray()
    while len(received) < count:
        chunk = await read(count - len(received))
        if not chunk:
            raise Unreachable(f"the peer closed the stream after {len(received)} of {count} expected bytes")
        received += chunk
    return bytes(received)
