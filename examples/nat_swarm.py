"""A swarm behind home routers: a hub on a public address, a coordinator behind one NAT, a worker behind another.

    sudo python examples/nat_swarm.py --a cone --b remap --delay-ms 20 --rate-mbit 20

Builds two homes and the network between them on this machine (tests/net/natlab.py: root, iproute2 and nftables), starts
the three nodes as processes, and asks the coordinator for answers without pause. It holds every other expert, so the
worker is needed from the first token. Prints what happens when: the place at the relay, the connection through it, the
first experts that the worker computes, and the hole in the NATs, if there can be one. Exits 0 only if every answer
equalled the one from before the worker came, and the way between the two became what `--expect` says.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "net"))
from natlab import FORWARDED_PORT, Lab, inside, open_lab, why_not

PROMPTS = ("She was not in the room", "The evening was spent in", "My dear sister", "The letter was from London")
KINDS = ("cone", "remap", "symmetric", "forward", "ipv6")
API_PORT = 9480
LOOK_S = 0.2
STILL_S = 3.0  # how long it goes on once all was seen


@dataclass(slots=True)
class Home:
    """A running node in a namespace of the lab."""

    lab: Lab
    place: str
    popen: subprocess.Popen[str]
    ready: dict[str, Any]

    def get(self, path: str, body: dict[str, Any] | None = None, timeout_s: float = 60.0) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = Request(f"http://127.0.0.1:{API_PORT}{path}", data, {"content-type": "application/json"})

        def ask() -> dict[str, Any]:
            with urlopen(request, timeout=timeout_s) as answer:
                return json.loads(answer.read())

        return inside(self.lab.namespace(self.place), ask)

    def status(self) -> dict[str, Any]:
        return self.get("/kvasir/v1/status")

    def complete(self, prompt: str, tokens: int) -> dict[str, Any]:
        return self.get("/v1/completions", {"model": "demo", "prompt": prompt, "max_tokens": tokens, "temperature": 0})


@contextmanager
def home(lab: Lab, folder: Path, place: str, role: str, ticket: str = "", **settings: str) -> Iterator[Home]:
    """A headless node in a namespace, with a data directory of its own; stopped, and waited for, at the end."""
    command = [sys.executable, "-P", "-m", "kvasir_node", "--data-dir", str(folder / place), "--log-level", "info"]
    command += ["up", "--headless", "--name", place, "--role", role, "--api", f"127.0.0.1:{API_PORT}"]
    for family in ("ip4/0.0.0.0", "ip6/::"):
        command += ["--listen", f"/{family}/tcp/{FORWARDED_PORT}"]
    environment = {**os.environ, "KVASIR_NETWORK__JOIN": ticket, **settings}
    with (folder / f"{place}.log").open("w") as log:
        popen = subprocess.Popen(
            lab.command(place, command), stdout=subprocess.PIPE, stderr=log, text=True, env=environment
        )
    assert popen.stdout is not None
    try:
        line = popen.stdout.readline()
        if not line:
            raise SystemExit(f"{place} did not start:\n{(folder / f'{place}.log').read_text()[-2000:]}")
        yield Home(lab, place, popen, json.loads(line))
    finally:
        popen.send_signal(signal.SIGTERM)
        try:
            popen.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            popen.kill()
            popen.communicate()


@dataclass(slots=True)
class Burst:
    """Requests without pause, each compared with the answer from before the worker came."""

    coordinator: Home
    solo: dict[str, str]
    tokens: int
    answered: int = 0
    remote_pairs: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    stop: bool = False

    def run(self) -> None:
        while not self.stop:
            prompt = PROMPTS[self.answered % len(PROMPTS)]
            try:
                answer = self.coordinator.complete(prompt, self.tokens)
            except OSError as error:
                self.failed.append(str(error))
                time.sleep(LOOK_S)
                continue
            self.answered += 1
            self.remote_pairs += answer["kvasir"]["remote_pairs"]
            if answer["choices"][0]["text"] != self.solo[prompt]:
                self.wrong.append(prompt)


@dataclass(slots=True)
class Timeline:
    started_at: float = field(default_factory=time.monotonic)
    seen: dict[str, float] = field(default_factory=dict)

    def note(self, what: str, detail: str = "") -> None:
        if what not in self.seen:
            self.seen[what] = time.monotonic() - self.started_at
            print(f"{self.seen[what]:7.2f} s  {what:<22} {detail}", flush=True)

    def look(self, coordinator: dict[str, Any], worker: dict[str, Any], remote_pairs: int) -> None:
        path = {member["peer_id"]: member["path"] for member in coordinator["members"]}.get(worker["peer_id"])
        net = coordinator["net"]
        if net["relays"]:
            self.note("place at a relay", f"coordinator: {net['reachability']}, NAT {net['nat']}")
        if path:
            self.note(f"connected: {path}", f"worker: {worker['net']['reachability']}, NAT {worker['net']['nat']}")
        if any(each["state"] == "proven" for each in coordinator["workers"]):
            self.note("proven", f"{worker['worker']['bytes_fetched'] / 1e6:.1f} MB fetched")
        if remote_pairs:
            self.note("serving", f"first of {remote_pairs} pairs, {path}")


@dataclass(slots=True)
class Homes:
    """A swarm that is asked for answers without pause; `hubs` in the order of their places."""

    lab: Lab
    hubs: list[Home]
    coordinator: Home
    worker: Home
    burst: Burst
    timeline: Timeline


@contextmanager
def asked_homes(lab: Lab, folder: Path, *, tokens: int = 16, hub_places: Sequence[str] = ("hub1",)) -> Iterator[Homes]:
    """The worker is the last to come. All hubs join the first one, the others find them through it."""
    with ExitStack() as stack:
        hubs = [stack.enter_context(home(lab, folder, hub_places[0], "hub"))]
        ticket = hubs[0].ready["ticket"]
        hubs += [stack.enter_context(home(lab, folder, place, "hub", ticket)) for place in hub_places[1:]]
        need = {"KVASIR_COORDINATOR__HOLD": "half"}
        coordinator = stack.enter_context(home(lab, folder, "hostA", "coordinator", ticket, **need))
        solo = {each: coordinator.complete(each, tokens)["choices"][0]["text"] for each in PROMPTS}
        worker = stack.enter_context(home(lab, folder, "hostB", "worker", ticket))
        homes = Homes(lab, hubs, coordinator, worker, Burst(coordinator, solo, tokens), Timeline())
        thread = threading.Thread(target=homes.burst.run)
        thread.start()
        try:
            yield homes
        finally:
            homes.burst.stop = True
            thread.join()


def watch(homes: Homes, expect: str, timeout_s: float) -> None:
    """Notes what happens until the worker serves and is reached as expected."""
    wanted = {"serving", f"connected: {expect}"}
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        homes.timeline.look(homes.coordinator.status(), homes.worker.status(), homes.burst.remote_pairs)
        if wanted <= homes.timeline.seen.keys():
            until = min(until, time.monotonic() + STILL_S)
            wanted = {"nothing more"}
        time.sleep(LOOK_S)


def run(lab: Lab, folder: Path, options: argparse.Namespace) -> bool:
    print(f"home A: {options.a}, home B: {options.b}", flush=True)
    with asked_homes(lab, folder, tokens=options.tokens) as homes:
        watch(homes, options.expect, options.timeout_s)
    burst = homes.burst
    remote = f"{burst.remote_pairs} pairs computed by the worker"
    print(f"{burst.answered} answers, {len(burst.wrong)} wrong, {len(burst.failed)} failed; {remote}", flush=True)
    reached = {"serving", f"connected: {options.expect}"} <= homes.timeline.seen.keys()
    return reached and not burst.wrong and not burst.failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--a", choices=KINDS, default="cone", help="the coordinator's router")
    parser.add_argument("--b", choices=KINDS, default="cone", help="the worker's router")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="one way, of each home's line")
    parser.add_argument("--rate-mbit", type=float, default=0.0)
    parser.add_argument("--loss", type=float, default=0.0, help="share of the frames, each way")
    parser.add_argument("--expect", choices=("direct", "relay"), default="direct")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--timeout-s", type=float, default=60.0)
    parser.add_argument("--keep", help="a folder for the logs")
    options = parser.parse_args()
    if reason := why_not():
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory(prefix="kvasir-nat-") as folder:
        place = Path(options.keep or folder)
        with open_lab(
            options.a, options.b, delay_ms=options.delay_ms, rate_mbit=options.rate_mbit, loss=options.loss
        ) as lab:
            return 0 if run(lab, place, options) else 1


if __name__ == "__main__":
    raise SystemExit(main())
