"""The page for phones: its files and nothing else, and the invitation to it."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial

import httpx
import pytest
import trio
from surfaces_helpers import serve, settings_with

from kvasir_node.base.errors import UsageError
from kvasir_node.surfaces.address import Address, parse_address
from kvasir_node.surfaces.fake_node import FakeNode
from kvasir_node.surfaces.invitation import invite_lines
from kvasir_node.surfaces.listener import bound_address, open_listeners, url_of
from kvasir_node.surfaces.phone_door import PhoneDoor
from kvasir_node.surfaces.phone_page import CONNECTIONS_MAX, CSP, NOT_BUILT, PhonePage, serve_page

SCRIPT = b"export const one = 1\n" * 100


@pytest.fixture
def built(tmp_path) -> PhonePage:
    folder = tmp_path / "dist"
    folder.mkdir()
    (folder / "index.html").write_bytes(b"<!doctype html><title>lend</title>")
    (folder / "page.js").write_bytes(SCRIPT)
    (folder / "experts.wasm").write_bytes(b"\0asm")
    (folder / ".hidden").write_bytes(b"secret")
    (tmp_path / "outside.txt").write_bytes(b"secret")
    (folder / "linked").symlink_to(tmp_path)
    return PhonePage(folder)


@asynccontextmanager
async def page_port(page: PhonePage):
    """A client of a port that serves the page and nothing else."""
    stop = trio.Event()
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            listeners = await open_listeners(Address("127.0.0.1", 0))
            nursery.start_soon(partial(serve_page, page, listeners, stop=stop, grace_s=0.1))
            async with httpx.AsyncClient(base_url=url_of(listeners), timeout=20, trust_env=False) as client:
                yield client
            stop.set()


async def test_the_page_and_its_files_are_served_with_a_strict_policy(built):
    async with page_port(built) as client:
        page = await client.get("/phone")
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert page.headers["content-security-policy"] == CSP
        assert "unsafe-inline" not in CSP
        assert page.headers["referrer-policy"] == "no-referrer"
        script = await client.get("/phone/page.js")
        assert (script.content, script.headers["content-type"]) == (SCRIPT, "text/javascript; charset=utf-8")
        assert script.headers["content-encoding"] == "gzip"
        assert (await client.get("/phone/experts.wasm")).headers["content-type"] == "application/wasm"
        plain = await client.get("/phone/page.js", headers={"accept-encoding": "identity"})
        assert (plain.content, "content-encoding" in plain.headers) == (SCRIPT, False)
        again = await client.get("/phone/page.js", headers={"if-none-match": script.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/phone/",
        "/phone/nothing.js",
        "/phone/.hidden",
        "/phone/../outside.txt",
        "/phone/%2e%2e/outside.txt",
        "/phone/..%2foutside.txt",
        "/phone/linked/outside.txt",
        "/phone/linked",
        "/phone//etc/passwd",
        "/phone/page.js%00.html",
        "/kvasir/v1/status",
        "/kvasir/v1/phone",
        "/v1/models",
    ],
)
async def test_nothing_else_is_served(built, path):
    async with page_port(built) as client:
        response = await client.get(path)
        assert response.status_code == 404
        assert "error" in response.json()
        assert b"secret" not in response.content
        assert (await client.get("/phone")).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
async def test_only_reading_is_allowed(built, method):
    async with page_port(built) as client:
        assert (await client.request(method, "/phone", content=b"x" * 1000)).status_code == 405
        assert (await client.get("/phone")).status_code == 200


async def test_the_page_may_be_asked_for_by_a_whole_url(built):
    async with page_port(built) as client:
        answer = await client.get("/", extensions={"target": b"http://phone.example/phone/page.js"})
    assert (answer.status_code, answer.content) == (200, SCRIPT)


async def test_connections_to_the_page_are_bounded(built):
    async with page_port(built) as client:
        url = client.base_url
        idle = [await trio.open_tcp_stream(url.host, url.port) for _ in range(CONNECTIONS_MAX)]
        with pytest.raises(httpx.HTTPError):
            await client.get("/phone")
        for stream in idle:
            await stream.aclose()
        with trio.fail_after(10):
            while True:
                try:
                    assert (await client.get("/phone")).status_code == 200
                    break
                except httpx.HTTPError:  # the closed ones are not all noticed yet
                    await trio.sleep(0.02)


async def test_a_page_that_is_not_built_says_so(tmp_path):
    async with page_port(PhonePage(tmp_path / "nowhere")) as client:
        for path in ("/phone", "/phone/page.js"):
            response = await client.get(path)
            assert (response.status_code, response.json()["error"]["message"]) == (404, NOT_BUILT)


async def test_the_api_s_port_serves_the_page_too_without_its_key(built):
    node = FakeNode(settings_with(api__key="sesame"))
    async with serve(node, page=built) as served:
        assert (await served.client.get("/phone")).status_code == 200
        assert (await served.client.get("/phone/page.js")).content == SCRIPT
        for path in ("/phonebook", "/kvasir/v1/phone"):
            assert (await served.client.get(path)).status_code == 401
        assert (await served.client.post("/kvasir/v1/phone")).status_code == 401
        headers = {"authorization": "Bearer sesame"}
        assert (await served.client.post("/kvasir/v1/phone", headers=headers)).status_code == 200


async def test_a_page_of_elsewhere_cannot_have_a_loopback_node_invite(built):
    async with serve(FakeNode(settings_with()), page=built) as served:
        refused = await served.client.post("/kvasir/v1/phone", headers={"origin": "https://evil.example"})
        assert (refused.status_code, served.node.invited) == (403, 0)


async def test_an_invitation_is_made_by_the_api(built):
    async with serve(FakeNode(settings_with()), page=built) as served:
        response = await served.client.post("/kvasir/v1/phone")
        assert response.headers["cache-control"] == "no-store"
        document = response.json()
        assert document["schema"] == "kvasir.phone/1"
        assert document["url"] == f"{served.url}/phone#kvasirp1fake1"
        assert (document["expires_s"], len(document["warnings"])) == (600.0, 1)
        document = (await served.client.post("/kvasir/v1/phone", json={"expires_s": 60})).json()
        assert document["expires_s"] == 60


@pytest.mark.parametrize("body", [{"expires_s": "60"}, {"expires_s": True}, {"expires_s": -1}, {"expires": 60}])
async def test_an_invitation_that_cannot_be_names_the_field(built, body):
    async with serve(FakeNode(settings_with()), page=built) as served:
        response = await served.client.post("/kvasir/v1/phone", json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "expires_s")
        assert served.node.invited == 0


async def test_a_port_that_is_taken_is_told_with_its_flag():
    listeners = await open_listeners(Address("127.0.0.1", 0))
    with pytest.raises(UsageError, match=r"the page of --phone cannot listen on .*; .* another --phone HOST:PORT"):
        await open_listeners(bound_address(listeners), "--phone")
    for listener in listeners:
        await listener.aclose()
    with pytest.raises(UsageError, match=r"--phone \(phone.listen\) is HOST:PORT"):
        parse_address("9482", "phone.listen")


def test_the_url_is_one_that_a_phone_reaches(built, tmp_path):
    node = FakeNode()

    def url(listen, page=built):
        return PhoneDoor(page, listen and parse_address(listen)).invite(node)

    assert url("0.0.0.0:9482")["url"].startswith("http://192.0.2.7:9482/phone#kvasirp1")
    assert url("0.0.0.0:9482")["warnings"] == []
    assert url("[2001:db8::1]:9482")["url"].startswith("http://[2001:db8::1]:9482/phone#")
    assert "phone.listen" in url("127.0.0.1:9480")["warnings"][0]
    assert url("0.0.0.0:9482", PhonePage(tmp_path / "nowhere"))["warnings"] == [NOT_BUILT]
    node.invite_is_local = True
    assert "network.listen" in url("0.0.0.0:9482")["warnings"][0]
    assert len(url("127.0.0.1:9480")["warnings"]) == 1
    with pytest.raises(UsageError, match="serves no page for phones"):
        url(None)


def test_an_invitation_is_shown_with_a_code_that_fits_into_a_terminal():
    document = {"url": "http://192.168.100.100:9482/phone#kvasirp1" + "a" * 230, "expires_s": 600.0, "warnings": []}
    *code, url, words = invite_lines(document, qr=True)
    assert url == document["url"]
    assert "within 10 minutes" in words
    assert 20 < len(code) < 40
    assert max(map(len, code)) < 80
    assert invite_lines(document, qr=False) == [url, words]
