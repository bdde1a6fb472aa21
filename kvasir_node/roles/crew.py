"""A coordinator's workers: who is attached, what each is sent, what it answered, and who is to blame when it did not.

It does not know requests for text, slots or the market. It lives on the trio loop; computing threads reach it through
what roles/remote_call.py names, which only leaves notes for the loop or looks up what the loop has laid ready. All
judgement is `decide/ledger` and `decide/call_times`; trials are carried out by roles/trials.py, and how workers come
and go is roles/attendance.py.

One fault is blamed once: silence is judged for all of a peer's slices together, and only once its connection has said
whether the worker is there at all (`decide/absences`). A connection that ends is nobody's fault, and proof outlives it.
What failed while this machine itself was away is blamed on nobody.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import trio

from kvasir_node.base.errors import (
    CallTimeout,
    CapacityError,
    KvasirError,
    Misbehaved,
    Overloaded,
    Unreachable,
    UsageError,
)
from kvasir_node.base.ids import ModelId, PeerId, SliceId
from kvasir_node.base.settings import FanoutSettings
from kvasir_node.base.snapshot import WorkerPeerSnapshot
from kvasir_node.decide.absences import AbsenceLimits, Absences
from kvasir_node.decide.call_times import CallLimits, CallTimes, DeadlineLimits
from kvasir_node.decide.ledger import TELLING_FIRST, Ledger, LedgerLimits, Standing
from kvasir_node.decide.stalls import LOOK_INTERVAL_S, OwnStalls
from kvasir_node.net.express import ExpressChannel
from kvasir_node.net.rpc import CallStream
from kvasir_node.net.rpc_credits import Priority
from kvasir_node.net.transport import Stream
from kvasir_node.roles.attendance import Attendance, Invite
from kvasir_node.roles.call_book import CallBook
from kvasir_node.roles.measured import CallMeasured, LinkMeasured, Observer
from kvasir_node.roles.peer_counts import COUNTS_MAX, PeerCounts
from kvasir_node.roles.remote_call import RemoteCall, Result, Served
from kvasir_node.roles.trials import Member, OwnSums, RunBlocking, TrialResult, Trials
from kvasir_node.wire.messages import ExpertsMethod
from kvasir_node.wire.tensors import REQUEST_BYTES, computed_s_of

logger = logging.getLogger(__name__)

REFUSALS_MAX = 16  # in a row; a worker that only refuses gets a pause, as one that fails does
MORE_TIME_MAX = 4.0  # a call that we would compute long ourselves may take this many ceilings longer
SHOWN_MAX = 512  # workers in a snapshot
SLOW_FORGET_S = 60.0  # a size of call found too slow for a peer is tried again after this
ECHO_BYTES, ECHOES = (0, 65_536), 3  # what is sent there and back by a channel, so often, to find out how far it
# reaches; the least of each counts, because whoever waits for a busy core learns nothing of the way
ECHO_TIMEOUT_S = 0.25  # a step waits for it, once; whoever is farther gains nothing by a channel
FAR_S = 0.005  # beyond it one echo of many bytes says enough
AWAY_S = 2.0  # whoever is lost within AWAY_GRACE_S after this machine was away so long, was not away itself
AWAY_GRACE_S = 10.0
Ping = Callable[[PeerId], Awaitable[float]]
"""See `Transport.ping`."""


async def answers_at_once(peer: PeerId) -> float:
    """A Ping where there is no network: whoever is silent is so by its own fault."""
    await trio.lowlevel.checkpoint()
    return 0.0


class Crew:
    """See the module. `changed` hears, on the loop, the layers for which who is proven may have changed."""

    def __init__(
        self,
        settings: FanoutSettings,
        model: ModelId,
        dtype: str,
        slices: frozenset[SliceId],
        held: Mapping[int, frozenset[int]],
        *,
        own_sums: OwnSums,
        changed: Callable[[frozenset[int]], None],
        trial_layers_changed: Callable[[frozenset[int]], None],
        name_of: Callable[[PeerId], str],
        address_of: Callable[[PeerId], str],
        body_bytes_max: int,
        invite: Invite = lambda peer, arrived: None,
        rtt_of: Callable[[PeerId], float | None] = lambda peer: None,
        ping: Ping = answers_at_once,
        observer: Observer | None = None,
        run_blocking: RunBlocking = trio.to_thread.run_sync,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._stalls = OwnStalls()
        self._settings = settings
        self._absences = Absences(AbsenceLimits(settings.cool_off_s, settings.cool_off_max_s))
        self._ping = ping
        self._rtt_of = rtt_of
        self._changed = changed
        self._name_of = name_of
        self._observer = observer
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
        self._times = CallTimes(
            DeadlineLimits(
                settings.deadline_factor,
                settings.deadline_floor_s,
                settings.deadline_ceiling_s,
                settings.hedge_floor_s,
            )
        )
        self._slow_since: dict[tuple[PeerId, int], float] = {}  # (peer, size class of calls); of members
        self._times_lock = threading.Lock()  # of both
        self._slice_at = {(e.layer, e.index): part for part in slices for e in part.experts()}
        self._here = Attendance(
            settings,
            model,
            dtype,
            slices,
            self,
            name_of=name_of,
            body_bytes_max=body_bytes_max,
            invite=invite,
            rtt_of=rtt_of,
        )
        self._able: Mapping[int, Mapping[PeerId, frozenset[int]]] = {}  # by layer; replaced as a whole by the loop
        self._counts = PeerCounts(name_of)
        self.book = CallBook()
        self._in_flight: set[RemoteCall] = set()  # sent, neither answered nor taken back
        self._used: set[PeerId] = set()  # whose answers went into the step that is under way
        self._token: trio.lowlevel.TrioToken | None = None
        self._nursery: trio.Nursery | None = None
        self.trials = Trials(
            settings,
            self.ledger,
            held,
            members=self._here.members,
            own_sums=own_sums,
            address_of=address_of,
            layers_changed=trial_layers_changed,
            begun=lambda member, part: self._here.tell_standing(member.peer, (part,)),
            ended=self._trial_ended,
            run_blocking=run_blocking,
        )

    def members(self) -> Collection[Member]:
        """Who is attached now."""
        return self._here.members()

    def proven(self) -> tuple[tuple[PeerId, SliceId], ...]:
        """Who may carry load now: proven, attached and not away."""
        now = trio.current_time()
        return tuple(pair for pair in self.ledger.proven() if not self._absences.is_away(pair[0], now))

    async def serve(self, stream: Stream) -> None:
        """One worker's call stream, from its ATTACH to its end."""
        await self._here.serve(stream)

    def round_trips(self) -> Mapping[PeerId, float]:
        """See `Attendance.round_trips`."""
        return self._here.round_trips()

    async def run(self, *, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        """Carries trials out until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._here.run_in(nursery)
            self._token = trio.lowlevel.current_trio_token()
            task_status.started()
            try:
                while True:
                    self._look()
                    await trio.sleep(LOOK_INTERVAL_S)
            finally:
                self._nursery = None  # the computing thread may still leave notes; they start nothing any more
                self._here.run_in(None)
                for call in tuple(self._in_flight):
                    self._deliver(call, Unreachable("this node is stopping"))
                self._here.close_channels("this node is stopping")

    # The computing threads' side ------------------------------------------------------------------------------

    def limits_of(self, peer: PeerId, pairs: int, own_s: float) -> CallLimits | None:
        """See `remote_call.Crew`. A call that is expected to be later than any deadline is not made: it would cost its
        worker the proof, and us the wait."""
        ceiling_s = self._settings.deadline_ceiling_s
        more_s = min(own_s, MORE_TIME_MAX * ceiling_s)
        with self._times_lock:
            expected_s = self._times.expected_call_s(peer, pairs)
            if expected_s is not None and expected_s > ceiling_s + more_s and self._keeps_off(peer, pairs):
                return None
            return self._times.limits_of(peer, pairs, more_s)

    def _keeps_off(self, peer: PeerId, pairs: int) -> bool:
        """Whether a size of call that was too slow for a peer is still kept from it."""
        key, now = (peer, pairs.bit_length()), self._clock()
        if len(self._slow_since) >= COUNTS_MAX:
            self._slow_since.clear()
        if now - self._slow_since.setdefault(key, now) < SLOW_FORGET_S:
            return True
        del self._slow_since[key]
        self._times.forget_size(peer, pairs)
        return False

    def channel(self, peer: PeerId) -> ExpressChannel | None:
        return self._here.channel(peer)

    def untimed_channels(self) -> Collection[ExpressChannel]:
        return self._here.untimed_channels()

    def time_channel(self, channel: ExpressChannel) -> None:
        trips: list[tuple[int, float]] = []
        try:
            trips += [(size, _shortest_echo_s(channel, size)) for size in ECHO_BYTES]
        except KvasirError as error:
            logger.info("the express channel to worker %s is not used: %s", channel.peer, error)
        self._later(lambda: self._timed(channel, trips))

    def _timed(self, channel: ExpressChannel, trips: Sequence[tuple[int, float]]) -> None:
        self._here.was_timed(channel)
        if self._observer is not None and trips:
            self._observer.link_measured(LinkMeasured(channel.peer, trips))

    def replicas(self, layer: int, experts: Collection[int]) -> Collection[tuple[PeerId, float | None]]:
        able = [peer for peer, its in self._able.get(layer, {}).items() if its.issuperset(experts)]
        with self._times_lock:
            return [(peer, self._times.expected_call_s(peer, len(experts))) for peer in able]

    def send(self, calls: Sequence[RemoteCall]) -> None:
        self._later(lambda: self._send(calls))

    def took(self, call: RemoteCall) -> None:
        with self._times_lock:
            self._times.observe(call.peer, call.pairs, call.took_s)
            self.book.seconds.observe(call.took_s)

    def failed(self, call: RemoteCall, error: KvasirError, *, wrong: bool = False) -> None:
        self._later(lambda: self._failed(call, error, wrong=wrong))

    def served(self, served: Served) -> None:
        self._later(lambda: self._served(served))

    def offer_trial(self, layer: int, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> None:
        offered = self.trials.offer(layer, rows, chosen, weights)
        if offered is not None:
            self._later(lambda: self._nursery and self.trials.begin(offered, self._nursery))

    def _later(self, act: Callable[[], object]) -> None:
        if self._token is not None:
            try:
                self._token.run_sync_soon(act)
            except trio.RunFinishedError:
                logger.debug("the node has ended; a note to the crew is dropped")

    # Calls ----------------------------------------------------------------------------------------------------

    def _send(self, calls: Sequence[RemoteCall]) -> None:
        for call in calls:
            member = self._here.member(call.peer)
            if call.abandoned:
                continue
            if member is None or self._nursery is None:
                self._deliver(call, Unreachable(f"worker {call.peer} is not attached any more"))
                continue
            call.stream = member.calls
            self._in_flight.add(call)
            started = trio.current_time()

            def deliver(result: Result, call: RemoteCall = call, started: float = started) -> None:
                self._deliver(call, result, trio.current_time() - started)

            try:
                call.id = member.calls.submit(
                    int(ExpertsMethod.COMPUTE),
                    call.frame(),
                    deliver,
                    priority=Priority.TOKEN,
                )
            except KvasirError as error:
                self._deliver(call, error)

    def _deliver(self, call: RemoteCall, result: Result, took_s: float = 0.0) -> None:
        self._in_flight.discard(call)
        call.deliver(result, took_s)
        if isinstance(result, KvasirError):
            return
        # A late answer is measured too: that is how the deadline grows for a worker that is merely slower now.
        self.took(call)
        if call.is_sample and self._observer is not None:
            sent_bytes = REQUEST_BYTES + len(call.part.body)
            measured = (call.peer, call.part.activated, call.pairs, sent_bytes, len(result), call.took_s)
            self._observer.call_measured(CallMeasured(*measured, _computed_s(result)))

    def _served(self, served: Served) -> None:
        for peer, calls in served.calls.items():
            counts = self._counts.of(peer)
            counts.calls += calls
            self.book.went_well(calls)
            counts.rows += served.rows[peer]
            counts.refusals = 0
        self._used.update(served.calls)
        now = trio.current_time()
        # An answer that was there before it was looked for tells nothing of the way.
        telling = [each.peer for each in served.measured if each.computed_s is None or each.took_s > each.computed_s]
        self._here.heard_by_channel(telling)
        for peer, layer, experts in served.experts:
            for part in {self._slice_at[layer, index] for index in experts}:
                self.ledger.right(peer, part, now, served=True)
        if self._observer is not None:
            for measured in served.measured:
                self._observer.call_measured(measured)

    def _failed(self, call: RemoteCall, error: KvasirError, *, wrong: bool) -> None:
        if call.abandoned and call.stream is None and call.channel is None:
            logger.debug("this node was too slow to send a call to %s before its deadline", call.peer)
            return
        self._counts.of(call.peer).calls += 1
        self.book.failed(error, wrong=wrong)
        parts = {self._slice_at[call.layer, index] for index in set(call.request.pair_expert.tolist())}
        if call.abandoned and call.stream is not None and self._nursery is not None:
            self._nursery.start_soon(self._cancel_late, call)
        if wrong:
            self._catch(call.peer, error)
        elif not self._was_away(self._on_loop(call.sent_at), call.limits.deadline_s / 2):
            if isinstance(error, CallTimeout):
                self._was_late(call.peer, parts, error, self._on_loop(call.sent_at))
            else:
                self._judge(call.peer, parts, error, wrong=False, stream=call.stream)

    def _on_loop(self, monotonic: float) -> float:
        """A time of the computing threads' clock, on the loop's."""
        return trio.current_time() - (time.monotonic() - monotonic)

    async def _cancel_late(self, call: RemoteCall) -> None:
        """Lets an abandoned call be answered and measured for one more ceiling, then takes it back."""
        await trio.sleep(self._settings.deadline_ceiling_s)
        self._in_flight.discard(call)
        if call.stream is not None:
            call.stream.cancel(call.id)

    def _was_late(self, peer: PeerId, parts: Collection[SliceId], error: CallTimeout, sent_at: float) -> None:
        """Whether that was the worker's fault its connection tells; nothing is sent there meanwhile."""
        member = self._here.member(peer)
        if member is not None and self._nursery is not None and self._absences.late(peer, sent_at):
            self._proven_changed(member.slices)
            self._nursery.start_soon(self._ask_connection, member, parts, error)

    async def _ask_connection(self, member: Member, parts: Collection[SliceId], error: CallTimeout) -> None:
        peer = member.peer
        try:
            took_s = await self._ping(peer)
        except Unreachable as lost:
            self._is_lost(peer, f"was out of reach: {lost}")
            self._proven_changed(member.slices)
            return
        if self._here.member(peer) is not member:
            return  # `lost` has judged
        if self._absences.answered(peer, took_s, self._rtt_of(peer) or 0.0, trio.current_time()):
            self._judge(peer, parts, error, wrong=False, stream=member.calls)
            return
        self._counts.excuse(peer, f"was out of reach for {took_s:.1f} s")
        self._proven_changed(member.slices)

    def _is_lost(self, peer: PeerId, reason: str) -> None:
        now = trio.current_time()
        if self._was_away(now - AWAY_GRACE_S, AWAY_S):
            self._absences.dismiss(peer, now)
        else:
            self._absences.lost(peer, now)
        self._counts.excuse(peer, reason)

    def _judge(
        self,
        peer: PeerId,
        parts: Collection[SliceId],
        error: KvasirError,
        *,
        wrong: bool,
        stream: CallStream | None,
    ) -> None:
        """Demerits a peer for its own faults only: one that is full, or refuses what we sent, is not to blame."""
        counts = self._counts.of(peer)
        if isinstance(error, Unreachable) and (stream is None or stream.end_reason is not None):
            return  # the end of a stream is `lost`'s to judge
        if not wrong and isinstance(error, (Overloaded, CapacityError, UsageError, Misbehaved)):
            counts.refusals += 1
            if counts.refusals < REFUSALS_MAX:
                self._counts.warn(peer, "refused a call: %s", error)
                return
            counts.refusals = 0
            error = CallTimeout(f"refused {REFUSALS_MAX} calls in a row, lastly: {error}")
        self._counts.fault(peer, str(error))
        member = self._here.member(peer)
        if isinstance(error, CallTimeout) and member is not None:
            parts = member.slices.union(parts)  # silence is the peer's, not one slice's
        for part in sorted(parts):
            self.ledger.failed(peer, part, trio.current_time(), counts.reason, wrong=wrong)
        self._counts.warn(peer, "failed: %s", error)
        self._standing_changed(peer, parts)

    def _catch(self, peer: PeerId, error: KvasirError) -> None:
        """A worker that passed its trial gave a wrong answer to served work: what else it computed is in doubt."""
        counts = self._counts.fault(peer, str(error))
        is_banned = self.ledger.caught(peer, trio.current_time(), counts.reason)
        logger.warning(
            "worker %s was caught giving a wrong answer%s: %s; requests whose answers it may have touched before: %s",
            self._name_of(peer),
            " and is banned" if is_banned else "",
            error,
            ", ".join(map(str, counts.requests)) or "none",
        )
        counts.requests.clear()
        member = self._here.member(peer)
        self._standing_changed(peer, () if member is None else tuple(member.slices))

    def stepped(self, requests: Collection[int]) -> None:
        """A step computed for these requests, with the help of whoever answered since the last one."""
        for peer in self._used:
            self._counts.touched(peer, requests)
        self._used.clear()

    def _look(self) -> None:
        self._stalls.look(trio.current_time(), self._wall_clock())
        too_late_at = time.monotonic() - self._settings.deadline_ceiling_s
        for call in [each for each in self._in_flight if each.abandoned and each.due_at < too_late_at]:
            self._in_flight.discard(call)  # computed another way long ago, and nothing was sent there since
            if call.stream is not None:
                call.stream.cancel(call.id)
        self._here.look()
        for peer in self._absences.rested(trio.current_time()):
            member = self._here.member(peer)
            if member is not None:
                self._proven_changed(member.slices)

    def _was_away(self, since: float, least_s: float) -> bool:
        """Whether this machine slept, or was too busy to look, for so long since then."""
        self._look()
        away_s = self._stalls.longest_s(since)
        if away_s >= least_s:
            logger.info("this node was away for %.1f s; what failed meanwhile is blamed on nobody", away_s)
        return away_s >= least_s

    def _standing_changed(self, peer: PeerId, parts: Collection[SliceId]) -> None:
        self._here.tell_standing(peer, parts)
        self._proven_changed(parts)
        self.trials.plan()

    def _proven_changed(self, parts: Collection[SliceId]) -> None:
        able: dict[int, dict[PeerId, frozenset[int]]] = {}
        for peer, part in self.proven():
            layer = able.setdefault(part.layer, {})
            layer[peer] = layer.get(peer, frozenset()).union(range(part.first, part.last + 1))
        self._able = able
        self._changed(frozenset(part.layer for part in parts))

    def _trial_ended(self, result: TrialResult) -> None:
        peer, part, error = result.member.peer, result.slice, result.error
        if error is not None:
            self.ledger.give_up_trial(peer, part)
            if isinstance(error, CallTimeout) and not self._was_away(*self._span_of(result)):
                self._was_late(peer, (part,), error, trio.current_time() - result.took_s)
            elif result.is_checked and (result.wrong or not self._was_away(*self._span_of(result))):
                self._judge(peer, (part,), error, wrong=result.wrong, stream=result.member.calls)
            elif not result.is_checked:
                logger.warning("%s", error)
        else:
            with self._times_lock:
                self._times.observe(peer, result.pairs, result.took_s)
            if self._observer is not None and result.measured is not None:
                measured = result.measured
                if self._here.has_channel(peer) and measured.computed_s is not None:
                    measured = replace(measured, took_s=measured.computed_s)  # its calls go another way than its trials
                self._observer.call_measured(measured)
            self._counts.of(peer).refusals = 0
            if self.ledger.right(peer, part, trio.current_time()):
                logger.info("worker %s is proven for slice %s", self._name_of(peer), part)
        self._standing_changed(peer, (part,))

    def _span_of(self, result: TrialResult) -> tuple[float, float]:
        """When a trial began, and half of how long it was allowed to take."""
        return trio.current_time() - result.took_s, self._settings.deadline_ceiling_s / 2

    # Workers come and go: what attendance tells ----------------------------------------------------------------

    def standing_of(self, peer: PeerId, part: SliceId) -> str:
        return str(self.ledger.standing(peer, part))

    def attached(self, peer: PeerId, parts: Sequence[SliceId]) -> None:
        for part in parts:
            self.ledger.attach(peer, part)
        self._standing_changed(peer, parts)

    def detached(self, peer: PeerId, parts: Collection[SliceId]) -> None:
        for part in parts:
            self.ledger.detach(peer, part)
        self._proven_changed(parts)
        self.trials.plan()

    def lost(self, member: Member, reason: str, *, by_us: bool, wrong: bool) -> None:
        """A stream ended; unless by what the worker sent, that is an absence, which its proof outlives."""
        peer = member.peer
        self._absences.dismiss(peer, trio.current_time())  # whatever its connection was being asked
        if wrong:
            counts = self._counts.fault(peer, reason)
            for part in member.slices:
                self.ledger.failed(peer, part, trio.current_time(), counts.reason, wrong=True)
            self._counts.warn(peer, "is cut off: %s", reason)
        elif not by_us and member.slices:  # without any it had detached all, as one does that moves to another way
            self._is_lost(peer, f"left without draining: {reason}")
        with self._times_lock:
            self._times.forget(peer)
            self._slow_since = {key: since for key, since in self._slow_since.items() if key[0] != peer}
        self.detached(peer, member.slices)

    def snapshot(self) -> tuple[WorkerPeerSnapshot, ...]:
        """Workers that are attached or have a history, the most telling standing first, as many as can be shown."""
        by_peer: dict[PeerId, list[Standing]] = {}
        for view in self.ledger.pairs():
            by_peer.setdefault(view.peer, []).append(view.standing)
        best = {peer: min(map(TELLING_FIRST.index, standings)) for peer, standings in by_peer.items()}
        shown = sorted(best, key=lambda peer: (best[peer], self._here.member(peer) is None, self._name_of(peer)))
        return tuple(self._snapshot_of(peer, TELLING_FIRST[best[peer]]) for peer in shown[:SHOWN_MAX])

    def _snapshot_of(self, peer: PeerId, standing: Standing) -> WorkerPeerSnapshot:
        member, counts = self._here.member(peer), self._counts.seen(peer)
        with self._times_lock:
            expected_s = self._times.expected_s(peer)
        return WorkerPeerSnapshot(
            peer_id=peer,
            name=self._name_of(peer),
            slices=tuple(map(str, sorted(member.slices))) if member is not None else (),
            state=str(standing),
            path="",  # whoever knows connections says it
            rtt_ms=None if expected_s is None else round(expected_s * 1000, 2),
            calls=counts.calls,
            rows=counts.rows,
            failures=counts.failures,
            reason=counts.reason,
        )


def _computed_s(answer: memoryview) -> float | None:
    """How long the worker says it computed; None when it says nothing."""
    try:
        return computed_s_of(answer) or None
    except Misbehaved:
        return None  # what is wrong with it is seen where it is used


def _shortest_echo_s(channel: ExpressChannel, size: int) -> float:
    """Of a few, as what is waited for on a busy machine is no part of the way. Raises what the channel does."""
    first_s = channel.echo_s(size, ECHO_TIMEOUT_S)
    more = 0 if size and first_s > FAR_S else ECHOES - 1
    return min([first_s, *(channel.echo_s(size, ECHO_TIMEOUT_S) for _ in range(more))])
