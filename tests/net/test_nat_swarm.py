"""The whole program in two homes behind NATs, asked for answers without pause, while something breaks.

Minutes each, for root only. `pytest -m soak -s tests/net/test_nat_swarm.py` prints the figures.
"""

from __future__ import annotations

import signal
import socket
import statistics
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from nat_swarm import Homes, asked_homes, watch
from natlab import Lab, inside, open_lab, why_not

REASON = why_not()
pytestmark = [pytest.mark.soak, pytest.mark.timeout(900), pytest.mark.skipif(bool(REASON), reason=REASON)]
LINE = {"delay_ms": 20, "rate_mbit": 20}
LOSSY = {**LINE, "loss": 0.01}
FIRST_S = 120.0  # to begin with; the figures tell how long it took
LOOK_S = 0.2
CALM_S = 61.0  # who was away again and again rests (decide/absences); each test is about the first time
RUNS = 5
NETLINK_NETFILTER, DELETE_TRACKED = 12, 1 << 8 | 2  # linux/netlink.h, nfnetlink_conntrack.h: IPCTNL_MSG_CT_DELETE


@contextmanager
def serving(
    folder: Path, a: str, b: str, line: dict[str, float], *, expect: str = "direct", hubs: Sequence[str] = ("hub1",)
) -> Iterator[Homes]:
    """Homes whose worker serves, over the way that is expected. In the end no answer was wrong, none failed."""
    with open_lab(a, b, **line) as lab, asked_homes(lab, folder, hub_places=hubs) as homes:
        watch(homes, expect, FIRST_S)
        assert {"serving", f"connected: {expect}"} <= homes.timeline.seen.keys(), homes.timeline.seen
        yield homes
    assert (homes.burst.wrong, homes.burst.failed) == ([], [])


@pytest.fixture(scope="module")
def direct(tmp_path_factory) -> Iterator[Homes]:
    """Two homes that reach each other through a hole. To start the program takes longer than most of the tests here."""
    with serving(tmp_path_factory.mktemp("direct"), "cone", "cone", LINE) as homes:
        yield homes


@pytest.fixture(scope="module")
def relayed(tmp_path_factory) -> Iterator[Homes]:
    """Two homes that need a relay, and two hubs."""
    folder = tmp_path_factory.mktemp("relayed")
    with serving(folder, "symmetric", "symmetric", LINE, expect="relay", hubs=("hub1", "hub2")) as homes:
        yield homes


def seconds_until(seen: Callable[[], object], timeout_s: float = 120.0) -> float:
    began_at = time.monotonic()
    while not seen():
        assert time.monotonic() - began_at < timeout_s, f"not seen within {timeout_s:g} s"
        time.sleep(LOOK_S)
    return time.monotonic() - began_at


def path_to_worker(homes: Homes) -> str:
    members = homes.coordinator.status()["members"]
    return next((each["path"] for each in members if each["peer_id"] == homes.worker.ready["peer_id"]), "")


@contextmanager
def survived(homes: Homes, capsys, what: str) -> Iterator[None]:
    """What happens inside costs no answer, no proof and no trial; prints how long the worker then took to be back."""
    tried, failures = all_proven(homes), worker_of(homes)["failures"]
    time.sleep(CALM_S)
    answered = homes.burst.answered
    yield
    took_s = seconds_until(lambda: path_to_worker(homes) and worker_of(homes)["slices"])
    before = remote_pairs(homes)  # an answer that was begun before tells of pairs from before
    took_s += seconds_until(lambda: remote_pairs(homes) > before)
    time.sleep(3.0)
    after = worker_of(homes)
    with capsys.disabled():
        print(
            f"\n{what}: computes again after {took_s:.1f} s ({path_to_worker(homes)}); "
            f"{homes.burst.answered - answered} answers, {trial_pairs(homes) - tried} trial pairs more, "
            f"{after['failures'] - failures} failures more"
        )
    assert (homes.burst.wrong, homes.burst.failed) == ([], [])
    assert trial_pairs(homes) == tried
    assert after["failures"] == failures


def worker_of(homes: Homes) -> dict[str, Any]:
    (worker,) = homes.coordinator.status()["workers"]
    return worker


def remote_pairs(homes: Homes) -> int:
    return homes.coordinator.status()["fanout"]["remote_pairs"]


def trial_pairs(homes: Homes) -> int:
    return homes.coordinator.status()["fanout"]["trial_pairs"]


def all_proven(homes: Homes) -> int:
    """Waits until the trials are over; how many pairs they took."""
    slices = homes.coordinator.status()["model"]["slices"]

    def seen() -> bool:
        workers = homes.coordinator.status()["workers"]
        return (
            bool(workers)
            and len(workers[0]["slices"]) == slices
            and homes.worker.status()["worker"]["state"] == ("serving")
        )

    seconds_until(seen)
    last = -1
    while last != (last := trial_pairs(homes)):
        time.sleep(2.0)
    return last


