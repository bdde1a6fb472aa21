"""How long a call took, from what is known of when its answer came."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from kvasir_node.base.ids import PeerId
from kvasir_node.decide.call_times import CallLimits
from kvasir_node.model.pair_split import Part
from kvasir_node.net.express import answer_body
from kvasir_node.roles.remote_call import RemoteCall
from kvasir_node.wire.tensors import Encoding

PART = Part(1, 1, 1, 1, torch.zeros(20, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64), 0, 1)


class ScriptedChannel:
    """Has these frames, some of them only for who waits; the newest came at `arrived_at`."""

    def __init__(self, here: list[int], later: list[int], arrived_at: float | None) -> None:
        self._here, self._later = here, later
        self.arrived_at = arrived_at

    def receive_now(self) -> tuple[int, memoryview] | None:
        return self._frame(self._here)

    def receive(self, timeout_s: float) -> tuple[int, memoryview] | None:
        assert timeout_s > 0
        return self._frame(self._later)

    def _frame(self, ids: list[int]) -> tuple[int, memoryview] | None:
        return (ids.pop(0), memoryview(b"".join(answer_body([b"sums"])))) if ids else None


def waited(here: list[int], later: list[int], arrived_after_s: float | None) -> RemoteCall:
    """Call 7 after it was looked at, sent an hour ago."""
    call = RemoteCall(PeerId("ann"), 0, PART, 2, Encoding.FLOAT32, CallLimits(9, 9), 7, sent_at=time.monotonic() - 3600)
    channel: Any = ScriptedChannel(here, later, None if arrived_after_s is None else call.sent_at + arrived_after_s)
    call.channel = channel
    assert call.wait(time.monotonic() + 60) == b"sums"
    return call


@pytest.mark.parametrize(("here", "later"), [([7], []), ([], [7]), ([5, 6, 7], []), ([5], [6, 7])])
def test_an_answer_took_until_it_came_however_late_it_was_looked_for(here, later):
    call = waited(here, later, 2.0)
    assert (call.took_s, call.is_timed) == (pytest.approx(2.0), True)


@pytest.mark.parametrize("arrived_after_s", [None, -1.0])
def test_where_nobody_says_when_it_came_an_answer_is_timed_if_it_was_waited_for(arrived_after_s):
    found = waited([7], [], arrived_after_s)
    assert (found.took_s >= 3600, found.is_timed) == (True, False)
    awaited = waited([], [7], arrived_after_s)
    assert (awaited.took_s >= 3600, awaited.is_timed) == (True, True)
