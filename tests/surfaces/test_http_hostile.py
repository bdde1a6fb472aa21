"""Clients that stop reading, never stop writing, send half a request or speak something else."""

from __future__ import annotations

import json

import pytest
import trio
from surfaces_helpers import CHAT, FakeLife, serve, settings_with, until

from kvasir_node.surfaces.exchange import SEND_TIMEOUT_S
from kvasir_node.surfaces.fake_node import FakeNode
from kvasir_node.surfaces.http import BODY_TIMEOUT_S, build_app
from kvasir_node.surfaces.phone_door import PhoneDoor
from kvasir_node.surfaces.phone_page import PhonePage
from kvasir_node.surfaces.sse import HEARTBEAT

PULL_PATH = "/kvasir/v1/pull"
BODY = json.dumps({"model": "demo", "stream": True, "messages": [{"role": "user", "content": "x"}]}).encode()


async def connect(url: str) -> trio.SocketStream:
    return await trio.open_tcp_stream("127.0.0.1", int(url.rsplit(":", 1)[1]))


def head(path: str, *lines: str) -> bytes:
    lines = (f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", *lines, "", "")
    return "\r\n".join(lines).encode()


async def test_a_client_that_stops_reading_holds_no_slot_and_does_not_stop_the_end():
    node = FakeNode(settings_with(coordinator__slots=1), pieces=["x" * 1_000_000] * 30)
    async with serve(node, grace_s=0.2) as served:
        stream = await connect(served.url)
        await stream.send_all(head(CHAT, f"content-length: {len(BODY)}") + BODY)
        assert b"200" in await stream.receive_some(1000)
        await until(lambda: node.requests and node.busy == 0)  # 30 MB are computed, hardly any of it was read
        assert node.left_early_count == 0
        started_at = trio.current_time()
    assert trio.current_time() - started_at < 2.0
    await stream.aclose()


async def test_an_endless_upload_gets_its_answer_and_is_cut():
    async with serve(FakeNode(settings_with())) as served:
        stream = await connect(served.url)
        await stream.send_all(head("/nope", "transfer-encoding: chunked"))

        async def upload() -> None:
            while True:
                await stream.send_all(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")

        async with trio.open_nursery() as nursery:

            async def upload_until_cut() -> None:
                with pytest.raises(trio.BrokenResourceError):
                    await upload()

            nursery.start_soon(upload_until_cut)
        await stream.aclose()
        assert (await served.client.get("/health")).status_code == 200


async def test_those_who_read_get_everything_beside_those_who_do_not():
    """Answers are larger than what the system buffers, so the others are stuck; the end does not wait for them."""
    node = FakeNode(settings_with(coordinator__slots=12), pieces=["x" * 400_000] * 20)
    lengths: list[int] = []

    async def read_all(url: str) -> None:
        length = 0
        async with await connect(url) as stream:
            await stream.send_all(head(CHAT, "connection: close", f"content-length: {len(BODY)}") + BODY)
            async for part in stream:
                length += len(part)
        lengths.append(length)

    async with serve(node, grace_s=0.2) as served:
        stuck = [await connect(served.url) for _ in range(6)]
        for stream in stuck:
            await stream.send_all(head(CHAT, f"content-length: {len(BODY)}") + BODY)
        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(read_all, served.url)
        assert (await served.client.get("/kvasir/v1/status")).status_code == 200
        await until(lambda: node.busy == 0)
        ended_at = trio.current_time()
    assert trio.current_time() - ended_at < 5.0
    assert len(lengths) == 6
    assert min(lengths) > 20 * 400_000
    for stream in stuck:
        await stream.aclose()


PULL = json.dumps({"model": "demo"}).encode()


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize(("path", "body"), [(CHAT, BODY), (CHAT, BODY.replace(b"true", b"false")), (PULL_PATH, PULL)])
async def test_a_connection_that_is_to_be_closed_is_closed_after_the_answer(path, body, version):
    async with serve(FakeNode(settings_with())) as served, await connect(served.url) as stream:
        asked = head(path, "connection: close", f"content-length: {len(body)}").replace(
            b"HTTP/1.1", b"HTTP/" + version.encode()
        )
        await stream.send_all(asked + body)
        answer = b""
        with trio.fail_after(5):
            async for part in stream:
                answer += part
    assert answer.startswith(b"HTTP/1.1 200")
    assert (b"data: [DONE]" in answer) == (body == BODY)


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("http://localhost/v1/models", "evil.example", 200),
        ("HTTP://127.0.0.1:1/v1/models?a=b", "localhost", 200),
        ("http://[::1]/%76%31/models", "localhost", 200),
        ("http://localhost", "localhost", 200),
        ("http://evil.example/v1/models", "localhost", 403),
        ("http://localhost@evil.example/v1/models", "localhost", 403),
        ("ftp://localhost/v1/models", "localhost", 404),
        ("http://localhost/nope", "localhost", 404),
    ],
)
async def test_a_target_that_is_a_whole_url_is_taken_and_its_host_counts(target, host, status):
    async with serve(FakeNode(settings_with())) as served, await connect(served.url) as stream:
        await stream.send_all(f"GET {target} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode())
        answer = b""
        with trio.fail_after(5):
            async for part in stream:
                answer += part
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())


