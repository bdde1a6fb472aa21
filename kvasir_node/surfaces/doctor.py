"""`doctor`: what may be wrong with this machine and its node, in words, with what to do about each.

It does not repair anything. What only a running node knows (how it is reached, whose clock differs) is read from its
status; the rest is looked at here, so that it also helps when no node starts.
"""

from __future__ import annotations

import errno
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from kvasir_node import __version__
from kvasir_node.base.settings import GIB, Settings, data_dir_of
from kvasir_node.surfaces.words import clean, counted, size_text

Document = Mapping[str, Any]
OK, WARN, FAIL = "ok", "warn", "fail"
DISK_LEAST_BYTES = GIB  # below it nothing can be fetched
DISK_FEW_BYTES = 8 * GIB
_FAULTS_OF_A_PORT = {errno.EADDRINUSE: "another program has it", errno.EACCES: "this user may not take it"}
_NO_NODE = "no node runs here, so this is not known"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at. `remedy` is empty when there is nothing to do."""

    name: str
    level: str
    says: str
    remedy: str = ""


def examine(settings: Settings, status: Document | None, peers: Document | None) -> tuple[Check, ...]:
    """All checks; `status` and `peers` are those of the running node, None when none runs. Blocks for some seconds."""
    is_running, data_dir = status is not None, data_dir_of(settings)
    return (
        Check("version", OK, f"kvasir-node {__version__}, Python {sys.version.split()[0]}"),
        _disk(data_dir, _free_bytes(data_dir)),
        _memory(settings),
        _kernels(),
        *_ports(settings, is_running),
        *(_without_node() if status is None else _of_node(status, peers or {})),
    )


def _free_bytes(data_dir: Path) -> int:
    nearest = next(path for path in (data_dir, *data_dir.absolute().parents) if path.exists())
    return shutil.disk_usage(nearest).free


def _disk(data_dir: Path, free_bytes: int) -> Check:
    says = f"{size_text(free_bytes)} free for {data_dir}"
    if free_bytes < DISK_LEAST_BYTES:
        return Check("disk", FAIL, says, "free some, or give the node another place with --data-dir")
    if free_bytes < DISK_FEW_BYTES:
        return Check("disk", WARN, says, "lower store.quota_bytes, or give the node another place with --data-dir")
    return Check("disk", OK, says)


def _memory(settings: Settings) -> Check:
    free_bytes, wanted_bytes = psutil.virtual_memory().available, settings.worker.memory_bytes
    says = f"{size_text(free_bytes)} free"
    if "worker" in settings.node.roles and wanted_bytes > free_bytes:
        text = f"{says}, and a worker may take {size_text(wanted_bytes)}"
        return Check("memory", WARN, text, "lower worker.memory_bytes (--memory), or close other programs")
    return Check("memory", OK, says)


def _kernels() -> Check:
    from kvasir_node.model.kernels.library import is_able

    if is_able():
        return Check("kernels", OK, "this processor runs the compiled kernels")
    remedy = "nothing has to be done: torch computes instead, slower; processors since about 2015 run them"
    return Check("kernels", WARN, "this processor does not run the compiled kernels", remedy)


def _ports(settings: Settings, is_running: bool) -> Iterator[Check]:
    if is_running:
        yield Check("ports", OK, "the running node has them")
        return
    from kvasir_node.net.listen_address import parse_listen_address
    from kvasir_node.surfaces.address import parse_address

    for address in settings.network.listen:
        yield _port(*parse_listen_address(address), remedy="choose another with --listen /ip4/0.0.0.0/tcp/PORT")
    if settings.api.listen:
        api = parse_address(settings.api.listen)
        yield _port(api.host, api.port, remedy="choose another with --api HOST:PORT")


def _port(host: str, port: int, *, remedy: str) -> Check:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            why = _FAULTS_OF_A_PORT.get(error.errno or 0, error.strerror or str(error))
            return Check("port", FAIL, f"{host} port {port} cannot be listened on: {why}", remedy)
    return Check("port", OK, f"{host} port {port} is free")


def _without_node() -> Iterator[Check]:
    for name in ("clock", "reachability", "hubs"):
        yield Check(name, WARN, _NO_NODE, "start one with `kvasir-node up`, and ask again")


def _of_node(status: Document, peers: Document) -> Iterator[Check]:
    """The node's own warnings too, but for those that a check tells of."""
    warnings = [clean(str(each)) for each in status.get("warnings") or ()]
    yield _clock([each for each in warnings if "clock skew" in each])
    yield _reachability(status.get("net") or {})
    yield _hubs(status, peers)
    for warning in warnings:
        if "clock skew" not in warning:
            yield Check("node", WARN, warning, "see `kvasir-node status`")


def _clock(skews: list[str]) -> Check:
    if not skews:
        return Check("clock", OK, "no hub has a clock far from this one's")
    remedy = "set the clock: switch on time synchronisation (NTP) here, and at the hub if others see the same of it"
    return Check("clock", FAIL, "; ".join(skews), remedy)


def _reachability(net: Document) -> Check:
    """Who can connect to this node, and how those do who cannot."""
    reach, nat = str(net.get("reachability", "unknown")), str(net.get("nat", "unknown"))
    relays = len(net.get("relays") or ())
    behind = {"none": "", "unknown": ""}.get(nat, f", behind a {clean(nat)} NAT")
    through = f"; {counted(relays, 'hub')} {'relays' if relays == 1 else 'relay'} for it" if relays else ""
    says = f"reachability {clean(reach)}{behind}{through}"
    forward = (
        "forward the port of network.listen (TCP) to this machine in the router, if others should reach it directly"
    )
    if reach == "private" and not relays:
        return Check("reachability", FAIL, says, f"join a hub that relays (network.relay); or {forward}")
    if reach == "private" and nat == "symmetric":
        remedy = f"such a NAT lets no direct connection be made, so all goes through relays, slower; {forward}"
        return Check("reachability", WARN, says, remedy)
    if reach == "unknown":
        return Check(
            "reachability", WARN, says, "no hub outside has tried to reach this node yet; ask again in a minute"
        )
    return Check("reachability", OK, says)


def _hubs(status: Document, peers: Document) -> Check:
    others = [member for member in peers.get("members") or () if "hub" in member.get("roles", ())]
    is_hub = status.get("hub") is not None
    says = "this node is a hub" if is_hub else ""
    if others:
        says = f"{says}{', and ' if is_hub else ''}{counted(len(others), 'hub')} connected"
    if is_hub or others:
        return Check("hubs", OK, says)
    return Check("hubs", FAIL, "no hub is connected", "join a swarm with --join TICKET, or start with --role hub too")


def doctor_text(checks: tuple[Check, ...]) -> str:
    lines: list[str] = []
    for check in checks:
        lines.append(f"{check.level:<5}{check.name:<14}{check.says}")
        if check.remedy:
            lines.append(f"{'':<19}→ {check.remedy}")
    return "\n".join(lines)


def doctor_document(checks: tuple[Check, ...]) -> dict[str, Any]:
    return {"schema": "kvasir.doctor/1", "checks": [asdict(check) for check in checks]}
