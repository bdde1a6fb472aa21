"""What is known of a coordinator's requests, for those who look: which run, how the latest ended, how long they took.

It does not know texts, places or the engine: the desk tells it. Bounded: requests that run are bounded by the desk's
places, of those that ended the latest are kept.
"""

from __future__ import annotations

from collections import deque

from kvasir_node.base.events import RequestEnded, RequestStarted, Tell
from kvasir_node.base.histogram import Histogram
from kvasir_node.base.snapshot import RequestSnapshot, RequestsSnapshot
from kvasir_node.roles.reply import Choice, Request

RECENT_MAX = 64
CANCELLED, FAILED, REFUSED = "cancelled", "failed", "refused"
OUTCOMES = ("stop", "length", "tool_calls", CANCELLED, FAILED, REFUSED)
FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
BETWEEN_TOKENS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class RequestBook:
    """See the module. All of it is of the loop."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._open: dict[int, Request] = {}  # by number, the eldest first
        self._recent: deque[RequestEnded] = deque(maxlen=RECENT_MAX)
        self.outcomes: dict[str, int] = dict.fromkeys(
            OUTCOMES, 0
        )  # requests that ended so; one of several choices counts once
        self.first_token_s = Histogram(FIRST_TOKEN_S)  # from arrival, that is with the time in the queue
        self.between_tokens_s = Histogram(BETWEEN_TOKENS_S)  # of each choice

    def began(self, request: Request) -> None:
        self._open[request.number] = request
        queued = request.admitted_at is None
        self._tell(RequestStarted(request.number, request.prompt_tokens, len(request.choices), queued))

    def refused(self) -> None:
        self.outcomes[REFUSED] += 1

    def token(self, choice: Choice, now: float) -> None:
        """Before the token is delivered."""
        if choice.token_at is not None:
            self.between_tokens_s.observe(now - choice.token_at)
        elif choice.request.first_token_at is None:
            self.first_token_s.observe(now - choice.request.arrived_at)
        choice.token_at = now

    def ended(self, request: Request, outcome: str, now: float) -> None:
        """Does nothing the second time."""
        if self._open.pop(request.number, None) is None:
            return
        self.outcomes[outcome] += 1
        facts = request.facts(now)
        ended = RequestEnded(
            request.number,
            outcome,
            request.prompt_tokens,
            request.answer_tokens,
            facts.queue_ms,
            facts.prefill_ms,
            facts.decode_ms,
            facts.local_pairs,
            facts.remote_pairs,
        )
        self._recent.append(ended)
        self._tell(ended)

    def snapshot(self, now: float) -> RequestsSnapshot:
        """Those that run, the eldest first; those that ended, the latest first."""
        running = tuple(_running(request, now) for request in self._open.values())
        return RequestsSnapshot(running, tuple(reversed(self._recent)))


def _running(request: Request, now: float) -> RequestSnapshot:
    is_waiting = request.admitted_at is None
    state = "queued" if is_waiting else "prefill" if request.first_token_at is None else "decode"
    return RequestSnapshot(
        request=request.number,
        state=state,
        prompt_tokens=request.prompt_tokens,
        answer_tokens=request.answer_tokens,
        choices=len(request.choices),
        age_s=round(now - request.arrived_at, 3),
    )
