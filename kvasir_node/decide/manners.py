"""Whether a worker may work now, by its owner's wishes; and if not, why, in words.

It does not know how power, load, time or networks are sensed, nor what a worker does about the answer: it takes what
was sensed and says "" (work) or a reason. Load alone is judged over time: a machine is busy after ten seconds of
somebody else's work and idle again after a minute without, so that a page that loads ends no lease.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvasir_node.base.errors import UsageError

BUSY_LOAD = 0.25  # of all processors, used by others than this node; more than this ...
BUSY_S = 10.0  # ... for so long is a busy machine
IDLE_LOAD = 0.15  # less than this ...
IDLE_S = 60.0  # ... for so long is an idle one
_HOURS = re.compile(r"([01][0-9]|2[0-3]):([0-5][0-9])-([01][0-9]|2[0-3]):([0-5][0-9])\Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class QuietHours:
    """From one minute of the day to another, which is not part of it; it may lie beyond midnight."""

    first_minute: int
    end_minute: int

    def __contains__(self, minute: int) -> bool:
        if self.first_minute < self.end_minute:
            return self.first_minute <= minute < self.end_minute
        return minute >= self.first_minute or minute < self.end_minute

    @property
    def end(self) -> str:
        return f"{self.end_minute // 60:02}:{self.end_minute % 60:02}"


def parse_quiet_hours(texts: Sequence[str]) -> tuple[QuietHours, ...]:
    """Reads "22:00-07:00"; raises UsageError for anything else."""
    found: list[QuietHours] = []
    for text in texts:
        match = _HOURS.match(text)
        hours = None if match is None else QuietHours(*(int(match[n]) * 60 + int(match[n + 1]) for n in (1, 3)))
        if hours is None or hours.first_minute == hours.end_minute:
            raise UsageError(f"worker.quiet_hours are written HH:MM-HH:MM, such as 22:00-07:00; got {text[:40]!r}")
        found.append(hours)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Wishes:
    only_on_ac: bool = False
    only_when_idle: bool = False
    quiet_hours: tuple[QuietHours, ...] = ()


@dataclass(frozen=True, slots=True)
class Senses:
    """What is so now. `on_battery` is False where there is no battery, or nobody knows."""

    on_battery: bool
    others_load: float  # share of all processors that others than this node use
    minute_of_day: int
    metered: str = ""  # a network interface that is up and that the owner named as metered


class Manners:
    """The answer over time; `reason` is "" while the worker may work."""

    def __init__(self, wishes: Wishes) -> None:
        self._wishes = wishes
        self._is_paused = False
        self._sensed = ""
        self._is_busy = False
        self._edge_since: float | None = None  # since when the load has spoken against `_is_busy`

    @property
    def reason(self) -> str:
        return "paused by its owner" if self._is_paused else self._sensed

    def pause(self) -> None:
        self._is_paused = True

    def resume(self) -> None:
        """The owner's pause ends; what is sensed may still forbid work."""
        self._is_paused = False

    def observe(self, senses: Senses, now: float) -> None:
        self._note_load(senses.others_load, now)
        self._sensed = self._objection(senses)

    def _objection(self, senses: Senses) -> str:
        for hours in self._wishes.quiet_hours:
            if senses.minute_of_day in hours:
                return f"quiet hours until {hours.end}"
        if self._wishes.only_on_ac and senses.on_battery:
            return "on battery"
        if senses.metered:
            return f"the metered network {senses.metered} is up"
        if self._wishes.only_when_idle and self._is_busy:
            return f"this machine is in use: others take {senses.others_load:.0%} of its processors"
        return ""

    def _note_load(self, load: float, now: float) -> None:
        contradicts = load < IDLE_LOAD if self._is_busy else load > BUSY_LOAD
        if not contradicts:
            self._edge_since = None
            return
        if self._edge_since is None:
            self._edge_since = now
        if now - self._edge_since >= (IDLE_S if self._is_busy else BUSY_S):
            self._is_busy, self._edge_since = not self._is_busy, None
