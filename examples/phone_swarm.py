"""A phone in a swarm: a hub+coordinator, the page for phones in a headless Chromium as its only worker, and a burst.

    python examples/phone_swarm.py                # all of it, about three minutes
    python examples/phone_swarm.py --no-trouble   # the timeline alone

Prints what happens when, and exits 0 only if every phase happened, every answer equalled its solo run and no request
failed: saturated -> demand up -> leased -> fetched -> trial -> proven -> remote share -> calm -> drained. In between
the page gets into trouble: the browser is stopped for 15 s, loaded anew, killed and started again (neither may fetch
anything it has), and a second page lies from its first answer on.

The page is built by the package's installation where Node.js is (see kvasir_node/phone); Chromium is Debian's. As in
local_swarm.py the coordinator is an emulated device, `--slowdown` times slower than this machine; the page is not.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import struct
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import trio
from headless_chromium import CHROMIUM, Page, open_page
from local_swarm import PHASES, PROMPTS, Burst, Process, Timeline, ask, node, observe

from kvasir_node.surfaces.address import Address
from kvasir_node.surfaces.listener import open_listeners, url_of
from kvasir_node.surfaces.phone_page import DIST, NOT_BUILT, PhonePage, serve_page

FROZEN_S = 15.0
SERVES_AGAIN_S = 90.0
HONEST, CROOKED = struct.pack("<f", 1.6666665459e-1), struct.pack("<f", 0.9)  # of exp's polynomial in the page's kernel
LOOK = """({
  fetched: document.getElementById('fetched').textContent,
  state: document.getElementById('state').textContent,
  words: document.getElementById('words').textContent,
  identity: document.getElementById('identity').textContent,
  stages: [...document.querySelectorAll('#slices li')].map(item => item.dataset.stage),
})"""


class Phone:
    """A browser that shows the page. It may be closed and opened again, as with the same phone."""

    def __init__(self, main: Process, profile: Path, url: str) -> None:
        self._main, self._profile = main, profile
        self.url = url
        self.page: Page | None = None
        self.calls_before = 0

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        async with open_page(self._profile, self.url) as self.page:
            await self.page.until("document.getElementById('identity').textContent !== ''")
            yield
        self.page = None

    async def look(self) -> dict[str, Any]:
        assert self.page is not None
        return await self.page.value(LOOK)

    async def status(self) -> dict[str, Any]:
        """As of a worker that has an API, for `observe`."""
        shown = await self.look()
        held = [stage for stage in shown["stages"] if stage in ("trial", "serving")]
        fetched = float(shown["fetched"].split()[0].replace(",", "")) * 1e6
        state = shown["stages"][0] if shown["stages"] else "idle"
        return {"worker": {"bytes_fetched": fetched, "slices": held, "state": state}}

    async def seen_by_node(self) -> dict[str, Any]:
        """What the coordinator says of it; empty while it says nothing."""
        end = re.search(r"…(\w{8})", (await self.look())["identity"])
        workers = (await trio.to_thread.run_sync(self._main.status))["workers"]
        return next((each for each in workers if end is not None and each["peer_id"].endswith(end[1])), {})

    async def until_it_serves(self, timeout_s: float = SERVES_AGAIN_S) -> float:
        """Waits until the coordinator has used more of its answers than before; seconds that it took."""
        began_at = time.monotonic()
        with trio.move_on_after(timeout_s):
            while (await self.seen_by_node()).get("calls", 0) <= self.calls_before:  # noqa: ASYNC110
                await trio.sleep(0.1)
            return time.monotonic() - began_at
        raise SystemExit(f"the page did not serve within {timeout_s:g} s: {await self.look()}")

    async def mark(self) -> None:
        self.calls_before = (await self.seen_by_node()).get("calls", 0)

    def processes(self) -> list[psutil.Process]:
        assert self.page is not None
        browser = psutil.Process(self.page.process.pid)
        return [browser, *browser.children(recursive=True)]


def invitation(main: Process) -> str:
    answer = httpx.post(f"{main.ready['api']}/kvasir/v1/phone", timeout=10)
    answer.raise_for_status()
    return answer.json()["url"]


# Trouble ------------------------------------------------------------------------------------------------------------


async def freeze(phone: Phone, timeline: Timeline) -> None:
    """As when a phone's screen goes off: nothing of the browser runs, and nobody is told."""
    await phone.mark()
    processes = phone.processes()
    for process in processes:
        process.suspend()
    await trio.sleep(FROZEN_S)
    for process in processes:
        process.resume()
    took_s = await phone.until_it_serves()
    timeline.say(f"frozen for {FROZEN_S:g} s, and serves again {took_s:.1f} s later")


async def reload(phone: Phone, timeline: Timeline) -> None:
    await phone.mark()
    assert phone.page is not None
    await phone.page.do("Page.reload")
    await phone.page.until("document.getElementById('identity')?.textContent")
    took_s = await phone.until_it_serves()
    await expect_nothing_fetched(phone)
    timeline.say(f"loaded anew: serves {took_s:.1f} s later, nothing fetched")


async def expect_nothing_fetched(phone: Phone) -> None:
    shown = await phone.look()
    if not shown["fetched"].startswith("0.0 "):
        raise SystemExit(f"the page fetched again what it had: {shown}")


