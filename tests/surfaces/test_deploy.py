"""The files of docs/deploy: that they name what exists, and that the unit fits the program."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from surfaces_helpers import serve, settings_with

import kvasir_node
from kvasir_node.base.errors import DataError, UsageError
from kvasir_node.base.settings import Settings, load_settings
from kvasir_node.surfaces.exits import RESTART
from kvasir_node.surfaces.fake_node import FakeNode

DEPLOY = Path(kvasir_node.__file__).parent.parent / "docs" / "deploy"
UNIT = DEPLOY / "kvasir-node.service"
OF_PROMETHEUS = {"instance"}  # a label that it adds itself


def unit() -> dict[str, list[str]]:
    """Its keys, each with all its values."""
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text().splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


def test_the_unit_restarts_what_asks_for_it_and_not_what_would_fail_again():
    keys = unit()
    assert keys["RestartForceExitStatus"] == keys["SuccessExitStatus"] == [str(RESTART)]
    assert keys["RestartPreventExitStatus"] == [f"{UsageError.exit_code} {DataError.exit_code}"]
    assert float(keys["TimeoutStopSec"][0]) > Settings().node.drain_timeout_s


def test_the_unit_starts_the_program_as_it_is_and_hides_the_ticket(run, tmp_path):
    words = unit()["ExecStart"][0].split()
    assert words[0].endswith("/kvasir-node")
    (tmp_path / "config.toml").write_text("version = 1\n")
    places = {"/etc/kvasir-node/config.toml": tmp_path / "config.toml", "/var/lib/kvasir-node": tmp_path}
    code, _, err = run(*(str(places.get(word, word)) for word in words[1:]), "--dry-run")
    assert (code, err) == (0, "")
    assert unit()["StandardOutput"] == ["null"]


@pytest.mark.parametrize("file", ["kvasir-node.service", "Dockerfile"])
def test_settings_in_the_environment_are_some_that_there_are(file):
    named = dict(re.findall(r"(KVASIR_[A-Z]+__[A-Z_]+)=(\S+)", (DEPLOY / file).read_text()))
    assert "KVASIR_LOG__FORMAT" in named
    load_settings(env=named)


def test_the_unit_is_one_for_systemd(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not here")
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/kvasir-node/bin/kvasir-node", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def expressions() -> list[str]:
    """What the dashboard and the alerts ask Prometheus."""
    dashboard = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked += [each["query"]["query"] for each in dashboard["templating"]["list"] if each["type"] == "query"]
    alerts = (DEPLOY / "kvasir-node-alerts.yml").read_text()
    return asked + re.findall(r"expr: (?:>-\n\s+)?(.+)", alerts)


def labels_of_metrics() -> dict[str, set[str]]:
    """As docs/api.md lists them."""
    found: dict[str, set[str]] = {}
    rows = re.findall(r"^\| (`kvasir_.*?) \| (\w+) \| (.*) \|$", (DEPLOY.parent / "api.md").read_text(), re.MULTILINE)
    for names, kind, words in rows:
        labels = {"le"} if kind == "histogram" else set(re.findall(r"`(\w+)`[^`:]*: ", words))
        found |= dict.fromkeys(re.findall(r"`(kvasir_\w+)`", names), labels)
    return found


async def test_the_list_of_metrics_is_that_of_the_api():
    async with serve(FakeNode(settings_with())) as served:
        text = (await served.client.get("/metrics")).text
    assert set(re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE)) == set(labels_of_metrics())


def test_the_dashboard_and_the_alerts_ask_only_for_metrics_and_labels_that_there_are():
    known = labels_of_metrics()
    asked: set[str] = set()
    for expression in expressions():
        metrics = {name.removesuffix("_bucket") for name in re.findall(r"kvasir_[a-z_]+", expression)}
        assert metrics <= set(known), expression
        labels = {label for group in re.findall(r"by \(([a-z_, ]+)\)", expression) for label in group.split(", ")}
        assert labels <= {label for name in metrics for label in known[name]} | OF_PROMETHEUS, expression
        asked |= metrics
    assert asked == set(known), "each metric has a place on the dashboard"


def test_the_dashboard_has_no_panel_upon_another():
    panels = json.loads((DEPLOY / "grafana-dashboard.json").read_text())["panels"]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len({panel["id"] for panel in panels}) == len(panels)
