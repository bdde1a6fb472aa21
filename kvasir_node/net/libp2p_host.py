"""The real network: a Transport over libp2p's TCP, our Noise session and our Yamux.

It does not know calls, membership, gossip or roles.

What libp2p 0.8.1 is used for: the Noise handshake, protocol selection of inbound streams, identify, and the host
object that gossipsub is built on. What it is kept from: dialling (it tries one address and waits 250 ms), relaying and
punching holes (circuit.py and punch.py say why), listening (it keeps a task and a place per connection until shutdown,
and shares ports), choosing connections, and raising: an exception in any stream handler of its own would end the whole
host.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import trio
from libp2p.abc import INetConn, INetStream, INetwork, INotifee
from libp2p.crypto.keys import KeyPair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key
from libp2p.custom_types import TProtocol
from libp2p.host.basic_host import BasicHost
from libp2p.network.auto_connector import AutoConnector
from libp2p.network.config import ConnectionConfig
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.exceptions import SwarmException
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_PROTOCOL
from libp2p.tools.anyio_service import background_trio_service
from libp2p.transport.upgrader import TransportUpgrader
from multiaddr import Multiaddr

from kvasir_node.base.errors import KvasirError, Unreachable, UsageError
from kvasir_node.base.ids import PeerId
from kvasir_node.base.settings import NetworkSettings
from kvasir_node.net.circuit import CircuitStream, circuit_connection
from kvasir_node.net.connections import ConnectionTable, LiveConnection
from kvasir_node.net.dialler import DialAddress, describe_failure, dial_first, parse_addresses
from kvasir_node.net.express import ExpressChannel
from kvasir_node.net.express_door import MAGIC as EXPRESS_MAGIC
from kvasir_node.net.express_door import ExpressDoor
from kvasir_node.net.handshakes import Handshakes
from kvasir_node.net.identity import load_or_create_key, peer_id_of, sign_with
from kvasir_node.net.listener import TcpListener, bind_all
from kvasir_node.net.muxer import YamuxConnection, YamuxNegotiator
from kvasir_node.net.muxer_stream import YamuxStream
from kvasir_node.net.negotiation import choose_protocol
from kvasir_node.net.noise_session import BufferedNoise
from kvasir_node.net.outbound import connect_tcp
from kvasir_node.net.raw_link import TcpStream
from kvasir_node.net.single_error import single_error_unwrapped
from kvasir_node.net.transport import Connection, PeerConnected, PeerLost, Stream, StreamHandler
from kvasir_node.net.websocket import WebSocketStream, accept_websocket, begins_as_http, connect_websocket

UPGRADE_TIMEOUT_S = 10  # an inbound connection must be authenticated by then; libp2p wants whole seconds
DUPLICATE_LINGER_S = 10.0  # streams on a second connection to the same peer may take this long to end ...
RELAYED_LINGER_S = 120.0  # ... and this long on one through a relay, once there is a direct one
SHUTDOWN_S = 2.0
CAME_FROM_MAX = 1024  # peers of which it is remembered where they dialled us from; the first one makes room
_ANY_ADDRESS = Multiaddr("/ip4/0.0.0.0")  # libp2p only logs which listener a connection came through

_log = logging.getLogger(__name__)


class Libp2pStream:
    """A Stream (see transport.py) on one Yamux stream."""

    def __init__(self, muxed: YamuxStream, peer: PeerId, protocol: str) -> None:
        self._muxed = muxed
        self._peer = peer
        self._protocol = protocol
        self.write_now = muxed.send_now
        self.pump = muxed.pump
        self.limit_window = muxed.limit_window
        self.finish = muxed.finish  # closes, and drops whatever the peer still sends

    @property
    def peer(self) -> PeerId:
        return self._peer

    @property
    def protocol(self) -> str:
        return self._protocol

    def give_way(self) -> None:
        self._muxed.yields = True

    async def read(self, max_bytes: int = 262_144) -> bytes | memoryview:
        chunk = await self._muxed.receive(max_bytes)
        return memoryview(chunk) if isinstance(chunk, bytearray) else chunk

    async def write(self, *parts: bytes | bytearray | memoryview) -> None:
        await self._muxed.send(*parts)

    async def close(self) -> None:
        await self._muxed.close()

    async def reset(self) -> None:
        await self._muxed.reset()


class _NeverConnects(AutoConnector):
    """Stands where libp2p would dial, by itself, whatever peers it has heard of."""

    async def maybe_connect(self) -> None:
        await trio.lowlevel.checkpoint()

    def record_disconnect(self, peer_id: ID) -> None:
        """Theirs keeps every peer that ever left."""


class _GuardedSwarm(Swarm):
    """libp2p's table of connections, which never dials and chooses the connection that our table prefers."""

    table: ConnectionTable

    async def dial_peer(self, peer_id: ID) -> list[INetConn]:
        raise SwarmException(f"not connected to {peer_id}; only Libp2pTransport.connect dials")

    def _select_connection(self, connections: list[INetConn], peer_id: ID) -> INetConn:
        live = self.table.preferred(PeerId(peer_id.to_base58()))
        return next(
            (each for each in connections if live is not None and each.muxed_conn is live.muxed), connections[0]
        )


