"""What tests of several folders share: the npm packages of the page for phones."""

import shutil
import subprocess
from pathlib import Path

import pytest

import kvasir_node

PHONE = Path(kvasir_node.__file__).parent / "phone"
INSTALL_TIMEOUT_S = 90


@pytest.fixture(scope="session")
def phone_packages():
    """The folder whose node_modules has the packages of its package-lock.json; skips where they cannot be had."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    installed, wanted = PHONE / "node_modules" / ".package-lock.json", PHONE / "package-lock.json"
    if not installed.exists() or installed.stat().st_mtime < wanted.stat().st_mtime:
        command = ["npm", "ci", "--omit=dev", "--ignore-scripts", "--no-audit", "--no-fund"]
        try:
            done = subprocess.run(command, cwd=PHONE, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pytest.skip(f"npm ci took more than {INSTALL_TIMEOUT_S} s")
        if done.returncode:
            pytest.skip(f"npm ci did not work: {done.stderr[-300:]}")
    return PHONE
