"""How a node is, in one line, and what a person may do about it: what the screen, the page and `status` say first.

It does not know how it is shown. Every state has words of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvasir_node.base.snapshot import NodeSnapshot, WorkerSnapshot
from kvasir_node.surfaces.words import clean, count_text, counted

NEARLY_FULL = 0.8  # of the queue
_JOINS = "another machine joins with what `kvasir-node ticket` prints"


class Level(StrEnum):
    """How much it concerns a person."""

    GOOD = "good"
    BUSY = "busy"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Verdict:
    level: Level
    state: str  # a word or two, in capitals
    words: str
    advice: str

    def to_json(self) -> dict[str, str]:
        return {"level": self.level.value, "state": self.state, "words": self.words, "advice": self.advice}


def verdict_of(snapshot: NodeSnapshot, api: str | None) -> Verdict:
    """Of a node whose API, if it has one, is at that URL."""
    level, state, words = _verdict(snapshot)
    return Verdict(level, state, words, _advice(snapshot, api))


def _verdict(snapshot: NodeSnapshot) -> tuple[Level, str, str]:
    if snapshot.draining:
        return Level.BUSY, "DRAINING", f"{snapshot.slots.busy} running, takes nothing new"
    if "coordinator" in snapshot.roles:
        return _coordinator(snapshot)
    if snapshot.worker is not None:
        return _worker(snapshot.worker)
    hub = snapshot.hub
    if hub is None:
        return Level.GOOD, "RUNNING", counted(snapshot.net.peers, "peer")
    known = f"{counted(hub.coordinators, 'coordinator')}, {counted(hub.leases, 'lease')}"
    return Level.GOOD, "HUB", f"{known}, {counted(hub.idle_nodes, 'idle node')}"


def _coordinator(snapshot: NodeSnapshot) -> tuple[Level, str, str]:
    slots, model = snapshot.slots, snapshot.model
    if model is None:
        return Level.BAD, "NOT SERVING", "this coordinator has no model"
    load = f"{slots.busy} of {slots.total} slots busy"
    if slots.queued:
        load += f", {slots.queued} waiting"
    if slots.state == "saturated":
        return Level.BUSY, "SATURATED", f"{load}; {helpers(snapshot)}"
    return Level.GOOD, f"SERVING {clean(model.name, 24)}", f"{slots.state}, {load}; {helpers(snapshot)}"


def _ready(snapshot: NodeSnapshot) -> int:
    """Proven workers that hold something; one that has left stays listed, for its history, and has no slices."""
    return sum(worker.state == "proven" and bool(worker.slices) for worker in snapshot.workers)


def helpers(snapshot: NodeSnapshot) -> str:
    """Who computes experts for this coordinator now."""
    proven = _ready(snapshot)
    if not snapshot.fanout.on:
        return f"alone, {counted(proven, 'worker')} ready" if proven else "alone"
    gain = snapshot.fanout.measured_gain or snapshot.fanout.predicted_gain
    sharing = len(snapshot.fanout.shares) or proven
    return f"{counted(sharing, 'worker')} {'helps' if sharing == 1 else 'help'}, gain {gain:.1f}x"


def _worker(worker: WorkerSnapshot) -> tuple[Level, str, str]:
    state = {"serving": "LENDING", "draining": "GIVING BACK"}.get(worker.state, worker.state.upper())
    level = Level.BUSY if worker.state in ("paused", "draining") else Level.GOOD
    why = f": {clean(worker.reason, 60)}" if worker.reason else ""
    held = f"{counted(len(worker.slices), 'slice')} held, {count_text(worker.rows)} rows computed"
    return level, clean(state, 24), held + why


def _advice(snapshot: NodeSnapshot, api: str | None) -> str:
    """The first that applies."""
    coordinates = "coordinator" in snapshot.roles
    if snapshot.draining:
        return "it stops when its work is done; start it again to serve"
    if coordinates and snapshot.model is None:
        return "name a model: `kvasir-node up MODEL`; `kvasir-node ls` lists what is on this disk"
    if snapshot.slots.state == "saturated":
        return _advice_saturated(snapshot)
    if snapshot.warnings:
        return "`kvasir-node doctor` says what may be wrong, and what helps"
    if snapshot.worker is not None and snapshot.worker.state == "paused":
        return "`kvasir-node resume` lends again"
    if coordinates and snapshot.model is not None and not snapshot.throughput.requests_total:
        page = f"; in a browser: {api}/" if api else ""
        return f"ask it: `kvasir-node run {clean(snapshot.model.name, 24)}`{page}"
    return "all is well"


def _advice_saturated(snapshot: NodeSnapshot) -> str:
    slots = snapshot.slots
    if slots.pressure < 1:
        return "the burst is over: calm again soon"
    if slots.queue_max and slots.queued >= NEARLY_FULL * slots.queue_max:
        return f"the queue is nearly full, then requests are refused; {_JOINS}"
    if snapshot.fanout.on:
        return f"workers help; {_JOINS}"
    if _ready(snapshot):
        return f"workers are here and do not help: {clean(snapshot.fanout.reason, 80)}"
    return f"nobody helps yet; {_JOINS}"
