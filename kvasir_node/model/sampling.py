"""Which token comes next, given logits and a request's options.

It does not know requests or batches. Chance is a pure function of (seed, position), so a request's tokens depend
neither on its neighbours nor on a forward that had to be repeated.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvasir_node.base.errors import DataError
from kvasir_node.base.generation import SamplingOptions

Floats = npt.NDArray[np.float32]
TEMPERATURE_MIN = 1e-30  # a lower one is the same, and float32 can divide by this one
MINOR_WEIGHT = 1e-5  # of a token, beside 1 of the likeliest
BLOCK_TOKENS = 512  # summed at once
LOGIT_MIN = torch.finfo(torch.float32).min  # finite, yet its weight is 0 beside any logit of a model


def uniform(seed: int, position: int) -> float:
    """A number in (0, 1), 52 bits of blake2b over both arguments. Never 0, which would choose the first token with any
    weight at all, however small."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return ((int.from_bytes(digest, "big") >> 12) + 0.5) * 2.0**-52


def seed_of_choice(seed: int, choice: int) -> int:
    """The seeds of several answers to one prompt; the first keeps the request's own."""
    if choice == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest(), "big")


def bad_rows(logits: torch.Tensor) -> list[int]:
    """Rows of logits [B, V] that hold an infinity or a NaN, from which no token can be drawn."""
    # A sum is finite unless an element is not (or it overflows, which then is looked at more closely).
    if bool(torch.isfinite(logits.sum())):
        return []
    return (~torch.isfinite(logits).all(dim=-1)).nonzero().flatten().tolist()


def shift(
    logits: torch.Tensor, options: Sequence[SamplingOptions], counts: Sequence[Mapping[int, int]]
) -> torch.Tensor:
    """Logits [B, V] after each row's biases and penalties; the same tensor when no row has any.

    `counts`: how often each token stands in each row's answer so far. Source: OpenAI API reference, "frequency and
    presence penalties": logit - count × frequency_penalty - (count > 0) × presence_penalty.
    """
    shifted = logits
    for row, (option, count) in enumerate(zip(options, counts, strict=True)):
        changes = dict(option.logit_bias)
        if option.presence_penalty or option.frequency_penalty:
            for token, times in count.items():
                penalty = option.presence_penalty + times * option.frequency_penalty
                changes[token] = changes.get(token, 0.0) - penalty
        if changes:
            shifted = logits.clone() if shifted is logits else shifted
            ids = torch.from_numpy(np.fromiter(changes, np.int64, len(changes))).to(logits.device)
            values = torch.from_numpy(np.fromiter(changes.values(), np.float32, len(changes))).to(logits.device)
            shifted[row, ids] += values
    return shifted


def forbid(logits: torch.Tensor, allowed: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Logits [B, V] where rows that have a mask (bool [V]) keep what it allows alone; the rest weighs nothing."""
    if not allowed:
        return logits
    kept = logits.clone()
    for row, mask in allowed.items():
        kept[row].masked_fill_(~mask.to(logits.device), LOGIT_MIN)
    return kept


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Natural logarithms of probabilities: a chosen token's, and (token, logarithm) of the likeliest ones."""

    logprob: float
    likeliest: tuple[tuple[int, float], ...]


def score(logits: torch.Tensor, tokens: Sequence[int], tops: Sequence[int]) -> list[TokenScores]:
    """Scores of one chosen token per row of logits [B, V], with the `tops[row]` likeliest ones."""
    logits = logits.float()
    mass = logits.logsumexp(dim=-1, keepdim=True)  # [R, 1]
    chosen = (logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None]) - mass)[:, 0].tolist()
    values, ids = logits.topk(min(max(tops), logits.shape[1]), dim=-1)
    pairs = [list(zip(*row, strict=True)) for row in zip(ids.tolist(), (values - mass).tolist(), strict=True)]
    return [TokenScores(own, tuple(row[:top])) for own, row, top in zip(chosen, pairs, tops, strict=True)]


