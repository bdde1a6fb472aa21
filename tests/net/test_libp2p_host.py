import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import warnings
from dataclasses import replace

import pytest
import trio
from libp2p import new_host
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_ID
from libp2p.security.noise.transport import Transport as StockNoise
from multiaddr import Multiaddr
from net_helpers import LOOPBACK

from kvasir_node.base.errors import Misbehaved, RejectReason, Unreachable, UsageError
from kvasir_node.net.identity import key_from_seed, peer_id_of, verify_signature
from kvasir_node.net.libp2p_host import open_libp2p_transport
from kvasir_node.net.transport import PeerConnected, PeerLost

ECHO = "/test/echo/1"


async def echo(stream):
    while chunk := await stream.read():
        await stream.write(bytes(chunk))


async def say_nothing(stream):
    await trio.sleep_forever()


async def read_exactly(stream, count):
    received = b""
    while len(received) < count:
        chunk = await stream.read(count - len(received))
        assert chunk
        received += chunk
    return received


async def test_two_nodes_connect_and_a_stream_carries_bytes_both_ways(open_hosts):
    async with open_hosts(2) as (left, right):
        right.set_handler(ECHO, echo)
        assert await left.connect(right.addresses()) == right.peer_id
        stream = await left.open_stream(right.peer_id, ECHO)
        assert (stream.peer, stream.protocol) == (right.peer_id, ECHO)
        await stream.write(b"a" * 300_000, memoryview(b"b"))
        assert await read_exactly(stream, 300_001) == b"a" * 300_000 + b"b"
        await stream.close()
        assert await stream.read() == b""
        (connection,) = left.connections()
        assert connection.peer == right.peer_id
        assert not connection.inbound
        assert connection.path == "direct"
        assert connection.address.startswith("/ip4/127.0.0.1/tcp/")
        assert right.connections()[0].inbound
        assert left.bytes_out > 300_000
        assert left.bytes_in > 300_000


async def test_a_second_connect_returns_at_once_and_ten_share_one_dial(open_hosts):
    async with open_hosts(2) as (left, right):
        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(left.connect, right.addresses())
        await left.connect(right.addresses())
        assert len(left._table.all()) == 1


async def test_ten_that_wait_for_one_dial_share_its_failure(open_hosts):
    async with open_hosts(2) as (near, far):
        near._settings = replace(near._settings, connect_timeout_s=0.4)
        dead = f"/ip4/127.0.0.1/tcp/9/p2p/{far.peer_id}"
        silent = await trio.open_tcp_listeners(0, host="127.0.0.1")
        mute = f"/ip4/127.0.0.1/tcp/{silent[0].socket.getsockname()[1]}/p2p/{far.peer_id}"
        failures = []

        async def connect():
            with pytest.raises(Unreachable) as failed:
                await near.connect([dead, mute])
            failures.append(str(failed.value))

        began_at = trio.current_time()
        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(connect)
        assert trio.current_time() - began_at < 3.0  # one after the other took four
        assert len(failures) == 10
        assert len(set(failures)) == 1
        # Who knows another address is not put off with the failure of those.
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connect)
            await trio.sleep(0.1)
            assert await near.connect(far.addresses()) == far.peer_id
        await silent[0].aclose()


async def test_an_unknown_protocol_is_unreachable_and_harms_nothing(open_hosts):
    async with open_hosts(2) as (left, right):
        right.set_handler(ECHO, echo)
        await left.connect(right.addresses())
        with pytest.raises(Unreachable, match="does not speak /no/such"):
            await left.open_stream(right.peer_id, "/no/such/1")
        stream = await left.open_stream(right.peer_id, ECHO)
        await stream.write(b"x")
        assert await stream.read() == b"x"


async def test_a_stream_to_a_stranger_is_unreachable(open_hosts):
    async with open_hosts(2) as (left, right):
        with pytest.raises(Unreachable, match="not connected"):
            await left.open_stream(right.peer_id, ECHO)


