"""Coordinators of a model that they know by its id alone, in one process over real sockets."""

from __future__ import annotations

import pytest
import trio
from swarm import PROMPTS, ask, open_swarm

from kvasir_node.base.errors import CapacityError


@pytest.mark.parametrize("hold", ["half", "none"])
async def test_law_1_experts_that_are_not_even_on_the_disk_change_no_token(tmp_path, hold):
    """What the coordinator lacks is fetched when nobody computes it; the first node is no worker."""
    with trio.fail_after(60):
        async with open_swarm(tmp_path) as swarm:
            (served,) = swarm.main.models()
            second = await swarm.add("coordinator", coordinator__model=served.id, coordinator__hold=hold)
            assert [model.id for model in second.models()] == [served.id]
            for prompt in PROMPTS[:2]:
                assert (await ask(second, prompt, 8)).text == (await ask(swarm.main, prompt, 8)).text
            files = {file.name[-16:] for file in tmp_path.glob("node-1/models/*/experts-*")}
            assert files == ({"half.safetensors"} if hold == "half" else set())


async def test_a_model_larger_than_the_disk_is_served_by_its_trunk_alone_once_workers_have_proven_themselves(tmp_path):
    """Until then a request may need more experts at once than fit on the disk, and is told so."""
    quota_bytes = 4 << 20  # of 14 MB of experts
    with trio.fail_after(100):
        async with open_swarm(tmp_path) as swarm:
            (served,) = swarm.main.models()
            expected = [(await ask(swarm.main, prompt, 12)).text for prompt in PROMPTS[:3]]
            flags = {"coordinator__model": served.id, "coordinator__hold": "none", "store__quota_bytes": quota_bytes}
            second = await swarm.add("coordinator", **flags)
            worker = await swarm.add("worker", worker__slices_max=6)
            refusals: list[str] = []
            while sum(row.proven for row in swarm.main.hub.snapshot().demand) < 6:
                try:
                    await ask(second, PROMPTS[0], 2)
                except CapacityError as error:
                    refusals.append(str(error))
                await trio.sleep(0.05)
            assert all("store.quota_bytes" in words for words in refusals)
            before = second.snapshot()
            assert [(await ask(second, prompt, 12)).text for prompt in PROMPTS[:3]] == expected
            after = second.snapshot()
            assert after.fanout.remote_pairs > before.fanout.remote_pairs
            assert after.fanout.fallbacks == before.fanout.fallbacks
            assert after.model.experts_held == 0
            assert worker.snapshot().worker.state == "serving"
            own = (file.stat().st_size for file in (tmp_path / "node-1" / "blocks").rglob("*") if file.is_file())
            assert sum(own) <= quota_bytes
            assert not list(tmp_path.glob("node-1/models/*/experts-*"))
