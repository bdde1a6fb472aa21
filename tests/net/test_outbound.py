"""Connections from the port we listen on, and what is done where that port cannot be used."""

from __future__ import annotations

import errno
import socket
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio

from kvasir_node.net.outbound import HEADSTART_S, _race, connect_from, connect_tcp, source_for


@asynccontextmanager
async def accepting():
    """A port of this machine that takes connections; yields the port and where they came from."""
    seen: list[tuple[str, int]] = []

    async def note(stream):
        seen.append(stream.socket.getpeername())
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, note, [listener])
        yield listener.socket.getsockname()[1], seen
        nursery.cancel_scope.cancel()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


async def test_a_port_whose_two_ends_are_taken_gives_way_to_any_other():
    source = ("127.0.0.1", free_port())
    async with accepting() as (port, seen):
        first = await connect_from(source, "127.0.0.1", port)
        with pytest.raises(OSError, match=r"in use|assign"):
            await connect_from(source, "127.0.0.1", port)
        second = await _race(
            partial(connect_from, source, "127.0.0.1", port), partial(trio.open_tcp_stream, "127.0.0.1", port)
        )
        while len(seen) < 2:  # noqa: ASYNC110  (the other end tells nobody)
            await trio.sleep(0.01)
        assert source in seen
        await first.aclose()
        await second.aclose()


async def test_a_port_that_gets_no_answer_gives_way_after_a_while_and_one_that_is_refused_does_not(autojump_clock):
    async def never():
        await trio.sleep_forever()

    async def refused():
        raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")

    async def late():
        assert trio.current_time() - began_at == pytest.approx(HEADSTART_S)
        raise TimeoutError

    began_at = trio.current_time()
    with trio.move_on_after(10) as waiting:
        await _race(never, late)
    assert waiting.cancelled_caught  # the first may still succeed
    with pytest.raises(ConnectionRefusedError):
        await _race(refused, never)


async def test_in_a_lan_and_for_a_name_any_port_will_do():
    async with accepting() as (port, seen):
        stream = await connect_tcp("localhost", port, [("0.0.0.0", free_port())])
        await stream.aclose()
        assert source_for("198.51.100.7", [("::", 1), ("127.0.0.1", 2), ("0.0.0.0", 3)]) == ("0.0.0.0", 3)
        assert source_for("2001:db8::1", [("0.0.0.0", 3)]) is None
        with trio.fail_after(5):
            while not seen:  # noqa: ASYNC110  (the other end tells nobody)
                await trio.sleep(0.01)