@dataclass(slots=True)
class _Dial:
    """One under way to a peer, at these addresses; `failure` is set before `ended` if it came to nothing."""

    tried: frozenset[str]
    ended: trio.Event = field(default_factory=trio.Event)
    failure: Unreachable | None = None


class Libp2pTransport(INotifee):
    """Implements Transport; made by `open_libp2p_transport`."""

    def __init__(self, settings: NetworkSettings, key: KeyPair, listeners: Sequence[TcpListener]) -> None:
        self._settings = settings
        self._key = key
        self._listeners = tuple(listeners)
        self._peer_id = peer_id_of(key)
        self._table = ConnectionTable(self._peer_id, settings.peers_max)
        self._dials: dict[PeerId, _Dial] = {}
        self._handshakes = Handshakes()
        self._came_from: dict[PeerId, str] = {}  # the IPs of those that dialled us last
        self._door = ExpressDoor(settings.frame_bytes_max)
        self._doors: dict[bytes, Callable[[TcpStream], Awaitable[None]]] = {EXPRESS_MAGIC: self._door.admit}
        self._advertise: Callable[[Sequence[str]], Sequence[str]] = lambda listening: listening
        self._dial_circuit: Callable[[PeerId, PeerId], Awaitable[Stream]] | None = None
        self._nursery: trio.Nursery | None = None
        self.swarm = _new_swarm(settings, key, self._table)
        self.host = BasicHost(self.swarm)
        self.swarm.set_stream_handler(self._guarded_inbound(self.swarm.common_stream_handler))
        self.swarm.register_notifee(self)

    # --- Transport ---

    @property
    def peer_id(self) -> PeerId:
        return self._peer_id

    @property
    def bytes_in(self) -> int:
        return self._table.bytes_in + self._door.bytes_in

    @property
    def bytes_out(self) -> int:
        return self._table.bytes_out + self._door.bytes_out

    def addresses(self) -> tuple[str, ...]:
        return tuple(f"{text}/p2p/{self._peer_id}" for text in self._advertise(self.listening()))

    def connections(self) -> tuple[Connection, ...]:
        return self._table.snapshot()

    def sign(self, message: bytes) -> bytes:
        return sign_with(self._key, message)

    def set_handler(self, protocol: str, handler: StreamHandler) -> None:
        async def serve(net_stream: INetStream) -> None:
            muxed = cast("YamuxStream", cast("Any", net_stream).muxed_stream)
            stream = Libp2pStream(muxed, PeerId(net_stream.muxed_conn.peer_id.to_base58()), protocol)
            await handler(stream)
            muxed.finish()

        self.host.set_stream_handler(TProtocol(protocol), serve)

    async def connect(self, addresses: Sequence[str]) -> PeerId:
        """See Transport. Calls for one peer share one dial. Cancel-safety: a cancelled dial leaves nothing open."""
        peer, dials = parse_addresses(addresses)
        if peer == self._peer_id:
            raise UsageError(f"{peer} is this node itself")
        while (other := self._dials.get(peer)) is not None:
            await other.ended.wait()
            if other.failure is not None and other.tried.issuperset(addresses):
                raise Unreachable(str(other.failure))
        if peer in self._table:
            return peer
        if self._table.is_full:
            text = f"not dialling {peer}: {self._settings.peers_max} peers are connected; raise network.peers_max"
            raise Unreachable(text)
        dial = self._dials[peer] = _Dial(frozenset(addresses))
        try:
            await self._dial(peer, dials)
        except Unreachable as error:
            dial.failure = error
            raise
        finally:
            del self._dials[peer]
            dial.ended.set()
        return peer

    async def open_stream(self, peer: PeerId, protocol: str) -> Libp2pStream:
        """See Transport. Cancel-safety: a cancelled call leaves no stream behind."""
        live = self._table.preferred(peer)
        if live is None:
            raise Unreachable(f"cannot open {protocol}: not connected to {peer}")
        stream = live.muxed.open_stream_now()
        try:
            with trio.move_on_after(self._settings.connect_timeout_s) as waiting:
                await choose_protocol(stream, protocol)
            if waiting.cancelled_caught:
                raise Unreachable(f"{peer} did not answer for {protocol} in {self._settings.connect_timeout_s:g} s")
        except BaseException:
            stream.reset_now("the protocol was not agreed")
            raise
        return Libp2pStream(stream, peer, protocol)

    def invite(self, peer: PeerId, arrived: Callable[[ExpressChannel], None]) -> bytes | None:
        if not any(live.inbound and live.is_plain for live in self._table.of(peer)):
            return None
        return self._door.invite(peer, arrived)

    async def accept_invitation(self, peer: PeerId, invitation: bytes) -> ExpressChannel:
        dialled = [live for live in self._table.of(peer) if live.is_plain and not live.inbound]
        if not dialled:
            raise Unreachable(f"no express channel to {peer}: this node has not dialled it at a TCP address")
        _, address = parse_addresses([f"{dialled[-1].address}/p2p/{peer}"])
        return await self._door.enter(peer, address[0].host, address[0].port, invitation)

    async def ping(self, peer: PeerId) -> float:
        live = self._table.preferred(peer)
        if live is None:
            raise Unreachable(f"not connected to {peer}")
        return await live.muxed.ping()

    async def disconnect(self, peer: PeerId) -> None:
        self._door.close("disconnected by us", peer)
        if (host := self._came_from.pop(peer, None)) is not None:  # it may have left by itself meanwhile
            self._handshakes.refused(host)
        async with trio.open_nursery() as nursery:
            for live in self._table.of(peer):
                nursery.start_soon(live.muxed.close, "disconnected by us")

    def watch(self) -> trio.MemoryReceiveChannel[PeerConnected | PeerLost]:
        return self._table.watch()

    # --- outbound ---

    async def _dial(self, peer: PeerId, dials: Sequence[DialAddress]) -> None:
        remote = ID.from_base58(str(peer))

        async def attempt(address: DialAddress) -> YamuxConnection:
            return await self._connect_address(remote, address)

        timeout_s = self._settings.connect_timeout_s
        muxed = await dial_first(peer, dials, attempt, YamuxConnection.close, timeout_s=timeout_s)
        try:
            await self.swarm.add_conn(muxed, direction="outbound")
        except SwarmException as error:
            raise Unreachable(f"no connection to {peer}: {muxed.end_reason or error}") from error
        if peer not in self._table:
            raise Unreachable(f"no connection to {peer}: it ended at once: {muxed.end_reason}")

    async def _connect_address(self, remote: ID, address: DialAddress) -> YamuxConnection:
        if address.relay is not None:
            return await self._connect_relayed(remote, address.relay, address.relay_address)
        tcp = TcpStream(await connect_tcp(address.host, address.port, self.bound()))
        try:
            local_port = tcp.local_port
            raw = RawConnection(tcp, True)
            if address.is_websocket:
                raw = _websocket_connection(await connect_websocket(tcp, address.host, address.port), is_initiator=True)
            muxed = await self._upgrade_outbound(raw, remote)
            muxed.local_port = local_port
            return muxed
        except BaseException:
            tcp.close_now()
            raise

    async def _connect_relayed(self, remote: ID, relay: PeerId, relay_address: str) -> YamuxConnection:
        if self._dial_circuit is None:
            raise Unreachable("this node does not dial through relays")
        if relay == self._peer_id:
            raise Unreachable("this node itself is the relay, and the peer is not connected")
        if relay not in self._table:
            if not relay_address:
                raise Unreachable(f"not connected to the relay {relay}")
            await self.connect([relay_address])
        stream = cast("Libp2pStream", await self._dial_circuit(relay, PeerId(remote.to_base58())))
        try:
            raw = circuit_connection(CircuitStream(stream, stream.finish), relay, is_initiator=True)
            return await self._upgrade_outbound(raw, remote)
        except BaseException:
            await stream.reset()
            raise

    async def _upgrade_outbound(self, raw: RawConnection, remote: ID) -> YamuxConnection:
        session = await self.swarm.upgrader.upgrade_security(raw, True, remote)
        return cast("YamuxConnection", await self.swarm.upgrader.upgrade_connection(session, remote))

    # --- inbound ---

    async def run(self, nursery: trio.Nursery) -> None:
        """Starts serving; the tasks live in `nursery`."""
        self._nursery = nursery
        for listener in self._listeners:
            for text in listener.addresses()[:1]:
                self.swarm.listeners[text] = listener  # what identify tells others
            nursery.start_soon(listener.serve, self._accepted, nursery)

    async def _accepted(self, stream: trio.SocketStream) -> None:
        tcp = TcpStream(stream)
        host = (tcp.get_remote_address() or ("", 0))[0]
        try:
            with self._handshakes.place(host), trio.fail_after(UPGRADE_TIMEOUT_S):
                for magic, admit in self._doors.items():
                    if await tcp.begins_with(magic):
                        await admit(tcp)
                        return
                if self._table.is_full:
                    raise KvasirError(f"{self._settings.peers_max} peers are connected already")
                await self._handshakes.turn()
                raw = RawConnection(tcp, False)
                if await begins_as_http(tcp):
                    raw = _websocket_connection(await accept_websocket(tcp), is_initiator=False)
                muxed = await self.swarm.upgrade_inbound_raw_conn(raw, _ANY_ADDRESS)
            connection = cast("YamuxConnection", muxed)
            self._came_from[PeerId(str(connection.peer_id))] = host
            if len(self._came_from) > CAME_FROM_MAX:
                del self._came_from[next(iter(self._came_from))]
            await connection.wait_ended()
        except Exception as error:
            # libp2p raises whatever its handshake meets in a stranger's bytes; it concerns that connection alone.
            _log.debug("inbound connection from %s refused: %s", tcp.get_remote_address(), error)
        finally:
            tcp.close_now()

    def _guarded_inbound(self, serve: Any) -> Any:
        async def guarded(net_stream: INetStream) -> None:
            muxed = cast("YamuxStream", cast("Any", net_stream).muxed_stream)
            try:
                await serve(net_stream)
            except KvasirError as error:
                _log.debug("stream %s of %s ended: %s", net_stream.get_protocol(), muxed.muxed_conn.peer_id, error)
                muxed.reset_now("its handler gave up")
            except Exception:
                # The one door for inbound streams: what leaves it would end the host, whoever's handler it was.
                _log.warning("handler of %s failed; stream reset", net_stream.get_protocol(), exc_info=True)
                muxed.reset_now("its handler failed")
            except BaseException:
                muxed.reset_now("the host is shutting down")
                raise

        return guarded

    # --- for those that find ways through NATs (roles/reaching) ---

    def listening(self) -> tuple[str, ...]:
        """The listeners' concrete addresses, without our id."""
        texts = [text for each in self._listeners for text in each.addresses()]
        return tuple(sorted(texts, key=lambda text: text.endswith("/ws")))  # who keeps only some keeps the plain ones

    def bound(self) -> tuple[tuple[str, int], ...]:
        """(IP, port) of each listener; a wildcard as it is."""
        return tuple(each.bound for each in self._listeners)

    def add_door(self, magic: bytes, admit: Callable[[TcpStream], Awaitable[None]]) -> None:
        """Inbound connections that begin with these bytes go to `admit`, which may detach them."""
        self._doors[magic] = admit

    def use_circuits(self, dial: Callable[[PeerId, PeerId], Awaitable[Stream]]) -> None:
        """How addresses through relays are dialled: (relay, peer) -> a circuit."""
        self._dial_circuit = dial

    def use_advertised(self, advertise: Callable[[Sequence[str]], Sequence[str]]) -> None:
        """What `addresses` makes of the listeners' concrete addresses; all without our own id."""
        self._advertise = advertise

    def way_to(self, peer: PeerId) -> tuple[str, bool, bool] | None:
        """(remote address, whether the peer dialled, whether our port is the listener's) of a TCP connection."""
        for live in reversed(self._table.of(peer)):
            if live.path == "direct" and not live.address.endswith("/ws"):
                ports = {port for _, port in self.bound()}
                return live.address, live.inbound, live.inbound or live.muxed.local_port in ports
        return None

    async def take_circuit(self, stream: Stream, relay: PeerId) -> None:
        """Serves a connection that was made to us through a relay, until it ends. Raises Unreachable."""
        own = cast("Libp2pStream", stream)
        raw = circuit_connection(CircuitStream(own, own.finish), relay, is_initiator=False)
        try:
            muxed = await self._upgrade_inbound(raw)
        except Exception as error:  # libp2p raises whatever its handshake meets in a stranger's bytes
            raise Unreachable(f"a connection through {relay} came to nothing: {describe_failure(error)}") from error
        await muxed.wait_ended()

    async def adopt(self, tcp: TcpStream, peer: PeerId, dials: bool) -> None:
        """Makes a TCP connection that was punched through NATs one of ours. Raises Unreachable; then close it."""
        try:
            if dials:
                muxed = await self._upgrade_outbound(RawConnection(tcp, True), ID.from_base58(str(peer)))
                muxed.is_punched = True
                await self.swarm.add_conn(muxed, direction="outbound")
            else:
                muxed = await self._upgrade_inbound(RawConnection(tcp, False))
                muxed.is_punched = True
        except Exception as error:  # libp2p raises whatever its handshake meets
            raise Unreachable(f"no direct connection to {peer}: {describe_failure(error)}") from error
        if PeerId(muxed.peer_id.to_base58()) != peer:
            await muxed.close("another peer than was asked for")
            raise Unreachable(f"no direct connection to {peer}: another peer answers there")

    async def _upgrade_inbound(self, raw: RawConnection) -> YamuxConnection:
        if self._table.is_full:
            raise Unreachable(f"{self._settings.peers_max} peers are connected already")
        with trio.fail_after(UPGRADE_TIMEOUT_S):
            return cast("YamuxConnection", await self.swarm.upgrade_inbound_raw_conn(raw, _ANY_ADDRESS))

    # --- libp2p's notifications ---

    async def connected(self, network: INetwork, conn: INetConn) -> None:
        muxed = cast("YamuxConnection", conn.muxed_conn)
        peer = PeerId(muxed.peer_id.to_base58())
        if peer not in self._table and self._table.is_full:
            await muxed.close("too many peers")
            return
        address = next((str(each) for each in muxed.get_transport_addresses()), "")
        path = "relay" if "/p2p-circuit" in address else "direct"
        for duplicate in self._table.add(peer, muxed, address, path):
            if self._nursery is not None:
                self._nursery.start_soon(self._retire, duplicate)

    async def _retire(self, duplicate: LiveConnection) -> None:
        with trio.move_on_after(DUPLICATE_LINGER_S if duplicate.path == "direct" else RELAYED_LINGER_S):
            await duplicate.muxed.wait_without_streams()
        if self._table.preferred(duplicate.peer) is duplicate:
            return  # the better one has ended meanwhile
        await duplicate.muxed.close("a second connection to the same peer")

    async def disconnected(self, network: INetwork, conn: INetConn) -> None:
        """The muxer itself reports the end, at once and with its reason."""

    async def opened_stream(self, network: INetwork, stream: INetStream) -> None: ...

    async def closed_stream(self, network: INetwork, stream: INetStream) -> None: ...

    async def listen(self, network: INetwork, multiaddr: Multiaddr) -> None: ...

    async def listen_close(self, network: INetwork, multiaddr: Multiaddr) -> None: ...

    # --- end ---

    async def shut_down(self) -> None:
        """Closes listeners and connections, says goodbye to every peer, and stops libp2p's background tasks."""
        self._door.close("this node is shutting down")
        with trio.move_on_after(SHUTDOWN_S) as closing:
            closing.shield = True
            async with trio.open_nursery() as nursery:
                for listener in self._listeners:
                    nursery.start_soon(listener.close)
                for live in self._table.all():
                    nursery.start_soon(live.muxed.close, "this node is shutting down")
            await self.host.close()
        self._table.close()


