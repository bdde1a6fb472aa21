"""How a coordinator's calls to workers ended, and how long they took. It does not know workers, nor who is to blame.

Trials are no such calls: no token depends on them.
"""

from __future__ import annotations

from kvasir_node.base.errors import CallTimeout, KvasirError
from kvasir_node.base.histogram import Histogram

OK, LATE, WRONG, FAILED = "ok", "late", "wrong", "failed"
SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class CallBook:
    """Outcomes are counted on the loop; `seconds` are observed by one thread at a time."""

    def __init__(self) -> None:
        self.outcomes: dict[str, int] = dict.fromkeys((OK, LATE, WRONG, FAILED), 0)
        self.seconds = Histogram(SECONDS)  # of every call that was answered, also too late

    def went_well(self, calls: int) -> None:
        self.outcomes[OK] += calls

    def failed(self, error: KvasirError, *, wrong: bool) -> None:
        """LATE = no answer before the deadline; WRONG = not the truth; FAILED = refused, or cut off."""
        self.outcomes[WRONG if wrong else LATE if isinstance(error, CallTimeout) else FAILED] += 1
