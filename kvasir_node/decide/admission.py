"""Who may compute now, who waits, who is refused; and whether the coordinator is saturated.

It does not know what a request is beyond a number, nor who does the work. Time comes in as `now` (seconds,
monotonic). A place is lost by no path: whatever `arrive` admitted or queued, `leave` frees.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum


class Load(StrEnum):
    CALM = "calm"
    SATURATED = "saturated"


@dataclass(frozen=True, slots=True)
class Admitted:
    request: int


@dataclass(frozen=True, slots=True)
class Queued:
    request: int
    ahead: int  # requests that wait before this one


@dataclass(frozen=True, slots=True)
class Refused:
    request: int
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """`saturated_after_s`: every slot busy and the queue not empty this long = SATURATED. `calm_after_s`: queue
    empty and busy ≤ calm_busy_ratio × slots this long = CALM again. The gap between the two is the hysteresis."""

    slots: int
    queue: int
    saturated_after_s: float
    calm_after_s: float
    calm_busy_ratio: float


class Admission:
    """`slots` places, a bounded first-come queue, and the saturation state with its hysteresis."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self._busy: dict[int, float] = {}  # request -> admitted at
        self._waiting: OrderedDict[int, float] = OrderedDict()  # request -> arrived at
        self._load = Load.CALM
        self._full_since: float | None = None  # every slot busy and a queue
        self._light_since: float | None = None  # no queue and few slots busy
        self._service_s = 1.0  # smoothed time a request holds its slot

    @property
    def load(self) -> Load:
        return self._load

    @property
    def busy(self) -> int:
        return len(self._busy)

    @property
    def queued(self) -> int:
        return len(self._waiting)

    @property
    def pressure(self) -> float:
        return (self.busy + self.queued) / self._limits.slots

    def oldest_wait_s(self, now: float) -> float:
        return now - next(iter(self._waiting.values())) if self._waiting else 0.0

    @property
    def room(self) -> int:
        """How many requests could arrive now before one is refused."""
        return self._limits.slots - self.busy + self._limits.queue - self.queued

    @property
    def retry_after_s(self) -> float:
        """When a request that is refused now may fairly try again."""
        return max(1.0, self._service_s * (self.queued + 1) / self._limits.slots)

    def arrive(self, request: int, now: float) -> Admitted | Queued | Refused:
        """A new request; one that is Queued is admitted later by the `leave` of another."""
        if request in self._busy or request in self._waiting:
            raise ValueError(f"request {request} is here already")
        if self.busy < self._limits.slots:
            self._busy[request] = now
            answer: Admitted | Queued | Refused = Admitted(request)
        elif self.queued < self._limits.queue:
            self._waiting[request] = now
            answer = Queued(request, self.queued - 1)
        else:
            answer = Refused(request, self.retry_after_s)
        self._observe(now)
        return answer

    def leave(self, request: int, now: float) -> tuple[int, ...]:
        """A request is over, given up, or its client has gone; returns the requests that are admitted in its place."""
        if request in self._waiting:
            del self._waiting[request]
        else:
            started = self._busy.pop(request)
            self._service_s += 0.2 * (now - started - self._service_s)
        admitted: list[int] = []
        while self._waiting and self.busy < self._limits.slots:
            following, _ = self._waiting.popitem(last=False)
            self._busy[following] = now
            admitted.append(following)
        self._observe(now)
        return tuple(admitted)

    def tick(self, now: float) -> bool:
        """Lets time pass; True when the load state changed."""
        before = self._load
        self._observe(now)
        return self._load is not before

    def _observe(self, now: float) -> None:
        limits = self._limits
        full = self.busy >= limits.slots and bool(self._waiting)
        light = not self._waiting and self.busy <= limits.calm_busy_ratio * limits.slots
        self._full_since = (now if self._full_since is None else self._full_since) if full else None
        self._light_since = (now if self._light_since is None else self._light_since) if light else None
        full_s = 0.0 if self._full_since is None else now - self._full_since
        light_s = 0.0 if self._light_since is None else now - self._light_since
        if self._load is Load.CALM and full and full_s >= limits.saturated_after_s:
            self._load = Load.SATURATED
        elif self._load is Load.SATURATED and light and light_s >= limits.calm_after_s:
            self._load = Load.CALM
