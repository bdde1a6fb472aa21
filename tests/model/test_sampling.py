"""Filters against transformers' own, extremes, and chance that depends on nothing but seed and position."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvasir_node.base.errors import DataError
from kvasir_node.base.generation import SamplingOptions
from kvasir_node.model.sampling import bad_rows, choose, forbid, score, seed_of_choice, shift, uniform

DRAWS = [n / 4000 for n in range(4000)]


def random_logits(size: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale


def reference_probabilities(logits: torch.Tensor, options: SamplingOptions) -> torch.Tensor:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(options.temperature))])
    if options.top_k > 0:
        warpers.append(TopKLogitsWarper(options.top_k))
    if options.top_p < 1:
        warpers.append(TopPLogitsWarper(options.top_p))
    if options.min_p > 0:
        warpers.append(MinPLogitsWarper(options.min_p))
    return warpers(torch.zeros(1, 1, dtype=torch.int64), logits[None])[0].double().softmax(-1)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.floats(0.2, 3.0),
    st.floats(0.05, 1.0),
    st.integers(0, 40),
    st.sampled_from([0.0, 0.05, 0.3]),
    st.integers(0, 1000),
    st.sampled_from([30, 1500]),  # more than the candidates that are looked at first
)
def test_the_distribution_is_that_of_transformers(temperature, top_p, top_k, min_p, seed, size):
    options = SamplingOptions(temperature, top_p, top_k, min_p)
    logits = random_logits(size, seed)
    expected = reference_probabilities(logits, options)
    draws = DRAWS[::20]
    counts = Counter(choose(logits.expand(len(draws), -1), [options] * len(draws), draws))
    got = torch.zeros(size, dtype=torch.float64)
    got[list(counts)] = torch.tensor([float(n) for n in counts.values()], dtype=torch.float64) / len(draws)
    # Evenly spaced draws hit each token for its share, up to one draw at each border.
    assert (got.cumsum(0) - expected.cumsum(0)).abs().max() < 1.5 / len(draws)
    assert (expected[list(counts)] > 0).all()


def test_a_wide_vocabulary_with_flat_logits_looks_at_all_of_it():
    logits = torch.zeros(5000)
    tokens = choose(logits.expand(400, -1), [SamplingOptions(top_p=0.99)] * 400, DRAWS[::10])
    assert max(tokens) > 4800
    assert len(set(tokens)) == 400
    tokens = choose(logits.expand(400, -1), [SamplingOptions(top_k=3000)] * 400, DRAWS[::10])
    assert len(set(tokens)) == 400


@pytest.mark.parametrize(
    "options",
    [
        SamplingOptions(temperature=0.0),
        SamplingOptions(temperature=1e-6),
        SamplingOptions(temperature=1e-300),
        SamplingOptions(top_p=1e-9),
        SamplingOptions(top_p=0.0),
        SamplingOptions(top_k=1),
        SamplingOptions(min_p=1.0),
    ],
)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4, 3e37])
def test_extremes_come_down_to_the_likeliest(options, scale):
    logits = random_logits(50, 3, scale)
    for draw in (2.0**-53, 0.5, math.nextafter(1.0, 0.0)):
        assert choose(logits[None], [options], [draw]) == [int(logits.argmax())]


def test_a_hot_temperature_flattens_and_does_not_fail():
    tokens = choose(random_logits(20).expand(400, -1), [SamplingOptions(temperature=1e9)] * 400, DRAWS[::10])
    assert all(abs(Counter(tokens)[token] - 20) <= 1 for token in range(20))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.floats(0, math.nextafter(1.0, 0.0)), st.integers(0, 100))
def test_a_token_without_weight_is_never_chosen(draw, seed):
    logits = random_logits(12, seed)
    logits[::2] = -3e38  # its weight is exactly 0
    (token,) = choose(logits[None], [SamplingOptions()], [draw])
    assert token % 2 == 1


def test_rows_are_independent_of_each_other():
    logits = torch.stack([random_logits(300, seed) for seed in range(5)])
    options = [SamplingOptions(0.0), SamplingOptions(top_p=0.9), SamplingOptions(top_k=7), SamplingOptions(0.3)]
    options.append(SamplingOptions(min_p=0.1))
    draws = [0.1, 0.3, 0.5, 0.7, 0.9]
    together = choose(logits, options, draws)
    assert together == [choose(logits[n : n + 1], options[n : n + 1], draws[n : n + 1])[0] for n in range(5)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_are_refused_with_their_row(bad):
    logits = torch.zeros(3, 8)
    logits[1, 2] = bad
    assert bad_rows(logits) == [1]
    with pytest.raises(DataError, match=r"rows \[1\] are not finite"):
        choose(logits, [SamplingOptions(0.0)] * 3, [0.0] * 3)


def test_huge_logits_whose_sum_overflows_are_fine():
    assert bad_rows(torch.full((2, 8), 3e38)) == []
    both = torch.zeros(2, 8)
    both[0, 0], both[0, 1] = float("inf"), float("-inf")
    assert bad_rows(both) == [0]


def test_uniform_is_fixed_by_seed_and_position():
    assert uniform(1, 0) == uniform(1, 0)
    assert len({uniform(seed, position) for seed in (-1, 0, 1, 2**70) for position in range(50)}) == 200
    many = [uniform(7, position) for position in range(20_000)]
    assert all(0 < number < 1 for number in many)
    assert abs(sum(many) / len(many) - 0.5) < 0.01


def test_uniform_is_the_same_on_every_machine():
    assert [uniform(42, n) for n in range(3)] == [0.09777433248264134, 0.3796756133180036, 0.18694179744249262]


def test_penalties_count_the_answers_tokens_and_biases_are_added():
    logits = torch.zeros(3, 6)
    options = [
        SamplingOptions(presence_penalty=1.0, frequency_penalty=0.5, logit_bias=((2, 3.0), (4, -100.0))),
        SamplingOptions(),
        SamplingOptions(frequency_penalty=-2.0),
    ]
    counts = [{2: 3, 5: 1}, {1: 9}, {0: 2}]
    shifted = shift(logits, options, counts)
    assert shifted.tolist() == [[0, 0, 3 - 1 - 1.5, 0, -100, -1.5], [0] * 6, [4, 0, 0, 0, 0, 0]]
    assert not logits.any()  # a step may be repeated


def test_rows_that_want_nothing_cost_nothing():
    logits = random_logits(6)[None]
    assert shift(logits, [SamplingOptions(presence_penalty=1.0)], [{}]) is logits
    assert forbid(logits, {}) is logits


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 1000), st.sampled_from([0.0, 0.5, 3.0]), st.sampled_from([0, 3]), st.sampled_from([0.2, 1.0]))
def test_what_a_mask_forbids_is_never_drawn_and_the_rest_keeps_its_shares(seed, temperature, top_k, top_p):
    rows = torch.stack([random_logits(40, seed), random_logits(40, seed + 1)])
    mask = torch.zeros(40, dtype=torch.bool)
    mask[seed % 40] = mask[(seed * 7 + 3) % 40] = True
    options = [SamplingOptions(temperature, top_p, top_k)] * 2
    draws = [0.999, 0.4]
    tokens = choose(forbid(rows, {0: mask}), options, draws)
    assert mask[tokens[0]]
    assert tokens[1] == choose(rows[1:], options[1:], draws[1:])[0]
    only = choose(rows[:1, mask], options[:1], draws[:1])[0]
    assert tokens[0] == mask.nonzero().flatten().tolist()[only]


def test_scores_are_log_probabilities_of_the_logits_as_they_came():
    logits = torch.stack([random_logits(30, 1), random_logits(30, 2), random_logits(30, 3)])
    expected = logits.double().log_softmax(-1)
    for row, (scores, top) in enumerate(zip(score(logits, [4, 0, 29], [0, 5, 100]), [0, 5, 30], strict=True)):
        assert scores.logprob == pytest.approx(float(expected[row, [4, 0, 29][row]]), abs=1e-5)
        assert len(scores.likeliest) == top
        assert [token for token, _ in scores.likeliest] == expected[row].topk(top).indices.tolist()
        assert [value for _, value in scores.likeliest] == pytest.approx(
            expected[row].topk(top).values.tolist(), abs=1e-5
        )


def test_choices_have_seeds_of_their_own_and_the_first_has_the_requests():
    seeds = [seed_of_choice(7, choice) for choice in range(16)]
    assert seeds[0] == 7
    assert len({*seeds, *(seed_of_choice(8, choice) for choice in range(16))}) == 32
    assert seeds == [seed_of_choice(7, choice) for choice in range(16)]
