"""What a coordinator remembers of failed workers beyond its own life: one small file in the data directory.

It does not know what any of it means (decide/ledger). Bans, strikes and pauses that have not ended are kept; proof is
not, because to prove it again costs one trial, and whoever holds the file could otherwise declare itself proven. Pauses
are kept by the wall clock, which goes on between two lives; what a clock put back or forward makes of them is bounded
by the longest pause.

A file that cannot be read is an empty one, with a warning: to forget who lied is bad, not to start is worse.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import trio

from kvasir_node.base.errors import Misbehaved, RejectReason
from kvasir_node.base.ids import ModelId, PeerId, SliceId
from kvasir_node.decide.ledger import Doubt, Ledger
from kvasir_node.roles.trials import RunBlocking
from kvasir_node.wire.codec import Fields, decode, encode, is_plain_text

logger = logging.getLogger(__name__)

FILE_NAME = "ledger.cbor"
VERSION = 1
FILE_BYTES_MAX = 8 << 20
DOUBTS_MAX = 8192  # (model, peer, slice); of this model first, bans before others
STRIKES_MAX = 8192  # peers
REASON_CHARS_MAX = 200
SAVE_INTERVAL_S = 1.0  # at most so often; a crash forgets no more than that
_ID_CHARS_MAX = 128
_COUNT_MAX = 1 << 31
_SECONDS_MAX = 1e12


@dataclass(frozen=True, slots=True)
class _Kept:
    """`doubt.cools_for_s` counts from 1970 here."""

    model: ModelId
    doubt: Doubt


class LedgerFile:
    """The file of one coordinator, for one model at a time; what is known of other models is carried along."""

    def __init__(
        self,
        path: Path,
        model: ModelId,
        wall_clock: Callable[[], float] = time.time,
        run_blocking: RunBlocking = trio.to_thread.run_sync,
    ) -> None:
        self._path = path
        self._model = model
        self._wall_clock = wall_clock
        self._run_blocking = run_blocking
        self._others: tuple[_Kept, ...] = ()

    def restore(self, ledger: Ledger, now: float) -> None:
        """Puts what is in the file into a new ledger. Blocks on the disk."""
        strikes, kept = self._read()
        wall = self._wall_clock()
        self._others = tuple(each for each in kept if each.model != self._model)
        mine = [
            replace(each.doubt, cools_for_s=max(0.0, each.doubt.cools_for_s - wall))
            for each in kept
            if each.model == self._model
        ]
        ledger.restore(strikes, mine, now)

    async def keep(self, ledger: Ledger) -> None:
        """Writes the file whenever there is something new, until cancelled; then once more if there is.

        Cancel-safety: ends with the last write done, which takes as long as the disk does.
        """
        saved = ledger.changes
        try:
            while True:
                await trio.sleep(SAVE_INTERVAL_S)
                if ledger.changes != saved:
                    saved = await self._save(ledger)
        finally:
            if ledger.changes != saved:
                with trio.move_on_after(math.inf) as scope:
                    scope.shield = True
                    await self._save(ledger)

    async def _save(self, ledger: Ledger) -> int:
        """Which of the ledger's changes is in the file now."""
        changes = ledger.changes
        data = self._encode(ledger, trio.current_time())
        await self._run_blocking(self._write, data)
        return changes

    def _encode(self, ledger: Ledger, now: float) -> bytes:
        wall = self._wall_clock()
        mine = (
            _Kept(self._model, replace(doubt, cools_for_s=wall + doubt.cools_for_s)) for doubt in ledger.doubts(now)
        )
        kept = [*mine, *self._others][:DOUBTS_MAX]
        strikes = list(ledger.strikes().items())[-STRIKES_MAX:]
        document = {
            "v": VERSION,
            "kind": "ledger",
            "strikes": [{"peer": peer, "count": count} for peer, count in strikes],
            "doubts": [_to_map(each) for each in kept],
        }
        return encode(document)

    def _write(self, data: bytes) -> None:
        """Replaces the file whole: a crash leaves the old one or the new one."""
        draft = self._path.with_suffix(".tmp")
        try:
            with draft.open("wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            draft.replace(self._path)
        except OSError as error:
            logger.warning(
                "who failed or lied cannot be kept in %s: %s; free some space, or it is forgotten when this node stops",
                self._path,
                error.strerror,
            )

    def _read(self) -> tuple[dict[PeerId, int], tuple[_Kept, ...]]:
        try:
            with self._path.open("rb") as stream:
                data = stream.read(FILE_BYTES_MAX + 1)
            return _decode(data)
        except FileNotFoundError:
            return {}, ()
        except (OSError, Misbehaved) as error:
            logger.warning(
                "%s cannot be read (%s); workers that failed or lied before are forgotten", self._path, error
            )
            return {}, ()


def _decode(data: bytes) -> tuple[dict[PeerId, int], tuple[_Kept, ...]]:
    """Raises Misbehaved for whatever we would not have written."""
    fields = Fields(decode(data, max_bytes=FILE_BYTES_MAX, what="the ledger"), "ledger")
    if fields.integer("v", 0, _COUNT_MAX) != VERSION or fields.text("kind", 16) != "ledger":
        raise Misbehaved(RejectReason.BAD_MESSAGE, f"the ledger is not of version {VERSION}")
    strikes = dict(fields.items("strikes", STRIKES_MAX, _strike_of))
    kept = fields.items("doubts", DOUBTS_MAX, _kept_of)
    fields.end()
    return strikes, kept


def _strike_of(value: Any) -> tuple[PeerId, int]:
    fields = Fields(value, "strike")
    found = PeerId(fields.text("peer", _ID_CHARS_MAX)), fields.integer("count", 1, _COUNT_MAX)
    fields.end()
    return found


def _to_map(kept: _Kept) -> dict[str, Any]:
    doubt = kept.doubt
    reason = doubt.reason[:REASON_CHARS_MAX]
    return {
        "model": kept.model,
        "peer": doubt.peer,
        "layer": doubt.slice.layer,
        "first": doubt.slice.first,
        "last": doubt.slice.last,
        "failures": min(doubt.failures, _COUNT_MAX),
        "wrong": min(doubt.wrong, _COUNT_MAX),
        "banned": doubt.banned,
        "cooled_at": doubt.cools_for_s,
        "reason": reason if is_plain_text(reason, REASON_CHARS_MAX) else "it failed",
    }


def _kept_of(value: Any) -> _Kept:
    fields = Fields(value, "doubt")
    kept = _Kept(
        ModelId(fields.text("model", _ID_CHARS_MAX)),
        Doubt(
            peer=PeerId(fields.text("peer", _ID_CHARS_MAX)),
            slice=SliceId(*(fields.integer(name, 0, _COUNT_MAX) for name in ("layer", "first", "last"))),
            failures=fields.integer("failures", 0, _COUNT_MAX),
            wrong=fields.integer("wrong", 0, _COUNT_MAX),
            banned=fields.boolean("banned"),
            cools_for_s=fields.number("cooled_at", 0.0, _SECONDS_MAX),
            reason=fields.text("reason", REASON_CHARS_MAX),
        ),
    )
    fields.end()
    return kept
