"""Every error that crosses a room's border, one class for each thing the caller can do about it.

This module does not know HTTP or exit codes beyond the hints it carries: the surfaces read
`http_status` and `exit_code`, they keep no table of their own.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar


class Blame(StrEnum):
    """Who must change something before the same attempt can succeed."""

    CALLER = "caller"
    PEER = "peer"
    DATA = "data"
    CAPACITY = "capacity"
    US = "us"


class KvasirError(Exception):
    """Base of all errors raised on purpose. Anything else that escapes is a bug."""

    blame: ClassVar[Blame] = Blame.US
    retryable: ClassVar[bool] = False
    http_status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1


class UsageError(KvasirError):
    """The request or the configuration is wrong; the message says what came and what was expected."""

    blame = Blame.CALLER
    http_status = 400
    exit_code = 2

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class NotFoundError(UsageError):
    """The named thing (a model, a request) does not exist here."""

    http_status = 404


class PeerError(KvasirError):
    """A remote peer did not do its part."""

    blame = Blame.PEER
    retryable = True
    http_status = 503
    exit_code = 3


class Unreachable(PeerError):
    """No connection to the peer could be made, or the one that was there ended."""


class CallTimeout(PeerError):
    """The peer did not answer before the deadline."""


class Overloaded(PeerError):
    """The peer is healthy but refuses more work now."""


class RejectReason(StrEnum):
    """Why something a peer sent was refused: a closed list, shared by errors, metrics and traces."""

    BAD_FRAME = "bad_frame"
    BAD_MESSAGE = "bad_message"
    BAD_SIGNATURE = "bad_signature"
    BAD_RESULT = "bad_result"
    NOT_A_MEMBER = "not_a_member"
    STALE = "stale"
    TOO_LARGE = "too_large"
    TOO_MANY = "too_many"
    UNKNOWN_METHOD = "unknown_method"


class Misbehaved(PeerError):
    """The peer sent something no honest peer sends."""

    retryable = False

    def __init__(self, reason: RejectReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class DataError(KvasirError):
    """Bytes on disk or from a peer are not what their name promises (hash, layout, missing tensor)."""

    blame = Blame.DATA
    http_status = 500
    exit_code = 5


class CapacityError(KvasirError):
    """There is no room now: no slot, no queue place, no memory, no worker."""

    blame = Blame.CAPACITY
    retryable = True
    http_status = 503
    exit_code = 6


class QueueFull(CapacityError):
    """The admission queue has no free place; `retry_after_s` is a fair time to wait."""

    http_status = 429

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class BugError(KvasirError):
    """One of our own invariants does not hold; please report it."""
