"""Rounds of `bench model`: both sides in turns, or one after the other; figures, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvasir_node.base.errors import NotFoundError, UsageError
from kvasir_node.base.settings import Settings
from kvasir_node.model.bench_engine import Burst, StepProfile
from kvasir_node.roles.bench_model import ModelFigures, StreamFigures, bench_folder, make_bench_checkpoint, measure
from kvasir_node.roles.library import demo_folder

PROFILE = StepProfile(trunk_s=0.002, experts_s=0.003, rest_s=0.0001, experts_read=5.5, touched_bytes=2e8)


def settings_in(folder: Path) -> Settings:
    return replace(Settings(), node=replace(Settings().node, data_dir=str(folder)))


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def folder(data_dir) -> Path:
    return make_bench_checkpoint(settings_in(data_dir), "T", None, lambda words: None)


@pytest.mark.parametrize("has_room", [True, False])
def test_both_sides_are_measured_in_turns_or_without_the_room_one_after_the_other(folder, has_room):
    said: list[str] = []
    threads = torch.get_num_threads()
    figures = measure(
        folder,
        streams=[2, 1, 2],
        threads=1,
        dtype="bfloat16",
        prefill_chunk=256,
        seconds=0,
        say=said.append,
        available_bytes=lambda: 4 << 30 if has_room else 1 << 30,
    )
    assert torch.get_num_threads() == threads
    assert figures.is_interleaved is has_room
    assert (figures.model, figures.dtype, figures.threads) == ("T", "bfloat16", 1)
    assert list(figures.streams) == [1, 2]
    assert figures.read_gb_s > 0
    for each in figures.streams.values():
        assert {side: len(bursts) for side, bursts in each.bursts.items()} == {"kvasir": 3, "transformers": 3}
        assert each.experts_implementation in ("grouped_mm", "eager")
    assert any(words.startswith("round 3") for words in said)


def test_figures_are_medians_and_the_roof_is_bytes_by_bandwidth():
    bursts = [Burst(100.0, 10.0), Burst(300.0, 90.0), Burst(200.0, 20.0)]
    streams = {8: StreamFigures(PROFILE, {"kvasir": bursts, "transformers": bursts[:1]})}
    figures = ModelFigures("x", "float32", 1, 20.0, True, streams)
    assert streams[8].decode_tokens_s("kvasir") == 20.0
    assert streams[8].prefill_tokens_s("kvasir") == 200.0
    assert streams[8].decode_rounds("kvasir") == [10.0, 90.0, 20.0]
    assert figures.roof_tokens_s(8) == 8 * 20e9 / 2e8


def test_a_checkpoint_is_made_in_the_cache_or_where_it_is_asked_for(folder, data_dir, tmp_path):
    assert folder == data_dir / "cache" / "bench" / "T"
    said: list[str] = []
    out = make_bench_checkpoint(settings_in(data_dir), "T", tmp_path / "here", said.append)
    assert out == tmp_path / "here"
    assert said[-1] == f"{out}: file 3 of 3"


def test_the_model_is_what_a_node_would_serve_unless_one_is_named(folder, data_dir):
    settings = settings_in(data_dir)
    assert bench_folder(settings, None) == demo_folder()
    assert bench_folder(settings, "demo") == demo_folder()
    assert bench_folder(settings, str(folder)) == folder
    with pytest.raises(NotFoundError):
        bench_folder(settings, "nobody")
    with pytest.raises(UsageError, match="not on this disk"):
        bench_folder(settings, "bafyreigaknpexyvxt76zgkitavbwx6ejgfheup5oybpm77f3pxzrvwpfdi")
