"""A simulated run as a chart of text that people can read: one line for each span of time.

It does not compute figures.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvasir_node.sim.figures import phase_of
from kvasir_node.sim.tally import Sample

ROWS = 48
WIDTH = 40
PROVEN, LEASED, OPEN, SURPLUS = "█", "▒", "·", "+"
LEGEND = f"{PROVEN} proven  {LEASED} leased, not proven  {OPEN} wanted and open  {SURPLUS} held and not wanted"


def timeline(samples: Sequence[Sample], events: Sequence[tuple[float, str]]) -> str:
    """Each line: time, phase, copies, queue, tokens/s and a bar of copies; events stand between the lines."""
    most = max(1, *(max(sample.want, sample.leased + sample.proven) for sample in samples))
    step = max(1, -(-len(samples) // ROWS))
    lines = [
        f"{'time':>8}  {'phase':<10} {'wanted':>6} {'leased':>6} {'proven':>6} {'queue':>5} {'nodes':>6} {'tok/s':>7}",
    ]
    told = sorted(events)
    for sample in samples[::step]:
        while told and told[0][0] <= sample.at:
            lines.append(f"{_clock(told[0][0]):>8}  -- {told.pop(0)[1]}")
        phase = phase_of(sample.want, sample.leased, sample.proven, sample.covered)
        lines.append(
            f"{_clock(sample.at):>8}  {phase:<10} {sample.want:>6} {sample.leased:>6} {sample.proven:>6} "
            f"{sample.queued:>5} {sample.busy_nodes:>6} {sample.tokens_s:>7.0f} |{_bar(sample, most)}"
        )
    return "\n".join([*lines, LEGEND])


def _bar(sample: Sample, most: int) -> str:
    scale = WIDTH / most
    wanted = round(sample.want * scale)
    proven = round(sample.covered * scale)
    leased = min(max(0, wanted - proven), round(sample.leased * scale))
    beyond = round((sample.leased + sample.proven) * scale) - proven - leased
    return PROVEN * proven + LEASED * leased + OPEN * (wanted - proven - leased) + SURPLUS * max(0, beyond)


def _clock(at: float) -> str:
    seconds = int(at)
    return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
