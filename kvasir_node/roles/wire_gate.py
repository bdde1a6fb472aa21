"""Whether the rows of a loaded model may travel in fewer bits than it computes in: measured on the model itself.

It does not know workers, frames or requests. Two runs of the same seeded tokens are held beside each other: one with
every expert computed as always, and one in which all rows and sums of all layers make the round trip through the
encoding, as if no expert were here. Asked-for encodings that change a token or too much of the logits are refused, and
rows travel as they are computed.

Shapes: B probes, V vocabulary; T, D, K as in model/trunk.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvasir_node.base.errors import KvasirError
from kvasir_node.base.snapshot import WireSnapshot
from kvasir_node.model.trunk import RowTally, Trunk
from kvasir_node.wire.tensors import Encoding, through_wire

logger = logging.getLogger(__name__)

PROBES = 8  # computed side by side
OPENING_TOKENS = 8  # of each probe: the first is drawn from all, the next as the model says
GREEDY_TOKENS = 24  # of each probe, compared
TOKENS_MIN = PROBES * GREEDY_TOKENS // 2  # compared; fewer say too little
PROBE_MAX_S = 30.0  # a start may take this much longer because of it
LOGIT_ERROR_MAX = 0.01
"""What computing in bfloat16 instead of float32 costs at the most, which is done without a thought: 0.0007 to 0.0011
with the demo model, 0.0100 with S of `bench model`, whose random weights decide nothing clearly (docs/log.md)."""
ENCODINGS = {"bfloat16": Encoding.BFLOAT16, "int8": Encoding.INT8}

Compute = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, rows [T,D], pair_row, pair_expert, pair_weight [P]) -> [T,D] float32, as `ExpertShard.compute`."""


@dataclass(frozen=True, slots=True)
class Measured:
    """`error`: RMS of the difference / RMS of the plain logits, both without their mean over V, on the average of all
    forwards' rows. `tokens` were chosen greedily in both runs after the same tokens; `agreeing` of them are the same.
    """

    error: float
    tokens: int
    agreeing: int


@dataclass(frozen=True, slots=True)
class WireChoice:
    """The encoding to use, and why; `measured` None = there was nothing to measure, or it could not be done."""

    encoding: Encoding
    asked: str
    measured: Measured | None = None
    refusal: str = ""

    def snapshot(self) -> WireSnapshot:
        name, found = self.encoding.name.lower(), self.measured
        if found is None:
            return WireSnapshot(name, self.asked, refusal=self.refusal)
        error = found.error if math.isfinite(found.error) else None  # JSON has no NaN
        return WireSnapshot(name, self.asked, error, found.tokens, found.agreeing, self.refusal)


def measure_wire(
    trunk: Trunk, compute: Compute, asked: str, *, clock: Callable[[], float] = time.monotonic
) -> WireChoice:
    """What rows should travel in when `fanout.wire` is `asked`. Blocks, for PROBE_MAX_S and two forwards at most.

    No other forward of the trunk may be under way. Experts that cannot be computed here are a refusal, no error.
    """
    plain = Encoding.of(trunk.dtype)
    wanted = ENCODINGS.get(asked, plain)
    if wanted is plain:
        return WireChoice(plain, asked)
    measured = None
    try:
        measured = _measure(trunk, compute, wanted, clock)
        refusal = refusal_of(measured)
    except KvasirError as error:
        refusal = f"it could not be measured: {error}"
    if measured is None or refusal:
        logger.warning("fanout.wire = %s is not used, rows travel in %s: %s", asked, plain.name.lower(), refusal)
        return WireChoice(plain, asked, measured, refusal)
    logger.info("rows travel in %s: %s", asked, _figures(measured))
    return WireChoice(wanted, asked, measured)


def refusal_of(measured: Measured) -> str:
    """Why an encoding should not be used; empty = it may be."""
    if not math.isfinite(measured.error):
        return "logits are not finite, with it or without it"
    if measured.tokens < TOKENS_MIN:
        return f"only {measured.tokens} tokens could be compared in {PROBE_MAX_S:.0f} s; {TOKENS_MIN} would tell"
    if measured.agreeing < measured.tokens:
        return f"it changes tokens: {_figures(measured)}"
    if measured.error > LOGIT_ERROR_MAX:
        return f"it changes the logits by more than {LOGIT_ERROR_MAX:.1%}: {_figures(measured)}"
    return ""


