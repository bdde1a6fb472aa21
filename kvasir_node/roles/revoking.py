"""Peers that the swarm's owner has shut out: what this node knows of them, and how it comes to all members.

It does not know how a revocation is signed (wire/revocation), nor how a peer is kept out (net/hello). Members tell each
other all they know when they meet, and again when something is new to them, so what is said at one node reaches all
that are connected in any way, those that are away when they come back, and ends: nothing is told twice as news.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import trio

from kvasir_node.base.errors import CapacityError, KvasirError, Misbehaved, RejectReason, Unreachable, UsageError
from kvasir_node.base.ids import PeerId
from kvasir_node.net.hello import MemberJoined, Membership
from kvasir_node.net.stream_io import read_exactly
from kvasir_node.net.transport import Stream, Transport
from kvasir_node.wire.envelope import public_key_of
from kvasir_node.wire.revocation import (
    REVOCATIONS_BYTES_MAX,
    REVOCATIONS_MAX,
    Revocation,
    make_revocation,
    read_revocations,
    write_revocations,
)
from kvasir_node.wire.swarm_keys import NAME_BYTES, SwarmKeys

logger = logging.getLogger(__name__)

FILE_NAME = "revoked.cbor"  # the swarm's name (10 bytes), then a set of revocations
REVOCATIONS_PROTOCOL = "/kvasir/revocations/1.0.0"  # u32 length, a set of revocations; no answer
TELL_S = 5.0  # one member
FORGED_MAX = 32  # in one set: a check costs 0.1 ms, and who has only an older secret tells what that one signed
HEARD_PAUSE_S = 0.5  # between two sets of one member

Keys = Callable[[], Sequence[SwarmKeys]]


class Revocations:
    """All that this node knows of its swarm, kept in the data directory. `keys` tells the secrets that count now."""

    def __init__(self, path: Path, keys: Keys, wall: Callable[[], float] = time.time) -> None:
        """Blocks on the disk. Who has the whole secret signs anew what an older one signed."""
        self._path = path
        self._keys = keys
        self._wall = wall
        self._known: dict[PeerId, Revocation] = {}
        newest = keys()[0]
        for each in self._read():
            if newest.is_root:  # it was checked when it came to this disk
                each = make_revocation(newest, each.peer, each.sequence, is_revoked=each.is_revoked)
            if each.is_by_owner(keys()):
                self._known[each.peer] = each

    def _read(self) -> tuple[Revocation, ...]:
        """None of another swarm, in which this node was before."""
        try:
            content = self._path.read_bytes()[: NAME_BYTES + REVOCATIONS_BYTES_MAX + 1]
            is_ours = content[:NAME_BYTES] == self._keys()[0].name
            return read_revocations(content[NAME_BYTES:]) if is_ours else ()
        except FileNotFoundError:
            return ()
        except (OSError, Misbehaved) as error:
            logger.warning("%s cannot be read (%s); other members may tell who is shut out", self._path, error)
            return ()

    def all(self) -> tuple[Revocation, ...]:
        return tuple(self._known.values())

    def revoked(self) -> tuple[PeerId, ...]:
        return tuple(each.peer for each in self._known.values() if each.is_revoked)

    def refusal(self, peer: PeerId) -> str | None:
        """Why the swarm's owner lets a peer in under no secret; None = it may come in."""
        known = self._known.get(peer)
        return f"{peer} is shut out of the swarm by its owner" if known is not None and known.is_revoked else None

    def change(self, peer: PeerId, *, is_revoked: bool) -> bool:
        """Shuts a peer out, or lets it in again; False where that is so already. Blocks on the disk.

        Raises UsageError without the whole secret, and for what is no peer id; CapacityError when no more fit.
        """
        try:
            public_key_of(peer)
        except Misbehaved as error:
            text = f"a peer id is what `kvasir-node id` and `peers --json` print; got {peer[:64]!r}"
            raise UsageError(text, param="peer") from error
        known = self._known.get(peer)
        if (known is not None and known.is_revoked) is is_revoked:
            return False
        sequence = max(int(self._wall() * 1000), 0 if known is None else known.sequence + 1)
        return self.take([make_revocation(self._keys()[0], peer, sequence, is_revoked=is_revoked)])

    def take(self, told: Iterable[Revocation]) -> bool:
        """Keeps what is news; False when nothing was. Blocks on the disk.

        What the owner has not signed, under a secret that counts here, is left out. Raises Misbehaved when much is like
        that, CapacityError when no more fit: the rest is kept.
        """
        news: list[Revocation] = []
        forged = 0
        for each in told:
            if each.peer not in self._known or self._known[each.peer].sequence < each.sequence:
                if each.is_by_owner(self._keys()):
                    news.append(each)
                else:
                    forged += 1
            if forged > FORGED_MAX:
                raise Misbehaved(RejectReason.BAD_SIGNATURE, f"the swarm's owner has not revoked {each.peer}")
        room = REVOCATIONS_MAX - len(self._known)
        fitting = [each for each in news if each.peer in self._known]
        fresh = [each for each in news if each.peer not in self._known]
        self._known |= {each.peer: each for each in (*fitting, *fresh[:room])}
        if fitting or fresh[:room]:
            self._write()
        if len(fresh) > room:
            text = (
                f"{REVOCATIONS_MAX} peers were shut out already; shut out all at once with a new secret (--new-secret)"
            )
            raise CapacityError(text)
        return bool(news)

    def _write(self) -> None:
        draft = self._path.with_suffix(".tmp")
        try:
            draft.write_bytes(self._keys()[0].name + write_revocations(self._known.values()))
            draft.replace(self._path)
        except OSError as error:
            logger.warning("who is shut out cannot be kept in %s: %s", self._path, error.strerror)


