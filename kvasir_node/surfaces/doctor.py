"""`doctor`: what may be wrong with this machine and its node, in words, with what to do about each.

It does not repair anything. What only a running node knows (how it is reached, whose clock differs) is read from its
status; the machine is looked at by surfaces/doctor_machine, so that it also helps when no node starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from kvasir_node.base.settings import Settings
from kvasir_node.surfaces.doctor_machine import FAIL, OK, WARN, Check, examine_machine
from kvasir_node.surfaces.words import clean, counted

Document = Mapping[str, Any]
CLOCK_WRONG_S = 2.0  # worth a word: logs and times on screens are off
_NO_UPNP = "not asked for: it is switched off (network.upnp), or no port is open to other machines over IPv4"
_NO_NODE = "no node runs here, so this is not known"


def examine(settings: Settings, status: Document | None, peers: Document | None) -> tuple[Check, ...]:
    """All checks; `status` and `peers` are those of the running node, None when none runs. Blocks for some seconds."""
    return (
        *examine_machine(settings, is_running=status is not None),
        *(_without_node() if status is None else _of_node(settings, status, peers or {})),
    )


def _without_node() -> Iterator[Check]:
    for name in ("clock", "reachability", "upnp", "hairpin", "hubs"):
        yield Check(name, WARN, _NO_NODE, "start one with `kvasir-node up`, and ask again")


def _of_node(settings: Settings, status: Document, peers: Document) -> Iterator[Check]:
    """The node's own warnings too, but for those that a check tells of."""
    warnings = [clean(str(each)) for each in status.get("warnings") or ()]
    net = status.get("net") or {}
    yield _clock(net, settings.market.clock_skew_max_s, [each for each in warnings if "clock skew" in each])
    yield _reachability(net)
    yield _upnp(net)
    yield _hairpin(net)
    yield _hubs(status, peers)
    for warning in warnings:
        if "clock skew" not in warning:
            yield Check("node", WARN, warning, "see `kvasir-node status`")


def _clock(net: Document, most_s: float, skews: list[str]) -> Check:
    """Against the hubs' clocks, less the way there and back."""
    remedy = "set the clock: switch on time synchronisation (NTP) here, and at the hub if others see the same of it"
    if skews:
        return Check("clock", FAIL, "; ".join(skews), remedy)
    ahead_s = net.get("clock_ahead_s")
    if ahead_s is None:
        return Check("clock", OK, "no hub's clock is known to be far from this one's")
    doubt_s = float(net.get("clock_doubt_s", 0.0))
    side = "ahead of" if ahead_s > 0 else "behind"
    says = f"{abs(ahead_s):.2f} s {side} the hubs' (± {doubt_s:.2f} s)"
    if abs(ahead_s) - doubt_s > most_s / 2:
        return Check("clock", FAIL, f"{says}; beyond {most_s:.0f} s what this node says is refused", remedy)
    if abs(ahead_s) - doubt_s > CLOCK_WRONG_S:
        return Check("clock", WARN, says, remedy)
    return Check("clock", OK, says)


def _upnp(net: Document) -> Check:
    state, says = str(net.get("upnp", "off")), clean(str(net.get("upnp_says") or ""), 200)
    if state == "mapped":
        return Check("upnp", OK, f"the router lets connections to {says} in")
    if state == "failed":
        remedy = "switch UPnP on in the router, or forward the port of network.listen (TCP) to this machine there"
        return Check("upnp", WARN, f"no port of the router is open for this node: {says}", remedy)
    return Check("upnp", OK, _NO_UPNP if state == "off" else "not needed")


def _hairpin(net: Document) -> Check:
    """Whether machines of the same home can use the outside address that tickets hold."""
    state = str(net.get("hairpin", "unknown"))
    if state == "no":
        says = "the router does not lead this node's own outside address back to it"
        remedy = "others in the same home join by its local address or, on the same network, by the secret alone"
        return Check("hairpin", WARN, says, remedy)
    if state == "yes":
        return Check("hairpin", OK, "this node's outside address works from inside, too")
    return Check("hairpin", OK, "no outside address of a router is known to lead here")


def _reachability(net: Document) -> Check:
    """Who can connect to this node, and how those do who cannot."""
    reach, nat = str(net.get("reachability", "unknown")), str(net.get("nat", "unknown"))
    relays = len(net.get("relays") or ())
    behind = {"none": "", "unknown": ""}.get(nat, f", behind a {clean(nat)} NAT")
    through = f"; {counted(relays, 'hub')} {'relays' if relays == 1 else 'relay'} for it" if relays else ""
    reached = [clean(str(each), 80) for each in net.get("reached") or ()]
    at = f"; hubs reached it at {reached[0]}" if reached else ""
    says = f"reachability {clean(reach)}{behind}{at}{through}"
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
