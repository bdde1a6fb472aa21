"""Connections through a relay: three transports on loopback, of which one carries for the other two."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest
import trio
from net_helpers import LOOPBACK

from kvasir_node.base.errors import CapacityError, Unreachable
from kvasir_node.net.circuit import CIRCUIT_PROTOCOL, RELAY_PROTOCOL, Ask, Circuits
from kvasir_node.net.dialler import parse_addresses
from kvasir_node.net.libp2p_host import Libp2pTransport
from kvasir_node.net.relay import Relay
from kvasir_node.net.stream_io import read_exactly
from kvasir_node.net.transport import PeerLost

ECHO = "/test/echo/1"


async def anybody(peer):
    await trio.lowlevel.checkpoint()


async def echo(stream):
    while chunk := await stream.read():
        await stream.write(bytes(chunk))


@dataclass
class Trio:
    """`far` has a reservation at the relay, `near` is connected to it; `circuits` are far's."""

    relay_host: Libp2pTransport
    far: Libp2pTransport
    near: Libp2pTransport
    relay: Relay
    circuits: Circuits
    holding: trio.CancelScope

    def through(self) -> str:
        relay = next(each for each in self.relay_host.addresses() if not each.endswith("/ws"))
        return f"{relay}/p2p-circuit/p2p/{self.far.peer_id}"


@asynccontextmanager
async def opened(open_hosts, **changes: float):
    settings = replace(LOOPBACK, **changes)
    async with open_hosts(3) as (relay_host, *both):
        near, far = sorted(both, key=lambda each: each.peer_id)  # of two equal connections near's would be preferred
        relay = Relay(relay_host, settings)
        relay_host.set_handler(RELAY_PROTOCOL, relay.serve)
        circuits = Circuits(far, anybody, far.take_circuit)
        near.use_circuits(Circuits(near, anybody, near.take_circuit).dial)
        far.set_handler(ECHO, echo)
        await far.connect(relay_host.addresses())
        await near.connect(relay_host.addresses())
        async with trio.open_nursery() as nursery:
            reserved = trio.Event()

            async def hold():
                with pytest.raises(Unreachable):
                    await circuits.reserve(relay_host.peer_id, reserved.set)

            nursery.start_soon(hold)
            await reserved.wait()
            yield Trio(relay_host, far, near, relay, circuits, nursery.cancel_scope)
            nursery.cancel_scope.cancel()


async def until(condition):
    with trio.fail_after(5):
        while not condition():  # noqa: ASYNC110  (what is waited for has no event)
            await trio.sleep(0.01)


async def test_a_peer_is_reached_and_authenticated_through_a_relay(open_hosts):
    async with opened(open_hosts) as trio_of:
        far, near = trio_of.far, trio_of.near
        assert await near.connect([trio_of.through()]) == far.peer_id
        connection = next(each for each in near.connections() if each.peer == far.peer_id)
        assert connection.path == "relay"
        assert connection.address == f"/p2p/{trio_of.relay_host.peer_id}/p2p-circuit"
        seen = next(each for each in far.connections() if each.peer == near.peer_id)
        assert (seen.path, seen.inbound) == ("relay", True)
        stream = await near.open_stream(far.peer_id, ECHO)
        payload = bytes(range(256)) * 8192  # 2 MiB, more than any window at the beginning

        async def send():
            await stream.write(payload)
            await stream.close()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            assert await read_exactly(stream.read, len(payload)) == payload
        assert await stream.read() == b""
        assert trio_of.relay.bytes_carried > 2 * len(payload)
        assert near.invite(far.peer_id, lambda channel: None) is None
        assert far.invite(near.peer_id, lambda channel: None) is None


async def test_both_ends_close_in_order_and_the_relay_keeps_nothing(open_hosts):
    async with opened(open_hosts) as trio_of:
        lost = trio_of.far.watch()
        await trio_of.near.connect([trio_of.through()])
        assert trio_of.relay.circuits == 1
        await trio_of.near.disconnect(trio_of.far.peer_id)
        with trio.fail_after(5):
            async for event in lost:
                if isinstance(event, PeerLost):
                    assert "goodbye" in event.reason
                    break
        await until(lambda: trio_of.relay.circuits == 0)
        assert trio_of.relay.reservations == 1


async def test_a_relay_that_dies_ends_its_circuits_and_reservations(open_hosts):
    async with opened(open_hosts) as trio_of:
        await trio_of.near.connect([trio_of.through()])
        assert trio_of.circuits.relays == (trio_of.relay_host.peer_id,)
        await trio_of.relay_host.shut_down()
        await until(lambda: not trio_of.near.connections() and not trio_of.far.connections())
        await until(lambda: trio_of.circuits.relays == ())


async def test_a_reservation_is_given_back_by_ending_it(open_hosts):
    async with opened(open_hosts) as trio_of:
        trio_of.holding.cancel()
        await until(lambda: trio_of.relay.reservations == 0)


async def test_nobody_is_reached_who_has_no_reservation(open_hosts):
    async with opened(open_hosts) as trio_of:
        relay = trio_of.through().partition("/p2p-circuit")[0]
        trio_of.far.use_circuits(trio_of.circuits.dial)
        with pytest.raises(Unreachable, match="no reservation of that peer"):
            await trio_of.far.connect([f"{relay}/p2p-circuit/p2p/{trio_of.near.peer_id}"])