def _figures(measured: Measured) -> str:
    return f"{measured.agreeing} of {measured.tokens} greedy tokens are the same, logits are {measured.error:.2%} off"


@torch.inference_mode()
def _measure(trunk: Trunk, compute: Compute, encoding: Encoding, clock: Callable[[], float]) -> Measured:
    """Both runs get the tokens of the plain one, so that each token is compared after the same beginning."""
    began_at, generator = clock(), torch.Generator().manual_seed(0)
    steps = min(OPENING_TOKENS + GREEDY_TOKENS, trunk.context_max + 1) - 1
    plain = _Run(trunk.with_dispatch(_Experts(compute)), steps)
    coded = _Run(trunk.with_dispatch(_Experts(compute, encoding, trunk.dtype)), steps)
    tokens = torch.randint(trunk.vocab_size, (PROBES, 1), generator=generator)  # [B, 1]
    errors: list[float] = []
    compared = agreeing = 0
    for step in range(1, steps + 1):
        right, other = plain.forward(tokens), coded.forward(tokens)
        errors.append(_error(other, right))
        if not math.isfinite(errors[-1]):
            break
        tokens = right.argmax(1, keepdim=True)
        if step < OPENING_TOKENS:
            tokens = torch.multinomial(right.softmax(1), 1, generator=generator)
        else:
            compared += PROBES
            agreeing += int((tokens == other.argmax(1, keepdim=True)).sum())
        if clock() - began_at > PROBE_MAX_S:
            break
    return Measured(sum(errors) / len(errors), compared, agreeing)


def _error(logits: torch.Tensor, right: torch.Tensor) -> float:
    """Of [B, V]; see `Measured`. NaN in either gives NaN."""
    right = right - right.mean(1, keepdim=True)
    logits = logits - logits.mean(1, keepdim=True)
    return float(((logits - right).norm(dim=1) / right.norm(dim=1).clamp_min(1e-30)).mean())


class _Run:
    """A trunk with a cache of its own, in which the probes grow by a token a forward."""

    def __init__(self, trunk: Trunk, context: int) -> None:
        self._trunk = trunk
        self._lane = trunk.new_cache(PROBES, context).lane()
        self._position = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[B, 1] -> logits [B, V], on the CPU both."""
        self._lane.begin(range(PROBES), [self._position] * PROBES, 1)
        logits, _ = self._trunk.forward(tokens.to(self._trunk.device), self._lane)
        self._lane.commit()
        self._position += 1
        return logits.cpu()


class _Experts:
    """An `ExpertDispatch`: all experts here, or with an encoding as if the even and the odd ones were at two workers,
    so that partial sums are rounded that may be larger than what they add up to."""

    def __init__(self, compute: Compute, encoding: Encoding | None = None, dtype: torch.dtype = torch.float32) -> None:
        self._compute = compute
        self._encoding = encoding
        self._dtype = dtype

    def begin(self, rows: int) -> None:
        self._rows, self._pairs_per_row = rows, 0

    def __call__(self, layer: int, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        self._pairs_per_row += chosen.shape[1]
        if self._encoding is None:
            return self._sums(layer, rows, chosen, weights, torch.ones_like(chosen, dtype=torch.bool))
        seen = through_wire(rows.to(self._dtype), self._encoding)
        total = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
        for half in (0, 1):
            sums = self._sums(layer, seen, chosen, weights, chosen % 2 == half)
            total += through_wire(sums, self._encoding).to(torch.float32)
        return total

    def _sums(
        self, layer: int, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        pair_row, slot = mask.nonzero(as_tuple=True)
        return self._compute(layer, rows, pair_row, chosen[pair_row, slot], weights[pair_row, slot])

    def tally(self) -> RowTally:
        none = [0] * self._rows
        return RowTally(local=[self._pairs_per_row] * self._rows, remote=none, fallback=none, hedged=none)

    def fork(self) -> _Experts:
        return _Experts(self._compute, self._encoding, self._dtype)
