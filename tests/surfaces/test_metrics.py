"""GET /metrics, read with Prometheus' own parser."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from surfaces_helpers import serve, settings_with

from kvasir_node.base.errors import Misbehaved, RejectReason
from kvasir_node.base.histogram import Histogram
from kvasir_node.base.rejections import Rejections
from kvasir_node.base.snapshot import DemandSnapshot, HubSnapshot, MetricsSnapshot
from kvasir_node.surfaces.fake_node import FakeNode, busy_snapshot, fake_snapshot
from kvasir_node.surfaces.metrics import metrics_text

NAMES = {  # with the label of each; the public interface fixes them
    "kvasir_requests_running": None,
    "kvasir_requests_waiting": None,
    "kvasir_slots": None,
    "kvasir_saturated": None,
    "kvasir_time_to_first_token_seconds": "le",
    "kvasir_inter_token_latency_seconds": "le",
    "kvasir_requests_total": "finish_reason",
    "kvasir_tokens_total": "kind",
    "kvasir_expert_pairs_total": "where",
    "kvasir_expert_calls_total": "outcome",
    "kvasir_expert_call_seconds": "le",
    "kvasir_workers": "state",
    "kvasir_demand_slices": "state",
    "kvasir_blocks_bytes_total": "outcome",
    "kvasir_network_bytes_total": "direction",
    "kvasir_peer_rejections_total": "reason",
}


def families(text: str) -> Mapping[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(text: str, name: str, **labels: str) -> float:
    (found,) = (
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if (sample.name, sample.labels) == (name, labels)
    )
    return found


def measured() -> MetricsSnapshot:
    seen = Histogram((0.1, 1.0))
    for seconds in (0.05, 0.1, 0.5, 7.0):
        seen.observe(seconds)
    rejections = Rejections()
    rejections.note(Misbehaved(RejectReason.STALE, "old"))
    return MetricsSnapshot(
        {"stop": 3, "cancelled": 1},
        seen.snapshot(),
        seen.snapshot(),
        {"ok": 9, "late": 1},
        seen.snapshot(),
        {"fetched": 5},
        rejections.counts(),
    )


async def test_all_names_are_there_with_their_labels_and_no_others():
    node = FakeNode(settings_with())
    node.status, node.measured = busy_snapshot(), measured()
    async with serve(node) as served:
        response = await served.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {}
    for family in families(response.text).values():
        labels = {label for sample in family.samples for label in sample.labels}
        assert len(labels) <= 1
        total = "_total" if family.type == "counter" else ""
        found[family.name.removesuffix(total) + total] = next(iter(labels), None)
        assert family.documentation
    assert found == NAMES
    assert busy_snapshot().workers[0].peer_id not in response.text


def test_the_figures_are_those_of_the_status():
    text = metrics_text(busy_snapshot(), measured())
    assert value(text, "kvasir_requests_running") == 4
    assert value(text, "kvasir_requests_waiting") == 9
    assert value(text, "kvasir_saturated") == 1
    assert value(text, "kvasir_expert_pairs_total", where="remote") == 18100
    assert value(text, "kvasir_workers", state="proven") == 1
    assert value(text, "kvasir_workers", state="banned") == 0
    assert value(text, "kvasir_network_bytes_total", direction="out") == 2_200_000
    assert value(text, "kvasir_requests_total", finish_reason="cancelled") == 1
    assert value(text, "kvasir_peer_rejections_total", reason="stale") == 1
    assert value(text, "kvasir_peer_rejections_total", reason="bad_frame") == 0


def test_buckets_add_up():
    text = metrics_text(fake_snapshot(), measured())
    name = "kvasir_expert_call_seconds"
    assert [value(text, f"{name}_bucket", le=le) for le in ("0.1", "1.0", "+Inf")] == [2, 3, 4]
    assert value(text, f"{name}_count") == 4
    assert value(text, f"{name}_sum") == pytest.approx(7.65)


def test_a_slice_in_demand_counts_once():
    demand = (
        DemandSnapshot("demo", "0:0-7", 2, 2, 0),
        DemandSnapshot("demo", "1:0-7", 2, 1, 1),
        DemandSnapshot("demo", "2:0-7", 2, 1, 0),
        DemandSnapshot("demo", "3:0-7", 1, 0, 0),
        DemandSnapshot("demo", "4:0-7", 0, 3, 0),
    )
    text = metrics_text(fake_snapshot(hub=HubSnapshot(1, 0, 1, demand)), MetricsSnapshot())
    counts = [value(text, "kvasir_demand_slices", state=state) for state in ("proven", "leased", "open")]
    assert counts == [2, 1, 2]


def test_a_node_without_a_coordinator_has_every_family_too():
    text = metrics_text(fake_snapshot(hub=None, model=None, roles=("worker",)), MetricsSnapshot())
    assert len(families(text)) == len(NAMES)
    assert value(text, "kvasir_inter_token_latency_seconds_count") == 0
