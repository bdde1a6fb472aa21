"""A fake node served on a real socket, and a client for it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
import trio

from kvasir_node.base.errors import UsageError
from kvasir_node.base.settings import Settings, load_settings
from kvasir_node.surfaces.address import parse_address
from kvasir_node.surfaces.fake_node import FakeNode
from kvasir_node.surfaces.http import serve_api
from kvasir_node.surfaces.listener import bound_address, open_listeners, url_of
from kvasir_node.surfaces.phone_door import PhoneDoor
from kvasir_node.surfaces.phone_page import PhonePage

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"


def settings_with(**flags: Any) -> Settings:
    """Settings with port 0; `api__heartbeat_s=1` sets api.heartbeat_s."""
    given = {"api.listen": "127.0.0.1:0"} | {key.replace("__", "."): value for key, value in flags.items()}
    key = given.pop("api.key", None)
    return load_settings(flags=given, env={"KVASIR_API__KEY": key} if key else {})


class FakeLife:
    """Notes what was asked of it; `refusal` is why the settings would not start."""

    def __init__(self, door: PhoneDoor) -> None:
        self.door = door
        self.asked: list[str] = []
        self.refusal: UsageError | None = None

    def stop(self) -> None:
        self.asked.append("stop")

    def restart(self) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.asked.append("restart")


@dataclass
class Served:
    node: FakeNode
    life: FakeLife
    url: str
    client: httpx.AsyncClient

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.client.post(path, json={"model": "demo", **body})

    async def chat(self, content: str = "hello", **body: Any) -> httpx.Response:
        return await self.post(CHAT, messages=[{"role": "user", "content": content}], **body)


@asynccontextmanager
async def serve(node: FakeNode, *, grace_s: float = 1.0, page: PhonePage | None = None) -> AsyncIterator[Served]:
    stop = trio.Event()
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            listeners = await open_listeners(parse_address(node.settings.api.listen))
            url = url_of(listeners)
            life = FakeLife(PhoneDoor(page or PhonePage(), bound_address(listeners)))
            nursery.start_soon(partial(serve_api, node, life, listeners, stop=stop, grace_s=grace_s))
            async with httpx.AsyncClient(base_url=url, timeout=20, trust_env=False) as client:
                yield Served(node, life, url, client)
            stop.set()


def sse_documents(text: str) -> list[Any]:
    """The events of a stream, comments left out; "[DONE]" stays text."""
    lines = [line for line in text.split("\n\n") if line and not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines), lines
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Waits for something that real sockets bring about."""
    with trio.fail_after(timeout_s):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.005)
