"""How often peers were refused, by reason: what they sent, or who they are, was not right. It does not know peers."""

from __future__ import annotations

from collections.abc import Mapping

from kvasir_node.base.errors import Misbehaved, RejectReason


class Rejections:
    """One for each node. All of it is of the loop."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(RejectReason, 0)

    def note(self, error: Misbehaved) -> None:
        self._counts[error.reason] += 1

    def counts(self) -> Mapping[str, int]:
        """Of every reason, also of those that never came up."""
        return {str(reason): count for reason, count in self._counts.items()}
