"""Two homes behind routers, and a public network between them, in network namespaces of this machine.

    pub: a bridge, 203.0.113.0/24 and 2001:db8::/64, which forwards nothing: what has no route there vanishes
      hub1 .10   hub2 .11   natA wan .21, lan 192.168.1.1   natB wan .22, lan 192.168.2.1
                            hostA 192.168.1.2               hostB 192.168.2.2
                            2001:db8:a::2                   2001:db8:b::2  (routed, behind a firewall, no NAT)

It does not know what runs in it. Routers drop what nobody inside asked for, and answer none of it. Kinds of NAT:
`cone` keeps the port; `remap` gives another one, the same to everybody; `symmetric` gives each connection a random one;
`forward` is a cone with TCP port 4001 forwarded to the host; `ipv6` is a firewall alone: the home has no IPv4.

Needs root and `nft`: `why_not()` says what is missing. Several labs can be up at once, each by its process id.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar

Result = TypeVar("Result")
CLONE_NEWNET = 0x40000000  # linux/sched.h
NAMESPACES = ("pub", "hub1", "hub2", "natA", "natB", "hostA", "hostB")
FORWARDED_PORT = 4001
HUB4, HUB6 = "203.0.113.10", "2001:db8::10"
SECOND_HUB4 = "203.0.113.11"
_MASQUERADE = {
    "cone": "masquerade",
    "forward": "masquerade",
    "ipv6": "drop",
    "remap": "meta l4proto { tcp, udp } masquerade to :20000-29999",
    "symmetric": "masquerade fully-random",
}


def why_not() -> str:
    """Why no lab can be built here; empty when one can."""
    if not sys.platform.startswith("linux"):
        return "the NAT lab needs Linux"
    if os.geteuid() != 0:
        return "the NAT lab needs root"
    missing = [tool for tool in ("ip", "nft") if shutil.which(tool) is None]
    if missing:
        return f"the NAT lab needs {' and '.join(missing)} (packages iproute2 and nftables)"
    probe = f"kv{os.getpid()}probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"the NAT lab cannot make a network namespace: {made.stderr.strip()}"
    try:
        rules = _in_namespace(probe, ["nft", "-f", "-"], _rules("remap", "192.168.9.2"))
        link = _run(["ip", "-n", probe, "link", "add", "v0", "type", "veth", "peer", "name", "v1"])
    finally:
        _run(["ip", "netns", "del", probe])
    refused = [done.stderr.strip()[:200] for done in (rules, link) if done.returncode]
    return f"the NAT lab is refused by this kernel: {refused[0]}" if refused else ""


def _run(command: Sequence[str], stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, input=stdin, capture_output=True, text=True)


def _in_namespace(namespace: str, command: Sequence[str], stdin: str = "") -> subprocess.CompletedProcess[str]:
    return _run(["ip", "netns", "exec", namespace, *command], stdin)


def _rules(kind: str, host: str) -> str:
    forwarded = (
        f"iifname wan tcp dport {FORWARDED_PORT} dnat ip to {host}:{FORWARDED_PORT}" if kind == "forward" else ""
    )
    return f"""
table inet fw {{
  chain input {{ type filter hook input priority 0; policy accept;
    meta l4proto icmpv6 accept
    iifname wan ct state established,related accept
    iifname wan drop
  }}
  chain forward {{ type filter hook forward priority 0; policy drop;
    ct state established,related accept
    iifname lan accept
    ct status dnat accept
  }}
}}
table ip nat {{
  chain pre {{ type nat hook prerouting priority dstnat;
    {forwarded}
  }}
  chain post {{ type nat hook postrouting priority srcnat;
    {"" if kind == "ipv6" else f"oifname wan {_MASQUERADE[kind]}"}
  }}
}}
"""


class Lab:
    """A lab that is up; made by `open_lab`."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def namespace(self, name: str) -> str:
        return f"{self._prefix}{name}"

    def command(self, name: str, command: Sequence[str]) -> list[str]:
        """The command line that runs a command in a namespace; the process is the command itself."""
        return ["ip", "netns", "exec", self.namespace(name), *command]

    def shell(self, name: str, script: str) -> str:
        done = _in_namespace(self.namespace(name), ["sh", "-ec", script])
        if done.returncode:
            raise RuntimeError(f"in {name}: {done.stderr.strip()}: {script}")
        return done.stdout

    def links(self, name: str, lines: Sequence[str]) -> None:
        done = _run(["ip", "-n", self.namespace(name), "-batch", "-"], "\n".join(lines))
        if done.returncode:
            raise RuntimeError(f"in {name}: {done.stderr.strip()}")

    def cut(self, name: str) -> None:
        """Nothing passes a router's outer side any more, without a word to anybody; `mend` ends that."""
        chain = "type filter hook prerouting priority -300; policy drop;"
        self.shell(name, _nft(f"table inet cut {{ chain lost {{ {chain} }}; }}"))

    def mend(self, name: str) -> None:
        self.shell(name, "nft delete table inet cut")


