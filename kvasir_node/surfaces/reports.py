"""A node's documents as text for people: `status`, `peers`, `demand`, warnings first.

It does not know where a document came from; fields that an older or newer node lacks are shown as missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvasir_node.surfaces.words import clean, count_text, counted, duration_text, short_id, size_text

Document = Mapping[str, Any]


def status_text(status: Document) -> str:
    rows = (f"{label:<9}{value}" for label, value in _status_rows(status))
    lines = [*_warnings(status), *_headline(status.get("headline")), *rows]
    return "\n".join(lines)


def _warnings(status: Document) -> Iterator[str]:
    for warning in status.get("warnings") or ():
        yield f"warning: {clean(str(warning))}"


def _headline(headline: Document | None) -> Iterator[str]:
    if headline:
        yield f"{headline['state']}: {clean(headline['words'])}"
        if headline["advice"]:
            yield f"{'':<9}{clean(headline['advice'])}"


def _status_rows(status: Document) -> Iterator[tuple[str, str]]:
    roles = ",".join(status.get("roles") or ())
    up = duration_text(status.get("uptime_s") or 0)
    yield "node", f"{clean(str(status.get('name')))}  {status.get('peer_id')}"
    yield "version", f"{status.get('version')}  roles {roles}  up {up}"
    model = status.get("model")
    if model:
        held = f"{model['slices_held']}/{model['slices']} slices held"
        yield "model", f"{clean(model['name'])}  {held}  {model['id']}"
        if model.get("expert_dtype") == "int8":
            error = model["expert_error"]
            yield "experts", f"int8  {'error unknown' if error is None else f'sums {error:.1%} off'}"
    if "coordinator" in (status.get("roles") or ()):
        yield from _coordinator_rows(status)
    worker = status.get("worker")
    if worker:
        slices = " ".join(worker["slices"]) or "none"
        why = f" ({clean(worker['reason'])})" if worker.get("reason") else ""
        yield "worker", f"{worker['state']}{why}  slices {slices}  rows {count_text(worker['rows'])}"
    net = status.get("net") or {}
    if net:
        traffic = f"in {size_text(net['bytes_in'])}  out {size_text(net['bytes_out'])}"
        reachability = "" if net["reachability"] == "unknown" else f"  reachability {net['reachability']}"
        yield "net", f"{counted(net['peers'], 'peer')}  {traffic}{reachability}"


def _wire_text(wire: Document) -> str:
    error = "" if wire["error"] is None else f"  logits {wire['error']:.2%} off"
    compared = f"  {wire['tokens_agreeing']}/{wire['tokens']} tokens agree" if wire["tokens"] else ""
    asked = f"  {wire['asked']} refused" if wire["refusal"] else ""
    return f"{wire['encoding']}{asked}{error}{compared}"


def _coordinator_rows(status: Document) -> Iterator[tuple[str, str]]:
    slots, fanout, speed = status["slots"], status["fanout"], status["throughput"]
    queue = f"{slots['queued']}/{slots['queue_max']} queued"
    yield "slots", f"{slots['busy']}/{slots['total']} busy  {queue}  {slots['state']}"
    yield "tokens", f"{speed['tokens_per_s']:.1f}/s  {count_text(speed['tokens_total'])} in all"
    pairs = f"local {count_text(fanout['local_pairs'])}  remote {count_text(fanout['remote_pairs'])} pairs"
    yield "fan-out", f"{clean(fanout['reason']) or 'off'}  {pairs}"
    wire = fanout["wire"]
    if wire["asked"] != "compute":
        yield "wire", _wire_text(wire)
    yield "workers", _worker_counts(status.get("workers") or ())


def _worker_counts(workers: Sequence[Document]) -> str:
    counts: dict[str, int] = {}
    for worker in workers:
        counts[worker["state"]] = counts.get(worker["state"], 0) + 1
    return "  ".join(f"{count} {state}" for state, count in sorted(counts.items())) or "none"


def work_left(status: Document) -> str:
    """What a drain waits for, in words; empty when nothing is left."""
    slots, leases = status["slots"], (status.get("worker") or {}).get("leases", ())
    running = [(slots["busy"], "answer"), (slots["queued"], "waiting request"), (len(leases), "lease")]
    return ", ".join(counted(count, noun) for count, noun in running if count)


def loaded_document(status: Document, requests: Document) -> dict[str, Any]:
    """What `ps` shows, of two of the API's documents."""
    keys = ("model", "slots", "worker", "draining")
    return {"schema": "kvasir.ps/1", **{key: status[key] for key in keys}, "requests": requests["running"]}


