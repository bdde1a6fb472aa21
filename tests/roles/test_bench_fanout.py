"""`bench fanout` with real processes at the smallest size: what it measures, and that nothing stays behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvasir_node.base.errors import BugError, Unreachable
from kvasir_node.model.bench_checkpoint import make_checkpoint
from kvasir_node.roles import bench_nodes
from kvasir_node.roles.bench_fanout import _proven
from kvasir_node.roles.bench_nodes import open_node, pinned
from kvasir_node.roles.bench_parts import open_parts
from kvasir_node.roles.library import demo_folder

CORES = sorted(os.sched_getaffinity(0))
PROMPTS = [tuple(range(number, number + 32)) for number in (1, 50, 100, 150)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "T"
    make_checkpoint("T", folder, demo_folder())
    return folder


def test_a_burst_times_one_request_among_many_and_lets_go_of_the_others(tmp_path, checkpoint, monkeypatch):
    settings = {"coordinator.slots": 4, "coordinator.context": 512, "node.threads": 1}
    flags = [str(checkpoint), "--role", "coordinator,hub"]
    with open_node(tmp_path, "main", *flags, cores=CORES[:1], settings=settings) as node:
        assert os.sched_getaffinity(node._process.pid) == set(CORES[:1])
        answers = node.answers(PROMPTS, 8)
        assert len(answers) == 4
        assert {reason for _, reason in answers} <= {"length", "stop"}
        burst = node.burst(PROMPTS, 8)
        assert burst.tokens_per_s == pytest.approx(4 / burst.token_s)
        assert (burst.remote_pairs, burst.fallbacks) == (0, 0)
        status = node.status()
        assert status["slots"]["busy"] == 0
        assert status["throughput"]["tokens_total"] > 4 * 8 + 3 * 8
        with pytest.raises(Unreachable, match="refused"):
            node.answers([()], 8)
        monkeypatch.setattr(bench_nodes, "SPARE_STEPS", -17)
        with pytest.raises(BugError, match="ended before"):
            node.burst(PROMPTS, 10)
    assert node._process.returncode == 0


def test_a_node_that_does_not_start_says_why(tmp_path):
    with (
        open_node(tmp_path, "main", "--role", "emperor", cores=CORES[:1], settings={}) as node,
        pytest.raises(Unreachable, match=r"main did not start.*emperor"),
    ):
        node.await_ready()


def test_parts_of_a_step_are_measured_in_two_processes(tmp_path, checkpoint):
    with open_parts(checkpoint, tmp_path, "auto", (CORES[:1], CORES[-1:])) as bench:
        for count in (1, 4):
            step = bench.step(count, 0.02)
            assert step.trunk_s > 0
            assert step.experts_s > 0
            assert step.halves_s > 0


def test_cores_are_given_back():
    before = os.sched_getaffinity(0)
    with pinned(CORES[:1]):
        assert os.sched_getaffinity(0) == set(CORES[:1])
    assert os.sched_getaffinity(0) == before
    with pinned([100_000]):  # not a core of this machine
        assert os.sched_getaffinity(0) == before


def test_only_proven_copies_count_and_none_beyond_those_wanted():
    rows = [{"proven": 3}, {"proven": 1}, {"proven": 0}]
    assert _proven({"hub": {"demand": rows}, "model": {"slices": 4}}, 2) == (3, 8)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_the_whole_benchmark_at_the_smallest_size(tmp_path, checkpoint):
    command = [sys.executable, "-m", "kvasir_node", "--data-dir", str(tmp_path), "bench", "fanout", "--json"]
    command += ["--model", str(checkpoint), "--seconds", "5", "--concurrency", "1,16", "--workers", "0,1,2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    document = json.loads(done.stdout)
    assert document["schema"] == "kvasir.bench.fanout/1"
    assert document["same_tokens"], done.stderr
    assert document["proven_ratio"] == 1
    assert [each["concurrency"] for each in document["real"]] == [1, 16]
    assert any(each["workers"] == 1 for each in document["emulated"])
    assert Path(document["png"]).read_bytes().startswith(b"\x89PNG")
    assert not list((tmp_path / "cache" / "bench").glob("fanout-*/"))
