"""How two peers come to an express channel, over real sockets on loopback."""

from __future__ import annotations

from kvasir_node.net.express import ExpressChannel
from kvasir_node.net.libp2p_host import Libp2pTransport


async def connect(guest: Libp2pTransport, inviter: Libp2pTransport) -> None:
    """Returns when both know of it."""
    changes = inviter.watch()
    await guest.connect(inviter.addresses())
    await changes.receive()


async def test_an_invited_peer_gets_a_channel_and_frames_go_both_ways(open_hosts):
    async with open_hosts(2) as (guest, inviter):
        await connect(guest, inviter)
        arrived: list[ExpressChannel] = []
        invitation = inviter.invite(guest.peer_id, arrived.append)
        assert invitation is not None
        ours = await guest.accept_invitation(inviter.peer_id, invitation)
        (theirs,) = arrived
        assert (ours.peer, theirs.peer) == (inviter.peer_id, guest.peer_id)
        ours.send(1, [b"question"], 1)
        assert theirs.receive(1) == (1, b"question")
        theirs.send(1, [b"answer"], 1)
        assert ours.receive(1) == (1, b"answer")
        assert inviter.bytes_in > ours.bytes_out > 0
        ours.close()
