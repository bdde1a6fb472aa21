from __future__ import annotations

import pytest
import torch

from kvasir_node.base.errors import CapacityError, UsageError
from kvasir_node.base.ids import ExpertId
from kvasir_node.base.settings import load_settings
from kvasir_node.model.checkpoint import open_checkpoint
from kvasir_node.model.indexing import index_checkpoint
from kvasir_node.model.tensor_file import read_tensor
from kvasir_node.roles.library import demo_folder
from kvasir_node.roles.loading import (
    FREE_MEMORY_RATIO,
    LoadedModel,
    check_slots,
    expert_dtype,
    expert_memory,
    free_bytes,
    load_model,
    shard_for,
)


@pytest.fixture(scope="module")
def manifest():
    return index_checkpoint(open_checkpoint(demo_folder())).manifest


def load(manifest, **flags: object) -> LoadedModel:
    flags = {key.replace("__", "."): value for key, value in flags.items()}
    return load_model(demo_folder(), manifest, load_settings(flags={"node.device": "cpu", **flags}))


def counts(model: LoadedModel) -> list[int]:
    return [len(model.held[layer]) for layer in model.manifest.layers]


def test_by_default_all_are_held_when_they_fit(manifest):
    model = load(manifest)
    assert counts(model) == [manifest.experts_per_layer] * len(manifest.layers)
    assert len(model.wanted) == sum(counts(model))


@pytest.mark.parametrize("experts", ["stored", "int8"])
def test_law_7_what_does_not_fit_is_not_loaded_and_what_is_stays_spread_over_the_layers(manifest, experts):
    one = load(manifest, coordinator__hold="none", coordinator__experts=experts).shard.expert_bytes
    for room in (1, 9, 17, 40):
        memory = room * one + one // 2
        model = load(manifest, coordinator__memory_bytes=memory, coordinator__experts=experts)
        assert max(counts(model)) - min(counts(model)) <= 1
        assert model.shard.nbytes + model.borrowed_bytes_max == memory
        # What lies ready in the checkpoint is mapped when it is needed; int8 experts are borrowed, which takes room.
        assert (model.borrowed_bytes_max >= one) == (experts == "int8")
        assert len(model.wanted) == len(manifest.layers) * manifest.experts_per_layer
    half = load(manifest, coordinator__memory_bytes=10 * one, coordinator__hold="half")
    assert all(index % 2 == 0 for held in half.held.values() for index in held)
    assert all(expert.index % 2 == 0 for expert in half.wanted)


def test_memory_for_less_than_one_expert_is_refused_with_what_one_takes(manifest):
    with pytest.raises(UsageError, match=r"coordinator\.memory_bytes 1000 is less than the [0-9]+ that one expert"):
        load(manifest, coordinator__memory_bytes=1000)


def test_without_a_setting_it_is_a_share_of_what_the_trunk_leaves_free(manifest):
    cpu = torch.device("cpu")
    found = expert_memory(0, manifest, torch.float32, cpu, 1000)
    assert found == pytest.approx((free_bytes(cpu) - 2 * manifest.trunk.size) * FREE_MEMORY_RATIO, rel=0.2)
    assert expert_memory(0, manifest, torch.float32, cpu, 1 << 60) == 1 << 60  # one expert, whatever it takes


def test_int8_experts_are_smaller_and_their_error_is_measured_and_told(manifest, caplog):
    caplog.set_level("INFO")
    exact, rounded = load(manifest), load(manifest, coordinator__experts="int8")
    assert exact.expert_error is None
    assert rounded.expert_error is not None
    assert 0.003 < rounded.expert_error < 0.02
    assert f"{100 * rounded.expert_error:.2f} % off" in caplog.text
    assert (
        rounded.shard.expert_bytes < 0.55 * 2 * rounded.manifest.hidden_size * 3 * rounded.manifest.expert_hidden_size
    )
    assert (expert_dtype(exact.shard), expert_dtype(rounded.shard)) == ("float32", "int8")
    assert rounded.shard.dtype == exact.shard.dtype  # of the trunk


def test_every_way_of_loading_int8_experts_gives_the_same_weights(manifest):
    """So that a worker answers with its coordinator's numbers, whatever the coordinator's trunk computes in."""
    checkpoint, expert = open_checkpoint(demo_folder()), ExpertId(manifest.layers[0], 1)
    worker = shard_for(manifest, "int8", torch.device("cpu"))
    worker.add(expert, {part: read_tensor(tensor) for part, tensor in checkpoint.experts[expert].items()})
    for dtype in ("float32", "bfloat16"):
        own = load(manifest, coordinator__experts="int8", coordinator__dtype=dtype).shard
        one, other = (shard._layers[expert.layer].experts[expert.index] for shard in (worker, own))
        for name in ("up", "down", "up_factors", "down_factors"):
            assert torch.equal(getattr(one, name), getattr(other, name))


def test_slots_that_do_not_fit_into_the_free_memory_are_refused_before_it_is_taken():
    check_slots(4, 2048, 10 << 20, 40 << 20)
    with pytest.raises(CapacityError, match=r"slots 4096 of 2048 tokens each need 40960 MB .* 40 MB are free.*--slots"):
        check_slots(4096, 2048, 10 << 20, 40 << 20)