def _build(lab: Lab, kinds: dict[str, str], has_delay_line: bool) -> None:
    for name in NAMESPACES:
        made = _run(["ip", "netns", "add", lab.namespace(name)])
        if made.returncode:
            raise RuntimeError(made.stderr)
        # No duplicate address detection: an IPv6 address is usable at once.
        dad = "for c in all default; do echo 0 >/proc/sys/net/ipv6/conf/$c/accept_dad; done"
        forward = "echo 1 >/proc/sys/net/ipv4/ip_forward; echo 1 >/proc/sys/net/ipv6/conf/all/forwarding"
        lab.shell(name, f"{dad}; {forward}" if name.startswith("nat") else dad)
        lab.links(name, ["link set lo up"])
    public = ["link add br0 type bridge", "link set br0 up", "addr add 203.0.113.1/24 dev br0"]
    lab.links("pub", [*public, "addr add 2001:db8::1/64 dev br0 nodad"])
    for name, device, number in (("hub1", "eth0", 10), ("hub2", "eth0", 11), ("natA", "wan", 21), ("natB", "wan", 22)):
        if has_delay_line and device == "wan":
            _place_taps(lab, name[-1])
        else:
            there = lab.namespace(name)
            lab.links(
                "pub", [f"link add p{number} type veth peer name {device} netns {there}", f"link set p{number} up"]
            )
            lab.links("pub", [f"link set p{number} master br0"])
        addresses = [
            f"addr add 203.0.113.{number}/24 dev {device}",
            f"addr add 2001:db8::{number}/64 dev {device} nodad",
        ]
        lab.links(name, [*addresses, f"link set {device} up", "route add default via 203.0.113.1"])
    for home, number, letter in (("A", 1, "a"), ("B", 2, "b")):
        _build_home(lab, home, number, letter, kinds[home])
    routes = [f"route add 2001:db8:{letter}::/64 via 2001:db8::{21 + index}" for index, letter in enumerate("ab")]
    for name in ("hub1", "hub2"):
        lab.links(name, routes)
    lab.links("natA", routes[1:])
    lab.links("natB", routes[:1])


def _place_taps(lab: Lab, home: str) -> None:
    outer, inner = _tap_names(lab, home)
    for name, place, called in ((outer, "pub", outer), (inner, f"nat{home}", "wan")):
        for words in (["txqueuelen", "10000"], ["netns", lab.namespace(place), "name", called]):
            moved = _run(["ip", "link", "set", name, *words])
            if moved.returncode:
                raise RuntimeError(moved.stderr)
    lab.links("pub", [f"link set {outer} master br0", f"link set {outer} up"])


def _tap_names(lab: Lab, home: str) -> tuple[str, str]:
    return lab.namespace(f"{home}p"), lab.namespace(f"{home}w")


def _build_home(lab: Lab, home: str, number: int, letter: str, kind: str) -> None:
    router, host = f"nat{home}", f"host{home}"
    lab.links(router, [f"link add lan type veth peer name eth0 netns {lab.namespace(host)}", "link set lan up"])
    lab.links(router, [f"addr add 2001:db8:{letter}::1/64 dev lan nodad"])
    lab.links(host, ["link set eth0 up"])
    if kind == "ipv6":
        addresses = [f"addr add 2001:db8:{letter}::2/64 dev eth0 nodad"]
        lab.links(host, [*addresses, f"route add default via 2001:db8:{letter}::1"])
        lab.shell(router, _nft(_rules(kind, "")))
        return
    lab.links(router, [f"addr add 192.168.{number}.1/24 dev lan"])
    lab.links(host, [f"addr add 192.168.{number}.2/24 dev eth0", f"route add default via 192.168.{number}.1"])
    lab.shell(router, _nft(_rules(kind, f"192.168.{number}.2")))


def _nft(rules: str) -> str:
    return f"nft -f - <<'RULES'\n{rules}\nRULES"


@contextmanager
def open_lab(
    home_a: str, home_b: str, *, delay_ms: float = 0.0, rate_mbit: float = 0.0, loss: float = 0.0
) -> Iterator[Lab]:
    """A lab with these kinds of NAT, until the block ends. Delay (one way), rate and loss are those of each home."""
    lab = Lab(f"kv{os.getpid()}")
    wire: subprocess.Popen[str] | None = None
    try:
        if delay_ms or rate_mbit or loss:
            pairs = [word for home in "AB" for word in ("--pair", ":".join(_tap_names(lab, home)))]
            numbers = ["--delay-ms", str(delay_ms), "--rate-mbit", str(rate_mbit), "--loss", str(loss)]
            command = [sys.executable, str(Path(__file__).with_name("delay_line.py")), *pairs, *numbers]
            wire = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert wire.stdout is not None
            if wire.stdout.readline() != "ready\n":
                raise RuntimeError("the delay line did not start")
        _build(lab, {"A": home_a, "B": home_b}, has_delay_line=wire is not None)
        yield lab
    finally:
        if wire is not None:
            wire.terminate()
            wire.communicate()
        for name in NAMESPACES:
            _run(["ip", "netns", "del", lab.namespace(name)])


def inside(namespace: str, act: Callable[[], Result]) -> Result:
    """Runs a function in a thread whose sockets are of the namespace; raises what it raises."""
    outcome: list[Callable[[], Result]] = []

    def run() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        with Path("/run/netns", namespace).open() as file:
            if libc.setns(file.fileno(), CLONE_NEWNET):
                number = ctypes.get_errno()
                outcome.append(partial(_raise, OSError(number, os.strerror(number))))
                return
        try:
            result = act()
        except Exception as error:
            outcome.append(partial(_raise, error))
        else:
            outcome.append(lambda: result)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return outcome[0]()


def _raise(error: Exception) -> NoReturn:
    raise error
