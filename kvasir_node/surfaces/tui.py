"""The screen of `up` as text: a pure function of a snapshot, a size and the newest log lines.

It does not know terminals, keys or time. Nothing is told by colour alone, and all text of our own is ASCII; what
other peers chose (names, reasons) is cleaned first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from kvasir_node.base.snapshot import DemandSnapshot, NodeSnapshot, WorkerPeerSnapshot
from kvasir_node.surfaces.words import clean, count_text, counted, duration_text, short_id, size_text

WARNINGS_SHOWN = 3
BAR_CELLS = 12
LOG_LINES_MIN = 3
_LABEL_CELLS = 9
_MARKS = {"new": " ", "trial": "?", "proven": "+", "suspect": "!", "banned": "x"}
_STYLES = {"proven": "green", "suspect": "yellow", "banned": "red", "trial": "cyan"}
HELP = (
    "q          leave: finishes running answers, then stops (so does Ctrl-C)",
    "?          this help",
    "slots      answers computed at once; the queue holds those that wait",
    "state      saturated: every slot busy and others waiting, so work may go to proven workers;",
    "           it stays so for a few seconds (coordinator.calm_after_s) after the burst is over",
    "pressure   running and waiting requests per slot",
    "fan-out    whether experts are computed by workers now, and why",
    "demand     slices of experts that this hub wants held, and how many copies are there",
    "workers    + proven   ? on trial   ! suspect   x banned",
    "elsewhere  kvasir-node status | peers | demand | ticket",
)


@dataclass(frozen=True, slots=True)
class Frame:
    """What surrounds the snapshot: where the API is, the newest log lines (last is newest), and the view's state."""

    api: str | None
    log_lines: Sequence[str] = ()
    help: bool = False
    ascii_only: bool = False


def render(snapshot: NodeSnapshot, frame: Frame, width: int, height: int) -> Text:
    """Exactly `height` lines of at most `width` cells."""
    lines = [_title(snapshot, width), *_warnings(snapshot), *_facts(snapshot, frame)]
    free = max(height - len(lines) - 1, 0)
    lines += _help(free) if frame.help else _lower(snapshot, frame, free)
    lines = lines[: height - 1] + [Text("")] * max(height - 1 - len(lines), 0)
    lines.append(Text("q quit   ? help", style="dim"))
    return Text("\n").join(_fitted(line, width, frame.ascii_only) for line in lines)


def _fitted(line: Text, width: int, ascii_only: bool) -> Text:
    if ascii_only and not line.plain.isascii():
        line = Text(line.plain.encode("ascii", "replace").decode(), style=line.style)
    line.truncate(width, overflow="crop")
    return line


def _title(snapshot: NodeSnapshot, width: int) -> Text:
    left = f"kvasir-node {snapshot.version}  {clean(snapshot.name, 30)}  {','.join(snapshot.roles)}"
    right = f"up {duration_text(snapshot.uptime_s)}"
    return Text(f"{left:<{max(width - len(right) - 1, 0)}} {right}", style="bold reverse")


def _warnings(snapshot: NodeSnapshot) -> list[Text]:
    shown = [Text(f"! {clean(warning)}", style="bold yellow") for warning in snapshot.warnings[:WARNINGS_SHOWN]]
    if len(snapshot.warnings) > WARNINGS_SHOWN:
        more = len(snapshot.warnings) - WARNINGS_SHOWN
        shown.append(Text(f"! and {more} more: kvasir-node status", style="bold yellow"))
    return shown


def _facts(snapshot: NodeSnapshot, frame: Frame) -> list[Text]:
    rows = [("model", _model(snapshot)), ("api", frame.api or "off")]
    if "coordinator" in snapshot.roles:
        rows += [("slots", _slots(snapshot)), ("state", _state(snapshot)), ("tokens", _throughput(snapshot))]
        rows += [("fan-out", clean(snapshot.fanout.reason) or "off"), ("pairs", _pairs(snapshot))]
    if snapshot.worker is not None:
        rows.append(("worker", _worker(snapshot)))
    rows.append(("net", _net(snapshot)))
    rows.append(("invite", "kvasir-node ticket  prints what another machine passes to: up --join"))
    return [_row(label, value, saturated=snapshot.slots.state == "saturated") for label, value in rows]


def _row(label: str, value: str, *, saturated: bool) -> Text:
    style = "bold yellow" if label == "state" and saturated else ""
    return Text.assemble((f"{label:<{_LABEL_CELLS}}", "dim"), (value, style))


def _model(snapshot: NodeSnapshot) -> str:
    model = snapshot.model
    if model is None:
        return "none"
    held = f"{model.slices_held}/{model.slices} slices held here"
    shape = f"{model.layers} layers x {model.experts_per_layer} experts"
    return f"{clean(model.name, 40)}  {clean(model.family, 20)}  {shape}  {held}"


def _slots(snapshot: NodeSnapshot) -> str:
    slots = snapshot.slots
    queue = f"queue {bar(slots.queued, slots.queue_max)} {slots.queued}/{slots.queue_max}"
    wait = f"  oldest {slots.oldest_wait_s:.1f} s" if slots.queued else ""
    return f"{bar(slots.busy, slots.total)} {slots.busy}/{slots.total} busy   {queue}{wait}"


