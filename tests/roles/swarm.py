"""A whole swarm inside one test: real nodes, real sockets on loopback, real weights, one process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from kvasir_node.base.generation import Finished, GenerationRequest, SamplingOptions, TextDelta
from kvasir_node.base.settings import Settings, load_settings
from kvasir_node.base.snapshot import NodeSnapshot
from kvasir_node.roles.faults import NO_FAULTS, Faults
from kvasir_node.roles.node import Node, open_node

PROMPTS = (
    "She was not in the room",
    "The evening was spent in",
    "Mr. Knightley had always been",
    "It was a delightful visit",
    "He looked at her with surprise",
    "The carriage was ordered",
    "My dear sister",
    "They walked on together",
)
# Quick manners: what takes seconds in the world takes tenths of them here.
QUICK = {
    "coordinator.slots": 2,
    "coordinator.saturated_after_s": 0.1,
    "coordinator.calm_after_s": 0.3,
    "market.poll_interval_s": 0.2,
    "market.report_interval_s": 0.1,
    "market.gossip_interval_min_s": 0.1,
    "market.renew_interval_s": 0.2,
    "market.tenure_min_s": 0.5,
    "market.surplus_grace_s": 0.3,
    "fanout.cool_off_s": 0.3,
    "fanout.hedge_floor_s": 0.4,  # a busy test machine must not look like a late worker ...
    "fanout.deadline_floor_s": 0.4,  # ... nor like a silent one
}


@dataclass(slots=True)
class Swarm:
    folder: Path
    nursery: trio.Nursery
    stop: trio.Event = field(default_factory=trio.Event)
    nodes: list[Node] = field(default_factory=list)

    @property
    def main(self) -> Node:
        return self.nodes[0]

    async def add(self, roles: str, faults: Faults = NO_FAULTS, **settings: object) -> Node:
        """A further node; it joins the first one."""
        number = len(self.nodes)
        flags = {
            **QUICK,
            "node.roles": roles,
            "node.name": f"node-{number}",
            "node.data_dir": str(self.folder / f"node-{number}"),
            "network.listen": "/ip4/127.0.0.1/tcp/0",
            **({"network.join": self.main.ticket()} if self.nodes else {}),
            **{key.replace("__", "."): value for key, value in settings.items()},
        }
        # Each node lives in a task of its own, so one may be added inside a block that ends before the node does.
        node = await self.nursery.start(self._keep_open, load_settings(flags=flags), faults)
        self.nodes.append(node)
        return node

    async def _keep_open(self, settings: Settings, faults: Faults, *, task_status: Any) -> None:
        async with open_node(settings, faults=faults) as node:
            task_status.started(node)
            await self.stop.wait()


@asynccontextmanager
async def open_swarm(folder: Path, *, faults: Faults = NO_FAULTS, **settings: object) -> AsyncIterator[Swarm]:
    """A coordinator that is also the hub; `add` workers to it."""
    async with trio.open_nursery() as nursery:
        swarm = Swarm(folder, nursery)
        try:
            await swarm.add("coordinator,hub", faults, **settings)
            yield swarm
        finally:
            swarm.stop.set()


@dataclass(frozen=True, slots=True)
class Reply:
    text: str
    end: Finished


async def ask(node: Node, prompt: str, tokens: int = 24, *, temperature: float = 0.0, seed: int = 0) -> Reply:
    sampling = SamplingOptions(temperature=temperature, seed=seed)
    parts: list[str] = []
    async with node.generate(GenerationRequest(prompt=prompt, max_tokens=tokens, sampling=sampling)) as answer:
        async for event in answer:
            if isinstance(event, TextDelta):
                parts.append(event.text)
            else:
                return Reply("".join(parts), event)
    raise AssertionError("the answer ended without Finished")


async def until(node: Node, seen: Callable[[NodeSnapshot], bool], what: str, timeout_s: float = 20.0) -> NodeSnapshot:
    """Polls a node's snapshot until it shows something; fails with what it showed instead."""
    snapshot = node.snapshot()
    with trio.move_on_after(timeout_s):
        while not seen(snapshot):
            await trio.sleep(0.02)
            snapshot = node.snapshot()
        return snapshot
    raise AssertionError(f"not seen within {timeout_s:g} s: {what}; the node shows {snapshot.to_json()}")


@asynccontextmanager
async def load(node: Node, clients: int = 6, tokens: int = 24) -> AsyncIterator[dict[str, set[str]]]:
    """Keeps requests going; yields all answers seen so far, by prompt. Any failed request fails the test."""
    answers: dict[str, set[str]] = {prompt: set() for prompt in PROMPTS}
    stop = False

    async def client(number: int) -> None:
        while not stop:
            prompt = PROMPTS[number % len(PROMPTS)]
            answers[prompt].add((await ask(node, prompt, tokens)).text)
            number += 1

    async with trio.open_nursery() as nursery:
        for number in range(clients):
            nursery.start_soon(client, number)
        yield answers
        stop = True


async def solo(node: Node, tokens: int = 24) -> dict[str, str]:
    """Each prompt's answer with nobody else in the batch."""
    return {prompt: (await ask(node, prompt, tokens)).text for prompt in PROMPTS}


def assert_same(answers: dict[str, set[str]], expected: dict[str, str]) -> None:
    assert any(answers.values()), "no request was answered"
    different = {p: texts for p, texts in answers.items() if texts - {expected[p]}}
    assert not different, f"answers differ from the solo run: {different}"
