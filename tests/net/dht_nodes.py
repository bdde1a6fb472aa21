"""Nodes of a libp2p DHT as others run them: py-libp2p's own hosts and its own Kademlia, on loopback, as they come."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from libp2p import new_host
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key
from libp2p.kad_dht.kad_dht import DHTMode, KadDHT
from libp2p.peer.peerinfo import PeerInfo
from libp2p.security.noise.transport import PROTOCOL_ID, Transport
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr

from kvasir_node.net.identity import key_from_seed
from kvasir_node.net.libp2p_host import quieten_libp2p


@asynccontextmanager
async def open_dht(count: int) -> AsyncIterator[list[str]]:
    """The addresses of `count` nodes that know each other as a chain: each one only the one before it."""
    quieten_libp2p()
    listen = Multiaddr("/ip4/127.0.0.1/tcp/0")
    addresses: list[str] = []
    before, hosts = None, []
    async with AsyncExitStack() as stack:
        for number in range(count):
            key = key_from_seed(bytes([100 + number]) * 32)
            security = {PROTOCOL_ID: Transport(key, noise_privkey=create_noise_key().private_key)}
            host = new_host(key_pair=key, sec_opt=security, listen_addrs=[listen])
            await stack.enter_async_context(host.run(listen_addrs=[listen]))
            dht = KadDHT(host, DHTMode.SERVER)
            await stack.enter_async_context(background_trio_service(dht))
            address = next(each for each in host.get_addrs() if "/tcp/" in str(each))
            if before is not None:
                await host.connect(before)
                await dht.routing_table.add_peer(before)
            before = PeerInfo(host.get_id(), [address.decapsulate_code(421)])
            addresses.append(str(address))
            hosts.append(host)
        yield addresses
        for host in hosts:  # at their end they leave connections open that they made
            for peer in host.get_connected_peers():
                await host.disconnect(peer)
