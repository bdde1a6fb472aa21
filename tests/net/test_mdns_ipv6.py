"""Two machines on a network without IPv4 find each other: two namespaces, for root only. Run it with -m soak."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from natlab import why_not

from kvasir_node.net.identity import key_from_seed, peer_id_of

REASON = why_not()
pytestmark = [pytest.mark.soak, pytest.mark.skipif(bool(REASON), reason=REASON)]
HUB, ANN = (peer_id_of(key_from_seed(name * 32)) for name in (b"h", b"a"))
SEARCH = """
import sys, trio
from kvasir_node.net.mdns import LanSearch
own, *announced = sys.argv[1:]
LISTENING = lambda: announced
trio.run(LanSearch("swarm", own, lambda peer, at: print(peer, *at, flush=True), LISTENING).run)
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def network() -> Iterator[tuple[str, str]]:
    """The names of two namespaces, fd00::1 and fd00::2, and nothing else between them."""
    names = (f"kv{os.getpid()}m1", f"kv{os.getpid()}m2")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("-n", names[0], "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for number, name in enumerate(names, 1):
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "addr", "add", f"fd00::{number}/64", "dev", "eth0", "nodad")
            ip("-n", name, "link", "set", "eth0", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def test_a_hub_is_found_without_ipv4():
    with ExitStack() as stack:
        first, second = stack.enter_context(network())

        def search(where: str, *arguments: str) -> subprocess.Popen[str]:
            command = ["ip", "netns", "exec", where, sys.executable, "-c", SEARCH, *arguments]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(process.terminate)
            return process

        search(first, HUB, "/ip6/fd00::1/tcp/9481")
        finding = search(second, ANN)
        assert finding.stdout is not None
        assert finding.stdout.readline() == f"{HUB} /ip6/fd00::1/tcp/9481/p2p/{HUB}\n"
