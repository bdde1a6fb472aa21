"""What the surfaces need from a node, and from the process that it is: two small Protocols.

It does not know roles, models or the network; `fake_node.FakeNode` is a second implementation, for tests and
for looking at the screen without a model.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Protocol

from kvasir_node.base.events import EventLog
from kvasir_node.base.generation import AnswerEvent, GenerationRequest
from kvasir_node.base.settings import Settings
from kvasir_node.base.snapshot import ExpertLayerSnapshot, MetricsSnapshot, NodeSnapshot, RequestsSnapshot

if TYPE_CHECKING:
    from kvasir_node.surfaces.phone_door import PhoneDoor


class ModelCard(Protocol):
    """A model that this node serves; `created_at` is seconds since 1970."""

    @property
    def id(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def created_at(self) -> int: ...


class PhoneInvite(Protocol):
    """`link` stands behind # in the page's URL; `host` is where this machine is reached on its network; `is_local` =
    the node listens for this machine alone."""

    @property
    def link(self) -> str: ...

    @property
    def host(self) -> str: ...

    @property
    def expires_s(self) -> float: ...

    @property
    def is_local(self) -> bool: ...


AnswerEvents = AsyncIterator[AnswerEvent]


class NodePort(Protocol):
    """A running node. Every method but `generate`, `pull` and `drain` is cheap and does no input or output."""

    @property
    def settings(self) -> Settings: ...

    def snapshot(self) -> NodeSnapshot: ...

    @property
    def events(self) -> EventLog: ...

    def requests_snapshot(self) -> RequestsSnapshot: ...

    def metrics(self) -> MetricsSnapshot: ...

    def experts(self) -> tuple[ExpertLayerSnapshot, ...]:
        """Of the model that this node coordinates, layer by layer; empty when it is no coordinator."""
        ...

    def ticket(self) -> str: ...

    def invite_phone(self, expires_s: float | None = None) -> PhoneInvite:
        """A fresh code for one page; None = as long as the settings say. Raises UsageError."""
        ...

    def models(self) -> tuple[ModelCard, ...]:
        """Empty when the node is no coordinator."""
        ...

    def find_model(self, name: str) -> ModelCard | None:
        """By name or by id."""
        ...

    def generate(self, request: GenerationRequest) -> AbstractAsyncContextManager[AnswerEvents]:
        """One answer: deltas and calls of all its choices, a ChoiceEnded for each but the last, exactly one Finished.

        Entering returns as soon as the request has a slot or a place in the queue; waiting for a slot happens in
        the iterator. Leaving the context, by whatever way, frees the slot at the next token boundary.
        Raises on entry, as themselves and not in a group: UsageError (`param`, code "context_length_exceeded"
        for a prompt that is too long), QueueFull, CapacityError. The iterator may raise any KvasirError.
        """
        ...

    def ready_info(self) -> dict[str, Any]:
        """The ready line without "api": schema, peer_id, name, roles, listen, ticket, model."""
        ...

    async def pull(self, ref: str, progress: Callable[[str, int, int], None] | None = None) -> str:
        """Brings a model to this disk, or mends it, by name or id; returns its id.

        `progress` hears the model's name, the bytes that are here, and the bytes in all. Raises any KvasirError;
        cancelled, it keeps what came.
        """
        ...

    def pause(self) -> None:
        """The worker gives back what it holds, in good order, and takes nothing new. Raises UsageError without one."""
        ...

    def resume(self) -> None:
        """Ends `pause`; what the owner's settings forbid stays forbidden. Raises UsageError without a worker."""
        ...

    def revoke(self, peer: str, *, is_revoked: bool) -> bool:
        """Shuts a peer out of the whole swarm, or lets it in again; False where that is so already.

        Raises UsageError without the swarm's whole secret and for what is no peer id, CapacityError when no more fit.
        """
        ...

    def begin_drain(self) -> None:
        """Takes no new work from now on, which nothing but a restart ends; what is under way goes on to its end."""
        ...

    async def drain(self) -> None:
        """`begin_drain`, and returns when nothing is in flight. The caller sets the deadline; safe to cancel."""
        ...


class LifePort(Protocol):
    """The process around a node. Neither method waits: the node drains first."""

    @property
    def door(self) -> PhoneDoor:
        """Where phones find their page."""
        ...

    def stop(self) -> None: ...

    def restart(self) -> None:
        """Raises UsageError when the settings as they are now would not start."""
        ...