class RevocationTeller:
    """Passes them on among members; see the module."""

    def __init__(self, transport: Transport, membership: Membership, revocations: Revocations) -> None:
        self._transport = transport
        self._membership = membership
        self._revocations = revocations
        self._news = trio.Event()
        self._heard_at: dict[PeerId, float] = {}  # when each member's latest set is or was read
        self._events = membership.watch()
        transport.set_handler(REVOCATIONS_PROTOCOL, membership.guard(self._serve))

    @property
    def revoked(self) -> tuple[PeerId, ...]:
        return self._revocations.revoked()

    def change(self, peer: PeerId, *, is_revoked: bool) -> bool:
        """As `Revocations.change`; what is new is told to all. Raises UsageError for ourselves, too."""
        if peer == self._transport.peer_id:
            raise UsageError("a node cannot shut itself out", param="peer")
        is_news = self._revocations.change(peer, is_revoked=is_revoked)
        if is_news:
            self._news.set()
        return is_news

    async def run(self) -> None:
        """Until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._greet, nursery)
            while True:
                await self._news.wait()
                self._news = trio.Event()
                for peer in self._revocations.revoked():
                    nursery.start_soon(self._transport.disconnect, peer)
                for member in self._membership.members():
                    nursery.start_soon(self._tell, member)

    async def _greet(self, nursery: trio.Nursery) -> None:
        async for event in self._events:
            if isinstance(event, MemberJoined):
                self._heard_at.pop(event.peer, None)
                if self._revocations.all():
                    nursery.start_soon(self._tell, event.peer)
            else:
                self._heard_at.pop(event.peer, None)

    async def _tell(self, member: PeerId) -> None:
        body = write_revocations(self._revocations.all())
        try:
            with trio.move_on_after(TELL_S):
                stream = await self._transport.open_stream(member, REVOCATIONS_PROTOCOL)
                try:
                    await stream.write(len(body).to_bytes(4, "big"), body)
                    await stream.close()
                    await stream.read()  # until it was heard
                finally:
                    await stream.reset()
        except KvasirError as error:
            logger.debug("%s was not told who is shut out: %s", member, error)

    async def _serve(self, stream: Stream) -> None:
        await self._turn_of(stream.peer)
        told: tuple[Revocation, ...] | None = None
        with trio.move_on_after(TELL_S):
            length = int.from_bytes(await read_exactly(stream.read, 4), "big")
            if length > REVOCATIONS_BYTES_MAX:
                raise Misbehaved(RejectReason.TOO_LARGE, f"{stream.peer} tells {length} bytes of revocations")
            told = read_revocations(await read_exactly(stream.read, length))
        if told is None:
            raise Unreachable(f"{stream.peer} did not say in {TELL_S:g} s who is shut out")
        if self._revocations.take(told):
            logger.info("%s told who is shut out: %d peers are now", stream.peer, len(self._revocations.revoked()))
            self._news.set()

    async def _turn_of(self, member: PeerId) -> None:
        """News may come close together: they are read one by one. Raises Misbehaved for too many."""
        now = trio.current_time()
        turn_at = max(now, self._heard_at.get(member, -HEARD_PAUSE_S) + HEARD_PAUSE_S)
        if turn_at - now > TELL_S:
            raise Misbehaved(RejectReason.TOO_MANY, f"{member} tells too often who is shut out")
        self._heard_at[member] = turn_at
        await trio.sleep_until(turn_at)
