"""What is measured of a forward, a call and a step while the model serves: the governor's only source of costs.

It does not know what is concluded from it (that is `decide/costs`, fed by roles/steering.py), nor how it is timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvasir_node.base.ids import PeerId


@dataclass(frozen=True, slots=True)
class LayerMeasured:
    """What was computed here of one layer: `activated` = different experts among its `pairs`."""

    activated: int
    pairs: int
    took_s: float


@dataclass(frozen=True, slots=True)
class ForwardMeasured:
    """One forward of `rows` rows. Times are by the wall, so forwards beside it make them longer.

    `trunk_s`: all of it but its experts, its calls and the waiting for them. `layer`: one of its layers, another one
    each time; None when nothing of it was computed here. `own_call_s`: the mean processor time that a call cost this
    thread, from cutting it out to adding it up; None when none was made.
    """

    rows: int
    trunk_s: float
    layer: LayerMeasured | None
    own_call_s: float | None


@dataclass(frozen=True, slots=True)
class CallMeasured:
    """One call that was answered, rightly or not, from its sending to its answer.

    `computed_s` is what the worker says that it took of `took_s`, None when it said nothing.
    """

    peer: PeerId
    activated: int
    pairs: int
    sent_bytes: int
    received_bytes: int
    took_s: float
    computed_s: float | None


@dataclass(frozen=True, slots=True)
class LinkMeasured:
    """How long it took to send so many bytes to a peer and back, where nothing was computed for them. Its calls go that
    way from now on: what was known of another one counts no more."""

    peer: PeerId
    trips: Sequence[tuple[int, float]]  # bytes one way, seconds


@dataclass(frozen=True, slots=True)
class StepMeasured:
    """One step of the engine. `requests`: those that it may have computed for. `rows`: tokens that were computed, of
    answers and prompts; 0 of a step that failed, or in which a prompt had a forward of its own."""

    requests: Sequence[int]
    rows: int
    took_s: float
    has_prompt: bool


class Observer(Protocol):
    """Returns at once and raises nothing."""

    def forward_measured(self, measured: ForwardMeasured) -> None:
        """From a computing thread, after each forward that ended well."""
        ...

    def call_measured(self, measured: CallMeasured) -> None:
        """On the loop; of some calls and of all trials, not of every call."""
        ...

    def link_measured(self, measured: LinkMeasured) -> None:
        """On the loop."""
        ...
