"""What `top` shows of a node elsewhere: as it is, as it becomes, and that it is gone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import trio
from surfaces_helpers import Served, serve, settings_with, until

from kvasir_node.base.errors import DataError
from kvasir_node.base.events import LoadChanged
from kvasir_node.base.snapshot import NodeSnapshot
from kvasir_node.surfaces import remote_source
from kvasir_node.surfaces.fake_node import FakeNode, busy_snapshot, fake_snapshot
from kvasir_node.surfaces.remote_source import RemoteSource, open_remote, read_document
from kvasir_node.surfaces.tui import render
from kvasir_node.surfaces.view import View


@asynccontextmanager
async def followed(node: FakeNode, key: str = "") -> AsyncIterator[tuple[Served, RemoteSource]]:
    async with serve(node) as served, open_remote(served.url, key, fake_snapshot(name="before"), "kvasir1x") as source:
        yield served, source


async def test_it_becomes_what_the_node_is_and_keeps_up_with_it():
    node = FakeNode(settings_with())
    node.status = busy_snapshot()
    async with followed(node) as (served, source):
        assert source.picture().snapshot.name == "before"
        await until(lambda: source.picture().snapshot.workers == busy_snapshot().workers)
        assert (source.picture().api, source.picture().ticket) == (served.url, "kvasir1x")
        await until(lambda: source.picture().experts == node.experts())
        node.status = replace(node.status, name="changed")
        await until(lambda: source.picture().snapshot.name == "changed")
        assert source.picture().silent_s < 3
        assert source.picture().speeds


async def test_events_become_lines():
    node = FakeNode(settings_with())
    async with followed(node) as (_, source):
        await trio.sleep(0.1)
        node.events.add(LoadChanged("saturated", 4, 9))
        await until(lambda: any("saturated: 4 busy, 9 waiting" in line for line in source.picture().log))


async def test_a_stream_of_events_that_falls_silent_is_opened_again(monkeypatch):
    monkeypatch.setattr(remote_source, "SILENT_EVENTS_S", 0.2)
    monkeypatch.setattr(remote_source, "RETRY_S", 0.01)
    node = FakeNode(settings_with(api__heartbeat_s=60))
    async with followed(node) as (_, source):
        await trio.sleep(1.0)
        node.events.add(LoadChanged("saturated", 4, 9))
        await until(lambda: any("saturated: 4 busy, 9 waiting" in line for line in source.picture().log))
        await trio.sleep(0.5)
        assert sum("saturated" in line for line in source.picture().log) == 1


async def test_pausing_goes_to_the_node_and_says_what_came_of_it():
    node = FakeNode(settings_with())
    async with followed(node) as (_, source):
        assert await source.lend_or_not() == "lending: paused: paused by its owner"
        assert await source.lend_or_not() == "lending: idle"
        node.status = replace(node.status, worker=None)
        assert "no worker" in await source.lend_or_not()


async def test_a_key_is_sent_and_a_wrong_one_is_told():
    node = FakeNode(settings_with(**{"api.key": "secret"}))
    async with followed(node, key="secret") as (_, source):
        await until(lambda: source.picture().snapshot.name == "attic")
    async with followed(node, key="wrong") as (_, source):
        await until(lambda: "401" in source.picture().trouble)


async def test_a_node_that_is_gone_is_told_to_be_silent(monkeypatch):
    monkeypatch.setattr(remote_source, "RETRY_S", 0.05)
    async with trio.open_nursery() as nursery:
        async with serve(FakeNode(settings_with()), grace_s=0.1) as served:
            url = served.url
        async with open_remote(url, "", fake_snapshot(), "") as source:
            await until(lambda: source.picture().trouble != "")
            picture = replace(source.picture(), silent_s=5.0)
            assert "NO ANSWER" in render(picture, View(), 80, 24).text
        nursery.cancel_scope.cancel()


def test_documents_of_other_versions_are_read_and_other_things_are_not():
    document: dict[str, Any] = fake_snapshot().to_json() | {"new_field": 1}
    assert read_document(_bytes(document), NodeSnapshot) == fake_snapshot()
    del document["members"]
    assert read_document(_bytes(document), NodeSnapshot) == fake_snapshot()
    for wrong in (b"", b"[]", b"<html>", _bytes({**document, "uptime_s": "x"}), _bytes({"name": "x"})):
        with pytest.raises(DataError, match="cannot be read"):
            read_document(wrong, NodeSnapshot)


def _bytes(document: dict[str, Any]) -> bytes:
    import json

    return json.dumps(document).encode()
