"""Guests of js-libp2p at a real node: in Node.js over TCP and WebSockets, and the page in headless Chromium."""

from __future__ import annotations

import pytest
from phone_swarm import Browser, Load, Terminal, forced_swarm, invite, wait_until, workers_of

PAGE = "Linux, Chrome"


def serves(main, name):
    worker = workers_of(main).get(name)
    return worker is not None and worker["state"] == "proven" and worker["calls"] > 5 and worker["failures"] == 0


@pytest.mark.timeout(180)
def test_guests_join_serve_and_leave_and_no_token_changes(phone_packages, built_page, tmp_path):
    with forced_swarm(tmp_path) as main, Load(main) as load:
        for seed, tcp in ((1, True), (2, False)):
            name = "over tcp" if tcp else "over ws"
            with Terminal(phone_packages, tmp_path, main, seed, tcp=tcp) as terminal:
                wait_until(lambda name=name: serves(main, name), f"a guest {name} serves")
                assert terminal.leave() == 0
                assert terminal.told[-1]["fetchedBytes"] > 1_000_000
        with Browser(phone_packages, tmp_path / "profile") as browser:
            browser("open", invite(main))
            browser.wait_for(lambda shown: "serving" in shown["stages"] and shown["rows"] != "0", "the page serves")
            wait_until(lambda: serves(main, PAGE), "the coordinator counts on the page")
            shown = browser("look")
            assert shown["state"] == "Computing"
            assert "#" not in shown["url"]
            browser("click", "leave")
            browser.wait_for(lambda shown: shown["joined"] == "Left" and shown["words"] == "", "the page has left")
            assert not browser("problems")
        assert workers_of(main)[PAGE]["failures"] == 0
    assert load.answered > 0
    assert not load.bad
