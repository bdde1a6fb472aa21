"""All that the screen shows at one moment, wherever it came from. It does not know how it is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvasir_node.base.snapshot import ExpertLayerSnapshot, NodeSnapshot, RequestSnapshot
from kvasir_node.surfaces.invitation import Invitation


@dataclass(frozen=True, slots=True)
class Picture:
    """A node at one moment; of the curves the newest value is the last."""

    snapshot: NodeSnapshot
    api: str | None = None
    log: Sequence[str] = ()  # newest last
    log_name: str = "Log"
    experts: tuple[ExpertLayerSnapshot, ...] = ()
    requests: Sequence[RequestSnapshot] = ()
    speeds: Sequence[float] = ()  # tokens per second
    pressures: Sequence[float] = ()
    ticket: str = ""  # empty: not known here
    invitation: Invitation | None = None  # that was asked for last
    silent_s: float = 0.0  # since the node last answered, when it is not this process
    trouble: str = ""  # why it does not answer
