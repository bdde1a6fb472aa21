"""The page's files: whole, strict in what they may do, and open to who has no key, which the API is not."""

from __future__ import annotations

import re

import pytest
from surfaces_helpers import serve, settings_with

from kvasir_node.surfaces.fake_node import FakeNode, fake_snapshot
from kvasir_node.surfaces.page_routes import FOLDER
from kvasir_node.surfaces.verdict import verdict_of

FILES = sorted(path.name for path in FOLDER.iterdir())
HTML = (FOLDER / "index.html").read_text()


async def test_the_page_and_its_files_are_served_with_a_strict_policy():
    async with serve(FakeNode(settings_with())) as served:
        page = await served.client.get("/")
        assert page.text == HTML
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        for name in FILES:
            answer = await served.client.get(f"/page/{name}")
            assert answer.content == (FOLDER / name).read_bytes()
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert "http" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
        again = await served.client.get("/", headers={"if-none-match": page.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        for path in ("/page/", "/page/..%2Fhttp.py", "/page/page.py", "/page/page.js/x", "/index.html"):
            assert (await served.client.get(path)).status_code == 404
        assert (await served.client.post("/")).status_code == 405


async def test_the_page_needs_no_key_and_everything_else_does():
    async with serve(FakeNode(settings_with(**{"api.key": "secret"}))) as served:
        assert (await served.client.get("/")).status_code == 200
        assert (await served.client.get("/page/page.js")).status_code == 200
        for path in ("/kvasir/v1/status", "/v1/models", "/pages", "/page", "/nothing"):
            assert (await served.client.get(path)).status_code == 401


async def test_the_status_begins_with_the_verdict():
    async with serve(FakeNode(settings_with())) as served:
        headline = (await served.client.get("/kvasir/v1/status")).json()["headline"]
    assert headline == verdict_of(fake_snapshot(), None).to_json()
    assert headline["state"] == "SERVING demo"


@pytest.mark.parametrize("name", FILES)
def test_no_file_asks_another_place_for_anything_or_holds_script_inside_markup(name):
    text = (FOLDER / name).read_text()
    allowed = "http://www.w3.org/"  # a namespace, which nobody fetches
    assert not re.search(r"""https?://|["'(=]//""", text.replace(allowed, ""), re.IGNORECASE)
    if name.endswith(".html"):
        assert not re.search(r"\son[a-z]+=|\sstyle=|<style|<script(?![^>]*\ssrc=)", text)
    if name.endswith(".js"):
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|localStorage|cookie", text)


def test_every_file_and_element_that_is_named_is_there():
    named = set(re.findall(r'(?:href|src)="page/([^"]+)"', HTML))
    for name in FILES:
        if name.endswith(".js"):
            text = (FOLDER / name).read_text()
            named |= set(re.findall(r'from "\./([^"]+)"', text))
            ids = re.findall(r'\$\("([^"]+)"\)', text)
            assert all(f'id="{each}"' in HTML for each in ids), [each for each in ids if f'id="{each}"' not in HTML]
    assert named | {"index.html"} == set(FILES)


def test_every_field_has_a_label():
    for kind in ("input", "textarea", "meter"):
        for element in re.findall(rf"<{kind}[^>]*>", HTML):
            name = re.search(r'id="([^"]+)"', element)
            assert name
            assert f'for="{name[1]}"' in HTML or re.search(rf"<label>[^<]*{re.escape(element)}", HTML), element
