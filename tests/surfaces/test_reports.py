"""Documents as text: who is connected, in words; documents of older nodes can be read too."""

from __future__ import annotations

from dataclasses import replace

from kvasir_node.base.snapshot import FanoutSnapshot, MemberSnapshot, NetSnapshot, WireSnapshot
from kvasir_node.surfaces.fake_node import busy_snapshot, fake_snapshot
from kvasir_node.surfaces.reports import peers_text, status_text
from kvasir_node.surfaces.views import peers_document


def test_members_are_listed_with_their_roles_and_a_worker_only_once():
    busy = busy_snapshot()
    members = (
        MemberSnapshot(busy.workers[0].peer_id, "cellar", ("worker",)),
        MemberSnapshot("12D3KooWhub", "a \x1b[2Jhub", ("coordinator", "hub")),
    )
    lines = peers_text(peers_document(fake_snapshot(workers=busy.workers, members=members))).splitlines()
    assert len(lines) == 1 + len(busy.workers) + 1
    assert lines[-1].split("  ")[-1] == "coordinator,hub"
    assert lines[-1].startswith("a ?[2Jhub ")


def test_guests_are_called_so_whether_they_work_or_not():
    worker = busy_snapshot().workers[0]
    members = (
        MemberSnapshot(worker.peer_id, "a phone", ("worker",), is_guest=True),
        MemberSnapshot("12D3KooWtablet", "a tablet", ("worker",), is_guest=True),
    )
    lines = peers_text(peers_document(fake_snapshot(workers=(worker,), members=members))).splitlines()
    assert [line.endswith("  guest") for line in lines] == [False, True, True]


def test_a_document_without_members_is_one_of_an_older_node():
    document = peers_document(fake_snapshot(net=NetSnapshot(1, 1, 0)))
    del document["members"]
    assert peers_text(document) == "1 peer: 1 direct, 0 relayed"


def test_reachability_is_told_once_it_is_known():
    assert "reachability" not in status_text(fake_snapshot().to_json())
    assert "reachability private" in status_text(busy_snapshot().to_json())


def test_int8_experts_are_told_with_their_error_and_others_not_at_all():
    def shown(dtype: str, error: float | None) -> str:
        model = busy_snapshot().model
        assert model is not None
        return status_text(fake_snapshot(model=replace(model, expert_dtype=dtype, expert_error=error)).to_json())

    assert "experts  int8  sums 1.0% off" in shown("int8", 0.0104)
    assert "experts  int8  error unknown" in shown("int8", None)
    assert "\nexperts" not in shown("bfloat16", None)


def test_what_rows_travel_in_is_told_when_somebody_asked_for_it():
    def shown(wire: WireSnapshot) -> str:
        return status_text(fake_snapshot(fanout=FanoutSnapshot(wire=wire)).to_json())

    assert "wire     int8  logits 0.31% off  192/192 tokens agree" in shown(
        WireSnapshot("int8", "int8", 0.0031, 192, 192)
    )
    refused = WireSnapshot("float32", "int8", 0.0221, 192, 183, "it changes tokens")
    assert "wire     float32  int8 refused  logits 2.21% off  183/192 tokens agree" in shown(refused)
    assert "wire     float32  int8 refused\n" in shown(
        WireSnapshot("float32", "int8", refusal="it could not be measured")
    )
    assert "\nwire" not in shown(WireSnapshot("float32"))
