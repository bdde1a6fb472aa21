"""js-libp2p in Node.js against one of our hosts: what a web page's worker will speak."""

import json
from pathlib import Path

import pytest
import trio

SCRIPT = Path(__file__).parent / "js" / "interop.mjs"
ECHOED_BYTES = 4 * 1024 * 1024


async def echo(stream):
    while chunk := await stream.read():
        await stream.write(chunk)


@pytest.mark.parametrize("ending", ["", "/ws"])
async def test_js_pings_identifies_and_exchanges_4_mb(phone_packages, open_hosts, ending):
    async with open_hosts(1) as (ours,):
        ours.set_handler("/test/echo/1", echo)
        (address,) = [each for each in ours.addresses() if f"/tcp/{each.split('/')[4]}{ending}/p2p/" in each]
        # Node.js has WebSocket from version 22 on, and behind this flag in version 20.
        command = ["node", "--experimental-websocket", "--input-type=module", "-", address, str(ECHOED_BYTES)]
        with trio.fail_after(60):
            done = await trio.run_process(
                command,
                cwd=phone_packages,
                stdin=SCRIPT.read_bytes(),
                capture_stdout=True,
                capture_stderr=True,
                check=False,
            )
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
