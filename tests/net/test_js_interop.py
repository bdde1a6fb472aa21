"""js-libp2p in Node.js against one of our hosts: what a web page's worker will speak."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import trio

JS = Path(__file__).parent / "js"
ECHOED_BYTES = 4 * 1024 * 1024
INSTALL_TIMEOUT_S = 90


@pytest.fixture(scope="session")
def node_modules():
    """The packages of js/package-lock.json, installed once; skips where they cannot be."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    installed, wanted = JS / "node_modules" / ".package-lock.json", JS / "package-lock.json"
    if not installed.exists() or installed.stat().st_mtime < wanted.stat().st_mtime:
        command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        try:
            done = subprocess.run(command, cwd=JS, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pytest.skip(f"npm ci took more than {INSTALL_TIMEOUT_S} s")
        if done.returncode:
            pytest.skip(f"npm ci did not work: {done.stderr[-300:]}")


async def echo(stream):
    while chunk := await stream.read():
        await stream.write(chunk)


@pytest.mark.parametrize("ending", ["", "/ws"])
async def test_js_pings_identifies_and_exchanges_4_mb(node_modules, open_hosts, ending):
    async with open_hosts(1) as (ours,):
        ours.set_handler("/test/echo/1", echo)
        (address,) = [each for each in ours.addresses() if f"/tcp/{each.split('/')[4]}{ending}/p2p/" in each]
        # Node.js has WebSocket from version 22 on, and behind this flag in version 20.
        command = ["node", "--experimental-websocket", "interop.mjs", address, str(ECHOED_BYTES)]
        with trio.fail_after(60):
            done = await trio.run_process(command, cwd=JS, capture_stdout=True, capture_stderr=True, check=False)
        assert done.returncode == 0, done.stderr.decode()[-2000:]
        told = json.loads(done.stdout)
        assert told["peer"] == ours.peer_id
        assert told["muxer"] == "/yamux/1.0.0"
        assert told["pinged"]
        assert told["same"]
        assert "/test/echo/1" in told["protocols"]
        assert {each.removesuffix(f"/p2p/{ours.peer_id}") for each in told["listens"]} == {
            each.removesuffix(f"/p2p/{ours.peer_id}") for each in ours.addresses()
        }
