"""A peer says where it sees us, and tries to reach us there: two transports on loopback."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
import trio

from kvasir_node.base.errors import Unreachable
from kvasir_node.net.reach_probe import MAGIC, PROBE_PROTOCOL, TOKEN_BYTES, Own, ReachProbe


@asynccontextmanager
async def opened(open_hosts, *, has_door=True):
    async with open_hosts(2) as (node, hub):
        ((_, port),) = node.bound()
        asking = ReachProbe(node, lambda peer: Own(port, False), lambda peer: "")
        if has_door:
            node.add_door(MAGIC, asking.admit)
        answering = ReachProbe(hub, lambda peer: Own(0, False), lambda peer: (hub.way_to(peer) or ("",))[0])
        hub.set_handler(PROBE_PROTOCOL, answering.serve)
        await node.connect(hub.addresses())
        yield node, hub, asking, port


async def test_the_listener_is_reached_though_the_connection_left_from_another_port(open_hosts):
    async with opened(open_hosts) as (_, hub, asking, port):
        seen = await asking.ask(hub.peer_id)
        assert seen.hub == hub.peer_id
        assert seen.observed.startswith("/ip4/127.0.0.1/tcp/")
        assert seen.observed != seen.reached[0]
        assert seen.reached == (f"/ip4/127.0.0.1/tcp/{port}",)
        assert not seen.from_listen_port


async def test_somebody_else_who_listens_there_does_not_count(open_hosts):
    """It accepts, but cannot say the other half of the token."""
    async with opened(open_hosts, has_door=False) as (_, hub, asking, _):
        assert (await asking.ask(hub.peer_id)).reached == ()


async def test_a_second_question_at_once_is_refused(open_hosts):
    async with opened(open_hosts) as (_, hub, asking, _):
        await asking.ask(hub.peer_id)
        with pytest.raises(Unreachable):
            await asking.ask(hub.peer_id)


async def test_a_connection_without_a_token_of_ours_gets_no_answer(open_hosts):
    async with opened(open_hosts) as (_, _, _, port):
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        await stream.send_all(MAGIC + bytes(TOKEN_BYTES // 2))
        with trio.fail_after(5):
            assert await stream.receive_some() == b""
        await stream.aclose()