def ps_text(document: Document) -> str:
    return "\n".join([*_loaded_lines(document), *_request_lines(document["requests"])])


def _loaded_lines(document: Document) -> Iterator[str]:
    yield f"{'LOADED':<24} {'FOR':<12} {'SLICES':>9}  STATE"
    model, worker, slots = document["model"], document["worker"], document["slots"]
    if model:
        held = f"{model['slices_held']}/{model['slices']}"
        state = f"{'draining, ' if document['draining'] else ''}{slots['busy']}/{slots['total']} slots busy"
        yield f"{clean(model['name'], 24):<24} {'answers':<12} {held:>9}  {state}"
    if worker and (worker["slices"] or worker["leases"]):
        yield f"{'experts':<24} {'other nodes':<12} {len(worker['slices']):>9}  {worker['state']}"
    if not model and not (worker and worker["leases"]):
        yield "nothing"


def _request_lines(requests: Sequence[Document]) -> Iterator[str]:
    yield ""
    if not requests:
        yield "no request under way"
        return
    yield f"{'REQUEST':<9} {'STATE':<8} {'PROMPT':>7} {'ANSWER':>7} {'ANSWERS':>7} {'AGE':>7}"
    for each in requests:
        row = f"{each['request']:<9} {each['state']:<8} {each['prompt_tokens']:>7} {each['answer_tokens']:>7}"
        yield f"{row} {each['choices']:>7} {duration_text(each['age_s']):>7}"


def peers_text(peers: Document) -> str:
    net = peers["net"]
    lines = [f"{counted(net['peers'], 'peer')}: {net['direct']} direct, {net['relayed']} relayed"]
    members = peers.get("members") or ()
    guests = {member["peer_id"] for member in members if member.get("is_guest")}
    for worker in peers["workers"]:
        rtt = "-" if worker["rtt_ms"] is None else f"{worker['rtt_ms']:.1f} ms"
        row = f"{clean(worker['name'], 20):<20} {short_id(worker['peer_id'])}  {worker['state']:<8} {worker['path']:<6}"
        guest = "  guest" if worker["peer_id"] in guests else ""
        lines.append(f"{row} {rtt:>9}  rows {count_text(worker['rows'])}  failures {worker['failures']}{guest}")
    shown = {worker["peer_id"] for worker in peers["workers"]}
    for member in members:
        if member["peer_id"] not in shown:
            roles = clean(",".join(member["roles"]), 40) + ("  guest" if member["peer_id"] in guests else "")
            lines.append(f"{clean(member['name'], 20):<20} {short_id(member['peer_id'])}  {roles}")
    lines += [f"shut out of the swarm: {clean(peer, 64)}" for peer in peers.get("revoked") or ()]
    return "\n".join(lines)


def demand_text(demand: Document) -> str:
    if demand["hub"] is None:
        return "this node is no hub; ask one of the swarm's hubs"
    if not demand["demand"]:
        return "nothing is wanted now"
    rows = [
        f"{clean(d['model'], 24):<24} {d['slice']:<12} {d['want']:>4} {d['proven']:>6} {d['leased']:>6}"
        for d in demand["demand"]
    ]
    return "\n".join([f"{'model':<24} {'slice':<12} want proven leased", *rows])
