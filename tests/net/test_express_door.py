"""How two peers come to an express channel, over real sockets on loopback."""

from __future__ import annotations

from contextlib import suppress

import pytest
import trio

from kvasir_node.base.errors import CapacityError, Misbehaved, Unreachable
from kvasir_node.base.ids import PeerId
from kvasir_node.net import express_door
from kvasir_node.net.express import ExpressChannel
from kvasir_node.net.express_door import (
    INVITATION_S,
    INVITATIONS_MAX,
    MAGIC,
    OPENING_BYTES,
    PER_PEER_MAX,
    TOKEN_BYTES,
    Invitations,
)
from kvasir_node.net.handshakes import HANDSHAKES_MAX
from kvasir_node.net.libp2p_host import UPGRADE_TIMEOUT_S, Libp2pTransport
from kvasir_node.net.memory_net import open_memory_network

ANN = PeerId("ann")


async def connect(guest: Libp2pTransport, inviter: Libp2pTransport, ending: str = "") -> None:
    """Returns when both know of it."""
    changes = inviter.watch()
    suffix = f"{ending}/p2p/{inviter.peer_id}"
    addresses = [each for each in inviter.addresses() if each.endswith(suffix)]
    await guest.connect(addresses)
    await changes.receive()


def invitation_of(inviter: Libp2pTransport, guest: Libp2pTransport, arrived: list[ExpressChannel]) -> bytes:
    invitation = inviter.invite(guest.peer_id, arrived.append)
    assert invitation is not None
    return invitation


def opening_of(invitation: bytes) -> bytes:
    token, key = invitation[:TOKEN_BYTES], invitation[TOKEN_BYTES:]
    guest, _ = express_door._keys(token, key)
    return MAGIC + token + guest.seal(b"")


def port_of(transport: Libp2pTransport) -> int:
    return int(transport.addresses()[0].split("/")[4])


async def answer_to(inviter: Libp2pTransport, opening: bytes) -> bytes:
    """What a stranger's connection is answered until it ends."""
    stream = await trio.open_tcp_stream("127.0.0.1", port_of(inviter))
    async with stream:
        await stream.send_all(opening)
        answer = b""
        with suppress(trio.BrokenResourceError):
            while chunk := await stream.receive_some():
                answer += chunk
        return answer


# Whole ways ----------------------------------------------------------------------------------------------------


async def test_an_invited_peer_gets_a_channel_and_frames_go_both_ways(open_hosts):
    async with open_hosts(2) as (guest, inviter):
        await connect(guest, inviter)
        arrived: list[ExpressChannel] = []
        ours = await guest.accept_invitation(inviter.peer_id, invitation_of(inviter, guest, arrived))
        (theirs,) = arrived
        assert (ours.peer, theirs.peer) == (inviter.peer_id, guest.peer_id)
        before = guest.bytes_in, inviter.bytes_in
        ours.send(1, [b"question"], 1)
        assert theirs.receive(1) == (1, b"question")
        theirs.send(1, [b"answer"], 1)
        assert ours.receive(1) == (1, b"answer")
        assert guest.bytes_in - before[0] >= 4 + 8 + 6 + 16
        assert inviter.bytes_in - before[1] >= 4 + 8 + 8 + 16
        ours.close()
        with pytest.raises(Unreachable):
            theirs.receive(1)


async def test_counters_keep_what_closed_channels_carried(open_hosts):
    async with open_hosts(2) as (guest, inviter):
        await connect(guest, inviter)
        for _ in range(PER_PEER_MAX + 1):
            arrived: list[ExpressChannel] = []
            channel = await guest.accept_invitation(inviter.peer_id, invitation_of(inviter, guest, arrived))
            channel.send(1, [bytes(10_000)], 1)
            channel.close()
            arrived[0].close()
        assert guest.bytes_out > (PER_PEER_MAX + 1) * 10_000


async def test_a_token_serves_once(open_hosts):
    async with open_hosts(2) as (guest, inviter):
        await connect(guest, inviter)
        arrived: list[ExpressChannel] = []
        invitation = invitation_of(inviter, guest, arrived)
        await guest.accept_invitation(inviter.peer_id, invitation)
        with pytest.raises(Unreachable, match="the connection ended after 0"):
            await guest.accept_invitation(inviter.peer_id, invitation)
        assert len(arrived) == 1
        assert await answer_to(inviter, opening_of(invitation)) == b""


