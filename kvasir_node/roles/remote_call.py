"""One call to a worker, from its making to its answer, and what the computing thread needs of the crew for it.

It does not know who deserves load, what is split how, or what a right answer is. A call goes by its worker's express
channel (net/express.py), which the computing thread reads itself, or by the loop, which sets a latch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from kvasir_node.base.errors import KvasirError
from kvasir_node.base.ids import PeerId
from kvasir_node.decide.call_times import CallLimits
from kvasir_node.model.pair_split import PAIR_BYTES, Part
from kvasir_node.net.express import ExpressChannel, result_of
from kvasir_node.net.rpc import CallStream
from kvasir_node.roles.measured import CallMeasured
from kvasir_node.wire.tensors import Encoding, ExpertRequest, request_header, request_parts

Result = memoryview | KvasirError


class Latch:
    """An event that is set once. `threading.Event` takes ten times as long for it: it makes a lock for each wait."""

    __slots__ = ("_lock", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        if not self.is_set:
            self.is_set = True
            self._lock.release()

    def wait(self, timeout_s: float) -> bool:
        if not self.is_set and self._lock.acquire(timeout=max(0.0, timeout_s)):
            self._lock.release()
        return self.is_set


@dataclass(slots=True, eq=False)
class RemoteCall:
    """Made and awaited by one computing thread. `rows` of the forward travel as `encoding`; times are monotonic.

    `number` is unique in its dispatch. Of the loop's own are `stream` and `id`: where it was sent, and as what.
    """

    peer: PeerId
    layer: int
    part: Part
    hidden_size: int
    encoding: Encoding
    limits: CallLimits
    number: int
    is_sample: bool = False  # what it took is to be told to the observer
    sent_at: float = field(default_factory=time.monotonic)
    channel: ExpressChannel | None = None
    done: Latch = field(default_factory=Latch)
    result: Result | None = None
    took_s: float = 0.0
    is_timed: bool = True  # false: the answer was there before it was looked for, and `took_s` is too much
    abandoned: bool = False  # its answer will not be used any more
    check: tuple[torch.Tensor, torch.Tensor | None] | None = None  # rows to compare, and our own sums for them
    stream: CallStream | None = None
    id: int = 0
    _request: ExpertRequest | None = None

    @property
    def pairs(self) -> int:
        return self.part.pairs

    @property
    def hedge_at(self) -> float:
        return self.sent_at + self.limits.hedge_s

    @property
    def due_at(self) -> float:
        return self.sent_at + self.limits.deadline_s

    @property
    def request(self) -> ExpertRequest:
        """Views of the part."""
        if self._request is None:
            pairs, body = self.part.pairs, torch.frombuffer(self.part.body, dtype=torch.uint8)
            dtype = torch.bfloat16 if self.encoding is Encoding.BFLOAT16 else torch.float32
            self._request = ExpertRequest(
                layer=self.layer,
                rows=body[PAIR_BYTES * pairs :].view(dtype).view(self.part.rows, self.hidden_size),
                pair_row=body[4 * pairs : 8 * pairs].view(torch.int32),
                pair_expert=body[8 * pairs : PAIR_BYTES * pairs].view(torch.int32),
                pair_weight=body[: 4 * pairs].view(torch.float32),
            )
        return self._request

    def frame(self) -> list[bytes | memoryview]:
        if self.encoding is Encoding.INT8:
            return request_parts(self.request, self.encoding)
        header = request_header(self.encoding, self.layer, self.part.rows, self.part.pairs, self.hidden_size)
        return [header, self.part.body]

    def deliver(self, result: Result, took_s: float | None = None) -> None:
        """The answer, or why there is none; what comes second is dropped. `took_s` since it was sent, if it is known
        better than here."""
        if not self.done.is_set:
            self.took_s = time.monotonic() - self.sent_at if took_s is None else took_s
            self.result = result
            self.done.set()

    def wait(self, until: float) -> Result | None:
        """The result, or None when it is not there at `until`. Raises nothing: how a channel ends is a result too."""
        if self.channel is not None and not self.done.is_set:
            self._read(self.channel, until)
        else:
            self.done.wait(until - time.monotonic())
        return self.result if self.done.is_set else None

    def _read(self, channel: ExpressChannel, until: float) -> None:
        """Frames of other calls are those of given-up ones, and are passed over."""
        self.is_timed = False
        try:
            frame = channel.receive_now()
            while frame is None or frame[0] != self.number:
                if frame is None:
                    left_s = until - time.monotonic()
                    if left_s <= 0:
                        return
                    self.is_timed = True
                    frame = channel.receive(left_s)
                else:
                    frame = channel.receive_now()
            took_s = self._took_s(channel.arrived_at)
            self.is_timed |= took_s is not None
            self.deliver(result_of(frame[1]), took_s)
        except KvasirError as error:
            self.deliver(error)

    def _took_s(self, arrived_at: float | None) -> float | None:
        """Until its answer came, which may be long before it is looked for; None when that is not known."""
        if arrived_at is None or arrived_at < self.sent_at:
            return None
        return arrived_at - self.sent_at


@dataclass(slots=True)
class Served:
    """What peers answered rightly in one forward: calls and rows by peer; of some calls, the experts that it was of,
    and what it took."""

    calls: dict[PeerId, int] = field(default_factory=dict[PeerId, int])
    rows: dict[PeerId, int] = field(default_factory=dict[PeerId, int])
    experts: list[tuple[PeerId, int, frozenset[int]]] = field(
        default_factory=list[tuple[PeerId, int, frozenset[int]]]
    )  # with their layer
    measured: list[CallMeasured] = field(default_factory=list[CallMeasured])


class Crew(Protocol):
    """What the computing thread needs of the trio side; all may be called from any thread and return at once."""

    def limits_of(self, peer: PeerId, pairs: int, own_s: float) -> CallLimits | None:
        """How long a call of so many pairs may take, which we compute in about `own_s`; None = it is not worth one."""
        ...

    def channel(self, peer: PeerId) -> ExpressChannel | None:
        """A peer's express channel, if it has one that is open."""
        ...

    def untimed_channels(self) -> Collection[ExpressChannel]:
        """Open ones of which it is not known, or not any more, how far they reach."""
        ...

    def time_channel(self, channel: ExpressChannel) -> None:
        """Finds that out, in moments; nobody else may use the channel meanwhile."""
        ...

    def replicas(self, layer: int, experts: Collection[int]) -> Collection[tuple[PeerId, float | None]]:
        """Proven peers that have all of a layer's experts, with how long a call to each takes about, if known."""
        ...

    def send(self, calls: Sequence[RemoteCall]) -> None:
        """Sends frames by the loop; each call is delivered its answer or error."""
        ...

    def took(self, call: RemoteCall) -> None:
        """An answer came by an express channel, in time or late."""
        ...

    def failed(self, call: RemoteCall, error: KvasirError, *, wrong: bool = False) -> None:
        """A call ended badly; `wrong` = it was answered, but not with the truth."""
        ...

    def served(self, served: Served) -> None:
        """What ended well, at the end of a forward."""
        ...

    def offer_trial(self, layer: int, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> None:
        """Real rows of a layer that wants a trial; they are copied if they are used."""
        ...
