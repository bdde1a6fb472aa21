"""GET /kvasir/v1/events: replay, heartbeats, and what a slow reader is told."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager

import trio
from surfaces_helpers import serve, settings_with, until

from kvasir_node.base.events import EventLog, LoadChanged, WarningsChanged
from kvasir_node.surfaces.events import READERS_MAX
from kvasir_node.surfaces.fake_node import FakeNode

EVENTS = "/kvasir/v1/events"


class Reader:
    """Takes a stream apart, line by line: ids, comments and documents. (httpx warns of streams that are left early.)"""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.comments, self.last_id = 0, ""
        self._stream, self._rest = stream, b""

    async def line(self) -> str:
        """Sizes of chunks stand in lines of their own."""
        with trio.fail_after(5):
            while b"\n" not in self._rest:
                part = await self._stream.receive_some()
                assert part, "the stream ended"
                self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        text = line.decode().rstrip("\r")
        self.comments += text.startswith(":")
        if text.startswith("id: "):
            self.last_id = text[4:]
        return text

    async def next(self) -> dict:
        while not (line := await self.line()).startswith("data: "):
            pass
        document = json.loads(line[6:])
        assert document["id"] == self.last_id
        return document

    async def opened(self) -> str:
        """The id that it would go on from."""
        while not self.last_id:
            await self.line()
        return self.last_id


@asynccontextmanager
async def reading(served, last_event_id: str = ""):
    port = int(served.url.rsplit(":", 1)[1])
    lines = ["GET " + EVENTS + " HTTP/1.1", "host: localhost"]
    lines += [f"last-event-id: {last_event_id}"] if last_event_id else []
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all("\r\n".join([*lines, "", ""]).encode())
        reader = Reader(stream)
        head = [await reader.line()]
        while head[-1]:
            head.append(await reader.line())
        assert head[0].startswith("HTTP/1.1 200")
        assert "content-type: text/event-stream" in head
        yield reader


def load(busy: int) -> LoadChanged:
    return LoadChanged("calm", busy, 0)


async def test_a_reader_hears_what_happens_from_now_on_and_goes_on_where_it_was_cut_off():
    node = FakeNode(settings_with())
    async with serve(node) as served:
        node.events.add(load(0))
        async with reading(served) as reader:
            await reader.opened()
            node.events.add(load(1))
            node.events.add(WarningsChanged(("the disk is full",)))
            first, second = await reader.next(), await reader.next()
        assert (first["type"], first["busy"]) == ("load.changed", 1)
        assert (second["type"], second["warnings"]) == ("warnings.changed", ["the disk is full"])
        node.events.add(load(2))
        async with reading(served, reader.last_id) as reader:
            assert (await reader.next())["busy"] == 2


async def test_a_reader_that_was_cut_off_before_the_first_event_misses_nothing():
    node = FakeNode(settings_with())
    async with serve(node) as served:
        node.events.add(load(0))
        async with reading(served) as reader:
            place = await reader.opened()
        node.events.add(load(1))
        async with reading(served, place) as reader:
            assert (await reader.next())["busy"] == 1


async def test_zero_replays_all_that_is_kept_and_says_how_many_are_gone():
    node = FakeNode(settings_with())
    node.events = EventLog(kept_max=3)
    for busy in range(5):
        node.events.add(load(busy))
    async with serve(node) as served, reading(served, "0") as reader:
        lost = await reader.next()
        assert (lost["type"], lost["count"]) == ("lost", 2)
        assert [(await reader.next())["busy"] for _ in range(3)] == [2, 3, 4]


async def test_an_id_of_an_earlier_life_gets_everything_of_this_one():
    node = FakeNode(settings_with())
    node.events.add(load(7))
    async with serve(node) as served, reading(served, "abc123-900") as reader:
        lost = await reader.next()
        assert (lost["type"], lost["count"]) == ("lost", None)
        assert (await reader.next())["busy"] == 7


async def test_what_is_no_id_is_refused_by_name():
    node = FakeNode(settings_with())
    async with serve(node) as served:
        for given in ("x", "-1", "abc", "abc-", "abc-1x", "abc--1", "a" * 40 + "-1", "1-" + "9" * 40):
            refused = await served.client.get(EVENTS, headers={"last-event-id": given})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "Last-Event-ID"), given
        async with reading(served, f"{node.events.life}-999999") as reader:  # ahead of us: nothing is lost by that
            await reader.opened()
            node.events.add(load(1))
            assert (await reader.next())["busy"] == 1


async def test_heartbeats_fill_the_silence():
    node = FakeNode(settings_with(api__heartbeat_s=0.02))
    async with serve(node) as served, reading(served) as reader:
        await trio.sleep(0.15)
        node.events.add(load(1))
        await reader.next()
        assert reader.comments >= 4


async def test_readers_are_counted_bounded_and_let_go():
    node = FakeNode(settings_with())
    async with serve(node) as served, trio.open_nursery() as nursery:
        opened = []

        async def read() -> None:
            async with reading(served) as reader:
                opened.append(await reader.opened())
                await trio.sleep_forever()

        for _ in range(READERS_MAX):
            nursery.start_soon(read)
        await until(lambda: len(opened) == READERS_MAX)
        refused = await served.client.get(EVENTS)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_capacity")
        nursery.cancel_scope.cancel()
    async with serve(node) as served, reading(served) as reader:
        await reader.opened()