async def test_an_opening_with_any_bit_wrong_is_answered_with_nothing_and_spends_nothing(open_hosts):
    async with open_hosts(2) as (guest, inviter):
        await connect(guest, inviter)
        arrived: list[ExpressChannel] = []
        invitation = invitation_of(inviter, guest, arrived)
        opening = opening_of(invitation)
        for position in range(len(MAGIC), OPENING_BYTES):
            wrong = bytearray(opening)
            wrong[position] ^= 1 << position % 8
            assert await answer_to(inviter, bytes(wrong)) == b""
        assert not arrived
        await guest.accept_invitation(inviter.peer_id, invitation)
        assert len(arrived) == 1


async def test_a_guest_that_says_more_than_its_opening_before_it_is_answered_gets_no_channel(open_hosts):
    async with open_hosts(2) as (guest, inviter):
        await connect(guest, inviter)
        arrived: list[ExpressChannel] = []
        opening = opening_of(invitation_of(inviter, guest, arrived))
        assert await answer_to(inviter, opening + b"more") == b""
        assert not arrived


# Where there is none -------------------------------------------------------------------------------------------


async def test_who_was_dialled_by_the_peer_cannot_enter_there(open_hosts):
    async with open_hosts(2) as (guest, inviter):
        await connect(guest, inviter)
        assert guest.invite(inviter.peer_id, lambda channel: None) is None
        with pytest.raises(Unreachable, match="has not dialled it"):
            await inviter.accept_invitation(guest.peer_id, bytes(48))


async def test_a_peer_that_is_not_connected_is_neither_invited_nor_dialled(open_hosts):
    async with open_hosts(2) as (guest, inviter):
        assert inviter.invite(guest.peer_id, lambda channel: None) is None
        with pytest.raises(Unreachable, match="has not dialled it"):
            await guest.accept_invitation(inviter.peer_id, bytes(48))


async def test_a_websocket_has_no_express_channel(open_hosts):
    async with open_hosts(2) as (guest, inviter):
        await connect(guest, inviter, "/ws")
        assert inviter.invite(guest.peer_id, lambda channel: None) is None
        with pytest.raises(Unreachable, match="has not dialled it"):
            await guest.accept_invitation(inviter.peer_id, bytes(48))


async def test_in_memory_there_is_none(autojump_clock):
    async with open_memory_network() as network:
        ann, carl = network.transport("ann"), network.transport("carl")
        await ann.connect(carl.addresses())
        assert carl.invite(ann.peer_id, lambda channel: None) is None
        with pytest.raises(Unreachable, match="in memory"):
            await ann.accept_invitation(carl.peer_id, bytes(48))


async def test_bytes_that_are_no_invitation_are_misbehaviour(open_hosts):
    async with open_hosts(2) as (guest, inviter):
        await connect(guest, inviter)
        for wrong in (b"", bytes(47), bytes(49), bytes(1000)):
            with pytest.raises(Misbehaved, match="expected 48"):
                await guest.accept_invitation(inviter.peer_id, wrong)


