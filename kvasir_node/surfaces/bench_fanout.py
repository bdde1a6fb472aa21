"""`bench fanout`: its document, its table and its chart.

It does not know how anything is measured.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from kvasir_node.surfaces.chart import Points, curves_png

if TYPE_CHECKING:
    from kvasir_node.roles.bench_fanout import EmulatedPoint, FanoutFigures, RealPoint

FANOUT_SCHEMA = "kvasir.bench.fanout/1"


def fanout_document(figures: FanoutFigures, png: str) -> dict[str, Any]:
    """Ratios and bounds are gains over the coordinator alone; `ratio…` are those at `at` requests at once."""
    at = figures.real[figures.at]
    return {
        "schema": FANOUT_SCHEMA,
        "model": figures.model,
        "at": figures.at,
        "ratio": round(at.ratio("worker"), 3),
        "ratio_bound": round(at.parts.bound_real, 3),
        "ratio_two_threads": round(at.ratio("two_threads"), 3),
        "same_tokens": figures.same_tokens,
        "proven_ratio": round(figures.proven_ratio, 3),
        "real": [_real_document(count, point) for count, point in figures.real.items()],
        "emulated": [_emulated_document(point) for point in figures.emulated],
        "png": png,
    }


def _real_document(count: int, point: RealPoint) -> dict[str, Any]:
    worker = point.bursts["worker"]
    return {
        "concurrency": count,
        "tokens_per_s": {side: round(point.tokens_per_s(side), 1) for side in point.bursts},
        "rounds_tokens_per_s": {side: [round(b.tokens_per_s, 1) for b in each] for side, each in point.bursts.items()},
        "latency_ms": {side: round(1e3 * median(b.token_s for b in each), 2) for side, each in point.bursts.items()},
        "ratio": round(point.ratio("worker"), 3),
        "ratio_bound": round(point.parts.bound_real, 3),
        "ratio_two_threads": round(point.ratio("two_threads"), 3),
        "bytes_per_token": round(median(burst.bytes_per_token for burst in worker)),
        "remote_pairs": sum(burst.remote_pairs for burst in worker),
        "fallbacks": sum(burst.fallbacks for burst in worker),
        "parts_ms": {
            "trunk": round(1e3 * point.parts.trunk_s, 3),
            "experts": round(1e3 * point.parts.experts_s, 3),
            "halves": round(1e3 * point.parts.halves_s, 3),
        },
    }


def _emulated_document(point: EmulatedPoint) -> dict[str, Any]:
    return {
        "workers": point.workers,
        "rtt_ms": point.rtt_ms,
        "concurrency": point.concurrency,
        "tokens_per_s": round(point.tokens_per_s, 2),
        "alone": round(point.alone, 2),
        "bound": round(point.bound, 3),
        "fraction": round(point.fraction, 3),
        "latency_ms": round(point.latency_ms, 1),
        "latency_idle_ms": round(point.latency_idle_ms, 1),
    }


def fanout_table(figures: FanoutFigures) -> str:
    """Lines for a person; gains are over the coordinator alone in the same run."""
    lines = [f"{figures.model}, decoding, tokens/s of all requests together"]
    lines.append("one real worker; bound: trunk and both halves of the experts, no network")
    lines.append(
        f"{'requests':>9}{'alone':>8}{'worker':>8}{'gain':>7}{'bound':>7}{'of it':>7}{'2 threads':>11}{'gain':>7}"
        f"{'bytes/token':>13}"
    )
    for count, point in figures.real.items():
        gain, bound = point.ratio("worker"), point.parts.bound_real
        moved = median(burst.bytes_per_token for burst in point.bursts["worker"])
        lines.append(
            f"{count:>9}{point.tokens_per_s('alone'):>8.1f}{point.tokens_per_s('worker'):>8.1f}{_times(gain):>7}"
            f"{_times(bound):>7}{gain / bound:>7.0%}{point.tokens_per_s('two_threads'):>11.1f}"
            f"{_times(point.ratio('two_threads')):>7}{moved:>13.0f}"
        )
    if figures.emulated:
        lines.append("emulated devices; bound: equal devices and a free network (Amdahl)")
        lines.append(
            f"{'workers':>8}{'RTT ms':>7}{'requests':>9}{'alone':>8}{'tokens/s':>9}{'gain':>7}{'bound':>7}"
            f"{'of it':>7}{'token ms':>9}{'idle ms':>8}"
        )
    lines += map(_emulated_line, figures.emulated)
    lines.append(f"all answers the same: {'yes' if figures.same_tokens else 'NO'}")
    return "\n".join(lines)


def _emulated_line(point: EmulatedPoint) -> str:
    return (
        f"{point.workers:>8}{point.rtt_ms:>7g}{point.concurrency:>9}{point.alone:>8.2f}{point.tokens_per_s:>9.2f}"
        f"{_times(point.gain):>7}{_times(point.bound):>7}{point.fraction:>7.0%}{point.latency_ms:>9.1f}"
        f"{point.latency_idle_ms:>8.1f}"
    )


def _times(ratio: float) -> str:
    return f"×{ratio:.2f}"


def fanout_png(figures: FanoutFigures) -> bytes:
    """Gain over alone against requests at once, one curve for each kind and number of workers."""
    curves: dict[str, Points] = {
        "1 real worker": [(count, point.ratio("worker")) for count, point in figures.real.items()],
        "its bound": [(count, point.parts.bound_real) for count, point in figures.real.items()],
        "2 threads, no worker": [(count, point.ratio("two_threads")) for count, point in figures.real.items()],
    }
    for each in figures.emulated:
        name = f"{each.workers} emulated, {each.rtt_ms:g} ms"
        if each.workers:
            curves[name] = [*curves.get(name, ()), (each.concurrency, each.gain)]
    return curves_png(f"{figures.model}: fan-out", "requests at once", "tokens/s, × alone", curves)
