"""Coordinators of a model that they know by its id alone, in one process over real sockets."""

from __future__ import annotations

import pytest
import trio
from swarm import PROMPTS, ask, open_swarm


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