def _websocket_connection(stream: WebSocketStream, *, is_initiator: bool) -> RawConnection:
    remote = stream.get_remote_address()
    known = [Multiaddr(f"/ip{6 if ':' in remote[0] else 4}/{remote[0]}/tcp/{remote[1]}/ws")] if remote else []
    return RawConnection(stream, is_initiator, addresses=known)


def _new_swarm(settings: NetworkSettings, key: KeyPair, table: ConnectionTable) -> _GuardedSwarm:
    peer_id = ID.from_pubkey(key.public_key)
    peerstore = PeerStore()
    peerstore.add_key_pair(peer_id, key)
    noise = BufferedNoise(key, noise_privkey=create_noise_key().private_key)
    # Never the default security: it accepts plaintext, under any name.
    upgrader = TransportUpgrader({NOISE_PROTOCOL: noise}, {}, UPGRADE_TIMEOUT_S)
    upgrader.muxer_multistream = YamuxNegotiator(settings, UPGRADE_TIMEOUT_S)
    limits = ConnectionConfig(
        max_connections=2 * settings.peers_max,
        high_watermark=2 * settings.peers_max,
        low_watermark=0,
        min_connections=0,
        inbound_upgrade_timeout=UPGRADE_TIMEOUT_S,
        outbound_upgrade_timeout=UPGRADE_TIMEOUT_S,
    )
    swarm = _GuardedSwarm(peer_id, peerstore, upgrader, connection_config=limits)
    swarm.auto_connector = _NeverConnects(swarm)
    swarm.table = table
    return swarm


def quieten_libp2p() -> None:
    """Its loggers report each stranger's failed handshake as an error; what matters of it is logged here."""
    for name in ("libp2p", "multiaddr"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.CRITICAL)
        logger.propagate = False
        if not logger.handlers:
            logger.addHandler(logging.NullHandler())


@asynccontextmanager
async def open_libp2p_transport(settings: NetworkSettings, key_path: Path) -> AsyncIterator[Libp2pTransport]:
    """Listens on settings.listen with the key kept at key_path, until the block ends.

    Raises UsageError when a listen address or the key cannot be used. An error raised inside the block comes out
    as it is, not as a group.
    """
    quieten_libp2p()
    listeners = await bind_all(settings.listen)
    try:
        transport = Libp2pTransport(settings, load_or_create_key(key_path), listeners)
        with single_error_unwrapped():
            async with background_trio_service(transport.swarm), trio.open_nursery() as nursery:
                await transport.run(nursery)
                try:
                    yield transport
                finally:
                    await transport.shut_down()
                    nursery.cancel_scope.cancel()
    finally:
        for listener in listeners:
            await listener.close()
