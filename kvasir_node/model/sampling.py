"""Which token comes next, given logits and a request's options.

It does not know requests or batches. Chance is a pure function of (seed, position), so a request's tokens depend
neither on its neighbours nor on a forward that had to be repeated.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kvasir_node.base.errors import DataError
from kvasir_node.base.generation import SamplingOptions

LOGIT_MIN = torch.finfo(torch.float32).min  # finite, yet its weight is 0 beside any logit of a model
_FIRST_CANDIDATES = 1024  # looked at before all of the vocabulary is sorted; holds nearly all mass of a trained model


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
    rows: list[int] = []
    tokens: list[int] = []
    values: list[float] = []
    for row, (option, count) in enumerate(zip(options, counts, strict=True)):
        changes = list(option.logit_bias)
        if option.presence_penalty or option.frequency_penalty:
            changes += [(t, -option.presence_penalty - n * option.frequency_penalty) for t, n in count.items()]
        rows += [row] * len(changes)
        tokens += [token for token, _ in changes]
        values += [value for _, value in changes]
    if not rows:
        return logits
    place = (torch.tensor(rows, device=logits.device), torch.tensor(tokens, device=logits.device))
    change = torch.tensor(values, dtype=logits.dtype, device=logits.device)
    return logits.index_put(place, change, accumulate=True)


def forbid(logits: torch.Tensor, allowed: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Logits [B, V] where rows that have a mask (bool [V]) keep what it allows alone; the rest weighs nothing."""
    if not allowed:
        return logits
    rows = torch.tensor(list(allowed), device=logits.device)
    masks = torch.stack(list(allowed.values())).to(logits.device)
    return logits.index_copy(0, rows, logits[rows].masked_fill(~masks, LOGIT_MIN))


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Natural logarithms of probabilities: a chosen token's, and (token, logarithm) of the likeliest ones."""

    logprob: float
    likeliest: tuple[tuple[int, float], ...]


def score(logits: torch.Tensor, tokens: Sequence[int], tops: Sequence[int]) -> list[TokenScores]:
    """Scores of one chosen token per row of logits [B, V], with the `tops[row]` likeliest ones."""
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    values, ids = logprobs.topk(min(max(tops), logits.shape[1]), dim=-1)
    pairs = [list(zip(*row, strict=True)) for row in zip(ids.tolist(), values.tolist(), strict=True)]
    return [TokenScores(own, tuple(row[:top])) for own, row, top in zip(chosen, pairs, tops, strict=True)]


def choose(logits: torch.Tensor, options: Sequence[SamplingOptions], draws: Sequence[float]) -> list[int]:
    """One token per row: the likeliest when its temperature is 0, else the one its draw in [0, 1) falls on.

    logits [B, V] float32. Filters apply in transformers' order: temperature, top_k, top_p, min_p. Raises DataError
    when a row holds an infinity or a NaN.
    """
    if bad := bad_rows(logits):
        raise DataError(f"the logits of rows {bad} are not finite, no token can be chosen")
    likeliest = logits.argmax(dim=-1).tolist()
    return [
        token if option.temperature <= 0 else _draw(row, option, draw)
        for token, row, option, draw in zip(likeliest, logits, options, draws, strict=True)
    ]


def _draw(logits: torch.Tensor, options: SamplingOptions, draw: float) -> int:
    # Subtracting the maximum first keeps a temperature near zero from making infinity minus infinity.
    weights = ((logits - logits.max()).double() / options.temperature).exp()  # [V], the likeliest is 1
    if options.top_p >= 1 and options.top_k <= 0 and options.min_p <= 0:
        return _pick(weights, draw)
    weights, ids = _likeliest(weights, options)
    # In the order of token ids, where a change of the last bit of a logit moves each border by as little. Sorted by
    # weight, two near-equal tokens could change places and with them the whole answer.
    ids, order = ids.sort()
    return int(ids[_pick(weights[order], draw)])


def _likeliest(weights: torch.Tensor, options: SamplingOptions) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens that pass the filters: (weights, ids), the likeliest first; at least one."""
    vocabulary = weights.shape[0]
    limit = min(options.top_k, vocabulary) if options.top_k > 0 else vocabulary
    first = min(limit, _FIRST_CANDIDATES)
    values, ids = weights.topk(first)
    mass = float(weights.sum()) if options.top_k <= 0 else math.inf
    if first < limit and (options.top_k > 0 or float(values.sum()) < options.top_p * mass):
        values, ids = weights.topk(limit)
    total = mass if options.top_k <= 0 else float(values.sum())
    if options.top_p < 1:
        before = values.cumsum(0) - values
        values = values[before < options.top_p * total]
    if options.min_p > 0:
        values = values[values >= options.min_p * values[0]]
    kept = max(1, values.shape[0])
    return weights[ids[:kept]], ids[:kept]


def _pick(weights: torch.Tensor, draw: float) -> int:
    """The index on whose share of the sum the draw falls; never one of weight 0."""
    ends = weights.cumsum(0)
    total = float(ends[-1])
    target = min(draw * total, math.nextafter(total, 0.0))
    return int(torch.searchsorted(ends, target, right=True))
