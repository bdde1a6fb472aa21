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
import torch

from kvasir_node.base.errors import DataError
from kvasir_node.base.generation import SamplingOptions

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
    weights = ((logits - logits.max()).double() / options.temperature).exp()  # [V], the likeliest is 1
    if options.top_p >= 1 and options.top_k <= 0 and options.min_p <= 0:
        return _pick(weights, draw)
    weights = weights.cpu()
    # In the order of token ids, where a change of the last bit of a logit moves each border by as little. Sorted by
    # weight, two near-equal tokens could change places and with them the whole answer.
    ids = _passing(weights, options)
    return int(ids[_pick(weights[ids], draw)])


def _passing(weights: torch.Tensor, options: SamplingOptions) -> torch.Tensor:
    """The tokens that pass the filters, in the order of their ids; at least one. Of equal ones the first count.

    weights [V] on the CPU. numpy sorts 152,000 of them in 0.9 ms where torch takes 27 (one core with AVX-512,
    29.11.2026), so no guess about how many of them matter is needed.
    """
    values = -weights.numpy()
    if 0 < options.top_k < len(values):
        values = np.partition(values, options.top_k - 1)[: options.top_k]
    values = torch.from_numpy(-np.sort(values))
    if options.top_p < 1:
        ends = values.cumsum(0)
        values = values[: max(1, int((ends - values < options.top_p * ends[-1]).sum()))]
    if options.min_p > 0:
        values = values[values >= options.min_p * values[0]]
    least = values[-1]
    above = weights > least
    ties = (weights == least).nonzero().flatten()[: len(values) - int(above.sum())]
    above[ties] = True
    return above.nonzero().flatten()


def _pick(weights: torch.Tensor, draw: float) -> int:
    """The index on whose share of the sum the draw falls; never one of weight 0."""
    ends = weights.cumsum(0)
    total = float(ends[-1])
    target = min(draw * total, math.nextafter(total, 0.0))
    return int(torch.searchsorted(ends, target, right=True))
