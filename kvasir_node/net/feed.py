"""A bounded feed for several readers where the newest item wins.

It does not know what it carries. A reader that falls behind loses its oldest items; a publisher never waits.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import trio

Item = TypeVar("Item")


class Feed(Generic[Item]):
    """`publish` hands an item to everyone who holds a channel from `subscribe`."""

    def __init__(self, items_max: int) -> None:
        self._items_max = items_max
        self._readers: list[tuple[trio.MemorySendChannel[Item], trio.MemoryReceiveChannel[Item]]] = []

    def subscribe(self) -> trio.MemoryReceiveChannel[Item]:
        """A channel of at most items_max items; closing it ends the subscription."""
        send, receive = trio.open_memory_channel[Item](self._items_max)
        self._readers.append((send, receive))
        return receive.clone()

    def publish(self, item: Item) -> None:
        self._drop_closed()
        for send, receive in self._readers:
            try:
                send.send_nowait(item)
            except trio.WouldBlock:
                receive.receive_nowait()
                send.send_nowait(item)

    def _drop_closed(self) -> None:
        """A reader is gone when our own clone is the last one open."""
        for send, receive in self._readers:
            if receive.statistics().open_receive_channels < 2:
                send.close()
                receive.close()
        self._readers = [reader for reader in self._readers if reader[1].statistics().open_receive_channels > 1]

    def close(self) -> None:
        """Readers get what is queued, then the end of the channel."""
        for send, receive in self._readers:
            send.close()
            receive.close()
        self._readers.clear()
