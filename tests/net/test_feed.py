import pytest
import trio

from kvasir_node.net.feed import Feed


async def test_the_newest_win_for_a_reader_that_falls_behind():
    feed = Feed(3)
    slow, quick = feed.subscribe(), feed.subscribe()
    seen = []
    for number in range(10):
        feed.publish(number)
        seen.append(quick.receive_nowait())
    assert seen == list(range(10))
    assert [slow.receive_nowait() for _ in range(3)] == [7, 8, 9]


async def test_a_closed_reader_is_forgotten():
    feed = Feed(3)
    reader = feed.subscribe()
    reader.close()
    feed.publish(1)
    assert feed._readers == []


async def test_closing_lets_readers_finish():
    feed = Feed(3)
    reader = feed.subscribe()
    feed.publish(1)
    feed.close()
    assert await reader.receive() == 1
    with pytest.raises(trio.EndOfChannel):
        await reader.receive()
