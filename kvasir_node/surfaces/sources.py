"""Where the screen's pictures come from, and the source that is a node of this process.

It does not know terminals or how a picture is drawn.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

import trio

from kvasir_node.base.errors import KvasirError
from kvasir_node.base.snapshot import ExpertLayerSnapshot, NodeSnapshot
from kvasir_node.surfaces.invitation import Invitation
from kvasir_node.surfaces.phone_invitation import api_client, ask_invitation
from kvasir_node.surfaces.picture import Picture
from kvasir_node.surfaces.ports import NodePort

SAMPLE_S = 1.0
SAMPLES_MAX = 120
EXPERTS_S = 2.0  # use changes slowly, and a large model's map is not free to make


class Source(Protocol):
    """What the screen shows. `picture` is called several times a second and must be cheap."""

    def picture(self) -> Picture: ...

    async def lend_or_not(self) -> str:
        """Pauses the node's worker, or resumes it when it is paused; returns what to tell the person."""
        ...

    async def invite_phone(self) -> Invitation:
        """Has the node make a code for one phone; without one the words say why."""
        ...


class Curves:
    """The last two minutes of what is shown as curves, a value a second."""

    def __init__(self) -> None:
        self.speeds: deque[float] = deque(maxlen=SAMPLES_MAX)
        self.pressures: deque[float] = deque(maxlen=SAMPLES_MAX)
        self._next_at = float("-inf")

    def note(self, snapshot: NodeSnapshot, now: float) -> None:
        if now < self._next_at:
            return
        self._next_at = now + SAMPLE_S
        self.speeds.append(snapshot.throughput.tokens_per_s)
        self.pressures.append(snapshot.slots.pressure)


def is_paused(snapshot: NodeSnapshot) -> bool:
    """Whether the worker gave back what it held, or is doing so, by its owner's word or wish."""
    worker = snapshot.worker
    return worker is not None and (worker.state == "paused" or (worker.state == "draining" and bool(worker.reason)))


class LocalSource:
    """A node of this process."""

    def __init__(self, node: NodePort, api: str | None, lines: deque[str]) -> None:
        self._node, self._api, self._lines = node, api, lines
        self._curves = Curves()
        self._experts: tuple[ExpertLayerSnapshot, ...] = ()
        self._experts_at = float("-inf")

    def picture(self) -> Picture:
        snapshot, now = self._node.snapshot(), trio.current_time()
        self._curves.note(snapshot, now)
        if now >= self._experts_at + EXPERTS_S:
            self._experts, self._experts_at = self._node.experts(), now
        return Picture(
            snapshot,
            self._api,
            tuple(self._lines),
            experts=self._experts,
            requests=self._node.requests_snapshot().running,
            speeds=tuple(self._curves.speeds),
            pressures=tuple(self._curves.pressures),
            ticket=self._node.ticket(),
        )

    async def lend_or_not(self) -> str:
        try:
            if is_paused(self._node.snapshot()):
                self._node.resume()
            else:
                self._node.pause()
        except KvasirError as error:
            return str(error)
        return lending_told(self._node.snapshot())

    async def invite_phone(self) -> Invitation:
        if self._api is None:
            return Invitation((), ("no phone can be invited: this node serves no API; start it without --no-api",))
        async with api_client(self._api, self._node.settings.api.key) as client:
            return await ask_invitation(client)


def lending_told(snapshot: NodeSnapshot) -> str:
    worker = snapshot.worker
    if worker is None:
        return "this node lends nothing"
    return f"lending: {worker.state}{f': {worker.reason}' if worker.reason else ''}"
