"""The page in a real browser: it shows the node, follows it, streams a chat, asks for a key, and breaks no policy."""

from __future__ import annotations

from dataclasses import replace

import pytest
from headless_chromium import CHROMIUM, Page, open_page
from surfaces_helpers import serve, settings_with

from kvasir_node.base.events import LoadChanged
from kvasir_node.surfaces.fake_node import FakeNode, busy_snapshot, fake_snapshot

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")
pytestmark = [pytest.mark.soak, needs_chromium]  # installing Chromium takes longer than CI has for it

EVIL = "<img src=x onerror=document.title='owned'><script>document.title='owned'</script>"


def shows(text: str) -> str:
    return f"document.body.innerText.includes({text!r})"


async def no_harm(page: Page, url: str) -> None:
    """Nothing was asked of another place, and neither policy nor script complained."""
    assert all(address.startswith(f"{url}/") for address in page.asked), page.asked
    assert page.said == []


async def test_the_whole_page(tmp_path):
    node = FakeNode(settings_with(), piece_s=2.0)
    node.status = replace(busy_snapshot(), name=EVIL, warnings=(EVIL,))
    node.status = replace(
        node.status, workers=tuple(replace(each, name=EVIL, reason=EVIL) for each in node.status.workers)
    )
    async with serve(node) as served, open_page(tmp_path, f"{served.url}/") as page:
        await _shows_the_node(page)
        await _follows_it(page, node)
        await _chats(page, node)
        await _fits_a_phone_and_keeps_its_contrast(page)
        assert await page.value("document.title") != "owned"
        await no_harm(page, served.url)


async def _shows_the_node(page: Page) -> None:
    await page.until(shows("SERVING demo"))
    for text in ("coordinator, hub, worker", "! suspect", "+ proven", "61.4", "1 copy", EVIL, "6 layers of 16 experts"):
        await page.until(shows(text))
    for hidden in ("forget", "key-dialog"):
        assert await page.value(f"getComputedStyle(document.getElementById('{hidden}')).display") == "none"


async def _follows_it(page: Page, node: FakeNode) -> None:
    node.status = replace(node.status, warnings=(), model=None)
    await page.until(shows("NOT SERVING"))
    assert not await page.value(shows("Ask the model"))
    node.status = replace(node.status, model=fake_snapshot().model)
    node.events.add(LoadChanged("saturated", 4, 9))
    await page.until(shows("saturated: 4 busy, 9 waiting"))
    await page.click("#lend")
    await page.until(shows("Resume lending"))
    await page.click("#lend")
    await page.until(shows("Pause lending"))


async def _chats(page: Page, node: FakeNode) -> None:
    await page.type("#prompt", EVIL)
    await page.click("#send")
    answer = "document.querySelector('#turns .assistant .text').textContent"
    await page.until(f"{answer}.startsWith('It is') && !{answer}.includes('acknowledged')")  # as it comes
    node.piece_s = 0.0
    await page.until(shows("It is a truth universally acknowledged"))
    await page.until("/3 tokens in [0-9.]+ s/.test(document.querySelector('#turns .assistant .told').textContent)")
    assert node.requests[-1].messages == ({"role": "user", "content": EVIL},)
    node.piece_s = 30.0
    await page.type("#prompt", "again")
    await page.click("#send")
    await page.until("document.getElementById('stop').disabled === false")
    await page.click("#stop")
    await page.until(shows("Stopped."))
    await page.until("document.getElementById('send').disabled === false")
    node.piece_s = 0.0
    await page.click("#clear")
    assert await page.value("document.getElementById('turns').childElementCount") == 0


OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
CONTRAST = """(() => {
  const parsed = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (rgb) => rgb.slice(0, 3).map((part) => part / 255)
    .map((part) => part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
    .reduce((sum, part, at) => sum + part * [0.2126, 0.7152, 0.0722][at], 0);
  const ground = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const colour = parsed(getComputedStyle(each).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const low = [];
  for (const element of document.querySelectorAll('body *')) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || !element.offsetParent || element.disabled) continue;
    const [a, b] = [light(parsed(getComputedStyle(element).color)), light(ground(element))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const named = `${element.tagName}.${element.className} ${element.textContent.slice(0, 30)}`;
    if (contrast < 4.5) low.push(`${named}: ${contrast.toFixed(2)}`);
  }
  return low;
})()"""


async def _fits_a_phone_and_keeps_its_contrast(page: Page) -> None:
    for dark in (False, True):
        await page.look_like(390, 844, phone=True, dark=dark)
        assert await page.value(OVERFLOW) == 0
        assert await page.value(CONTRAST) == []
    await page.look_like(1280, 800)
    assert await page.value(OVERFLOW) == 0


async def test_a_key_is_asked_for_and_kept_in_the_tab_alone(tmp_path):
    node = FakeNode(settings_with(**{"api.key": "s3cret"}))
    async with serve(node) as served, open_page(tmp_path, f"{served.url}/") as page:
        await page.until("document.getElementById('key-dialog').open")
        await page.type("#key", "wrong")
        await page.click("#key-form button")
        await page.until(shows("That key was refused"))
        await page.type("#key", "s3cret")
        await page.click("#key-form button")
        await page.until(shows("SERVING demo"))
        assert not any("s3cret" in address for address in page.asked)
        assert await page.value("document.cookie + JSON.stringify(localStorage)") == "{}"
        assert await page.value("document.documentElement.outerHTML.includes('s3cret')") is False
        await page.do("Page.reload")
        await page.until(shows("SERVING demo"))
        assert await page.value("document.getElementById('key-dialog').open") is False
        await page.click("#forget")
        await page.until("document.getElementById('key-dialog').open")
        assert all("401" in said for said in page.said), page.said  # refusals are told on the console, and nothing else


async def test_a_node_that_goes_away_is_told_and_found_again(tmp_path):
    node = FakeNode(settings_with())
    async with serve(node, grace_s=0.1) as served, open_page(tmp_path, f"{served.url}/") as page:
        await page.until(shows("SERVING demo"))
        await page.do(
            "Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0
        )
        await page.until(shows("NO ANSWER"))
        await page.do(
            "Network.emulateNetworkConditions", offline=False, latency=0, downloadThroughput=-1, uploadThroughput=-1
        )
        await page.until(shows("SERVING demo"))
