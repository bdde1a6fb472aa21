import pytest
import trio

from kvasir_node.base.errors import UsageError
from kvasir_node.net.dialler import parse_addresses
from kvasir_node.net.gossip import MESSAGE_BYTES_MAX, open_gossip


async def publish_until(gossip, topic, data, channel, wanted_from):
    """Publishes until a message of that peer arrives: a mesh takes a heartbeat or two to form."""
    with trio.fail_after(10):
        while True:
            await gossip.publish(topic, data)
            with trio.move_on_after(0.3):
                async for signer, received in channel:
                    if (signer, received) == (wanted_from, data):
                        return


def accept(peer, data):
    return True


async def test_a_star_of_three_hears_each_other_through_the_middle(open_hosts):
    async with (
        open_hosts(3) as (hub, left, right),
        open_gossip(hub) as of_hub,
        open_gossip(left) as of_left,
        open_gossip(right) as of_right,
    ):
        await of_hub.subscribe("t", accept)
        await left.connect(hub.addresses())  # before it subscribes
        at_left = await of_left.subscribe("t", accept)
        at_right = await of_right.subscribe("t", accept)
        await right.connect(hub.addresses())  # after it subscribed
        await publish_until(of_left, "t", b"from left", at_right, left.peer_id)
        await publish_until(of_right, "t", b"from right", at_left, right.peer_id)
        assert not any(signer == left.peer_id for signer, _ in drain(at_left))  # never its own


async def test_gossip_goes_on_when_one_of_two_connections_to_a_peer_ends(open_hosts):
    """As when a connection through a relay is given up for a direct one."""
    async with open_hosts(2) as (left, right), open_gossip(left) as of_left, open_gossip(right) as of_right:
        at_right = await of_right.subscribe("t", accept)
        await of_left.subscribe("t", accept)
        await left.connect(right.addresses())
        await publish_until(of_left, "t", b"first", at_right, left.peer_id)
        (first,) = left._table.of(right.peer_id)
        await left._dial(*parse_addresses(right.addresses()))
        await first.muxed.close("given up")
        await publish_until(of_left, "t", b"second", at_right, left.peer_id)


async def test_peers_that_were_connected_before_take_part(open_hosts):
    async with open_hosts(2) as (left, right):
        await left.connect(right.addresses())
        async with open_gossip(left) as of_left, open_gossip(right) as of_right:
            await of_left.subscribe("t", accept)
            at_right = await of_right.subscribe("t", accept)
            await publish_until(of_left, "t", b"x", at_right, left.peer_id)


async def test_what_a_validator_refuses_is_not_forwarded(open_hosts):
    async with (
        open_hosts(3) as (hub, left, right),
        open_gossip(hub) as of_hub,
        open_gossip(left) as of_left,
        open_gossip(right) as of_right,
    ):
        at_hub = await of_hub.subscribe("t", lambda peer, data: peer == left.peer_id and data != b"bad")
        await of_left.subscribe("t", accept)
        at_right = await of_right.subscribe("t", accept)
        for each in (left, right):
            await each.connect(hub.addresses())
        await publish_until(of_left, "t", b"good", at_right, left.peer_id)
        await of_left.publish("t", b"bad")
        await publish_until(of_left, "t", b"good again", at_right, left.peer_id)
        assert b"bad" not in [data for _, data in drain(at_hub) + drain(at_right)]


async def test_a_message_too_large_is_the_callers_mistake(open_hosts):
    async with open_hosts(1) as (only,), open_gossip(only) as gossip:
        with pytest.raises(UsageError, match="at most 65535"):
            await gossip.publish("t", bytes(MESSAGE_BYTES_MAX + 1))


async def test_an_error_inside_the_block_comes_out_as_itself(open_hosts):
    async with open_hosts(1) as (only,):
        with pytest.raises(UsageError, match="mine"):
            async with open_gossip(only):
                raise UsageError("mine")
        async with open_gossip(only):  # and it can be opened again
            pass


def drain(channel):
    items = []
    while channel.statistics().current_buffer_used:
        items.append(channel.receive_nowait())
    return items
