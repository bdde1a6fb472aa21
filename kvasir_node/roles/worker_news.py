"""Tells what changed among a coordinator's workers. It does not know why, and decides nothing."""

from __future__ import annotations

from collections.abc import Collection

from kvasir_node.base.events import Tell, WorkerChanged
from kvasir_node.base.snapshot import WorkerPeerSnapshot

GONE = "gone"


class WorkerNews:
    """Compares what is shown of the workers with what was shown last."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._told: dict[str, WorkerChanged] = {}  # by peer id; who has gone is forgotten

    def look(self, workers: Collection[WorkerPeerSnapshot]) -> None:
        told, self._told = self._told, {}
        for worker in workers:
            before = told.pop(worker.peer_id, None)
            state = worker.state if worker.slices or worker.state == "banned" else GONE
            if before is None and state == GONE:
                continue
            now = WorkerChanged(
                worker.peer_id,
                worker.name,
                state,
                "" if before is None else before.state,
                len(worker.slices),
                worker.reason,
            )
            if before is None or (before.state, before.slices) != (now.state, now.slices):
                self._tell(now)
            if state != GONE:
                self._told[worker.peer_id] = now
        for before in told.values():
            self._tell(WorkerChanged(before.peer_id, before.name, GONE, before.state, 0, before.reason))
