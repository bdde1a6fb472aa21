"""What a shell offers after Tab."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvasir_node.base.ids import ModelId
from kvasir_node.store.blocks import BlockStore
from kvasir_node.store.catalog import Catalog
from kvasir_node.surfaces.completion import complete_role, complete_setting

MODEL = ModelId("bafyreib4h7zs3jzyyqjyl3wjz2cmsxdcsdyqwgbqxcakk7h6mmr6xf4ldq")


def test_settings_are_completed_by_key_and_then_by_value():
    assert complete_setting("coordinator.s") == ["coordinator.slots=", "coordinator.saturated_after_s="]
    assert complete_setting("fanout.when=") == ["fanout.when=saturated", "fanout.when=always", "fanout.when=forced"]
    assert complete_setting("fanout.enabled=t") == ["fanout.enabled=true"]
    assert complete_setting("coordinator.slots=") == complete_setting("nope.x=") == []


def test_roles_are_completed_in_a_comma_list_once_each():
    assert complete_role("") == ["coordinator", "hub", "worker"]
    assert complete_role("hub,w") == ["hub,worker"]
    assert complete_role("hub,h") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_each_shell_is_shown(shell, run, monkeypatch):
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    code, out, _ = run("--show-completion", shell)
    assert (code, f"_COMPLETE=complete_{shell}" in out) == (0, True)


def test_a_model_that_was_added_is_offered_after_tab(tmp_path):
    """The whole way, as a shell goes it."""
    Catalog(tmp_path, BlockStore(tmp_path), lambda *_: pytest.fail("nothing is indexed")).note_fetched(MODEL, "mine")
    words = f"kvasir-node --data-dir {tmp_path} up "
    asking = {"_KVASIR_NODE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": "4"}
    done = subprocess.run(
        [sys.executable, Path(sys.executable).with_name("kvasir-node")],
        env={**os.environ, **asking},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.stdout.split(), done.stderr) == (["demo", "mine"], "")
