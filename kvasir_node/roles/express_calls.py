"""The worker's end of an express channel: a thread that receives a call, computes, and sends its answer, one by one.

It does not know what a call's body means, who opened the channel or why. Whatever goes wrong in a call is its answer;
whatever goes wrong with the channel ends the thread and nothing else.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import trio

from kvasir_node.base.errors import BugError, KvasirError, PeerError
from kvasir_node.net.express import ECHO, ExpressChannel, answer_body
from kvasir_node.net.raw_link import Buffer

logger = logging.getLogger(__name__)

TURN_S = 0.1  # the thread looks up this often while nothing comes; what it has answered is told as often
SEND_S = 5.0  # a coordinator that does not take an answer for so long loses the channel
JOIN_S = 2.0  # a thread that still computes when the channel is closed is waited for this long

Answer = Callable[[memoryview], tuple[int, Sequence[bytes | memoryview]]]
"""The rows of a call, 0 for one that asks for none to be computed, and the parts of its result; runs in the thread."""


class ExpressCalls:
    """Its methods belong to the trio loop; `run` starts the thread, which is a daemon. What comes with the call id ECHO
    goes back as it is. Answers are sent `delay_s` late, as from a distance."""

    def __init__(self, channel: ExpressChannel, answer: Answer, delay_s: float = 0.0) -> None:
        self._channel = channel
        self._delay_s = delay_s
        self._answer = answer
        self._thread = threading.Thread(target=self._serve, name=f"express {channel.peer}", daemon=True)
        self._answered: deque[int] = deque()  # rows of calls that are not told yet
        self._turns: deque[trio.Event] = deque()  # of those who wait until nothing is left to answer
        self._token: trio.lowlevel.TrioToken | None = None
        self._ended = trio.Event()

    async def run(self, computed: Callable[[int], None]) -> None:
        """Serves until the channel ends; `computed` hears the rows of each call that was answered, a little later.

        Cancel-safety: the channel is closed, and a call under way may take JOIN_S until it is given up.
        """
        self._token = trio.lowlevel.current_trio_token()
        self._thread.start()
        try:
            while not self._ended.is_set():
                with trio.move_on_after(TURN_S):
                    await self._ended.wait()
                self._tell(computed)
        finally:
            self._channel.close("this worker leaves")
            with trio.move_on_after(JOIN_S) as joining:
                joining.shield = True
                await self._ended.wait()
            self._tell(computed)

    def _tell(self, computed: Callable[[int], None]) -> None:
        while self._answered:
            computed(self._answered.popleft())

    async def finish(self) -> None:
        """Returns when every call that has come is answered, or the channel has ended. Cancel-safe."""
        if not self._ended.is_set():
            self._turns.append(turn := trio.Event())
            await turn.wait()

    def _end(self) -> None:
        self._ended.set()
        for turn in self._turns:
            turn.set()

    # The thread's side ----------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while True:
                asked = len(self._turns)
                call = self._channel.receive(0.0 if asked else TURN_S)
                if call is not None:
                    self._serve_call(*call)
                    continue
                for _ in range(asked):  # they asked before we looked, and nothing was there
                    self._later(self._turns.popleft().set)
        except PeerError as error:
            logger.info("the express channel to coordinator %s is served no more: %s", self._channel.peer, error)
        finally:
            self._later(self._end)

    def _later(self, act: Callable[[], None]) -> None:
        assert self._token is not None, "the thread is started by `run`"
        with suppress(trio.RunFinishedError):  # the node has ended, and nobody waits any more
            self._token.run_sync_soon(act)

    def _serve_call(self, call_id: int, body: memoryview) -> None:
        if call_id == ECHO:
            self._send(call_id, [body])
            return
        rows = 0
        result: Sequence[bytes | memoryview] | KvasirError
        try:
            rows, result = self._answer(body)
        except KvasirError as error:
            result = error
        except Exception as error:  # the one door for these calls: a bug must cost its call, not the channel
            logger.exception("a call over the express channel to coordinator %s failed", self._channel.peer)
            result = BugError(f"the handler failed: {type(error).__name__}")
        self._send(call_id, answer_body(result))
        if rows:
            self._answered.append(rows)

    def _send(self, call_id: int, parts: Sequence[Buffer]) -> None:
        if self._delay_s:
            time.sleep(self._delay_s)
        self._channel.send(call_id, parts, SEND_S)