GARBAGE = [b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"GET /" + b"x" * 70_000, b"\r\n" * 9]


@pytest.mark.parametrize("garbage", GARBAGE)
async def test_what_is_no_http_harms_nobody(garbage):
    async with serve(FakeNode(settings_with())) as served:
        stream = await connect(served.url)
        await stream.send_all(garbage)
        await stream.send_eof()
        with trio.move_on_after(2):
            while await stream.receive_some(10_000):
                pass
        assert (await served.client.get("/health")).status_code == 200
        await stream.aclose()


async def test_websockets_are_refused():
    async with serve(FakeNode(settings_with())) as served:
        headers = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
        headers["sec-websocket-key"] = "dGhlIHNhbXBsZSBub25jZQ=="
        response = await served.client.get("/v1/models", headers=headers)
    assert response.status_code == 403


class Asgi:
    """One exchange without sockets, for virtual time: the body's parts, and what was sent back."""

    def __init__(self, node: FakeNode, *parts: bytes, path: str = CHAT) -> None:
        self.app, self.path = build_app(node, FakeLife(PhoneDoor(PhonePage(), None))), path
        self.parts = list(parts)
        self.sent: list[tuple[float, bytes]] = []
        self.status = 0
        self.reads = True

    async def run(self) -> None:
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": self.path, "headers": headers, "query_string": b""}
        await self.app(scope, self.receive, self.send)

    async def receive(self):
        if not self.parts:
            await trio.sleep_forever()
        body = self.parts.pop(0)
        return {"type": "http.request", "body": body, "more_body": body != self.END}

    async def send(self, message):
        await trio.lowlevel.checkpoint()
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif not self.reads:
            await trio.sleep_forever()
        else:
            self.sent.append((trio.current_time(), message["body"]))

    END = b""


async def test_half_a_body_is_awaited_for_a_while_only(autojump_clock):
    exchange = Asgi(FakeNode(settings_with()), BODY[:10])
    await exchange.run()
    assert exchange.status == 408
    assert BODY_TIMEOUT_S <= trio.current_time() < BODY_TIMEOUT_S + 5


async def test_a_stalled_send_is_given_up(autojump_clock):
    node = FakeNode(settings_with(), pieces=["x"] * 5, piece_s=1)
    exchange = Asgi(node, BODY, Asgi.END)
    exchange.reads = False
    await exchange.run()
    assert (node.busy, node.left_early_count) == (0, 0)
    assert trio.current_time() == pytest.approx(SEND_TIMEOUT_S, abs=1)


async def test_a_comment_comes_at_once_and_every_heartbeat(autojump_clock):
    node = FakeNode(settings_with(api__heartbeat_s=10), pieces=["late"], piece_s=35)
    exchange = Asgi(node, BODY, Asgi.END)
    await exchange.run()
    beats = [round(at - exchange.sent[0][0]) for at, body in exchange.sent if body == HEARTBEAT]
    assert beats == [0, 10, 20, 30]
    assert exchange.sent[-2][1].endswith(b"data: [DONE]\n\n")
