"""Asks a home router to let connections in to one port: a UPnP Internet Gateway Device (IGD), over SSDP and SOAP.

It does not know when that is wanted, nor whether it worked: a router says much. What answers is believed as little as
any stranger. It must be on a network of ours and speak only of itself, answers are short and have a time limit, and XML
with a document type (entities) is not read. The C library that libp2p brings (miniupnpc 2.3.3) hangs for as long as a
router sends a byte a second, and keeps whatever is sent: 400 MB in a trial.

Sources: UPnP Device Architecture 1.1, sections 1.3 and 3.1; WANIPConnection:1 and :2, AddPortMapping.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urljoin, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

import h11
import trio

from kvasir_node.base.errors import CapacityError, Misbehaved, RejectReason, Unreachable

SSDP_GROUP = ("239.255.255.250", 1900)
SEARCH_S = 2.0  # all routers have answered by then ...
MORE_S = 0.2  # ... and those that may be better so soon after the first
ANSWER_S = 3.0  # one answer over HTTP, from the first byte to the last
ANSWER_BYTES_MAX = 64 * 1024
GATEWAYS_MAX = 4  # looked at; a home has one
DATAGRAM_BYTES_MAX = 2048
RECEIVE_BYTES = 16 * 1024
_DEVICES = tuple(f"urn:schemas-upnp-org:device:InternetGatewayDevice:{version}" for version in (1, 2))
_SERVICES = tuple(
    f"urn:schemas-upnp-org:service:{name}" for name in ("WANIPConnection:2", "WANIPConnection:1", "WANPPPConnection:1")
)
_OK = 200
_CONFLICT, _ONLY_PERMANENT = 718, 725
_Answer = tuple[int, bytes]  # HTTP status, body

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Gateway:
    """A router that maps ports. `own_host` is our address in its network."""

    control_url: str
    service: str
    own_host: str


class PortTaken(CapacityError):
    """The router has this outside port for somebody else."""


async def find_gateway(own_hosts: Sequence[str], group: tuple[str, int] = SSDP_GROUP) -> Gateway:
    """The first router that answers and maps ports, in the networks where we have these IPv4 addresses.

    Raises Unreachable when there is none. Cancel-safety: nothing is left.
    """
    faults: list[str] = []
    for location, own_host in await _search(own_hosts, group):
        try:
            return _read_description(await _get(location), location, own_host)
        except (Unreachable, Misbehaved) as error:
            faults.append(str(error))
            _log.debug("no use can be made of %s: %s", location, error)
    raise Unreachable(f"a router answered, but {faults[0]}" if faults else "no router offers to map ports (UPnP)")


async def external_ip(gateway: Gateway) -> str:
    """The router's own outside address. Raises Unreachable, Misbehaved."""
    said = (await _call(gateway, "GetExternalIPAddress", {})).get("NewExternalIPAddress", "")
    try:
        return str(ipaddress.IPv4Address(said))
    except ValueError:
        raise Misbehaved(RejectReason.BAD_MESSAGE, f"its outside address is {said[:60]!r}; expected an IPv4") from None


async def add_mapping(gateway: Gateway, outside_port: int, port: int, lease_s: int) -> None:
    """TCP to the router's `outside_port` comes to our `port`, for `lease_s` or, with old routers, until it is deleted.

    Raises PortTaken, Unreachable, Misbehaved.
    """
    arguments = {
        "NewRemoteHost": "",
        "NewExternalPort": outside_port,
        "NewProtocol": "TCP",
        "NewInternalPort": port,
        "NewInternalClient": gateway.own_host,
        "NewEnabled": 1,
        "NewPortMappingDescription": "kvasir-node",
        "NewLeaseDuration": lease_s,
    }
    try:
        await _call(gateway, "AddPortMapping", arguments)
    except _Refused as error:
        if error.code == _CONFLICT:
            raise PortTaken(f"the router has port {outside_port} for another machine") from error
        if error.code != _ONLY_PERMANENT or not lease_s:
            raise
        await add_mapping(gateway, outside_port, port, 0)


async def delete_mapping(gateway: Gateway, outside_port: int) -> None:
    """Raises Unreachable, Misbehaved."""
    arguments = {"NewRemoteHost": "", "NewExternalPort": outside_port, "NewProtocol": "TCP"}
    await _call(gateway, "DeletePortMapping", arguments)


# --- SSDP ---


async def _search(own_hosts: Sequence[str], group: tuple[str, int]) -> list[tuple[str, str]]:
    """(URL of a description, our address towards it) of each that answered, in the order of their answers."""
    found: dict[str, str] = {}

    async def ask(own_host: str) -> None:
        with trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 2)
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(own_host))
            await sock.bind((own_host, 0))
            for device in _DEVICES:
                await sock.sendto(_search_message(device, group), group)
            while len(found) < GATEWAYS_MAX:
                data, (host, *_) = await sock.recvfrom(DATAGRAM_BYTES_MAX)
                if (location := _location(data, host)) is not None:
                    found.setdefault(location, own_host)
                    waiting.deadline = min(waiting.deadline, trio.current_time() + MORE_S)

    async def ask_quietly(own_host: str) -> None:
        try:
            await ask(own_host)
        except OSError as error:
            _log.debug("no search for a router from %s: %s", own_host, error)

    with trio.move_on_after(SEARCH_S) as waiting:
        async with trio.open_nursery() as nursery:
            for own_host in own_hosts:
                nursery.start_soon(ask_quietly, own_host)
    return list(found.items())[:GATEWAYS_MAX]


