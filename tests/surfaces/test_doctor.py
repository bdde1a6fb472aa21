"""`doctor`: each trouble is named, with what to do."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from kvasir_node.base.ids import cid_of
from kvasir_node.base.settings import GIB, load_settings
from kvasir_node.roles.library import open_library
from kvasir_node.surfaces.doctor import doctor_text, examine
from kvasir_node.surfaces.doctor_machine import FAIL, OK, WARN, Check, disk_check

STATUS: dict[str, Any] = {
    "warnings": [],
    "hub": None,
    "net": {"reachability": "public", "nat": "none", "relays": []},
}
PEERS = {"members": [{"peer_id": "x", "name": "hub", "roles": ["hub"]}]}


@pytest.fixture
def settings(tmp_path):
    return load_settings(flags={"node.data_dir": str(tmp_path / "data")})


def checks_of(settings, status=STATUS, peers=PEERS) -> dict[str, Check]:
    return {check.name: check for check in examine(settings, status, peers)}


def test_a_healthy_node_has_nothing_to_do(settings):
    found = checks_of(settings)
    names = ("version", "ports", "blocks", "torch", "clock", "reachability", "upnp", "hairpin", "hubs")
    assert {found[name].level for name in names} == {OK}
    assert found["hubs"].says == "1 hub connected"
    assert all(bool(check.remedy) is (check.level != OK) for check in found.values())


@pytest.mark.parametrize(
    ("net", "level", "named"),
    [
        ({"reachability": "private", "nat": "cone", "relays": []}, FAIL, "join a hub that relays"),
        ({"reachability": "private", "nat": "cone", "relays": ["a", "b"]}, OK, ""),
        ({"reachability": "private", "nat": "symmetric", "relays": ["a"]}, WARN, "forward the port"),
        ({"reachability": "lan", "nat": "unknown", "relays": []}, OK, ""),
        ({"reachability": "unknown", "nat": "unknown", "relays": []}, WARN, "ask again in a minute"),
        ({}, WARN, "ask again in a minute"),
    ],
)
def test_how_a_node_is_reached_has_its_remedy(settings, net, level, named):
    found = checks_of(settings, {**STATUS, "net": net})["reachability"]
    assert found.level == level
    assert named in found.remedy
    assert bool(found.remedy) is bool(named)


def test_clocks_hubs_and_other_warnings_are_told(settings):
    warnings = ["the demand table of hub x is refused: clock skew: 700 s", "this worker is \x1b[2J paused"]
    found = checks_of(settings, {**STATUS, "warnings": warnings}, {"members": []})
    assert (found["clock"].level, found["hubs"].level, found["node"].level) == (FAIL, FAIL, WARN)
    assert "NTP" in found["clock"].remedy
    assert "--join TICKET" in found["hubs"].remedy
    assert "\x1b" not in found["node"].says
    assert checks_of(settings, {**STATUS, "hub": {}}, {})["hubs"].says == "this node is a hub"


@pytest.mark.parametrize(
    ("ahead_s", "doubt_s", "level", "says"),
    [
        (0.2, 0.01, OK, "0.20 s ahead of the hubs' (± 0.01 s)"),
        (-3.0, 0.05, WARN, "3.00 s behind the hubs'"),
        (3.0, 1.5, OK, "± 1.50 s"),
        (400.0, 0.05, FAIL, "beyond 600 s what this node says is refused"),
        (None, 0.0, OK, "no hub's clock"),
    ],
)
def test_a_clock_is_compared_with_the_hubs(settings, ahead_s, doubt_s, level, says):
    net = {**STATUS["net"], "clock_ahead_s": ahead_s, "clock_doubt_s": doubt_s}
    found = checks_of(settings, {**STATUS, "net": net})["clock"]
    assert (found.level, says in found.says) == (level, True)
    assert ("NTP" in found.remedy) is (level != OK)


@pytest.mark.parametrize(
    ("name", "net", "level", "says"),
    [
        ("upnp", {"upnp": "mapped", "upnp_says": "198.51.100.7 port 9481"}, OK, "198.51.100.7 port 9481"),
        ("upnp", {"upnp": "failed", "upnp_says": "no router \x1b[2J offers"}, WARN, "no router"),
        ("upnp", {"upnp": "unused"}, OK, "not needed"),
        ("upnp", {"upnp": "off"}, OK, "network.upnp"),
        ("hairpin", {"hairpin": "yes"}, OK, "works from inside"),
        ("hairpin", {"hairpin": "no"}, WARN, "does not lead"),
        ("hairpin", {}, OK, "no outside address"),
        ("reachability", {"reachability": "public", "reached": ["/ip4/198.51.100.7/tcp/9481"]}, OK, "/tcp/9481"),
    ],
)
def test_what_the_router_does_is_told(settings, name, net, level, says):
    found = checks_of(settings, {**STATUS, "net": net})[name]
    assert (found.level, says in found.says) == (level, True)
    assert bool(found.remedy) is (level != OK)
    assert "\x1b" not in found.says


def test_a_device_that_is_not_there_and_too_many_threads_are_told(tmp_path):
    import torch

    def torch_check(**flags: str) -> Check:
        given = {"node.data_dir": str(tmp_path), **{f"node.{key}": value for key, value in flags.items()}}
        return checks_of(load_settings(flags=given))["torch"]

    assert torch_check().level == OK
    assert torch_check(threads="1024").level == WARN
    if not torch.cuda.is_available():
        assert torch_check(device="cuda:0").level == FAIL


def test_a_damaged_block_is_found(settings, tmp_path):
    store, _ = open_library(settings)
    cid = cid_of(b"right")
    store.put(cid, b"right")
    assert checks_of(settings)["blocks"].says == "1 block looked at, all as their addresses promise"
    (file,) = (each for each in (tmp_path / "data").rglob(str(cid)))
    file.write_bytes(b"wrong")
    found = checks_of(settings)["blocks"]
    assert (found.level, "kvasir-node verify" in found.remedy) == (FAIL, True)


@pytest.mark.parametrize(("free", "level"), [(GIB // 2, FAIL), (2 * GIB, WARN), (100 * GIB, OK)])
def test_a_full_disk_is_told(tmp_path, free, level):
    assert disk_check(tmp_path, free).level == level


def test_a_port_in_use_is_told_when_no_node_runs(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        flags = {"node.data_dir": str(tmp_path), "network.listen": f"/ip4/127.0.0.1/tcp/{port}", "api.listen": ""}
        (found,) = (check for check in examine(load_settings(flags=flags), None, None) if check.name == "port")
    assert (found.level, found.says) == (
        FAIL,
        f"127.0.0.1 port {port} cannot be listened on: another program has it",
    )
    assert "--listen" in found.remedy


def test_the_text_has_each_remedy_below_its_trouble():
    text = doctor_text((Check("clock", OK, "right"), Check("disk", FAIL, "full", "free some")))
    assert text.splitlines() == ["ok   clock         right", "fail disk          full", " " * 19 + "→ free some"]


def test_the_verb_exits_4_when_something_fails_and_prints_json(run, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}"
        config = tmp_path / "config.toml"
        config.write_text(f'version = 1\n[network]\nlisten = ["{listen}"]\n[api]\nlisten = "127.0.0.1:0"\n')
        code, out, _ = run("doctor", "--json", "--config", str(config), "--data-dir", str(tmp_path))
    document = json.loads(out)
    assert code == 4
    assert document["schema"] == "kvasir.doctor/1"
    checks = document["checks"]
    assert [check["name"] for check in checks] == [
        *("version", "disk", "memory", "torch", "kernels", "port", "port", "blocks"),
        *("clock", "reachability", "upnp", "hairpin", "hubs"),
    ]
    assert all(check.keys() == {"name", "level", "says", "remedy"} for check in checks)
    assert {check["level"] for check in checks} <= {OK, WARN, FAIL}
    assert all(check["remedy"] for check in checks if check["level"] != OK)
