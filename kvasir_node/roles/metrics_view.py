"""A node's metrics, put together from what its roles counted. It does not know how they are shown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvasir_node.base.snapshot import MetricsSnapshot
from kvasir_node.roles.coordinator import Coordinator
from kvasir_node.roles.download import FetchTally


def metrics_snapshot(
    coordinator: Coordinator | None, tallies: Iterable[FetchTally], bytes_served: int, rejections: Mapping[str, int]
) -> MetricsSnapshot:
    tallies = tuple(tallies)
    blocks = {
        "fetched": sum(tally.bytes_fetched for tally in tallies),
        "reused": sum(tally.bytes_reused for tally in tallies),
        "wasted": sum(tally.bytes_wasted for tally in tallies),
        "served": bytes_served,
    }
    if coordinator is None:
        return MetricsSnapshot(blocks_bytes=blocks, rejections=rejections)
    requests, calls = coordinator.desk.book, coordinator.crew.book
    return MetricsSnapshot(
        requests=dict(requests.outcomes),
        first_token_s=requests.first_token_s.snapshot(),
        between_tokens_s=requests.between_tokens_s.snapshot(),
        expert_calls=dict(calls.outcomes),
        expert_call_s=calls.seconds.snapshot(),
        blocks_bytes=blocks,
        rejections=rejections,
    )
