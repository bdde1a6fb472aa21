"""Who may be what in a swarm of whole nodes: tickets for some roles, refused peers, a secret that is replaced."""

from __future__ import annotations

from functools import partial

import pytest
import trio
from swarm import ask, load, until
from test_node import Running, config, nodes

from kvasir_node.base.errors import UsageError
from kvasir_node.base.settings import Settings
from kvasir_node.net.mdns import lan_interfaces
from kvasir_node.roles.node import open_node
from kvasir_node.roles.swarm_key import Renewal
from kvasir_node.wire.swarm_keys import lesser_secret, read_secret
from kvasir_node.wire.ticket import Ticket, read_ticket, write_ticket

BUSY = {"coordinator__slots": "2", "fanout__when": "forced"}


def cut(ticket: str, *roles: str) -> str:
    found = read_ticket(ticket)
    return write_ticket(Ticket(lesser_secret(found.secret, roles), found.addresses))


async def start(nursery: trio.Nursery, settings: Settings, renewal: Renewal = Renewal.KEEP) -> Running:
    async def run(task_status) -> None:
        ended = trio.Event()
        try:
            with trio.CancelScope() as scope:
                async with open_node(settings, renewal=renewal) as node:
                    task_status.started(Running(node, scope, ended))
                    await trio.sleep_forever()
        finally:
            ended.set()

    return await nursery.start(run)


def same_port(running: Running) -> str:
    return running.node.ready_info()["listen"][0].split("/p2p/")[0]


async def test_a_worker_with_a_workers_ticket_serves(tmp_path):
    async with nodes() as nursery:
        main = (await start(nursery, config(tmp_path, "main", "coordinator,hub", **BUSY))).node
        ticket = cut(main.ticket(), "worker")
        worker = (await start(nursery, config(tmp_path, "ann", "worker", network__join=ticket))).node
        async with load(main):
            await until(worker, lambda s: s.worker is not None and s.worker.rows > 0, "rows computed", 60)
        assert read_secret(read_ticket(worker.ticket()).secret).roles == ("worker",)
        assert [member.roles for member in main.snapshot().members] == [("worker",)]


async def test_a_ticket_lets_a_node_take_its_roles_and_no_others(tmp_path):
    async with nodes() as nursery:
        hub = (await start(nursery, config(tmp_path, "hub", "hub"))).node
        ticket = cut(hub.ticket(), "worker")
        with pytest.raises(UsageError, match="lets it be worker, not coordinator"):
            async with open_node(config(tmp_path, "ann", "coordinator,worker", network__join=ticket)):
                raise AssertionError("it is ready")
        hub_ticket = cut(hub.ticket(), "hub")
        with pytest.raises(UsageError, match="lets it be hub or worker, not coordinator"):
            async with open_node(config(tmp_path, "bob", "coordinator", network__join=hub_ticket)):
                raise AssertionError("it is ready")


async def test_a_refused_peer_is_told_so_and_others_are_not_hindered(tmp_path):
    async with nodes() as nursery:
        first = await start(nursery, config(tmp_path, "ann", "worker"))
        ann = first.node.ready_info()["peer_id"]
        await first.kill()
        hub = (await start(nursery, config(tmp_path, "hub", "hub", network__refuse=ann))).node
        join = partial(config, tmp_path, roles="worker", network__join=hub.ticket())
        refused = (await start(nursery, join(name="ann"))).node
        good = (await start(nursery, join(name="bob"))).node
        await until(refused, lambda s: any("refuses this peer" in w for w in s.warnings), "the refusal", 10)
        await until(good, lambda s: s.warnings == (), "no warning", 10)
        assert [member.name for member in hub.snapshot().members] == ["bob"]
        bob = good.ready_info()["peer_id"]
        assert hub.revoke(bob, is_revoked=True)
        await until(good, lambda s: any("refuses this peer" in w for w in s.warnings), "shut out of the swarm", 10)
        assert (hub.snapshot().members, hub.snapshot().revoked) == ((), (bob,))


async def test_the_secret_is_replaced_and_nothing_stops(tmp_path):
    """First the hub has the new secret and its worker the old one, then both, then only the new one counts."""
    async with nodes() as nursery:
        hub = await start(nursery, config(tmp_path, "main", "coordinator,hub", **BUSY))
        old_ticket, listen = hub.node.ticket(), same_port(hub)
        ann = (await start(nursery, config(tmp_path, "ann", "worker", network__join=old_ticket))).node
        await until(ann, lambda s: s.warnings == (), "joined", 10)
        await hub.kill()
        settings = config(tmp_path, "main", "coordinator,hub", **{**BUSY, "network__listen": listen})
        hub = await start(nursery, settings, Renewal.SECRET)
        new_ticket = hub.node.ticket()
        assert read_ticket(new_ticket).secret != read_ticket(old_ticket).secret
        bob = (await start(nursery, config(tmp_path, "bob", "worker", network__join=cut(new_ticket, "worker")))).node
        for worker in (ann, bob):
            await until(worker, lambda s: s.warnings == (), "joined", 20)
        async with load(hub.node):
            for worker in (ann, bob):
                await until(worker, lambda s: s.worker is not None and s.worker.rows > 0, "rows computed", 60)
        await hub.kill()
        no_grace = config(
            tmp_path, "main", "coordinator,hub", **{**BUSY, "network__listen": listen, "network__old_secret_s": "0"}
        )
        hub = await start(nursery, no_grace, Renewal.SECRET)  # once more, and both are strangers at once
        for worker in (ann, bob):
            await until(worker, lambda s: any("not a member" in w for w in s.warnings), "strangers", 20)
        assert (await ask(hub.node, "It is")).text


@pytest.mark.skipif(not lan_interfaces(), reason="this machine is on no network")
async def test_two_nodes_on_one_network_find_each_other_by_the_secret_alone(tmp_path):
    async with nodes() as nursery:
        listen = {"network__listen": "/ip4/0.0.0.0/tcp/0"}
        hub = (await start(nursery, config(tmp_path, "hub", "hub", **listen))).node
        await trio.sleep(2)  # its announcement is out; so is that of any node that has run for a while
        secret_alone = write_ticket(Ticket(read_ticket(hub.ticket()).secret, ()))
        settings = config(tmp_path, "ann", "worker", network__join=secret_alone, **listen)
        ann = (await start(nursery, settings)).node
        await until(ann, lambda s: [member.name for member in s.members] == ["hub"], "found", 5)
        stranger = (await start(nursery, config(tmp_path, "eve", "worker", **listen))).node
        await trio.sleep(3)
        assert stranger.snapshot().net.peers == 0