@pytest.mark.parametrize("error", [RuntimeError("a bug"), Misbehaved(RejectReason.STALE, "x"), Unreachable("x")])
async def test_a_handler_that_raises_costs_its_stream_alone(open_hosts, error):
    async def failing(stream):
        await stream.read()
        raise error

    async with open_hosts(2) as (left, right):
        right.set_handler("/test/fail/1", failing)
        right.set_handler(ECHO, echo)
        await left.connect(right.addresses())
        good = await left.open_stream(right.peer_id, ECHO)
        bad = await left.open_stream(right.peer_id, "/test/fail/1")
        await bad.write(b"x")
        with pytest.raises(Unreachable, match="reset"):
            await bad.read()
        await good.write(b"still here")
        assert await good.read() == b"still here"


async def test_garbage_instead_of_a_protocol_costs_its_stream_alone(open_hosts):
    async with open_hosts(2) as (left, right):
        right.set_handler(ECHO, echo)
        await left.connect(right.addresses())
        muxed = left._table.preferred(right.peer_id).muxed
        for garbage in (b"\xff" * 100, b"\x03abc", b"\x05na\n\n\n", os.urandom(1000)):
            stream = muxed.open_stream_now()
            await stream.send(garbage)
            await stream.close()
        good = await left.open_stream(right.peer_id, ECHO)
        await good.write(b"still here")
        assert await good.read() == b"still here"


async def test_garbage_instead_of_a_handshake_harms_nobody(open_hosts):
    async with open_hosts(2) as (left, right):
        port = int(right.addresses()[0].split("/")[4])
        for garbage in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x13/multistream/1.0.0\n\x07/noise\n" + os.urandom(500)):
            stream = await trio.open_tcp_stream("127.0.0.1", port)
            await stream.send_all(garbage)
            await stream.aclose()
        await left.connect(right.addresses())


async def test_dead_and_odd_addresses_first_do_no_harm(open_hosts):
    async with open_hosts(2) as (left, right):
        dead = [
            f"/ip4/127.0.0.1/tcp/1/p2p/{right.peer_id}",
            f"/ip6/2001:db8::1/tcp/9/p2p/{right.peer_id}",
            f"/ip4/127.0.0.1/udp/9/quic-v1/p2p/{right.peer_id}",
            f"/ip4/0.0.0.0/tcp/9/p2p/{right.peer_id}",
        ]
        with trio.fail_after(3):
            await left.connect([*dead, *right.addresses()])


async def test_a_socket_that_accepts_and_says_nothing_is_passed_by(open_hosts):
    async with open_hosts(2) as (left, right), trio.open_nursery() as nursery:
        (tarpit,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, say_nothing, [tarpit])
        address = f"/ip4/127.0.0.1/tcp/{tarpit.socket.getsockname()[1]}/p2p/{right.peer_id}"
        with trio.fail_after(3):
            await left.connect([address, *right.addresses()])
        nursery.cancel_scope.cancel()


async def test_another_peer_at_the_address_is_refused(open_hosts):
    async with open_hosts(2) as (left, right):
        expected = peer_id_of(key_from_seed(b"\7" * 32))
        address = right.addresses()[0].replace(right.peer_id, expected)
        with pytest.raises(Unreachable, match="another peer answers there"):
            await left.connect([address])
        assert left.connections() == ()


async def test_an_unreachable_peer_is_told_address_by_address(open_hosts):
    async with open_hosts(2) as (left, right):
        port = right.addresses()[0].split("/")[4]
        address = right.addresses()[0].replace(f"/{port}/", "/1/")
        with pytest.raises(Unreachable, match=rf"{address}: connection refused"):
            await left.connect([address])
        await left.connect(right.addresses())  # and nothing remembers the failure


async def test_connecting_to_oneself_is_the_callers_mistake(open_hosts):
    async with open_hosts(1) as (only,):
        with pytest.raises(UsageError, match="itself"):
            await only.connect(only.addresses())


@pytest.mark.parametrize("round_number", range(3))
async def test_dialling_each_other_at_once_leaves_a_working_connection(open_hosts, round_number):
    async with open_hosts(2) as (left, right):
        for each in (left, right):
            each.set_handler(ECHO, echo)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(left.connect, right.addresses())
            nursery.start_soon(right.connect, left.addresses())
        for one, other in ((left, right), (right, left)):
            stream = await one.open_stream(other.peer_id, ECHO)
            await stream.write(b"works")
            assert await stream.read() == b"works"
            await stream.close()
            assert await stream.read() == b""
        with trio.fail_after(5):
            while len(left._table.all()) != 1 or len(right._table.all()) != 1:  # noqa: ASYNC110
                await trio.sleep(0.01)


