"""A real router with a real UPnP daemon: miniupnpd in the NAT lab. For root only; run it with -m soak."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from nat_nodes import lab_node
from natlab import Lab, open_lab, why_not
from test_nat import echoes

from kvasir_node.decide.reach import Reachability

REASON = why_not() or ("" if shutil.which("miniupnpd") else "needs miniupnpd (package miniupnpd-nftables)")
pytestmark = [pytest.mark.soak, pytest.mark.skipif(bool(REASON), reason=REASON)]
_CHAINS = """
table inet upnp {
  chain forward {}
  chain post {}
  chain pre {}
  chain enters { type nat hook prerouting priority dstnat - 1; jump pre; }
}
"""
_CONFIG = """
ext_ifname=wan
listening_ip=lan
http_port=5555
upnp_table_name=upnp
upnp_nat_table_name=upnp
upnp_forward_chain=forward
upnp_nat_chain=pre
upnp_nat_postrouting_chain=post
min_lifetime=60
max_lifetime=86400
secure_mode=yes
allow 1024-65535 192.168.0.0/16 1024-65535
"""


@contextmanager
def daemon(lab: Lab, folder: Path, *options: str) -> Iterator[None]:
    """miniupnpd on the router of home A, until the block ends."""
    lab.shell("natA", f"nft -f - <<'RULES'\n{_CHAINS}\nRULES")
    config = folder / "miniupnpd.conf"
    config.write_text(_CONFIG)
    pid_file = folder / "miniupnpd.pid"
    command = ["miniupnpd", "-d", "-f", str(config), "-P", str(pid_file), "-4", *options]
    with (folder / "miniupnpd.log").open("w") as log:
        process = subprocess.Popen(lab.command("natA", command), stdout=log, stderr=log)
        try:
            time.sleep(0.5)
            yield
        finally:
            process.terminate()
            process.wait()


def mapped(lab: Lab) -> str:
    return lab.shell("natA", "nft list chain inet upnp pre")


def test_a_port_that_the_router_lets_in_is_found_to_work_and_told_to_others(tmp_path):
    with ExitStack() as stack:
        lab = stack.enter_context(open_lab("cone", "symmetric"))
        # The lab's own block is for documentation, which the daemon takes for private: it is told another address.
        stack.enter_context(daemon(lab, tmp_path, "-o", "11.22.33.21"))
        known = []
        hub = stack.enter_context(lab_node(lab, "hub1", tmp_path, known, is_hub=True))
        bob = stack.enter_context(lab_node(lab, "hostB", tmp_path, known))
        with lab_node(lab, "hostA", tmp_path, known) as ann:
            for end in (ann, bob):
                end.connect(hub.addresses())
            ann.wait_until(lambda: ann.reaching.reachability is Reachability.PRIVATE)
            ann.wait_until(lambda: ann.reaching.reachability is Reachability.PUBLIC, 20)
            assert ann.reaching.upnp == ("mapped", "11.22.33.21 port 4001")
            ann.wait_until(lambda: ann.reaching.hairpin == "no")  # what the daemon maps is for what comes from outside
            assert ann.addresses()[0].startswith("/ip4/203.0.113.21/tcp/4001/p2p/")
            ann.wait_until(lambda: ann.reaching.relays == ())
            peer = bob.connect(ann.addresses())
            assert bob.path_to(peer) == "direct"  # from behind a NAT through which no hole can be punched
            echoes(bob, peer, b"let in" * 1000)
            assert "192.168.1.2" in mapped(lab)
        assert "192.168.1.2" not in mapped(lab)