def cut_for(lab: Lab, router: str, seconds: float) -> None:
    """Nothing passes a home's line for so long."""
    lab.cut(router)
    time.sleep(seconds)
    lab.mend(router)


def test_an_outage_of_the_workers_line(direct, capsys):
    with survived(direct, capsys, "20 s outage of the worker's line"):
        cut_for(direct.lab, "natB", 20)


def test_an_outage_of_the_coordinators_line(direct, capsys):
    with survived(direct, capsys, "30 s outage of the coordinator's line"):
        cut_for(direct.lab, "natA", 30)


def forget_mappings(lab: Lab, router: str) -> None:
    """What a router does that was restarted, or whose mappings have expired."""
    message = struct.pack("=IHHII", 20, DELETE_TRACKED, 1, 1, 0) + struct.pack("=BBH", socket.AF_UNSPEC, 0, 0)

    def send() -> None:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER) as netlink:
            netlink.send(message)

    inside(lab.namespace(router), send)


def test_mappings_that_both_routers_forget_are_made_anew(direct, capsys):
    with survived(direct, capsys, "all mappings of both routers forgotten"):
        for router in ("natA", "natB"):
            forget_mappings(direct.lab, router)


@pytest.mark.parametrize("who", ["worker", "coordinator"])
def test_a_machine_that_slept_for_thirty_seconds(direct, capsys, who):
    with survived(direct, capsys, f"the {who} was stopped for 30 s"):
        sleeper = direct.worker if who == "worker" else direct.coordinator
        sleeper.popen.send_signal(signal.SIGSTOP)
        time.sleep(30)
        sleeper.popen.send_signal(signal.SIGCONT)


@pytest.mark.parametrize(("host", "number"), [("hostB", 2), ("hostA", 1)])
def test_a_machine_that_gets_another_address(direct, capsys, host, number):
    with survived(direct, capsys, f"another address of {host}"):
        old, new = f"192.168.{number}.2/24", f"192.168.{number}.77/24"
        route = f"route add default via 192.168.{number}.1"
        direct.lab.links(host, [f"addr del {old} dev eth0", f"addr add {new} dev eth0", route])
        time.sleep(10)  # what was sent before still counts as unanswered for a while


def test_an_outage_of_a_line_over_which_a_relay_serves(relayed, capsys):
    with survived(relayed, capsys, "20 s outage of the worker's line, over a relay"):
        cut_for(relayed.lab, "natB", 20)


def test_a_relay_serves_for_as_long_as_it_is_asked_to(relayed, capsys):
    """Not that nothing is ever late on a busy machine, but that the worker goes on."""
    all_proven(relayed)
    answered, before, longest_s = relayed.burst.answered, remote_pairs(relayed), 0.0
    until = time.monotonic() + 300
    while time.monotonic() < until:
        now = remote_pairs(relayed)
        longest_s = max(longest_s, seconds_until(lambda now=now: remote_pairs(relayed) > now, 30.0))
    answers, pairs = relayed.burst.answered - answered, remote_pairs(relayed) - before
    with capsys.disabled():
        print(
            f"\nfive minutes over a relay: {answers} answers, {pairs} remote pairs, {longest_s:.1f} s without one at "
            f"most, {worker_of(relayed)['failures']} failures in all"
        )
    assert path_to_worker(relayed) == "relay"
    assert (relayed.burst.wrong, relayed.burst.failed) == ([], [])


def test_another_relay_takes_over_when_the_one_that_carries_dies(relayed, capsys):
    seconds_until(lambda: len(relayed.coordinator.status()["net"]["relays"]) == 2)
    with survived(relayed, capsys, "the relay that carried was killed"):
        next(hub for hub in relayed.hubs if hub.status()["net"]["carried"]).popen.kill()


PAIRS = [("cone", "cone"), ("remap", "remap"), ("remap", "cone"), ("ipv6", "ipv6"), ("forward", "cone")]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_joining_and_serving_with_figures(tmp_path, capsys, a, b):
    found: list[dict[str, float]] = []
    for number in range(RUNS):
        folder = tmp_path / str(number)
        folder.mkdir()
        with serving(folder, a, b, LOSSY) as homes:
            found.append(homes.timeline.seen)
    with capsys.disabled():
        for what in ("connected: direct", "proven", "serving"):
            took = [each[what] for each in found]
            print(f"\n{a}, {b}: {what}: median {statistics.median(took):.1f} s, worst {max(took):.1f} s of {RUNS}")
    assert all(each["connected: direct"] <= 10.0 and each["serving"] <= 20.0 for each in found)
