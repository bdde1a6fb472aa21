"""The trunk by kernels is held to transformers, layout by layer, and gives the same bits however a prompt is cut."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from family_configs import family_config
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from kvasir_node.model.cache import Lane, SlotCache
from kvasir_node.model.checkpoint import open_checkpoint
from kvasir_node.model.experts import load_from_checkpoint
from kvasir_node.model.threads import ONE_THREAD, Threads
from kvasir_node.model.trunk import LocalDispatch, Trunk, load_trunk

CONTEXT = 64
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 8}
LAYOUTS = {
    "qwen3_moe": ("qwen3_moe", {"moe_intermediate_size": 32, "norm_topk_prob": True, "mlp_only_layers": []}),
    "qwen3_moe, biases, shares as they are": (
        "qwen3_moe",
        {"moe_intermediate_size": 32, "norm_topk_prob": False, "attention_bias": True, "mlp_only_layers": []},
    ),
    "mixtral, window": ("mixtral", {"intermediate_size": 64, "sliding_window": 9, "num_local_experts": 8}),
    "mixtral, one key for six heads": (
        "mixtral",
        {"intermediate_size": 32, "num_attention_heads": 6, "num_key_value_heads": 1, "hidden_size": 96},
    ),
    "olmoe": ("olmoe", {"intermediate_size": 32, "hidden_size": 128, "num_key_value_heads": 4}),
    "yarn": (
        "qwen3_moe",
        {
            "moe_intermediate_size": 32,
            "mlp_only_layers": [],
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
}


def checkpoint_of(layout: str, folder: Path) -> Path:
    family, options = LAYOUTS[layout]
    sizes = {key: value for key, value in SIZES.items() if family != "olmoe" or key != "head_dim"}
    config = family_config(family, **(sizes | options))
    torch.manual_seed(11)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.1) if parameter.dim() > 1 else parameter.uniform_(-0.5, 1.5)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=LAYOUTS)
def folder(request, tmp_path_factory) -> Path:
    return checkpoint_of(request.param, tmp_path_factory.mktemp("fused") / "model")


def trunk_of(folder: Path, dtype: torch.dtype = torch.float32, threads: Threads = ONE_THREAD) -> Trunk:
    checkpoint = open_checkpoint(folder)
    shard = load_from_checkpoint(checkpoint, checkpoint.experts, dtype, "cpu", threads)
    trunk = load_trunk(folder, dtype, "cpu", LocalDispatch(shard), threads)
    assert trunk.is_fused
    return trunk


def plain(trunk: Trunk) -> Trunk:
    """The same trunk without its kernels."""
    return Trunk(trunk._model, trunk._config, trunk._traits, trunk._dispatch, trunk._switch)


TOKENS = torch.randint(1, 200, (3, 40), generator=torch.Generator().manual_seed(2))


def logits_of(trunk: Trunk, cuts: list[int], cache: SlotCache | None = None, slots: tuple[int, ...] = (0, 1, 2)):
    """Of all rows of TOKENS, at the end of each piece that begins at a cut."""
    cache = trunk.new_cache(4, CONTEXT) if cache is None else cache
    lane, answers = cache.lane(), []
    for start, end in zip(cuts, [*cuts[1:], TOKENS.shape[1]], strict=True):
        lane.begin(slots, [start] * len(slots), end - start)
        answers.append(trunk.forward(TOKENS[: len(slots), start:end], lane)[0])
    return torch.stack(answers)


STEPS = [0, 17, *range(20, 40)]  # two pieces of a prompt, then token by token


def test_logits_are_those_of_transformers_within_a_ten_thousandth(folder):
    trunk = trunk_of(folder)
    fused, expected = logits_of(trunk, STEPS), logits_of(plain(trunk), STEPS)
    torch.testing.assert_close(fused, expected, rtol=0, atol=1e-4)
    assert expected.std() > 0.1


def test_bfloat16_is_nearer_to_the_exact_answer_than_transformers_are(folder):
    exact = logits_of(plain(trunk_of(folder)), STEPS)
    trunk = trunk_of(folder, torch.bfloat16)
    fused, other = logits_of(trunk, STEPS), logits_of(plain(trunk), STEPS)
    assert (fused - exact).abs().mean() < 1.1 * (other - exact).abs().mean()


def test_the_bits_do_not_depend_on_company_cuts_slots_or_threads(folder):
    trunk = trunk_of(folder)
    together = logits_of(trunk, STEPS)
    assert torch.equal(logits_of(trunk, [0, 5, 6, 39])[-1], together[-1])
    assert torch.equal(logits_of(trunk, STEPS, slots=(3,))[:, 0], together[:, 0])
    assert torch.equal(logits_of(trunk_of(folder, threads=Threads(3)), STEPS), together)


def test_both_ways_share_one_cache(folder):
    trunk = trunk_of(folder)
    expected = logits_of(trunk, STEPS)
    for first, second in ((trunk, plain(trunk)), (plain(trunk), trunk)):
        cache = trunk.new_cache(4, CONTEXT)
        logits_of(first, [0], cache)
        lane = cache.lane()
        lane.begin((0, 1, 2), [39] * 3, 1)
        torch.testing.assert_close(second.forward(TOKENS[:, 39:], lane)[0], expected[-1], rtol=0, atol=1e-4)


def test_what_other_requests_left_behind_is_never_read(folder):
    trunk = trunk_of(folder)
    expected = logits_of(trunk, STEPS)
    cache = trunk.new_cache(4, CONTEXT)
    for pool in (*cache.keys.values(), *cache.values.values()):
        pool.fill_(float("nan"))
    assert torch.equal(logits_of(trunk, STEPS, cache), expected)


def test_not_a_number_in_the_cache_shows_in_the_logits(folder):
    trunk = trunk_of(folder)
    cache = trunk.new_cache(4, CONTEXT)
    logits_of(trunk, [0], cache)
    cache.values[0][1, :, 35] = float("nan")
    lane: Lane = cache.lane()
    lane.begin((0, 1, 2), [39] * 3, 1)
    logits = trunk.forward(TOKENS[:, 39:], lane)[0]
    assert torch.isfinite(logits[[0, 2]]).all()
    assert torch.isnan(logits[1]).all()


def test_a_whole_context_and_a_context_of_four(folder):
    trunk = trunk_of(folder)
    for context in (4, 5, 40):
        cache = trunk.new_cache(3, context)
        lane, other = cache.lane(), trunk.new_cache(3, context).lane()
        for at in range(context):
            for each in (lane, other):
                each.begin((0, 1, 2), [at] * 3, 1)
            fused = trunk.forward(TOKENS[:, at : at + 1], lane)[0]
            expected = plain(trunk).forward(TOKENS[:, at : at + 1], other)[0]
            torch.testing.assert_close(fused, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_moe", {"head_dim": 16}),
        ("qwen3_moe", {"mlp_only_layers": [0], "intermediate_size": 64}),
        ("olmoe", {"clip_qkv": 5.0}),
        ("qwen2_moe", {}),
    ],
)
def test_other_layouts_are_left_to_transformers(family, options, tmp_path):
    config = family_config(family, **options)
    MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).save_pretrained(tmp_path / "model")
    checkpoint = open_checkpoint(tmp_path / "model")
    dispatch = LocalDispatch(load_from_checkpoint(checkpoint, checkpoint.experts, torch.float32))
    trunk = load_trunk(tmp_path / "model", torch.float32, "cpu", dispatch)
    assert not trunk.is_fused
    assert torch.isfinite(logits_of(trunk, [0])).all()


def test_threads_take_parts_that_cover_everything_once():
    rng = random.Random(3)
    for _ in range(200):
        size, step, count = rng.randint(1, 500) * 4, rng.choice((1, 4, 32)), rng.randint(1, 6)
        seen: list[int] = []
        Threads(count).each_part(
            size, step, rng.randint(1, 200), lambda first, end, seen=seen: seen.extend(range(first, end))
        )
        assert sorted(seen) == list(range(size))
