"""Who is in the swarm, and how a node gets into it and says why not."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import trio
import trio.lowlevel
from role_fakes import granted

from kvasir_node.base.errors import Unreachable, UsageError
from kvasir_node.base.ids import PeerId
from kvasir_node.net.hello import Membership
from kvasir_node.net.memory_net import Link, MemoryNetwork, MemoryTransport, open_memory_network
from kvasir_node.roles.peers import (
    JOIN_PAUSE_LEAST,
    JOIN_PAUSE_MAX_S,
    JOIN_PAUSE_S,
    JOIN_PAUSE_SHORT_S,
    NAMES_MAX,
    Joiner,
    JoinTarget,
    Peers,
    join_targets,
)
from kvasir_node.wire.messages import About
from kvasir_node.wire.swarm_keys import lesser_secret, read_secret

SECRET, OTHER_SECRET = b"s" * 32, b"o" * 32
PEER = "12D3KooWLShEmUMRzomUQ2kA4V8Gxc42syLYf6L18Jqy6uoVkgCd"


def about(name: str, *roles: str) -> bytes:
    return About(name, "1", roles, ()).to_bytes()


class Member:
    """One node's membership, peers and joiner on the memory network."""

    def __init__(
        self,
        network: MemoryNetwork,
        name: str,
        says: bytes,
        *,
        secret: bytes = SECRET,
        ticket: bytes | None = None,
        is_hub: bool = False,
        join: tuple[MemoryTransport, ...] = (),
    ) -> None:
        self.transport = network.transport(name)
        says = granted(says, self.transport.peer_id, secret if ticket is None else ticket)
        self.membership = Membership(self.transport, read_secret(secret).entry, says)
        self.secret = secret
        self.heard: list[tuple[PeerId, ...]] = []
        self.peers = Peers(
            self.membership,
            self.transport.peer_id,
            is_hub=is_hub,
            hubs_changed=self.heard.append,
            keys=lambda: (read_secret(self.secret),),
        )
        targets = [JoinTarget(t.peer_id, t.addresses()) for t in join]
        self.joiner = Joiner(
            self.transport, targets, lambda peer: self.membership.require(peer, 8.0), random.Random(name)
        )

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.membership.run)
            nursery.start_soon(self.peers.run)
            nursery.start_soon(self.joiner.run)


async def start(nursery: trio.Nursery, *members: Member) -> None:
    for member in members:
        nursery.start_soon(member.run)
    await trio.sleep(0.5)


async def test_hubs_are_known_by_what_members_say_ourselves_first(autojump_clock, nursery):
    async with open_memory_network() as network:
        hub = Member(network, "hub", about("the hub", "hub"))
        own = Member(network, "own", about("own", "hub", "worker"), is_hub=True, join=(hub.transport,))
        ann = Member(network, "ann", about("ann", "worker"), join=(own.transport,))
        await start(nursery, hub, own, ann)
        assert own.peers.hubs() == (own.transport.peer_id, hub.transport.peer_id)
        assert own.heard[-1] == own.peers.hubs()
        assert ann.peers.hubs() == (own.transport.peer_id,)
        assert {each.name for each in own.peers.about().values()} == {"the hub", "ann"}
        network.kill(hub.transport.peer_id)
        await trio.sleep(0.5)
        assert own.heard[-1] == (own.transport.peer_id,)
        assert own.peers.name_of(hub.transport.peer_id) == "the hub"  # who left is still named
        assert own.peers.name_of(PeerId("unheard-of")) == "…heard-of"


async def test_a_hub_that_joins_anew_is_told_though_the_list_is_the_same(autojump_clock, nursery):
    async with open_memory_network() as network:
        hub = Member(network, "hub", about("the hub", "hub"))
        own = Member(network, "own", about("own", "coordinator"), join=(hub.transport,))
        await start(nursery, hub, own)
        heard = len(own.heard)
        network.set_link(own.transport.peer_id, hub.transport.peer_id, Link())
        own.membership._settle(hub.transport.peer_id)  # as when it dialled us before its old connection was missed
        await trio.sleep(0.1)
        assert own.heard[heard:] == [(hub.transport.peer_id,)]


