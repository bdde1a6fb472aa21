"""Guests of js-libp2p at a real node: in Node.js over TCP and WebSockets, and the page in headless Chromium."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack, contextmanager

import pytest
from local_swarm import Process, node
from phone_swarm import Browser, Load, Terminal, forced_swarm, invite, wait_until, workers_of

PAGE = "Linux, Chrome"


@pytest.fixture(scope="module")
def busy_swarm(tmp_path_factory):
    """A node whose work is shared at any loss, and requests that never stop; at the end none of them was wrong."""
    with forced_swarm(tmp_path_factory.mktemp("swarm")) as main:
        with Load(main) as load:
            # A page hears no gossip: whoever polls before anything is wanted comes again half a minute later.
            wait_until(lambda: main.status()["hub"]["demand"], "demand is told")
            yield main
        assert load.answered > 0
        assert not load.bad


def serves(main, name):
    worker = workers_of(main).get(name)
    return worker is not None and worker["state"] == "proven" and worker["calls"] > 5 and worker["failures"] == 0


@pytest.mark.parametrize("tcp", [pytest.param(True, id="tcp", marks=pytest.mark.soak), pytest.param(False, id="ws")])
def test_a_guest_in_node_joins_serves_and_leaves(phone_packages, busy_swarm, tmp_path, tcp):
    name = "over tcp" if tcp else "over ws"
    with Terminal(phone_packages, tmp_path, busy_swarm, 1 + tcp, tcp=tcp) as terminal:
        wait_until(lambda: serves(busy_swarm, name), f"a guest {name} serves")
        assert terminal.leave() == 0
        assert terminal.told[-1]["fetchedBytes"] > 1_000_000


@pytest.mark.timeout(180)
def test_the_page_joins_serves_rests_and_leaves(phone_packages, built_page, busy_swarm, tmp_path):
    with Browser(phone_packages, tmp_path / "profile") as browser:
        browser("open", invite(busy_swarm))
        browser.wait_for(lambda shown: "serving" in shown["stages"] and shown["rows"] != "0", "the page serves")
        wait_until(lambda: serves(busy_swarm, PAGE), "the coordinator counts on the page")
        shown = browser("look")
        assert shown["state"] == "Computing"
        assert "#" not in shown["url"]  # the code has served
        browser("hide", True)
        browser.wait_for(lambda shown: not shown["stages"] and shown["state"] == "Resting", "a hidden page rests")
        browser("hide", False)
        browser.wait_for(lambda shown: "serving" in shown["stages"], "a page that is seen again goes on")
        assert browser("look")["reused"] != "0.0 MB"
        browser("click", "leave")
        browser.wait_for(lambda shown: shown["joined"] == "Left" and shown["words"] == "", "the page has left")
        assert not browser("problems")
    assert workers_of(busy_swarm).get(PAGE, {"failures": 0})["failures"] == 0


@pytest.mark.soak
def test_a_coordinator_that_listens_nowhere_is_served_through_its_hub(phone_packages, tmp_path):
    with ExitStack() as stack:
        hub = stack.enter_context(node(tmp_path, "hub", "--role", "hub"))
        hidden = stack.enter_context(hidden_coordinator(tmp_path, hub))
        assert not hidden.ready["listen"]  # so nothing but the hub leads to it
        load = stack.enter_context(Load(hidden))
        terminal = stack.enter_context(Terminal(phone_packages, tmp_path, hub, 3, tcp=False))
        wait_until(lambda: serves(hidden, "over ws"), "a guest serves through the relay")
        assert terminal.leave() == 0
    assert load.answered > 0
    assert not load.bad


@contextmanager
def hidden_coordinator(folder, hub):
    command = [sys.executable, "-P", "-m", "kvasir_node", "--data-dir", folder / "hidden", "up", "--headless"]
    command += ["--role", "coordinator", "--api", "127.0.0.1:0", "--set", "network.listen=", "--slots", "2"]
    command += ["--set", "fanout.when=forced"]
    environment = {**os.environ, "KVASIR_NETWORK__JOIN": hub.ready["ticket"]}
    popen = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    with popen, popen.stdout as lines:
        try:
            yield Process("hidden", popen, json.loads(lines.readline()))
        finally:
            popen.terminate()
