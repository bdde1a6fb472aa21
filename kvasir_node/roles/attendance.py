"""Which workers are attached to a coordinator: their call streams and express channels, from coming to going.

It does not know standing, calls or trials: whoever owns it hears what a worker attaches and takes back, and how its
stream ends, and says what a slice's standing is when the worker is to be told. It lives on the trio loop; computing
threads only look up channels.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

import trio

from kvasir_node.base.errors import KvasirError, Misbehaved, RejectReason, Unreachable, UsageError
from kvasir_node.base.ids import ModelId, PeerId, SliceId
from kvasir_node.base.settings import FanoutSettings
from kvasir_node.net.express import ExpressChannel
from kvasir_node.net.rpc import CallStream
from kvasir_node.net.transport import Stream
from kvasir_node.roles.trials import Member
from kvasir_node.wire import messages
from kvasir_node.wire.messages import Attachment, ExpertsMethod

logger = logging.getLogger(__name__)

NOTICE_TIMEOUT_S = 5.0  # a worker that does not read is not told its standing
TIMED_S = 5.0  # how far an express channel reaches is found out again when no call told of it for so long
Invite = Callable[[PeerId, Callable[[ExpressChannel], None]], bytes | None]
"""See `Transport.invite`."""


class Owner(Protocol):
    """Who hears of it; all on the loop."""

    def attached(self, peer: PeerId, parts: Sequence[SliceId]) -> None: ...

    def detached(self, peer: PeerId, parts: Collection[SliceId]) -> None:
        """An orderly leave: nothing more may be sent for these slices when this returns."""
        ...

    def lost(self, member: Member, reason: str, *, by_us: bool, wrong: bool) -> None:
        """Its stream ended; `wrong` = because of what it sent, `by_us` = because we stop."""
        ...

    def standing_of(self, peer: PeerId, part: SliceId) -> str: ...


class Attendance:
    """See the module. `serve` is the handler of EXPERTS_PROTOCOL; `run_in` must come before it."""

    def __init__(
        self,
        settings: FanoutSettings,
        model: ModelId,
        dtype: str,
        slices: frozenset[SliceId],
        owner: Owner,
        *,
        name_of: Callable[[PeerId], str],
        body_bytes_max: int,
        invite: Invite,
        rtt_of: Callable[[PeerId], float | None],
    ) -> None:
        self._settings = settings
        self._model = model
        self._dtype = dtype
        self._slices = slices
        self._owner = owner
        self._name_of = name_of
        self._body_bytes_max = body_bytes_max
        self._invite = invite
        self._rtt_of = rtt_of
        self._members: dict[PeerId, Member] = {}
        self._channels: dict[PeerId, ExpressChannel] = {}
        self._untimed: tuple[ExpressChannel, ...] = ()  # replaced as a whole
        self._timed_at: dict[PeerId, float] = {}  # when something last went by its channel, on the loop's clock
        self._nursery: trio.Nursery | None = None

    def run_in(self, nursery: trio.Nursery | None) -> None:
        """Where notices are sent from; None = nowhere any more."""
        self._nursery = nursery

    # Who is here ----------------------------------------------------------------------------------------------

    def members(self) -> Collection[Member]:
        return self._members.values()

    def member(self, peer: PeerId) -> Member | None:
        return self._members.get(peer)

    def round_trips(self) -> Mapping[PeerId, float]:
        """Seconds, of the newest keepalive of each attached worker whose calls go by the loop."""
        found = {peer: self._rtt_of(peer) for peer in self._members if peer not in self._channels}
        return {peer: rtt_s for peer, rtt_s in found.items() if rtt_s is not None}

    # A worker's stream ----------------------------------------------------------------------------------------

    async def serve(self, stream: Stream) -> None:
        """One worker's call stream, from its ATTACH to its end."""
        member: Member | None = None

        async def handle(method: int, body: memoryview) -> Sequence[bytes | memoryview]:
            assert member is not None
            if method == ExpertsMethod.ATTACH:
                self._attach(member, Attachment.from_bytes(body))
            elif method == ExpertsMethod.DETACH:
                self._detach(member, Attachment.from_bytes(body))
            elif method == ExpertsMethod.EXPRESS:
                return self._invited(member)
            else:
                raise Misbehaved(RejectReason.UNKNOWN_METHOD, f"a worker may not call method {method} here")
            return ()

        calls = CallStream(
            stream, handler=handle, in_flight_max=self._settings.in_flight_max, body_bytes_max=self._body_bytes_max
        )
        member = Member(stream.peer, calls, trio.move_on_after(math.inf))
        previous = self._members.get(member.peer)
        if previous is not None:  # the worker came back before we noticed that it was gone
            self.lose(previous, "the worker connected again")
        self._members[member.peer] = member
        await self._serve_until_lost(member)

    async def _serve_until_lost(self, member: Member) -> None:
        reason, by_us, wrong = "we stop serving", True, False
        try:
            with member.scope:
                await member.calls.run()
            if member.scope.cancelled_caught:  # by `lose`; raising resets the stream, so that nothing waits for it
                raise Unreachable(f"worker {member.peer} connected again")
            reason, by_us = member.calls.end_reason or "the connection ended", False
        except Misbehaved as error:
            reason, by_us, wrong = str(error), False, True
            raise
        finally:
            if self._members.get(member.peer) is member:
                self.lose(member, reason, by_us=by_us, wrong=wrong)

    def lose(self, member: Member, reason: str, *, by_us: bool = False, wrong: bool = False) -> None:
        """A member is one no more; its stream is ended if it has not."""
        del self._members[member.peer]
        member.scope.cancel()
        self._close_channel(member.peer, "the worker's call stream ended")
        self._owner.lost(member, reason, by_us=by_us, wrong=wrong)

    def _attach(self, member: Member, attachment: Attachment) -> None:
        unknown = [str(part) for part in attachment.slices if part not in self._slices]
        if attachment.model != self._model or unknown:
            shown = ", ".join(unknown[:3]) or str(attachment.model)
            raise Misbehaved(RejectReason.BAD_MESSAGE, f"this coordinator does not serve {shown}")
        mine = self._dtype
        if attachment.dtype != mine:  # its answers would be near the truth, and yet wrong
            raise UsageError(
                f"experts were loaded in {attachment.dtype}, this coordinator computes in {mine}; take a new lease"
            )
        member.slices.update(attachment.slices)
        logger.info("worker %s attached with %s", self._name_of(member.peer), ", ".join(map(str, attachment.slices)))
        self._owner.attached(member.peer, attachment.slices)

    def _detach(self, member: Member, attachment: Attachment) -> None:
        """Routes change first, then the worker may finish what is in flight."""
        parts = member.slices.intersection(attachment.slices)
        member.slices -= parts
        self._owner.detached(member.peer, parts)

    # What a worker is told ------------------------------------------------------------------------------------

    def tell_standing(self, peer: PeerId, parts: Iterable[SliceId]) -> None:
        member = self._members.get(peer)
        if member is not None and self._nursery is not None:
            self._nursery.start_soon(self._notify, member, tuple(sorted(parts)))

    async def _notify(self, member: Member, parts: Sequence[SliceId]) -> None:
        with trio.move_on_after(NOTICE_TIMEOUT_S):
            for part in parts:
                told = messages.Standing(part, self._owner.standing_of(member.peer, part))
                try:
                    await member.calls.notify(int(ExpertsMethod.STANDING), told.to_bytes())
                except KvasirError as error:
                    logger.debug("worker %s could not be told its standing: %s", member.peer, error)
                    return

    # Express channels -----------------------------------------------------------------------------------------

    def _invited(self, member: Member) -> Sequence[bytes]:
        """An invitation to an express channel, or nothing."""

        def arrived(channel: ExpressChannel) -> None:
            if self._members.get(member.peer) is not member:
                channel.close("the worker has gone meanwhile")
                return
            self._close_channel(member.peer, "another one was opened")
            self._channels[member.peer] = channel
            self._untimed = (*self._untimed, channel)
            logger.info("worker %s is reached over an express channel", self._name_of(member.peer))

        invitation = self._invite(member.peer, arrived) if self._settings.express else None
        return () if invitation is None else (invitation,)

    def has_channel(self, peer: PeerId) -> bool:
        return peer in self._channels

    def channel(self, peer: PeerId) -> ExpressChannel | None:
        """One that is open. For any thread."""
        channel = self._channels.get(peer)
        return None if channel is None or channel.is_closed else channel

    def untimed_channels(self) -> Collection[ExpressChannel]:
        """Those of which it is not known, or not any more, how far they reach. For any thread."""
        return self._untimed

    def was_timed(self, channel: ExpressChannel) -> None:
        self._untimed = tuple(each for each in self._untimed if each is not channel)
        self._timed_at[channel.peer] = trio.current_time()

    def heard_by_channel(self, peers: Iterable[PeerId]) -> None:
        """Calls have just told how far these peers' channels reach."""
        self._timed_at.update(dict.fromkeys(self._channels.keys() & set(peers), trio.current_time()))

    def look(self) -> None:
        """Finds the channels that nothing was heard of for long; call it now and then."""
        silent_since = trio.current_time() - TIMED_S
        self._untimed = tuple(
            channel for peer, channel in self._channels.items() if self._timed_at.get(peer, -math.inf) < silent_since
        )

    def close_channels(self, reason: str) -> None:
        for peer in tuple(self._channels):
            self._close_channel(peer, reason)

    def _close_channel(self, peer: PeerId, reason: str) -> None:
        self._timed_at.pop(peer, None)
        channel = self._channels.pop(peer, None)
        if channel is not None:
            channel.close(reason)
