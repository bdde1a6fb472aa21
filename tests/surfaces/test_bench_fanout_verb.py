"""`bench fanout`: its document, its table, its chart, and what it and its siblings refuse."""

from __future__ import annotations

import json

import pytest

from kvasir_node.roles.bench_fanout import EmulatedPoint, FanoutFigures, RealPoint
from kvasir_node.roles.bench_nodes import Burst
from kvasir_node.roles.bench_parts import StepParts
from kvasir_node.surfaces.bench_fanout import fanout_document, fanout_png, fanout_table
from kvasir_node.surfaces.cli import run_command


def burst(tokens_per_s: float, remote_pairs: int = 0) -> Burst:
    return Burst(tokens_per_s, 16 / tokens_per_s, 1500.4, remote_pairs, 0)


POINT = RealPoint(
    StepParts(trunk_s=0.02, experts_s=0.1, halves_s=0.055),
    {
        "alone": [burst(100.0), burst(110.0), burst(90.0)],
        "worker": [burst(150.0, 7), burst(140.0, 5), burst(160.0, 3)],
        "two_threads": [burst(130.0)],
    },
)
EMULATED = EmulatedPoint(
    workers=2, rtt_ms=20.0, concurrency=16, tokens_per_s=18.0, alone=10.0, bound=2.25, latency_ms=888.0,
    latency_idle_ms=240.0,
)  # fmt: skip
FIGURES = FanoutFigures("M", {1: POINT, 16: POINT}, (EMULATED,), True, 1.0)


def test_the_document_has_what_the_schema_says():
    document = fanout_document(FIGURES, "/curves.png")
    assert document["schema"] == "kvasir.bench.fanout/1"
    assert (document["at"], document["ratio"], document["ratio_bound"], document["ratio_two_threads"]) == (
        16,
        1.5,
        1.6,
        1.3,
    )
    assert document["same_tokens"] is True
    assert document["emulated"] == [
        {
            "workers": 2,
            "rtt_ms": 20.0,
            "concurrency": 16,
            "tokens_per_s": 18.0,
            "alone": 10.0,
            "bound": 2.25,
            "fraction": 0.8,
            "latency_ms": 888.0,
            "latency_idle_ms": 240.0,
        }
    ]
    real = document["real"][1]
    assert real["concurrency"] == 16
    assert real["tokens_per_s"] == {"alone": 100.0, "worker": 150.0, "two_threads": 130.0}
    assert real["rounds_tokens_per_s"]["worker"] == [150.0, 140.0, 160.0]
    assert real["parts_ms"] == {"trunk": 20.0, "experts": 100.0, "halves": 55.0}
    assert (real["bytes_per_token"], real["remote_pairs"], real["fallbacks"]) == (1500, 15, 0)
    json.dumps(document)


def test_the_table_shows_gains_beside_their_bounds():
    lines = [line.split() for line in fanout_table(FIGURES).splitlines()]
    assert ["16", "100.0", "150.0", "×1.50", "×1.60", "94%", "130.0", "×1.30", "1500"] in lines
    assert ["2", "20", "16", "10.00", "18.00", "×1.80", "×2.25", "80%", "888.0", "240.0"] in lines
    assert lines[-1][-1] == "yes"


def test_the_curves_are_a_png():
    assert fanout_png(FIGURES).startswith(b"\x89PNG")


def test_the_bound_of_equal_devices_is_amdahls():
    parts = StepParts(trunk_s=1.0, experts_s=3.0, halves_s=1.6)
    assert [parts.bound_equal(workers) for workers in (0, 1, 2)] == [1.0, 1.6, 2.0]
    assert parts.bound_real == pytest.approx(4 / 2.6)


@pytest.mark.parametrize(
    "flags",
    [
        ["--concurrency", "0"],
        ["--concurrency", "1,200"],
        ["--workers", "17"],
        ["--workers", "x"],
        ["--set", "fanout.when"],
        ["--set", "fanout.nothing=1"],
        ["--set", "compute.slowdown=2"],
        ["--model", "nobody"],
    ],
)
def test_wrong_flags_are_refused_before_anything_is_started(capsys, tmp_path, flags):
    assert run_command(["bench", "fanout", *flags, "--data-dir", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize("verb", ["net", "fetch", "model", "fanout"])
@pytest.mark.parametrize(("name", "value"), [("SLOWDOWN", "10"), ("ANSWER_DELAY_S", "0.02")])
def test_an_emulated_device_reports_no_real_speed(capsys, tmp_path, monkeypatch, verb, name, value):
    monkeypatch.setenv(f"KVASIR_COMPUTE__{name}", value)
    assert run_command(["bench", verb, "--data-dir", str(tmp_path)]) == 2
    assert "emulates another one" in capsys.readouterr().err