@pytest.mark.parametrize("roles", [("worker",), ("coordinator", "worker")])
async def test_a_member_is_not_believed_a_role_that_its_ticket_does_not_let_it_take(
    autojump_clock, nursery, caplog, roles
):
    async with open_memory_network() as network:
        own = Member(network, "own", about("own", "worker"))
        claims = about("ann", "hub", "coordinator", "worker")
        ann = Member(network, "ann", claims, ticket=lesser_secret(SECRET, roles), join=(own.transport,))
        borrowed = granted(about("bob", "hub"), ann.transport.peer_id)  # another peer's grants
        bob = Member(network, "bob", b"", join=(own.transport,))
        bob.membership._about = borrowed
        for member in (own, ann, bob):
            await start(nursery, member)
        await trio.sleep(5)
        assert own.peers.hubs() == ()
        assert {each.name: each.roles for each in own.peers.about().values()} == {"ann": roles, "bob": ()}
        assert own.peers.has_role(ann.transport.peer_id, "coordinator") is ("coordinator" in roles)
        assert not own.peers.has_role(ann.transport.peer_id, "hub")
        assert not own.peers.has_role(PeerId(PEER), "worker")
        assert "claims roles that its ticket does not let it take" in caplog.text


@pytest.mark.parametrize("says", [b"", b"\xff" * 300, b"\xa0", about("x\x1b[2J", "hub"), about("x", "hub")[:-1]])
async def test_a_member_that_says_something_unreadable_is_no_hub_and_stops_nothing(
    autojump_clock, nursery, says, caplog
):
    async with open_memory_network() as network:
        own = Member(network, "own", about("own", "worker"))
        odd = Member(network, "odd", says, join=(own.transport,))
        hub = Member(network, "hub", about("the hub", "hub"), join=(own.transport,))
        await start(nursery, own, odd)
        await start(nursery, hub)
        assert own.peers.hubs() == (hub.transport.peer_id,)
        assert odd.transport.peer_id in own.membership.members()
        assert caplog.text.count("nothing readable") == 1


async def test_random_words_about_oneself_never_end_the_list_of_peers(autojump_clock, nursery):
    rng = random.Random(5)
    good = about("the hub", "hub")
    async with open_memory_network() as network:
        own = Member(network, "own", about("own", "worker"))
        await start(nursery, own)
        for number in range(40):
            bad = bytearray(good)
            bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
            await start(nursery, Member(network, f"odd {number}", bytes(bad), join=(own.transport,)))
        assert len(own.membership.members()) == 40
        await start(nursery, Member(network, "hub", good, join=(own.transport,)))
        assert network.transport("hub").peer_id in own.peers.hubs()


async def test_law_7_a_thousand_members_that_come_and_go_leave_tables_and_tasks_flat(autojump_clock, nursery):
    # exo issues/2262: memory climbs while idle
    async with open_memory_network() as network:
        own = Member(network, "own", about("own", "worker"))
        other = Member(network, "other", about("other", "hub"))
        await start(nursery, own, other)
        tasks = []
        for _ in range(1000):
            await other.transport.connect(own.transport.addresses())
            await other.membership.require(own.transport.peer_id, 5)
            await other.transport.disconnect(own.transport.peer_id)
            await trio.sleep(0.01)
            tasks.append(trio.lowlevel.current_statistics().tasks_living)
        assert tasks[-1] <= tasks[0]
        assert own.peers.about() == {}
        assert own.peers.hubs() == ()
        for table in (own.peers._about, own.membership._proven, own.membership._settled, own.membership._answering):
            assert not table
        for number in range(NAMES_MAX + 50):
            own.peers._remember(PeerId(f"p{number}"), "x")
        assert len(own.peers._names) == NAMES_MAX


# Joining --------------------------------------------------------------------------------------------------------


async def test_a_wrong_secret_is_told_within_a_second_and_joining_goes_on_when_it_is_right(autojump_clock, nursery):
    async with open_memory_network() as network:
        hub = Member(network, "hub", about("the hub", "hub"))
        ann = Member(network, "ann", about("ann", "worker"), secret=OTHER_SECRET, join=(hub.transport,))
        await start(nursery, hub, ann)
        (warning,) = ann.joiner.warnings()
        assert "is not a member of this swarm: it does not hold this swarm's secret" in warning
        assert "ticket" in warning
        await trio.sleep(300)
        assert ann.joiner.warnings() == (warning,)
        ann.secret, ann.membership._secret = SECRET, read_secret(SECRET).entry
        await trio.sleep(JOIN_PAUSE_MAX_S + 10)
        assert ann.joiner.warnings() == ()
        assert ann.peers.hubs() == (hub.transport.peer_id,)


