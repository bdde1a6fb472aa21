"""The weights that llama.cpp is given are ours, and what its tool prints is read right."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch
from compare_llama_cpp import KINDS, OURS, THEIRS, compare, document, table, write_gguf
from model_checkpoints import local_trunk, prompt_of, run, tokens

from kvasir_node.base.generation import SamplingOptions
from kvasir_node.model.bench_checkpoint import make_checkpoint
from kvasir_node.model.checkpoint import open_checkpoint
from kvasir_node.model.engine import Engine, Job
from kvasir_node.roles.library import demo_folder

TOOL = """#!/bin/sh
echo main: some words
echo '{"n_kv_max": 512, "pp": 64, "tg": 16, "pl": 2, "speed_pp": 1000.0, "speed_tg": 80.0, "speed": 90.0}'
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("compare") / "T"
    make_checkpoint("T", folder, demo_folder())
    return folder


@pytest.mark.parametrize("dtype", list(KINDS))
def test_the_gguf_file_answers_as_the_checkpoint_does(folder, tmp_path, dtype):
    """Norms and routers are float32 there, which holds bfloat16 exactly."""
    write_gguf(open_checkpoint(folder), tmp_path / "T.gguf", KINDS[dtype])
    answers = []
    for path in (folder, tmp_path):
        engine = Engine(local_trunk(path), 1, 64, 64)
        job = Job(1, prompt_of(3, 20), 16, SamplingOptions(temperature=0.0), frozenset())
        answers.append(tokens(run(engine, job)[1]))
    assert answers[0] == answers[1]


def test_both_sides_have_a_figure_of_every_round(folder, tmp_path):
    tool = tmp_path / "llama-batched-bench"
    tool.write_text(TOOL)
    tool.chmod(0o755)
    arguments = argparse.Namespace(streams=[2], dtype="float32", threads=1, rounds=3)
    rates = compare(open_checkpoint(folder), tool, tmp_path / "T.gguf", arguments)
    assert {side: len(bursts) for side, bursts in rates[2].items()} == {OURS: 3, THEIRS: 3}
    found = document(rates)["2"]
    assert found["decode_tokens_s"][THEIRS] == {"median": 80.0, "min": 80.0, "max": 80.0}
    assert found["prefill_tokens_s"][THEIRS]["median"] == 1000.0
    assert found["decode_tokens_s"][OURS]["median"] > 0
    assert "80.0 (80.0–80.0)" in table(rates)


def test_a_tool_that_gives_no_figures_is_told(folder, tmp_path):
    tool = tmp_path / "llama-batched-bench"
    tool.write_text("#!/bin/sh\necho cannot load >&2\nexit 3\n")
    tool.chmod(0o755)
    arguments = argparse.Namespace(streams=[1], dtype="float32", threads=torch.get_num_threads(), rounds=1)
    with pytest.raises(SystemExit, match="ended with 3 and no figures: cannot load"):
        compare(open_checkpoint(folder), tool, tmp_path / "T.gguf", arguments)
