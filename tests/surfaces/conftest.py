"""What the tests of commands share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvasir_node.surfaces import cli


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """Runs one command in this process: (exit code, stdout, stderr)."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    for name in [name for name in os.environ if name.startswith("KVASIR_")]:
        monkeypatch.delenv(name)

    def run_it(*arguments: str) -> tuple[int, str, str]:
        code = cli.run_command(arguments)
        out, err = capsys.readouterr()
        return code, out, err

    return run_it
