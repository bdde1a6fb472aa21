"""The pane Now: what this node does at this moment, the most telling first."""

from __future__ import annotations

from kvasir_node.base.snapshot import FanoutSnapshot, ModelSnapshot, NodeSnapshot
from kvasir_node.surfaces.panes.content import Content, rows
from kvasir_node.surfaces.panes.lines import DIM, GOOD, Line, curve
from kvasir_node.surfaces.picture import Picture
from kvasir_node.surfaces.view import View
from kvasir_node.surfaces.words import clean, count_text, counted, size_text

LABEL_CELLS = 8
CURVE_CELLS_MAX = 48


def content(picture: Picture, view: View, width: int, height: int) -> Content[Line]:
    snapshot = picture.snapshot
    lines: list[Line] = []
    if "coordinator" in snapshot.roles:
        lines += [_speed(picture, view, width), _fanout(snapshot.fanout), _model(snapshot.model)]
    if snapshot.worker is not None:
        lines.append(_worker(snapshot))
    lines += _net(snapshot)
    if "coordinator" in snapshot.roles:
        lines += [_tokens(snapshot), *_pairs(snapshot.fanout)]
    return rows(lines)


def _row(label: str, value: str, style: str = "") -> Line:
    return ((f"{label:<{LABEL_CELLS}}", DIM), (value, style))


def _speed(picture: Picture, view: View, width: int) -> Line:
    told = f"{picture.snapshot.throughput.tokens_per_s:.1f} tokens/s"
    cells = min(width - LABEL_CELLS - len(told) - 2, CURVE_CELLS_MAX)
    return (*_row("speed", told, "bold"), (f"  {curve(picture.speeds, cells, view.signs)}", GOOD))


def _fanout(fanout: FanoutSnapshot) -> Line:
    reason = clean(fanout.reason) or ("on" if fanout.on else "off")
    return _row("fan-out", reason, GOOD if fanout.on else "")


def _model(model: ModelSnapshot | None) -> Line:
    if model is None:
        return _row("model", "none")
    shape = f"{model.layers}x{model.experts_per_layer} experts"
    return _row("model", f"{clean(model.name, 24)}  {shape}  {model.slices_held}/{model.slices} slices")


def _worker(snapshot: NodeSnapshot) -> Line:
    worker = snapshot.worker
    assert worker is not None
    why = f": {clean(worker.reason)}" if worker.reason else ""
    slices = f"  {' '.join(worker.slices)}" if worker.slices else ""
    fetched = f"  fetched {size_text(worker.bytes_fetched)}" if worker.bytes_fetched else ""
    return _row("lending", f"{worker.state}{why}{slices}  {counted(worker.rows, 'row')}{fetched}")


def _net(snapshot: NodeSnapshot) -> list[Line]:
    net = snapshot.net
    reach = "" if net.reachability == "unknown" else f"  {net.reachability}"
    relayed = f", {net.relayed} by relay" if net.relayed else ""
    traffic = f"in {size_text(net.bytes_in)}  out {size_text(net.bytes_out)}"
    return [_row("net", f"{counted(net.peers, 'peer')}{relayed}{reach}"), _row("", traffic)]


def _tokens(snapshot: NodeSnapshot) -> Line:
    speed = snapshot.throughput
    return _row("so far", f"{counted(speed.tokens_total, 'token')} in {counted(speed.requests_total, 'request')}")


def _pairs(fanout: FanoutSnapshot) -> list[Line]:
    pairs = fanout.local_pairs + fanout.remote_pairs
    share = f"  {fanout.remote_pairs / pairs:.0%} by workers" if pairs else ""
    faults = f"fallbacks {count_text(fanout.fallbacks)}  hedges {count_text(fanout.hedges)}"
    checks = f"spot checks {count_text(fanout.spot_checks)}  mismatches {count_text(fanout.mismatches)}"
    return [
        _row("pairs", f"here {count_text(fanout.local_pairs)}  remote {count_text(fanout.remote_pairs)}{share}"),
        _row("", f"{faults}  trial {count_text(fanout.trial_pairs)}"),
        _row("", checks),
    ]
