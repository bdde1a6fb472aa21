"""Who the owner shuts out is shut out by all members, wherever it was said, and whoever was away meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from kvasir_node.base.errors import CapacityError, Misbehaved, Unreachable, UsageError
from kvasir_node.base.ids import PeerId
from kvasir_node.net.hello import Membership
from kvasir_node.net.identity import key_from_seed, peer_id_of
from kvasir_node.net.memory_net import MemoryNetwork, open_memory_network
from kvasir_node.roles.revoking import FORGED_MAX, REVOCATIONS_PROTOCOL, TELL_S, Revocations, RevocationTeller
from kvasir_node.wire.revocation import REVOCATIONS_MAX, make_revocation, write_revocations
from kvasir_node.wire.swarm_keys import lesser_secret, new_secret, read_secret, replacing_secret

SECRET = b"s" * 32
PASS = lesser_secret(SECRET, [])


def peer(number: int) -> PeerId:
    return peer_id_of(key_from_seed(number.to_bytes(32, "big")))


class Member:
    def __init__(self, network: MemoryNetwork, folder: Path, name: str, secret: bytes = PASS) -> None:
        self.transport = network.transport(name)
        keys = (read_secret(secret),)
        self.revocations = Revocations(folder / f"{name}.cbor", lambda: keys, lambda: 1e9 + trio.current_time())
        self.membership = Membership(self.transport, keys[0].entry, b"", refusal_of=self.revocations.refusal)
        self.teller = RevocationTeller(self.transport, self.membership, self.revocations)

    @property
    def id(self) -> PeerId:
        return self.transport.peer_id

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.membership.run)
            nursery.start_soon(self.teller.run)

    async def join(self, other: Member) -> None:
        await self.transport.connect(other.transport.addresses())
        await self.membership.require(other.id, 5)
        await other.membership.require(self.id, 5)


async def test_what_is_said_at_one_node_reaches_all_and_ends_what_the_peer_had(autojump_clock, nursery, tmp_path):
    """owner - hub - ann, and bad at the hub and at ann; the owner is connected to the hub alone."""
    async with open_memory_network() as network:
        owner = Member(network, tmp_path, "owner", SECRET)
        hub, ann, bad, late = (Member(network, tmp_path, name) for name in ("hub", "ann", "bad", "late"))
        for each in (owner, hub, ann, bad, late):
            nursery.start_soon(each.run)
        await owner.join(hub)
        await ann.join(hub)
        await bad.join(hub)
        await bad.join(ann)
        assert owner.teller.change(bad.id, is_revoked=True)
        assert not owner.teller.change(bad.id, is_revoked=True)
        await trio.sleep(5)
        for member in (owner, hub, ann):
            assert member.revocations.revoked() == (bad.id,)
            assert bad.id not in member.membership.members()
        await late.join(ann)  # it was away, and has never met the owner
        await trio.sleep(2)
        for one, other in ((bad, ann), (bad, late), (late, bad)):
            await one.transport.connect(other.transport.addresses())
            with pytest.raises(Unreachable, match=r"refuses this peer|shut out of the swarm"):
                await one.membership.require(other.id, 5)
        assert owner.teller.change(bad.id, is_revoked=False)
        await trio.sleep(5)
        await bad.join(late)
        assert late.revocations.revoked() == ()
        await trio.sleep(2)


async def test_news_are_told_once_and_then_there_is_silence(autojump_clock, nursery, tmp_path):
    async with open_memory_network() as network:
        members = [Member(network, tmp_path, "owner", SECRET), *(Member(network, tmp_path, f"{n}") for n in range(5))]
        told = 0

        for member in members:
            open_stream = member.transport.open_stream

            async def counted(to, protocol, open_stream=open_stream):
                nonlocal told
                told += protocol == REVOCATIONS_PROTOCOL
                return await open_stream(to, protocol)

            member.transport.open_stream = counted
            nursery.start_soon(member.run)
        for number, member in enumerate(members):
            for other in members[:number]:
                await member.join(other)
        members[0].teller.change(peer(1), is_revoked=True)
        await trio.sleep(10)
        assert all(member.revocations.revoked() == (peer(1),) for member in members)
        assert told <= len(members) * (len(members) - 1)
        before = told
        await trio.sleep(600)
        assert told == before


async def test_they_outlive_a_restart_and_a_new_secret(autojump_clock, tmp_path):
    old, new = read_secret(SECRET), read_secret(replacing_secret(SECRET))
    path = tmp_path / "revoked.cbor"
    first = Revocations(path, lambda: (old,))
    assert first.change(peer(1), is_revoked=True)
    assert Revocations(path, lambda: (old,)).revoked() == (peer(1),)
    again = Revocations(path, lambda: (new,))
    assert again.revoked() == (peer(1),)
    assert all(each.is_by_owner([new]) for each in again.all())
    for other_swarm in (new_secret(), lesser_secret(new_secret(), [])):
        keys = (read_secret(other_swarm),)
        assert Revocations(path, lambda keys=keys: keys).revoked() == ()
    path.write_bytes(old.name + b"\xff")
    assert Revocations(path, lambda: (old,)).revoked() == ()


async def test_only_the_whole_secret_shuts_out_and_only_peers(autojump_clock, tmp_path):
    lesser = read_secret(PASS)
    with pytest.raises(UsageError, match="whole secret"):
        Revocations(tmp_path / "a", lambda: (lesser,)).change(peer(1), is_revoked=True)
    whole = Revocations(tmp_path / "b", lambda: (read_secret(SECRET),))
    with pytest.raises(UsageError, match="a peer id is what"):
        whole.change(PeerId("ann"), is_revoked=True)


async def test_what_others_sign_changes_nothing_and_many_such_end_the_talk(autojump_clock, tmp_path):
    forger = read_secret(new_secret())
    mine = Revocations(tmp_path / "a", lambda: (read_secret(PASS),))
    good = make_revocation(read_secret(SECRET), peer(1), 1, is_revoked=True)
    forged = [make_revocation(forger, peer(number), 1, is_revoked=True) for number in range(2, FORGED_MAX + 4)]
    assert mine.take([forged[0], good])
    assert mine.revoked() == (peer(1),)
    with pytest.raises(Misbehaved, match="has not revoked"):
        mine.take(forged)
    older = make_revocation(read_secret(SECRET), peer(1), 0, is_revoked=False)
    assert not mine.take([older])
    assert mine.revoked() == (peer(1),)


async def test_no_more_are_kept_than_fit(autojump_clock, tmp_path):
    root = read_secret(SECRET)
    mine = Revocations(tmp_path / "a", lambda: (root,))
    assert mine.take([make_revocation(root, peer(number), 1, is_revoked=True) for number in range(REVOCATIONS_MAX)])
    with pytest.raises(CapacityError, match="new secret"):
        mine.change(peer(REVOCATIONS_MAX), is_revoked=True)
    assert mine.change(peer(0), is_revoked=False)
    assert len(mine.all()) == REVOCATIONS_MAX
    assert len(Revocations(tmp_path / "a", lambda: (root,)).all()) == REVOCATIONS_MAX


async def test_a_member_that_tells_nonsense_is_not_believed_and_harms_nothing(autojump_clock, nursery, tmp_path):
    async with open_memory_network() as network:
        ann, bad = Member(network, tmp_path, "ann"), Member(network, tmp_path, "bad")
        for each in (ann, bad):
            nursery.start_soon(each.run)
        await bad.join(ann)
        good = write_revocations([make_revocation(read_secret(SECRET), peer(1), 1, is_revoked=True)])
        for said in (b"\xff" * 8, b"\0\0\0\x05abc", len(good).to_bytes(4, "big") + good[:-1] + b"\0"):
            stream = await bad.transport.open_stream(ann.id, REVOCATIONS_PROTOCOL)
            await stream.write(said)
            await trio.sleep(10)
            await stream.reset()
        assert ann.revocations.all() == ()
        stream = await bad.transport.open_stream(ann.id, REVOCATIONS_PROTOCOL)
        await stream.write(len(good).to_bytes(4, "big"), good)
        await trio.sleep(1)
        assert ann.revocations.revoked() == (peer(1),)  # whoever tells it: it is the owner's word
        flood = [await bad.transport.open_stream(ann.id, REVOCATIONS_PROTOCOL) for _ in range(100)]
        await trio.sleep(0.1)
        assert ann.teller._heard_at[bad.id] - trio.current_time() <= TELL_S
        for stream in flood:
            await stream.reset()
        await trio.sleep(10)