def bar(used: int, total: int) -> str:
    """`[####----]`; anything above nothing shows, and only full shows as full."""
    cells = round(BAR_CELLS * min(used / total, 1)) if total else 0
    if 0 < used < total:
        cells = min(max(cells, 1), BAR_CELLS - 1)
    return "[" + "#" * cells + "-" * (BAR_CELLS - cells) + "]"


def _state(snapshot: NodeSnapshot) -> str:
    state = snapshot.slots.state
    shown = state.upper() if state == "saturated" else state
    over = state == "saturated" and snapshot.slots.pressure < 1
    return f"{shown}   pressure {snapshot.slots.pressure:.2f}{'   calm again soon' if over else ''}"


def _throughput(snapshot: NodeSnapshot) -> str:
    speed = snapshot.throughput
    return (
        f"{speed.tokens_per_s:.1f} tokens/s   {count_text(speed.tokens_total)} tokens in "
        f"{count_text(speed.requests_total)} requests"
    )


def _pairs(snapshot: NodeSnapshot) -> str:
    fanout = snapshot.fanout
    counts = {
        "local": fanout.local_pairs,
        "remote": fanout.remote_pairs,
        "trial": fanout.trial_pairs,
        "fallbacks": fanout.fallbacks,
        "mismatches": fanout.mismatches,
    }
    return "  ".join(f"{name} {count_text(count)}" for name, count in counts.items())


def _worker(snapshot: NodeSnapshot) -> str:
    worker = snapshot.worker
    if worker is None:
        return "off"
    slices = f"   slices {' '.join(worker.slices)}" if worker.slices else ""
    fetched = f"   fetched {size_text(worker.bytes_fetched)}" if worker.bytes_fetched else ""
    why = f": {worker.reason}" if worker.reason else ""
    return f"{worker.state}{why}{slices}   rows {count_text(worker.rows)}{fetched}"


def _net(snapshot: NodeSnapshot) -> str:
    net = snapshot.net
    peers = f"{counted(net.peers, 'peer')} ({net.direct} direct, {net.relayed} relayed)"
    reachability = "" if net.reachability == "unknown" else f"   {net.reachability}"
    return f"{peers}{reachability}   in {size_text(net.bytes_in)}  out {size_text(net.bytes_out)}"


def _help(free: int) -> list[Text]:
    return [Text(""), *(Text(line) for line in HELP)][:free]


def _lower(snapshot: NodeSnapshot, frame: Frame, free: int) -> list[Text]:
    """Workers and demand in what is left above the log, which keeps a few lines for itself."""
    upper = max(free - LOG_LINES_MIN - 1, 0)
    lines = _demand(snapshot.hub.demand, upper // 2) if snapshot.hub is not None else []
    if "coordinator" in snapshot.roles:
        lines += _workers(snapshot.workers, upper - len(lines))
    log = [Text("log", style="dim underline")]
    count = free - len(lines) - 1
    log += [Text(clean(line)) for line in list(frame.log_lines)[-count:]] if count > 0 else []
    return lines + log[:free]


def _demand(demand: Sequence[DemandSnapshot], lines_max: int) -> list[Text]:
    if not demand or lines_max < 2:
        return [Text("demand   none", style="dim")][:lines_max]
    rows = [f"  {clean(d.model, 24):<24} {d.slice:<12} {d.want:>4} {d.proven:>6} {d.leased:>6}" for d in demand]
    head = f"{'demand':<26} {'slice':<12} want proven leased"
    return _table(head, [Text(row) for row in rows], lines_max)


def _workers(workers: Sequence[WorkerPeerSnapshot], lines_max: int) -> list[Text]:
    if not workers or lines_max < 2:
        return [Text("workers  none", style="dim")][:lines_max]
    head = f"{'workers':<26}   {'state':<8} {'path':<6} {'rtt ms':>7} {'rows':>8} {'fail':>5}  slices"
    return _table(head, [_worker_row(worker) for worker in workers], lines_max)


def _worker_row(worker: WorkerPeerSnapshot) -> Text:
    name = f"{clean(worker.name, 15)} {short_id(worker.peer_id)}"
    rtt = "-" if worker.rtt_ms is None else f"{worker.rtt_ms:.1f}"
    state = f"{_MARKS.get(worker.state, ' ')} {worker.state:<8}"
    tail = f" {worker.path:<6} {rtt:>7} {count_text(worker.rows):>8} {worker.failures:>5}  {' '.join(worker.slices)}"
    reason = f"  {clean(worker.reason)}" if worker.reason else ""
    return Text.assemble(f"  {name:<24} ", (state, _STYLES.get(worker.state, "")), tail, reason)


def _table(head: str, rows: list[Text], lines_max: int) -> list[Text]:
    """The head and as many rows as fit; the last line says how many do not."""
    room = lines_max - 1
    if len(rows) > room:
        hidden = len(rows) - room + 1
        rows = [*rows[: room - 1], Text(f"  and {hidden} more", style="dim")]
    return [Text(head, style="dim underline"), *rows]
