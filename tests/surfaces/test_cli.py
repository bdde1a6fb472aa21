"""The command line: verbs, exit codes, where words and data go, and that asking is cheap."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest
from typer.testing import CliRunner

from kvasir_node import __version__
from kvasir_node.surfaces import cli, talk
from kvasir_node.surfaces.fake_node import FAKE_PEER, FAKE_PIECES, busy_snapshot
from kvasir_node.surfaces.talk import Conversation

SCRIPT = Path(__file__).with_name("fake_up.py")
NOWHERE = "http://127.0.0.1:9"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The data directory of a running fake node."""
    folder = str(tmp_path_factory.mktemp("node"))
    with subprocess.Popen([sys.executable, str(SCRIPT), folder], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield folder
        process.terminate()


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_bare_and_help_print_help_and_start_nothing(run, arguments, tmp_path):
    code, out, err = run(*arguments)
    assert (code, err) == (0, "")
    for verb in ("up", "run", "status", "ticket", "add", "config"):
        assert f"\n  {verb} " in out
    assert not (tmp_path / "data").exists()


def test_version(run):
    assert run("--version") == (0, f"kvasir-node {__version__}\n", "")


def test_typers_own_runner_sees_the_same_app():
    result = CliRunner().invoke(cli.app, ["up", "--help"])
    assert result.exit_code == 0
    flags = "role headless join api no-api listen slots queue memory device threads name set new-swarm new-secret"
    for flag in [*flags.split(), "dry-run"]:
        assert f"--{flag}" in result.output


USAGE_ERRORS = [
    (("frobnicate",), "frobnicate"),
    (("up", "--frobnicate"), "--frobnicate"),
    (("up", "--slots"), "--slots"),
    (("up", "--slots", "many", "--dry-run"), "coordinator.slots"),
    (("up", "--set", "worker.quiet_hours=late", "--dry-run"), "worker.quiet_hours"),
    (("up", "--role", "boss", "--dry-run"), "boss"),
    (("up", "--set", "coordinator.slots", "--dry-run"), "section.key=value"),
    (("up", "--set", "coordinator.slot=1", "--dry-run"), "did you mean coordinator.slots"),
    (("up", "--set", "coordinater.slots=1", "--dry-run"), "did you mean coordinator.slots?"),
    (("up", "--set", "fanout.slots=1", "--dry-run"), "did you mean coordinator.slots?"),
    (("stats",), "Did you mean 'status'?"),
    (("run", "demo", " "), "the prompt is empty"),
    (("up", "--set", "api.key=x", "--dry-run"), "KVASIR_API__KEY"),
    (("up", "--slots", "1", "--set", "coordinator.slots=2", "--dry-run"), "give it once"),
    (("up", "--api", "127.0.0.1:1", "--no-api"), "exclude"),
    (("up", "--api", "0.0.0.0:9480", "--headless"), "KVASIR_API__KEY"),
    (("up", "--api", "here", "--headless"), "HOST:PORT"),
    (("--config", "/nowhere/x.toml", "status"), "config init"),
    (("--log-level", "loud", "status"), "log.level"),
    (("run", "--temperature", "9", "demo", "hi"), "temperature"),
    (("status", "--url", "http://[::1"), "--url"),
]


@pytest.mark.parametrize(("arguments", "named"), USAGE_ERRORS)
def test_usage_errors_are_one_line_and_exit_2(run, arguments, named):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert named in err


@pytest.mark.parametrize(
    "arguments", [("status",), ("peers",), ("demand",), ("ticket",), ("id",), ("run", "demo", "hi", "--url", NOWHERE)]
)
def test_no_node_is_exit_3_and_says_how_to_start_one(run, arguments):
    if arguments[0] in ("status", "peers", "demand"):
        arguments = (*arguments, "--url", NOWHERE)
    code, out, err = run(*arguments)
    assert (code, out) == (3, "")
    assert "kvasir-node up" in err
    assert err.count("\n") == 1


def test_reading_verbs_find_the_node_of_the_data_directory(run, data_dir):
    for verb, schema in (("status", "kvasir.status/1"), ("peers", "kvasir.peers/1"), ("demand", "kvasir.demand/1")):
        code, out, err = run(verb, "--json", "--data-dir", data_dir)
        assert (code, err, json.loads(out)["schema"]) == (0, "", schema)
    assert run("ticket", "--data-dir", data_dir) == (0, "kvasir1fake\n", "")
    assert run("id", "--data-dir", data_dir) == (0, f"{FAKE_PEER}\n", "")


def test_status_shows_warnings_first(run, data_dir):
    code, out, _ = run("--data-dir", data_dir, "status")
    lines = out.splitlines()
    assert code == 0
    assert lines[0] == f"warning: {busy_snapshot().warnings[0]}"
    assert any(line.startswith("slots    0/4 busy") for line in lines)
    assert any("1 proven  1 suspect  1 trial" in line for line in lines)


def test_a_warning_is_unhealthy_only_for_a_strict_check(run, data_dir):
    assert run("status", "--check", "--data-dir", data_dir)[0] == 0
    assert run("status", "--check", "--strict", "--data-dir", data_dir)[0] == 4


def test_peers_and_demand_as_text(run, data_dir):
    assert "cellar" in run("peers", "--data-dir", data_dir)[1]
    assert "3:8-15" in run("demand", "--data-dir", data_dir)[1]


def test_pause_and_resume_tell_how_the_worker_is_then(run, data_dir):
    assert run("pause", "--data-dir", data_dir) == (0, "paused: paused by its owner\n", "")
    assert "paused (paused by its owner)" in run("status", "--data-dir", data_dir)[1]
    code, out, _ = run("resume", "--json", "--data-dir", data_dir)
    assert (code, json.loads(out)["worker"]["state"]) == (0, "idle")


def test_run_streams_one_answer_to_stdout(run, data_dir):
    assert run("run", "--data-dir", data_dir, "demo", "hello") == (0, "".join(FAKE_PIECES) + "\n", "")
    assert run("run", "--data-dir", data_dir, "--max-tokens", "1", "demo", "hello")[1] == FAKE_PIECES[0] + "\n"


def test_run_bounds_an_answer_unless_it_is_told_to_go_on(run, data_dir, monkeypatch):
    asked: list[dict[str, Any]] = []

    class Recording(Conversation):
        def ask(self, text: str, out: TextIO) -> None:
            asked.append(self.options)

    monkeypatch.setattr(talk, "Conversation", Recording)
    for flags in ((), ("--max-tokens", "9"), ("--max-tokens", "0")):
        assert run("run", "--data-dir", data_dir, *flags, "demo", "hello")[0] == 0
    assert asked == [{"max_tokens": 256}, {"max_tokens": 9}, {}]


def test_run_takes_the_prompt_from_a_pipe(data_dir):
    command = [sys.executable, "-m", "kvasir_node", "run", "--data-dir", data_dir]
    done = subprocess.run(command, input="hello", capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "".join(FAKE_PIECES) + "\n", "")


def test_run_of_an_unknown_model_says_what_is_served(run, data_dir):
    code, out, err = run("run", "--data-dir", data_dir, "nope", "hello")
    assert (code, out) == (2, "")
    assert "served: demo" in err


def test_dry_run_prints_what_would_hold_and_starts_nothing(run, tmp_path, monkeypatch):
    monkeypatch.setenv("KVASIR_API__KEY", "s3cret")
    arguments = "up demo --role hub,worker --role coordinator --listen /ip4/127.0.0.1/tcp/0 --queue 9 --no-api"
    code, out, err = run(
        *arguments.split(), "--memory", "1G", "--set", "fanout.enabled=no", "--dry-run", "--name", "n", "--threads", "2"
    )
    settings = json.loads(out)["settings"]
    expected = {
        "coordinator.model": "demo",
        "node.roles": ["hub", "worker", "coordinator"],
        "network.listen": ["/ip4/127.0.0.1/tcp/0"],
        "coordinator.queue": 9,
        "api.listen": "",
        "worker.memory_bytes": 2**30,
        "fanout.enabled": False,
        "node.name": "n",
        "node.threads": 2,
    }
    assert (code, err) == (0, "")
    assert {key: settings[key] for key in expected} == {k: {"value": v, "origin": "flag"} for k, v in expected.items()}
    assert settings["api.key"] == {"value": True, "origin": "env"}
    assert "s3cret" not in out
    assert not (tmp_path / "data").exists()


def test_config_init_show_and_path(run, tmp_path):
    path = tmp_path / "config" / "kvasir-node" / "config.toml"
    assert run("config", "path") == (0, f"{path}\n", "")
    assert run("config", "init") == (0, f"{path}\n", "")
    code, _, err = run("config", "init")
    assert (code, str(path) in err) == (2, True)
    path.write_text("version = 1\n[coordinator]\nslots = 7\n")
    code, out, _ = run("config", "show")
    assert "slots = 7  # file" in out
    assert json.loads(run("config", "show", "--json")[1])["settings"]["coordinator.slots"]["origin"] == "file"


def test_the_form_of_the_log_is_a_flag(run, tmp_path):
    code, out, _ = run("--data-dir", str(tmp_path), "--log-format", "json", "config", "show", "--json")
    assert code == 0
    assert json.loads(out)["settings"]["log.format"] == {"value": "json", "origin": "flag"}
    code, _, err = run("--data-dir", str(tmp_path), "--log-format", "xml", "config", "show")
    assert code == 2
    assert "json" in err
    assert "xml" in err


def test_global_flags_may_stand_before_or_after_the_verb():
    rest = ["status", "--json"]
    assert cli.hoisted(["status", "--data-dir", "d", "--json", "--no-color"]) == [
        "--data-dir",
        "d",
        "--no-color",
        *rest,
    ]
    assert cli.hoisted(["--log-level=debug", *rest]) == ["--log-level=debug", *rest]
    assert cli.hoisted(["run", "--", "demo", "--no-color"]) == ["run", "--", "demo", "--no-color"]
    assert cli.hoisted(["status", "--data-dir"]) == ["--data-dir", "status"]


def test_a_bug_is_exit_1_with_its_traceback(run, monkeypatch):
    monkeypatch.setattr(cli.Globals, "settings", lambda *_: 1 / 0)
    code, out, err = run("status")
    assert (code, out) == (1, "")
    assert "ZeroDivisionError" in err
    assert "please report it" in err


CHEAP = "--help|--version|up --help|status --url {0}|ps --url {0}|stop|ticket|id|config show|ls|up --dry-run"


def test_asking_is_cheap(tmp_path):
    """No verb that only asks may load the model's or the network's libraries."""
    code = (
        "import sys; from kvasir_node.surfaces.cli import run_command\n"
        "libraries = {'torch', 'transformers', 'libp2p', 'starlette', 'hypercorn', 'numpy', 'httpx', 'rich'}\n"
        "for verb in sys.argv[2:]:\n"
        "    run_command(['--data-dir', sys.argv[1], *verb.split()])\n"
        "    for heavy in libraries & set(sys.modules):\n"
        "        print('HEAVY', verb, heavy)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path), *CHEAP.format(NOWHERE).split("|")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "HEAVY" not in done.stdout
    assert done.stdout.count("Usage:") == 2, done.stderr  # all of them were run
