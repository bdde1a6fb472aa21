"""What `doctor` looks at on this machine, whether a node runs or not: versions, room, processor, ports, blocks.

It does not know a node's status, and repairs nothing, except that a damaged block which was fetched is deleted when it
is met: it is fetched again when it is needed.
"""

from __future__ import annotations

import errno
import random
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path

import psutil

from kvasir_node import __version__
from kvasir_node.base.errors import KvasirError
from kvasir_node.base.settings import GIB, Settings, data_dir_of
from kvasir_node.surfaces.words import clean, counted, size_text

OK, WARN, FAIL = "ok", "warn", "fail"
DISK_LEAST_BYTES = GIB  # below it nothing can be fetched
DISK_FEW_BYTES = 8 * GIB
SAMPLE_BLOCKS = 16  # of fetched blocks, and of each model; at most 1 MiB each
SAMPLE_MODELS = 8
_FAULTS_OF_A_PORT = {errno.EADDRINUSE: "another program has it", errno.EACCES: "this user may not take it"}
_LIBRARIES = ("torch", "transformers", "libp2p", "trio")


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at. `remedy` is empty when there is nothing to do."""

    name: str
    level: str
    says: str
    remedy: str = ""


def examine_machine(settings: Settings, *, is_running: bool) -> Iterator[Check]:
    """Blocks for some seconds; `is_running`: a node has the ports."""
    data_dir = data_dir_of(settings)
    yield _versions()
    yield disk_check(data_dir, _free_bytes(data_dir))
    yield _memory(settings)
    yield _torch(settings)
    yield _kernels()
    yield from _ports(settings, is_running)
    yield _blocks(settings)


def _versions() -> Check:
    found: list[str] = []
    missing: list[str] = []
    for name in _LIBRARIES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    says = f"kvasir-node {__version__}, Python {sys.version.split()[0]}, {', '.join(found)}"
    if missing:
        return Check(
            "version", FAIL, f"{says}; not installed: {', '.join(missing)}", "install kvasir-node anew with pip"
        )
    return Check("version", OK, says)


def _torch(settings: Settings) -> Check:
    """The device that would compute, and on how many threads."""
    import torch

    wanted, cores = settings.node.device, psutil.cpu_count() or 1
    threads = settings.node.threads or max(1, cores // 2)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted
    says = f"{device}, {counted(threads, 'thread')} of {counted(cores, 'logical processor')}"
    if device.startswith("cuda") and not torch.cuda.is_available():
        remedy = "set node.device to auto or cpu, or install a torch that fits this machine's GPU and driver"
        return Check("torch", FAIL, f"{says}; torch sees no GPU here", remedy)
    if threads > cores:
        return Check("torch", WARN, says, "lower node.threads: more than there are processors only wait for each other")
    return Check("torch", OK, says)


def _free_bytes(data_dir: Path) -> int:
    nearest = next(path for path in (data_dir, *data_dir.absolute().parents) if path.exists())
    return shutil.disk_usage(nearest).free


def disk_check(data_dir: Path, free_bytes: int) -> Check:
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


def _blocks(settings: Settings) -> Check:
    """Some of what lies on the disk is compared with its content address, each time some other."""
    from kvasir_node.roles.library import open_library

    nothing = Check("blocks", OK, "nothing has been fetched or added yet")
    if not data_dir_of(settings).exists():
        return nothing
    looked, damaged, chance = 0, [], random.Random()
    try:
        store, catalog = open_library(settings)
        own = [cid for cid, _ in store.own()]
        for cid in chance.sample(own, min(SAMPLE_BLOCKS, len(own))):
            looked += 1
            damaged += [] if store.check_own(cid) else ["a fetched block"]
        for entry in islice(catalog.list(), SAMPLE_MODELS):
            index = catalog.index(entry) if entry.path is not None else {}
            for cid in chance.sample(list(index), min(SAMPLE_BLOCKS, len(index))):
                looked += 1
                store.map(cid, index[cid])
                damaged += [] if store.check_mapped(cid) else [entry.name]
    except KvasirError as error:
        return Check("blocks", FAIL, clean(str(error)), "see what `kvasir-node verify` says")
    if damaged:
        says = (
            f"{len(damaged)} of {looked} blocks looked at are damaged: {clean(', '.join(dict.fromkeys(damaged)), 200)}"
        )
        return Check("blocks", FAIL, says, "run `kvasir-node verify`, which fetches them again; look after the disk")
    if not looked:
        return nothing
    return Check("blocks", OK, f"{counted(looked, 'block')} looked at, all as their addresses promise")
