"""A home router that maps ports, on loopback: SSDP over UDP, SOAP over HTTP. `fault` makes it misbehave."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import trio

SERVICE = "urn:schemas-upnp-org:service:WANIPConnection:1"
_DEVICE = "urn:schemas-upnp-org:device:InternetGatewayDevice:1"
_DESCRIPTION = f"""<?xml version="1.0"?><root xmlns="urn:schemas-upnp-org:device-1-0"><device>
<deviceType>{_DEVICE}</deviceType><serviceList><service><serviceType>{SERVICE}</serviceType>
<controlURL>/control</controlURL></service></serviceList></device></root>"""
_BOMB = '<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a "aaaaaaaaaa">]><root>&a;</root>'
# What a hostile or broken router answers when its description is asked for.
DESCRIPTIONS = {
    "no xml": b"<root><service>",
    "entities": _BOMB.encode(),
    "entities in utf-16": _BOMB.replace("?><", ' encoding="utf-16"?><', 1).encode("utf-16"),
    "odd encoding": b'<?xml version="1.0" encoding="martian"?><root/>',
    "no ports": b"<root/>",
    "binary": bytes(range(256)) * 8,
    "elsewhere": _DESCRIPTION.replace(">/control<", ">http://192.0.2.1/control<").encode(),
    "no port": _DESCRIPTION.replace(">/control<", ">http://127.0.0.1:0/control<").encode(),
    "bad port": _DESCRIPTION.replace(">/control<", ">http://127.0.0.1:99999/control<").encode(),
}


@dataclass
class FakeGateway:
    """`mappings`: outside port -> (inside host, port, lease)."""

    outside: str = "198.51.100.7"
    fault: str = ""
    taken: tuple[int, ...] = ()
    only_permanent: bool = False
    mappings: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    ssdp_port: int = 0
    http_port: int = 0

    @property
    def group(self) -> tuple[str, int]:
        return "127.0.0.1", self.ssdp_port

    async def answer_searches(self, sock: trio.socket.SocketType) -> None:
        while True:
            data, sender = await sock.recvfrom(2048)
            assert data.startswith(b"M-SEARCH * HTTP/1.1\r\n")
            host = "192.0.2.1" if self.fault == "location elsewhere" else "127.0.0.1"
            location = f"http://{host}:{self.http_port}/description.xml"
            if self.fault == "no answer":
                continue
            if self.fault == "nonsense":
                await sock.sendto(b"\xff" * 2048, sender)
            if _DEVICE.encode() in data:
                text = f"HTTP/1.1 200 OK\r\nST: {_DEVICE}\r\nLOCATION: {location}\r\n\r\n"
                await sock.sendto(text.encode(), sender)

    async def serve(self, stream: trio.SocketStream) -> None:
        async with stream:
            request = b""
            while b"\r\n\r\n" not in request:
                if not (chunk := await stream.receive_some()):
                    return
                request += chunk
            head, _, body = request.partition(b"\r\n\r\n")
            length = re.search(rb"(?i)content-length: (\d+)", head)
            while length and len(body) < int(length[1]):
                body += await stream.receive_some()
            with suppress(trio.BrokenResourceError):  # it was hung up on, as those that send too much are
                await self._answer(stream, head, body.decode())

    async def _answer(self, stream: trio.SocketStream, head: bytes, body: str) -> None:
        if self.fault == "endless":
            await stream.send_all(b"HTTP/1.1 200 OK\r\n\r\n")
            while True:
                await stream.send_all(b"x" * 65_536)
        if self.fault == "slow":
            await stream.send_all(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            while True:
                await stream.send_all(b"x")
                await trio.sleep(0.1)
        if self.fault == "no http":
            await stream.send_all(b"SSH-2.0-OpenSSH\r\n\r\n")
            return
        status, content = 200, _DESCRIPTION.encode()
        if head.startswith(b"POST"):
            status, content = self._act(head, body)
        elif self.fault:
            content = DESCRIPTIONS.get(self.fault, content)
        await stream.send_all(b"HTTP/1.1 %d x\r\nContent-Length: %d\r\n\r\n%s" % (status, len(content), content))

    def _act(self, head: bytes, body: str) -> tuple[int, bytes]:
        named = re.search(rf'(?i)soapaction: "{re.escape(SERVICE)}#(\w+)"', head.decode())
        assert named is not None
        action = named[1]
        self.calls.append(action)
        said = dict(re.findall(r"<(New\w+)>([^<]*)</", body))
        if self.fault == "refuses":
            return _fault(606, "Action not authorized")
        if action == "GetExternalIPAddress":
            return _result(action, f"<NewExternalIPAddress>{self.outside}</NewExternalIPAddress>")
        port = int(said["NewExternalPort"])
        if action == "DeletePortMapping":
            return _result(action) if self.mappings.pop(port, None) else _fault(714, "NoSuchEntryInArray")
        lease_s = int(said["NewLeaseDuration"])
        if port in self.taken:
            return _fault(718, "ConflictInMappingEntry")
        if self.only_permanent and lease_s:
            return _fault(725, "OnlyPermanentLeasesSupported")
        self.mappings[port] = said["NewInternalClient"], int(said["NewInternalPort"]), lease_s
        return _result(action)


def _envelope(inner: str) -> bytes:
    start = '<?xml version="1.0"?><s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/"><s:Body>'
    return f"{start}{inner}</s:Body></s:Envelope>".encode()


def _result(action: str, inner: str = "") -> tuple[int, bytes]:
    return 200, _envelope(f'<u:{action}Response xmlns:u="{SERVICE}">{inner}</u:{action}Response>')


def _fault(code: int, words: str) -> tuple[int, bytes]:
    detail = f"<UPnPError><errorCode>{code}</errorCode><errorDescription>{words}</errorDescription></UPnPError>"
    return 500, _envelope(f"<s:Fault><detail>{detail}</detail></s:Fault>")


@asynccontextmanager
async def open_gateway(**options: object) -> AsyncIterator[FakeGateway]:
    gateway = FakeGateway(**options)  # type: ignore[arg-type]
    with trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM) as ssdp:
        await ssdp.bind(("127.0.0.1", 0))
        gateway.ssdp_port = ssdp.getsockname()[1]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(gateway.answer_searches, ssdp)
            (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
            gateway.http_port = listener.socket.getsockname()[1]
            nursery.start_soon(trio.serve_listeners, gateway.serve, [listener])
            yield gateway
            nursery.cancel_scope.cancel()
