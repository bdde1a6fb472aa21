"""`bench model`: its document, its table, and the flags that it refuses."""

from __future__ import annotations

import json

import pytest

from kvasir_node.model.bench_engine import Burst, StepProfile
from kvasir_node.roles.bench_model import ModelFigures, StreamFigures
from kvasir_node.surfaces.bench import model_document, model_table
from kvasir_node.surfaces.cli import run_command

PROFILE = StepProfile(trunk_s=0.002, experts_s=0.003, rest_s=0.0001, experts_read=5.5, touched_bytes=1.6e8)
BURSTS = {
    "kvasir": [Burst(900.0, 100.0), Burst(1000.0, 120.0), Burst(1100.0, 110.0)],
    "transformers": [Burst(500.0, 50.0), Burst(500.0, 55.0), Burst(600.0, 60.0)],
}
FIGURES = ModelFigures("S", "bfloat16", 1, 20.0, True, {4: StreamFigures(PROFILE, BURSTS, "grouped_mm")})


def test_bench_model_makes_a_checkpoint_and_measures_it(capsys, tmp_path):
    flags = ["--make", "T", "--streams", "1,2", "--seconds", "0", "--json", "--data-dir", str(tmp_path)]
    assert run_command(["bench", "model", *flags]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["schema"] == "kvasir.bench.model/1"
    assert (document["model"], document["dtype"], document["threads"]) == ("T", "float32", 1)
    assert list(document["streams"]) == ["1", "2"]
    for each in document["streams"].values():
        assert set(each["decode_tokens_s"]) == {"kvasir", "transformers", "roof"}
        assert set(each["prefill_tokens_s"]) == {"kvasir", "transformers"}
    assert "file 3 of 3" in err
    assert "round 3" in err


def test_the_document_has_medians_rounds_and_the_roof():
    document = model_document(FIGURES)
    assert document["read_gb_s"] == 20.0
    assert document["streams"]["4"] == {
        "decode_tokens_s": {"kvasir": 110.0, "transformers": 55.0, "roof": 500.0},
        "prefill_tokens_s": {"kvasir": 1000.0, "transformers": 500.0},
        "decode_rounds_tokens_s": {"kvasir": [100.0, 120.0, 110.0], "transformers": [50.0, 55.0, 60.0]},
        "prefill_rounds_tokens_s": {"kvasir": [900.0, 1000.0, 1100.0], "transformers": [500.0, 500.0, 600.0]},
        "step_ms": {"trunk": 2.0, "experts": 3.0, "rest": 0.1},
        "experts_read_per_layer": 5.5,
        "touched_bytes": 160_000_000,
        "transformers_experts": "grouped_mm",
    }


def test_the_table_shows_ranges_and_ratios():
    _, _, _, decode, _, prefill, _, spent = (line.split() for line in model_table(FIGURES).splitlines())
    assert decode == ["4", "requests", "110.0", "(100.0–120.0)", "55.0", "(50.0–60.0)", "×2.00", "22%"]
    assert prefill == ["4", "requests", "1000", "(900–1100)", "500.0", "(500.0–600.0)", "×2.00"]
    assert spent == ["4", "requests", "2.00", "3.00", "0.10", "5.5"]


@pytest.mark.parametrize(
    "flags",
    [
        ["demo", "--make", "S"],
        ["demo", "--out", "x"],
        ["--dtype", "int8"],
        ["--streams", "0"],
        ["--streams", "4,"],
        ["--streams", "257"],
        ["--make", "X"],
        ["nobody"],
    ],
)
def test_wrong_flags_are_refused_before_anything_is_loaded(capsys, tmp_path, flags):
    assert run_command(["bench", "model", *flags, "--data-dir", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: ")
