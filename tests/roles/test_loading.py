from __future__ import annotations

import pytest
import torch

from kvasir_node.base.errors import UsageError
from kvasir_node.base.settings import load_settings
from kvasir_node.model.checkpoint import open_checkpoint
from kvasir_node.model.indexing import index_checkpoint
from kvasir_node.roles.library import demo_folder
from kvasir_node.roles.loading import FREE_MEMORY_RATIO, LoadedModel, _free_bytes, expert_memory, load_model


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


def test_law_7_what_does_not_fit_is_not_loaded_and_what_is_stays_spread_over_the_layers(manifest):
    one = load(manifest, coordinator__hold="none").shard.expert_bytes
    for room in (1, 9, 17, 40):
        memory = room * one + one // 2
        model = load(manifest, coordinator__memory_bytes=memory)
        assert max(counts(model)) - min(counts(model)) <= 1
        assert model.shard.nbytes + model.borrowed_bytes_max == memory
        assert model.borrowed_bytes_max >= one
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
    assert found == pytest.approx((_free_bytes(cpu) - 2 * manifest.trunk.size) * FREE_MEMORY_RATIO, rel=0.2)
    assert expert_memory(0, manifest, torch.float32, cpu, 1 << 60) == 1 << 60  # one expert, whatever it takes