async def test_watchers_hear_of_peers_that_come_and_go(open_hosts):
    async with open_hosts(2) as (left, right):
        events = left.watch()
        await right.connect(left.addresses())
        with trio.fail_after(5):
            assert await events.receive() == PeerConnected(right.peer_id)
            await right.disconnect(left.peer_id)
            lost = await events.receive()
        assert isinstance(lost, PeerLost)
        assert lost.peer == right.peer_id
        assert "goodbye" in lost.reason
        assert right.connections() == ()


async def test_peers_are_limited(open_hosts):
    async with open_hosts(3, peers_max=1) as (hub, first, second):
        await first.connect(hub.addresses())
        with pytest.raises(Unreachable, match="no connection"):
            await second.connect(hub.addresses())
        with pytest.raises(Unreachable, match="peers are connected; raise"):
            await first.connect(second.addresses())
        assert len(hub.connections()) == 1


async def test_a_signature_proves_the_peer_id(open_hosts):
    async with open_hosts(1) as (only,):
        assert verify_signature(only.peer_id, b"demand", only.sign(b"demand"))


async def test_an_error_inside_the_block_comes_out_as_itself(tmp_path):
    with pytest.raises(UsageError, match="mine"):
        async with open_libp2p_transport(LOOPBACK, tmp_path / "key"):
            raise UsageError("mine")


async def test_a_port_in_use_stops_the_start(tmp_path, open_hosts):
    async with open_hosts(1) as (running,):
        taken = running.addresses()[0].split("/p2p/")[0]
        with pytest.raises(UsageError, match="in use"):
            async with open_libp2p_transport(replace(LOOPBACK, listen=(taken,)), tmp_path / "other"):
                pass


async def test_twenty_starts_and_stops_leave_nothing_behind(tmp_path):
    async def once():
        async with (
            open_libp2p_transport(LOOPBACK, tmp_path / "a") as left,
            open_libp2p_transport(LOOPBACK, tmp_path / "b") as right,
        ):
            right.set_handler(ECHO, echo)
            await left.connect(right.addresses())
            stream = await left.open_stream(right.peer_id, ECHO)
            await stream.write(b"x")
            assert await stream.read() == b"x"

    await once()
    tasks, files, threads = living_tasks(), len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(20):
        await once()
    await trio.sleep(0.2)  # identify's own tasks end with their streams
    assert living_tasks() <= tasks
    assert len(os.listdir("/proc/self/fd")) <= files
    assert threading.active_count() <= threads


def living_tasks():
    return trio.lowlevel.current_statistics().tasks_living


def stock_host(address):
    key = key_from_seed(os.urandom(32))
    noise = StockNoise(key, noise_privkey=create_noise_key().private_key)
    return new_host(key_pair=key, sec_opt={NOISE_ID: noise}, listen_addrs=[address])


async def test_speaks_with_a_stock_host_both_ways(open_hosts):
    address = Multiaddr("/ip4/127.0.0.1/tcp/0")
    stock = stock_host(address)

    async def stock_echo(stream):
        await stream.write(await stream.read(100))
        await stream.close()

    async with open_hosts(1) as (ours,), stock.run([address]):
        stock.set_stream_handler("/stock/echo/1", stock_echo)
        ours.set_handler(ECHO, echo)
        stock_peer = await ours.connect([str(each) for each in stock.get_addrs()])
        stream = await ours.open_stream(stock_peer, "/stock/echo/1")
        await stream.write(b"to stock")
        assert await read_exactly(stream, 8) == b"to stock"
        back = await stock.new_stream(info_from_p2p_addr(Multiaddr(ours.addresses()[0])).peer_id, [ECHO])
        await back.write(b"from stock")
        assert await back.read(10) == b"from stock"
        await back.close()


async def test_a_plaintext_peer_is_refused(open_hosts):
    """The library's default security list holds plaintext; ours must not."""
    async with open_hosts(1) as (ours,):
        stream = await trio.open_tcp_stream("127.0.0.1", int(ours.addresses()[0].split("/")[4]))
        async with stream:
            await stream.send_all(b"\x13/multistream/1.0.0\n\x11/plaintext/2.0.0\n")
            answer = b""
            with trio.fail_after(5):
                while b"na\n" not in answer:
                    answer += await stream.receive_some()


