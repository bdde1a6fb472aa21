"""Which peers a computing thread may send to now: not those in a pause after a fault, nor those that owe a late answer.

It does not know who is proven, or what a fault costs. All forwards share one; any of their threads may ask.
"""

from __future__ import annotations

import threading
import time

from kvasir_node.base.ids import PeerId
from kvasir_node.roles.remote_call import RemoteCall

PAUSE_S = 0.25  # nothing is sent to a peer this long after a call to it failed; the loop learns of it meanwhile
PAUSED_MAX = 256  # peers in a pause that are remembered


class Availability:
    def __init__(self) -> None:
        self._paused: dict[PeerId, float] = {}  # until when (time.monotonic)
        self._late: dict[PeerId, RemoteCall] = {}  # computed a second way, and not answered yet
        self._using: dict[PeerId, object] = {}  # what is under way by express channels
        self._lock = threading.Lock()

    def pause(self, peer: PeerId) -> None:
        now = time.monotonic()
        with self._lock:
            self._paused[peer] = now + PAUSE_S
            if len(self._paused) > PAUSED_MAX:
                self._paused = {each: until for each, until in self._paused.items() if until > now}

    def is_paused(self, peer: PeerId) -> bool:
        if not self._paused:
            return False
        with self._lock:
            until = self._paused.get(peer)
            if until is not None and until <= time.monotonic():
                del self._paused[peer]
                return False
        return until is not None

    def take_channel(self, peer: PeerId, user: object) -> bool:
        """Whether the user may use the peer's express channel; `leave_channel` when it has its answer, or gives up."""
        with self._lock:
            return self._using.setdefault(peer, user) is user

    def leave_channel(self, peer: PeerId, user: object) -> None:
        """Does nothing for who has not taken it."""
        with self._lock:
            if self._using.get(peer) is user:
                del self._using[peer]

    def owes(self, call: RemoteCall) -> None:
        """A call was computed a second way: its peer gets nothing before it has answered, or failed to."""
        call.abandoned = True
        self.leave_channel(call.peer, call)
        with self._lock:
            self._late[call.peer] = call

    def is_late(self, peer: PeerId) -> bool:
        """Whether a peer still owes an answer."""
        return bool(self._late) and peer in self._late

    def settled(self, peer: PeerId) -> RemoteCall | None:
        """The late call of a peer that owes nothing any more: it has its result, or is past its deadline."""
        with self._lock:
            call = self._late.get(peer)
            if call is None or (call.wait(0.0) is None and time.monotonic() < call.due_at):
                return None
            return self._late.pop(peer)
