"""Seeded checkpoints: the same bytes from the same seed, a whole folder or none, and both libraries can load them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from model_checkpoints import greedy, local_trunk, run, tokens
from transformers import AutoModelForCausalLM

from kvasir_node.base.errors import UsageError
from kvasir_node.base.generation import SamplingOptions
from kvasir_node.model.bench_checkpoint import SIZES, make_checkpoint
from kvasir_node.model.checkpoint import open_checkpoint
from kvasir_node.model.engine import Engine, Job
from kvasir_node.model.text import TextModel
from kvasir_node.roles.library import demo_folder

PROMPT = (7, 1900, 33, 4, 512, 9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "T"
    make_checkpoint("T", folder, demo_folder())
    return folder


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def test_the_same_seed_gives_the_same_bytes(folder, tmp_path):
    make_checkpoint("T", tmp_path / "again", demo_folder())
    make_checkpoint("T", tmp_path / "other", demo_folder(), seed=1)
    assert digests(tmp_path / "again") == digests(folder)
    differing = {name for name, digest in digests(tmp_path / "other").items() if digest != digests(folder)[name]}
    assert differing == {name for name in digests(folder) if name.startswith("model-")}


def test_progress_ends_with_the_last_file(tmp_path):
    seen: list[tuple[int, int]] = []
    make_checkpoint("T", tmp_path / "T", demo_folder(), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_what_is_there_already_is_kept_and_what_is_something_else_is_refused(folder, tmp_path):
    before = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    make_checkpoint("T", folder, demo_folder())
    assert {file: file.stat().st_mtime_ns for file in folder.iterdir()} == before
    for other in (folder, tmp_path):
        with pytest.raises(UsageError, match="something else"):
            make_checkpoint("S", other, demo_folder())


def test_a_making_that_fails_leaves_nothing(tmp_path):
    def fail(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_checkpoint("T", tmp_path / "T", demo_folder(), progress=fail)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_size_is_refused(tmp_path):
    with pytest.raises(UsageError, match="'X'; there are T, S, M"):
        make_checkpoint("X", tmp_path / "X", demo_folder())


def test_every_token_of_the_vocabulary_has_a_text(folder):
    text = TextModel(folder)
    assert text.vocabulary == SIZES["T"]["vocab_size"]
    assert text.decode(text.encode("It is a truth")) == "It is a truth"
    assert text.decode([2303]) == "<|unused_2303|>"


def test_the_engine_and_transformers_answer_alike(folder):
    """In fp32; this also says that the weights have the names that both expect."""
    engine = Engine(local_trunk(folder), 1, 64, 16)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    (events,) = run(engine, Job(1, PROMPT, 12, SamplingOptions(temperature=0.0), frozenset())).values()
    assert tokens(events) == greedy(model, PROMPT, 12)


def test_its_sizes_are_those_that_the_docs_name(folder):
    checkpoint = open_checkpoint(folder)
    assert (len(checkpoint.layers), checkpoint.experts_per_layer, checkpoint.chosen_per_row) == (2, 8, 2)
    index = json.loads((folder / "model.safetensors.index.json").read_bytes())
    total = sum(file.stat().st_size for file in folder.glob("model-*.safetensors"))
    assert 0 < total - index["metadata"]["total_size"] < 64 * 1024  # the headers
