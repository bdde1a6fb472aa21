"""One node and its nearest: joining, restarts, warnings, and an end that leaves nothing behind. Real sockets."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from swarm import PROMPTS, QUICK, ask, load, until

from kvasir_node.base.errors import BugError, DataError, UsageError
from kvasir_node.base.ids import PeerId
from kvasir_node.base.settings import Settings, load_settings
from kvasir_node.roles.node import Node, node_name, open_node
from kvasir_node.wire.ticket import Ticket, read_ticket, write_ticket

PEER = "12D3KooWLShEmUMRzomUQ2kA4V8Gxc42syLYf6L18Jqy6uoVkgCd"


def config(folder: Path, name: str, roles: str, **settings: object) -> Settings:
    flags = {
        **QUICK,
        "node.roles": roles,
        "node.name": name,
        "node.data_dir": str(folder / name),
        "network.listen": "/ip4/127.0.0.1/tcp/0",
        **{key.replace("__", "."): value for key, value in settings.items()},
    }
    return load_settings(flags=flags)


class Running:
    """A node that a test may end at once, as by a kill but for what the system does of itself."""

    def __init__(self, node: Node, scope: trio.CancelScope, ended: trio.Event) -> None:
        self.node, self._scope, self._ended = node, scope, ended

    async def kill(self) -> None:
        self._scope.cancel()
        await self._ended.wait()


async def start(nursery: trio.Nursery, settings: Settings) -> Running:
    async def run(task_status) -> None:
        ended = trio.Event()
        try:
            with trio.CancelScope() as scope:
                async with open_node(settings) as node:
                    task_status.started(Running(node, scope, ended))
                    await trio.sleep_forever()
        finally:
            ended.set()

    return await nursery.start(run)


@asynccontextmanager
async def nodes() -> AsyncIterator[trio.Nursery]:
    async with trio.open_nursery() as nursery:
        yield nursery
        nursery.cancel_scope.cancel()


def test_two_nodes_of_one_machine_have_two_names(tmp_path):
    unnamed = config(tmp_path, "", "worker")
    names = {node_name(unnamed, PeerId(peer)) for peer in (PEER, PEER[:-4] + "abcd")}
    assert {name[-5:] for name in names} == {"-kgCd", "-abcd"}
    assert node_name(config(tmp_path, "x" * 300, "worker"), PeerId(PEER)) == "x" * 128


# Joining --------------------------------------------------------------------------------------------------------


async def test_a_hub_that_swallows_everything_keeps_no_coordinator_from_answering(tmp_path):
    # mesh-llm issues/348: join stalled, the API never opened
    with trio.socket.socket() as blackhole:
        await blackhole.bind(("127.0.0.1", 0))
        blackhole.listen(16)
        join = f"/ip4/127.0.0.1/tcp/{blackhole.getsockname()[1]}/p2p/{PEER}"
        began = time.monotonic()
        settings = config(tmp_path, "main", "coordinator,hub,worker", network__join=join, network__connect_timeout_s=1)
        async with open_node(settings) as node:
            opened = time.monotonic()
            assert (await ask(node, PROMPTS[0], 4)).text
            assert time.monotonic() - opened < 3
            snapshot = await until(node, lambda s: bool(s.warnings), "a warning", 8)
            assert snapshot.warnings[0].startswith(f"cannot reach …{PEER[-8:]}: /ip4/127.0.0.1/tcp/")
            assert PEER not in "".join(snapshot.warnings)
            assert "timed out" in snapshot.warnings[0]
        assert time.monotonic() - began < 30


async def test_a_wrong_secret_is_a_warning_within_seconds_on_the_side_that_joins(tmp_path):
    async with nodes() as nursery:
        hub = (await start(nursery, config(tmp_path, "hub", "hub"))).node
        address = hub.ready_info()["listen"][0]
        lost = (await start(nursery, config(tmp_path, "lost", "worker", network__join=address))).node
        seen = await until(lost, lambda s: any("not a member" in w for w in s.warnings), "not a member", 5)
        hub_id = hub.ready_info()["peer_id"]
        assert any("no hub is connected" in w and f"; trying …{hub_id[-8:]}" in w for w in seen.warnings)
        wrong = write_ticket(Ticket(b"w" * 32, read_ticket(hub.ticket()).addresses))
        other = (await start(nursery, config(tmp_path, "other", "worker", network__join=wrong))).node
        await until(other, lambda s: any("not a member" in w for w in s.warnings), "not a member", 5)
        good = (await start(nursery, config(tmp_path, "good", "worker", network__join=hub.ticket()))).node
        await until(good, lambda s: s.warnings == (), "no warning", 5)
        assert [(m.peer_id, m.name, m.roles) for m in good.snapshot().members] == [(hub_id, "hub", ("hub",))]
        assert hub.snapshot().hub is not None


@pytest.mark.parametrize("bad", ["nonsense", "/ip4/127.0.0.1/tcp/1", f"/ip4/300.0.0.1/tcp/1/p2p/{PEER}", "kvasir1aaaa"])
async def test_what_cannot_be_joined_is_refused_before_the_node_is_ready(tmp_path, bad):
    with pytest.raises(UsageError):
        async with open_node(config(tmp_path, "node", "hub", network__join=bad)):
            raise AssertionError("it is ready")


async def test_a_damaged_swarm_key_is_refused_in_words(tmp_path):
    (tmp_path / "node").mkdir()
    (tmp_path / "node" / "swarm.key").write_bytes(b"short")
    with pytest.raises(DataError, match=r"is damaged: .* got 5"):
        async with open_node(config(tmp_path, "node", "hub")):
            raise AssertionError("it is ready")


async def test_clock_skew_of_a_hub_is_told_in_words_by_coordinator_and_worker(tmp_path):
    # avalanchego issues/260: a clock 60 s off meant 0 peers and no message
    async with nodes() as nursery:
        hub = (await start(nursery, config(tmp_path, "hub", "hub"))).node
        assert hub.hub is not None
        hub.hub._wall = lambda: time.time() - 900
        main = (await start(nursery, config(tmp_path, "main", "coordinator", network__join=hub.ticket()))).node
        worker = (await start(nursery, config(tmp_path, "worker", "worker", network__join=hub.ticket()))).node
        async with load(main):
            refused = "hub hub did not take our demand"
            seen = await until(main, lambda s: any(refused in w for w in s.warnings), "the coordinator's words")
            assert any("clock skew" in w and "900 s ahead of" in w for w in seen.warnings if refused in w)
            seen = await until(worker, lambda s: any("clock skew" in w for w in s.warnings), "the worker's words")
            assert "the demand table of hub hub" in seen.warnings[0]
            assert re.search("clock is 90. s behind", seen.warnings[0])  # gossip may take a second or two
            hub.hub._wall = time.time
            await until(main, lambda s: s.warnings == (), "no warning any more")


# Restarts -------------------------------------------------------------------------------------------------------


async def test_serving_goes_on_through_a_hub_that_is_killed_and_restarted_with_its_key(tmp_path):
    async with nodes() as nursery:
        hub = await start(nursery, config(tmp_path, "hub", "hub"))
        ticket, port = hub.node.ticket(), hub.node.ready_info()["listen"][0].split("/")[4]
        # A busy machine must not make the worker late: this is about the hub.
        patient = {"fanout__when": "forced", "fanout__hedge_floor_s": 2.0, "fanout__deadline_floor_s": 2.0}
        main = (await start(nursery, config(tmp_path, "main", "coordinator", network__join=ticket, **patient))).node
        worker_settings = config(tmp_path, "worker", "worker", network__join=ticket, worker__slices_max=6)
        worker = (await start(nursery, worker_settings)).node
        async with load(main):
            await until(main, lambda s: s.fanout.remote_pairs > 100, "remote pairs")
            await until(worker, lambda s: s.worker is not None and len(s.worker.slices) == 6, "all slices")
            leases = worker.snapshot().worker.leases
            await hub.kill()
            before = main.snapshot().fanout.remote_pairs
            await until(main, lambda s: s.fanout.remote_pairs > before + 100, "remote pairs without a hub")
            listen = f"/ip4/127.0.0.1/tcp/{port}"
            again = await start(nursery, config(tmp_path, "hub", "hub", network__listen=listen))
            assert again.node.ready_info()["peer_id"] == hub.node.ready_info()["peer_id"]
            await until(
                again.node, lambda s: s.hub is not None and s.hub.leases == 6 and s.hub.coordinators == 1, "its leases"
            )
            assert worker.snapshot().worker.leases == leases
            (row,) = main.snapshot().workers
            assert (row.state, row.failures) == ("proven", 0)


async def test_a_worker_killed_and_restarted_under_its_key_is_one_row_and_serves_again(tmp_path):
    # parallax issues/342: a ghost and a duplicate blocked the cluster
    async with nodes() as nursery:
        main = (await start(nursery, config(tmp_path, "main", "coordinator,hub", fanout__when="forced"))).node
        settings = config(tmp_path, "worker", "worker", network__join=main.ticket())
        worker = await start(nursery, settings)
        async with load(main):
            await until(main, lambda s: s.fanout.remote_pairs > 50, "remote pairs")
            await worker.kill()
            await until(main, lambda s: s.workers[0].slices == (), "the loss")
            again = await start(nursery, settings)
            before = main.snapshot().fanout.remote_pairs
            await until(main, lambda s: s.fanout.remote_pairs > before + 50, "remote pairs again", 40)
            (row,) = main.snapshot().workers
            assert row.peer_id == again.node.ready_info()["peer_id"]


# Ends -----------------------------------------------------------------------------------------------------------


def open_files() -> set[str]:
    return {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink() and path.exists()}


def own_threads() -> set[str]:
    """Without those of trio's pool, which wait for work and end by themselves."""
    return {thread.name for thread in threading.enumerate() if not thread.name.startswith("Trio thread")}