async def test_libp2p_says_nothing_on_its_own(open_hosts, caplog):
    async with open_hosts(1) as (ours,):
        logging.getLogger("libp2p.network.swarm").error("a stranger came by")
        assert ours.connections() == ()
    assert "a stranger came by" not in caplog.text


CHILD = """
import sys, trio
from dataclasses import replace
from pathlib import Path
from kvasir_node.base.settings import NetworkSettings
from kvasir_node.net.libp2p_host import open_libp2p_transport
async def main():
    settings = NetworkSettings(listen=("/ip4/127.0.0.1/tcp/0",))
    async with open_libp2p_transport(settings, Path(sys.argv[1])) as transport:
        print(transport.addresses()[0], flush=True)
        await trio.sleep_forever()
trio.run(main)
"""


@pytest.mark.parametrize(("how", "within_s"), [(signal.SIGSTOP, 1.5), (signal.SIGKILL, 1.0)])
async def test_a_stopped_or_killed_process_is_noticed(open_hosts, tmp_path, how, within_s):
    command = [sys.executable, "-c", CHILD, str(tmp_path / "child")]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220
    try:
        address = await trio.to_thread.run_sync(child.stdout.readline)
        async with open_hosts(1, keepalive_interval_s=0.4, keepalive_timeout_s=0.6) as (ours,):
            events = ours.watch()
            await ours.connect([address.strip()])
            assert isinstance(await events.receive(), PeerConnected)
            child.send_signal(how)
            with trio.fail_after(within_s):
                assert isinstance(await events.receive(), PeerLost)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


PING, IDENTIFY = "/ipfs/ping/1.0.0", "/ipfs/id/1.0.0"


@pytest.mark.parametrize("ending", ["", "/ws"])
async def test_a_stock_host_pings_identifies_and_exchanges_4_mb(sockets_left_by_stock, open_hosts, ending):
    address = Multiaddr(f"/ip4/127.0.0.1/tcp/0{ending}")
    stock, data = stock_host(address), os.urandom(4 * 1024 * 1024)

    async def stock_echo(stream):
        received = b""
        while len(received) < len(data):
            received += await stream.read(65_536)
        await stream.write(received)
        await stream.close()

    async with open_hosts(1) as (ours,), stock.run([address]):
        stock.set_stream_handler("/stock/echo/1", stock_echo)
        ours.set_handler(ECHO, echo)
        (own,) = [
            each for each in ours.addresses() if each.split("/p2p/")[0].endswith(f"/tcp/{each.split('/')[4]}{ending}")
        ]
        remote = info_from_p2p_addr(Multiaddr(own))
        with trio.fail_after(60):
            await stock.connect(remote)
            ping = await stock.new_stream(remote.peer_id, [PING])
            await ping.write(bytes(range(32)))
            assert await ping.read(32) == bytes(range(32))
            identify = await stock.new_stream(remote.peer_id, [IDENTIFY])
            assert ECHO.encode() in await identify.read(65_536)
            theirs = await stock.new_stream(remote.peer_id, [ECHO])
            await exchange(theirs, data)
            (peer,) = [each.peer for each in ours.connections()]
            stream = await ours.open_stream(peer, "/stock/echo/1")
            await stream.write(data)
            assert await read_exactly(stream, len(data)) == data


@pytest.fixture
def sockets_left_by_stock():
    """A stock host that dialled leaves its socket to the garbage collector, which says so."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


async def exchange(stock_stream, data):
    received = bytearray()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stock_stream.write, data)
        while len(received) < len(data):
            received += await stock_stream.read(65_536)
    assert received == data


@pytest.mark.parametrize("ending", ["", "/ws"])
async def test_a_stock_host_is_dialled_by_either_address(open_hosts, ending):
    address = Multiaddr(f"/ip4/127.0.0.1/tcp/0{ending}")
    stock = stock_host(address)
    async with open_hosts(1) as (ours,), stock.run([address]):
        await ours.connect([str(each) for each in stock.get_addrs()])
        assert ours.connections()[0].address.endswith("/ws") == bool(ending)
