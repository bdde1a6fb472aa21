"""Checkpoints are made once per session; no test may write into them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from model_checkpoints import make_checkpoint

import kvasir_node.model  # noqa: F401  before a test imports transformers: all of them run as lean as a node does

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = make_checkpoint(name, tmp_path_factory.mktemp(name) / name)
        return made[name]

    return folder