def _search_message(device: str, group: tuple[str, int]) -> bytes:
    lines = ("M-SEARCH * HTTP/1.1", f"HOST: {group[0]}:{group[1]}", 'MAN: "ssdp:discover"', "MX: 1", f"ST: {device}")
    return "\r\n".join([*lines, "", ""]).encode("ascii")


def _location(data: bytes, sender: str) -> str | None:
    """The URL that an answer names; None unless it is at the machine that answered."""
    status, *lines = data.decode("latin-1").split("\r\n")
    if not status.startswith("HTTP/1.1 200"):
        return None
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    location = headers.get("location", "")
    return location if _is_at(location, sender) else None


def _is_at(url: str, host: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme == "http" and parts.hostname == host and parts.port != 0
    except ValueError:
        return False


# --- descriptions and calls ---


def _read_description(data: bytes, location: str, own_host: str) -> Gateway:
    root = _parse(data)
    base = _text(root, "URLBase") or location
    services = {_text(each, "serviceType"): _text(each, "controlURL") for each in _all(root, "service")}
    for service in _SERVICES:
        if control := services.get(service):
            url = urljoin(base, control)
            if not _is_at(url, urlsplit(location).hostname or ""):
                raise Misbehaved(RejectReason.BAD_MESSAGE, f"it sends us elsewhere, to {url[:80]!r}")
            return Gateway(url, service, own_host)
    raise Unreachable("it maps no ports")


class _Refused(Unreachable):
    def __init__(self, action: str, code: int, words: str) -> None:
        super().__init__(f"the router refuses {action}: error {code} {words}")
        self.code = code


async def _call(gateway: Gateway, action: str, arguments: Mapping[str, object]) -> dict[str, str]:
    """What the router answers, by name."""
    inner = "".join(f"<{name}>{escape(str(value))}</{name}>" for name, value in arguments.items())
    body = (
        '<?xml version="1.0"?><s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/" '
        's:encodingStyle="http://schemas.xmlsoap.org/soap/encoding/"><s:Body>'
        f'<u:{action} xmlns:u="{gateway.service}">{inner}</u:{action}></s:Body></s:Envelope>'
    )
    headers = {"SOAPAction": f'"{gateway.service}#{action}"', "Content-Type": 'text/xml; charset="utf-8"'}
    status, data = await _answer("POST", gateway.control_url, body.encode(), headers)
    root = _parse(data)
    if status != _OK:
        code = _text(root, "errorCode")
        words = "".join(filter(str.isprintable, _text(root, "errorDescription")))[:60]
        raise _Refused(action, int(code) if code.isdecimal() and len(code) < 6 else 0, words)
    return {_name(each): (each.text or "").strip() for each in root.iter()}


async def _get(url: str) -> bytes:
    status, data = await _answer("GET", url)
    if status != _OK:
        raise Unreachable(f"its description cannot be had: HTTP status {status}")
    return data


async def _answer(method: str, url: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> _Answer:
    """One request, bounded in bytes and time. Raises Unreachable, Misbehaved. Cancel-safety: nothing is left open."""
    parts = urlsplit(url)
    target = f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
    told = {"Host": parts.netloc, "Content-Length": str(len(body)), "Connection": "close", **(headers or {})}
    try:
        with trio.fail_after(ANSWER_S):
            async with await trio.open_tcp_stream(parts.hostname or "", parts.port or 80) as stream:
                connection = h11.Connection(h11.CLIENT)
                request = h11.Request(method=method, target=target, headers=list(told.items()))
                events = (request, h11.Data(data=body), h11.EndOfMessage())
                await stream.send_all(b"".join(connection.send(event) or b"" for event in events))
                return await _read_answer(connection, stream)
    except trio.TooSlowError as error:
        raise Unreachable(f"it did not answer in {ANSWER_S:g} s") from error
    except (h11.ProtocolError, OSError, trio.BrokenResourceError) as error:
        raise Unreachable(f"it does not answer: {str(error) or type(error).__name__}") from error


async def _read_answer(connection: h11.Connection, stream: trio.SocketStream) -> _Answer:
    status, data = 0, bytearray()
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await stream.receive_some(RECEIVE_BYTES))
        elif isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data):
            data += event.data
            if len(data) > ANSWER_BYTES_MAX:
                raise Misbehaved(RejectReason.TOO_LARGE, f"it answers with more than {ANSWER_BYTES_MAX} bytes")
        elif not isinstance(event, h11.InformationalResponse):
            return status, bytes(data)


class _Builder(ElementTree.TreeBuilder):
    def doctype(self, name: str, public: str | None, system: str | None) -> None:
        """Called before anything in it is read, whatever the encoding."""
        raise Misbehaved(RejectReason.BAD_MESSAGE, "it answers with a document type, which is not read")


def _parse(data: bytes) -> ElementTree.Element:
    try:
        return ElementTree.fromstring(data, ElementTree.XMLParser(target=_Builder()))
    except (ElementTree.ParseError, ValueError, LookupError) as error:  # the latter two of odd encodings
        raise Misbehaved(RejectReason.BAD_MESSAGE, f"its answer is not XML: {error}") from error


def _name(element: ElementTree.Element) -> str:
    """Without the namespace, in which routers differ."""
    return element.tag.rpartition("}")[2] if isinstance(element.tag, str) else ""


def _all(root: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [each for each in root.iter() if _name(each) == name]


def _text(root: ElementTree.Element, name: str) -> str:
    return next(((each.text or "").strip() for each in _all(root, name)), "")