async def test_limits_of_a_relay_are_kept(open_hosts):
    async with opened(open_hosts, relay_reservations_max=1, relay_circuits_per_peer_max=1) as trio_of:
        ours = Circuits(trio_of.near, anybody, trio_of.near.take_circuit)
        with pytest.raises(CapacityError, match="full"):
            await ours.reserve(trio_of.relay_host.peer_id, lambda: None)
        await trio_of.near.connect([trio_of.through()])
        with pytest.raises(CapacityError, match="full"):
            await ours.dial(trio_of.relay_host.peer_id, trio_of.far.peer_id)


async def test_a_circuit_ends_after_the_bytes_that_a_relay_allows(open_hosts):
    async with opened(open_hosts, relay_circuit_bytes=200_000) as trio_of:
        await trio_of.near.connect([trio_of.through()])
        stream = await trio_of.near.open_stream(trio_of.far.peer_id, ECHO)
        await stream.write(b"x" * 300_000)
        with pytest.raises(Unreachable), trio.fail_after(5):
            await read_exactly(stream.read, 300_000)
        await until(lambda: trio_of.relay.circuits == 0)


async def test_a_circuit_ends_after_the_time_that_a_relay_allows(open_hosts):
    async with opened(open_hosts, relay_circuit_s=0.3) as trio_of:
        await trio_of.near.connect([trio_of.through()])
        await until(lambda: trio_of.far.peer_id not in {each.peer for each in trio_of.near.connections()})


async def test_a_direct_connection_is_preferred_and_streams_of_the_relayed_one_go_on(open_hosts):
    async with opened(open_hosts) as trio_of:
        far, near = trio_of.far, trio_of.near
        await near.connect([trio_of.through()])
        old = await near.open_stream(far.peer_id, ECHO)
        await far._dial(*parse_addresses(near.addresses()))
        await until(lambda: near.way_to(far.peer_id) is not None)
        for one, other in ((near, far), (far, near)):
            assert [each.path for each in one.connections() if each.peer == other.peer_id] == ["direct"]
        await old.write(b"still here")
        assert await read_exactly(old.read, 10) == b"still here"
        assert trio_of.relay.circuits == 1
        await old.close()
        await until(lambda: trio_of.relay.circuits == 0)


async def test_who_holds_no_reservation_of_ours_brings_nobody(open_hosts):
    async with opened(open_hosts) as trio_of:
        await trio_of.near.connect(trio_of.far.addresses())
        with pytest.raises(Unreachable, match="was reset"):
            await take_first_byte(trio_of.near, trio_of.far.peer_id)


async def take_first_byte(transport, peer):
    stream = await transport.open_stream(peer, CIRCUIT_PROTOCOL)
    await read_exactly(stream.read, 1)


async def test_a_relay_resets_who_asks_for_nonsense(open_hosts):
    async with opened(open_hosts) as trio_of:
        for said in (b"\x07", bytes([Ask.CONNECT, 0]), bytes([Ask.CONNECT, 3]) + b"\xff/."):
            stream = await trio_of.near.open_stream(trio_of.relay_host.peer_id, RELAY_PROTOCOL)
            await stream.write(said)
            with pytest.raises(Unreachable):
                await read_exactly(stream.read, 1)
        assert trio_of.relay.reservations == 1


async def test_law_7_what_a_relay_holds_of_a_circuit_is_bounded_however_much_is_sent_and_not_read(open_hosts):
    async with opened(open_hosts) as trio_of:

        async def take_some(stream, relay):
            taken = 0
            while taken < 24 << 20:  # long enough for windows to grow
                taken += len(await stream.read())
            await trio.sleep_forever()

        trio_of.circuits._take = take_some
        ours = Circuits(trio_of.near, anybody, trio_of.near.take_circuit)
        stream = await ours.dial(trio_of.relay_host.peer_id, trio_of.far.peer_id)
        is_stuck = False
        while not is_stuck:
            with trio.move_on_after(1) as writing:
                await stream.write(bytes(1 << 16))
            is_stuck = writing.cancelled_caught
        assert 300_000 < held_by(trio_of.relay_host) <= LOOPBACK.relay_circuit_buffer_bytes // 2


def held_by(host: Libp2pTransport) -> int:
    """Bytes that it has received and not read, or written and not sent, of all streams."""
    muxers = [live.muxed for live in host._table.all()]
    streams = [stream for muxed in muxers for stream in muxed._streams.values()]
    return sum(stream._received_bytes + stream._unsent_bytes for stream in streams)


async def test_law_7_a_circuit_whose_buffers_do_not_fit_any_more_is_refused(open_hosts):
    async with opened(open_hosts, relay_buffer_bytes=3 << 20) as trio_of:
        await trio_of.near.connect([trio_of.through()])
        ours = Circuits(trio_of.near, anybody, trio_of.near.take_circuit)
        with pytest.raises(CapacityError, match="full"):
            await ours.dial(trio_of.relay_host.peer_id, trio_of.far.peer_id)
