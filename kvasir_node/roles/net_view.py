"""What a node's snapshot says of its network: connections, how it is reached, members. It changes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice

from kvasir_node.base.ids import PeerId
from kvasir_node.base.snapshot import MemberSnapshot, NetSnapshot, WorkerPeerSnapshot
from kvasir_node.net.transport import Transport
from kvasir_node.roles.clocks import Clocks
from kvasir_node.roles.peers import Peers
from kvasir_node.roles.reaching import Reaching

MEMBERS_SHOWN_MAX = 512


def _paths(transport: Transport) -> dict[PeerId, str]:
    return {each.peer: each.path for each in transport.connections()}


def member_snapshots(peers: Peers, transport: Transport) -> tuple[MemberSnapshot, ...]:
    known = islice(peers.about().items(), MEMBERS_SHOWN_MAX)
    paths = _paths(transport)
    return tuple(
        MemberSnapshot(peer, about.name, about.roles, paths.get(peer, ""), peers.is_guest(peer))
        for peer, about in known
    )


def with_paths(workers: Iterable[WorkerPeerSnapshot], transport: Transport) -> tuple[WorkerPeerSnapshot, ...]:
    """Workers as a coordinator sees them, and the way that each is reached by now; empty for those that have gone."""
    paths = _paths(transport)
    return tuple(replace(each, path=paths.get(PeerId(each.peer_id), "")) for each in workers)


def net_snapshot(transport: Transport, reaching: Reaching | None, clocks: Clocks) -> NetSnapshot:
    """`reaching` is None before the node is ready."""
    connections = transport.connections()
    relayed = sum(1 for each in connections if each.path == "relay")
    counts = NetSnapshot(
        peers=len(connections),
        direct=len(connections) - relayed,
        relayed=relayed,
        bytes_in=transport.bytes_in,
        bytes_out=transport.bytes_out,
        clock_ahead_s=clocks.ahead_s,
        clock_doubt_s=clocks.doubt_s,
    )
    if reaching is None:
        return counts
    upnp, upnp_says = reaching.upnp
    return replace(
        counts,
        reachability=str(reaching.reachability),
        nat=str(reaching.nat),
        relays=reaching.relays,
        carried=reaching.carried,
        upnp=upnp,
        upnp_says=upnp_says,
        reached=reaching.reached,
        hairpin=reaching.hairpin,
    )
