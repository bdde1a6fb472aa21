"""Every example is run by a test. Here: those that one short-lived node is enough for; what takes long is soak.

The others: tests/e2e/test_processes.py (local_swarm), tests/net/test_nat_swarm.py, tests/phone/test_phone_swarm.py,
tests/model/test_compare_llama_cpp.py. train_demo.py made the demo model; it takes 90 minutes, and the texts.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from flash_crowd import Sample, chart, verdict
from local_swarm import Process, node

import kvasir_node
from kvasir_node.base.settings import load_settings

ROOT = Path(kvasir_node.__file__).parent.parent
EXAMPLES = ROOT / "examples"
SERVER = EXAMPLES / "headless_server"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A node with the settings of headless_server; its places are others."""
    folder = tmp_path_factory.mktemp("examples")
    with node(folder, "node", "--config", str(SERVER / "config.toml")) as running:
        yield running


@pytest.fixture
def check(tmp_path: Path) -> Callable[[str], tuple[int, str]]:
    """Runs check.sh about a URL: (exit code, what it said)."""
    program = tmp_path / "kvasir-node"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m kvasir_node "$@"\n')
    program.chmod(0o755)

    def run(url: str) -> tuple[int, str]:
        env = os.environ | {"KVASIR_NODE": str(program)}
        command = [SERVER / "check.sh", "--url", url]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert done.stderr == ""
        return done.returncode, done.stdout

    return run


def run_example(name: str, *options: str, timeout_s: float = 60) -> str:
    """Its output; it must exit 0."""
    command = [sys.executable, str(EXAMPLES / name), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_openais_client_gets_what_its_example_shows(served):
    said = run_example("openai_client.py", "--url", f"{served.ready['api']}/v1")
    assert [line.split()[0] for line in said.splitlines()] == ["models", "chat", "streamed", *["logprobs"] * 3, "json"]
    assert "the same text: True" in said


def test_openais_client_says_in_a_line_that_no_node_is_there():
    command = [sys.executable, str(EXAMPLES / "openai_client.py"), "--url", "http://127.0.0.1:9/v1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == ["error: http://127.0.0.1:9/v1: Connection error."]


def test_the_settings_of_the_server_fit_the_unit_and_the_container(served):
    assert served.ready["roles"] == ["coordinator", "hub"]
    settings = load_settings(env={}, file=SERVER / "config.toml")
    compose = (SERVER / "compose.yml").read_text()
    grace_s = re.findall(r"stop_grace_period: (\d+)s", compose)
    assert float(grace_s[0]) > settings.node.drain_timeout_s
    named = dict(re.findall(r"^      (KVASIR_\w+): (.+)$", compose, re.MULTILINE))
    load_settings(env=named)
    assert set(named) == {"KVASIR_API__LISTEN", "KVASIR_API__KEY"}
    assert (SERVER / "../.." / re.findall(r"dockerfile: (\S+)", compose)[0]).exists()


def test_the_check_of_the_server_tells_well_from_unwell(served, check):
    code, said = check(served.ready["api"])
    assert (code, said[:12]) == (0, "OK: SERVING ")
    assert httpx.post(f"{served.ready['api']}/kvasir/v1/drain").status_code == 200  # the last test that asks it
    code, said = check(served.ready["api"])
    assert (code, said[:20]) == (2, "CRITICAL: unhealthy:")
    code, said = check("http://127.0.0.1:9")
    assert (code, said[:26]) == (2, "CRITICAL: nobody answers: ")


def crowd(*rows: tuple[float, int, int, int]) -> list[Sample]:
    return [Sample(at_s, round(10 * at_s), wanted, workers, pairs) for at_s, wanted, workers, pairs in rows]


WELL = crowd((0, 0, 0, 0), (1, 0, 0, 0), (3, 12, 0, 0), (5, 12, 3, 90), (9, 0, 0, 200))


def test_a_crowd_that_went_well_is_told_from_others():
    assert verdict(WELL, came_s=2) == []
    assert verdict(WELL, came_s=4) == ["demand before the crowd came"]
    assert verdict(WELL[:-1], came_s=2) == ["demand or workers at the end"]
    assert len(verdict(crowd((0, 0, 0, 0), (9, 0, 0, 0)), came_s=2)) == 3


def test_a_crowd_is_drawn():
    assert chart(WELL * 3, "Flash crowd").startswith(b"\x89PNG")


def test_every_example_is_shown_and_tested():
    shown = (ROOT / "docs" / "examples.md").read_text()
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for example in (*EXAMPLES.glob("*.py"), SERVER):
        assert f"(../examples/{example.name}" in shown, example
        assert example.stem in tests, example


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_flash_crowd(tmp_path):
    said = run_example("flash_crowd.py", "--png", str(tmp_path / "crowd.png"), timeout_s=280)
    assert said.splitlines()[-1] == "PASSED"
    assert (tmp_path / "crowd.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_two_models():
    assert run_example("two_models.py", timeout_s=380).splitlines()[-1] == "PASSED"