async def kill(phone: Phone) -> None:
    """Leaves `phone.opened` as a crash does."""
    await phone.mark()
    for process in phone.processes():
        process.kill()


async def lie(main: Process, folder: Path, timeline: Timeline, patience_s: float = 60.0) -> None:
    """The same page with other results, by a code of its own, until the coordinator has refused what it says."""
    crooked = folder / "crooked"
    shutil.copytree(DIST, crooked)
    for kernel in crooked.glob("*.wasm"):
        code = kernel.read_bytes()
        assert HONEST in code, "the kernel has other constants now"
        kernel.write_bytes(code.replace(HONEST, CROOKED))
    link = (await trio.to_thread.run_sync(invitation, main)).partition("#")[2]
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        listeners = await open_listeners(Address("127.0.0.1", 0))
        nursery.start_soon(partial(serve_page, PhonePage(crooked), listeners, stop=stop, grace_s=0.1))
        liar = Phone(main, folder / "liar", f"{url_of(listeners)}/phone#{link}")
        async with liar.opened():
            seen: dict[str, Any] = {}
            with trio.move_on_after(patience_s):
                while seen.get("failures", 0) < 2:
                    await trio.sleep(0.2)
                    seen = await liar.seen_by_node()
        stop.set()
    if seen.get("state") not in ("suspect", "banned") or seen.get("rows"):
        raise SystemExit(f"a page that lies is still used: {seen}")
    timeline.say(f"a page that lies is {seen['state']}: {seen['reason']}; rows of it that were used: {seen['rows']}")


# The run ------------------------------------------------------------------------------------------------------------


async def run(main: Process, folder: Path, options: argparse.Namespace) -> bool:
    timeline, url = Timeline(), main.ready["api"]
    async with httpx.AsyncClient() as client:
        solo = {p: (await ask(client, url, p, options.tokens))["choices"][0]["text"] for p in PROMPTS}
    before = await trio.to_thread.run_sync(main.status)
    phone = Phone(main, folder / "phone", await trio.to_thread.run_sync(invitation, main))
    burst = Burst(url, solo, options.tokens)

    async def watch_until(done: Callable[[], bool], timeout_s: float) -> None:
        with trio.move_on_after(timeout_s):
            while not done():
                status = await trio.to_thread.run_sync(main.status)
                observe(timeline, before, status, [await phone.status()])
                await trio.sleep(0.2)

    async def finish() -> None:
        burst.stop = True
        counts = f"{burst.answered} answers, {burst.remote_pairs} remote pairs, {len(burst.wrong)} wrong"
        timeline.say(f"burst over: {counts}")
        await watch_until(lambda: "drained" in timeline.seen, 90)

    async with trio.open_nursery() as nursery:
        async with phone.opened():
            timeline.say(f"{len(solo)} solo answers; the page has joined: {(await phone.look())['state']}")
            timeline.started_at = time.monotonic()
            for number in range(options.clients):
                nursery.start_soon(burst.client, number)
            await watch_until(lambda: "remote share" in timeline.seen, 60)
            until = time.monotonic() + options.seconds
            await watch_until(lambda: time.monotonic() > until, options.seconds + 1)
            if not options.trouble:
                await finish()
            else:
                await freeze(phone, timeline)
                await reload(phone, timeline)
                await lie(main, folder, timeline)
                await kill(phone)
        if options.trouble:
            phone.url = phone.url.partition("#")[0]
            async with phone.opened():
                took_s = await phone.until_it_serves()
                await expect_nothing_fetched(phone)
                timeline.say(f"killed and opened again without a code: serves {took_s:.1f} s later, nothing fetched")
                await finish()
    after = await trio.to_thread.run_sync(main.status)
    missing = [phase for phase in PHASES if phase not in timeline.seen]
    fanout = after["fanout"]
    print(f"phases missing: {missing or 'none'}; fallbacks {fanout['fallbacks']}, mismatches {fanout['mismatches']}")
    return not missing and not burst.wrong and not before["fanout"]["remote_pairs"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument(
        "--slowdown", type=float, default=40, help="how many times slower than this machine the node is"
    )
    parser.add_argument("--seconds", type=float, default=8, help="how long the burst goes on once work is shared")
    parser.add_argument("--no-trouble", dest="trouble", action="store_false", help="the timeline alone")
    options = parser.parse_args()
    if not PhonePage().is_built:
        raise SystemExit(NOT_BUILT)
    if CHROMIUM is None:
        raise SystemExit("no Chromium was found: apt-get install chromium")
    os.environ["KVASIR_COMPUTE__SLOWDOWN"] = str(options.slowdown)
    with tempfile.TemporaryDirectory(prefix="kvasir-phone-", ignore_cleanup_errors=True) as folder:
        root = Path(folder)
        with node(root, "coordinator", "--role", "coordinator,hub", "--phone", "127.0.0.1:0") as main_node:
            print(f"coordinator ready: {main_node.ready['model']['name']} at {main_node.ready['api']}", flush=True)
            passed = trio.run(run, main_node, root, options)
    print("PASSED" if passed else "FAILED")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
