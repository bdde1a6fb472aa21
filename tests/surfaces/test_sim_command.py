"""The verb `sim`: what it prints, and what it refuses."""

from __future__ import annotations

import json

import pytest

from kvasir_node.sim.scenarios import SCENARIOS
from kvasir_node.surfaces.cli import run_command

SMALL = ["sim", "--nodes", "60", "--hours", "0.1"]


def test_a_document_that_a_replay_repeats(capsys):
    documents = []
    for which in ("--seed", "--replay"):
        assert run_command([*SMALL, which, "7", "--json"]) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        documents.append(json.loads(captured.out))
    for document in documents:
        assert document.pop("wall_s") > 0
    assert documents[0] == documents[1]
    assert documents[0]["schema"] == "kvasir.sim/1"
    assert (documents[0]["scenario"], documents[0]["seed"], documents[0]["nodes"]) == ("flash-crowd", 7, 60)


def test_a_timeline_and_figures_for_a_person(capsys):
    assert run_command([*SMALL, "--scenario", "churn"]) == 0
    out = capsys.readouterr().out
    assert "recruiting" in out
    assert "-- much is asked" in out
    assert "\nhub_messages_per_s " in out
    assert "kvasir.sim" not in out


def test_the_scenarios_are_listed(capsys):
    assert run_command(["sim", "--scenario", "list"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()] == list(SCENARIOS)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--scenario", "nothing"], "flash-crowd"),
        (["--nodes", "3"], "50 to"),
        (["--hours", "0"], "hours"),
        (["--seed", "1", "--replay", "2"], "exclude each other"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(capsys, arguments, words):
    assert run_command(["sim", *arguments]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""
