"""GET /metrics: a node's figures as Prometheus' text. It does not know where they come from, nor HTTP.

No label names a peer or a model, so that the number of series is fixed. Our own forty lines instead of Prometheus'
client, because the counters live in the roles as plain numbers, and the client would keep a second set of them.
Source: "Exposition formats", text format 0.0.4, prometheus.io (2025).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from kvasir_node.base.histogram import HistogramSnapshot
from kvasir_node.base.snapshot import DemandSnapshot, MetricsSnapshot, NodeSnapshot

METRICS_MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
WORKER_STATES = ("new", "trial", "proven", "suspect", "banned")
Number = int | float


def metrics_text(snapshot: NodeSnapshot, metrics: MetricsSnapshot) -> str:
    return "".join(f"{line}\n" for line in _lines(snapshot, metrics))


def _lines(snapshot: NodeSnapshot, metrics: MetricsSnapshot) -> Iterator[str]:
    slots, fanout, net, tokens = snapshot.slots, snapshot.fanout, snapshot.net, snapshot.throughput
    yield from _gauge("kvasir_requests_running", "Requests that are computed, each choice for itself.", slots.busy)
    yield from _gauge("kvasir_requests_waiting", "Requests that wait for a slot, each choice for itself.", slots.queued)
    yield from _gauge("kvasir_slots", "Requests that can be computed at once.", slots.total)
    yield from _gauge("kvasir_saturated", "1 while this node has more work than it can do alone.", _saturated(snapshot))
    text = "From a request's arrival to its first token."
    yield from _histogram("kvasir_time_to_first_token_seconds", text, metrics.first_token_s)
    text = "Between two tokens of one answer."
    yield from _histogram("kvasir_inter_token_latency_seconds", text, metrics.between_tokens_s)
    text = "Requests that ended, by how."
    yield from _counter("kvasir_requests_total", text, "finish_reason", metrics.requests)
    computed = tokens.prompt_tokens_total - tokens.prompt_tokens_reused
    kinds = {"prompt": computed, "prompt_reused": tokens.prompt_tokens_reused, "answer": tokens.tokens_total}
    yield from _counter("kvasir_tokens_total", "Tokens computed, or of prompts copied from others.", "kind", kinds)
    pairs = {"local": fanout.local_pairs, "remote": fanout.remote_pairs, "trial": fanout.trial_pairs}
    text = "Pairs of a row and an expert, by where they were computed."
    yield from _counter("kvasir_expert_pairs_total", text, "where", pairs)
    text = "Calls to workers, trials apart, by how they ended."
    yield from _counter("kvasir_expert_calls_total", text, "outcome", metrics.expert_calls)
    text = "From sending a call to its answer."
    yield from _histogram("kvasir_expert_call_seconds", text, metrics.expert_call_s)
    states = Counter(worker.state for worker in snapshot.workers)
    workers = {state: states[state] for state in WORKER_STATES}
    yield from _family("kvasir_workers", "gauge", "Workers of this coordinator, by their state.", "state", workers)
    slices = _demand(() if snapshot.hub is None else snapshot.hub.demand)
    text = "Slices in demand at this hub, by the least that is true of them."
    yield from _family("kvasir_demand_slices", "gauge", text, "state", slices)
    text = "Bytes of blocks, by what became of them."
    yield from _counter("kvasir_blocks_bytes_total", text, "outcome", metrics.blocks_bytes)
    network = {"in": net.bytes_in, "out": net.bytes_out}
    yield from _counter("kvasir_network_bytes_total", "Bytes from and to peers.", "direction", network)
    text = "Peers, calls and messages that were refused, by why."
    yield from _counter("kvasir_peer_rejections_total", text, "reason", metrics.rejections)


def _saturated(snapshot: NodeSnapshot) -> int:
    return int(snapshot.slots.state == "saturated")


def _demand(demand: Iterable[DemandSnapshot]) -> dict[str, int]:
    """A slice is open when copies are neither proven nor leased, leased when all others are at least leased."""
    counts = {"proven": 0, "leased": 0, "open": 0}
    for each in demand:
        missing = each.want - each.proven
        counts["proven" if missing <= 0 else "leased" if each.leased >= missing else "open"] += 1
    return counts


def _gauge(name: str, text: str, value: Number) -> Iterator[str]:
    yield from _head(name, "gauge", text)
    yield f"{name} {value}"


def _counter(name: str, text: str, label: str, values: Mapping[str, Number]) -> Iterator[str]:
    return _family(name, "counter", text, label, values)


def _family(name: str, kind: str, text: str, label: str, values: Mapping[str, Number]) -> Iterator[str]:
    """The values of a label are words of ours, with nothing to escape."""
    yield from _head(name, kind, text)
    for value, count in values.items():
        yield f'{name}{{{label}="{value}"}} {count}'


def _histogram(name: str, text: str, seen: HistogramSnapshot) -> Iterator[str]:
    yield from _head(name, "histogram", text)
    below = 0
    for bound, count in zip((*map(str, seen.bounds), "+Inf"), seen.counts, strict=True):
        below += count
        yield f'{name}_bucket{{le="{bound}"}} {below}'
    yield f"{name}_sum {seen.total}"
    yield f"{name}_count {below}"


def _head(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