async def test_a_node_cancelled_at_any_moment_leaves_no_socket_and_no_thread(tmp_path):
    async def one(delay_s: float) -> None:
        with trio.move_on_after(delay_s):
            async with open_node(config(tmp_path, "node", "hub,worker")):
                await trio.sleep_forever()

    await one(1.0)  # what is opened once stays: caches, the thread pool
    sockets = sum(name.startswith("socket:") for name in open_files())
    threads = own_threads()
    for delay_s in (0.0, 0.002, 0.01, 0.03, 0.1, 0.3, 0.6):
        await one(delay_s)
        assert sum(name.startswith("socket:") for name in open_files()) <= sockets
    assert own_threads() <= threads
    assert trio.to_thread.current_default_thread_limiter().borrowed_tokens == 0


async def test_a_swarm_cancelled_while_a_worker_fetches_loads_and_serves_ends_at_once(tmp_path):
    for delay_s in (0.3, 0.8, 1.5):
        async with nodes() as nursery:
            main = (await start(nursery, config(tmp_path, "main", "coordinator,hub"))).node
            worker = await start(nursery, config(tmp_path, f"worker {delay_s}", "worker", network__join=main.ticket()))
            with trio.move_on_after(delay_s):
                async with load(main):
                    await trio.sleep_forever()
            began = time.monotonic()
            await worker.kill()
            assert time.monotonic() - began < 4


async def test_a_bug_in_one_part_ends_the_node_with_an_error_that_names_it(tmp_path, caplog):
    async def broken(topic: str, data: bytes) -> None:
        raise ZeroDivisionError("a bug")

    async def run() -> None:
        async with open_node(config(tmp_path, "node", "hub")) as node:
            assert node.hub is not None
            node.hub._gossip.publish = broken
            with trio.fail_after(15):
                await trio.sleep_forever()

    with pytest.raises(BugError, match="the hub ended unexpectedly: ZeroDivisionError: a bug"):
        await run()
    assert "the hub ended by a bug" in caplog.text


async def test_an_error_raised_inside_the_block_comes_out_as_itself(tmp_path):
    with pytest.raises(UsageError, match="mine"):
        async with open_node(config(tmp_path, "node", "hub,worker")):
            raise UsageError("mine")
