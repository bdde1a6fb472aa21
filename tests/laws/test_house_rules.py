"""Rules that no linter of ours knows: where the environment is read, and how large a module may be."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import kvasir_node

ROOT = Path(kvasir_node.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_is_short_and_reads_no_environment(module):
    source = module.read_text()
    assert source.count("\n") <= 600
    if module != ROOT / "base" / "settings.py":
        assert not re.search(r"os\.(environ|getenv)", source)


def test_the_environment_is_read_at_all():
    assert "os.environ" in (ROOT / "base" / "settings.py").read_text()
