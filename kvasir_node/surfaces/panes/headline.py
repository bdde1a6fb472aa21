"""The lines above the panes: who this is, how it is, what is wrong, and what a person may do about it.

It does not know the panes, nor how the verdict comes about.
"""

from __future__ import annotations

from kvasir_node.base.snapshot import NodeSnapshot
from kvasir_node.surfaces.panes.lines import BAD, GOOD, STRONG, WARN, Line, Signs, plain, width_of
from kvasir_node.surfaces.picture import Picture
from kvasir_node.surfaces.verdict import Level, Verdict, verdict_of
from kvasir_node.surfaces.words import clean, duration_text

SILENT_S = 3.0  # a node that did not answer for so long is told to be silent
_STYLES = {Level.GOOD: "bold green", Level.BUSY: WARN, Level.BAD: BAD}


def title(picture: Picture, width: int) -> Line:
    """Who and where; the version and the roles are left out before the address of the API is."""
    snapshot = picture.snapshot
    name, roles = clean(snapshot.name, 30), ",".join(snapshot.roles)
    right = f"{picture.api or 'no API'}  up {duration_text(snapshot.uptime_s)} "
    lefts = (
        f" kvasir-node {snapshot.version}  {name}  {roles}",
        f" kvasir-node  {name}  {roles}",
        f" kvasir-node  {name}",
    )
    left = next((each for each in lefts if width_of(each) + len(right) < width), lefts[-1])
    return plain(left + " " * max(width - width_of(left) - len(right), 1) + right, "bold reverse")


def above(picture: Picture, signs: Signs, warnings_max: int) -> list[Line]:
    """The verdict, the first warnings, and the advice."""
    verdict = _verdict(picture)
    sign = signs.dot if verdict.level is Level.GOOD else "!"
    return [
        ((f"{sign} {verdict.state}", _STYLES[verdict.level]), (f"  {verdict.words}", "")),
        *_warnings(picture.snapshot, warnings_max),
        ((f"{signs.arrow} ", STRONG), (verdict.advice, GOOD if verdict.level is Level.GOOD else "")),
    ]


def _verdict(picture: Picture) -> Verdict:
    """Nothing is known of a node that is silent."""
    if picture.silent_s < SILENT_S:
        return verdict_of(picture.snapshot, picture.api)
    words = f"for {duration_text(picture.silent_s)}; what is shown is old"
    return Verdict(Level.BAD, "NO ANSWER", words, f"is it running? {clean(picture.trouble, 120)}")


def _warnings(snapshot: NodeSnapshot, lines_max: int) -> list[Line]:
    """The first ones; the last line counts those that have no line."""
    shown = list(snapshot.warnings[:lines_max])
    lines = [plain(f"! {clean(warning)}", WARN) for warning in shown]
    if more := len(snapshot.warnings) - len(shown):
        lines[-1] = plain(f"! (w: {more} more) {clean(shown[-1])}", WARN)
    return lines
