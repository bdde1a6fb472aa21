"""Keeps a worker to its owner's wishes: senses power, load, time and networks, and pauses or resumes it.

What follows from what is sensed is decide/manners.py; what a pause does (everything drains, nothing is dropped) is the
worker's own. It does not know leases.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import psutil
import trio

from kvasir_node.base.settings import WorkerSettings
from kvasir_node.decide.manners import Manners, Senses, Wishes, parse_quiet_hours

logger = logging.getLogger(__name__)

LOOK_S = 5.0  # between two looks


class Pausable(Protocol):
    def pause(self, reason: str) -> None: ...

    def resume(self) -> None: ...


class Sensor:
    """What this machine tells of itself; each look costs about a millisecond."""

    def __init__(self, metered_interfaces: Sequence[str]) -> None:
        self._metered = tuple(metered_interfaces)
        self._own = psutil.Process()
        self._processors = psutil.cpu_count() or 1
        self()  # loads are told since the look before

    def __call__(self) -> Senses:
        own = self._own.cpu_percent() / 100 / self._processors
        now = time.localtime()
        return Senses(
            on_battery=_on_battery(),
            others_load=max(0.0, psutil.cpu_percent() / 100 - own),
            minute_of_day=60 * now.tm_hour + now.tm_min,
            metered=self._metered_now(),
        )

    def _metered_now(self) -> str:
        if not self._metered:
            return ""
        up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
        return next((name for name in self._metered if name in up), "")


def _on_battery() -> bool:
    sensed = getattr(psutil, "sensors_battery", None)  # some systems have no such thing
    battery = None if sensed is None else sensed()
    return battery is not None and battery.power_plugged is False


def lower_priority(niceness: int) -> None:
    """Makes this process give way to others; threads that it starts later do so too. It is never made more urgent,
    and where there is no niceness nothing happens."""
    process = psutil.Process()
    if psutil.POSIX and process.nice() < niceness:
        process.nice(niceness)


class Keeper:
    """Pauses the worker while its owner's wishes are against work, and resumes it afterwards.

    Raises UsageError for quiet hours that cannot be read.
    """

    def __init__(self, settings: WorkerSettings, worker: Pausable, sense: Callable[[], Senses] | None = None) -> None:
        wishes = Wishes(settings.only_on_ac, settings.only_when_idle, parse_quiet_hours(settings.quiet_hours))
        self._senses_nothing = wishes == Wishes() and not settings.metered_interfaces
        self._mind = Manners(wishes)
        self._worker = worker
        self._sense = sense or Sensor(settings.metered_interfaces)
        self._reason = ""

    def pause(self) -> None:
        """The owner's own word; it holds until `resume`."""
        self._mind.pause()
        self._obey()

    def resume(self) -> None:
        self._mind.resume()
        self._obey()

    async def run(self) -> None:
        """Looks again and again until cancelled, if there is any wish."""
        if self._senses_nothing:
            await trio.sleep_forever()
        while True:
            self._mind.observe(self._sense(), trio.current_time())
            self._obey()
            await trio.sleep(LOOK_S)

    def _obey(self) -> None:
        was, self._reason = self._reason, self._mind.reason
        if self._reason == was:
            return
        if self._reason:
            self._worker.pause(self._reason)
        else:
            self._worker.resume()
        if not was or not self._reason:  # not each time that the figures in a reason change
            logger.info("the worker %s", f"pauses: {self._reason}" if self._reason else "goes on")
