"""A port of the home router is kept open while it is wanted, and closed at the end. Real sockets, a router of ours."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import trio
from fake_gateway import FakeGateway, open_gateway

from kvasir_node.roles.port_mapping import LEASE_S, TRIES_MAX, Mapping, PortMapping


class Kept:
    """A mapping under way; `changes` counts what it told."""

    def __init__(self, router: FakeGateway) -> None:
        self.is_wanted, self.changes = True, 0
        self.mapping = PortMapping(
            9481, lambda: ["127.0.0.1"], lambda: self.is_wanted, self._changed, random.Random(1), router.group
        )

    def _changed(self) -> None:
        self.changes += 1

    async def until(self, condition: Callable[[], bool]) -> None:
        with trio.fail_after(10):
            while not condition():  # noqa: ASYNC110 (what it waits for is no event of ours)
                await trio.sleep(0.02)


@asynccontextmanager
async def keeping(router: FakeGateway, *, is_wanted: bool = True) -> AsyncIterator[Kept]:
    kept = Kept(router)
    kept.is_wanted = is_wanted
    async with trio.open_nursery() as nursery:
        nursery.start_soon(kept.mapping.run, 0)
        yield kept
        nursery.cancel_scope.cancel()


async def test_a_port_is_opened_when_wanted_and_closed_at_the_end():
    async with open_gateway() as router:
        async with keeping(router, is_wanted=False) as kept:
            await trio.sleep(0.1)
            assert (router.calls, kept.changes) == ([], 0)
            kept.is_wanted = True
            await kept.until(lambda: kept.mapping.mapping is not None)
            assert kept.mapping.mapping == Mapping("198.51.100.7", 9481)
            assert router.mappings == {9481: ("127.0.0.1", 9481, LEASE_S)}
            assert kept.changes == 1
            kept.is_wanted = False  # as it works, others reach us: no reason to close it
            router.mappings.clear()  # it was restarted
            kept.mapping._patience.at = 0.0  # five minutes later
            await kept.until(lambda: 9481 in router.mappings)
            assert kept.changes == 1
        assert router.mappings == {}


async def test_where_another_machine_has_the_port_another_one_is_taken():
    async with open_gateway(taken=(9481,)) as router, keeping(router) as kept:
        await kept.until(lambda: kept.mapping.mapping is not None)
        ((port, (host, inside, _)),) = router.mappings.items()
        assert kept.mapping.mapping == Mapping("198.51.100.7", port)
        assert port != 9481
        assert (host, inside) == ("127.0.0.1", 9481)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"outside": "100.64.3.4"}, "another router before it"),
        ({"fault": "refuses"}, "error 606 Action not authorized"),
        ({"taken": range(65536)}, f"{TRIES_MAX} ports that were tried"),
        ({"fault": "entities"}, "document type"),
    ],
)
async def test_a_router_that_is_of_no_use_is_told_and_asked_again_later(options, words):
    async with open_gateway(**options) as router, keeping(router) as kept:
        await kept.until(lambda: bool(kept.mapping.problem))
        assert words in kept.mapping.problem
        assert (kept.mapping.mapping, router.mappings, kept.changes) == (None, {}, 0)
        assert not kept.mapping._patience.allows(trio.current_time())


async def test_a_router_that_is_gone_costs_the_mapping_and_not_the_end():
    async with open_gateway() as router, keeping(router) as kept:
        await kept.until(lambda: kept.mapping.mapping is not None)
        router.fault = "refuses"
        kept.mapping._patience.at = 0.0
        await kept.until(lambda: bool(kept.mapping.problem))
        assert (kept.mapping.mapping, kept.changes) == (None, 2)
