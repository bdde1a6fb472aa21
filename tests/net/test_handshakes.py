"""Inbound connections are authenticated one by one, in bounded number, and nobody takes all places."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import trio

from kvasir_node.base.errors import CapacityError
from kvasir_node.net.handshakes import (
    BURST,
    FORGIVEN_S,
    GAP_S,
    HANDSHAKES_MAX,
    PER_RANGE_MAX,
    RANGES_MAX,
    REFUSED_MAX,
    Handshakes,
)


async def test_places_are_bounded_in_all_and_for_each_range_of_addresses():
    handshakes = Handshakes()
    with ExitStack() as stack:
        for number in range(PER_RANGE_MAX):
            stack.enter_context(handshakes.place(f"198.51.100.{number}"))
        with (
            pytest.raises(CapacityError, match=f"{PER_RANGE_MAX} from 198.51.100.0/24"),
            handshakes.place("198.51.100.9"),
        ):
            raise AssertionError("it has a place")
        for number in range(HANDSHAKES_MAX - PER_RANGE_MAX):
            stack.enter_context(handshakes.place(f"2001:db8:0:{number}::1"))
        with pytest.raises(CapacityError), handshakes.place("192.0.2.1"):
            raise AssertionError("it has a place")
    assert handshakes.under_way == 0
    with handshakes.place("198.51.100.9"):
        assert handshakes.under_way == 1


async def test_a_few_begin_at_once_and_the_others_one_by_one_in_their_order(autojump_clock):
    handshakes, began_at, order = Handshakes(), trio.current_time(), []

    async def begin(number: int) -> None:
        await handshakes.turn()
        order.append((number, round(trio.current_time() - began_at, 6)))

    async with trio.open_nursery() as nursery:
        for number in range(BURST + 10):
            nursery.start_soon(begin, number)
            await trio.lowlevel.checkpoint()
    assert [at for _, at in order] == [0.0] * BURST + [round(GAP_S * number, 6) for number in range(1, 11)]
    await trio.sleep(10)
    began_at = trio.current_time()
    for _ in range(BURST):
        await handshakes.turn()
    assert trio.current_time() == began_at


async def test_where_many_were_refused_the_next_ones_are_turned_away_and_one_is_forgiven_each_second(autojump_clock):
    handshakes = Handshakes()
    for number in range(REFUSED_MAX):
        with handshakes.place(f"198.51.100.{number}"):
            pass
        handshakes.refused(f"198.51.100.{number}")
    with (
        pytest.raises(CapacityError, match=r"from 198\.51\.100\.0/24 were refused"),
        handshakes.place("198.51.100.200"),
    ):
        raise AssertionError("it has a place")
    with handshakes.place("192.0.2.1"):
        pass  # others are not concerned
    await trio.sleep(FORGIVEN_S)
    with handshakes.place("198.51.100.200"):
        pass
    handshakes.refused("198.51.100.200")
    with pytest.raises(CapacityError), handshakes.place("198.51.100.200"):
        raise AssertionError("it has a place")


async def test_law_7_refusals_are_remembered_of_so_many_ranges(autojump_clock):
    handshakes = Handshakes()
    for _ in range(REFUSED_MAX):
        handshakes.refused("192.0.2.1")
    for number in range(RANGES_MAX):
        handshakes.refused(f"10.{number // 256}.{number % 256}.1")
    with handshakes.place("192.0.2.1"):
        assert len(handshakes._forgiven_at) == RANGES_MAX