@pytest.mark.parametrize("answer", [b"", b"\x10\x00\x00\x00" + bytes(16)], ids=["silence", "forgery"])
async def test_whoever_answers_at_the_address_without_the_key_is_not_the_inviter(monkeypatch, nursery, answer):
    monkeypatch.setattr(express_door, "ENTER_S", 0.1 if not answer else 5.0)

    async def serve(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all(answer)
        await trio.sleep_forever()

    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    nursery.start_soon(trio.serve_listeners, serve, [listener])
    door = express_door.ExpressDoor(1000)
    began_at = trio.current_time()
    with pytest.raises(Unreachable, match="not what was sealed" if answer else "timed out after 0.1 s"):
        await door.enter(ANN, "127.0.0.1", listener.socket.getsockname()[1], bytes(48))
    assert trio.current_time() - began_at < 4
    nursery.cancel_scope.cancel()


async def test_where_nobody_listens_the_reason_is_said_at_once():
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listener.socket.getsockname()[1]
    await listener.aclose()
    with pytest.raises(Unreachable, match=f"at 127.0.0.1 port {port}"):
        await express_door.ExpressDoor(1000).enter(ANN, "127.0.0.1", port, bytes(48))


# Bounds --------------------------------------------------------------------------------------------------------


async def test_law_7_a_peer_has_four_channels_at_once(open_hosts):
    async with open_hosts(2) as (guest, inviter):
        await connect(guest, inviter)
        arrived: list[ExpressChannel] = []
        channels = [
            await guest.accept_invitation(inviter.peer_id, invitation_of(inviter, guest, arrived))
            for _ in range(PER_PEER_MAX)
        ]
        with pytest.raises(CapacityError, match="close one first"):
            await guest.accept_invitation(inviter.peer_id, invitation_of(inviter, guest, arrived))
        opening = opening_of(invitation_of(inviter, guest, arrived))
        assert await answer_to(inviter, opening) == b""  # nor can a guest that does not count
        channels[0].close()
        arrived[0].close()
        await guest.accept_invitation(inviter.peer_id, invitation_of(inviter, guest, arrived))
        assert len(arrived) == PER_PEER_MAX + 1


async def test_law_7_a_flood_of_connections_that_say_no_token_is_cut_soon(monkeypatch, open_hosts):
    monkeypatch.setattr(express_door, "OPENING_S", 0.1)
    async with open_hosts(2) as (guest, inviter):
        await connect(guest, inviter)
        arrived: list[ExpressChannel] = []
        flood = [await trio.open_tcp_stream("127.0.0.1", port_of(inviter)) for _ in range(HANDSHAKES_MAX + 10)]
        began_at = trio.current_time()
        for stream in flood:
            with suppress(trio.BrokenResourceError):  # those beyond the bound are closed at once
                await stream.send_all(MAGIC)
        for stream in flood:
            with suppress(trio.BrokenResourceError):
                assert await stream.receive_some() == b""
        assert trio.current_time() - began_at < UPGRADE_TIMEOUT_S / 2
        for stream in flood:
            await stream.aclose()
        await guest.accept_invitation(inviter.peer_id, invitation_of(inviter, guest, arrived))
        assert len(arrived) == 1


async def test_a_node_whose_places_are_all_taken_still_admits_whom_it_invited(open_hosts):
    async with open_hosts(2, peers_max=1) as (guest, inviter):
        await connect(guest, inviter)
        arrived: list[ExpressChannel] = []
        await guest.accept_invitation(inviter.peer_id, invitation_of(inviter, guest, arrived))
        assert len(arrived) == 1


@pytest.mark.parametrize("ends_by", ["disconnect", "shutdown"])
async def test_channels_end_with_what_made_them(open_hosts, ends_by):
    arrived: list[ExpressChannel] = []
    async with open_hosts(2) as (guest, inviter):
        await connect(guest, inviter)
        ours = await guest.accept_invitation(inviter.peer_id, invitation_of(inviter, guest, arrived))
        if ends_by == "disconnect":
            await inviter.disconnect(guest.peer_id)
            assert arrived[0].end_reason == "disconnected by us"
            with pytest.raises(Unreachable):
                ours.receive(1)
    assert ours.is_closed
    assert arrived[0].is_closed


# Invitations alone ---------------------------------------------------------------------------------------------


def nobody(channel: ExpressChannel) -> None: ...


def test_an_invitation_is_valid_for_ten_seconds():
    invitations = Invitations()
    early, late = (opening_of(invitations.issue(ANN, nobody, 100.0)) for _ in range(2))
    assert invitations.redeem(early, 100.0 + INVITATION_S - 0.001)[0] == ANN
    with pytest.raises(Misbehaved, match="no invitation that is valid now"):
        invitations.redeem(late, 100.0 + INVITATION_S)


def test_law_7_invitations_are_few_and_one_peer_cannot_take_the_others_away():
    invitations = Invitations()
    other = opening_of(invitations.issue(PeerId("bob"), nobody, 0.0))
    of_ann = [opening_of(invitations.issue(ANN, nobody, 0.0)) for _ in range(1000)]
    assert len(invitations._valid) == PER_PEER_MAX + 1
    for opening in of_ann[-PER_PEER_MAX:]:
        invitations.redeem(opening, 1.0)
    with pytest.raises(Misbehaved):
        invitations.redeem(of_ann[0], 1.0)
    assert invitations.redeem(other, 1.0)[0] == "bob"
    for number in range(1000):
        invitations.issue(PeerId(f"peer {number}"), nobody, 1.0)
    assert len(invitations._valid) == INVITATIONS_MAX
    invitations.issue(ANN, nobody, 1.0 + INVITATION_S)
    assert len(invitations._valid) == 1


def test_no_two_invitations_are_alike_and_none_shows_its_key():
    invitations = Invitations()
    issued = [invitations.issue(ANN, nobody, 0.0) for _ in range(PER_PEER_MAX)]
    assert len({part for each in issued for part in (each[:16], each[16:32], each[32:])}) == 3 * PER_PEER_MAX
    assert repr(invitations._valid[0]) == "_Invitation(ann)"


def test_the_keys_of_the_two_directions_differ_and_depend_on_token_and_key():
    sealed = [
        key.seal(b"")
        for token, secret in ((b"t" * 16, b"k" * 32), (b"u" * 16, b"k" * 32), (b"t" * 16, b"l" * 32))
        for key in express_door._keys(token, secret)
    ]
    assert len(set(sealed)) == 6
    # The wire's own golden vector: another implementation must come to the same opening.
    assert (
        opening_of(b"t" * 16 + b"k" * 32).hex()
        == "4b5645585052310a7474747474747474747474747474747486a4a57606612590667fc52c201e564d"
    )
