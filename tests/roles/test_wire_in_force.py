"""Real nodes whose rows travel in fewer bits than they are computed in, or were refused to."""

from __future__ import annotations

import pytest
from swarm import PROMPTS, ask, open_swarm

from kvasir_node.base.snapshot import NodeSnapshot
from kvasir_node.roles.wire_gate import GREEDY_TOKENS, PROBES
from kvasir_node.wire.tensors import Encoding

WORKER = {"worker__slices_max": 6}
AWAY = {"coordinator__hold": "none", "fanout__spot_check_ratio": 1.0}  # everything is computed elsewhere, and compared
ALL = PROBES * GREEDY_TOKENS


def all_right(seen: NodeSnapshot) -> None:
    fanout = seen.fanout
    assert fanout.remote_pairs > 0
    assert fanout.spot_checks > 0
    assert fanout.mismatches == 0


def is_proven(seen: NodeSnapshot) -> bool:
    return seen.hub is not None and len(seen.hub.demand) == 6 and all(row.proven for row in seen.hub.demand)


async def answer(swarm, tokens: int) -> tuple[str, NodeSnapshot]:
    """The greedy answer of a swarm with a worker that has proved all slices; trials need rows, so somebody asks."""
    await swarm.add("worker", **WORKER)
    while not is_proven(swarm.main.snapshot()):
        await ask(swarm.main, PROMPTS[0], 4)
    return (await ask(swarm.main, PROMPTS[0], tokens)).text, swarm.main.snapshot()


async def test_law_1_an_encoding_that_was_admitted_changes_no_token_here(tmp_path):
    async with open_swarm(tmp_path / "alone") as swarm:
        expected = (await ask(swarm.main, PROMPTS[0], 24)).text
        assert swarm.main.snapshot().fanout.wire.encoding == "float32"
    async with open_swarm(tmp_path / "wire", fanout__wire="bfloat16", **AWAY) as swarm:
        text, seen = await answer(swarm, 24)
        coordinator = swarm.main.coordinator
        assert coordinator is not None
        assert coordinator.steering._shape.row_bytes == 2 * coordinator.manifest.hidden_size
    assert text == expected
    all_right(seen)
    wire = seen.fanout.wire
    assert (wire.encoding, wire.asked, wire.refusal) == ("bfloat16", "bfloat16", "")
    assert (wire.tokens, wire.tokens_agreeing) == (ALL, ALL)


async def test_an_encoding_that_changes_a_token_is_not_used(tmp_path):
    async with open_swarm(tmp_path, fanout__wire="int8", **AWAY) as swarm:
        wire = swarm.main.snapshot().fanout.wire
        assert (wire.encoding, wire.asked) == ("float32", "int8")
        assert wire.tokens_agreeing < wire.tokens == ALL
        assert wire.refusal
        coordinator = swarm.main.coordinator
        assert coordinator is not None
        assert coordinator.dispatch._encoding is Encoding.FLOAT32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_law_8_honest_workers_pass_trials_and_every_check_in_int8(tmp_path, dtype):
    async with open_swarm(tmp_path, coordinator__dtype=dtype, **AWAY) as swarm:
        coordinator = swarm.main.coordinator
        assert coordinator is not None
        coordinator.dispatch.set_encoding(Encoding.INT8)  # as if the gate had let it
        coordinator.crew.trials.set_encoding(Encoding.INT8)
        text, seen = await answer(swarm, 24)
        all_right(seen)
        assert text
