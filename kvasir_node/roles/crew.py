"""A coordinator's workers: who is attached, what each is sent, what it answered, and who is to blame when it did not.

It does not know requests for text, slots or the market. It lives on the trio loop; the computing thread reaches it
through `send`, `report` and `offer_trial`, which only leave a note for the loop. All judgement is `decide/ledger` and
`decide/fanout`; trials are carried out by roles/trials.py.

One fault is blamed once: a stream that ends is judged when it ends, however many calls it cuts off; silence is judged
for all of a peer's slices together.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import trio

from kvasir_node.base.errors import (
    CallTimeout,
    CapacityError,
    KvasirError,
    Misbehaved,
    Overloaded,
    RejectReason,
    Unreachable,
    UsageError,
)
from kvasir_node.base.ids import ModelId, PeerId, SliceId
from kvasir_node.base.settings import FanoutSettings
from kvasir_node.base.snapshot import WorkerPeerSnapshot
from kvasir_node.decide.fanout import CallTimes, DeadlineLimits
from kvasir_node.decide.ledger import BEST_FIRST, Ledger, LedgerLimits, Standing
from kvasir_node.net.rpc import CallStream
from kvasir_node.net.transport import Stream
from kvasir_node.roles.dispatch import RemoteCall
from kvasir_node.roles.trials import Member, OwnSums, RunBlocking, TrialResult, Trials
from kvasir_node.wire import messages
from kvasir_node.wire.messages import Attachment, ExpertsMethod

logger = logging.getLogger(__name__)

COUNTS_MAX = 4096  # peers whose call counts are remembered
REFUSALS_MAX = 16  # in a row; a worker that only refuses gets a pause, as one that fails does
WARN_INTERVAL_S = 10.0  # at most one warning per peer, whatever it does at the rate of tokens
NOTICE_TIMEOUT_S = 5.0  # a worker that does not read is not told its standing
MORE_TIME_MAX = 4.0  # a call that we would compute long ourselves may take this many ceilings longer
SLOW_FORGET_S = 60.0  # a size of call found too slow for a peer is tried again after this


@dataclass(slots=True)
class _Counts:
    calls: int = 0
    rows: int = 0
    failures: int = 0
    refusals: int = 0  # in a row
    reason: str = ""
    warned_at: float = -WARN_INTERVAL_S


class Crew:
    """See the module. `changed` hears, on the loop, the layers for which who is proven may have changed."""

    def __init__(
        self,
        settings: FanoutSettings,
        model: ModelId,
        slices: frozenset[SliceId],
        held: Mapping[int, frozenset[int]],
        *,
        own_sums: OwnSums,
        changed: Callable[[frozenset[int]], None],
        trial_layers_changed: Callable[[frozenset[int]], None],
        name_of: Callable[[PeerId], str],
        address_of: Callable[[PeerId], str],
        body_bytes_max: int,
        run_blocking: RunBlocking = trio.to_thread.run_sync,
    ) -> None:
        self._settings = settings
        self._model = model
        self._slices = slices
        self._changed = changed
        self._name_of = name_of
        self._body_bytes_max = body_bytes_max
        self.ledger = Ledger(
            LedgerLimits(
                cool_off_s=settings.cool_off_s,
                cool_off_max_s=settings.cool_off_max_s,
                ban_after=settings.ban_after,
                proof_ttl_s=settings.proof_ttl_s,
                trials_per_address_max=settings.trials_per_address_max,
                trial_window_s=settings.trial_window_s,
            )
        )
        limits = DeadlineLimits(settings.deadline_factor, settings.deadline_floor_s, settings.deadline_ceiling_s)
        self._times = CallTimes(limits)
        self._slow_since: dict[tuple[PeerId, int], float] = {}  # (peer, size class of calls); of members
        self._times_lock = threading.Lock()  # of both
        self._members: dict[PeerId, Member] = {}
        self._counts: dict[PeerId, _Counts] = {}
        self._clock = trio.lowlevel.current_clock if False else None
        self._token: trio.lowlevel.TrioToken | None = None
        self._nursery: trio.Nursery | None = None
        self.trials = Trials(
            settings,
            self.ledger,
            held,
            members=self.members,
            own_sums=own_sums,
            address_of=address_of,
            layers_changed=trial_layers_changed,
            begun=lambda member, part: self._tell_standing(member.peer, (part,)),
            ended=self._trial_ended,
            run_blocking=run_blocking,
        )
