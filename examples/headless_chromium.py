"""A headless Chromium, driven by its DevTools protocol over a WebSocket: as much of it as examples and tests of pages
need. It does not know what a page shows."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from base64 import b64decode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import trio
from trio_websocket import WebSocketConnection, open_websocket_url

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)
PORT_FILE = "DevToolsActivePort"
START_S = 60.0
MESSAGE_BYTES_MAX = 32 << 20  # a picture of a long page


class Page:
    """One tab. `said` is what its console and its exceptions said; `asked` are the addresses that it asked; `process`
    is its browser."""

    def __init__(self, connection: WebSocketConnection, process: subprocess.Popen[bytes]) -> None:
        self._connection = connection
        self.process = process
        self._numbers = count(1)
        self._answers: dict[int, trio.MemorySendChannel[dict[str, Any]]] = {}
        self.said: list[str] = []
        self.asked: list[str] = []

    async def run(self) -> None:
        while True:
            message = json.loads(await self._connection.get_message())
            if "id" in message:
                await self._answers.pop(message["id"]).send(message)
            else:
                self._note(message["method"], message["params"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.said.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Log.entryAdded":
            self.said.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])

    async def do(self, method: str, **params: Any) -> dict[str, Any]:
        """One command, and what it returned."""
        number = next(self._numbers)
        sender, receiver = trio.open_memory_channel[dict[str, Any]](1)
        self._answers[number] = sender
        await self._connection.send_message(json.dumps({"id": number, "method": method, "params": params}))
        answer = await receiver.receive()
        assert "error" not in answer, answer
        return answer["result"]

    async def open(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.do(f"{domain}.enable")
        await self.do("Page.navigate", url=url)
        place = json.dumps(url.partition("#")[0])  # what is behind # the page may take away at once
        await self.until(f"document.readyState === 'complete' && location.href.split('#')[0] === {place}")

    async def value(self, expression: str) -> Any:
        """Of JavaScript; promises are waited for."""
        asked = {"expression": expression, "returnByValue": True, "awaitPromise": True, "userGesture": True}
        answer = await self.do("Runtime.evaluate", **asked)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, expression: str, timeout_s: float = 30.0) -> None:
        """Waits until JavaScript is true, in a document that has a body."""
        expression = f"Boolean(document.body) && ({expression})"
        with trio.move_on_after(timeout_s):
            while not await self.value(expression):  # noqa: ASYNC110
                await trio.sleep(0.05)
            return
        text = await self.value("document.body.innerText")
        raise AssertionError(f"never true: {expression}; the page said {self.said} and shows:\n{text}")

    async def type(self, selector: str, text: str) -> None:
        await self.value(f"document.querySelector({json.dumps(selector)}).focus()")
        await self.do("Input.insertText", text=text)

    async def click(self, selector: str) -> None:
        await self.value(f"document.querySelector({json.dumps(selector)}).click()")

    async def look_like(self, width: int, height: int, *, phone: bool = False, dark: bool = False) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 2 if phone else 1, "mobile": phone}
        await self.do("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.do("Emulation.setEmulatedMedia", features=[scheme])

    async def picture(self, whole: bool = False) -> bytes:
        """A PNG of what is seen, or of the whole page."""
        answer = await self.do("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return b64decode(answer["data"])


@asynccontextmanager
async def open_page(profile: Path, url: str) -> AsyncIterator[Page]:
    """A browser of its own with one page; `profile` is a folder for its data, empty the first time."""
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    environment = {**os.environ, "HOME": str(profile)}
    (profile / PORT_FILE).unlink(missing_ok=True)  # of a browser that had this profile before
    process = subprocess.Popen(  # noqa: ASYNC220
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
    )
    try:
        port = await _debugging_port(profile)
        address = await _address_of_tab(port)
        async with (
            open_websocket_url(address, max_message_size=MESSAGE_BYTES_MAX) as connection,
            trio.open_nursery() as nursery,
        ):
            page = Page(connection, process)
            nursery.start_soon(page.run)
            await page.open(url)
            yield page
            nursery.cancel_scope.cancel()
    finally:
        process.terminate()
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(process.wait)


async def _debugging_port(profile: Path) -> int:
    found = profile / PORT_FILE
    with trio.fail_after(START_S):
        while not (found.exists() and found.read_text().count("\n")):  # noqa: ASYNC110
            await trio.sleep(0.05)
    return int(found.read_text().split("\n")[0])


async def _address_of_tab(port: int) -> str:
    async with httpx.AsyncClient(trust_env=False) as client:
        with trio.fail_after(START_S):
            while True:
                targets = (await client.get(f"http://127.0.0.1:{port}/json")).json()
                pages = [target for target in targets if target["type"] == "page"]
                if pages:
                    return pages[0]["webSocketDebuggerUrl"]
                await trio.sleep(0.05)
