"""A coordinator whose slots do not fit into memory says which setting to lower."""

from __future__ import annotations

import pytest
import torch

from kvasir_node.base.errors import CapacityError, KvasirError
from kvasir_node.base.settings import load_settings
from kvasir_node.model.cache import SlotCache
from kvasir_node.roles.coordinator import Coordinator
from kvasir_node.roles.library import open_library
from kvasir_node.roles.loading import is_out_of_memory
from kvasir_node.roles.node import _load_model


def test_slots_that_do_not_fit_are_a_lack_of_capacity_that_names_the_setting(tmp_path, monkeypatch):
    settings = load_settings(
        flags={"node.data_dir": str(tmp_path), "coordinator.slots": "3", "coordinator.context": 64}
    )
    store, catalog = open_library(settings)
    model = _load_model(settings, catalog, store)
    pool = SlotCache._pool

    def too_large(cache: SlotCache, like: torch.Tensor, *shape: int) -> torch.Tensor:
        return pool(cache, like, 1 << 36, *shape)  # really asks for it

    monkeypatch.setattr(SlotCache, "_pool", too_large)
    with pytest.raises(CapacityError, match=r"coordinator\.slots 3 of 64 tokens each .*lower --slots"):
        Coordinator(settings, model, name_of=str, address_of=str)


def test_only_a_lack_of_memory_counts_as_one():
    assert is_out_of_memory(MemoryError())
    with pytest.raises(RuntimeError) as raised:
        torch.zeros(1 << 50)
    assert is_out_of_memory(raised.value)
    assert not is_out_of_memory(RuntimeError("shapes do not fit"))
    assert not is_out_of_memory(KvasirError("no"))
