"""What HTTP costs beside the computing itself: the demo model's tokens per second with it and without."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import trio
from surfaces_helpers import FakeLife

from kvasir_node.base.generation import GenerationRequest, SamplingOptions, TextDelta
from kvasir_node.base.settings import load_settings
from kvasir_node.roles.node import Node, open_node
from kvasir_node.surfaces.address import parse_address
from kvasir_node.surfaces.http import serve_api
from kvasir_node.surfaces.listener import bound_address, open_listeners
from kvasir_node.surfaces.phone_door import PhoneDoor
from kvasir_node.surfaces.phone_page import PhonePage

pytestmark = [pytest.mark.soak, pytest.mark.timeout(580)]

CLIENTS = Path(__file__).parents[1] / "e2e" / "stream_clients.py"
STREAMS, TOKENS, ROUNDS = 16, 96, 5


@dataclass(frozen=True, slots=True)
class Round:
    wall_s: float
    processor_s: float


async def compute_alone(served: Node) -> float:
    """The same requests without HTTP: the desk's events are taken and thrown away."""

    async def one(seed: int) -> None:
        sampling = SamplingOptions(seed=seed)
        asked = GenerationRequest(prompt="The evening was spent in", max_tokens=TOKENS, sampling=sampling)
        async with served.generate(asked) as events:
            async for event in events:
                if not isinstance(event, TextDelta):
                    return

    began = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for seed in range(STREAMS):
            nursery.start_soon(one, seed)
    return time.perf_counter() - began


async def compute_over_http(port: int) -> float:
    """The clients' own clock, that is without their start."""
    command = [sys.executable, str(CLIENTS), *map(str, (port, STREAMS, 0, TOKENS))]
    done = await trio.run_process(command, capture_stdout=True, stdin=subprocess.DEVNULL)
    told = json.loads(done.stdout)
    assert told["complete"] == STREAMS
    return told["took_s"]


async def test_http_costs_a_tenth_of_the_tokens_per_second_at_most(tmp_path):
    """Both take turns in one process. Processor time per token is told too: other load on the machine changes it
    little."""
    flags = {
        "node.roles": "coordinator",
        "node.data_dir": str(tmp_path),
        "network.listen": "/ip4/127.0.0.1/tcp/0",
        "api.listen": "127.0.0.1:0",
        "coordinator.slots": STREAMS,
        "node.threads": 1,
    }
    settings = load_settings(flags=flags)
    rounds: dict[str, list[Round]] = {"alone": [], "http": []}
    async with open_node(settings) as served, trio.open_nursery() as nursery:
        listeners = await open_listeners(parse_address(settings.api.listen))
        stop, address = trio.Event(), bound_address(listeners)
        life = FakeLife(PhoneDoor(PhonePage(), address))
        nursery.start_soon(partial(serve_api, served, life, listeners, stop=stop, grace_s=1.0))
        sides = {"alone": partial(compute_alone, served), "http": partial(compute_over_http, address.port)}
        for turn in range(ROUNDS + 1):
            for side, compute in sides.items():
                processor_s = time.process_time()
                wall_s = await compute()
                if turn:  # the first one warms up
                    rounds[side].append(Round(wall_s, time.process_time() - processor_s))
        stop.set()
    tokens = STREAMS * TOKENS
    per_s = {side: tokens / statistics.median(each.wall_s for each in found) for side, found in rounds.items()}
    micros = {side: 1e6 / tokens * statistics.median(r.processor_s for r in found) for side, found in rounds.items()}
    ratio, processor_ratio = per_s["http"] / per_s["alone"], micros["alone"] / micros["http"]
    print(
        f"alone {per_s['alone']:.0f} tokens/s, {micros['alone']:.0f} us of processor per token; over HTTP "
        f"{per_s['http']:.0f}, {micros['http']:.0f}; ratio {ratio:.3f}, of processor {processor_ratio:.3f}"
    )
    assert ratio >= 0.9
