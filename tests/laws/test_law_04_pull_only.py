"""Law 4: no message ever tells a node to start, fetch or move; hubs and coordinators only answer, or ask for sums."""

import ast
from pathlib import Path

import pytest

import kvasir_node
from kvasir_node.base.errors import Misbehaved, RejectReason
from kvasir_node.base.ids import DAG_CBOR_CODEC, ModelId, PeerId, SliceId, cid_of
from kvasir_node.decide import placement
from kvasir_node.decide.placement import Assignment, Fetch, Placement, PlacementLimits
from kvasir_node.model.checkpoint import ExpertMaths
from kvasir_node.model.experts import ExpertShard
from kvasir_node.roles.content import run_inline
from kvasir_node.roles.link import Link, compute_here
from kvasir_node.wire.blocks import BlocksMethod
from kvasir_node.wire.messages import ExpertsMethod, MarketMethod

ROLES = Path(kvasir_node.__file__).parent / "roles"
MODEL = ModelId(cid_of(b"model", DAG_CBOR_CODEC))
CALLS = ("call", "submit", "notify", "one_call")


def test_the_methods_of_the_swarm_are_a_closed_list():
    """A new method belongs here first, with the side that may call it."""
    assert {method.name for method in MarketMethod} == {
        "REPORT",  # coordinator to hub
        "POLL",  # worker to hub
        "RENEW",  # worker to hub
        "RELEASE",  # worker to hub
        "TELL",  # hub to hub
    }
    assert {method.name for method in BlocksMethod} == {"WANT"}  # asked of whoever has blocks
    assert {method.name for method in ExpertsMethod} == {
        "ATTACH",  # worker to coordinator
        "DETACH",  # worker to coordinator
        "COMPUTE",  # coordinator to worker
        "STANDING",  # coordinator to worker, a notice
        "EXPRESS",  # worker to coordinator, which invites it
    }


def a_link(told: list) -> Link:
    return Link(
        PeerId("carl"),
        MODEL,
        "float32",
        ExpertShard(ExpertMaths("silu"), 4, 2),
        body_bytes_max=1000,
        in_flight_max=1,
        compute=compute_here,
        run_blocking=run_inline,
        computed=lambda rows: None,
        standing_told=told.append,
    )


async def test_a_worker_takes_one_call_and_one_notice_and_nothing_else():
    told: list = []
    link = a_link(told)
    for method in range(256):
        with pytest.raises(Misbehaved) as refused:
            await link._handle(method, memoryview(bytearray(4)))
        assert (refused.value.reason is RejectReason.UNKNOWN_METHOD) == (method != ExpertsMethod.COMPUTE)
        with pytest.raises(Misbehaved) as refused:
            link._on_notice(method, memoryview(b"\xff"))
        assert (refused.value.reason is RejectReason.UNKNOWN_METHOD) == (method != ExpertsMethod.STANDING)
    assert told == []


def calls_in(module: str) -> list[ast.Call]:
    tree = ast.parse((ROLES / module).read_text())
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def test_a_hub_only_answers():
    assert not {name_of(call) for call in calls_in("hub.py")} & {*CALLS, "open_stream", "connect"}


def test_what_a_hub_says_unasked_is_news_to_other_hubs_alone():
    calls = calls_in("hub_news.py")
    assert not {name_of(call) for call in calls} & {*CALLS, "open_stream", "connect"}
    methods = [
        argument.attr
        for call in calls
        if name_of(call) == "_ask_hub"
        for argument in call.args
        if isinstance(argument, ast.Attribute) and getattr(argument.value, "id", "") == "MarketMethod"
    ]
    assert methods == ["TELL"]


def test_a_coordinator_opens_nothing_and_asks_a_worker_for_sums_alone():
    for module in ("coordinator.py", "crew.py", "attendance.py", "dispatch.py"):
        assert not {name_of(call) for call in calls_in(module)} & {"open_stream", "connect", "one_call"}
    asked = {
        node.attr
        for module in ("crew.py", "attendance.py")
        for call in calls_in(module)
        if name_of(call) in CALLS
        for argument in call.args
        for node in ast.walk(argument)
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "ExpertsMethod"
    }
    assert asked == {"COMPUTE", "STANDING"}


def test_a_worker_serves_no_protocol_of_its_own():
    for module in ("worker.py", "link.py"):
        assert not {name_of(call) for call in calls_in(module)} & {"set_handler", "serve"}


class Middle:
    def uniform(self, a: float, b: float, /) -> float:
        return (a + b) / 2


def test_only_the_answer_to_its_own_poll_makes_a_worker_fetch():
    assignment = Assignment("lease", MODEL, "float32", SliceId(0, 0, 7), PeerId("carl"), (), PeerId("hub"))
    events = [
        placement.HubsKnown((PeerId("hub"),)),
        placement.DemandSeen(100),
        placement.NothingOffered(0.0),
        placement.PollFailed(PeerId("hub")),
        placement.StepDone("lease"),
        placement.StepFailed("lease", retry=True),
        placement.StandingTold("lease", proven=True),
        placement.CoordinatorLost("lease"),
        placement.Renewed("lease", 15.0),
        placement.RenewFailed("lease", PeerId("hub")),
        placement.Drained("lease"),
        placement.Paused(),
        placement.Resumed(),
        placement.Tick(),
    ]
    mind = Placement(PlacementLimits(4, 2.0, 3.0), Middle())
    for round_ in range(3):
        for event in events:
            commands = mind.handle(event, 10.0 * round_)
            assert not any(isinstance(command, Fetch) for command in commands)
    assert mind.handle(placement.OfferReceived(assignment, 15.0), 40.0) == [Fetch(assignment)]
