"""Guests of whole nodes, over real WebSockets: a page in Python that pairs, works, leaves and comes back."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_page import FakePage, ask_for_pass, open_page, page_transport, pair
from swarm import PROMPTS, ask, load, open_swarm, until

from kvasir_node.base.errors import Unreachable
from kvasir_node.base.ids import PeerId
from kvasir_node.decide.pairing import PairRefusal
from kvasir_node.net.circuit import RELAY_PROTOCOL
from kvasir_node.roles.node import Node
from kvasir_node.wire.messages import BLOCKS_PROTOCOL, EXPERTS_PROTOCOL, MARKET_PROTOCOL

BUSY = {"fanout__when": "forced"}


def rows_of(node: Node, peer: PeerId) -> int:
    return sum(worker.rows for worker in node.snapshot().workers if worker.peer_id == peer)


async def until_it_serves(node: Node, page: FakePage, more_than: int = 0) -> None:
    await until(node, lambda _: rows_of(node, page.peer_id) > more_than, "rows computed by the page", 60)


async def assert_a_thief_gets_nothing(node: Node, link: str, folder: Path) -> None:
    """A stranger with a code that somebody has used gets no pass, and without a pass nothing at all."""
    async with page_transport(folder) as thief:
        peer, answer = await pair(thief, link)
        assert answer is PairRefusal.USED
        assert await ask_for_pass(thief, peer, bytes(16)) is PairRefusal.WRONG
        for protocol in (MARKET_PROTOCOL, BLOCKS_PROTOCOL, EXPERTS_PROTOCOL, RELAY_PROTOCOL):
            with pytest.raises(Unreachable):
                await (await thief.open_stream(peer, protocol)).read()
        assert thief.peer_id not in {member.peer_id for member in node.snapshot().members}


def path_of(main: Node, worker: PeerId) -> str:
    return next(each.path for each in main.snapshot().workers if each.peer_id == worker)


async def serve_twice(hub: Node, main: Node, folder: Path) -> set[str]:
    """A page joins by a code, leaves as when its tab is closed, and is back with its pass; the paths that it used."""
    page_folder, thief_folder = folder / "page", folder / "thief"
    page_folder.mkdir()
    thief_folder.mkdir()
    link = hub.invite_phone().link
    async with open_page(page_folder, link) as page:
        await until_it_serves(main, page)
        assert page.tally.bytes_fetched > 0
        await assert_a_thief_gets_nothing(hub, link, thief_folder)
        members = {each.peer_id: each for each in hub.snapshot().members}
        assert (members[page.peer_id].is_guest, members[page.peer_id].roles) == (True, ("worker",))
        peer, found, paths = page.peer_id, page.found, {each.path for each in page.transport.connections()}
        assert all(each.address.endswith("/ws") for each in page.transport.connections() if each.path == "direct")
        to_main = next(each.path for each in page.transport.connections() if each.peer == main.snapshot().peer_id)
        assert path_of(main, peer) == to_main
    assert found is not None
    served = rows_of(main, peer)
    async with open_page(page_folder, found) as page:
        assert page.peer_id == peer
        await until_it_serves(main, page, served)
    await until(main, lambda _: path_of(main, peer) == "", "a worker without a way", 30)
    return paths


async def test_a_page_serves_a_coordinator_that_listens_nowhere_through_the_hub_s_relay(tmp_path):
    async with open_swarm(tmp_path, node__roles="hub") as swarm:
        hub = swarm.main
        hidden = await swarm.add("coordinator", network__listen="", **BUSY)
        alone = (await ask(hidden, PROMPTS[0])).text
        await until(hidden, lambda s: bool(s.net.relays), "a place at the relay", 30)
        async with load(hidden) as answers:
            assert await serve_twice(hub, hidden, tmp_path) == {"direct", "relay"}
        assert answers[PROMPTS[0]] <= {alone}
        assert hidden.snapshot().fanout.mismatches == 0


@pytest.mark.soak
async def test_a_page_serves_the_node_that_it_paired_with(tmp_path):
    async with open_swarm(tmp_path, **BUSY) as swarm:
        main = swarm.main
        alone = (await ask(main, PROMPTS[0])).text
        async with load(main) as answers:
            assert await serve_twice(main, main, tmp_path) == {"direct"}
        assert answers[PROMPTS[0]] <= {alone}
        assert main.snapshot().fanout.mismatches == 0
