"""`doctor`: each trouble is named, with what to do."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from kvasir_node.base.settings import GIB, load_settings
from kvasir_node.surfaces import doctor
from kvasir_node.surfaces.doctor import FAIL, OK, WARN, Check, doctor_text, examine

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
    assert {found[name].level for name in ("version", "ports", "clock", "reachability", "hubs")} == {OK}
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


@pytest.mark.parametrize(("free", "level"), [(GIB // 2, FAIL), (2 * GIB, WARN), (100 * GIB, OK)])
def test_a_full_disk_is_told(tmp_path, free, level):
    assert doctor._disk(tmp_path, free).level == level


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
    assert {check["name"] for check in document["checks"]} >= {"disk", "memory", "kernels", "port", "clock", "hubs"}
