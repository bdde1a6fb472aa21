"""Guests of whole nodes, over real WebSockets: a page in Python that pairs, works, leaves and is refused."""

from __future__ import annotations

from fake_page import open_page
from swarm import PROMPTS, ask, load, open_swarm, until

BUSY = {"fanout__when": "forced"}


async def test_a_page_pairs_by_a_link_and_serves(tmp_path):
    folder = tmp_path / "page"
    folder.mkdir()
    async with open_swarm(tmp_path, **BUSY) as swarm:
        main = swarm.main
        alone = (await ask(main, PROMPTS[0])).text
        link = main.invite_phone().link
        async with open_page(folder, link) as page:
            async with load(main) as answers:
                await until(main, lambda s: s.fanout.remote_pairs > 0, "rows computed by the page", 60)
            assert page.worker.rows > 0
            assert [c.address.endswith("/ws") for c in page.transport.connections()] == [True]
            assert main._membership.is_guest(page.peer_id)
        assert answers[PROMPTS[0]] <= {alone}
        assert (await ask(main, PROMPTS[0])).text == alone
