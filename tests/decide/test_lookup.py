"""Whom to ask next on the way to a key."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvasir_node.decide.lookup import ASKED_MAX, CLOSEST_MAX, KNOWN_MAX, PARALLEL, TOLD_MAX, DhtNode, Lookup, closest

KEY = b"key"


def node(number: int) -> DhtNode:
    return DhtNode(number.to_bytes(8, "big"), (f"/ip4/192.0.2.1/tcp/{number}",))


WORLD = {each.id: each for each in map(node, range(2000))}


def knows(asked: DhtNode, count: int = 12) -> list[DhtNode]:
    """What an honest node tells: some of those closest to the key, of the part of the world that it knows."""
    part = {each.id: each for each in WORLD.values() if (each.id[-1] ^ asked.id[-1]) % 7 < 4}
    return closest(KEY, part)[:count]


def test_it_finds_those_closest_to_the_key_from_one_node_that_is_anywhere():
    lookup = Lookup(KEY)
    lookup.begin([node(1)])
    asked = 0
    while not lookup.is_done:
        for each in lookup.next():
            asked += 1
            lookup.answered(each, knows(each))
    best = closest(KEY, WORLD)
    assert [each.id for each in lookup.found()[:8]] == [each.id for each in best[:8]]
    assert asked <= ASKED_MAX


def test_those_that_fail_are_left_out_and_it_ends_when_all_have():
    lookup = Lookup(KEY)
    lookup.begin(map(node, range(5)))
    first = lookup.next()
    assert len(first) == PARALLEL
    assert lookup.next() == []
    for each in first:
        lookup.failed(each)
    rest = lookup.next()
    lookup.answered(rest[0], [])
    lookup.failed(rest[1])
    assert lookup.is_done
    assert lookup.found() == [rest[0]]
    empty = Lookup(KEY)
    assert empty.is_done
    assert empty.next() == []


@given(st.lists(st.integers(0, 3), max_size=300))
def test_it_ends_whatever_is_answered(choices):
    """Nodes that make up ever more nodes, always closer to the key, cost so many questions and no more."""
    lookup, made_up = Lookup(KEY), iter(range(10_000, 1_000_000))
    lookup.begin([node(1)])
    under_way: list[DhtNode] = []
    asked, script = 0, iter(choices)
    while not lookup.is_done:
        due = lookup.next()
        assert due or under_way
        asked += len(due)
        under_way += due
        assert len(under_way) <= PARALLEL
        each = under_way.pop(0)
        if next(script, 1):
            lookup.answered(each, [node(next(made_up)) for _ in range(3 * TOLD_MAX)])
        else:
            lookup.failed(each)
        assert len(lookup._known) <= KNOWN_MAX
    assert asked <= ASKED_MAX
    assert len(lookup.found()) <= CLOSEST_MAX