def likeliest(logits: torch.Tensor) -> list[int]:
    """The token with the highest logit of each row [B, V], the first of equal ones; a NaN counts as the highest."""
    if logits.device.type != "cpu":
        return logits.argmax(dim=-1).tolist()
    # numpy takes 10 µs for 152,000 tokens where torch takes 250 (one core with AVX-512, 29.11.2026).
    return logits.numpy().argmax(axis=-1).tolist()


def choose(logits: torch.Tensor, options: Sequence[SamplingOptions], draws: Sequence[float]) -> list[int]:
    """One token per row: the likeliest when its temperature is 0, else the one its draw in [0, 1) falls on.

    logits [B, V] float32. Filters apply in transformers' order: temperature, top_k, top_p, min_p. Raises DataError
    when a row holds an infinity or a NaN.
    """
    if bad := bad_rows(logits):
        raise DataError(f"the logits of rows {bad} are not finite, no token can be chosen")
    return [
        token if option.temperature <= 0 else _draw(row, option, draw)
        for token, row, option, draw in zip(likeliest(logits), logits, options, draws, strict=True)
    ]


def _draw(logits: torch.Tensor, options: SamplingOptions, draw: float) -> int:
    # Subtracting the maximum first keeps a temperature near zero from making infinity minus infinity.
    weights = ((logits - logits.max()) / max(options.temperature, TEMPERATURE_MIN)).exp().cpu().numpy()
    if options.top_p >= 1 and options.top_k <= 0 and options.min_p <= 0:
        return _pick(weights, draw)
    # In the order of token ids, where a change of the last bit of a logit moves each border by as little. Sorted by
    # weight, two near-equal tokens could change places and with them the whole answer.
    ids = _passing(weights, options)
    return int(ids[_pick(weights[ids], draw)])


def _passing(weights: Floats, options: SamplingOptions) -> npt.NDArray[np.int64]:
    """The tokens that pass the filters, in the order of their ids; at least one. Of equal ones the first count.

    weights [V] float32, of which the highest is 1. Mostly the few that are not minor decide, which spares sorting all.
    """
    ids = np.flatnonzero(weights >= MINOR_WEIGHT)
    total = float(weights.sum(dtype=np.float64)) if options.top_p < 1 and options.top_k <= 0 else 0.0
    if options.top_k > 0:
        is_enough = len(ids) >= options.top_k
    elif options.top_p < 1:
        is_enough = weights[ids].sum(dtype=np.float64) >= options.top_p * total
    else:
        is_enough = options.min_p >= MINOR_WEIGHT
    ids = ids if is_enough else np.arange(len(weights))
    values = -np.sort(-weights[ids])
    if options.top_k > 0:
        values = values[: options.top_k]
        total = float(values.sum(dtype=np.float64))
    if options.top_p < 1:
        before = values.cumsum(dtype=np.float64) - values
        values = values[: max(1, int(np.count_nonzero(before < options.top_p * total)))]
    if options.min_p > 0:
        values = values[values >= options.min_p * values[0]]
    found = weights[ids]
    passes = found > values[-1]
    ties = np.flatnonzero(found == values[-1])
    passes[ties[: len(values) - int(np.count_nonzero(passes))]] = True
    return ids[passes]


def _pick(weights: Floats, draw: float) -> int:
    """The index on whose share of the sum the draw falls; never one of weight 0.

    First the block, then the place in it: one running sum over 152,000 tokens takes ten times as long.
    """
    ends = np.add.reduceat(weights, np.arange(0, len(weights), BLOCK_TOKENS), dtype=np.float64).cumsum()
    total = float(ends[-1])
    target = min(draw * total, math.nextafter(total, 0.0))
    block = int(np.searchsorted(ends, target, side="right"))
    first = block * BLOCK_TOKENS
    inner = weights[first : first + BLOCK_TOKENS]
    index = int(np.searchsorted(inner.cumsum(dtype=np.float64), target - (ends[block - 1] if block else 0.0), "right"))
    # The two sums of a block may differ in their last bit.
    return first + min(index, int(np.flatnonzero(inner)[-1]))
