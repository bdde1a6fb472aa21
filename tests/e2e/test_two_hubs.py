"""Two hubs, two coordinators with a model each that work for each other: real processes, and one hub is killed."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack

import httpx
import pytest
import trio
from local_swarm import PROMPTS, Process, ask, node

TOKENS = 48
QUICK = ("--slots", "2", "--set", "coordinator.saturated_after_s=0.1")
TIMEOUT_S = 45


class Burst:
    """Requests at two coordinators without pause until stopped; a failed one fails the test."""

    def __init__(self, *mains: Process) -> None:
        self.urls = [main.ready["api"] for main in mains]
        self.answers: dict[str, set[str]] = {}
        self.stop = False

    async def client(self, number: int) -> None:
        async with httpx.AsyncClient() as client:
            while not self.stop:
                prompt = PROMPTS[number % len(PROMPTS)]
                answer = await ask(client, self.urls[number % len(self.urls)], prompt, TOKENS)
                self.answers.setdefault(prompt, set()).add(answer["choices"][0]["text"])
                number += len(self.urls)


async def until(process: Process, seen, what: str) -> dict:
    status: dict = {}
    with trio.move_on_after(TIMEOUT_S):
        while True:
            status = await trio.to_thread.run_sync(process.status)
            if seen(status):
                return status
            await trio.sleep(0.1)
    raise AssertionError(f"not seen within {TIMEOUT_S} s: {what}; {status}")


def is_met(status: dict, slices: int) -> bool:
    """Whether the hub sees so many slices wanted, and each of them proven by somebody."""
    wanted = [row for row in status["hub"]["demand"] if row["want"]]
    return len(wanted) == slices and all(row["proven"] for row in wanted)


@pytest.mark.timeout(240)
async def test_a_hub_killed_in_the_middle_of_a_burst_leaves_two_models_that_recruit_on(
    tmp_path, monkeypatch: pytest.MonkeyPatch
):
    with ExitStack() as stack:
        first = stack.enter_context(node(tmp_path, "first-hub", "--role", "hub"))
        monkeypatch.setenv("KVASIR_NETWORK__JOIN", str(first.ready["ticket"]))  # nobody is told of the other hub
        main = stack.enter_context(node(tmp_path, "main", "--role", "coordinator,hub,worker", *QUICK))
        # The same weights in other blocks are another model.
        blocks = ("--set", "store.block_bytes=64K")
        other = stack.enter_context(node(tmp_path, "other", "--role", "coordinator,worker", *QUICK, *blocks))
        assert main.ready["model"]["id"] != other.ready["model"]["id"]
        await until(other, lambda s: "main" in {m["name"] for m in s["members"]}, "the second hub is found")
        burst = Burst(main, other)
        async with trio.open_nursery() as nursery:
            for number in range(12):
                nursery.start_soon(burst.client, number)
            await until(main, lambda s: s["hub"]["demand"], "demand")
            os.kill(first.popen.pid, signal.SIGKILL)
            await until(
                main, lambda s: s["hub"]["coordinators"] == 2, "both coordinators report to the hub that is left"
            )
            for process in (main, other):
                await until(
                    process,
                    lambda s: any(w["state"] == "proven" and w["slices"] for w in s["workers"]),
                    "a proven worker",
                )
            slices = sum(process.status()["model"]["slices"] for process in (main, other))
            await until(main, lambda s: is_met(s, slices), f"{slices} slices of two models wanted and proven")
            burst.stop = True
        assert all(len(texts) == 1 for texts in burst.answers.values())  # both have the same weights
