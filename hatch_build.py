"""Builds the page for phones while the package is built: npm's pinned packages, then one esbuild run.

The wheel carries the bundle (`kvasir_node/phone/dist`), the repository does not. Nothing here may fail an installation:
where Node.js or npm is missing, or the packages cannot be had, it says "phone page not built: …", and all else works.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NPM_TIMEOUT_S = {"editable": 60, "standard": 600}  # 16 s with nothing cached, 8 s else (2 cores)
BUNDLE_TIMEOUT_S = 60
NODE_VERSION_MIN = 18


class PhonePageHook(BuildHookInterface):
    """`hatch` finds it by its base class."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        phone = Path(self.root) / "kvasir_node" / "phone"
        try:
            _build(phone, NPM_TIMEOUT_S.get(version, NPM_TIMEOUT_S["standard"]))
        except _NotBuilt as error:
            self.app.display_warning(f"phone page not built: {error}")
            return
        build_data["artifacts"].append("/kvasir_node/phone/dist/*")  # git ignores it


class _NotBuilt(Exception):
    """Why there is no page."""


def _build(phone: Path, npm_timeout_s: float) -> None:
    """Leaves the page in `phone`/dist. Raises _NotBuilt, and then nothing old is left there."""
    shutil.rmtree(phone / "dist", ignore_errors=True)
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        raise _NotBuilt("its build needs Node.js and npm")
    major = int(_output([node, "-p", "process.versions.node.split('.')[0]"], phone, BUNDLE_TIMEOUT_S))
    if major < NODE_VERSION_MIN:
        raise _NotBuilt(f"its build needs Node.js {NODE_VERSION_MIN} or later; this is {major}")
    installed, wanted = phone / "node_modules" / ".package-lock.json", phone / "package-lock.json"
    if not installed.exists() or installed.stat().st_mtime < wanted.stat().st_mtime:
        command = [npm, "ci", "--omit=dev", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
        _output(command, phone, npm_timeout_s)
    _output([node, "build.mjs"], phone, BUNDLE_TIMEOUT_S)


def _output(command: list[str], folder: Path, timeout_s: float) -> str:
    words = " ".join(Path(part).name for part in command[:2])
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise _NotBuilt(f"{words} took more than {timeout_s:.0f} s") from error
    except OSError as error:
        raise _NotBuilt(f"{words} cannot be run: {error}") from error
    if done.returncode:
        raise _NotBuilt(f"{words} ended with {done.returncode}: {(done.stderr or done.stdout).strip()[-300:]}")
    return done.stdout
