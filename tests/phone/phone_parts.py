"""Parts of the page, called from Python: one Node.js process for all tests of a module (harness.ts)."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BUNDLE_TIMEOUT_S = 60


class PartError(Exception):
    """What a part of the page raised."""

    def __init__(self, name: str, reason: str, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.name, self.reason = name, reason


class Parts:
    def __init__(self, popen: subprocess.Popen[str]) -> None:
        self._popen = popen

    def __call__(self, name: str, *given: Any) -> Any:
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._popen.stdin.write(json.dumps([name, *given]) + "\n")
        self._popen.stdin.flush()
        answer = json.loads(self._popen.stdout.readline())
        if "error" in answer:
            raise PartError(answer["error"], answer["reason"], answer["message"])
        return answer["result"]


@contextmanager
def open_parts(phone: Path, folder: Path) -> Iterator[Parts]:
    """`phone` has the packages; the bundle goes to `folder`."""
    bundle(phone, HERE / "harness.ts", folder / "harness.mjs")
    command = ["node", "--experimental-wasm-relaxed-simd", folder / "harness.mjs"]  # browsers have it without a flag
    popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Parts(popen)
    finally:
        for stream in (popen.stdin, popen.stdout):
            if stream is not None:
                stream.close()
        popen.wait(10)


def bundle(phone: Path, source: Path, target: Path) -> None:
    """Source and all it imports in one file for Node.js."""
    command = [phone / "node_modules" / ".bin" / "esbuild", source, "--bundle", "--format=esm", "--platform=node"]
    command += ["--target=node20", "--loader:.wasm=binary", f"--outfile={target}", "--log-level=warning"]
    require = "import { createRequire } from 'node:module'; const require = createRequire(import.meta.url);"
    command.append(f"--banner:js={require}")
    environment = {**os.environ, "NODE_PATH": str(phone / "node_modules")}  # for what lies outside of `phone`
    subprocess.run(command, check=True, timeout=BUNDLE_TIMEOUT_S, env=environment)