async def test_attempts_grow_rare_but_a_hub_that_was_restarted_is_found_within_seconds(autojump_clock, nursery):
    async with open_memory_network() as network:
        hub = Member(network, "hub", about("the hub", "hub"))
        ann = Member(network, "ann", about("ann", "worker"), join=(hub.transport,))
        await start(nursery, hub, ann)
        attempts: list[float] = []
        connect = ann.transport.connect

        async def counted(addresses):
            attempts.append(trio.current_time())
            return await connect(addresses)

        ann.transport.connect = counted
        for down_s in (3.0, 10.0, 60.0):
            hub.transport.is_alive = False
            await ann.transport.disconnect(hub.transport.peer_id)
            await trio.sleep(down_s)
            assert "cannot reach" in ann.joiner.warnings()[0]
            hub.transport.is_alive = True
            await trio.sleep(JOIN_PAUSE_SHORT_S + 0.1)
            assert ann.joiner.warnings() == ()
            await trio.sleep(2)
        hub.transport.is_alive = False
        await ann.transport.disconnect(hub.transport.peer_id)
        attempts.clear()
        await trio.sleep(1200)
        assert 120 / JOIN_PAUSE_SHORT_S + 1000 / JOIN_PAUSE_MAX_S < len(attempts) < 90 / JOIN_PAUSE_LEAST


async def membership_of_all(peer):
    await trio.lowlevel.checkpoint()


async def attempts_of(names, during_s):
    """When each of these nodes tried to join a hub that is gone."""
    attempts: dict[str, list[float]] = {name: [] for name in names}
    async with open_memory_network() as network, trio.open_nursery() as nursery:
        dead = network.transport("hub")
        dead.is_alive = False

        async def count(name):
            transport = network.transport(name)

            async def connect(addresses):
                attempts[name].append(trio.current_time())
                raise Unreachable("it is gone")

            transport.connect = connect
            targets = [JoinTarget(dead.peer_id, dead.addresses())]
            joiner = Joiner(transport, targets, membership_of_all, random.Random(name))
            began_at = trio.current_time()
            with trio.move_on_after(during_s):
                await joiner.run()
            attempts[name] = [at - began_at for at in attempts[name]]

        for name in names:
            nursery.start_soon(count, name)
    return attempts


async def test_nodes_that_lost_one_hub_come_back_at_different_times_which_their_seeds_repeat(autojump_clock):
    names = [f"node{number}" for number in range(50)]
    attempts = await attempts_of(names, 20)
    for tries in attempts.values():
        pauses = [after - before for before, after in pairwise(tries)]
        full = [min(JOIN_PAUSE_SHORT_S, JOIN_PAUSE_S * 2**number) for number in range(len(pauses))]
        assert all(JOIN_PAUSE_LEAST * most <= pause <= most for pause, most in zip(pauses, full, strict=True))
    second_tries = sorted(tries[1] for tries in attempts.values())
    assert all(after - before > 1e-6 for before, after in pairwise(second_tries))
    assert second_tries[-1] - second_tries[0] > 0.4 * JOIN_PAUSE_S
    again = await attempts_of(names[:3], 20)
    assert all(again[name] == pytest.approx(attempts[name]) for name in again)


async def test_one_target_that_is_dead_does_not_keep_another_waiting(autojump_clock, nursery):
    async with open_memory_network() as network:
        hub = Member(network, "hub", about("the hub", "hub"))
        dead = network.transport("dead")
        dead.is_alive = False
        ann = Member(network, "ann", about("ann", "worker"), join=(dead, hub.transport))
        await start(nursery, hub, ann)
        assert ann.peers.hubs() == (hub.transport.peer_id,)
        (warning,) = ann.joiner.warnings()
        assert ann.joiner.trying() == (dead.peer_id,)
        assert ann.joiner.targets == (dead.peer_id, hub.transport.peer_id)
        assert dead.peer_id in warning
        assert "refused" in warning


async def test_a_node_does_not_join_itself(autojump_clock, nursery):
    async with open_memory_network() as network:
        transport = network.transport("own")
        membership = Membership(transport, SECRET, b"")
        targets = [JoinTarget(transport.peer_id, transport.addresses())]
        joiner = Joiner(transport, targets, lambda peer: membership.require(peer, 8.0), random.Random(1))
        await joiner.run()
        assert joiner.warnings() == ()


def test_addresses_of_one_peer_are_one_target():
    first, second = f"/ip4/192.0.2.1/tcp/1/p2p/{PEER}", f"/dns4/example.org/tcp/2/p2p/{PEER}"
    assert join_targets([first, second]) == (JoinTarget(PeerId(PEER), (first, second)),)


@pytest.mark.parametrize(
    "address",
    ["", "nonsense", "kvasir2abc", "/ip4/192.0.2.1/tcp/1", "/ip4/1.2.3/tcp/1/p2p/x", "/p2p/", f"/foo/1/p2p/{PEER}"],
)
def test_an_address_that_names_no_peer_is_a_usage_error_before_anything_starts(address):
    with pytest.raises(UsageError):
        join_targets([address])


def test_a_mistyped_ticket_is_not_repeated_as_a_whole():
    ticket = "kvasir2" + "s3cret" * 20
    with pytest.raises(UsageError, match=r"got 'kvasir2s3crets3c…'$"):
        join_targets([ticket])
