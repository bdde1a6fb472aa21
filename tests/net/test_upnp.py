"""Asking routers to let connections in: real sockets on loopback, a router of our own."""

from __future__ import annotations

import pytest
import trio
from fake_gateway import DESCRIPTIONS, SERVICE, FakeGateway, open_gateway

from kvasir_node.base.errors import KvasirError, Misbehaved, Unreachable
from kvasir_node.net.upnp import (
    ANSWER_S,
    SEARCH_S,
    Gateway,
    PortTaken,
    add_mapping,
    delete_mapping,
    external_ip,
    find_gateway,
)

HERE = ["127.0.0.1"]


async def test_a_router_is_found_maps_a_port_and_forgets_it():
    async with open_gateway() as router:
        gateway = await find_gateway(HERE, router.group)
        assert gateway == Gateway(f"http://127.0.0.1:{router.http_port}/control", SERVICE, "127.0.0.1")
        assert await external_ip(gateway) == "198.51.100.7"
        await add_mapping(gateway, 9481, 4001, 1200)
        assert router.mappings == {9481: ("127.0.0.1", 4001, 1200)}
        await delete_mapping(gateway, 9481)
        assert router.mappings == {}
        with pytest.raises(Unreachable, match="error 714 NoSuchEntryInArray"):
            await delete_mapping(gateway, 9481)


async def test_a_port_of_another_machine_is_told_and_old_routers_map_for_good():
    async with open_gateway(taken=(9481,), only_permanent=True) as router:
        gateway = await find_gateway(HERE, router.group)
        with pytest.raises(PortTaken):
            await add_mapping(gateway, 9481, 4001, 1200)
        await add_mapping(gateway, 9482, 4001, 1200)
        assert router.mappings == {9482: ("127.0.0.1", 4001, 0)}


async def test_whatever_a_router_answers_is_an_error_in_bounded_time():
    """All faults at once, each with a router of its own."""
    faults = [*DESCRIPTIONS, "no answer", "nonsense", "location elsewhere", "endless", "slow", "no http"]
    found: dict[str, Gateway | KvasirError] = {}

    async def meet(fault: str) -> None:
        async with open_gateway(fault=fault) as router:
            try:
                found[fault] = await find_gateway(HERE, router.group)
            except KvasirError as error:
                found[fault] = error

    with trio.fail_after(SEARCH_S + ANSWER_S + 5):
        async with trio.open_nursery() as nursery:
            for fault in faults:
                nursery.start_soon(meet, fault)
    assert isinstance(found.pop("nonsense"), Gateway)  # it answered rightly, too
    assert all(isinstance(each, Unreachable) for each in found.values())
    assert "document type" in str(found["entities"])
    assert "document type" in str(found["entities in utf-16"])
    assert "more than" in str(found["endless"])
    assert "did not answer" in str(found["slow"])
    assert "elsewhere, to 'http://192.0.2.1" in str(found["elsewhere"])
    assert "no router" in str(found["location elsewhere"])


@pytest.mark.parametrize("outside", ["", "not an address", "::1", "1.2.3.4.5", "<b/>"])
async def test_an_outside_address_that_is_none_is_refused(outside):
    async with open_gateway(outside=outside) as router:
        gateway = await find_gateway(HERE, router.group)
        with pytest.raises(Misbehaved, match="outside address"):
            await external_ip(gateway)


async def test_without_a_network_there_is_no_router():
    with pytest.raises(Unreachable, match="no router offers"):
        await find_gateway([], FakeGateway().group)
