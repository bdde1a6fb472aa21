"""What a relay does for others: keeps places for peers that nobody can dial, and carries bytes to them.

It does not know what it carries: a Noise session between the two ends. It does not know membership either: whoever
registers `serve` guards it. Protocol: circuit.py. Everything is bounded by RelayLimits; a peer that reads slowly slows
down the one that sends to it, and nobody else: what is held of a circuit is what the windows of its two streams allow,
which are kept small, and what waits to be sent on.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass

import trio

from kvasir_node.base.errors import KvasirError, Misbehaved, RejectReason, Unreachable
from kvasir_node.base.ids import PeerId
from kvasir_node.base.settings import NetworkSettings
from kvasir_node.net.circuit import ANSWER_TIMEOUT_S, CIRCUIT_PROTOCOL, Answer, Ask, pack_peer, read_peer
from kvasir_node.net.muxer_stream import SEND_QUEUE_BYTES
from kvasir_node.net.stream_io import read_exactly
from kvasir_node.net.transport import Stream, Transport

CARRY_BYTES = 64 * 1024
SENDING_BYTES = SEND_QUEUE_BYTES + CARRY_BYTES  # of one direction, taken from one stream and waiting in the other
HALF_CLOSED_S = 5.0  # once one end has closed, the other may take this long to do so, too

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Budget:
    """Bytes that a circuit may still carry, both ways together."""

    left_bytes: int

    def take(self, count: int) -> None:
        self.left_bytes -= count
        if self.left_bytes < 0:
            raise Unreachable("the circuit has carried all that the relay allows one; connect again for more")


class Relay:
    """See the module. `serve` is the handler of RELAY_PROTOCOL."""

    def __init__(self, transport: Transport, settings: NetworkSettings) -> None:
        self._transport = transport
        self._settings = settings
        self._reserved: dict[PeerId, object] = {}
        self._circuits: Counter[PeerId] = Counter()  # of each peer, at either end
        self._circuit_count = 0
        self.bytes_carried = 0

    @property
    def reservations(self) -> int:
        return len(self._reserved)

    @property
    def circuits(self) -> int:
        return self._circuit_count

    async def serve(self, stream: Stream) -> None:
        with trio.move_on_after(ANSWER_TIMEOUT_S) as asking:
            (ask,) = await read_exactly(stream.read, 1)
            target = await read_peer(stream) if ask == Ask.CONNECT else stream.peer
        if asking.cancelled_caught:
            raise Unreachable(f"{stream.peer} did not say what it wants of a relay in {ANSWER_TIMEOUT_S:g} s")
        if ask == Ask.RESERVE:
            await self._reserve(stream)
        elif ask == Ask.CONNECT:
            await self._connect(stream, target)
        else:
            raise Misbehaved(RejectReason.BAD_MESSAGE, f"{stream.peer} asks a relay for {ask}; expected 1 or 2")

    async def _reserve(self, stream: Stream) -> None:
        peer = stream.peer
        if peer not in self._reserved and len(self._reserved) >= self._settings.relay_reservations_max:
            await stream.write(bytes([Answer.FULL]))
            return
        mark = self._reserved[peer] = object()  # a newer reservation takes the place of an older one
        try:
            await stream.write(bytes([Answer.OK]))
            if await stream.read(1):
                raise Misbehaved(RejectReason.BAD_MESSAGE, f"{peer} says more than that it wants a reservation")
        finally:
            if self._reserved.get(peer) is mark:
                del self._reserved[peer]

    async def _connect(self, stream: Stream, target: PeerId) -> None:
        refusal = self._refusal(stream.peer, target)
        if refusal is not None:
            await stream.write(bytes([refusal]))
            return
        ends = (stream.peer, target)
        self._circuits.update(ends)
        self._circuit_count += 1
        try:
            with trio.move_on_after(self._settings.relay_circuit_s):
                await self._join(stream, target)
        finally:
            self._circuit_count -= 1
            self._circuits.subtract(ends)
            self._circuits += Counter()  # drops those that are zero

    def _refusal(self, source: PeerId, target: PeerId) -> Answer | None:
        if target not in self._reserved or source == target:
            return Answer.NOT_RESERVED
        busiest = max(self._circuits[source], self._circuits[target])
        held_bytes = (self._circuit_count + 1) * self._settings.relay_circuit_buffer_bytes
        is_full = self._circuit_count >= self._settings.relay_circuits_max
        is_full = is_full or held_bytes > self._settings.relay_buffer_bytes
        return Answer.FULL if is_full or busiest >= self._settings.relay_circuits_per_peer_max else None

    async def _join(self, stream: Stream, target: PeerId) -> None:
        onward = await self._onward(stream.peer, target)
        if onward is None:
            await stream.write(bytes([Answer.NOT_TAKEN]))
            return
        try:
            await stream.write(bytes([Answer.OK]))
            await self._carry_both_ways(stream, onward)
        finally:
            await onward.reset()
            await stream.reset()

    async def _onward(self, source: PeerId, target: PeerId) -> Stream | None:
        """A stream to the target that it has taken for a circuit; None when it did not."""
        stream: Stream | None = None
        is_taken = False
        try:
            with trio.move_on_after(ANSWER_TIMEOUT_S):
                stream = await self._transport.open_stream(target, CIRCUIT_PROTOCOL)
                await stream.write(pack_peer(source))
                is_taken = await read_exactly(stream.read, 1) == bytes([Answer.OK])
        except KvasirError as error:
            _log.debug("%s does not take a circuit of %s: %s", target, source, error)
        finally:
            if stream is not None and not is_taken:
                await stream.reset()
        return stream if is_taken else None

    async def _carry_both_ways(self, one: Stream, other: Stream) -> None:
        budget = _Budget(self._settings.relay_circuit_bytes)
        for end in (one, other):
            end.limit_window(self._settings.relay_circuit_buffer_bytes // 2 - SENDING_BYTES)
        async with trio.open_nursery() as nursery:

            async def carry(source: Stream, sink: Stream) -> None:
                try:
                    while chunk := await source.read(CARRY_BYTES):
                        budget.take(len(chunk))
                        self.bytes_carried += len(chunk)
                        await sink.write(chunk)
                    await sink.close()
                except Unreachable as error:
                    _log.debug("a circuit between %s and %s ended: %s", one.peer, other.peer, error)
                    nursery.cancel_scope.cancel()
                nursery.cancel_scope.deadline = trio.current_time() + HALF_CLOSED_S

            nursery.start_soon(carry, one, other)
            nursery.start_soon(carry, other, one)
